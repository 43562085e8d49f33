import pytest

from kvd.engines.vllm_lab.client import Completion

TOLERANCE = 1e-3
"""Of a logarithm: float32 sums in another order, where requests are batched otherwise, differ by a hundredth of it."""


LATENT_TOLERANCE = 0.1
"""With latent attention vLLM's prefill of a longer prompt gives other KV for its beginning, on a CPU."""


def assert_same(got: Completion, want: Completion, tolerance: float = TOLERANCE) -> None:
    """The same tokens, each as likely as before: nearly right KV can give the right token, but not its probability.

    Where two tokens were equally likely within the tolerance, the other one may have been taken; then the rest differs.
    """
    assert len(got.tokens) == len(want.tokens)
    for position, (ours, theirs) in enumerate(zip(got.tokens, want.tokens, strict=True)):
        assert got.logprobs[position] == pytest.approx(want.logprobs[position], abs=tolerance)
        if ours != theirs:
            assert want.margins[position] < tolerance, (position, got.tokens, want.tokens)
            return
