"""Copies between addresses, by the kernel: within this process, and single words out of another one.

`process_vm_readv` takes a thousand pieces a call, without the GIL. Unlike `memcpy` it fails where a page cannot be
read, so a peer that takes pages away from under a pool cannot end this process by a signal.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import socket
from typing import Final

import numpy as np

from kvd.net.unix import credentials, peer_pidfd
from kvd.transport.slices import U64

_WORD_BYTES: Final = 8

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
    _read(os.getpid(), _vector(target, length), _vector(source, length))


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

    def word(self, address: int) -> int:
        """The word at `address`, little-endian, read out of the living process.

        Raises:
            OSError: it has ended, or its memory may not be read.

        """
        found = np.zeros(1, dtype="<u8")
        length = np.array([_WORD_BYTES], dtype=np.uint64)
        here, there = (np.array([at], dtype=np.uint64) for at in (found.ctypes.data, address))
        _read(self._pid, _vector(here, length), _vector(there, length))
        if readable(self._descriptor, 0.0):
            raise OSError(errno.ESRCH, "the process has ended")  # and its number may be another's
        return int(found[0])

    def close(self) -> None:
        """Forgets the process."""
        os.close(self._descriptor)


def readable(descriptor: int, seconds: float) -> bool:
    """Waits up to `seconds`. Not by `select`, which takes no descriptor above 1023."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def _read(pid: int, local: U64, remote: U64) -> None:
    done = _libc.process_vm_readv(pid, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0)
    if done < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"process_vm_readv: {os.strerror(number)}")
    if done != (size := int(local[:, 1].sum())):
        raise OSError(errno.EFAULT, f"process_vm_readv: {done} of {size} bytes could be copied")


def _vector(address: U64, length: U64) -> U64:
    """An array of `struct iovec`."""
    vector = np.empty((len(address), 2), dtype=np.uint64)
    vector[:, 0], vector[:, 1] = address, length
    return vector
