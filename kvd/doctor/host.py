"""What the host gives: memory to lock, huge pages, RDMA devices, and processors when the daemon needs one."""

import os
import re
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvd import limits
from kvd.cgroups import ROOT, Quota, processor_group, quotas
from kvd.doctor import Finding, Level
from kvd.host import RDMA_DEVICES, rdma_devices
from kvd.protocol.status import ProcessorStatus
from kvd.units import size

_PROC = Path("/proc")
_SHMEM_THP = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
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


def check_rdma(devices: Path = RDMA_DEVICES, verbs: Path = _VERBS) -> list[Finding]:
    """A finding for each device, or one that says that there is none."""
    names = rdma_devices(devices)
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


_WEIGHT: Final = 100
"""What a cgroup has that was given none."""
_MORE: Final = "docs/operations.md, Which cores a daemon should have"
_STARVED_FIX: Final = (
    "leave a core to it; else raise its cgroup's cpu.weight, do not pin it to an engine's cores, and look at "
    f"kernel.sched_autogroup_enabled ({_MORE})"
)
_QUOTA_FIX: Final = "take the limit away: Kubernetes `limits.cpu`, systemd `CPUQuota=`; a weight does what is wanted"
_WEIGHT_FIX: Final = "systemd: CPUWeight=1000 in a drop-in; Kubernetes: a CPU request of one or two cores"
_SESSIONS_FIX: Final = (
    f"give both control groups, as units or containers, or sysctl kernel.sched_autogroup_enabled=0 ({_MORE})"
)


def check_wait(status: ProcessorStatus) -> Finding:
    """How long the daemon's threads waited, as it says itself."""
    if not status.waited:
        text = "unknown: this kernel does not count it (/proc/PID/task/TID/schedstat)"
        return Finding("processor", Level.NOTE, text)
    if status.starved:
        return Finding("processor", Level.SLOW, status.text, _STARVED_FIX)
    return Finding("processor", Level.OK, status.text)


def check_groups(daemon: int, workers: Mapping[str, int], proc: Path = _PROC, cgroups: Path = ROOT) -> list[Finding]:
    """What the kernel weighs the daemon as, beside its workers; the process ids are those of this PID namespace."""
    try:
        own = proc / str(daemon) / "cgroup"
        group = processor_group(own, cgroups)
        findings = [_quota(quota) for quota in quotas(own, cgroups)]
        if group is None:
            return [*findings, *_check_sessions(daemon, workers, proc, cgroups)]
        return [*findings, _weight(group.folder, group.weight)]
    except OSError as error:
        return [Finding("processor", Level.NOTE, f"the daemon's control group is unknown: {error}")]


def _quota(quota: Quota) -> Finding:
    text = f"{quota.folder} may use {quota.cores:g} cores"
    if not quota.throttled:
        text += ", and was not stopped for using more yet"
        return Finding("processor quota", Level.NOTE, text, _QUOTA_FIX)
    text += f", and was stopped {quota.throttled} times for using more, for {quota.seconds:.1f} s altogether"
    return Finding("processor quota", Level.SLOW, text, _QUOTA_FIX)


def _weight(folder: Path, weight: float) -> Finding:
    text = f"{folder} has cpu.weight {weight:g}, where {_WEIGHT} is usual"
    if weight < _WEIGHT:
        return Finding("processor weight", Level.SLOW, text, _WEIGHT_FIX)
    return Finding("processor weight", Level.OK, text)


def _check_sessions(daemon: int, workers: Mapping[str, int], proc: Path, cgroups: Path) -> list[Finding]:
    """Without control groups, and with autogroup, the kernel weighs sessions."""
    try:
        enabled = int((proc / "sys/kernel/sched_autogroup_enabled").read_text())
    except FileNotFoundError:  # a kernel without it
        return []
    if not enabled:
        return []
    own = _autogroup(proc, daemon)
    found = []
    for worker, pid in sorted(workers.items()):
        try:
            if not pid or processor_group(proc / str(pid) / "cgroup", cgroups) or _autogroup(proc, pid) == own:
                continue
        except OSError:  # it has ended since the daemon said its status
            continue
        text = (
            f"the daemon (pid {daemon}) and the engine of {worker} (pid {pid}) are in two sessions and no control "
            "groups: kernel.sched_autogroup_enabled=1 weighs sessions against each other, and an engine that yields "
            "its core while it waits yields only within its own"
        )
        found.append(Finding("processor sessions", Level.SLOW, text, _SESSIONS_FIX))
    return found


def _autogroup(proc: Path, pid: int) -> str:
    """Empty if neither the process nor any that it comes from has called setsid, as in a container or a small VM."""
    return (proc / str(pid) / "autogroup").read_text().partition(" ")[0]
