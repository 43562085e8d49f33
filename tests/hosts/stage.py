"""What the tests over hosts share: the hosts, a daemon on each, a worker on each, and pulls that take seconds."""

import contextlib

from tests.support.fleet import RemoteError, until
from tests.support.patience import PATIENCE

PORT = 7710
HEARTBEAT = 1.0
MEGABITS = 200
BLOCKS, BLOCK_BYTES = 128, 1 << 19
LONG, SHORT = list(range(64)), list(range(64, 128))
"""Blocks of two pulls that run beside each other: 32 MiB each, 1.3 s over a link that is throttled."""


class Stage:
    def __init__(self, fleet, hosts, daemons):
        self.hosts, self.daemons = hosts, daemons
        self._fleet = fleet
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

    def wait_landing(self, consumer, value):
        """Until the first blocks of a pull have landed, and most have not."""
        for _ in until(f"{consumer} reads in mid-transfer"):
            landed = self.workers[consumer].call("values", ids=LONG).count(value)
            if landed:
                assert landed < len(LONG) // 2
                break

    def arrived(self, consumer, name, value, seconds=PATIENCE):
        ended = self.workers[consumer].outcome(name, seconds)
        assert ended["kind"] == "Done", f"{ended}, {self.workers[consumer].call('status')}"
        assert self.workers[consumer].call("values", ids=LONG) == [value] * len(LONG)

    def peer(self, consumer, producer):
        """What a daemon knows of a peer, or None."""
        address = f"tcp://{self.hosts[producer].address}:{PORT}"
        known = self.workers[consumer].call("status")["handshake"]
        return next((peer for peer in known if peer["address"].startswith(address)), None)

    def recover(self, producer, consumer, seconds=30):
        """The quarantine ends by itself, and a pull arrives again."""
        for _ in until("the quarantine is over", seconds):
            if not self.workers[consumer].call("status")["scheduler"]["quarantined"]:
                break
        self.arrived(consumer, *self.pull(producer, consumer, timeout=seconds), seconds=seconds)

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

    def lose_power(self, name):
        """The host's cable goes first: no connection of it is closed as far as others can see."""
        self.hosts[name].unplug()
        self.daemons[name].kill()
        self.workers[name].kill()

    def boot(self, name):
        self.hosts[name].plug()
        self.daemons[name].start()
        self.workers[name] = self._attach(name)
