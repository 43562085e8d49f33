"""What becomes of memory whose maker was killed, and what making, zeroing and moving it costs."""

import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from kvd.cuda.device import device
from kvd.cuda.memory import Mapping, granule
from kvd.errors import KvdError
from kvd.limits import GIB, MIB


def costs(*, quick: bool) -> dict[str, Any]:
    """Of memory of the first GPU."""
    length = 64 * MIB if quick else GIB
    survived = _survives(length)
    before = device(0).free_and_total()[0]
    memory, made = _timed(lambda: Mapping.allocate(device(0), length))
    taken = before - device(0).free_and_total()[0]
    step = max(granule(device(0)), length // 64)
    fresh = {memory.read(offset, 4096) == bytes(4096) for offset in range(0, length, step)}
    _, zeroed = _timed(memory.zero)
    _, moved = _timed(memory.move)
    memory.close()
    return {
        "bytes": length,
        "survives its maker's SIGKILL": survived,
        "seconds to make": made,
        "seconds to zero": zeroed,
        "seconds to move": moved,
        "bytes taken of the GPU": taken,
        "fresh memory is zero": fresh == {True},
    }


def _survives(length: int) -> bool:
    """A process that knows no CUDA has the descriptor when the maker is killed."""
    ours, theirs = socket.socketpair()
    maker = os.fork()  # before the driver is loaded: it does not survive a fork
    if maker == 0:
        try:
            _make(theirs, length)
        finally:
            os._exit(1)
    theirs.close()
    said, descriptors, _, _ = socket.recv_fds(ours, 4096, 1)
    os.kill(maker, signal.SIGKILL)
    os.waitpid(maker, 0)
    if not descriptors:
        raise AssertionError(f"the maker has no memory: {said.decode()}")
    [descriptor] = descriptors
    memory = Mapping.map_descriptor(device(0), descriptor, length, writable=False)
    found = memory.read(length - 16, 16)
    memory.close()
    os.close(descriptor)
    if found != bytes(8) + b"the last":
        raise AssertionError(f"the bytes are gone: {found!r}")
    return True


def _make(whom: socket.socket, length: int) -> None:
    """Makes memory, passes its descriptor on, or why there is none, and waits for the end."""
    try:
        memory = Mapping.allocate(device(0), length)
        memory.zero()
        memory.write(length - 8, b"the last")
        socket.send_fds(whom, [b"x"], [memory.export()])
    except KvdError as error:
        whom.sendall(error.text.encode())
        return
    signal.pause()


def _timed(action: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    result = action()
    return result, time.perf_counter() - began
