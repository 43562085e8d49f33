"""Bad input, which must be refused with a typed error and change nothing."""

from collections.abc import Callable

import msgspec

from kvd.actors.leases import lease as lease_machine
from kvd.errors import BadRequest
from kvd.protocol import codec, ticket
from kvd.protocol import worker as wire
from kvd.protocol.peer import Claim, Fence, Ping, Release, Renew
from kvd.protocol.types import Message, Span
from tests.simulator.checks.inspector import check_offered
from tests.simulator.checks.ledger import Pulling
from tests.simulator.checks.promises import Promise
from tests.simulator.traffic.workers import Worker
from tests.simulator.virtual.fleet import Daemon
from tests.simulator.virtual.network import UID
from tests.simulator.virtual.world import World

_TOKENS = 99
_GUESS = b"a bad guess 0123"
"""Longer than any sequence: a ticket that says so is wrong already."""


class BadInput:
    """Sends one piece of bad input at a time."""

    def __init__(self, world: World, daemons: list[Daemon], workers: list[Worker]) -> None:
        self.world = world
        self.daemons = daemons
        self.workers = workers
        self._made = 0

    def do(self) -> None:
        """Sends one piece of bad input."""
        kinds = (
            self._garbage_peer,
            self._garbage_session,
            self._garbage_request,
            self._wrong_request,
            self._wrong_ticket,
            self._used_blocks,
        )
        self.world.rng.choice(kinds)()

    # --- bytes that are no message ----------------------------------------------------------------------------------

    def _garbage(self, like: bytes) -> bytes:
        """Random bytes, a message cut short, or one with a byte changed (which may leave it a message)."""
        rng = self.world.rng
        match rng.randrange(3):
            case 0:
                return rng.randbytes(rng.randrange(40))
            case 1:
                return like[: rng.randrange(len(like))]
            case _:
                at = rng.randrange(len(like))
                return like[:at] + rng.randbytes(1) + like[at + 1 :]

    def _living(self) -> Daemon | None:
        daemon = self.world.rng.choice(self.daemons)
        return daemon if daemon.alive and not daemon.process.paused else None

    def _garbage_peer(self) -> None:
        daemon = self._living()
        if daemon is None:
            return
        rng = self.world.rng
        asks: tuple[Message, ...] = (
            Claim(rng.randrange(9), "e0.0", f"s{rng.randrange(9)}", 0, rng.randrange(9), _GUESS, "c", 0, 1, 0.5),
            Renew((1, 2, 3)),
            Fence(rng.randrange(9), rng.randrange(1 << 22)),
            Release(rng.randrange(9), finished=True),
            Ping(3),
        )
        frame = codec.encode(rng.choice(asks))
        frame = frame if rng.random() < 0.3 else self._garbage(frame)
        self.world.note(daemon.name, "gets from a stranger", frame)
        try:
            codec.peer_requests.decode(frame)
            wanted = 0
        except BadRequest:
            wanted = 1
        before = len(daemon.peer_port.answers_to_stranger)
        process = daemon.process
        daemon.peer_port.inject_ask(b"stranger", frame)
        if rng.random() < 0.3 and daemon.peer_port.links:
            daemon.peer_port.inject_answer(min(daemon.peer_port.links), rng.randbytes(rng.randrange(30)))

        def check() -> None:
            if not process.dead and not process.paused and daemon.process is process:
                answers = daemon.peer_port.answers_to_stranger[before:]
                if len(answers) < wanted:
                    self.world.violate(Promise.BAD_INPUT, f"{daemon.name} does not answer {frame!r} of a stranger")

        self.world.loop.call_later(0.001, check)

    def _garbage_session(self) -> None:
        daemon = self._living()
        if daemon is not None:
            attach = wire.Attach("e0.0", b"i" * 16, b"spec")
            frame = self._garbage(codec.encode(attach))
            self.world.note(daemon.name, "is sent on a session", frame)
            daemon.worker_port.inject_session(frame)

    def _garbage_request(self) -> None:
        worker = self.world.rng.choice(self.workers)
        if worker.attached and worker.session is not None and worker.session.open:
            offer = wire.Offer(1 << 50, "x", 3, (Span(0, 0, b"\1\0\0\0"),), 1.0, _GUESS)
            frame = self._garbage(codec.encode(offer))
            try:
                codec.worker_requests.decode(frame)
            except BadRequest:
                worker.session.send(frame)

    # --- messages that make no sense --------------------------------------------------------------------------------

    def _wrong_request(self) -> None:
        worker = self.world.rng.choice(self.workers)
        if not worker.attached:
            return
        rng = self.world.rng
        blocks = worker.cache.spec.groups[0].num_blocks
        bad = rng.choice(
            (
                Span(0, 0, (blocks + rng.randrange(3)).to_bytes(4, "little")),
                Span(9, 0, b"\1\0\0\0"),
                Span(0, 0, b"\1\0\0"),
                Span(0, 0, b"\xff" * 4),
            )
        )
        good = Span(0, 0, b"\0\0\0\0")
        text = ticket.Ticket(4, (ticket.TicketRank("d0", "sim://d0", 0, "e0.0", "x", 0, _GUESS),), ((good,),)).encode()
        wrong: tuple[tuple[Callable[[int], Message], Promise, str], ...] = (
            (
                lambda call: wire.Offer(call, f"b{call}", 2, (bad,), 1.0, _GUESS),
                Promise.OWN_POOL,
                f"an offer of {bad}",
            ),
            (lambda call: wire.Pull(call, f"bad{call}", text, (bad,), 1.0), Promise.OWN_POOL, f"a pull into {bad}"),
            (lambda call: wire.Pull(call, f"bad{call}", "kvd1.x", (good,), 1.0), Promise.BAD_INPUT, "a bad ticket"),
            (lambda call: wire.Pull(call, f"bad{call}", text, (good,), 0.0), Promise.BAD_INPUT, "a pull without time"),
            (lambda call: wire.Cancel(call, "nothing"), Promise.BAD_INPUT, "a cancel of nothing"),
        )
        worker.send_wrong(*rng.choice(wrong))

    def _used_blocks(self) -> None:
        """Offers what a pull writes to, or pulls into what is offered, at a moment when that is certain."""
        daemon, rng = self._living(), self.world.rng
        if daemon is None:
            return
        leases, scheduler = daemon.actors.leases, daemon.actors.scheduler
        standing = [lease for lease in leases.offers._leases.values() if lease.state not in lease_machine.TABLE.final]
        pulls = [(pull.pool.name, wire.Pull, pull.blocks) for pull in scheduler._pulls.values()]
        used = [(lease.pool.name, wire.Offer, lease.content.blocks) for lease in standing] + pulls
        used = [each for each in used if any(span.ids for span in each[2])]
        if not used:
            return
        name, kind, spans = rng.choice(used)
        [worker] = [worker for worker in self.workers if worker.name == name]
        if not worker.attached or worker.session is None or worker.session.port is not daemon.worker_port:
            return
        rank = ticket.TicketRank("d0", "sim://nowhere", 0, "e0.0", "x", 0, _GUESS)
        text = ticket.Ticket(4, (rank,), ((Span(0, 0, b"\0\0\0\0"),),)).encode()

        def make(call: int) -> Message:
            if kind is wire.Offer:
                return wire.Pull(call, f"used{call}", text, spans, 1.0)
            return wire.Offer(call, f"used{call}", 4, spans, 1.0, _GUESS)

        frame = worker.make_wrong(make, Promise.FENCED, f"a second use of what a {kind.__name__} names")
        self.world.note(daemon.name, "is asked for blocks in use", frame)
        daemon.worker_port.inject(worker.session.routing, frame, UID)
        daemon.process.call_later(0.0, check_offered, self.world, daemon)

    def _wrong_ticket(self) -> None:
        offering = [worker for worker in self.workers if worker.attached and worker.offers]
        if offering:
            source = self.world.rng.choice(offering)
            self.forge(source, self.world.rng.choice(sorted(source.offers)), self.world.rng.choice(self.workers))

    def forge(self, source: Worker, offer: str, worker: Worker) -> None:
        """`worker` pulls what `source` offers, with a ticket that somebody has changed on its way."""
        if not worker.attached or worker is source or worker.session is None or offer not in source.offers:
            return
        rng = self.world.rng
        offering = source.offers[offer]
        local = source.core.ticket(offer, _TOKENS, offering.blocks, offering.secret)
        replace = msgspec.structs.replace
        right = ticket.decode(offering.ticket or local)
        rank, ids = right.ranks[0], right.blocks[0]
        changed: tuple[ticket.Ticket, ...]
        if right.grows:
            changed = (ticket.decode(local), replace(right, grows=False), replace(right, tokens=_TOKENS))
        else:
            right = replace(right, tokens=_TOKENS)
            changed = (
                right,
                right,
                replace(right, blocks=((replace(ids[0], ids=ids[0].ids[::-1]), *ids[1:]),)),
                replace(right, blocks=((replace(ids[0], ids=b"\xff\xff\xff\xff"), *ids[1:]),)),
                replace(right, blocks=((replace(ids[0], ids=b"\1"), *ids[1:]),)),
                replace(right, blocks=((replace(ids[0], first=3),),)),
                replace(right, tokens=1 << 62),
                replace(right, grows=True),
            )
        wrong = rng.choice(
            (
                *changed,
                replace(right, ranks=(replace(rank, secret=_GUESS, stamp=rng.randrange(5)),)),
                replace(right, ranks=(replace(rank, pool="nobody"),)),
                replace(right, ranks=(replace(rank, offer="nothing"),)),
                replace(right, ranks=(replace(rank, incarnation=1 << 60),)),
                replace(right, ranks=(replace(rank, address="tcp//nowhere"),)),
                replace(right, ranks=(replace(rank, address="sim://nowhere"),)),
                replace(right, ranks=(rank, rank, rank)),
            )
        )
        groups = [range(1) for _ in worker.cache.spec.groups]
        blocks = worker.take_blocks(groups)
        if blocks is None:
            return
        self._made += 1
        request = f"wrong{self._made}"
        now = self.world.loop.now
        trouble = worker.trouble + worker.daemon.pauses
        pulling = Pulling("", "", 0, blocks, now + 0.5, now, (), trouble, stray=True, void=True, spoilt=True)
        worker.pull_wrongly(request, wrong.encode(), pulling, 0.5)
