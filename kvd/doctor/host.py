"""What the host gives to pools and to the network: memory to lock, huge pages, RDMA devices."""

import os
import re
import resource
from pathlib import Path

from kvd import limits
from kvd.doctor import Finding, Level
from kvd.units import size

_PROC = Path("/proc")
_SHMEM_THP = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_CLASS = Path("/sys/class/infiniband")
_VERBS = Path("/dev/infiniband")


def check_memlock() -> Finding:
    """Whether enough memory may be locked: NICs lock what is registered with them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("memlock", Level.OK, "unlimited")
    text = f"{soft // limits.KIB} KiB may be locked: an RDMA device cannot register a pool larger than that"
    fix = "systemd: LimitMEMLOCK=infinity (the unit has it); shell: ulimit -l unlimited; Kubernetes: add IPC_LOCK"
    if hard == resource.RLIM_INFINITY:
        fix = f"ulimit -l unlimited (the hard limit allows it), or {fix}"
    return Finding("memlock", Level.NOTE, text, fix)


def check_huge_pages(meminfo: str | None = None, shmem: str | None = None) -> Finding:
    """Whether pools can have huge pages, on which copies are up to 1.6 times as fast as on 4 KiB ones."""
    meminfo = (_PROC / "meminfo").read_text(encoding="ascii") if meminfo is None else meminfo
    free = int((re.search(r"^HugePages_Free:\s+(\d+)", meminfo, re.MULTILINE) or ["", "0"])[1])
    page = int((re.search(r"^Hugepagesize:\s+(\d+) kB", meminfo, re.MULTILINE) or ["", "2048"])[1]) * limits.KIB
    if free:
        return Finding("huge pages", Level.OK, f"{free} reserved pages of {size(page)} are free")
    if shmem is None:
        shmem = _SHMEM_THP.read_text(encoding="ascii") if _SHMEM_THP.exists() else ""
    chosen = (re.search(r"\[(\w+)\]", shmem) or ["", "never"])[1]
    fix = "sysctl vm.nr_hugepages=<bytes of all pools / 2 MiB>, early after boot"
    if chosen in ("always", "advise", "within_size", "force"):
        return Finding("huge pages", Level.OK, f"none reserved; transparent ones for shared memory: {chosen}")
    text = f"none reserved, transparent ones for shared memory: {chosen}; kvd asks for them by MADV_COLLAPSE"
    return Finding("huge pages", Level.NOTE, text, f"{fix}; or echo advise > {_SHMEM_THP}")


def check_rdma(devices: Path = _CLASS, verbs: Path = _VERBS) -> list[Finding]:
    """A finding for each device, or one that says that there is none."""
    names = sorted(entry.name for entry in devices.iterdir()) if devices.is_dir() else []
    if not names:
        return [Finding("RDMA", Level.NOTE, "no devices: peers on other hosts are reached over TCP")]
    opened = [str(node) for node in sorted(verbs.glob("uverbs*")) if os.access(node, os.R_OK | os.W_OK)]
    if not opened:
        text = f"{len(names)} devices, but no permission to open any under {verbs}"
        fix = "systemd: drop-ins/rdma.conf; Kubernetes: request the device plugin's resource (rdma/...); or the group"
        return [Finding("RDMA", Level.SLOW, text, fix)]
    return [_check_ports(devices / name) for name in names]


def _check_ports(device: Path) -> Finding:
    states = {port.name: (port / "state").read_text(encoding="ascii") for port in (device / "ports").iterdir()}
    active = [port for port, state in sorted(states.items()) if "ACTIVE" in state]
    if active:
        return Finding(f"RDMA {device.name}", Level.OK, f"port {', '.join(active)} is active")
    text = "; ".join(f"port {port}: {state.strip()}" for port, state in sorted(states.items()))
    return Finding(f"RDMA {device.name}", Level.SLOW, text, "check cable, switch, subnet manager; `ibstat` says more")
