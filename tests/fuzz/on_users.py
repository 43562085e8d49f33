"""Attacks by a crowd: many users, in PID namespaces of their own, each for a moment. Takes root to play them."""

import ctypes
import os
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from kvd.protocol.address import POOLS
from kvd.protocol.worker import Attach
from tests.fuzz import zmtp
from tests.fuzz.attack import Attack
from tests.fuzz.messages import SESSION, compose, garbled, golden, odd
from tests.fuzz.sockets import SPEC, packed
from tests.support.lingering import DeafFileSystem

PR_SET_PDEATHSIG = 1
USERS = range(100_000, 105_000)
CLONE_NEWNS, CLONE_NEWPID = 0x20000, 0x20000000
TURNS = 100
MESSAGES = 16
CONNECTIONS = 3000
"""Of one user on one socket: more than any of them takes."""

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(what: int) -> None:
    """Leaves namespaces of this process behind; raises OSError where that is not allowed."""
    if _libc.unshare(what):
        raise OSError(ctypes.get_errno(), "unshare")


@contextmanager
def someone(user: int, work: Callable[[], object], *, apart: bool = False) -> Iterator[int]:
    """A process of `user` that does `work`, then waits for its end; yields its end of a pipe. `apart`: by PIDs, too."""
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(told)
        with suppress(BaseException):  # nothing of the parent may run here
            if apart:
                unshare(CLONE_NEWPID)
                if inner := os.fork():
                    os.waitpid(inner, 0)
                    os._exit(0)
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            with suppress(OSError):
                work()
            os.write(tell, b"x")
            if not apart:
                signal.pause()
        os._exit(0)
    os.close(tell)
    try:
        yield told
    finally:
        with suppress(ProcessLookupError):
            if not apart:
                os.kill(child, signal.SIGKILL)
        os.close(told)
        os.waitpid(child, 0)


class _Crowd(Attack):
    who = "crowd"
    apart = False

    def strike(self):
        work = self._work
        with someone(self.dice.choice(USERS), work, apart=self.apart) as told:
            os.read(told, 1)
        yield MESSAGES

    def _work(self) -> None:
        places = (self.place.socket, self.place.socket, self.place.requests, f"{self.place.socket}{POOLS}")
        for number in range(MESSAGES):
            with suppress(OSError), zmtp.connect(self.dice.choice(places)) as made:
                attach = compose(Attach, worker=f"u{number}", instance=self.dice.randbytes(16), spec=SPEC)
                frames = (attach, odd(self.dice, SESSION), garbled(self.dice, golden()), zmtp.GREETING)
                made.sendall(packed(self.dice.choice(frames)))
                made.settimeout(0.01)
                made.recv(1 << 16)


class OtherUsers(_Crowd):
    """Each a user that was never seen before, with a session's worth of messages."""

    name, cost = "users-ever-new", 20.0


class OtherNamespaces(_Crowd):
    """The same from PID namespaces of their own, where the kernel tells the daemon no number."""

    name, cost = "users-in-pid-namespaces", 20.0
    apart = True


class SilentUsers(Attack):
    """Users that open connections to every socket until no more are let in, and say nothing."""

    name, who, cost = "users-silent-until-refused", "crowd", 2000.0
    users = 8

    def strike(self):
        with ExitStack() as stack:
            for _ in range(self.users):
                told = stack.enter_context(someone(self.dice.choice(USERS), self._open))
                os.read(told, 1)
                yield 1
            for _ in range(TURNS):
                yield 0

    def _open(self) -> None:
        kept: list[socket.socket] = []
        places = (self.place.socket, self.place.requests, f"{self.place.socket}{POOLS}", self.place.http)
        for place in (*places, self.place.address):
            with suppress(OSError):
                for _ in range(CONNECTIONS):
                    made = zmtp.connect(place)
                    made.setblocking(False)
                    kept.append(made)
                    if made.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b"":
                        break  # hung up on
        self._kept = kept


class DeafFiles(Attack):
    """Files of a file system that does not answer, passed on every Unix socket. A process of its own: no other child
    may have the server's end, as the server lives as long as that is open somewhere.
    """

    name, who, cost = "users-deaf-files", "crowd with files", 400.0
    _private = False

    def strike(self):
        if not DeafFiles._private:
            unshare(CLONE_NEWNS)  # what is mounted goes with this process
            _libc.mount(b"none", b"/", None, 0x44000, None)  # MS_REC | MS_PRIVATE
            DeafFiles._private = True
        with tempfile.TemporaryDirectory() as folder:
            deaf = DeafFileSystem(Path(folder))
            with someone(self.dice.choice(USERS), lambda: self._pass(deaf)) as told:  # it ends when the server has
                try:
                    os.read(told, 1)
                    yield MESSAGES
                    for _ in range(TURNS // 2):
                        yield 0
                finally:
                    deaf.close()
                    os.close(deaf.descriptor)

    def _pass(self, deaf: DeafFileSystem) -> None:
        os.close(deaf._device)
        for number in range(MESSAGES):
            place = (self.place.socket, self.place.requests, f"{self.place.socket}{POOLS}")[number % 3]
            with suppress(OSError), zmtp.connect(place) as made:
                socket.send_fds(
                    made, [packed(compose(Attach, worker="w", instance=bytes(16), spec=SPEC))], [deaf.descriptor]
                )
