"""Engines and the router between them: sequences are prefilled by one engine and pulled by another."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec

from kvd.client.events import Blocks
from kvd.errors import KvdError
from kvd.layout import Full
from kvd.limits import SECRET_BYTES
from kvd.protocol import ticket
from tests.simulator.checks.ledger import Pulling
from tests.simulator.traffic.growing import Prefill
from tests.simulator.traffic.pieces import Piece
from tests.simulator.traffic.workers import Worker
from tests.simulator.virtual.cache import make_cache
from tests.simulator.virtual.fleet import Daemon
from tests.simulator.virtual.network import alias, session_of
from tests.simulator.virtual.world import World

MAX_TOKENS = 12
_BRIEF = 0.15
"""Seconds that a brief offer lasts unless it is claimed; a slow read takes longer."""

_EARLY = 0.03
"""Seconds within which a pull is cancelled that is to be: claims, handshakes and stamped reads take as long."""

_HELD = 4
"""One in so many pulls has its offer held from before it until its end."""

NUM_BLOCKS = 16


@dataclass(slots=True)
class Engine:
    """The workers that together hold one model."""

    name: str
    workers: list[Worker]

    @property
    def daemons(self) -> list[Daemon]:
        return [worker.daemon for worker in self.workers]

    @property
    def ready(self) -> bool:
        """Whether every rank is attached."""
        return all(worker.attached for worker in self.workers)

    @property
    def trouble(self) -> int:
        """How often its workers stood still, or lost their sessions."""
        return sum(worker.trouble for worker in self.workers)


@dataclass(slots=True)
class Sequence:
    """One request on its way from one engine to another."""

    name: str
    """Names its content, which no other sequence has."""
    offer: str
    """The name it is offered under; perhaps an earlier sequence's."""
    tokens: int
    source: Engine
    target: Engine
    also: tuple[Engine, ...]
    """Other engines that pull it, though it was not prefilled for them."""
    timeout: float
    tries: int
    calm: bool
    """It has all the time it needs and is not cancelled: without a fault it is done."""
    began: float
    cancelled: bool = False
    """Its pulls are cancelled soon after they began, which ends its offers."""
    brief: bool = False
    """Offered so briefly that no message may be lost or late."""
    trouble: int = 0
    """What its source had had when it was made."""
    grows: bool = False
    """Its offers grow while it is prefilled."""
    early: bool = False
    """Some of its tickets are on their way before their offers are made."""
    unopened: int = 0
    """Its offers that are yet to be made, and whose tickets are on their way already."""
    tickets: dict[int, str] = field(default_factory=dict)
    offered: dict[int, tuple[tuple[Blocks, ...], bytes]] = field(default_factory=dict)
    """Blocks and secret, by rank of the source, of those offers whose tickets name their leases: a careless engine
    offers both again under the same name."""
    done: set[Worker] = field(default_factory=set)
    """Workers that have pulled it."""

    @property
    def served(self) -> bool:
        """Whether every rank it was prefilled for has it."""
        return self.done.issuperset(self.target.workers)

    @property
    def disturbed(self) -> bool:
        """Whether its source has had a fault since it was made."""
        return self.source.trouble != self.trouble


def _secret(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=SECRET_BYTES).digest()


def make_engine(
    world: World, daemons: list[Daemon], name: str, *, groups: int, layout: str, block_tokens: int
) -> Engine:
    """An engine of one or two ranks, each beside a daemon that the dice choose."""
    tp_size = world.rng.choice((1, 2))
    workers = []
    for rank in range(tp_size):
        cache = make_cache(layout, rank, tp_size, num_blocks=NUM_BLOCKS, block_tokens=block_tokens, groups=groups)
        workers.append(Worker(world, world.rng.choice(daemons), f"{name}.{rank}", cache))
    return Engine(name, workers)


class Router:
    """Starts sequences and takes them from engine to engine."""

    def __init__(self, world: World, engines: list[Engine]) -> None:
        self.world = world
        self.engines = engines
        self.sequences = 0
        self.outcomes: dict[str, int] = {}
        """How many pulls ended how, but for those that were made to be cancelled."""
        self.on_pull: Callable[[Sequence, Worker, str], None] = lambda _sequence, _worker, _request: None
        """Called for each pull that was sent."""
        self._alive: list[Sequence] = []
        self._again_number = 0
        self._joined: list[tuple[Sequence, str]] = []
        """Sequences with their tickets."""
        self._by_request: dict[str, tuple[Sequence, Worker]] = {}
        for engine in engines:
            for worker in engine.workers:
                worker.on_end = self._ended

    def begin(self, source: Engine, target: Engine, *, calm: bool) -> Sequence | None:
        """Prefills a sequence at `source` for `target`; None if an engine is not ready."""
        if not source.ready or not target.ready:
            return None
        return self._begin(source, target, calm, self._earlier(source))

    def begin_cancelled(self, source: Engine, target: Engine) -> Sequence | None:
        """Prefills a sequence whose pulls are cancelled at once; None if an engine is not ready."""
        if not source.ready or not target.ready:
            return None
        return self._begin(source, target, True, None, cancelled=True)

    def begin_again(self, sequence: Sequence) -> None:
        """Prefills another sequence under the name of one that is offered no more."""
        if sequence.source.ready and sequence.target.ready and self._is_over(sequence):
            self._begin(sequence.source, sequence.target, False, sequence)

    def _begin(
        self, source: Engine, target: Engine, calm: bool, earlier: Sequence | None, *, cancelled: bool = False
    ) -> Sequence:
        rng = self.world.rng
        self.sequences += 1
        sequence = Sequence(
            name=f"s{self.sequences}",
            offer=earlier.offer if earlier else f"s{self.sequences}",
            tokens=earlier.tokens if earlier else rng.randint(1, MAX_TOKENS),
            source=source,
            target=target,
            also=() if calm else self._others(source, target),
            timeout=4.0 if calm else rng.choice((0.02, 0.2, 1.0, 2.0)),
            tries=0 if calm else rng.randrange(3),
            calm=calm,
            began=self.world.loop.now,
            cancelled=cancelled,
        )
        self._alive.append(sequence)
        brief = calm and not cancelled and Piece.BRIEF_OFFERS in self.world.pieces and self.world.chance(0.7)
        sequence.brief, sequence.trouble = brief, source.trouble
        sequence.grows = Piece.GROWING_OFFERS in self.world.pieces and self.world.chance(0.5)
        ttl = _BRIEF if brief else 6.0 if calm else rng.choice((0.1, 0.5, 2.0))
        self.world.note(source.name, "prefills", sequence.name, sequence.tokens, target.name)
        for rank, worker in enumerate(source.workers):
            self._offer(sequence, rank, worker, ttl, like=earlier.offered.get(rank) if earlier else None)
        return sequence

    def _earlier(self, source: Engine) -> Sequence | None:
        """A finished sequence whose name is used again."""
        if Piece.REUSED_NAMES not in self.world.pieces or self.world.chance(0.4):
            return None
        over = [each for each in self._alive[-4:] if each.source is source and self._is_over(each)]
        return self.world.rng.choice(over) if over else None

    def _is_over(self, sequence: Sequence) -> bool:
        """Whether nobody offers anything under its name, and nothing that has been prefilled will be."""
        unopened = any(other.unopened for other in self._alive if other.offer == sequence.offer)
        return not unopened and not any(sequence.offer in worker.offers for worker in sequence.source.workers)

    def _others(self, source: Engine, target: Engine) -> tuple[Engine, ...]:
        if Piece.SEVERAL_CONSUMERS not in self.world.pieces:
            return ()
        others = [engine for engine in self.engines if engine not in (source, target)]
        return tuple(engine for engine in [*others, target] if engine.ready and self.world.chance(0.5))

    def _offer(
        self,
        sequence: Sequence,
        rank: int,
        worker: Worker,
        ttl: float,
        *,
        like: tuple[tuple[Blocks, ...], bytes] | None,
    ) -> None:
        groups = worker.cache.spec.groups
        wanted = [range(-(-sequence.tokens // group.block_tokens)) for group in groups]
        blocks = worker.take_again(like[0]) if like else None
        blocks = blocks or worker.take_blocks(wanted)
        if blocks is None:
            return
        run = worker.runs
        late = (sequence.cancelled or not sequence.calm) and self.world.chance(0.3)
        early = late or (sequence.grows and self._may_wait(sequence) and self.world.chance(0.5))
        secret = like[1] if like and not early else _secret(f"{sequence.name} {worker.process.name}")
        if not early:
            sequence.offered[rank] = (blocks, secret)
        sequence.early |= early
        sequence.unopened += early

        def opened() -> None:
            sequence.unopened -= early

        if sequence.grows:
            prefill = Prefill(worker, sequence.offer, sequence.name, sequence.tokens, blocks, secret)
            given_up = not sequence.calm and self.world.chance(0.2)
            wait = 0.1 if sequence.calm else 0.3
            have = partial(self._have, sequence, rank)
            prefill.begin(ttl, have, opened, early=early, wait=wait, given_up=given_up)
            return

        def offer() -> None:
            if worker.runs != run:
                return
            if not worker.attached:
                worker.give_back(blocks)
                return

            def answered(text: str) -> None:
                self._have(sequence, rank, text)

            answer = None if late else answered
            worker.offer(sequence.offer, sequence.tokens, blocks, ttl, answer, secret=secret, text=sequence.name)
            opened()

        if late:
            # The router passes the ticket on before the offer is made, as engines that know their blocks early do.
            self._have(sequence, rank, worker.core.ticket(sequence.offer, sequence.tokens, blocks, secret))
            worker.process.call_later(self.world.rng.random() * 0.3, offer)
        else:
            offer()

    def _may_wait(self, sequence: Sequence) -> bool:
        """Whether its claims may come before its offers, though some of them are refused where few may wait."""
        return not sequence.calm or Piece.SMALL_BOUNDS not in self.world.pieces

    def _have(self, sequence: Sequence, rank: int, text: str) -> None:
        sequence.tickets[rank] = text
        if len(sequence.tickets) == len(sequence.source.workers):
            joined = ticket.join([sequence.tickets[rank] for rank in sorted(sequence.tickets)])
            self._joined.append((sequence, joined))
            for number, engine in enumerate((sequence.target, *sequence.also)):
                for worker in engine.workers:
                    delay = self.world.rng.random() * (0.3 if number else 0.01)
                    self.world.loop.call_later(delay, self._pull, sequence, worker, joined, 10 * number + 1)

    def pull_again(self) -> None:
        """An engine pulls with an old ticket."""
        over = [(sequence, text) for sequence, text in self._joined if not sequence.calm]
        if over and not self.world.pieces.isdisjoint((Piece.OLD_TICKETS, Piece.REUSED_NAMES)):
            stale = [(sequence, text) for sequence, text in over if self._is_stale(text)]
            reused = [(sequence, text) for sequence, text in over if self._is_reused(sequence)]
            sequence, text = self.world.rng.choice(reused or stale or over)
            self._again_number += 1
            sequence.timeout = 1.0
            self._pull(
                sequence, self.world.rng.choice(sequence.target.workers), text, 1000 + 10 * self._again_number + 9
            )

    def _spelled(self, text: str) -> str:
        """A ticket, perhaps with another spelling of its daemons' addresses."""
        if Piece.TWO_ADDRESSES not in self.world.pieces or self.world.chance(0.5):
            return text
        whole = ticket.decode(text)
        ranks = tuple(msgspec.structs.replace(rank, address=alias(rank.address)) for rank in whole.ranks)
        return msgspec.structs.replace(whole, ranks=ranks).encode()

    def _pull(self, sequence: Sequence, worker: Worker, joined: str, attempt: int) -> None:
        if not worker.attached:
            return
        blocks = worker.take_blocks(self._wanted(sequence, worker))
        if blocks is None:
            return
        request = f"{sequence.name}/{worker.name}/{attempt}"
        sources = [name for each in sequence.source.workers for name in (each.name, each.daemon.name)]
        if sequence.grows or sequence.brief:  # what is not closed ends with the session, and tickets come late
            sources += [session_of(each.name) for each in sequence.source.workers]
        void = self._is_stale(joined)
        pulling = Pulling(
            sequence=sequence.name,
            offer=sequence.offer,
            tokens=sequence.tokens,
            blocks=blocks,
            deadline=self.world.loop.now + sequence.timeout,
            began=sequence.began,
            concerned=(worker.daemon.name, *sources),
            trouble=worker.trouble + worker.daemon.pauses,
            spoilt=not sequence.calm or (sequence.brief and sequence.disturbed),
            brief=sequence.brief,
            comes_late=lambda: sequence.early and sequence.disturbed,
            sent=self.world.loop.now,
            void=void,
            stale=void
            and sequence.source.ready
            and not self._is_stopped(sequence, worker)
            and not self._is_put_off(worker, joined),
        )
        self._by_request[request] = (sequence, worker)
        try:
            if len(self._by_request) % _HELD == 0:
                worker.hold(request, self._spelled(joined), sequence.name)
            worker.pull(request, self._spelled(joined), pulling, sequence.timeout)
        except KvdError:
            worker.give_back(blocks)
            return
        self.on_pull(sequence, worker, request)
        if sequence.cancelled:
            worker.process.call_later(self.world.rng.random() * _EARLY, worker.cancel, request)
        if attempt % 10 <= sequence.tries:
            worker.process.call_later(self.world.rng.random(), self._again, request, joined, attempt)

    def _is_put_off(self, worker: Worker, joined: str) -> bool:
        """Whether its daemon pauses before it greets a producer that its transport did not reach."""
        named = {rank.address for rank in ticket.decode(joined).ranks}
        named.update([alias(address) for address in named])
        peers = worker.daemon.actors.handshake._peers.by_address
        return any(peers[address].greeted_from > self.world.loop.now for address in named & peers.keys())

    @staticmethod
    def _is_stopped(sequence: Sequence, worker: Worker) -> bool:
        return any(daemon.process.paused for daemon in (worker.daemon, *sequence.source.daemons))

    def _is_stale(self, text: str) -> bool:
        """Whether all daemons that the ticket names have restarted since."""
        runs = {daemon.name: daemon.incarnation for engine in self.engines for daemon in engine.daemons}
        return all(rank.incarnation not in (0, runs[rank.daemon]) for rank in ticket.decode(text).ranks)

    def _is_reused(self, sequence: Sequence) -> bool:
        """Whether another offer stands under its name."""
        return any(
            other is not sequence and other.offer == sequence.offer and other.began > sequence.began
            for other in self._alive
        ) and any(sequence.offer in worker.offers for worker in sequence.source.workers)

    def _wanted(self, sequence: Sequence, worker: Worker) -> list[range]:
        """What the target needs and lacks: it may have cached some of the prefix."""
        wanted = []
        for group in worker.cache.spec.groups:
            positions = group.needed(sequence.tokens)
            if isinstance(group.window, Full) and self.world.chance(0.3):
                positions = positions[self.world.rng.randrange(len(positions) + 1) :]
            wanted.append(positions)
        return wanted

    def _again(self, request: str, joined: str, attempt: int) -> None:
        """The ranks of the target that have not got it try again."""
        sequence, worker = self._by_request[request]
        if worker not in sequence.done:
            self._pull(sequence, worker, joined, attempt + 1)

    def _ended(self, request: str, outcome: str) -> None:
        sequence, worker = self._by_request[request]
        if not sequence.cancelled:
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        if outcome == "done":
            sequence.done.add(worker)

    def withdraw(self, offer: str, worker: Worker) -> None:
        """Withdraws an offer, perhaps in the middle of its pulls, which may fail from here on."""
        for engine in self.engines:
            for each in engine.workers:
                for pulling in each.pulls.values():
                    pulling.spoilt |= pulling.offer == offer
        for sequence in self._alive:
            if sequence.offer == offer:
                sequence.calm = False
        worker.cancel(offer)
