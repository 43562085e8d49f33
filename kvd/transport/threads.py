"""How the kernel runs a transport's thread: on which cores, and who goes before it.

Whoever wakes up (our loop, a worker, an engine) should have the core at once, since what runs there copies for
milliseconds. Niceness decides who gets how much. That a woken thread need not wait for the end of the running one's
slice is decided by the slices' lengths: the shorter goes first (EEVDF's custom slices, Linux 6.12; before it the length
is ignored).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection
from typing import Final

_SLICE_NS: Final = 100_000_000
"""The longest that the kernel takes, in ns; its own is 0.7 to 2.8 ms. A thread that waits for it alone runs on."""

_SCHED_SETATTR: Final = {"x86_64": 314, "aarch64": 274}
"""The system call's number: neither Python's `os` nor a glibc before 2.41 has it."""


class _Attributes(ctypes.Structure):
    """`struct sched_attr` of sched_setattr(2), in its first version."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def deal_cores(cores: Collection[int], count: int) -> list[frozenset[int]]:
    """As many sets of these cores, without a common one where there are enough.

    Threads that may run anywhere share one core for whole reads while another idles: each sleeps too shortly, between
    two slices, for the kernel to move it. Numbers are dealt in turn, so that both threads of a core (numbers half of
    all apart, as the kernel numbers them where it can choose) fall into one set, and each set has cores of all nodes.
    """
    ordered = sorted(cores)
    return [frozenset(ordered[first % len(ordered) :: count]) for first in range(count)]


class Place:
    """Where the thread that makes this may run: anywhere, or on `cores` alone while it copies.

    A thread that waits for the network must not keep to one: who sends to it may be on the same.

    Raises:
        OSError: the kernel (a seccomp filter, a cpuset) refuses one of the two sets.

    """

    def __init__(self, cores: Collection[int]) -> None:
        self._anywhere = os.sched_getaffinity(0)
        self._cores = cores
        self._copies = False
        if cores:
            os.sched_setaffinity(0, cores)  # a refusal is better found now than in the middle of a read
            os.sched_setaffinity(0, self._anywhere)

    def keep(self, *, copies: bool) -> None:
        """Says whether what the thread does from now on is to copy."""
        if copies is not self._copies and self._cores:
            os.sched_setaffinity(0, self._cores if copies else self._anywhere)
            self._copies = copies


def settle(niceness: int) -> None:
    """Makes the calling thread nicer by `niceness` and lengthens its slices.

    Raises:
        OSError: the kernel (a seccomp filter, mostly) refuses it.

    """
    nice = os.nice(niceness)  # Linux counts it, and the rest, for each thread
    call = _SCHED_SETATTR.get(os.uname().machine)
    if call is None:
        return  # a machine whose number we do not know loses what a kernel before 6.12 does
    attributes = _Attributes(ctypes.sizeof(_Attributes), os.SCHED_OTHER, nice=nice, runtime=_SLICE_NS)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(call, 0, ctypes.byref(attributes), 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"sched_setattr: {os.strerror(error)}")
