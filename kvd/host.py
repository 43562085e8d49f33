"""What kvd asks of its host."""

import ipaddress
import math
import os
import resource
from pathlib import Path

import ifaddr

from kvd import cgroups, limits
from kvd.errors import ErrorCode, refusal
from kvd.net.unix import MAX_PATH_BYTES
from kvd.protocol.address import SOCKET_PATH

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
RDMA_DEVICES = Path("/sys/class/infiniband")


def boot_id() -> str:
    """Identifies the running kernel, across containers."""
    return _BOOT_ID.read_text(encoding="ascii").strip()


def without_links(address: str) -> str:
    """An address whose socket, if it is a Unix socket, lies in a folder that is named without links.

    It stays as it is where that cannot stand in an address, or cannot be found out: whoever connects is told of a link.
    """
    place, mark, key = address.partition("#")
    if not place.startswith("ipc:///"):
        return address
    folder, name = os.path.split(place.removeprefix("ipc://"))
    while True:
        try:
            held = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            break
        except FileNotFoundError:  # it may be made later; links are above it
            folder, last = os.path.split(folder)
            name = f"{last}/{name}"
        except (OSError, ValueError):
            return address
    try:
        path = os.path.join(os.readlink(f"/proc/self/fd/{held}"), name)
    finally:
        os.close(held)
    can_be_told = SOCKET_PATH.fullmatch(path) and len(path.encode()) <= MAX_PATH_BYTES
    return f"ipc://{path}{mark}{key}" if can_be_told else address


def raise_open_files(wanted: int) -> None:
    """Raises the limit of open files to `wanted`, or as far as the host allows.

    Raises:
        BadRequest: `BAD_CONFIG`, that is below `limits.LEAST_OPEN_FILES`.

    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < limits.LEAST_OPEN_FILES:
        text = f"at most {hard} files may be open, and {limits.LEAST_OPEN_FILES} must be; raise LimitNOFILE (ulimit -n)"
        raise refusal(ErrorCode.BAD_CONFIG, text)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def rdma_devices(devices: Path = RDMA_DEVICES) -> list[str]:
    """Names of the kernel's RDMA devices."""
    return sorted(entry.name for entry in devices.iterdir()) if devices.is_dir() else []


def cores(own: Path = cgroups.OWN, root: Path = cgroups.ROOT) -> int:
    """How many cores this process may use: those of its affinity, or fewer if its cgroup has a quota."""
    return min([len(os.sched_getaffinity(0)), *(math.ceil(quota.cores) for quota in cgroups.quotas(own, root))])


def rdma_ports() -> list[str]:
    """Every port of the RDMA devices, as `device:port`."""
    found = [(name, port) for name in rdma_devices() for port in (RDMA_DEVICES / name / "ports").iterdir()]
    return sorted(f"{name}:{port.name}" for name, port in found)


def interface_of(host: str) -> str | None:
    """The interface with the IP address `host`; None if there is none, or `host` is no address."""
    try:
        wanted = ipaddress.ip_address(host)
    except ValueError:
        return None
    for adapter in ifaddr.get_adapters():
        for address in adapter.ips:
            text = address.ip if isinstance(address.ip, str) else address.ip[0]
            if ipaddress.ip_address(text) == wanted:
                return adapter.name.partition(":")[0]  # a second IPv4 address may have a label: `eth0:1`
    return None
