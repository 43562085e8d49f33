"""RDMA devices: whether there are any, may be opened, and have an active port."""

import os
from pathlib import Path

from kvd.doctor.finding import Finding, Level

_CLASS = Path("/sys/class/infiniband")
_VERBS = Path("/dev/infiniband")


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
