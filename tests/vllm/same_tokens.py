import pytest

from kvd.engines.vllm_lab.client import Completion

TOLERANCE = 1e-3
"""Of a logarithm: float32 sums in another order, where requests are batched otherwise, differ by a hundredth of it."""


def assert_same(got: Completion, want: Completion) -> None:
    """The same tokens, each as likely as before: nearly right KV can give the right token, but not its probability."""
    assert got.tokens == want.tokens
    assert got.logprobs == pytest.approx(want.logprobs, abs=TOLERANCE)
