import pytest

from kvd.engines.demo.workload import SingleEngine, make_prompts, pool_tokens
from tests.engines.demo.sides import generate_by_recomputation


def test_the_first_prompts_have_the_lengths_that_go_wrong_most_easily():
    lengths = [len(prompt) for prompt in make_prompts(9, 32, 1024, seed=0)]
    assert lengths[:6] == [128, 1, 16, 32, 63, 33]
    assert len(set(lengths)) == 9


def test_a_seed_gives_the_same_prompts_again_and_another_seed_does_not():
    assert make_prompts(8, 16, 1024, seed=3) == make_prompts(8, 16, 1024, seed=3)
    assert make_prompts(8, 16, 1024, seed=3) != make_prompts(8, 16, 1024, seed=4)


def test_fewer_prompts_may_be_asked_for():
    assert [len(prompt) for prompt in make_prompts(2, 16, 1024, seed=0)] == [64, 1]


@pytest.mark.parametrize("sizes", [(16, 16), (16, 64), (1, 4096)])
def test_a_pool_is_whole_blocks_of_either_size_and_holds_two_sequences(sizes):
    tokens = pool_tokens(3000, 100, *sizes)
    assert all(tokens % size == 0 for size in sizes)
    assert tokens >= 2 * 3100


def test_the_single_engine_gives_the_tokens_of_a_full_recomputation_for_one_prompt_after_another(model):
    single = SingleEngine(model.config, 64)
    for prompt in make_prompts(4, 8, 1024, seed=1):
        assert single.generate(prompt, 5) == generate_by_recomputation(model, prompt, 5)
