"""Prints what a reader gets from a pool before and after its owner has withdrawn it, over NIXL, as a JSON object.

Run as `python -m tests.transport.revocation_child`; the reader is a process too (`... reader`). It keeps using the
metadata and the address that it has, as a malicious one would.
"""

import asyncio
import json
import mmap
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np

from kvd.memory.memfd import MemfdProvider
from kvd.transport.interface import Deregistered, Described, Region, Registered
from kvd.transport.nixl import messages
from kvd.transport.nixl.transport import NixlTransport
from kvd.transport.nixl.ucx import open_agent
from tests.support.patience import MOMENT

SIZE = 1 << 20
PATTERN = 7


def read() -> None:
    """Answers lines `{"metadata": hex, "base": address}` with what was read there."""
    agent: Any = open_agent("reader")
    memory = np.zeros(SIZE, np.uint8)
    agent.register_memory(np.array([[memory.ctypes.data, SIZE, 0]], dtype=np.uint64), mem_type="DRAM")
    for line in sys.stdin:
        request = json.loads(line)
        memory[:] = 255
        try:
            found = _attempt(agent, memory, request)
        except Exception as error:  # noqa: BLE001 - NIXL's errors have no base of their own
            found = type(error).__name__
        print(json.dumps(found), flush=True)
    os._exit(0)


def _attempt(agent: Any, memory: Any, request: dict[str, Any]) -> str:
    name = agent.add_remote_agent(bytes.fromhex(request["metadata"]))
    local, remote = (
        agent.prep_xfer_dlist(of, np.array([[base, SIZE, 0]], dtype=np.uint64), mem_type="DRAM")
        for of, base in (("NIXL_INIT_AGENT", memory.ctypes.data), (name.decode(), request["base"]))
    )
    handle = agent.make_prepped_xfer("READ", local, np.zeros(1, np.int32), remote, np.zeros(1, np.int32))
    state, started = agent.transfer(handle), time.monotonic()
    while state == "PROC" and time.monotonic() - started < MOMENT:
        state = agent.check_xfer_state(handle)
    return f"{state}: {sorted({int(byte) for byte in memory})}"


def region_of(pool: Any) -> Region:
    return Region(pool.base, pool.size, pool.descriptor, length=pool.length)


def parts_of(metadata: bytes) -> messages.Metadata:
    parts = messages.metadata(metadata)
    assert parts is not None
    return parts


async def own() -> dict[str, str]:
    transport = NixlTransport("owner", asyncio.get_running_loop())
    events: asyncio.Queue[Any] = asyncio.Queue()
    transport.start(events.put_nowait)
    transport.expect_readers(True)
    provider = MemfdProvider()
    pools = {number: provider.allocate(f"pool-{number}", SIZE) for number in (1, 2)}
    for number, pool in pools.items():
        mmap.mmap(pool.descriptor, 2 * SIZE)[:SIZE] = bytes([PATTERN]) * SIZE
        transport.register(number, region_of(pool))
        assert isinstance(await events.get(), Registered)
    transport.describe((1,))
    described = await events.get()
    assert isinstance(described, Described)
    reader = subprocess.Popen(  # noqa: ASYNC220 - it is waited for on a thread
        [sys.executable, "-m", "tests.transport.revocation_child", "reader"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )

    async def reads(metadata: bytes, base: int) -> str:
        assert reader.stdin is not None
        assert reader.stdout is not None
        reader.stdin.write(json.dumps({"metadata": metadata.hex(), "base": base}).encode() + b"\n")
        reader.stdin.flush()
        return str(json.loads(await asyncio.to_thread(reader.stdout.readline)))

    known = parts_of(described.metadata)
    assert known.addresses.keys() == {pools[1].base}
    old, base = known.nixl, known.addresses[pools[1].base]
    withheld = parts_of(transport.metadata).addresses[pools[2].base]
    found = {"given": await reads(old, base), "withheld": await reads(old, withheld)}
    transport.deregister(1)
    assert isinstance(await events.get(), Deregistered)
    found["deregistered"] = await reads(old, base)
    pools[1].move()
    found["moved"] = await reads(old, base)
    transport.register(1, region_of(pools[1]))
    registered = await events.get()
    found["registered anew"] = await reads(old, base)
    new = parts_of(registered.metadata)
    found["given anew"] = await reads(new.nixl, new.addresses[pools[1].base])
    assert reader.stdin is not None
    reader.stdin.close()
    reader.wait()
    transport.stop()
    return found


if __name__ == "__main__":
    if sys.argv[1:] == ["reader"]:
        read()
    sys.stdout.write(json.dumps(asyncio.run(own())))
    sys.stdout.flush()
    os._exit(0)
