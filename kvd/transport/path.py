"""How fast a path is, judged by the UCX transports on it.

A `path` is the text of `PeerAdded`: UCX transports as `transport/device`, separated by blanks; empty if unknown.
"""

from enum import StrEnum
from typing import Final


class Kind(StrEnum):
    """The fastest transport of a path, best first; a metrics label."""

    CUDA_IPC = "cuda_ipc"
    """GPU to GPU on one host."""
    RDMA = "rdma"
    """A NIC reads the peer's memory without the peer's CPU."""
    CMA = "cma"
    """One copy by the kernel, between processes of one host."""
    SHM = "shm"
    """Shared memory of one host, two copies."""
    TCP = "tcp"
    """Sockets."""
    UNKNOWN = "unknown"


_PREFIXES: Final = (
    (Kind.CUDA_IPC, ("cuda_ipc", "rocm_ipc", "ze_ipc")),
    (Kind.RDMA, ("rc", "dc", "ud", "srd", "gga", "ugni")),
    (Kind.CMA, ("cma", "xpmem", "knem")),
    (Kind.SHM, ("sysv", "posix")),
    (Kind.TCP, ("tcp",)),
)

_BESIDE_CMA: Final = frozenset({"cma", "self", "posix", "sysv", "tcp", "cuda_copy", "cuda_ipc", "gdr_copy"})
"""Transports that do not read another process's host memory: the peer sends what they carry, or they serve GPUs."""


def is_copied(path: str) -> bool:
    """Whether the kernel copies reads of host memory over `path` out of the living process (CMA).

    False beside a NIC, since UCX may use either, and for xpmem, which keeps the pages of a dead process.
    """
    transports = _transports(path)
    return "cma" in transports and transports <= _BESIDE_CMA


def kind_of(path: str) -> Kind:
    """The best kind among the transports of `path`."""
    transports = _transports(path)
    for kind, prefixes in _PREFIXES:
        if any(transport.startswith(prefixes) for transport in transports):
            return kind
    return Kind.UNKNOWN


def _transports(path: str) -> set[str]:
    return {entry.partition("/")[0] for entry in path.split()}


def why_slow(path: str, *, same_host: bool, rdma_here: bool) -> str | None:
    """Why `path` is slower than it could be, and what to do; None if it is not, or if the path is unknown.

    `same_host` is whether the peer runs on this kernel, `rdma_here` whether this host has RDMA devices.
    """
    kind = kind_of(path)
    if same_host and kind is Kind.TCP:
        return (
            "the peer is on this host, but its bytes go through TCP: both daemons need the same user (or "
            "CAP_SYS_PTRACE), one PID namespace and ptrace_scope 0; `kvd doctor` says which is missing"
        )
    if rdma_here and not same_host and kind is Kind.TCP:
        return (
            "this host has RDMA devices, but the peer's bytes go through TCP: check the devices and the memlock limit "
            "on both sides; `kvd doctor` says which is missing"
        )
    return None
