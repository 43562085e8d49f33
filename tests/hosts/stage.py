"""What the tests over hosts share: the hosts, a daemon on each, a worker on each, and pulls that take seconds."""

import contextlib
import itertools
import subprocess
import sys

from tests.support.fleet import RemoteError, until
from tests.support.patience import PATIENCE

PORT = 7710
HEARTBEAT = 5.0
"""Three of them lose a peer. Claims live longer (`NEVER_LOST`), so that it is the peer that is lost and not a claim."""
MEGABITS = 20
BLOCKS, BLOCK_BYTES = 128, 1 << 19
LONG, SHORT = list(range(64)), list(range(64, 128))
"""Blocks of two pulls that run beside each other: 32 MiB each, 13 s over a link that is throttled."""
OPEN_END = 600.0
"""Seconds for a pull whose deadline is not what ends it."""


class Stage:
    def __init__(self, fleet, hosts, daemons):
        self.hosts, self.daemons = hosts, daemons
        self._fleet = fleet
        self.on_gpu = {name for name, daemon in daemons.items() if daemon.flags.get("device", "cpu") != "cpu"}
        self.workers = {name: self._attach(name) for name in daemons}
        self._turn = 0

    def _attach(self, name):
        for _ in until(f"{name} is attached"):
            with contextlib.suppress(RemoteError):  # the daemon has not seen yet that its predecessor is dead
                return self._fleet.worker(self.daemons[name], name, blocks=BLOCKS, block_bytes=BLOCK_BYTES)
        raise AssertionError("unreachable")

    def pull(self, producer, consumer, timeout, ids=LONG):
        """Starts to move blocks from the producer's pool to the same ones of the consumer's."""
        self._turn += 1
        name, value = f"r{self._turn}", 1 + self._turn % 250
        self.workers[producer].call("fill", ids=ids, value=value)
        ticket = self.workers[producer].call("offer", name=name, ids=ids)
        self.workers[consumer].call("pull", name=name, ticket=ticket, ids=ids, timeout=timeout)
        return name, value

    def pull_in_mid_transfer(self, producer, consumer):
        """A pull of which some blocks have landed, and many have not."""
        # By way of a GPU's windows or slots half of the blocks land together: four slices of eight.
        below = len(LONG) if self.on_gpu & {producer, consumer} else len(LONG) // 2
        for _ in until(f"{consumer} reads in mid-transfer"):
            name, value = self.pull(producer, consumer, OPEN_END)
            for _ in until("the first blocks have landed"):
                landed = self.workers[consumer].call("last_bytes", ids=LONG).count(value)
                if landed:
                    break
            if landed < below:
                return name
            self.arrived(consumer, name, value)
        raise AssertionError("unreachable")

    def path(self, consumer, producer, network):
        """What carries the bytes between the two, over that network."""
        staged = (("staged/there", producer), ("staged/here", consumer))
        return " ".join([network, *(place for place, name in staged if name in self.on_gpu)])

    def arrived(self, consumer, name, value):
        ended = self.workers[consumer].outcome(name)
        assert ended["kind"] == "Done", f"{ended}, {self.workers[consumer].call('status')}"
        assert self.workers[consumer].call("values", ids=LONG) == [value] * len(LONG)

    def peer(self, consumer, producer):
        """What a daemon knows of a peer, or None."""
        address = f"tcp://{self.hosts[producer].address}:{PORT}"
        known = self.workers[consumer].call("status")["handshake"]
        return next((peer for peer in known if peer["address"].startswith(address)), None)

    def recover(self, producer, consumer):
        """The quarantine ends by itself, and a pull arrives again."""
        for _ in until("the quarantine is over"):
            if not self.workers[consumer].call("status")["scheduler"]["quarantined"]:
                break
        self.arrived(consumer, *self.pull(producer, consumer, PATIENCE))

    def readyz(self, name):
        """The text of its HTTP port, which only its own host reaches."""
        url = f"http://{self.daemons[name].serving()['http']}/readyz"
        script = f"import urllib.request as r; print(r.urlopen({url!r}, timeout={PATIENCE}).read().decode())"
        command = [*self.hosts[name].within, sys.executable, "-c", script]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def hurry(self):
        """The links are as fast as they can be."""
        for host in self.hosts.values():
            host.unthrottle()

    def mend(self):
        """Whatever a test has cut, throttled or ended is as it was, and blocks arrive everywhere."""
        self.hurry()
        for name, host in self.hosts.items():
            host.unmute(*self.hosts.values())
            host.plug()
            if self.daemons[name].child.wait(0):
                self.daemons[name].start()
            if self.workers[name].child.wait(0):
                self.workers[name] = self._attach(name)
        producers, consumers = ([name for name in self.hosts if name.startswith(kind)] for kind in "pd")
        for producer, consumer in itertools.product(producers, consumers):
            for _ in until(f"{consumer} reads from {producer} again"):
                name, _ = self.pull(producer, consumer, PATIENCE)
                if self.workers[consumer].outcome(name)["kind"] == "Done":
                    break

    def move_house(self, name, address):
        """Its daemon comes back at another address; its workers stay."""
        self.daemons[name].kill()
        self.hosts[name].readdress(address)
        self.daemons[name].flags["listen"] = f"tcp://{address}:{PORT}"
        self.daemons[name].flags["unprotected-transport"] = address
        self.daemons[name].start()
        for _ in until(f"the worker of {name} is attached again"):
            if any(event["kind"] == "Reattached" for event in self.workers[name].call("wait", timeout=1)):
                break

    def notice(self, consumer, producer):
        """Waits until the consumer's daemon does not take the producer's for one that was at its address before.

        Until then it may be about to lose that one, and a pull sent in the last moment is lost with it.
        """
        present = self.workers[producer].call("status")["incarnation"]
        for _ in until(f"{consumer} has met the daemon that is there now, or lost the one before"):
            peer = self.peer(consumer, producer)
            if peer is None or peer["state"] != "ready" or peer["incarnation"] == present:
                break

    def lose_power(self, name):
        """The host's cable goes first: no connection of it is closed as far as others can see."""
        self.hosts[name].unplug()
        self.daemons[name].kill()
        self.workers[name].kill()

    def boot(self, name):
        self.hosts[name].plug()
        self.daemons[name].start()
        self.workers[name] = self._attach(name)
