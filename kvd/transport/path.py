"""How fast a path is, judged by the transports on it.

A `path` is the text of `PeerAdded`: `copy/memory` within the host, else UCX's transports as `transport/device`,
separated by blanks; empty if unknown.
"""

from enum import StrEnum
from typing import Final


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


def kind_of(path: str) -> Kind:
    """The best kind among the transports of `path`."""
    transports = _transports(path)
    for kind, prefixes in _PREFIXES:
        if any(transport.startswith(prefixes) for transport in transports):
            return kind
    return Kind.UNKNOWN


def _transports(path: str) -> set[str]:
    return {entry.partition("/")[0] for entry in path.split()}


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
