"""Copies by the kernel, on a GPU where there is one (TESTS_ON_GPU=1)."""

from importlib import resources
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.cuda.copies import CopyKernel, CopyTable
from kvd.cuda.device import Stream, device
from kvd.cuda.memory import Mapping
from kvd.errors import DeviceError
from kvd.limits import KIB, MIB
from tests.cuda.ptx import Program
from tests.support.gpu import over_standin

TABLE = 1 << 40
PLACES = 2 * MIB // (8 * KIB)


@over_standin()
def test_copies_of_any_multiple_of_16_bytes_land_where_they_should_and_nowhere_else():
    rng = np.random.default_rng(3)
    lengths = np.concatenate([np.arange(16, 8 * KIB, 16 * 7), [8 * KIB], rng.integers(1, 512, 100) * 16])[:PLACES]
    lengths = lengths.astype(np.uint64)
    sources, targets = (rng.permutation(PLACES)[: len(lengths)].astype(np.uint64) * np.uint64(8 * KIB) for _ in "st")
    content = rng.integers(1, 255, 2 * MIB, np.uint8)
    expected = np.zeros_like(content)
    for source, target, length in zip(sources.tolist(), targets.tolist(), lengths.tolist(), strict=True):
        expected[target : target + length] = content[source : source + length]
    there, here = (Mapping.allocate(device(0), 2 * MIB) for _ in range(2))
    there.write(0, content.tobytes())
    here.zero()
    kernel = CopyKernel(device(0))
    with device(0).current(), Stream(device(0)) as stream:
        table = CopyTable(len(lengths))
        kernel.copy(stream, table, targets + np.uint64(here.base), sources + np.uint64(there.base), lengths)
        stream.synchronize()
        table.close()
    assert here.read(0, 2 * MIB) == expected.tobytes()


@given(
    lengths=st.lists(st.integers(0, 300).map(lambda units: 16 * units), min_size=1, max_size=3),
    long=st.integers(4090, 12400).map(lambda units: 16 * units),
    threads=st.sampled_from([32, 96, 256]),
    pieces=st.integers(1, 4),
)
@settings(max_examples=15)
def test_the_text_of_the_kernel_copies_every_byte_once_however_it_is_launched(lengths, long, threads, pieces):
    lengths = [*lengths, long]
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    rows = np.array([(s + 16, s + 48, n) for s, n in zip(starts, lengths, strict=True)], np.uint64).tobytes()
    content = np.random.default_rng(len(rows) + threads).integers(0, 255, sum(lengths) + 64, np.uint8).tobytes()
    stored, count = bytearray(len(content)), np.zeros(len(content), int)

    def load(address, size):
        space, at = (rows, address - TABLE) if address >= TABLE else (content, address)
        assert 0 <= at <= len(space) - size
        return space[at : at + size]

    def store(address, data):
        stored[address : address + len(data)] = data
        count[address : address + len(data)] += 1

    program = Program(resources.files("kvd.cuda").joinpath("copy.ptx").read_text())
    for x, y, thread in product(range(len(lengths)), range(pieces), range(threads)):
        special = {"%ctaid.x": x, "%ctaid.y": y, "%nctaid.y": pieces, "%tid.x": thread, "%ntid.x": threads}
        program.run(TABLE, special, load, store)
    written = slice(16, 16 + sum(lengths))
    assert bytes(stored[written]) == content[48 : 48 + sum(lengths)]
    assert (count[written] == 1).all()
    assert count.sum() == sum(lengths)


@over_standin()
def test_the_kernel_takes_multiples_of_16_alone():
    kernel = CopyKernel(device(0))
    even, odd = np.array([0, 64], np.uint64), np.array([16, 24], np.uint64)
    assert kernel.takes(even, even, even)
    for addresses in ((odd, even, even), (even, odd, even), (even, even, odd)):
        assert not kernel.takes(*addresses)


@over_standin(no_compiler=1)
def test_a_driver_without_a_compiler_says_so():
    with pytest.raises(DeviceError, match="JIT_COMPILER_NOT_FOUND"):
        CopyKernel(device(0))
