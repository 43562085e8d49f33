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
    """One namespace with an interface `eth0`. `within` is the command prefix that runs a command there.

    If it has a `data_address`, `eth1` is on a network of its own.
    """

    def __init__(self, switch: str, name: str, address: str, data_address: str = "") -> None:
        self.name, self.address, self.data_address = name, address, data_address
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
        _run("ip", "-n", self.namespace, "link", "set", "lo", "up")
        self._connect(self.name, "bridge", "eth0", self.address)
        if self.data_address:
            self._connect(self._data_link, "data", "eth1", self.data_address)

    def _connect(self, link: str, bridge: str, device: str, address: str) -> None:
        _run("ip", "-n", self._switch, "link", "add", link, "type", "veth", "peer", device, "netns", self.namespace)
        _run("ip", "-n", self._switch, "link", "set", link, "master", bridge, "up")
        self._give(address, device)
        _run("ip", "-n", self.namespace, "link", "set", device, "up")

    def _give(self, address: str, device: str) -> None:
        # The kernel would first ask whether another host has the IPv6 address; nobody can listen there until it knows.
        given = (f"{address}/64", "nodad") if ":" in address else (f"{address}/24",)
        _run("ip", "-n", self.namespace, "address", "add", *given, "dev", device)

    @property
    def _data_link(self) -> str:
        return f"{self.name}-data"

    def remove(self) -> None:
        """Removes the namespace, if it was made."""
        self._boot_id.unlink(missing_ok=True)
        subprocess.run(["ip", "netns", "delete", self.namespace], capture_output=True, check=False)  # noqa: S603, S607

    def readdress(self, address: str) -> None:
        """Replaces its address by another of the same network."""
        _run("ip", "-n", self.namespace, "address", "flush", "dev", "eth0")
        self._give(address, "eth0")
        self.address = address

    @property
    def _sends_data_by(self) -> str:
        return "eth1" if self.data_address else "eth0"

    def throttle(self, megabits: int) -> None:
        """Limits the data that it sends to `megabits` per second."""
        token = ["tbf", "rate", f"{megabits}mbit", "burst", "256kb", "latency", "50ms"]
        _run("tc", "-n", self.namespace, "qdisc", "replace", "dev", self._sends_data_by, "root", *token)
        self._throttled = True

    def unthrottle(self) -> None:
        """Removes the limit, if there is one."""
        if self._throttled:
            _run("tc", "-n", self.namespace, "qdisc", "delete", "dev", self._sends_data_by, "root")
        self._throttled = False

    def unplug(self) -> None:
        """Pulls its cable: all packets are lost silently."""
        _run("ip", "-n", self._switch, "link", "set", self.name, "down")

    def plug(self) -> None:
        """Puts the cable back."""
        _run("ip", "-n", self._switch, "link", "set", self.name, "up")

    def unplug_data(self) -> None:
        """Pulls the cable of its network for data alone."""
        _run("ip", "-n", self._switch, "link", "set", self._data_link, "down")

    def plug_data(self) -> None:
        """Puts that cable back."""
        _run("ip", "-n", self._switch, "link", "set", self._data_link, "up")

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
    """Hosts with these names on one network, 10.77.0.0/24; with `data` on a second one, 10.78.0.0/24, too.

    With `ipv6` the first network is fd77::/64 instead, and no host has an IPv4 address in it.
    """

    def __init__(self, *names: str, data: bool = False, ipv6: bool = False) -> None:
        self._switch = f"kvd-{os.getpid()}-switch"
        network = "fd77::" if ipv6 else "10.77.0."
        self.hosts = [
            Host(self._switch, name, f"{network}{number}", f"10.78.0.{number}" if data else "")
            for number, name in enumerate(names, 1)
        ]

    def __enter__(self) -> list[Host]:
        try:
            _run("ip", "netns", "add", self._switch)
            for bridge in ("bridge", "data"):
                _run("ip", "-n", self._switch, "link", "add", bridge, "up", "type", "bridge")
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
