"""How fast a path is, judged by the transports on it.

A `path` is the text of `PeerAdded`: `copy/memory` within the host, else UCX's transports as `transport/device`,
separated by blanks; empty if unknown. `STAGED_THERE` and `STAGED_HERE` are added where bytes go by way of host memory.
"""

from enum import StrEnum
from typing import Final

STAGED_THERE: Final = "staged/there"
"""The peer's pools are on a GPU, and it copies them into its host memory for us."""
STAGED_HERE: Final = "staged/here"
"""Ours are, and get the bytes out of our host memory."""
STAGED: Final = {STAGED_THERE, STAGED_HERE}


class Kind(StrEnum):
    """The fastest transport of a path, best first; a metrics label."""

    COPY = "copy"
    """kvd copies, out of a mapping of the peer's pool."""
    RDMA = "rdma"
    """A NIC reads the peer's memory without the peer's CPU."""
    CMA = "cma"
    """UCX within the host, by the kernel: only of a peer whose pools could not be imported (`PeerAdded.detour`)."""
    SHM = "shm"
    """The same by shared memory, copied twice."""
    TCP = "tcp"
    """Sockets."""
    UNKNOWN = "unknown"


_PREFIXES: Final = (
    (Kind.COPY, ("copy",)),
    (Kind.RDMA, ("rc", "dc", "ud", "srd", "gga", "ugni")),
    (Kind.CMA, ("cma", "xpmem", "knem")),
    (Kind.SHM, ("sysv", "posix")),
    (Kind.TCP, ("tcp",)),
)

_CARRIERS: Final = {
    Kind.RDMA: "by RDMA",
    Kind.TCP: "over TCP",
    Kind.CMA: "by the kernel within this host",
    Kind.SHM: "by shared memory within this host",
    Kind.UNKNOWN: "by a way that UCX does not tell",
}


def kind_of(path: str) -> Kind:
    """The best kind among the transports of `path`."""
    transports = {entry.partition("/")[0] for entry in path.split()}
    for kind, prefixes in _PREFIXES:
        if any(transport.startswith(prefixes) for transport in transports):
            return kind
    return Kind.UNKNOWN


def how_read(path: str) -> str:
    """How the bytes of `path` come, of all the ways that there are, and why that way; empty if nobody knows yet."""
    kind, places = kind_of(path), path.split()
    if not path or kind is Kind.COPY:
        return path and "copied within this host"
    sides = [side for entry, side in ((STAGED_THERE, "of the peer"), (STAGED_HERE, "of this host")) if entry in places]
    if not sides:
        return f"{_CARRIERS[kind]}, straight out of the peer's host memory into that of this host"
    why = "as kvd registers no GPU's memory with network cards"
    return f"{_CARRIERS[kind]}, by way of pinned host memory {' and '.join(sides)}, {why}"


def why_slow(path: str, *, rdma_here: bool) -> str | None:
    """Why `path` to another host is slower than it could be, and what to do; None if it is not, or if it is unknown.

    `rdma_here` is whether this host has RDMA devices.
    """
    if rdma_here and kind_of(path) is Kind.TCP:
        return (
            "this host has RDMA devices, but the peer's bytes go through TCP: check the devices and the memlock limit "
            "on both sides; `kvd doctor` says which is missing"
        )
    return None
