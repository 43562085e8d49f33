import pytest

from kvd.engines.vllm_lab.client import Completion

TOLERANCE = 1e-3
"""Of a logarithm: float32 sums in another order, where requests are batched otherwise, differ by a hundredth of it."""


LATENT_TOLERANCE = 0.05
"""With latent attention vLLM's prefill of a longer prompt gives other KV for its beginning; wrong KV is off by more."""


def assert_same(got: Completion, want: Completion, tolerance: float = TOLERANCE) -> None:
    """The same tokens, each as likely as before: nearly right KV can give the right token, but not its probability."""
    assert got.tokens == want.tokens
    assert got.logprobs == pytest.approx(want.logprobs, abs=tolerance)
