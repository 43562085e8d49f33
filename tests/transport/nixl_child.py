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
from kvd.transport.interface import PeerFailed, Region, Registered, Transport, TransportDied
from kvd.transport.nixl.probe import Probe
from kvd.transport.nixl.transport import NixlTransport
from kvd.transport.nixl.ucx import nixl_name
from tests.conformance.contract import CHECKS, Contract
from tests.conformance.site import PRODUCED, Bytes, Reader, pattern
from tests.support.patience import MOMENT

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
        transport.register(pool, Region(kept[-1].ctypes.data, size))
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
    def __init__(self) -> None:
        self._names = map("{}-agent-whose-name-ucx-cuts-off".format, itertools.count())
        self._shared: NixlProducer | None = None
        self._spare = allocate(PRODUCED)  # faulted in once: a fresh 256 MiB for each check is a second of page faults

    def transport(self) -> Transport:
        return NixlTransport(next(self._names), asyncio.get_running_loop())

    def memory(self, size: int) -> tuple[int, Bytes, int]:
        memory = self._spare[:size] if size > PRODUCED // 2 else allocate(size)
        memory[:] = 0
        return memory.ctypes.data, memory, -1

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
    async with asyncio.timeout(MOMENT):
        died = await events.get()
    assert isinstance(died, TransportDied)
    assert "KeyError: 4711" in died.reason


async def metadata_that_would_end_the_process_fails_its_peer_and_nothing_else(site: NixlSite) -> None:
    size = limits.MIB
    probe = Probe(nixl_name())
    transport = NixlTransport(next(site._names), asyncio.get_running_loop(), examine=probe)
    base, memory, _ = site.memory(size)
    reader = Reader(transport, base, memory)
    transport.start(reader.on_event)
    transport.register(1, Region(base, size))
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
