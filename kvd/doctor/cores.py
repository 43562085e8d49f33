"""Cores: whether they may be kept awake while requests come."""

from pathlib import Path

from kvd.awake import DEVICE, Cores
from kvd.doctor.finding import Finding, Level


def check_cores(device: Path = DEVICE) -> Finding:
    """Every message of a small pull wakes cores, if they sleep."""
    try:
        cores = Cores(device)
    except OSError as error:
        fix = "systemd: deploy/systemd/70-kvd.rules, for udev; Kubernetes: the node's tuned profile latency-performance"
        return Finding("cores", Level.NOTE, f"they may sleep while requests come: {error}", fix)
    cores.close()
    return Finding("cores", Level.OK, f"while requests come they wake up within {cores.latency} us")
