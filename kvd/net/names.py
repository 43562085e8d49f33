"""Where the daemons are whose addresses have names, so that libzmq is given numbers alone.

Left to itself it looks a name up in its only thread, each time that it connects: while no name server answers, nothing
passes over any of its sockets. Here threads do that, and a party (a worker whose pulls need the daemons) has a few of
them, however many names it comes up with.
"""

import asyncio
import contextlib
import ipaddress
import socket
import threading
from collections import Counter
from collections.abc import Callable
from typing import Final

import zmq

_THREADS: Final = 16
_SHARE: Final = 4
"""Of one party: a thread is kept for as long as the system's resolver waits for its servers, 20 s and more."""

Resolve = Callable[[str], str]


def is_name(host: str) -> bool:
    """Whether the host of an address is no number, which has brackets if it is one of IPv6."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return True
    return False


def resolve(host: str) -> str:
    """The first address of a host, as a number.

    Raises:
        OSError: it has none, or no server says so.
        UnicodeError: it cannot be a name.

    """
    first = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    return str(first[4][0])


class NamedHost:
    """Connects a DEALER to wherever a name leads; that may be elsewhere each time it is looked up."""

    def __init__(self, dealer: "zmq.Socket[bytes]", name: str, port: str, party: str) -> None:
        self.name = name
        self.party = party
        self.then: Callable[[], object] | None = None
        """What is done once the name has been looked up; None if nobody waits for that."""
        self.trouble = ""
        """Why it is not known where the name leads; empty if it is, or nobody asked."""
        self._dealer = dealer
        self._port = port
        self._place = ""
        """What the socket connects to."""

    def looked_up(self, number: str, why: str) -> None:
        """The name leads to `number`, or `why` says why that could not be found out: then it leads where it did."""
        then, self.then = self.then, None
        if then is None:
            return  # its link was closed meanwhile
        self.trouble = f"the name {self.name!r} cannot be looked up: {why}" if why else ""
        if not why:
            self._connect(f"tcp://[{number}]:{self._port}" if ":" in number else f"tcp://{number}:{self._port}")
        if self._place:
            then()

    def _connect(self, place: str) -> None:
        if place != self._place:
            if self._place:
                self._dealer.disconnect(self._place)
            self._dealer.connect(place)
            self._place = place


class HostNames:
    """Looks names up, each on a thread; those of one party in the order in which it asked, and parties take turns."""

    def __init__(self, resolve: Resolve) -> None:
        self._resolve = resolve
        self._hosts: dict[int, NamedHost] = {}
        """By link; one whose address has no name is not here."""
        self._waiting: dict[str, dict[NamedHost, None]] = {}
        """By party."""
        self._running: Counter[str] = Counter()
        """How many threads each party has."""

    def add(self, link: int, host: NamedHost) -> None:
        """Has the name of a link looked up whenever `find` is called."""
        self._hosts[link] = host

    def find(self, link: int, then: Callable[[], object]) -> None:
        """Calls `then` on the loop once the link's socket connects to where its name leads now; at once without a name.

        It replaces that of an earlier call. It is not called while the name has led nowhere yet: see `trouble`.
        """
        host = self._hosts.get(link)
        if host is None:
            then()
            return
        if host.then is None:
            host.trouble = host.trouble or f"no name server has answered for {host.name!r} yet"
            self._waiting.setdefault(host.party, {})[host] = None
        host.then = then
        self._go_on()

    def trouble(self, link: int) -> str:
        """Why it is not known where the name of a link leads; empty if it is."""
        return self._hosts[link].trouble if link in self._hosts else ""

    def remove(self, link: int) -> None:
        """Looks up no more for a link; call it before its socket is closed."""
        host = self._hosts.pop(link, None)
        if host is not None:
            host.then = None
            self._take_out(host)

    def _take_out(self, host: NamedHost) -> None:
        """Of those that wait; the next turn is another party's."""
        waiting = self._waiting.pop(host.party, {})
        waiting.pop(host, None)
        if waiting:
            self._waiting[host.party] = waiting

    def _go_on(self) -> None:
        for party, waiting in self._waiting.items():
            if self._running.total() < _THREADS and self._running[party] < _SHARE:
                host = next(iter(waiting))
                arguments = asyncio.get_running_loop(), host
                # The end of the daemon does not wait for it.
                threading.Thread(target=self._look_up, args=arguments, name="kvd-name", daemon=True).start()
                self._running[party] += 1
                self._take_out(host)
                return

    def _look_up(self, loop: asyncio.AbstractEventLoop, host: NamedHost) -> None:
        number = why = ""
        try:
            number = self._resolve(host.name)
        except (OSError, UnicodeError) as error:
            why = str(error)
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(self._ended, host, number, why)

    def _ended(self, host: NamedHost, number: str, why: str) -> None:
        self._running -= Counter([host.party])
        host.looked_up(number, why)
        self._go_on()
