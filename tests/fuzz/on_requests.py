"""Attacks by a worker that has its pool, on the session and the requests' socket."""

import os
import socket
from contextlib import ExitStack, suppress

from kvd.layout import CacheSpec, Full, Group, Shard, View, strided
from kvd.protocol.worker import Acknowledge, Attach, Cancel, Detach, Extend, Offer, Pull, StatusRequest
from tests.fuzz import zmtp
from tests.fuzz.attack import BATCH, Attack
from tests.fuzz.messages import REQUESTS, SPAN, compose, garbled, golden, odd, odd_ticket, ticket_of
from tests.fuzz.sockets import ANSWER_SECONDS, SPEC, attached, dealer, drain, packed, sent, session, worker

MIB = 1 << 20
ADDRESSES = (
    "tcp://127.0.0.1:1",
    "tcp://127.0.0.1:65536",
    "tcp://[::1]:9",
    "tcp://localhost:7",
    "tcp://LOCALHOST.:7",
    "tcp://127.1:7",
    "tcp://0.0.0.0:7",
    "tcp://*:7",
    "tcp://" + "a" * 400 + ":7",
    "tcp://" + "9" * 60 + ":7",
    "ipc:///tmp/none",
    "ipc://@abstract",
    "inproc://zeromq.zap.01",
    "tcp://127.0.0.1:7#" + "0" * 64,
    "tcp://127.0.0.1:7#" + "f" * 63,
    "x",
)


class _Frames(Attack):
    """Sends what `draw` gives as a worker, reads answers, and attaches again now and then."""

    who = "worker"
    batch = BATCH

    def draw(self) -> bytes:
        raise NotImplementedError

    def strike(self):
        with worker(self.place, f"fuzz-{self.name}", self.dice) as made:
            for _ in range(200):
                yield sent(made, [self.draw() for _ in range(self.batch)])
                drain(made)


class WorkerGarbled(_Frames):
    """Golden frames, garbled."""

    name = "worker-garbled"

    def draw(self):
        return garbled(self.dice, golden())


class WorkerOdd(_Frames):
    """Requests with odd contents."""

    name, cost = "worker-odd", 2.0

    def draw(self):
        return odd(self.dice, REQUESTS)


class WorkerEmpty(_Frames):
    """Frames of nothing, as fast as they go."""

    name = "worker-empty-frames"

    def draw(self):
        return b""


class WorkerStatuses(_Frames):
    """Statuses, as fast as they go."""

    name = "worker-statuses"

    def draw(self):
        return compose(StatusRequest, call=self.dice.randrange(9))


class WorkerReplays(_Frames):
    """The same requests again and again: offers, pulls, cancels and acknowledgements of a few names."""

    name = "worker-replays"

    def draw(self):
        name, call = f"r{self.dice.randrange(50)}", self.dice.randrange(5)
        kind = self.dice.randrange(5)
        if kind == 0:
            return compose(Acknowledge, sequence=self.dice.choice((0, 1, 5, 100, 1 << 40)))
        if kind == 1:
            return compose(Cancel, call=call, request=name)
        if kind == 2:
            ticket = odd_ticket(self.dice, self.place.address)
            return compose(Pull, call=call, request=name, ticket=ticket, spans=(SPAN,), timeout=1.0)
        return compose(Offer, call=call, offer=name, tokens=16, spans=(SPAN,), ttl=self.dice.choice((0.0, 0.01, 5.0)))


class WorkerGrows(_Frames):
    """Offers that grow by all kinds of steps: too far, back, over gaps, after the close, by nothing."""

    name = "worker-grows"

    def draw(self):
        name, call, at = f"g{self.dice.randrange(8)}", self.dice.randrange(5), self.dice.randrange(6)
        kind = self.dice.randrange(8)
        if kind == 0:
            spans = self.dice.choice(((), (), (SPAN,)))
            return compose(Offer, call=call, offer=name, tokens=0, spans=spans, ttl=5.0, grows=True)
        if kind == 1:
            return compose(Cancel, call=call, request=name)
        ids = b"".join(self.dice.randrange(17).to_bytes(4, "little") for _ in range(self.dice.choice((0, 1, 1, 2, 16))))
        group = self.dice.choice((0, 0, 0, 1, 255))
        spans = self.dice.choice(((), ([group, at, ids],), ([group, at, ids], [group, at, ids])))
        tokens = self.dice.choice((0, 16 * at, 16 * at + 16, 1 << 40))
        return compose(Extend, call=call, offer=name, tokens=tokens, spans=spans, closes=self.dice.random() < 0.1)


class WorkerTickets(_Frames):
    """Pulls with tickets that are odd or lead to odd places."""

    name, cost = "worker-tickets", 20.0

    def draw(self):
        ticket = odd_ticket(self.dice, self.dice.choice(ADDRESSES))
        name = f"t{self.dice.randrange(1 << 30)}"
        return compose(Pull, call=1, request=name, ticket=ticket, spans=(SPAN,), timeout=self.dice.choice((0.001, 0.5)))


class WorkerPlaces(_Frames):
    """Pulls with tickets of a thousand places each."""

    name, cost, batch = "worker-many-places", 2000.0, 1

    def draw(self):
        first = self.dice.randrange(1, 60_000)
        ticket = ticket_of([f"tcp://127.0.0.1:{first + number}" for number in range(1024)])
        return compose(Pull, call=1, request=f"m{first}", ticket=ticket, spans=(SPAN,), timeout=0.5)


class WorkerLarge(_Frames):
    """Messages of almost the largest size: offers of a million blocks, pulls with tickets of 15 MiB, and nothing."""

    name, cost = "worker-large-messages", 4000.0

    def draw(self):
        kind = self.dice.randrange(4)
        if kind == 0:
            return compose(Offer, call=1, offer="large", tokens=1 << 24, spans=([0, 0, bytes(4 * MIB)],), ttl=1.0)
        if kind == 1:
            return compose(Offer, call=1, offer="groups", tokens=1, spans=tuple([n, 0, bytes(64)] for n in range(256)))
        if kind == 2:
            return compose(Pull, call=1, request="large", ticket="kvd1." + "A" * 15 * MIB, spans=(), timeout=1.0)
        return bytes(15 * MIB)


class WorkerUnread(Attack):
    """Offers that end at once, whose ends are never read nor acknowledged."""

    name, who = "worker-unread", "worker"

    def strike(self):
        with worker(self.place, "fuzz-unread", self.dice) as made:
            for number in range(600):
                names = [f"u{number}-{each}-{self.dice.randrange(1 << 30)}" for each in range(BATCH)]
                yield sent(
                    made, [compose(Offer, call=1, offer=name, tokens=16, spans=(SPAN,), ttl=0.001) for name in names]
                )


class WorkerEndless(Attack):
    """A message whose parts never end, from a worker."""

    name, who, cost = "worker-endless-message", "worker", 200.0

    def strike(self):
        part = zmtp.frame(bytes(MIB), more=True)
        with (
            attached(self.place, "fuzz-endless", self.dice) as welcome,
            zmtp.speaking(welcome.endpoint, welcome.session) as made,
        ):
            for _ in range(300):
                yield 1  # first: the daemon hangs up on the part that is one too many
                made.sendall(part)


class WorkerReturns(Attack):
    """Attaches and detaches, and successors of a worker that is still there."""

    name, who, cost = "worker-returns", "worker", 400.0

    def strike(self):
        with ExitStack() as stack:
            for number in range(8):
                name = self.dice.choice(("fuzz-returns", f"fuzz-returns-{self.dice.randrange(20)}"))
                made = stack.enter_context(session(self.place))
                made.settimeout(ANSWER_SECONDS)
                attach = compose(Attach, worker=name, instance=self.dice.randbytes(16), spec=SPEC)
                made.sendall(packed(attach) + packed(compose(Detach)) * self.dice.randrange(3))
                yield 2
                with suppress(TimeoutError):
                    made.settimeout(0.05)
                    _read(made)
                if number % 2:
                    made.close()


class WorkerSpecs(Attack):
    """Attaches with the largest specs that are allowed, and odd ones; with descriptors that are no pools."""

    name, who, cost = "worker-specs", "worker", 2000.0

    def strike(self):
        with ExitStack() as stack:
            ends = [*os.pipe(), os.memfd_create("fuzz"), os.open("/dev/zero", os.O_RDWR)]
            for end in ends:
                stack.callback(os.close, end)
            large = large_spec()
            for _ in range(8):
                with session(self.place) as made:
                    spec = self.dice.choice((SPEC, large, _bitten(large, self.dice), _bitten(SPEC, self.dice)))
                    attach = compose(Attach, worker="fuzz-specs", instance=self.dice.randbytes(16), spec=spec)
                    descriptors = self.dice.choices(ends, k=self.dice.randrange(3))
                    frame = packed(attach)
                    begun = socket.send_fds(made, [frame], descriptors) if descriptors else 0
                    made.sendall(frame[begun:])
                    yield 1
                    with suppress(TimeoutError):
                        _read(made)


def _read(made: socket.socket) -> None:
    """One answer, whose descriptors are closed."""
    _, descriptors, _, _ = socket.recv_fds(made, 1 << 16, 8)
    for descriptor in descriptors:
        os.close(descriptor)


def _bitten(spec: bytes, dice) -> bytes:
    changed = bytearray(spec)
    for _ in range(dice.randint(1, 3)):
        changed[dice.randrange(min(len(changed), 400))] = dice.randrange(256)
    return bytes(changed)


def large_spec() -> bytes:
    sizes = {"layer": 1, "block": 2, "token": 16, "byte": 1}
    views, offset = [], 0
    for layer in range(1024):
        axes = strided("layer block token byte", sizes)
        views.append(View(component="c", offset=offset, axes=axes, layers=(layer,)))
        offset = views[-1].end
    group = Group(window=Full(), block_tokens=16, num_blocks=2, views=tuple(views))
    return CacheSpec(dtype="uint8", pool_bytes=offset, groups=(group,), shard=Shard(stages=((0, 1024),))).encode()


class WorkerReconnects(Attack):
    """Connections under a session's id that come and go, two at a time."""

    name, who, cost = "worker-reconnects", "worker", 40.0

    def strike(self):
        with attached(self.place, "fuzz-reconnects", self.dice) as welcome:
            for _ in range(BATCH):
                with dealer(welcome.endpoint, welcome.session) as one, dealer(welcome.endpoint, welcome.session) as two:
                    yield sent(one, [compose(StatusRequest, call=1)]) + sent(two, [garbled(self.dice, golden())])
                    one.poll(5)
