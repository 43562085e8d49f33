"""What a daemon makes of the pools that another one of its host lends: which it maps, and who waits for that."""

import asyncio
import contextlib
import fcntl
import itertools
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from structlog.testing import capture_logs

from kvd import limits
from kvd.errors import BadRequest, DeviceError, ErrorCode, Unavailable
from kvd.memory.memfd import SEALS, MemfdProvider
from kvd.net.stream import FrameStream
from kvd.protocol.codec import encode
from kvd.protocol.export import ExportAddress, Exported, ExportedPool
from kvd.transport.interface import PeerAdded, PeerFailed, Region
from kvd.transport.samehost import devices, importer
from kvd.transport.samehost.devices import Mappings
from kvd.transport.samehost.importer import import_pools
from kvd.transport.samehost.lent import MappedPool, map_host_pool
from tests.support.patience import MOMENT, PATIENCE
from tests.transport.test_samehost_hostile import SIZE, TOKEN, Agent


def memfd(*, sparse: bool) -> int:
    descriptor = os.memfd_create("pool", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, SIZE)
    if not sparse:
        os.posix_fallocate(descriptor, 0, SIZE)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    return descriptor


@contextlib.contextmanager
def exporter_that_sends(
    path: Path, pools: list[ExportedPool], *, sparse: bool = False, one_file: bool = False
) -> Iterator[ExportAddress]:
    """An exporter that lends these pools, whatever it is asked."""
    files = [memfd(sparse=sparse) for _ in pools[: 1 if one_file else None]]

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def send() -> FrameStream:
            stream = FrameStream(listener.accept()[0])
            with contextlib.suppress(BrokenPipeError):  # whoever refuses a pool may have hung up already
                for pool, file in zip(pools, itertools.cycle(files), strict=False):
                    stream.send(encode(pool), (file,))
                stream.send(encode(Exported(bytes(8), bytes(8))))
            return stream

        with ThreadPoolExecutor(1) as thread:
            sending = thread.submit(send)
            yield ExportAddress("x", "this", str(path), TOKEN)
            sending.result().close()
    for file in files:
        os.close(file)


def mapped(name: str) -> int:
    return Path("/proc/self/maps").read_text(encoding="utf-8").count(name)


def test_two_pools_of_one_address_are_refused_and_nothing_stays_mapped(tmp_path: Path) -> None:
    before = mapped("memfd:pool")
    pool = ExportedPool((4096).to_bytes(8, "little"), SIZE, SIZE)
    with exporter_that_sends(tmp_path / "x", [pool, pool]) as address, pytest.raises(BadRequest, match="0x1000"):
        import_pools(address, map_host_pool)
    assert mapped("memfd:pool") == before


def test_one_file_is_not_lent_at_many_addresses_until_those_of_this_process_are_used_up(tmp_path: Path) -> None:
    before = mapped("memfd:pool")
    pools = [ExportedPool(number.to_bytes(8, "little"), SIZE, SIZE) for number in (4096, 8192)]
    lent = exporter_that_sends(tmp_path / "x", pools, one_file=True)
    with lent as address, pytest.raises(BadRequest, match="0x2000 is of a file that another one came with"):
        import_pools(address, map_host_pool)
    assert mapped("memfd:pool") == before


def test_a_pool_without_its_memory_is_refused(tmp_path: Path) -> None:
    pool = ExportedPool((4096).to_bytes(8, "little"), SIZE, SIZE)
    lent = exporter_that_sends(tmp_path / "x", [pool], sparse=True)
    with lent as address, pytest.raises(BadRequest, match="0 of them in memory"):
        import_pools(address, map_host_pool)


def test_more_pools_than_a_daemon_has_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.limits.MAX_POOLS", 2)
    before = mapped("memfd:pool")
    pools = [ExportedPool(number.to_bytes(8, "little"), SIZE, SIZE) for number in range(3)]
    with exporter_that_sends(tmp_path / "x", pools) as address, pytest.raises(BadRequest, match="more than 2 pools"):
        import_pools(address, map_host_pool)
    assert mapped("memfd:pool") == before


def test_pools_of_peers_leave_the_last_descriptors_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Which number it gets depends on what other threads of the tests' process close at the moment.
    monkeypatch.setattr("kvd.transport.samehost.lent.is_scarce", lambda _descriptor: True)
    pool = ExportedPool((4096).to_bytes(8, "little"), SIZE, SIZE)
    before = mapped("memfd:pool")
    with (
        exporter_that_sends(tmp_path / "x", [pool]) as address,
        pytest.raises(Unavailable, match="Too many open files"),
    ):
        import_pools(address, map_host_pool)
    assert mapped("memfd:pool") == before


def test_what_mapping_takes_does_not_count_as_the_exporters_delay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def slowly(pool: ExportedPool, descriptor: int) -> MappedPool:
        nonlocal now
        now += 2 * PATIENCE
        return map_host_pool(pool, descriptor)

    monkeypatch.setattr(limits, "IMPORT_SECONDS", PATIENCE)
    monkeypatch.setattr(importer, "time", SimpleNamespace(monotonic=lambda: now))
    pools = [ExportedPool(number.to_bytes(8, "little"), SIZE, SIZE) for number in range(2)]
    with exporter_that_sends(tmp_path / "x", pools) as address:
        imported = import_pools(address, slowly)
        assert imported.find(0)
        assert imported.find(1)
        imported.hang_up()


@contextlib.asynccontextmanager
async def peer_with_two_pools(folder: Path, consumer: Agent) -> AsyncIterator[None]:
    """A peer that `consumer` has added; it ends with the block, and stops on a thread as in a daemon."""
    pools = [MemfdProvider().allocate("lent", SIZE) for _ in range(2)]
    producer = Agent(folder, "producer")
    for number, pool in enumerate(pools):
        producer.transport.register(number, Region(pool.base, SIZE, pool.descriptor, length=SIZE))
    consumer.transport.add_peer("producer", producer.transport.metadata)
    assert isinstance(await consumer.events.get(), PeerAdded)
    yield
    await asyncio.to_thread(producer.transport.stop)
    for pool in pools:
        pool.close()


async def test_the_loop_goes_on_while_the_pools_of_a_lost_peer_are_unmapped_and_the_end_waits_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, go_on = mapped("memfd:kvd:lent"), threading.Event()

    def slow_to_unmap(pool: ExportedPool, descriptor: int) -> MappedPool:
        found = map_host_pool(pool, descriptor)

        def close() -> None:
            assert go_on.wait(MOMENT)
            found.close()

        return MappedPool(found.memory, close)

    monkeypatch.setattr(devices, "map_host_pool", slow_to_unmap)
    with Agent(tmp_path, "consumer") as consumer:
        async with peer_with_two_pools(tmp_path, consumer):
            pass
        assert await consumer.events.get() == PeerFailed("producer", "it has ended, or hung up")
        assert mapped("memfd:kvd:lent") == before + 2
        go_on.set()
    assert mapped("memfd:kvd:lent") == before


async def test_a_pool_that_is_no_longer_used_is_not_pinned_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, begun, go_on, pinned = mapped("memfd:kvd:lent"), threading.Event(), threading.Event(), []

    def slow_to_pin(pool: ExportedPool, descriptor: int) -> MappedPool:
        found = map_host_pool(pool, descriptor)

        def pin() -> None:
            pinned.append(pool.base)
            begun.set()
            assert go_on.wait(MOMENT)

        return MappedPool(found.memory, found.close, pin)

    monkeypatch.setattr(devices, "map_host_pool", slow_to_pin)
    with Agent(tmp_path, "consumer") as consumer:
        async with peer_with_two_pools(tmp_path, consumer):
            assert await asyncio.to_thread(begun.wait, MOMENT)
        assert isinstance(await consumer.events.get(), PeerFailed)
        go_on.set()
    assert len(pinned) == 1
    assert mapped("memfd:kvd:lent") == before


def test_our_own_pools_are_unpinned_while_a_peers_are_pinned() -> None:
    go_on = threading.Event()
    of_peer = MappedPool(Mock(), lambda: None, partial(go_on.wait, MOMENT))
    mappings = Mappings(Mock(map_pool=lambda *_: of_peer))
    mappings.add(0x1000, SIZE)
    mappings.pin_for("GPU-1")
    mappings.map_pool(Mock(), 0)
    unpinned = mappings.remove(0x1000)
    assert unpinned is not None
    unpinned.result(MOMENT)
    assert not go_on.is_set()
    go_on.set()
    mappings.stop()


async def test_a_pool_that_cannot_be_unmapped_keeps_no_other_one_mapped_and_the_log_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, refused = mapped("memfd:kvd:lent"), DeviceError(ErrorCode.NO_DEVICE, "no", "CUDA_ERROR_UNKNOWN")
    failures = [refused]

    def once_not_unmapped(pool: ExportedPool, descriptor: int) -> MappedPool:
        found = map_host_pool(pool, descriptor)

        def close() -> None:
            found.close()
            if failures:
                raise failures.pop()

        return MappedPool(found.memory, close)

    monkeypatch.setattr(devices, "map_host_pool", once_not_unmapped)
    with capture_logs() as logged, Agent(tmp_path, "consumer") as consumer:
        async with peer_with_two_pools(tmp_path, consumer):
            pass
        assert isinstance(await consumer.events.get(), PeerFailed)
    assert mapped("memfd:kvd:lent") == before
    assert [entry["exc_info"] for entry in logged if entry["event"] == "a pool of a peer is not unmapped"] == [refused]


async def test_a_transport_that_is_stopped_on_a_thread_takes_its_readers_away_on_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, threads = asyncio.get_running_loop(), []
    for name in ("remove_reader", "remove_writer"):
        remove = getattr(loop, name)
        monkeypatch.setattr(loop, name, lambda fd, r=remove: threads.append(threading.get_ident()) or r(fd))
    consumer = Agent(tmp_path, "consumer")
    async with peer_with_two_pools(tmp_path, consumer):
        await asyncio.to_thread(consumer.transport.stop)
    assert set(threads) == {threading.get_ident()}
