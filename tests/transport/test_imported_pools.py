"""What a daemon makes of the pools that another one of its host lends: which it maps, and who waits for that."""

import contextlib
import fcntl
import itertools
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvd import limits
from kvd.errors import BadRequest, Unavailable
from kvd.memory.memfd import SEALS
from kvd.net.stream import FrameStream
from kvd.protocol.codec import encode
from kvd.protocol.export import ExportAddress, Exported, ExportedPool
from kvd.transport.samehost import importer
from kvd.transport.samehost.importer import import_pools
from kvd.transport.samehost.lent import MappedPool, map_host_pool
from tests.support.patience import PATIENCE
from tests.transport.test_samehost_hostile import SIZE, TOKEN


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
