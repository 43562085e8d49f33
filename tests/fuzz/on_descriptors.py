"""Descriptors that are trouble to have: sockets that linger, memfds, full pipes, sockets that hold others."""

import fcntl
import os
import socket
from contextlib import ExitStack, suppress
from random import Random

from kvd.protocol.address import POOLS
from kvd.protocol.worker import Attach, StatusRequest
from tests.fuzz import zmtp
from tests.fuzz.attack import BATCH, Attack
from tests.fuzz.messages import SESSION, compose, odd
from tests.fuzz.sockets import SPEC, packed, session
from tests.support.lingering import lingering_socket

POOL_BYTES = 16 * 4096
"""Of `SPEC`."""


def troubling(stack: ExitStack, dice: Random) -> list[int]:
    """One of each kind, closed with `stack`."""
    lingering = lingering_socket()
    found = [lingering.__enter__()]
    for flags, size in ((0, 0), (os.MFD_ALLOW_SEALING, POOL_BYTES), (os.MFD_ALLOW_SEALING, 1 << 40)):
        found.append(os.memfd_create("fuzz", flags))
        with suppress(OSError):  # there is no such room
            os.ftruncate(found[-1], size)
    fcntl.fcntl(found[-2], fcntl.F_ADD_SEALS, dice.randrange(1 << 5))
    for end in os.pipe2(os.O_NONBLOCK):
        found.append(end)
    with suppress(BlockingIOError):
        while True:
            os.write(found[-1], bytes(1 << 16))
    for each in found:
        stack.callback(os.close, each)
    holder, held = socket.socketpair()
    stack.enter_context(holder)
    stack.enter_context(held)
    socket.send_fds(holder, [b"x"], found)
    stack.push(lingering.__exit__)  # first of all: then our own last close of it does not linger
    return [*found, held.fileno()]


class TroublingDescriptors(Attack):
    """Such descriptors on every Unix socket of the daemon, with what is due there or with noise."""

    name, who, cost = "descriptors-of-trouble", "stranger", 40.0

    def strike(self):
        places = [self.place.socket, self.place.requests, f"{self.place.socket}{POOLS}"]
        places += [self.place.address] if self.place.address.startswith("ipc:") else []
        with ExitStack() as stack:
            kinds = troubling(stack, self.dice)
            for _ in range(BATCH):
                with zmtp.connect(self.dice.choice(places)) as made:
                    first = self.dice.choice((zmtp.GREETING, packed(compose(StatusRequest, call=1)), bytes(32), b"x"))
                    yield 1  # first: the daemon may hang up
                    socket.send_fds(made, [first], self.dice.choices(kinds, k=self.dice.choice((1, 2, 7, 64))))


class AttachesWithDescriptors(Attack):
    """Attaches of who may attach, with descriptors that are no pools of theirs."""

    name, who, cost = "attaches-with-descriptors", "worker", 100.0

    def strike(self):
        with ExitStack() as stack:
            kinds = troubling(stack, self.dice)[1:]  # what lingers is closed at once for our own user, which is trusted
            for _ in range(8):
                with session(self.place) as made:
                    frame = compose(Attach, worker="fuzz-passes", instance=self.dice.randbytes(16), spec=SPEC)
                    frame = frame if self.dice.random() < 0.7 else odd(self.dice, SESSION)
                    socket.send_fds(made, [packed(frame)], self.dice.choices(kinds, k=self.dice.choice((1, 1, 2))))
                    yield 1
                    with suppress(TimeoutError):
                        received = socket.recv_fds(made, 1 << 16, 8)
                        for descriptor in received[1]:
                            os.close(descriptor)
