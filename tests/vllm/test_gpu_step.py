"""The step `vllm` of `python -m benchmarks.gpu` on a CPU: with pools in host memory, without CUDA graphs."""

import pytest

from benchmarks.gpu.serving import ENGINE, compare
from tests.vllm.testbed.catalog import BLOCK


@pytest.mark.slow
def test_the_step_for_gpus_finds_the_tokens_of_a_single_engine_and_counts_what_was_pulled():
    answers = compare("cpu", (53, 5), {**ENGINE, "block_size": BLOCK, "enforce_eager": True}, {})
    assert answers["pulls done"] == 2
    assert answers["tokens pulled"] >= 52 + 4
    assert answers["bytes pulled"] > 0
    assert [engine["engine"] for engine in answers["engines"]] == ["single", "prefill", "decode"]
