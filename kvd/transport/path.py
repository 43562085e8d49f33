"""What a path is worth: lanes as the transport names them, told apart by the hardware that they need.

A `path` is the text of `PeerAdded`: lanes, `transport/device` each, separated by blanks; empty where nobody knows.
"""

from enum import StrEnum
from typing import Final


class Kind(StrEnum):
    """The best that a path has, best first; a label of metrics."""

    CUDA_IPC = "cuda_ipc"
    """GPU to GPU of one host."""
    RDMA = "rdma"
    """Through a NIC that reads the peer's memory by itself."""
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
"""Lanes that read no host memory of another process: the other side sends what goes over them, or it is a GPU's."""


def is_copied(path: str) -> bool:
    """Whether reads of host memory by `path` are copies that the kernel makes out of the living process (CMA).

    Beside a NIC's lane nobody knows which of the two UCX takes, and xpmem keeps pages of a process that is gone.
    """
    transports = {lane.partition("/")[0] for lane in path.split()}
    return "cma" in transports and transports <= _BESIDE_CMA


def kind_of(path: str) -> Kind:
    """The best kind among the lanes of `path`."""
    transports = [lane.partition("/")[0] for lane in path.split()]
    for kind, prefixes in _PREFIXES:
        if any(transport.startswith(prefixes) for transport in transports):
            return kind
    return Kind.UNKNOWN


def why_slow(path: str, *, same_host: bool, rdma_here: bool) -> str | None:
    """Why `path` is slower than it should be, and what to do; None where it is not, or where nobody knows.

    `same_host` is whether the peer runs on this kernel, `rdma_here` whether this host has RDMA devices.
    """
    kind = kind_of(path)
    if same_host and kind is Kind.TCP:
        return (
            "the peer is on this host, but its bytes go through TCP: both daemons need one user (or CAP_SYS_PTRACE), "
            "one PID namespace and ptrace_scope 0; `kvd doctor` says which is missing"
        )
    if rdma_here and not same_host and kind is Kind.TCP:
        return (
            "this host has RDMA devices, but the peer's bytes go through TCP: check the devices and the memlock limit "
            "on both sides; `kvd doctor` says which is missing"
        )
    return None
