"""A NIXL transfer between two processes, over the loopback interface: as daemons of two hosts read from each other."""

import os
import subprocess
import sys
import time
from typing import Final

import msgspec
import numpy as np

from kvd import limits
from kvd.bench.raw import RawAgent
from kvd.doctor import Finding, Level
from kvd.plan import Descriptors
from kvd.transport.nixl.ucx import UcxEndpoints, nixl_name
from kvd.units import size

BYTES: Final = 64 * limits.MIB
_BLOCK: Final = limits.MIB
_PATTERN: Final = 0x5A
_ROUNDS: Final = 3
_NOT_WITHIN_THE_HOST: Final = {"UCX_TLS": "^sm"}
_LOOPBACK: Final = ("lo",)
_SUBJECT: Final = "network transfer"
_MORE: Final = "NIXL_LOG_LEVEL=INFO UCX_LOG_LEVEL=info python -m kvd.doctor.loopback read says more"


def check_transfer(timeout: float) -> list[Finding]:
    """Reads 64 MiB from another process as if from another host; says which transports UCX took, and how fast.

    The reader is a process of its own too, as a transfer may hang and NIXL's teardown has crashed.
    """
    try:
        nixl_name()
    except ImportError as error:
        return [Finding(_SUBJECT, Level.NOTE, "peers on other hosts cannot be reached", str(error))]
    command = [sys.executable, "-m", "kvd.doctor.loopback", "read"]
    try:
        ran = subprocess.run(  # noqa: S603 - ours
            command, capture_output=True, text=True, timeout=timeout, check=False, env=_NOT_WITHIN_THE_HOST | os.environ
        )
    except subprocess.TimeoutExpired:
        return [Finding(_SUBJECT, Level.BROKEN, f"did not end within {timeout:g} s", _MORE)]
    if ran.returncode != 0:
        last = (ran.stderr.strip().splitlines() or [f"it ended with status {ran.returncode}"])[-1]
        return [Finding(_SUBJECT, Level.BROKEN, last, _MORE)]
    return msgspec.json.decode(ran.stdout, type=list[Finding])


def read() -> list[Finding]:
    """The reader: starts the other process, reads from it and judges the result."""
    command = [sys.executable, "-m", "kvd.doctor.loopback", "serve"]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603 - ours
    target = np.zeros(BYTES, dtype=np.uint8)
    agent = RawAgent("kvd-doctor", target.ctypes.data, BYTES, _LOOPBACK)
    assert other.stdout is not None  # noqa: S101 - piped
    metadata, address = other.stdout.readline().split()
    endpoints = UcxEndpoints("kvd-doctor")
    before = endpoints.endpoints()
    peer = agent.connect(bytes.fromhex(metadata))
    path = endpoints.path_since(before)
    seconds = min(_read(agent, peer, int(address)) for _ in range(_ROUNDS))
    arrived = bool((target == _PATTERN).all())
    other.communicate()
    return [_transports(endpoints), _judge(path, BYTES / seconds, arrived=arrived)]


def _read(agent: RawAgent, peer: str, address: int) -> float:
    offsets = np.arange(0, BYTES, _BLOCK, dtype=np.uint64)
    descriptors = Descriptors(offsets, offsets, np.full(offsets.size, _BLOCK, dtype=np.uint64))
    started = time.perf_counter()
    agent.read(peer, address, descriptors)
    return time.perf_counter() - started


def _transports(endpoints: UcxEndpoints) -> Finding:
    names = endpoints.components()
    if not names:
        return Finding("UCX", Level.NOTE, "this UCX does not list its transports", "install a newer nixl wheel")
    return Finding("UCX", Level.OK, f"transports with a device here: {', '.join(names)}")


def _judge(path: str, rate: float, *, arrived: bool) -> Finding:
    over = path or "transports that UCX does not name"
    text = f"{size(BYTES)} at {rate / 1e9:.1f} GB/s over {over}, by NIXL over loopback, as from another host"
    if not arrived:
        return Finding(_SUBJECT, Level.BROKEN, f"{text}: bytes differ", "please report this")
    return Finding(_SUBJECT, Level.OK, text)


def serve() -> None:
    """The other process: serves 64 MiB until its input ends."""
    source = np.full(BYTES, _PATTERN, dtype=np.uint8)
    agent = RawAgent(f"kvd-doctor-{os.getpid()}", source.ctypes.data, BYTES, _LOOPBACK)
    agent.serve()
    sys.stdout.write(f"{agent.metadata.hex()} {source.ctypes.data}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve()
    else:
        sys.stdout.buffer.write(msgspec.json.encode(read()))
        sys.stdout.flush()
    os._exit(0)  # without NIXL's teardown (`kvd.transport.nixl.process`)
