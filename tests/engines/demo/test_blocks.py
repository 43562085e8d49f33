import pytest
import torch

from kvd.engines.demo.paged import BlockManager


def test_a_request_gets_as_many_blocks_as_its_tokens_fill():
    blocks = BlockManager(8, 16)
    assert [len(blocks.allocate(str(tokens), tokens)) for tokens in (1, 16, 17, 48)] == [1, 1, 2, 3]
    assert blocks.can_allocate(16)
    assert not blocks.can_allocate(17)


def test_more_than_is_free_is_refused_and_takes_nothing():
    blocks = BlockManager(2, 16)
    with pytest.raises(ValueError, match="needs 3 blocks, 2 are free"):
        blocks.allocate("r", 33)
    assert blocks.can_allocate(32)


def test_a_request_cannot_hold_two_tables():
    blocks = BlockManager(2, 16)
    blocks.allocate("r", 1)
    with pytest.raises(ValueError, match="holds blocks already"):
        blocks.allocate("r", 1)


def test_no_block_is_lost_or_held_twice_over_many_requests():
    draws = torch.randint(1, 40, (500,), generator=torch.Generator().manual_seed(0)).tolist()
    blocks = BlockManager(32, 4)
    held: list[str] = []
    for step, tokens in enumerate(draws):
        if blocks.can_allocate(tokens):
            blocks.allocate(str(step), tokens)
            held.append(str(step))
        elif held:
            blocks.free(held.pop(tokens % len(held)))
        taken = [block for table in blocks._tables.values() for block in table]
        assert sorted([*blocks._free, *taken]) == list(range(blocks.num_blocks))
