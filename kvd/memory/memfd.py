"""Pools in host memory: sealed memfds on the largest pages available.

Workers hold descriptors of what the daemon maps, so a pool is sealed against changes of its size: touching a mapped
page that was cut off the file is a SIGBUS. The seals also tell a pool from any other descriptor when a worker gives one
back to a restarted daemon.
"""

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from typing import Final
from weakref import WeakSet

from kvd import foreign
from kvd.errors import ErrorCode, NoMemory, on_error, refusal
from kvd.memory.mapping import HUGE_PAGE, Mapping, give_back
from kvd.memory.room import Room

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_THP_SHARE: Final = 0.9
"""The part of a pool that must be on transparent huge pages for it to be called `thp`."""


class Backing(StrEnum):
    """The pages of pools. `AUTO` takes the first of the others, in this order, that is available."""

    AUTO = "auto"
    HUGETLB = "hugetlb"
    THP = "thp"
    PLAIN = "plain"


class MemfdPool:
    """A mapped, sealed memfd (a `kvd.memory.interface.Memory`)."""

    device: Final = ""

    def __init__(self, descriptor: int, mapping: Mapping, size: int) -> None:
        self.descriptor = descriptor
        self.size = size
        self.backing: str = _backing(mapping)
        self._mapping = mapping
        status = os.fstat(descriptor)
        self.file = status.st_dev, status.st_ino
        """Device and inode, which no other open file has."""

    @property
    def base(self) -> int:
        """Address of the first byte in this process, a multiple of 2 MiB."""
        return self._mapping.base

    @property
    def length(self) -> int:
        """Bytes of the mapping, which is all of the file."""
        return self._mapping.length

    def move(self) -> None:
        """Maps the pool at another address, see `Memory`."""
        try:
            mapping = Mapping(self.descriptor, self._mapping.length)
            with on_error(mapping.close):
                mapping.populate()
        except OSError as error:
            raise refusal(ErrorCode.OVERLOADED, f"the pool cannot be mapped anew: {error}") from error
        old, self._mapping = self._mapping, mapping  # first: if blanking fails, nobody knows what is at the old address
        old.blank()

    def close(self) -> None:
        """Unmaps and closes; a second call does nothing. The bytes live on while another process holds the file."""
        if self.descriptor >= 0:
            self._mapping.close()
            os.close(self.descriptor)
            self.descriptor = -1

    def free(self) -> None:
        """Like `close`, and frees the memory even if others map it: 0.28 s per GiB on small pages, 4 ms on huge."""
        try:
            give_back(self.descriptor, _file_length(self.size))
        finally:
            self.close()


class MemfdProvider:
    """Makes pools of host memory (a `kvd.memory.interface.MemoryProvider`).

    Faulting in blocks the caller while the kernel finds and zeroes the memory: measured 0.06 s per GiB on reserved huge
    pages, 2.5 s on small ones that the host had to find first.
    """

    device: Final = ""

    def __init__(self, backing: Backing = Backing.AUTO, room: Room | None = None) -> None:
        self._backing = backing
        self._room = room or Room()
        self._pools: WeakSet[MemfdPool] = WeakSet()
        self._adding = threading.Lock()

    def footprint(self, size: int) -> int:
        """Bytes of memory that a pool of `size` bytes takes: whole pages of 2 MiB."""
        return _file_length(size)

    def allocate(self, name: str, size: int) -> MemfdPool:
        """A new pool of `size` bytes, zeroed, faulted in and sealed.

        Raises:
            BadRequest: `BAD_SPEC`, the size is not positive.
            NoMemory: there is too little of the configured kind, on the host or within this process's cgroup.

        """
        if size <= 0:
            raise refusal(ErrorCode.BAD_SPEC, f"pool {name!r} of {size} bytes: a pool has at least one byte")
        length = _file_length(size)
        if self._backing in (Backing.AUTO, Backing.HUGETLB):
            try:
                return self._added(_create(name, size, hugetlb=True))
            except OSError as error:
                if self._backing is Backing.HUGETLB:
                    raise NoMemory(_no_hugetlb(name, length, error), length) from error
        try:
            with self._room.taken(name, length) as count:
                pool = _create(name, size, huge=self._backing is not Backing.PLAIN, count=count)
        except OSError as error:
            text = f"pool {name!r} of {length} bytes: {error}"
            if error.errno in (errno.ENOMEM, errno.ENOSPC):
                raise NoMemory(text, length) from error
            raise refusal(ErrorCode.OVERLOADED, text) from error  # it may be a descriptor that is missing
        if self._backing is Backing.THP and pool.backing != Backing.THP:
            pool.close()
            raise NoMemory(_no_thp(name, length), length)
        return self._added(pool)

    def adopt(self, descriptor: int, size: int) -> MemfdPool:
        """The pool of `size` bytes behind `descriptor`, with its bytes. Closes `descriptor` if it refuses.

        Raises:
            BadRequest: `BAD_POOL`, it is no writable memfd of that size sealed like a pool, its bytes were freed, or a
                pool that has not ended has it.
            Unavailable: `OVERLOADED`, it cannot be faulted in.

        """
        with on_error(partial(foreign.close, (descriptor,))):
            _check(descriptor, size)
            foreign.kept(descriptor)
            try:
                mapping = Mapping(descriptor, _file_length(size))
            except OSError as error:
                raise refusal(ErrorCode.BAD_POOL, f"the descriptor cannot be mapped writable: {error}") from error
            try:
                with on_error(mapping.close):
                    _fault_in(mapping, huge=self._backing is not Backing.PLAIN)
                    return self._added(MemfdPool(descriptor, mapping, size))
            except OSError as error:
                raise refusal(ErrorCode.OVERLOADED, f"the pool cannot be faulted in: {error}") from error

    def _added(self, pool: MemfdPool) -> MemfdPool:
        """The pool, if its file is no other's: what is lent twice, importers would take for an attack."""
        with self._adding:
            if any(pool.file == other.file for other in self._pools if other.descriptor >= 0):
                text = "the descriptor is that of a pool that has not ended: detach that first"
                raise refusal(ErrorCode.BAD_POOL, text)
            self._pools.add(pool)
        return pool


def _create(
    name: str, size: int, *, hugetlb: bool = False, huge: bool = False, count: Callable[[int], None] | None = None
) -> MemfdPool:
    kind = os.MFD_HUGETLB | os.MFD_HUGE_2MB if hugetlb else 0
    descriptor = os.memfd_create(f"kvd:{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | kind)
    with on_error(partial(os.close, descriptor)):
        if count is not None:
            count(descriptor)
        os.ftruncate(descriptor, _file_length(size))
        os.fchmod(descriptor, 0o400)  # a peer that gets a read-only descriptor cannot open it again for writing
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        mapping = Mapping(descriptor, _file_length(size))
        with on_error(mapping.close):
            _fault_in(mapping, huge=huge)
            return MemfdPool(descriptor, mapping, size)


def _fault_in(mapping: Mapping, *, huge: bool) -> None:
    if huge:
        # Memory may be too fragmented for some of it; `_backing` tells afterwards.
        with contextlib.suppress(OSError):
            mapping.collapse()
    mapping.populate()


def _backing(mapping: Mapping) -> Backing:
    page, transparent = mapping.page_bytes()
    if page == HUGE_PAGE:
        return Backing.HUGETLB
    return Backing.THP if transparent >= _THP_SHARE * mapping.length else Backing.PLAIN


def _check(descriptor: int, size: int) -> None:
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        status = os.fstat(descriptor)
    except OSError as error:
        text = f"the descriptor is no memfd ({error}): give back the one that kvd lent"
        raise refusal(ErrorCode.BAD_POOL, text) from error
    length, present, wanted = status.st_size, status.st_blocks * 512, _file_length(max(size, 0))
    if seals & SEALS != SEALS:
        text = f"the memfd has seals {seals:#x}, a pool has {SEALS:#x}: its size could change under us"
    elif size <= 0 or length != wanted:
        text = f"the memfd has {length} bytes, a pool of {size} has {wanted}"
    elif present < length:
        text = f"the memfd has {present} of its {length} bytes: its pool has ended meanwhile; attach without it"
    else:
        return
    raise refusal(ErrorCode.BAD_POOL, text)


def _file_length(size: int) -> int:
    return -(-size // HUGE_PAGE) * HUGE_PAGE


def _no_hugetlb(name: str, length: int, error: OSError) -> str:
    pages = length // HUGE_PAGE
    return (
        f"pool {name!r} needs {pages} free hugetlb pages of 2 MiB ({error}): reserve them with "
        f"`sysctl vm.nr_hugepages=N`, N at least {pages} more than are in use, or set the backing to `auto`"
    )


def _no_thp(name: str, length: int) -> str:
    return (
        f"pool {name!r} of {length} bytes could not be put on transparent huge pages: `echo advise > "
        "/sys/kernel/mm/transparent_hugepage/shmem_enabled`, free memory so that it is less fragmented, "
        "or set the backing to `auto`"
    )
