"""Attacks on the session socket, by strangers: whoever the socket's file mode lets connect."""

import os
import socket
from contextlib import ExitStack, suppress

from kvd.protocol.worker import Attach, StatusRequest
from tests.fuzz import zmtp
from tests.fuzz.attack import BATCH, Attack
from tests.fuzz.messages import SESSION, compose, garbled, golden, odd
from tests.fuzz.sockets import SPEC, packed, session

MIB = 1 << 20


class SessionNoise(Attack):
    """Random bytes, which mostly announce a frame that is too large."""

    name, who, cost = "session-noise", "stranger", 4.0

    def strike(self):
        for _ in range(BATCH):
            with session(self.place) as made:
                made.sendall(self.dice.randbytes(self.dice.choice((1, 3, 4, 5, 64, 4096))))
                yield 1


class SessionMessages(Attack):
    """Golden frames of every socket, garbled; messages of the session with odd contents; several a connection."""

    name, who, cost = "session-messages", "stranger", 2.0

    def strike(self):
        with session(self.place) as made:
            for _ in range(BATCH):
                frame = odd(self.dice, SESSION) if self.dice.random() < 0.5 else garbled(self.dice, golden())
                made.sendall(packed(frame))
                with suppress(BlockingIOError):
                    made.recv(1 << 16, socket.MSG_DONTWAIT)
                yield 1


class SessionAttaches(Attack):
    """Attaches of another user, with names, instances and specs that are fine or odd."""

    name, who, cost = "session-attaches", "stranger", 4.0

    def strike(self):
        with session(self.place) as made:
            for number in range(BATCH):
                spec = self.dice.choice((SPEC, SPEC[:-1], b"", self.dice.randbytes(64), b"\x91" * 4096))
                made.sendall(packed(compose(Attach, worker=f"s{number}", instance=bytes(16), spec=spec)))
                made.recv(1 << 16)
                yield 1


class SilentSessions(Attack):
    """Sessions that say nothing, or a part of a header, and stay."""

    name, who, cost = "sessions-silent", "stranger", 40.0
    number = 300

    def strike(self):
        with ExitStack() as stack:
            for _ in range(self.number):
                made = stack.enter_context(session(self.place))
                made.sendall(self.dice.choice((b"", b"\x10", b"\x10\x00\x00", b"\x10\x00\x00\x00abc")))
                yield 1
            for _ in range(200):
                yield 0


class PartialFrames(Attack):
    """Frames of the largest size that lack their last byte, on several connections at once."""

    name, who, cost = "session-partial-frames", "stranger", 4000.0
    number = 24

    def strike(self):
        block = bytes(MIB)
        with ExitStack() as stack:
            for _ in range(self.number):
                made = stack.enter_context(session(self.place))
                yield 1  # first: the daemon may hang up, here as below
                made.sendall((16 * MIB).to_bytes(4, "little"))
                for _ in range(15):
                    made.sendall(block)
            for _ in range(200):
                yield 0


class UnreadStatuses(Attack):
    """Statuses that are requested on many sessions and never read."""

    name, who = "session-unread-statuses", "stranger"
    number = 24

    def strike(self):
        requests = packed(compose(StatusRequest, call=1)) * BATCH
        with ExitStack() as stack:
            made = [stack.enter_context(session(self.place)) for _ in range(self.number)]
            for one in made:
                one.setblocking(False)
            for _ in range(100):
                for one in made:
                    with suppress(BlockingIOError):
                        yield one.send(requests) // (len(requests) // BATCH)
                yield 0


class Descriptors(Attack):
    """Descriptors where none is expected: of every kind, many at once, with every part of a frame."""

    name, who, cost = "session-descriptors", "stranger", 8.0

    def strike(self):
        with ExitStack() as stack:
            kinds = self._open(stack)
            made = stack.enter_context(session(self.place))
            whole = packed(compose(StatusRequest, call=1))
            for _ in range(BATCH):
                number = self.dice.choice((1, 1, 2, 4, 5, 64, 253))
                part = self.dice.choice((whole, whole, whole[:1], whole[:5], whole * 3))
                yield 1
                socket.send_fds(made, [part], self.dice.choices([*kinds, made.fileno()], k=number))

    @staticmethod
    def _open(stack: ExitStack) -> list[int]:
        ends = [*os.pipe(), os.memfd_create("fuzz"), os.open("/dev/null", os.O_RDWR), os.open("/", os.O_PATH)]
        for end in ends:
            stack.callback(os.close, end)
        pair = [stack.enter_context(end) for end in socket.socketpair()]
        return [*ends, *(end.fileno() for end in pair)]


class WaitingDescriptors(Attack):
    """Frames that never end and keep descriptors, on many sessions."""

    name, who, cost = "session-waiting-descriptors", "stranger", 40.0
    number = 200

    def strike(self):
        with ExitStack() as stack:
            null = os.open("/dev/null", os.O_RDWR)
            stack.callback(os.close, null)
            for _ in range(self.number):
                made = stack.enter_context(session(self.place))
                yield 1
                socket.send_fds(made, [b"\x40\x00\x00\x00a"], [null] * 4)
            for _ in range(200):
                yield 0


class RequestsOfNobody(Attack):
    """Frames on the requests' socket under routing ids that no session has."""

    name, who = "requests-of-nobody", "stranger"

    def strike(self):
        with zmtp.speaking(self.place.requests, self.dice.randbytes(16)) as made:
            for _ in range(4 * BATCH):
                made.sendall(zmtp.frame(garbled(self.dice, golden())) * BATCH)
                yield BATCH
