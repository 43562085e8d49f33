"""What strangers get of the export socket, and what a hostile exporter can do to who imports from it."""

import asyncio
import ctypes
import fcntl
import mmap
import os
import select
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvd import foreign, limits
from kvd.errors import KvdError, Unavailable
from kvd.memory.mapping import HUGE_PAGE, Mapping
from kvd.memory.memfd import SEALS, Backing, MemfdPool, MemfdProvider
from kvd.net.stream import Frame, FrameStream
from kvd.net.unix import Party
from kvd.protocol.codec import encode, exports
from kvd.protocol.export import ExportAddress, Exported, ExportedPool, Import, Withdrawn
from kvd.transport.interface import Region
from kvd.transport.samehost.exporter import Exporter
from kvd.transport.samehost.importer import ImportedPools, import_pools
from kvd.transport.samehost.lent import map_host_pool
from kvd.transport.samehost.process_memory import copy
from tests.support.patience import PATIENCE

SIZE = 4096
MANY = 320
"""Pools: more frames than a socket takes before they are read."""


def region(pool: MemfdPool) -> Region:
    return Region(pool.base, SIZE, pool.descriptor, length=pool.length)


@pytest.fixture
def pools() -> Iterator[list[MemfdPool]]:
    made = [MemfdProvider(Backing.PLAIN).allocate(name, SIZE) for name in ("one", "two")]
    yield made
    for pool in made:
        pool.close()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "pools")


@pytest.fixture
async def exporter(path: str, pools: list[MemfdPool]) -> Exporter:
    made = Exporter(path, 0o600)
    for number, pool in enumerate(pools):
        made.add(number, region(pool))
    return made


def exporter_of_many(path: str) -> Exporter:
    made = Exporter(path, 0o600)
    for number in range(MANY):
        lent = memfd(size=SIZE)
        os.posix_fallocate(lent, 0, SIZE)
        made.add(number, Region(number, SIZE, lent, length=SIZE))
        os.close(lent)
    return made


async def imported(path: str, token: bytes) -> ImportedPools:
    return await asyncio.to_thread(import_pools, ExportAddress("p", "this", path, token), map_host_pool)


async def hung_up(connected: socket.socket) -> bool:
    """Waits for the end of what the other side sends."""

    def read() -> bool:
        connected.settimeout(PATIENCE)
        while connected.recv(4096):
            pass
        return True

    return await asyncio.to_thread(read)


def connection(path: str) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connected.connect(path)
    return connected


async def test_a_token_gives_the_pools_that_it_was_drawn_for_and_no_others(
    exporter: Exporter, path: str, pools: list[MemfdPool]
) -> None:
    some = await imported(path, exporter.token((1,)))
    assert some.find(pools[0].base) is None
    assert some.find(pools[1].base) is not None
    some.hang_up()
    every = exporter.token()
    exporter.remove(0)
    exporter.add(0, region(pools[0]))
    rest = await imported(path, every)
    assert rest.find(pools[0].base) is None  # it is another registration
    rest.hang_up()
    exporter.close()


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:kvd:")


async def test_who_was_sent_a_pool_is_told_of_its_end_and_unmaps_it(
    exporter: Exporter, path: str, pools: list[MemfdPool]
) -> None:
    """A GPU's memory is free only then."""
    every, second = await imported(path, exporter.token()), await imported(path, exporter.token((1,)))
    before = mappings()
    exporter.remove(0)
    assert every.hear()
    assert mappings() == before - 1
    assert every.find(pools[0].base) is None
    assert every.find(pools[1].base) is not None
    assert second.hear()  # nothing
    for one in (every, second):
        one.hang_up()
    exporter.close()


async def test_a_pool_that_has_ended_stays_mapped_while_a_read_uses_it(
    exporter: Exporter, path: str, pools: list[MemfdPool]
) -> None:
    got = await imported(path, exporter.token())
    before = mappings()
    got.use(pools[0].base)
    got.use(pools[0].base)
    exporter.remove(0)
    assert got.hear()
    got.release(pools[0].base)
    assert mappings() == before
    assert got.find(pools[0].base) is None  # for no other read
    got.release(pools[0].base)
    assert mappings() == before - 1
    got.hang_up()
    assert mappings() == before - 2
    exporter.close()


async def test_a_pool_that_ends_before_all_have_come_is_not_kept(
    path: str, pools: list[MemfdPool], hostile: Callable[..., ExportAddress]
) -> None:
    pool = ExportedPool(bytes(8), SIZE, HUGE_PAGE)
    before = mappings()
    address = hostile(
        (encode(pool), (os.dup(pools[0].descriptor),)),
        (encode(Withdrawn(bytes(8))), ()),
        (encode(Exported(bytes(8), bytes(8))), ()),
    )
    got = import_pools(address, map_host_pool)
    assert mappings() == before
    assert got.find(0) is None
    got.hang_up()


async def test_a_made_up_token_and_one_of_too_long_ago_give_nothing(
    exporter: Exporter, path: str, pools: list[MemfdPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KvdError, match="not_permitted"):
        await imported(path, os.urandom(limits.SECRET_BYTES))
    monkeypatch.setattr(limits, "MAX_TOKENS", 2)
    old = exporter.token((0,))
    exporter.token((1,))
    exporter.token(())
    with pytest.raises(KvdError, match="not_permitted"):
        await imported(path, old)
    exporter.close()


async def test_a_process_has_few_connections_and_one_that_asks_nothing_or_twice_is_hung_up_on(
    exporter: Exporter, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = [connection(path) for _ in range(limits.MAX_IMPORTS_PER_PROCESS)]
    with connection(path) as one_too_many:
        assert await hung_up(one_too_many)
    twice = FrameStream(kept[0])
    for _ in range(2):
        twice.send(encode(Import(exporter.token(()))))
    kept[0].setblocking(True)
    assert await hung_up(kept[0])
    monkeypatch.setattr(limits, "IMPORT_SECONDS", 0.01)
    with connection(path) as silent:
        assert await hung_up(silent)
    for connected in kept:
        connected.close()
    exporter.close()


def ended_process() -> int:
    """A pidfd of one."""
    with subprocess.Popen(["true"]) as ended:
        return os.pidfd_open(ended.pid)


async def test_nothing_is_read_of_a_process_that_has_the_number_of_one_that_has_ended(
    exporter: Exporter, path: str
) -> None:
    got = await imported(path, exporter.token())
    assert got.process is not None
    secret = ctypes.create_string_buffer(b"stamp", 8)  # of this process, which is the exporter's, too
    assert got.process.read(ctypes.addressof(secret), 5) == b"stamp"
    watched = ended_process()
    os.dup2(watched, got.process._descriptor)  # so the number that is read from is another process's by now
    os.close(watched)
    with pytest.raises(ProcessLookupError):
        got.process.read(ctypes.addressof(secret), 5)
    assert got.stamp(ctypes.addressof(secret)) == 0
    got.hang_up()
    exporter.close()


def connections_of(monkeypatch: pytest.MonkeyPatch, *parties: Party) -> None:
    """Has the exporter take its next connections for those of these parties."""
    left = iter(parties)
    monkeypatch.setattr("kvd.transport.samehost.exporter.party_at", lambda _connected: next(left))


async def test_processes_that_cannot_be_told_apart_have_the_share_of_their_user(
    exporter: Exporter, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = limits.MAX_IMPORTS_PER_PROCESS + 4
    connections_of(monkeypatch, *[Party(64000, 0)] * (many + 2), Party(64001, 0))
    imports = [await imported(path, exporter.token()) for _ in range(many)]
    monkeypatch.setattr(limits, "MAX_IMPORTS_PER_USER", many + 1)
    with connection(path), connection(path) as one_too_many:
        assert await hung_up(one_too_many)
        imports.append(await imported(path, exporter.token()))
    for pools in imports:
        pools.hang_up()
    exporter.close()


@pytest.mark.parametrize("user", [1000, 65534])
async def test_those_without_a_token_keep_nobody_from_importing_however_many_they_are(
    exporter: Exporter, path: str, monkeypatch: pytest.MonkeyPatch, user: int
) -> None:
    monkeypatch.setattr(limits, "MAX_IMPORTS_ASKING", 8)
    strangers = [Party(65534, number) for number in range(12)]
    connections_of(monkeypatch, *strangers, Party(user, 100))
    silent = [connection(path) for _ in strangers]
    pools = await imported(path, exporter.token())
    for oldest in silent[:4]:
        assert await hung_up(oldest)
    pools.hang_up()
    for each in silent:
        each.close()
    exporter.close()


async def test_what_is_not_read_holds_two_descriptors_on_their_way_and_no_more(path: str) -> None:
    exporter = exporter_of_many(path)
    with connection(path) as slow:
        stream = FrameStream(slow)
        stream.send(encode(Import(exporter.token())))
        served = await imported(path, exporter.token())  # it has had all of them meanwhile
        first = stream.receive()
        on_their_way = []
        while got := stream.receive():
            on_their_way += got
        assert first is not None
        assert len(first + on_their_way) <= 2
        frames = first + on_their_way
        while len(frames) <= MANY:
            frames += await asyncio.to_thread(next_frames, stream)
        assert len({frame.content for frame in frames}) == MANY + 1
        for frame in frames:
            foreign.close(frame.descriptors)
    served.hang_up()
    exporter.close()


def next_frames(stream: FrameStream) -> list[Frame]:
    assert select.select([stream.fileno()], [], [], PATIENCE)[0]
    return stream.receive() or []


async def test_a_pool_that_has_ended_before_its_turn_came_is_left_out(path: str, pools: list[MemfdPool]) -> None:
    exporter = exporter_of_many(path)
    with connection(path) as slow:
        stream = FrameStream(slow)
        stream.send(encode(Import(exporter.token())))
        frames = await asyncio.to_thread(next_frames, stream)
        for number in range(MANY // 2, MANY):
            exporter.remove(number)
        exporter.add(MANY, region(pools[1]))  # under a descriptor that one of them had
        while not isinstance(exports.decode(frames[-1].content), Exported):
            frames += await asyncio.to_thread(next_frames, stream)
        assert len(frames) < MANY
        inodes = {os.fstat(frame.descriptors[0]).st_ino for frame in frames[:-1]}
        assert len(inodes - {os.fstat(pools[1].descriptor).st_ino}) == len(frames) - 1
        for frame in frames:
            foreign.close(frame.descriptors)
    exporter.close()


async def test_a_process_that_does_not_read_is_refused_more_until_it_has_read(path: str) -> None:
    exporter = exporter_of_many(path)
    slow = [FrameStream(connection(path)) for _ in range(limits.MAX_IMPORTS_UNREAD_PER_PROCESS)]
    for stream in slow:
        stream.send(encode(Import(exporter.token())))
    while exporter._unread[os.getuid()] < len(slow):  # noqa: ASYNC110
        await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="4 connections of this process have not read"):
        await imported(path, exporter.token())
    slow[0].close()
    while exporter._unread[os.getuid()] == len(slow):  # noqa: ASYNC110 - nobody announces it
        await asyncio.sleep(0)
    (await imported(path, exporter.token())).hang_up()
    for stream in slow[1:]:
        stream.close()
    exporter.close()


def memfd(*, size: int = HUGE_PAGE, seals: int = SEALS) -> int:
    descriptor = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


@pytest.fixture
def hostile(path: str) -> Iterator[Callable[..., ExportAddress]]:
    """An exporter that answers with these frames; gives the address to import from."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen()
    servers: list[threading.Thread] = []

    def serve(frames: list[tuple[bytes, tuple[int, ...]]]) -> None:
        accepted, _ = listener.accept()
        stream = FrameStream(accepted)
        select.select([accepted], [], [], PATIENCE)
        stream.receive()
        for content, descriptors in frames:
            stream.send(content, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
        select.select([accepted], [], [], PATIENCE)  # until the importer hangs up
        stream.close()

    def answering(*frames: tuple[bytes, tuple[int, ...]]) -> ExportAddress:
        servers.append(threading.Thread(target=serve, args=(list(frames),)))
        servers[-1].start()
        return ExportAddress("p", "this", path, bytes(limits.SECRET_BYTES))

    yield answering
    for server in servers:
        server.join(PATIENCE)
    listener.close()


@pytest.mark.parametrize(
    ("lend", "reason"),
    [
        (lambda: (memfd(seals=fcntl.F_SEAL_GROW),), "seals"),
        (lambda: (memfd(size=SIZE // 2),), "came as a file of 2048 bytes"),
        (lambda: (os.open("/dev/null", os.O_RDONLY),), "cannot be mapped"),
        (lambda: (), "with 0 descriptors"),
    ],
)
def test_what_is_no_sealed_pool_is_not_mapped(
    hostile: Callable[..., ExportAddress], lend: Callable[[], tuple[int, ...]], reason: str
) -> None:
    address = hostile((encode(ExportedPool(bytes(8), SIZE, HUGE_PAGE)), lend()))
    with pytest.raises(KvdError, match=reason):
        import_pools(address, map_host_pool)


def test_an_exporter_that_does_not_answer_is_given_up(
    hostile: Callable[..., ExportAddress], monkeypatch: pytest.MonkeyPatch
) -> None:
    address = hostile()
    monkeypatch.setattr(limits, "IMPORT_SECONDS", 0.05)
    with pytest.raises(KvdError, match=r"did not come within 0\.05 s"):
        import_pools(address, map_host_pool)


def test_no_stamps_are_read_of_a_process_that_has_another_word_than_its_exporter_said(
    hostile: Callable[..., ExportAddress],
) -> None:
    word = np.array([7], dtype="<u8")
    for value, readable in ((7, True), (8, False)):
        where = word.ctypes.data.to_bytes(8, "little")
        address = hostile((encode(Exported(where, value.to_bytes(8, "little"))), ()))
        pools = import_pools(address, map_host_pool)
        assert (pools.process is not None) is readable
        pools.hang_up()


async def test_an_importer_that_does_not_read_keeps_nobody_waiting(path: str, pools: list[MemfdPool]) -> None:
    exporter = exporter_of_many(path)
    with connection(path) as slow:
        stream = FrameStream(slow)
        stream.send(encode(Import(exporter.token())))
        exporter.add(MANY, region(pools[1]))
        served = await imported(path, exporter.token((MANY,)))
        assert served.find(pools[1].base) is not None
        (waiting,) = [one for one in exporter._importers if one._left]
        served.hang_up()
    while waiting in exporter._importers:  # noqa: ASYNC110 - nobody announces it
        await asyncio.sleep(0)
    exporter.close()


def test_pages_that_are_taken_away_end_a_copy_by_an_error_and_not_the_process_by_a_signal() -> None:
    descriptor = memfd(seals=0)
    mapping = Mapping(descriptor, HUGE_PAGE, writable=False)
    target = np.zeros(mmap.PAGESIZE, dtype=np.uint8)
    pieces = [np.array([at], dtype=np.uint64) for at in (target.ctypes.data, mapping.base, mmap.PAGESIZE)]
    copy(*pieces)
    os.ftruncate(descriptor, 0)
    with pytest.raises(OSError, match="process_vm_readv"):
        copy(*pieces)
    mapping.close()
    os.close(descriptor)
