"""Several hosts on one machine: network namespaces joined by a switch. Takes root and `ip`.

All names carry this process's id, and everything is removed with the `with` block. The namespace of this process stays
as it is.
"""

import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

_NOBODY = "02:00:00:00:00:fe"
"""An Ethernet address that no host has."""


def why_not() -> str | None:
    """What this machine lacks for namespaces; None if nothing."""
    if os.geteuid() != 0:
        return "network namespaces take root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "network namespaces take `ip` and `tc` (apt-get install iproute2)"
    ran = subprocess.run(["ip", "netns", "list"], capture_output=True, check=False)  # noqa: S607
    return None if ran.returncode == 0 else f"`ip netns` does not work here: {ran.stderr.decode().strip()}"


class Host:
    """One namespace with an interface `eth0`. `within` is the command prefix that runs a command there."""

    def __init__(self, switch: str, name: str, address: str) -> None:
        self.name, self.address = name, address
        self.namespace = f"kvd-{os.getpid()}-{name}"
        self._boot_id = Path(tempfile.gettempdir(), f"{self.namespace}.boot_id")
        own_boot = f'mount --bind {self._boot_id} /proc/sys/kernel/random/boot_id && exec "$@"'
        self.within: Sequence[str] = ("ip", "netns", "exec", self.namespace, "sh", "-c", own_boot, "sh")
        self._switch = switch
        self._throttled = False
        self._unheard: set[str] = set()
        """Addresses of those that do not get what it sends."""

    def connect(self) -> None:
        """Makes the namespace and plugs it into the switch. Its kernel calls itself another one than ours."""
        self._boot_id.write_text(f"{uuid.uuid4()}\n")
        _run("ip", "netns", "add", self.namespace)
        _run(
            "ip", "-n", self._switch, "link", "add", self.name, "type", "veth", "peer", "eth0", "netns", self.namespace
        )
        _run("ip", "-n", self._switch, "link", "set", self.name, "master", "bridge", "up")
        _run("ip", "-n", self.namespace, "address", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _run("ip", "-n", self.namespace, "link", "set", device, "up")

    def remove(self) -> None:
        """Removes the namespace, if it was made."""
        self._boot_id.unlink(missing_ok=True)
        subprocess.run(["ip", "netns", "delete", self.namespace], capture_output=True, check=False)  # noqa: S603, S607

    def readdress(self, address: str) -> None:
        """Replaces its address by another of the same network."""
        _run("ip", "-n", self.namespace, "address", "flush", "dev", "eth0")
        _run("ip", "-n", self.namespace, "address", "add", f"{address}/24", "dev", "eth0")
        self.address = address

    def throttle(self, megabits: int) -> None:
        """Limits what it sends to `megabits` per second."""
        token = ["tbf", "rate", f"{megabits}mbit", "burst", "256kb", "latency", "50ms"]
        _run("tc", "-n", self.namespace, "qdisc", "replace", "dev", "eth0", "root", *token)
        self._throttled = True

    def unthrottle(self) -> None:
        """Removes the limit, if there is one."""
        if self._throttled:
            _run("tc", "-n", self.namespace, "qdisc", "delete", "dev", "eth0", "root")
        self._throttled = False

    def unplug(self) -> None:
        """Pulls its cable: all packets are lost silently."""
        _run("ip", "-n", self._switch, "link", "set", self.name, "down")

    def plug(self) -> None:
        """Puts the cable back."""
        _run("ip", "-n", self._switch, "link", "set", self.name, "up")

    def mute(self, *others: "Host") -> None:
        """Loses silently what it sends to the others; what they send arrives."""
        for other in others:
            _run("ip", "-n", self.namespace, "neigh", "replace", other.address, "lladdr", _NOBODY, "dev", "eth0")
            self._unheard.add(other.address)

    def unmute(self, *others: "Host") -> None:
        """Undoes `mute`, where it was done."""
        for address in self._unheard & {other.address for other in others}:
            _run("ip", "-n", self.namespace, "neigh", "delete", address, "dev", "eth0")
            self._unheard.remove(address)


class Hosts:
    """Hosts with these names on one network, 10.77.0.0/24."""

    def __init__(self, *names: str) -> None:
        self._switch = f"kvd-{os.getpid()}-switch"
        self.hosts = [Host(self._switch, name, f"10.77.0.{number}") for number, name in enumerate(names, 1)]

    def __enter__(self) -> list[Host]:
        try:
            _run("ip", "netns", "add", self._switch)
            _run("ip", "-n", self._switch, "link", "add", "bridge", "up", "type", "bridge")
            for host in self.hosts:
                host.connect()
        except BaseException:
            self._remove()
            raise
        return self.hosts

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        for host in self.hosts:
            host.remove()
        subprocess.run(["ip", "netns", "delete", self._switch], capture_output=True, check=False)  # noqa: S603, S607


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)  # noqa: S603 - the command is ours
