import pytest

from tests.vllm.testbed.client import Completion

TOLERANCE = 1e-3
"""Of a logarithm: float32 sums in another order, where requests are batched otherwise, differ by a hundredth of it."""


def assert_same(got: Completion, want: Completion) -> None:
    """The same tokens, each as likely as before: nearly right KV can give the right token, but not its probability.

    Where two tokens were equally likely within the tolerance, the other one may have been taken; then the rest differs.
    """
    assert len(got.tokens) == len(want.tokens)
    for position, (ours, theirs) in enumerate(zip(got.tokens, want.tokens, strict=True)):
        assert got.logprobs[position] == pytest.approx(want.logprobs[position], abs=TOLERANCE)
        if ours != theirs:
            assert want.margins[position] < TOLERANCE, (position, got.tokens, want.tokens)
            return
