"""Processors: whether the daemon gets one when it needs it, and which settings of the host decide that."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvd.cgroups import ROOT, Quota, processor_group, quotas
from kvd.doctor import Finding, Level
from kvd.protocol.status import ProcessorStatus

_PROC: Final = Path("/proc")
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
