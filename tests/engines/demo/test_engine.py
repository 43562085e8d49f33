import pytest
import torch

from kvd.engines.demo.model import Model
from kvd.layout.presets import LAYOUTS
from tests.engines.demo.sides import Side, copy_tokens, generate_by_recomputation, make_side

COUNT = 6


def prompt_of(length: int) -> list[int]:
    return torch.randint(0, 1024, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def handed_over(model: Model, source: Side, target: Side, prompt: list[int], count: int = COUNT) -> list[int]:
    """Prefill on one side, the blocks copied, decoding on the other."""
    source.blocks.allocate("before", 40)  # so that the two sides name different blocks
    source_table = source.blocks.allocate("request", len(prompt))
    token = source.engine.prefill(prompt, source_table)
    table = target.blocks.allocate("request", len(prompt) + count)
    copy_tokens(source, source_table, target, table, len(prompt))
    tokens = [token]
    while len(tokens) < count:
        tokens.append(target.engine.decode(tokens[-1], len(prompt) + len(tokens) - 1, table))
    return tokens


@pytest.mark.parametrize("length", [1, 5, 16, 17, 48, 61])
def test_paged_prefill_and_decode_give_the_tokens_of_a_full_recomputation(model, length):
    prompt = prompt_of(length)
    side = make_side(model)
    table = side.blocks.allocate("request", length + COUNT)
    tokens = [side.engine.prefill(prompt, table)]
    while len(tokens) < COUNT:
        tokens.append(side.engine.decode(tokens[-1], length + len(tokens) - 1, table))
    assert tokens == generate_by_recomputation(model, prompt, COUNT)


@pytest.mark.parametrize("consumer", ["flash-hnd", "flash-nhd", "flashinfer-hnd", "cross-layer-hnd", "packed-nhd"])
@pytest.mark.parametrize("producer", ["flash-hnd", "flashinfer-nhd", "cross-layer-heads-outside"])
def test_tokens_do_not_depend_on_the_layouts_of_the_two_sides(model, producer, consumer):
    prompt = prompt_of(21)
    sides = make_side(model, layout=producer), make_side(model, layout=consumer)
    assert handed_over(model, *sides, prompt) == generate_by_recomputation(model, prompt, COUNT)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_named_layout_holds_a_sequence(model, layout):
    prompt = prompt_of(33)
    side = make_side(model, layout=layout)
    assert handed_over(model, side, make_side(model), prompt) == generate_by_recomputation(model, prompt, COUNT)


@pytest.mark.parametrize(("producer", "consumer"), [(16, 32), (32, 16), (8, 64), (64, 8)])
def test_tokens_do_not_depend_on_the_block_sizes_of_the_two_sides(model, producer, consumer):
    prompt = prompt_of(50)
    sides = make_side(model, block_tokens=producer), make_side(model, block_tokens=consumer)
    assert handed_over(model, *sides, prompt) == generate_by_recomputation(model, prompt, COUNT)


@pytest.mark.parametrize(("producer", "consumer"), [(1, 2), (2, 1), (4, 8), (8, 4), (16, 1), (1, 16), (16, 8)])
def test_tokens_do_not_depend_on_the_tp_sizes_of_the_two_sides(model, producer, consumer):
    prompt = prompt_of(21)
    sides = make_side(model, tp=producer), make_side(model, tp=consumer)
    assert handed_over(model, *sides, prompt) == generate_by_recomputation(model, prompt, COUNT)


@pytest.mark.parametrize("lost", [0, 1, 2, 3])
def test_one_block_that_did_not_arrive_changes_the_tokens(model, lost):
    prompt = prompt_of(61)
    source, target = make_side(model), make_side(model)
    table = source.blocks.allocate("request", len(prompt))
    token = source.engine.prefill(prompt, table)
    here = target.blocks.allocate("request", len(prompt) + COUNT)
    copy_tokens(source, table, target, here, len(prompt))
    for keys, values in target.ranks[0].layers.values():
        keys[here[lost]] = 0.0
        values[here[lost]] = 0.0
    tokens = [token]
    while len(tokens) < COUNT:
        tokens.append(target.engine.decode(tokens[-1], len(prompt) + len(tokens) - 1, here))
    assert tokens != generate_by_recomputation(model, prompt, COUNT)


def test_two_models_of_one_seed_are_the_same_and_of_another_seed_are_not(model):
    prompt = prompt_of(12)
    config = model.config
    same = Model(config)
    other = Model(type(config)(layers=config.layers, hidden=config.hidden, intermediate=config.intermediate, seed=1))
    expected = generate_by_recomputation(model, prompt, COUNT)
    assert generate_by_recomputation(same, prompt, COUNT) == expected
    assert generate_by_recomputation(other, prompt, COUNT) != expected
