"""The contract's checks over NIXL, in a process that ends by os._exit: NIXL's teardown must not decide a test's result.

`python -m tests.transport.nixl_child STRIPES CHECK...` prints one JSON object per check of a transport with STRIPES
agents. Producers are processes, too.
"""

import asyncio
import itertools
import json
import mmap
import multiprocessing
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection

import numpy as np

from kvd import limits
from kvd.transport.interface import Landed, PeerAdded, PeerFailed, Registered, Transport, TransportDied
from kvd.transport.nixl.probe import Probe
from kvd.transport.nixl.transport import NixlTransport, open_transports
from kvd.transport.path import is_copied
from kvd.transport.striped import StripedTransport
from tests.conformance.contract import CHECKS, Contract
from tests.conformance.site import PRODUCED, Bytes, Reader, blocks, pattern

FORKSERVER = multiprocessing.get_context("forkserver")  # producers are forked from a process that has imported NIXL
FORKSERVER.set_forkserver_preload(["tests.transport.nixl_child", "nixl_cu12"])


def allocate(size: int) -> Bytes:
    return np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)


async def produce(agent: str, pipe: Connection) -> None:
    """Registers memory as the pipe asks, and exits when the pipe is closed."""
    transport = NixlTransport(agent, asyncio.get_running_loop())
    events: asyncio.Queue = asyncio.Queue()
    transport.start(events.put_nowait)
    transport.expect_readers(True)
    kept = []
    for pool in itertools.count():
        try:
            size, seed = await asyncio.to_thread(pipe.recv)
        except EOFError:
            os._exit(0)
        kept.append(allocate(size))
        kept[-1][:] = pattern(seed, size)
        transport.register(pool, kept[-1].ctypes.data, size)
        pipe.send(((await events.get()).metadata, kept[-1].ctypes.data))


def run_producer(agent: str, pipe: Connection) -> None:
    asyncio.run(produce(agent, pipe))


class NixlProducer:
    def __init__(self, agent: str, size: int, seed: int) -> None:
        self.agent, self.size, self.seed = agent, size, seed
        self._pipe, theirs = FORKSERVER.Pipe()
        self._process = FORKSERVER.Process(target=run_producer, args=(agent, theirs), daemon=True)
        self._process.start()
        theirs.close()

    async def open(self) -> "NixlProducer":
        self.metadata, self.base = await self.register_more(self.size, self.seed)
        return self

    async def register_more(self, size: int, seed: int) -> tuple[bytes, int]:
        self._pipe.send((size, seed))
        return await asyncio.to_thread(self._pipe.recv)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    async def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._process.join()


class NixlSite:
    def __init__(self, stripes: int) -> None:
        self._stripes = stripes
        self._names = map("{}-agent-whose-name-ucx-cuts-off".format, itertools.count())
        self._shared: NixlProducer | None = None
        self._spare = allocate(PRODUCED)  # faulted in once: a fresh 256 MiB for each check is a second of page faults

    def transport(self) -> Transport:
        loop = asyncio.get_running_loop()
        stripes = open_transports([next(self._names) for _ in range(self._stripes)], loop)
        return stripes[0] if len(stripes) == 1 else StripedTransport(stripes)

    def memory(self, size: int) -> tuple[int, Bytes]:
        memory = self._spare[:size] if size > PRODUCED // 2 else allocate(size)
        memory[:] = 0
        return memory.ctypes.data, memory

    async def shared(self) -> NixlProducer:
        if self._shared is None:
            self._shared = await self.producer(PRODUCED, 5)
        return self._shared

    async def producer(self, size: int, seed: int) -> NixlProducer:
        return await NixlProducer(next(self._names), size, seed).open()

    async def close(self) -> None:
        if self._shared is not None:
            await self._shared.kill()


async def a_defect_on_the_thread_is_told_as_the_death_of_the_transport(site: NixlSite) -> None:
    events: asyncio.Queue = asyncio.Queue()
    transport = site.transport()
    transport.start(events.put_nowait)
    transport.deregister(4711)
    async with asyncio.timeout(20):
        died = await events.get()
    assert isinstance(died, TransportDied)
    assert "KeyError: 4711" in died.reason


async def a_read_is_said_to_be_copied_where_it_needs_nothing_of_the_other_process_and_nowhere_else(
    site: NixlSite,
) -> None:
    if site._stripes > 1:
        return  # the other agents know the path from the first; one that has not read yet needs the producer to connect
    size = limits.MIB
    producer = await site.producer(size, 3)
    base, memory = site.memory(size)
    reader = Reader(site.transport(), base, memory)
    reader.transport.start(reader.on_event)
    reader.transport.register(1, base, size)
    await reader.answer(Registered)
    await reader.add(producer)
    copied = is_copied(reader.of(PeerAdded)[0].path)
    assert copied is (os.environ.get("UCX_TLS") != "tcp")
    async with asyncio.timeout(20):  # the first read waits for the connection, which needs both sides
        while (end := await reader.end(reader.read(producer, blocks(0, 1, size)))) and copied:
            if isinstance(end, Landed) and end.in_post:
                break
    if copied:
        os.kill(producer.pid, signal.SIGSTOP)
    for length in (8, 64, 512, 4096, limits.SLICE_BYTES // 64, size):
        for stamp in (0, producer.base):
            end = await reader.end(
                reader.read(producer, blocks(0, size // length if length > 64 else 4, length), stamp=stamp)
            )
            assert isinstance(end, Landed)
            assert end.in_post is copied, (length, stamp)
    reader.transport.stop()
    await producer.kill()


async def metadata_that_would_end_the_process_fails_its_peer_and_nothing_else(site: NixlSite) -> None:
    size = limits.MIB
    stripes = open_transports([next(site._names) for _ in range(site._stripes)], asyncio.get_running_loop())
    probe = Probe(stripes[0].library)
    transport = StripedTransport(stripes, probe)
    base, memory = site.memory(size)
    reader = Reader(transport, base, memory)
    transport.start(reader.on_event)
    transport.register(1, base, size)
    await reader.answer(Registered)
    producer = await site.producer(size, 3)
    version = producer.metadata.index(b"|c") + 10  # the first byte of UCX's address
    count = producer.metadata.index(b"|n\x08") + 10  # of regions
    for number, position in enumerate((version, count + 2), 1):
        changed = bytearray(producer.metadata)
        changed[position] ^= 0xFF
        transport.add_peer(producer.agent, bytes(changed))
        failed = await reader.answer(PeerFailed, number)
        assert failed.agent == producer.agent
        # The count makes NIXL allocate more than a probe may: an error there; without the bound, a signal.
        assert position != version or "ended the process that tried it first" in failed.reason, failed
    await reader.add(producer)
    await reader.still_well(producer)
    transport.add_peer(producer.agent, bytes(changed))  # the same from a peer that is known
    await reader.answer(PeerFailed, 3)
    transport.stop()
    await probe.close()
    await producer.kill()


async def main(stripes: int, checks: list[str]) -> None:
    site = NixlSite(stripes)
    for check in checks:
        error = None
        try:
            if check in CHECKS:
                await Contract(site).run(check)
            else:
                await globals()[check](site)
        except Exception:  # noqa: BLE001 - reported to the test
            error = traceback.format_exc()
        print(json.dumps({"check": check, "error": error}), flush=True)
    await site.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2:]))
    os._exit(0)
