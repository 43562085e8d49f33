"""The contract's checks over NIXL, in a process that ends by os._exit: NIXL's teardown must not decide a test's result.

`python -m tests.transport.nixl_child CHECK...` prints one JSON object per check. Producers are processes, too.
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
from kvd.transport.interface import NetworkDown, NetworkUp, PeerFailed, Region, Registered
from kvd.transport.nixl import keeper, messages
from kvd.transport.nixl.probe import Probe
from kvd.transport.nixl.transport import NixlTransport
from kvd.transport.nixl.ucx import nixl_name
from tests.conformance.contract import CHECKS, Contract
from tests.conformance.site import PRODUCED, Bytes, Reader, pattern
from tests.support.patience import MOMENT, PATIENCE

keeper.START_SECONDS = PATIENCE  # what is checked here is not how soon a process starts

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["tests.transport.nixl_child"])


def allocate(size: int) -> tuple[Bytes, int]:
    """Memory that other processes can map by the descriptor."""
    descriptor = os.memfd_create("kvd-test")
    os.truncate(descriptor, size)
    return np.frombuffer(mmap.mmap(descriptor, size), dtype=np.uint8), descriptor


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
        memory, descriptor = allocate(size)
        memory[:] = pattern(seed, size)
        kept.append(memory)
        transport.register(pool, Region(memory.ctypes.data, size, descriptor, length=size))
        pipe.send(((await events.get()).metadata, memory.ctypes.data))


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
        self.stamps = self.base
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
    device = ""

    def __init__(self) -> None:
        self._names = map("{}-agent-whose-name-ucx-cuts-off".format, itertools.count())
        self._shared: NixlProducer | None = None
        self._spare = allocate(PRODUCED)  # faulted in once: a fresh 256 MiB for each check is a second of page faults

    def transport(self) -> NixlTransport:
        return NixlTransport(next(self._names), asyncio.get_running_loop())

    def memory(self, size: int) -> tuple[int, Bytes, int]:
        memory, descriptor = self._spare if size > PRODUCED // 2 else allocate(size)
        memory[:size] = 0
        return memory.ctypes.data, memory[:size], descriptor

    async def shared(self) -> NixlProducer:
        if self._shared is None:
            self._shared = await self.producer(PRODUCED, 5)
        return self._shared

    async def producer(self, size: int, seed: int) -> NixlProducer:
        return await NixlProducer(next(self._names), size, seed).open()

    async def close(self) -> None:
        if self._shared is not None:
            await self._shared.kill()


async def a_process_that_ends_by_a_defect_says_so_and_is_started_again(site: NixlSite) -> None:
    events: asyncio.Queue = asyncio.Queue()
    transport = site.transport()
    transport.start(events.put_nowait)
    transport._keeper.tell(messages.Deregister(4711))
    async with asyncio.timeout(MOMENT):
        down, up = await events.get(), await events.get()
    assert isinstance(down, NetworkDown)
    assert "status 1" in down.reason
    assert isinstance(up, NetworkUp)
    assert up.metadata == transport.metadata
    transport.stop()


async def metadata_that_would_end_the_process_fails_its_peer_and_nothing_else(site: NixlSite) -> None:
    size = limits.MIB
    probe = Probe(nixl_name())
    transport = NixlTransport(next(site._names), asyncio.get_running_loop(), examine=probe)
    base, memory, descriptor = site.memory(size)
    reader = Reader(transport, Region(base, size, descriptor, length=size), memory)
    transport.start(reader.on_event)
    transport.register(1, reader.region)
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


async def main(checks: list[str]) -> None:
    site = NixlSite()
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
    asyncio.run(main(sys.argv[1:]))
    os._exit(0)
