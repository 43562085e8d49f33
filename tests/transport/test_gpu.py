"""The order in which a GPU's copies, the end of a read and the look at its stamp come."""

import ctypes
import os
from queue import Queue

import numpy as np
import pytest

from kvd.cuda.device import device
from kvd.cuda.memory import Mapping
from kvd.errors import BadRequest
from kvd.plan import Descriptors
from kvd.protocol.export import ExportedPool
from kvd.transport.interface import Landed, ReadRequest
from kvd.transport.samehost.copies import CopyThreads, Memory, Read
from kvd.transport.samehost.gpu import Gpu
from tests.support.gpu import over_standin
from tests.support.patience import MOMENT

LENGTH = 2 << 20
ONE, ALL = np.zeros(1, np.uint64), np.full(1, LENGTH, np.uint64)


def pools():
    """The two sides of a read: one of 7s, one of zeros."""
    source, target = (Mapping.allocate(device(0), LENGTH) for _ in range(2))
    source.write(0, b"\7" * LENGTH)
    target.zero()
    return source, target


def last_byte(memory):
    """What the CPU sees, without a word to the GPU, which would begin to copy then."""
    return ctypes.c_uint8.from_address(memory.base + LENGTH - 1).value


@over_standin(hold=2, cpu_visible=1)
def test_copies_have_landed_when_the_call_returns():
    source, target = pools()
    gpu = Gpu(device(0).uuid)
    gpu.copy(ONE + np.uint64(target.base), ONE + np.uint64(source.base), ALL)
    assert last_byte(target) == 7


@over_standin(hold=2, cpu_visible=1)
def test_the_stamp_is_looked_at_after_the_last_byte_has_landed():
    source, target = pools()
    gpu, events = Gpu(device(0).uuid), Queue()
    sides = [Memory(memory.base, LENGTH, device(0).uuid) for memory in (source, target)]
    request = ReadRequest(1, "peer", target.base, source.base, Descriptors(ONE, ONE, ALL), stamp=8)
    threads = CopyThreads(1, events.put)
    threads.start()
    threads.add(Read(request, *sides, gpu.copy, stamp=lambda _address: last_byte(target)))
    ended = events.get(timeout=MOMENT)
    threads.stop()
    assert isinstance(ended, Landed), ended
    assert ended.stamp == 7


@over_standin()
def test_what_a_peer_lends_is_checked_to_be_an_export_before_the_driver_asks_it_anything():
    gpu, asked = Gpu(device(0).uuid), []
    Mapping.map_descriptor = lambda *_, **__: asked.append(1)
    pool = ExportedPool(bytes(8), LENGTH, LENGTH, device(0).uuid)
    for descriptor, kind in ((os.open("/dev/null", os.O_RDONLY), "0o20000, device 0x103"), (os.pipe()[0], "0o10000")):
        with pytest.raises(BadRequest, match=f"of file type {kind}"):
            gpu.map_pool(pool, descriptor)
    assert not asked
