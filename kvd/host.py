"""What kvd asks of its host."""

import ipaddress
import math
import os
import resource
import socket
import struct
from pathlib import Path
from typing import Final

from kvd.cgroups import quotas

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_RDMA_DEVICES = Path("/sys/class/infiniband")
_CGROUP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


def boot_id() -> str:
    """Identifies the running kernel, across containers."""
    return _BOOT_ID.read_text(encoding="ascii").strip()


def raise_open_files(wanted: int) -> None:
    """Raises the limit of open files to `wanted`, or as far as the host allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def rdma_devices() -> list[str]:
    """Names of the kernel's RDMA devices."""
    return sorted(entry.name for entry in _RDMA_DEVICES.iterdir()) if _RDMA_DEVICES.is_dir() else []


def cores(cgroup: Path = _CGROUP, cgroups: Path = _CGROUPS) -> int:
    """How many cores this process may use: those of its affinity, or fewer if its cgroup has a quota."""
    return min([len(os.sched_getaffinity(0)), *(math.ceil(quota.cores) for quota in quotas(cgroup, cgroups))])


def rdma_ports() -> list[str]:
    """Every port of the RDMA devices, as `device:port`."""
    found = [(name, port) for name in rdma_devices() for port in (_RDMA_DEVICES / name / "ports").iterdir()]
    return sorted(f"{name}:{port.name}" for name, port in found)


_HEADER: Final = struct.Struct("=IHHII")
"""`nlmsghdr`: length, type, flags, sequence number, port."""
_ADDRESS: Final = struct.Struct("=BBBBI")
"""`ifaddrmsg`: family, length of the prefix, flags, scope, index of the interface."""
_ATTRIBUTE: Final = struct.Struct("=HH")
_GET_ADDRESSES, _NEW_ADDRESS, _ADDRESS_OF_INTERFACE, _LOCAL_ADDRESS = 22, 20, 1, 2
_REQUEST_ALL: Final = 0x301


def interface_of(host: str) -> str | None:
    """The interface with the IP address `host`; None if there is none, or `host` is no address.

    Asks over netlink, as older calls report only the first address of an interface.
    """
    try:
        wanted = ipaddress.ip_address(host).packed
    except ValueError:
        return None
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE) as kernel:
        kernel.send(
            _HEADER.pack(_HEADER.size + _ADDRESS.size, _GET_ADDRESSES, _REQUEST_ALL, 1, 0) + bytes(_ADDRESS.size)
        )
        while True:
            data = kernel.recv(1 << 16)
            while data:
                size, kind, _, _, _ = _HEADER.unpack_from(data)
                if kind != _NEW_ADDRESS:  # NLMSG_DONE, or an error
                    return None
                message, data = data[_HEADER.size : size], data[(size + 3) & ~3 :]
                if wanted == _address_in(message[_ADDRESS.size :]):
                    return socket.if_indextoname(_ADDRESS.unpack_from(message)[4])


def _address_in(attributes: bytes) -> bytes | None:
    """The interface's own address; on a point-to-point link IFA_ADDRESS is that of the other end."""
    found: dict[int, bytes] = {}
    while attributes:
        size, kind = _ATTRIBUTE.unpack_from(attributes)
        found[kind] = attributes[_ATTRIBUTE.size : size]
        attributes = attributes[(size + 3) & ~3 :]
    return found.get(_LOCAL_ADDRESS, found.get(_ADDRESS_OF_INTERFACE))
