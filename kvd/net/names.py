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
        self.waits_for: set[str] = set()
        """The parties whose turn it waits for."""
        self.then: Callable[[], object] | None = None
        """What is done once the name leads elsewhere; None if it is not being looked up."""
        self.trouble = ""
        """Why it is not known where the name leads; empty if it is, or nobody asked."""
        self._dealer = dealer
        self._port = port
        self._place = ""
        """What the socket connects to."""

    @property
    def is_found(self) -> bool:
        """Whether the name has led somewhere."""
        return bool(self._place)

    def looked_up(self, number: str, why: str) -> None:
        """The name leads to `number`, or `why` says why that could not be found out: then it leads where it did."""
        then, self.then = self.then, None
        if then is None:
            return  # its link was closed meanwhile
        self.trouble = f"the name {self.name!r} cannot be looked up: {why}" if why else ""
        place = f"tcp://[{number}]:{self._port}" if ":" in number else f"tcp://{number}:{self._port}"
        if why or place == self._place:
            return
        if self._place:
            self._dealer.disconnect(self._place)
        self._dealer.connect(place)
        self._place = place
        then()


class HostNames:
    """Looks names up, each on a thread; those of one party in the order in which it asked, and parties take turns."""

    def __init__(self, resolve: Resolve) -> None:
        self._resolve = resolve
        self._hosts: dict[int, NamedHost] = {}
        """By link; one whose address has no name is not here."""
        self._waiting: dict[str, dict[NamedHost, None]] = {}
        """By party; a host may wait for several."""
        self._running: Counter[str] = Counter()
        """How many threads each party has."""

    def add(self, link: int, host: NamedHost) -> None:
        """Has the name of a link looked up whenever `find` is called."""
        self._hosts[link] = host

    def find(self, link: int, then: Callable[[], object]) -> None:
        """Calls `then` at once if it is known where the daemon is, and on the loop when its name leads elsewhere.

        It replaces that of an earlier call. While the name has led nowhere yet, `trouble` says so.
        """
        host = self._hosts.get(link)
        if host is None or host.is_found:
            then()
        if host is None:
            return
        if host.then is None:
            host.trouble = host.trouble or f"no name server has answered for {host.name!r} yet"
            self._wait(host, host.party)
        host.then = then
        self._go_on()

    def hurry(self, link: int, party: str) -> None:
        """Has a name that waits looked up in the turn of this party, if that comes first: it needs the link, too."""
        host = self._hosts.get(link)
        if host is not None and host.waits_for:
            self._wait(host, party)
            self._go_on()

    def _wait(self, host: NamedHost, party: str) -> None:
        self._waiting.setdefault(party, {})[host] = None
        host.waits_for.add(party)

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
        for party in host.waits_for:
            waiting = self._waiting.pop(party)
            del waiting[host]
            if waiting:
                self._waiting[party] = waiting
        host.waits_for.clear()

    def _go_on(self) -> None:
        for party, waiting in self._waiting.items():
            if self._running.total() < _THREADS and self._running[party] < _SHARE:
                self._start(next(iter(waiting)), party)
                return

    def _start(self, host: NamedHost, party: str) -> None:
        arguments = asyncio.get_running_loop(), host, party
        try:
            # The end of the daemon does not wait for it.
            threading.Thread(target=self._look_up, args=arguments, name="kvd-name", daemon=True).start()
        except RuntimeError as error:  # this user has too many; the next call tries again
            host.trouble = f"the name {host.name!r} cannot be looked up: {error}"
            return
        self._running[party] += 1
        self._take_out(host)

    def _look_up(self, loop: asyncio.AbstractEventLoop, host: NamedHost, party: str) -> None:
        number = why = ""
        try:
            number = self._resolve(host.name)
        except (OSError, UnicodeError) as error:
            why = str(error)
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(self._ended, host, party, number, why)

    def _ended(self, host: NamedHost, party: str, number: str, why: str) -> None:
        self._running -= Counter([party])
        host.looked_up(number, why)
        self._go_on()
