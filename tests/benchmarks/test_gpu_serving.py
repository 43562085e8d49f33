"""What the step `vllm` of `python -m benchmarks.gpu` takes for an error; `tests/vllm/test_gpu_step.py` runs it."""

import pytest

from benchmarks.gpu.serving import Engine, check_memory, check_pulls, check_tokens, make_prompt
from kvd.processes import Processes

PROMPTS = [make_prompt(3), make_prompt(20)]


def test_prompts_end_alike_so_that_only_their_kv_blocks_tell_them_apart():
    assert PROMPTS[0][-1] == PROMPTS[1][-1]
    assert [len(prompt) for prompt in PROMPTS] == [3, 20]


def test_a_token_that_differs_from_the_single_engine_s_is_an_error_that_names_the_prompt():
    check_tokens(PROMPTS, [[1, 2], [3, 4]], [[1, 2], [3, 4]])
    with pytest.raises(AssertionError, match="prompt of 20 tokens"):
        check_tokens(PROMPTS, [[1, 2], [3, 4]], [[1, 2], [3, 5]])


def test_equal_answers_show_nothing():
    with pytest.raises(AssertionError, match="whatever the KV blocks"):
        check_tokens(PROMPTS, [[1, 2], [1, 2]], [[1, 2], [1, 2]])


def test_a_decode_engine_may_compute_the_last_token_of_each_prompt_and_no_more():
    check_pulls(PROMPTS, 2 + 19, {"done": 2})
    with pytest.raises(AssertionError, match="20 tokens of at least 21"):
        check_pulls(PROMPTS, 20, {"done": 2})
    with pytest.raises(AssertionError, match="'failed': 1"):
        check_pulls(PROMPTS, 2 + 19, {"done": 1, "failed": 1})


def test_a_cache_that_torch_allocated_for_an_engine_with_kvd_is_an_error():
    here, elsewhere = ({"layers": 4, "layers in torch's memory": count} for count in (4, 0))
    check_memory({"single": here, "prefill": elsewhere, "decode": elsewhere})
    with pytest.raises(AssertionError, match="'decode'"):
        check_memory({"single": here, "prefill": elsewhere, "decode": here})
    with pytest.raises(AssertionError, match="'single'"):
        check_memory({"single": elsewhere, "prefill": elsewhere, "decode": elsewhere})


@pytest.mark.real
def test_an_engine_that_ends_says_why(tmp_path):
    with Processes(tmp_path) as processes:
        engine = Engine(processes, tmp_path, "decode", {"model": str(tmp_path / "none")})
        with pytest.raises(AssertionError, match=r"(?s)'decode' ended; the end of its log:.*Error"):
            engine.read()
