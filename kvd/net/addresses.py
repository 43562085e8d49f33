"""Addresses of peers, as configurations and tickets give them: who listens there, and where their names lead.

Left to itself libzmq looks a name up in its only thread, each time that it connects: while no name server answers,
nothing passes over any of its sockets. Here threads do that, and libzmq is given numbers alone. A party (a worker whose
pulls need the daemons) has a few of the threads, however many names it comes up with.
"""

import asyncio
import contextlib
import errno
import ipaddress
import os
import re
import socket
import threading
from collections.abc import Callable
from typing import Final

import zmq

from kvd.errors import ErrorCode, refusal
from kvd.net.local.connect import connect_to_peer, look_up
from kvd.net.local.listener import hang_up
from kvd.net.priority_slots import PrioritySlots
from kvd.net.stream import no_descriptor
from kvd.net.unix import MAX_PATH_BYTES, credentials
from kvd.protocol.address import LAST_PORT, PEERS

_ADDRESS = re.compile(
    r"(?P<place>tcp://(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})"
    rf"|ipc://(?P<path>/[^#\s\0]+{re.escape(PEERS)}))"
    r"(#(?P<key>[0-9a-f]{64}))?"
)


def check_own(address: str) -> re.Match[str]:
    """The parts of our own address: `place`, and `host` and `port` or `path`.

    Raises:
        BadRequest: `BAD_CONFIG`, it is malformed, or has a key.

    """
    match = check_address(address, ErrorCode.BAD_CONFIG)
    if match["key"] is not None:
        raise refusal(ErrorCode.BAD_CONFIG, f"{address!r}: the key is that of `curve_key`; leave it out")
    return match


def check_user(path: str) -> None:
    """Refuses a path that leads elsewhere, or where another user listens; if nobody does yet, connections are checked.

    Another user's daemon is not connected to: each ticket would take some of its time.

    Raises:
        BadRequest: `NOT_PERMITTED`, another user does, or the socket was bound under another name.
        Unavailable: `OVERLOADED`, no descriptor is left to find out, or too many of that user's are yet to be closed.

    """
    try:
        whose = _not_ours(path)
    except PermissionError:
        whose = f"the daemon at {path} runs as another user"
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise no_descriptor(error) from error
        return
    if whose:
        raise refusal(
            ErrorCode.NOT_PERMITTED,
            f"{whose}, this one as user {os.geteuid()}, and a Unix socket joins daemons of one user; run both as one, "
            "or give both `curve_key` and `curve_peers`",
        )


def _not_ours(path: str) -> str:
    """Whose the daemon at `path` is, if it is not our own user's; else empty."""
    held = look_up(path)
    try:
        owner = os.fstat(held).st_uid
    finally:
        os.close(held)
    if owner != os.geteuid():
        return f"the file at {path} is of a daemon that runs as user {owner}"
    probe = connect_to_peer(path)
    user = credentials(probe).uid
    hang_up(probe)
    return "" if user == os.geteuid() else f"the daemon at {path} runs as user {user}"


def check_address(address: str, code: ErrorCode) -> re.Match[str]:
    """The parts of an address, and its `key`.

    Raises:
        BadRequest: `code`, it is malformed.

    """
    match = _ADDRESS.fullmatch(address)
    if match is None or int(match["port"] or 0) > LAST_PORT:
        raise refusal(code, f"address {address[:200]!r} is not tcp://host:port, nor ipc:///path{PEERS}")
    path = match["path"]
    if path is not None and (os.path.normpath(path) != path or _bytes_of(path, code) > MAX_PATH_BYTES):
        raise refusal(
            code, f"path {path[:200]!r} of a Unix socket is not the shortest spelling, or above {MAX_PATH_BYTES} bytes"
        )
    return match


def _bytes_of(path: str, code: ErrorCode) -> int:
    try:
        return len(os.fsencode(path))
    except UnicodeEncodeError as error:
        raise refusal(
            code, f"path {path[:200]!r} cannot be said in this process's encoding ({error.encoding})"
        ) from error


_THREADS: Final = 16
_SHARE: Final = 4
"""Of one party: a thread is kept for as long as the system's resolver waits for its servers, 20 s and more."""
_NOBODY: Final = "(nobody)"
"""The party of daemons that no worker needs yet."""

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
        """What is done once the name leads elsewhere; None if it is not being looked up."""
        self.trouble = ""
        """Why it is not known where the name leads; empty if it is, or nobody asked."""
        self.place = ""
        """What the socket connects to; empty until the name has led somewhere."""
        self._dealer = dealer
        self._port = port

    def looked_up(self, number: str, why: str) -> None:
        """The name leads to `number`, or `why` says why that could not be found out: then it leads where it did."""
        then, self.then = self.then, None
        if then is None:
            return  # its link was closed meanwhile
        self.trouble = f"the name {self.name!r} cannot be looked up: {why}" if why else ""
        place = f"tcp://[{number}]:{self._port}" if ":" in number else f"tcp://{number}:{self._port}"
        if why or place == self.place:
            return
        try:
            if self.place:
                self._dealer.disconnect(self.place)
            self._dealer.connect(place)
        except zmq.ZMQError as error:
            self.trouble = f"the name {self.name!r} leads to {place}, which cannot be connected to: {error}"
            return
        self.place = place
        then()


class HostNames:
    """Looks names up, each on a thread; those of one party in the order in which it asked, and parties take turns."""

    def __init__(self, resolve: Resolve) -> None:
        self._resolve = resolve
        self._hosts: dict[int, NamedHost] = {}
        """By link; one whose address has no name is not here."""
        self._slots: PrioritySlots[NamedHost] = PrioritySlots(_THREADS, _SHARE)
        """Threads, and the hosts that wait for one; a host may wait for several parties."""

    def add(self, link: int, host: NamedHost) -> None:
        """Has the name of a link looked up whenever `find` is called."""
        self._hosts[link] = host

    def find(self, link: int, then: Callable[[], object]) -> None:
        """Calls `then` at once if it is known where the daemon is, and on the loop when its name leads elsewhere.

        It replaces that of an earlier call. While the name has led nowhere yet, `trouble` says so.
        """
        host = self._hosts.get(link)
        if host is None or host.place:
            then()
        if host is None:
            return
        is_new = host.then is None
        host.then = then
        if is_new:
            host.trouble = host.trouble or f"no name server has answered for {host.name!r} yet"
            self._take_turn(host, host.party)

    def hurry(self, link: int, party: str) -> None:
        """Has a name that waits looked up in the turn of this party, if that comes first: it needs the link, too."""
        host = self._hosts.get(link)
        if host is not None and host.then is not None and host not in self._slots:
            self._take_turn(host, party)

    def trouble(self, link: int) -> str:
        """Why it is not known where the name of a link leads; empty if it is."""
        return self._hosts[link].trouble if link in self._hosts else ""

    def remove(self, link: int) -> None:
        """Looks up no more for a link; call it before its socket is closed."""
        host = self._hosts.pop(link, None)
        if host is not None:
            host.then = None
            if host not in self._slots:  # else it has its thread until that has an answer
                self._slots.forget(host)

    def _take_turn(self, host: NamedHost, party: str) -> None:
        if self._slots.enter(host, (party,), party or _NOBODY):
            self._start(host)

    def _start(self, host: NamedHost) -> None:
        arguments = asyncio.get_running_loop(), host
        try:
            # The end of the daemon does not wait for it.
            threading.Thread(target=self._look_up, args=arguments, name="kvd-name", daemon=True).start()
        except RuntimeError as error:  # this user has too many; the next `find` tries again
            self._slots.leave(host)
            host.looked_up("", str(error))

    def _look_up(self, loop: asyncio.AbstractEventLoop, host: NamedHost) -> None:
        number = why = ""
        try:
            number = self._resolve(host.name)
        except Exception as error:  # noqa: BLE001 - whatever it is, its slot is needed by others
            why = str(error) or type(error).__name__
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(self._ended, host, number, why)

    def _ended(self, host: NamedHost, number: str, why: str) -> None:
        self._slots.leave(host)
        while (other := self._slots.next()) is not None:
            self._start(other)
        host.looked_up(number, why)
