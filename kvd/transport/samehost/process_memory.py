"""Copies between addresses, by the kernel: within this process, and a few bytes out of another one.

`process_vm_readv` takes a thousand pieces a call, without the GIL. Unlike `memcpy` it fails where a page cannot be
read, so a peer that takes pages away from under a pool cannot end this process by a signal.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from array import array
from collections.abc import Sequence

import numpy as np

from kvd.memory.mapping import last_error
from kvd.net.unix import credentials, peer_pidfd, readable
from kvd.transport.slices import U64

_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = (
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
)


def copy(target: U64, source: U64, length: U64) -> None:
    """Copies `length[i]` bytes from address `source[i]` to `target[i]` of this process; at most 1024 pieces.

    Raises:
        OSError: not all of it could be read, or written.

    """
    local, remote = _vector(target, length), _vector(source, length)
    _read(os.getpid(), local.ctypes.data, remote.ctypes.data, len(length), int(length.sum()))


def copy_few(pieces: Sequence[tuple[int, int, int]]) -> None:
    """Like `copy`, of a few pieces: to which address, from which, and how many bytes.

    Raises:
        OSError: not all of it could be read, or written.

    """
    local = array("Q", [number for target, _, length in pieces for number in (target, length)])
    remote = array("Q", [number for _, source, length in pieces for number in (source, length)])
    size = sum([length for _, _, length in pieces])
    _read(os.getpid(), local.buffer_info()[0], remote.buffer_info()[0], len(pieces), size)


class ProcessMemory:
    """The memory of the process that listens at the other end of `connected`.

    Raises:
        OSError: that process cannot be seen from here (it is in another PID namespace), or has ended.

    """

    def __init__(self, connected: socket.socket) -> None:
        self._pid = credentials(connected).pid
        if not self._pid:
            raise OSError(errno.ESRCH, "its process is in another PID namespace")
        self._descriptor = peer_pidfd(connected, self._pid, listens=True)
        if self._descriptor < 0:
            raise OSError(errno.ESRCH, "its process cannot be watched")

    def read(self, address: int, size: int) -> bytes:
        """The `size` bytes at `address`, read out of the living process. For a few bytes, in 3 us.

        Raises:
            OSError: it has ended, or its memory may not be read.

        """
        found = array("B", bytes(size))
        here, there = array("Q", found.buffer_info()), array("Q", (address, size))
        _read(self._pid, here.buffer_info()[0], there.buffer_info()[0], 1, size)
        if readable(self._descriptor):
            raise OSError(errno.ESRCH, "the process has ended")  # and its number may be another's
        return found.tobytes()

    def close(self) -> None:
        """Forgets the process."""
        os.close(self._descriptor)


def _read(pid: int, local: int, remote: int, pieces: int, size: int) -> None:
    """Copies the `pieces` at the address `remote`, of process `pid`, to those at `local`, of this one."""
    check_copied("process_vm_readv", _libc.process_vm_readv(pid, local, pieces, remote, pieces, 0), size)


def check_copied(call: str, done: int, size: int) -> None:
    """Checks what a call that copies has returned.

    Raises:
        OSError: it failed, or copied less than `size` bytes.

    """
    if done < 0:
        raise last_error(call)
    if done != size:
        raise OSError(errno.EFAULT, f"{call}: {done} of {size} bytes could be copied")


def _vector(address: U64, length: U64) -> U64:
    """An array of `struct iovec`."""
    vector = np.empty((len(address), 2), dtype=np.uint64)
    vector[:, 0], vector[:, 1] = address, length
    return vector
