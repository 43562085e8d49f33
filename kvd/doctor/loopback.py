"""A transfer between this process and another, over NIXL, as between two daemons of this host."""

import os
import subprocess
import sys
import time
from typing import Final

import numpy as np

from kvd import limits
from kvd.bench.raw import RawAgent
from kvd.doctor.finding import Finding, Level
from kvd.plan import Descriptors
from kvd.transport.lanes import Lanes
from kvd.transport.path import Kind, kind_of

BYTES: Final = 64 * limits.MIB
_BLOCK: Final = limits.MIB
_PATTERN: Final = 0x5A
_ROUNDS: Final = 3


def check_transfer(timeout: float) -> list[Finding]:
    """Reads 64 MiB from a process that is started for it; says which lanes UCX took, and how fast."""
    command = [sys.executable, "-m", "kvd.doctor.loopback"]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603 - ours
    try:
        target = np.zeros(BYTES, dtype=np.uint8)
        agent = RawAgent("kvd-doctor", target.ctypes.data, BYTES)
        assert other.stdout is not None  # noqa: S101 - piped
        metadata, address = other.stdout.readline().split()
        lanes = Lanes("kvd-doctor")
        before = lanes.endpoints()
        peer = agent.connect(bytes.fromhex(metadata))
        path = " ".join(sorted({lane for made in lanes.endpoints() - before for lane in lanes.of(made)}))
        seconds = min(_read(agent, peer, int(address)) for _ in range(_ROUNDS))
        arrived = bool((target == _PATTERN).all())
    except (RuntimeError, ValueError, OSError) as error:
        text = f"{type(error).__name__}: {error}"
        return [Finding("transfer", Level.BROKEN, text, "NIXL_LOG_LEVEL=INFO UCX_LOG_LEVEL=info kvd doctor says more")]
    finally:
        other.communicate(timeout=timeout)
    return [_transports(lanes), _judge(path, BYTES / seconds, arrived=arrived)]


def _read(agent: RawAgent, peer: str, address: int) -> float:
    offsets = np.arange(0, BYTES, _BLOCK, dtype=np.uint64)
    descriptors = Descriptors(offsets, offsets, np.full(offsets.size, _BLOCK, dtype=np.uint64))
    started = time.perf_counter()
    agent.read(peer, address, descriptors)
    return time.perf_counter() - started


def _transports(lanes: Lanes) -> Finding:
    names = lanes.components()
    if not names:
        return Finding("UCX", Level.NOTE, "this UCX does not say which transports it has", "a newer nixl wheel does")
    return Finding("UCX", Level.OK, f"transports with a device here: {', '.join(names)}")


def _judge(path: str, rate: float, *, arrived: bool) -> Finding:
    text = f"{BYTES // limits.MIB} MiB at {rate / 1e9:.1f} GB/s over {path or 'lanes that UCX does not name'}"
    if not arrived:
        return Finding("transfer", Level.BROKEN, f"{text}: bytes differ", "please report this")
    if kind_of(path) is Kind.TCP:
        return Finding("transfer", Level.SLOW, text, "same-host copies are not in use: see the findings above, UCX_TLS")
    return Finding("transfer", Level.OK, text)


def _serve() -> None:
    """The other process: offers 64 MiB until its input ends."""
    source = np.full(BYTES, _PATTERN, dtype=np.uint8)
    agent = RawAgent(f"kvd-doctor-{os.getpid()}", source.ctypes.data, BYTES)
    agent.serve()
    sys.stdout.write(f"{agent.metadata.hex()} {source.ctypes.data}\n")
    sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)  # without NIXL's teardown (`kvd.transport.nixl`)


if __name__ == "__main__":
    _serve()
