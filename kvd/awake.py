"""Keeps the cores of this host from sleeping while requests come.

A core without work sleeps, and takes from a microsecond to hundreds to wake up, or in a virtual machine as long as its
hypervisor takes; every message of a small pull wakes some. While /dev/cpu_dma_latency is open, no core enters a state
that it leaves more slowly than the microseconds written there (Linux, Documentation/power/pm_qos_interface.rst). With
the process that has it open the bound goes, however that ends.
"""

import errno
import os
import sys
from pathlib import Path
from typing import Final

DEVICE: Final = Path("/dev/cpu_dma_latency")
_CPUS: Final = Path("/sys/devices/system/cpu")
_UNBOUND: Final = 2_000_000_000
"""2,000 s in microseconds: the kernel's own word for no bound (PM_QOS_CPU_LATENCY_DEFAULT_VALUE)."""


class Cores:
    """All cores of the host, awake while requests come: workers' and engines' answer them as well as our own."""

    def __init__(self, device: Path = DEVICE, cpus: Path = _CPUS) -> None:
        """Opens the device, and leaves cores to sleep until `wake`.

        Raises:
            OSError: the device cannot be had, or the kernel does not choose between ways of sleeping.

        """
        self.latency = shallowest(cpus)
        """Microseconds that a core takes to wake up at most, while they are awake."""
        self._descriptor = os.open(device, os.O_WRONLY | os.O_CLOEXEC)
        self._stirred = False
        self.awake = False

    def wake(self) -> None:
        """A request came: none sleeps for a while. To be called with each."""
        self._stirred = True
        if not self.awake:
            self._bound(self.latency)
            self.awake = True

    def doze(self) -> None:
        """Lets them sleep if no request came since this was called last."""
        if self.awake and not self._stirred:
            self._bound(_UNBOUND)
            self.awake = False
        self._stirred = False

    def close(self) -> None:
        """Lets them sleep."""
        os.close(self._descriptor)

    def _bound(self, microseconds: int) -> None:
        os.write(self._descriptor, microseconds.to_bytes(4, sys.byteorder))


def shallowest(cpus: Path = _CPUS) -> int:
    """The latency in microseconds of the shallowest state in which a core saves power.

    On hardware that is the first after polling (C1, WFI). Under Linux's haltpoll driver, for guests, it is 0: its only
    state hands the core to the hypervisor, and is called 1 us where it takes tens.

    Raises:
        OSError: the kernel has no cpuidle driver.

    """
    driver = (cpus / "cpuidle/current_driver").read_text(encoding="ascii").strip()
    if driver == "haltpoll":
        return 0
    states = [path.parent for path in (cpus / "cpu0/cpuidle").glob("state*/name") if path.read_text().strip() != "POLL"]
    if not states:
        raise OSError(errno.ENODEV, f"the kernel's cpuidle driver ({driver}) has no states to choose between")
    return min(int((state / "latency").read_text(encoding="ascii")) for state in states)
