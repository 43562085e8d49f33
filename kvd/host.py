"""What kvd reads of the host that it runs on."""

from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_RDMA_DEVICES = Path("/sys/class/infiniband")


def boot_id() -> str:
    """The same for all processes of one running kernel, whatever containers they are in."""
    return _BOOT_ID.read_text(encoding="ascii").strip()


def rdma_devices() -> list[str]:
    """Names of the RDMA devices that the kernel has."""
    return sorted(entry.name for entry in _RDMA_DEVICES.iterdir()) if _RDMA_DEVICES.is_dir() else []
