"""Copies within the host: another process imports a pool of ours and reads it, as a daemon does a peer's."""

import asyncio
import ctypes
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from kvd import limits
from kvd.doctor import Finding, Level
from kvd.errors import KvdError
from kvd.host import boot_id
from kvd.memory.memfd import MemfdProvider
from kvd.protocol.codec import encode, export_addresses
from kvd.protocol.export import ExportAddress
from kvd.transport.interface import Region
from kvd.transport.samehost.exporter import Exporter
from kvd.transport.samehost.importer import import_pools
from kvd.transport.samehost.lent import copy_lent, map_host_pool
from kvd.units import size

BYTES: Final = 64 * limits.MIB
_PIECES: Final = (63 * [limits.MIB]) + (256 * [4 * limits.KIB])
"""Large pieces and small ones: a daemon copies each by a call of its own."""
_PATTERN: Final = 0x5A
_ROUNDS: Final = 3
_SUBJECT: Final = "same-host copy"
_REFUSED: Final = "allow process_vm_readv and Unix sockets in the seccomp profile"
_NO_STAMPS: Final = "sysctl kernel.yama.ptrace_scope=0, if small pulls must be as fast as they can be"


class _Result(msgspec.Struct):
    """What the reader found: bytes per second, whether stamps can be read, and whether the bytes were right."""

    rate: float
    stamps: bool
    arrived: bool


def check_copy(timeout: float) -> Finding:
    """Lends 64 MiB to a child process. The child reads, as Yama lets a parent read what other processes may not."""
    try:
        return asyncio.run(_lend(timeout))
    except KvdError as error:
        return Finding(_SUBJECT, Level.BROKEN, error.text, "free some memory, and a folder for temporary files")


async def _lend(seconds: float) -> Finding:
    pool = MemfdProvider().allocate("doctor", BYTES)
    ctypes.memset(pool.base, _PATTERN, BYTES)
    with tempfile.TemporaryDirectory(prefix="kvd-doctor-") as folder:
        path = str(Path(folder) / "pools")
        exporter = Exporter(path, 0o600)
        exporter.add(0, Region(pool.base, BYTES, pool.descriptor, length=pool.length))
        address = encode(ExportAddress("doctor", boot_id(), path, exporter.token()))
        command = [sys.executable, "-m", "kvd.doctor.samehost", address.hex(), str(pool.base)]
        reader = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            out, log = await asyncio.wait_for(reader.communicate(), seconds)
        except TimeoutError:
            reader.kill()
            await reader.wait()
            return Finding(_SUBJECT, Level.BROKEN, f"did not end within {seconds:g} s", _REFUSED)
        finally:
            exporter.close()
            pool.close()
    if reader.returncode != 0:
        last = (log.decode().strip().splitlines() or [f"the reader ended with status {reader.returncode}"])[-1]
        return Finding(_SUBJECT, Level.BROKEN, last, _REFUSED)
    return _judge(msgspec.json.decode(out, type=_Result))


def _judge(result: _Result) -> Finding:
    text = f"{size(BYTES)} of another process at {result.rate / 1e9:.1f} GB/s"
    if not result.arrived:
        return Finding(_SUBJECT, Level.BROKEN, f"{text}: bytes differ", "please report this")
    if not result.stamps:
        return Finding(_SUBJECT, Level.NOTE, f"{text}; stamps cannot be read: proofs cost a message each", _NO_STAMPS)
    return Finding(_SUBJECT, Level.OK, f"{text}; stamps can be read")


def read(address: bytes, base: int) -> _Result:
    """The reader: imports the pool and copies it.

    Raises:
        KvdError: it cannot be imported.
        OSError: it cannot be read.

    """
    pools = import_pools(export_addresses.decode(address), map_host_pool)
    source = pools.find(base)
    assert source is not None  # noqa: S101 - the one that was exported
    target = np.zeros(BYTES, dtype=np.uint8)
    length = np.array(_PIECES, dtype=np.uint64)
    offset = np.cumsum(length) - length
    seconds = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        copy_lent(source, offset + np.uint64(target.ctypes.data), source.addresses(offset, length), length)
        seconds.append(time.perf_counter() - started)
    return _Result(BYTES / min(seconds), pools.process is not None, bool((target == _PATTERN).all()))


if __name__ == "__main__":
    try:
        found = read(bytes.fromhex(sys.argv[1]), int(sys.argv[2]))
    except (KvdError, OSError) as problem:
        sys.exit(str(problem))
    sys.stdout.buffer.write(msgspec.json.encode(found))
