"""Attacks by an admitted peer that is connected to: a worker's ticket leads the daemon to a producer that lies."""

from contextlib import ExitStack
from random import Random

import msgspec
import zmq

from kvd import limits
from kvd.bench.spec import flat_spec
from kvd.protocol import codec
from kvd.protocol.peer import (
    Claim,
    Fence,
    Follow,
    Grant,
    Grown,
    Held,
    Hello,
    Ping,
    Pong,
    PoolInfo,
    Settle,
    Settled,
    Welcome,
)
from kvd.protocol.ticket import Ticket, TicketRank
from kvd.protocol.worker import Pull
from tests.fuzz.attack import BATCH, Attack, Place
from tests.fuzz.messages import ANSWERS, SPAN, build, compose, garbled, golden, odd
from tests.fuzz.on_requests import large_spec
from tests.fuzz.sockets import dealer, drain, own_key, sent, worker

PULLS = 4
ROUNDS = 20
WAIT_MS = 10
BLOCKS = 4096
POOL = flat_spec(BLOCKS, 256)
SPEC = POOL.encode()


class _Lies(Attack):
    """A producer that answers as `answer` says; its welcomes begin as those of an honest daemon."""

    who, cost = "peer", 20.0
    grows = False
    """Whether its offers do."""

    def answer(self, request, welcome: Welcome) -> list[bytes]:
        raise NotImplementedError

    def strike(self):
        run = self.dice.randrange(10**18, 10**19)  # as many digits as an honest daemon's, so that metadata stays
        with ExitStack() as stack:
            router = stack.enter_context(_Router(self.place, run))
            welcome = _forged(self.place, run)
            ours = stack.enter_context(worker(self.place, f"fuzz-{self.name}", self.dice, SPEC))
            for _ in range(ROUNDS):
                pulls = [_pull(_address(router, self.place), run, self.dice, grows=self.grows) for _ in range(PULLS)]
                yield sent(ours, pulls)
                drain(ours)
                yield self._answered(router, welcome)

    def _answered(self, router: "zmq.Socket[bytes]", welcome: Welcome) -> int:
        number = 0
        for _ in range(BATCH):
            if not router.poll(WAIT_MS):
                break
            sender, *_, frame = router.recv_multipart()
            try:
                request = codec.peer_requests.decode(frame)
            except Exception as error:
                raise AssertionError(f"the daemon sent {frame!r}") from error
            for reply in self.answer(request, welcome):
                router.send_multipart([sender, reply])
                number += 1
        return number


def honest(request, welcome: Welcome) -> list[bytes]:
    """What an honest producer would answer."""
    match request:
        case Hello():
            return [codec.encode(welcome)]
        case Ping():
            return [compose(Pong, number=request.number, incarnation=welcome.incarnation)]
        case Claim():
            return [compose(Grant, claim=request.claim, generation=1, epoch=1, incarnation=welcome.incarnation)]
        case Fence():
            return [compose(Held, claim=request.claim)]
        case Settle():
            return [compose(Settled, claims=tuple(fence.claim for fence in request.fences))]
    return []


class LiesInMetadata(_Lies):
    """Welcomes whose NIXL metadata has a few bytes changed, is cut, or is none."""

    name = "link-metadata"

    def answer(self, request, welcome):
        if not isinstance(request, Hello):
            return honest(request, welcome)
        changed = bytearray(welcome.metadata)
        for _ in range(self.dice.randint(1, 3)):
            changed[self.dice.randrange(len(changed))] = self.dice.randrange(256)
        kind = self.dice.randrange(8)
        metadata = bytes(changed[: self.dice.randrange(len(changed))] if kind == 0 else changed)
        metadata = self.dice.randbytes(64) if kind == 1 else metadata
        return honest(request, msgspec.structs.replace(welcome, metadata=metadata))


class LiesInPools(_Lies):
    """Welcomes whose pools lie at, reach to or have odd addresses, sizes, epochs and names."""

    name = "link-pools"
    numbers = (0, 1, 4095, 1 << 31, 1 << 32, 1 << 47, (1 << 63) - 1, 1 << 63, (1 << 64) - 4096, (1 << 64) - 1)

    def answer(self, request, welcome):
        if not isinstance(request, Hello):
            return honest(request, welcome)
        number = self.dice.choice
        pools = tuple(
            msgspec.structs.replace(
                welcome.pools[0],
                base=number(self.numbers).to_bytes(8, "little"),
                size=number((welcome.pools[0].size, *(each for each in self.numbers if each < 1 << 63))),
                epoch=number((0, 1, (1 << 63) - 1)),
                pool=number(("p", "p", "p" * 128)),
            )
            for _ in range(number((1, 1, 1, 2, 300)))
        )
        stamps = number(self.numbers).to_bytes(8, "little")
        return honest(request, msgspec.structs.replace(welcome, pools=pools, stamps=stamps))


class LiesInSpecs(_Lies):
    """Welcomes of many pools with the largest specs that are allowed, or specs with bytes changed."""

    name, cost = "link-specs", 400.0

    def answer(self, request, welcome):
        if not isinstance(request, Hello):
            return honest(request, welcome)
        large = bytearray(large_spec() if self.dice.random() < 0.5 else SPEC)
        pools = []
        for number in range(40):
            large[self.dice.randrange(len(large))] = self.dice.randrange(256)
            pools.append(msgspec.structs.replace(welcome.pools[0], pool=f"p{number}", spec=bytes(large)))
        return honest(request, msgspec.structs.replace(welcome, pools=tuple(pools)))


class LiesInNames(_Lies):
    """Welcomes in the name of another daemon, agent or host."""

    name = "link-names"

    def answer(self, request, welcome):
        names = ("near", "target", "evil", "x" * 128)
        return honest(
            request,
            msgspec.structs.replace(
                welcome,
                daemon=self.dice.choice(names),
                agent=self.dice.choice((welcome.agent, "near#1", "target#1", "", "x" * 256)),
                incarnation=self.dice.choice((welcome.incarnation, 0, (1 << 63) - 1)),
                host=self.dice.choice((welcome.host, "", "elsewhere")),
            ),
        )


class LiesInAnswers(_Lies):
    """Answers of every kind that are garbled, odd, doubled, or not asked for."""

    name, cost = "link-answers", 4.0

    def answer(self, request, welcome):
        if isinstance(request, Hello):
            return honest(request, welcome)
        frames = [odd(self.dice, ANSWERS) if self.dice.random() < 0.5 else garbled(self.dice, golden())]
        return (frames + honest(request, welcome) * self.dice.randrange(3)) * self.dice.choice((1, 1, 30))


class LiesInGrowth(_Lies):
    """Offers that grow by nothing, for ever, go back, complete more than they hold, or grow very large."""

    name, cost, grows = "link-growth", 4.0, True

    def answer(self, request, welcome):
        if not isinstance(request, Follow):
            return honest(request, welcome)
        count = self.dice.choice((0, 0, 1, 1, 3, 1 << 16))
        ids = b"".join(self.dice.randrange(BLOCKS + 1).to_bytes(4, "little") for _ in range(min(count, 3)))
        ids += bytes(4 * max(0, count - 3)) + bytes(self.dice.choice((0, 0, 0, 1)))
        first = self.dice.choice((0, request.seen, 1 << 31))
        spans = ([self.dice.choice((0, 0, 0, 9)), first, ids],) if count else ()
        grown = compose(
            Grown,
            claim=request.claim,
            seen=request.seen,
            parts=self.dice.choice((request.seen, request.seen + 1, request.seen + 1, request.seen + 1, 1 << 40)),
            tokens=self.dice.choice((0, 16, 16 * (request.seen + 1), 1 << 40)),
            spans=spans,
            closed=self.dice.random() < 0.1,
            stamp=self.dice.choice((0, 1, limits.MAX_STAMPS)),
        )
        return [grown] * self.dice.choice((1, 1, 3))


class NeverAnswers(_Lies):
    """Silence, or an answer to the first hello alone."""

    name = "link-silence"

    def answer(self, request, welcome):
        return honest(request, welcome) if self.dice.random() < 0.1 else []


class _Router:
    """A ROUTER of this host, which proves evil's key where there are keys and lets everybody in."""

    def __init__(self, place: Place, run: int) -> None:
        self._pair, self._context = own_key(place), zmq.Context()
        same_kind = place.address.startswith("ipc://")
        self._listen = f"ipc://{place.socket}.{run}.peers" if same_kind else "tcp://127.0.0.1:0"

    def __enter__(self) -> "zmq.Socket[bytes]":
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDTIMEO, 200)
        if self._pair is not None:
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, self._pair.secret)
        self._socket.bind(self._listen)
        return self._socket

    def __exit__(self, *_: object) -> None:
        self._socket.close(0)
        self._context.term()


def _address(router: "zmq.Socket[bytes]", place: Place) -> str:
    place_of = router.getsockopt_string(zmq.LAST_ENDPOINT)
    pair = own_key(place)
    return place_of if pair is None else f"{place_of}#{pair.public.hex()}"


def _forged(place: Place, run: int) -> Welcome:
    """The welcome of the honest neighbour, in the name of `evil`, which is as long."""
    with dealer(place.near, f"evil#{run}".encode(), own_key(place)) as made:
        made.send(compose(Hello, daemon="evil", incarnation=1))
        if not made.poll(5000):
            raise TimeoutError("the neighbour does not answer")
        told = codec.peer_replies.decode(made.recv())
    if not isinstance(told, Welcome):
        raise ConnectionRefusedError(str(told))
    agent = f"evil#{run}{told.agent[len(f'near#{run}') :]}"
    pool = build(PoolInfo, pool="p", epoch=1, base=(1 << 40).to_bytes(8, "little"), size=POOL.pool_bytes, spec=SPEC)
    return msgspec.structs.replace(
        told,
        daemon="evil",
        incarnation=run >> 1,
        agent=agent,
        metadata=told.metadata.replace(told.agent.encode(), agent.encode()),
        pools=(pool,),
    )


def _pull(address: str, run: int, dice: Random, *, grows: bool) -> bytes:
    rank = build(TicketRank, daemon="evil", address=address, incarnation=run >> 1, pool="p", offer="o", blocks=0)
    content = {"tokens": 0, "blocks": ((),)} if grows else {"tokens": 16, "blocks": ((SPAN,),)}
    ticket = build(Ticket, ranks=(rank,), grows=grows, **content).encode()
    span = [0, 0, dice.randrange(BLOCKS).to_bytes(4, "little")]
    return compose(Pull, call=1, request=f"p{dice.randrange(1 << 40)}", ticket=ticket, spans=(span,), timeout=1.0)
