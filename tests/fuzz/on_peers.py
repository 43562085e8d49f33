"""Attacks by an admitted peer that connects: whatever a consumer's daemon may say, more of it, and otherwise."""

from contextlib import ExitStack, suppress

import zmq

from kvd import limits
from kvd.bench.spec import flat_spec
from kvd.protocol import ticket
from kvd.protocol.peer import Claim, Fence, Follow, Hello, Ping, Release, Renew, Settle
from kvd.protocol.worker import Extend, Offer
from tests.fuzz.attack import BATCH, Attack
from tests.fuzz.messages import PEER_REQUESTS, build, compose, garbled, golden, odd
from tests.fuzz.sockets import dealer, drain, own_key, peer, sent, worker

MIB = 1 << 20
PATIENCE_MS = 5000


class _Asks(Attack):
    """Sends what `draw` gives over one link, and reads answers where `reads`."""

    who = "peer"
    reads = True
    rounds = 200
    batch = BATCH

    def draw(self) -> bytes:
        raise NotImplementedError

    def strike(self):
        with peer(self.place, run=self.dice.randrange(1 << 40)) as made:
            for _ in range(self.rounds):
                yield sent(made, [self.draw() for _ in range(self.batch)])
                if self.reads:
                    drain(made)
            made.poll(50)


class PeerGarbled(_Asks):
    """Golden frames, garbled."""

    name = "peer-garbled"

    def draw(self):
        return garbled(self.dice, golden())


class PeerOdd(_Asks):
    """Requests with odd contents."""

    name, cost = "peer-odd", 2.0

    def draw(self):
        return odd(self.dice, PEER_REQUESTS)


class PeerEmpty(_Asks):
    """Frames of nothing, as fast as they go."""

    name = "peer-empty-frames"

    def draw(self):
        return b""


class PeerPings(_Asks):
    """Pings whose answers are never read."""

    name, reads = "peer-unread-pongs", False

    def draw(self):
        return compose(Ping, number=1)


class PeerRenewals(_Asks):
    """Renewals of as many claims as one message may have, none of which is held."""

    name, cost, rounds, batch = "peer-renewals", 4000.0, 8, 2

    def draw(self):
        return compose(Renew, claims=tuple(range(limits.MAX_RENEWALS)))


class PeerHellos(_Asks):
    """Hellos whose welcomes are never read."""

    name, cost, reads = "peer-unread-welcomes", 4.0, False

    def draw(self):
        return compose(Hello, daemon="evil", incarnation=1)


class PeerClaims(_Asks):
    """Claims of offers that never come, each a new one."""

    name, cost = "peer-waiting-claims", 4.0

    def draw(self):
        number = self.dice.randrange(1 << 62)
        return compose(Claim, claim=number, pool="honest", offer=f"never-{number}", ttl=3600.0, readers=1, reader=0)


class PeerFences(_Asks):
    """Fences, releases and settlements of claims that nobody made, hundreds a message."""

    name, cost = "peer-fences", 40.0

    def draw(self):
        number, kind = self.dice.randrange(1 << 40), self.dice.randrange(3)
        if kind == 0:
            return compose(Release, claim=number, finished=True)
        claim = build(Claim, claim=number, pool="honest", offer="never", ttl=1.0, readers=1, reader=0)
        fence = build(Fence, claim=number, generation=number, unclaimed=claim)
        return compose(Settle, fences=(fence,) * 256) if kind == 1 else compose(Fence, claim=number, generation=1)


class PeerFollows(Attack):
    """Readers of a large offer that grows, which ask for all of it again and again, and leave the answers unread."""

    name, who, cost = "peer-follows", "peer", 20.0

    def strike(self):
        secret, blocks, readers = self.dice.randbytes(16), 1 << 15, 64
        with (
            worker(self.place, "fuzz-follows", self.dice, flat_spec(blocks, 16).encode()) as ours,
            peer(self.place, run=self.dice.randrange(1 << 40)) as made,
        ):
            spans = [[0, first, bytes(4 * 64)] for first in range(0, blocks, 64)]
            steps = [compose(Extend, call=1, offer="g", tokens=0, spans=(span,)) for span in spans]
            yield sent(ours, [compose(Offer, call=1, offer="g", tokens=0, ttl=60.0, secret=secret, grows=True), *steps])
            ours.poll(PATIENCE_MS)
            shown = ticket.proof(secret, "fuzz-follows", "g", 0, ())
            claim = {
                "pool": "fuzz-follows",
                "offer": "g",
                "proof": shown,
                "incarnation": 0,
                "generation": 0,
                "ttl": 60.0,
            }
            claims = [
                compose(Claim, claim=number, consumer=f"c{number}", readers=2, reader=0, **claim)
                for number in range(readers)
            ]
            yield sent(made, claims)
            made.poll(PATIENCE_MS)
            for _ in range(40):
                asked = [
                    compose(
                        Follow, claim=self.dice.randrange(readers + 2), seen=self.dice.choice((0, 0, 1, 600, 1 << 40))
                    )
                    for _ in range(BATCH)
                ]
                yield sent(made, asked)
                if self.dice.random() < 0.2:
                    drain(made)
                    drain(ours)


class PeerReplays(_Asks):
    """The same few requests again and again."""

    name = "peer-replays"

    def draw(self):
        number = self.dice.randrange(4)
        claim = build(Claim, claim=number, pool="honest", offer="again", ttl=0.01, readers=1, reader=0)
        return self.dice.choice(
            (
                compose(Claim, claim=number, pool="honest", offer="again", ttl=0.01, readers=1, reader=0),
                compose(Fence, claim=number, generation=1, unclaimed=claim),
                compose(Release, claim=number, finished=False),
                compose(Renew, claims=(number,) * 20),
                compose(Hello, daemon="evil", incarnation=number),
            )
        )


class PeerLarge(_Asks):
    """Messages of almost the largest size."""

    name, cost, rounds, batch = "peer-large-messages", 4000.0, 20, 4

    def draw(self):
        return bytes(15 * MIB)


class PeerEndless(Attack):
    """Messages of hundreds of parts."""

    name, who, cost = "peer-endless-message", "peer", 8000.0

    def strike(self):
        part = bytes(4 * MIB)
        with peer(self.place, run=self.dice.randrange(1 << 40)) as made:
            for _ in range(128):
                made.send(part, zmq.SNDMORE | zmq.NOBLOCK, copy=False)
            yield sent(made, [part])
            made.poll(1000)


class PeerComesAndGoes(Attack):
    """Links that are made and dropped, under the same name and under many."""

    name, who, cost = "peer-comes-and-goes", "peer", 40.0

    def strike(self):
        pair = own_key(self.place)
        with ExitStack() as stack:
            for _ in range(BATCH):
                run = self.dice.choice((1, 1, self.dice.randrange(1 << 20)))
                made = stack.enter_context(dealer(self.place.address, b"evil#%d" % run, pair))
                yield sent(made, [compose(Hello, daemon="evil", incarnation=run), odd(self.dice, PEER_REQUESTS)])
                made.poll(5)


class PeerUnderOtherNames(Attack):
    """An admitted key under routing ids that are not its own, or of no daemon."""

    name, who, cost = "peer-under-other-names", "peer", 40.0

    def strike(self):
        names = (b"evi", b"evil", b"evil#", b"evil\n#1", b"nobody#1", b"#", b"\xff" * 200, b"evil#1\x00", b"x" * 255)
        with dealer(self.place.address, self.dice.choice(names), own_key(self.place)) as made:
            for _ in range(8):
                yield sent(made, [compose(Hello, daemon="near", incarnation=1), odd(self.dice, PEER_REQUESTS)])
                with suppress(zmq.Again):
                    drain(made)
                made.poll(5)
