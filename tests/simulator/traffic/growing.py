"""A prefill in chunks: the offer of a sequence grows while the sequence is computed, and pulls follow it."""

from collections.abc import Callable
from functools import partial

import numpy as np

from kvd.client.events import Blocks
from kvd.layout import Full
from kvd.protocol import ticket
from kvd.protocol import worker as wire
from tests.simulator.checks.ledger import Offering
from tests.simulator.checks.promises import Promise
from tests.simulator.traffic.workers import Worker
from tests.simulator.virtual.cache import content

_STEP = 0.06
"""Seconds that a chunk takes at most."""
_MOST = 4
"""Chunks before the last one."""
_JUNK = 0x11
"""The byte in what is not computed yet."""


class Prefill:
    """One rank's part of a sequence of `tokens` tokens, with the content called `text`, in `blocks` of its pool.

    `have` is called with the ticket: before the offer is opened if it is `early`, else when the daemon has answered;
    `opened` once it is opened. It dies with the worker's process. One that is `given_up` is never closed.
    """

    def __init__(
        self, worker: Worker, offer: str, text: str, tokens: int, blocks: tuple[Blocks, ...], secret: bytes
    ) -> None:
        self._worker = worker
        self._offer = offer
        self._text = text
        self._tokens = tokens
        self._blocks = blocks
        self._secret = secret
        rng = worker.world.rng
        self._chunks = sorted(rng.randint(1, tokens) for _ in range(rng.randint(0, _MOST)))
        self._offering: Offering | None = None
        self._named = [0] * len(blocks)
        """How many blocks of each group are in the offer."""

    def begin(
        self,
        ttl: float,
        have: Callable[[str], None],
        opened: Callable[[], None],
        *,
        early: bool,
        wait: float,
        given_up: bool,
    ) -> None:
        """Opens the offer, within `wait` seconds if the ticket is on its way already."""
        if given_up:
            self._chunks = [*self._chunks, 0]
        if early:
            have(self._early_ticket())
        run = self._worker.runs

        def open_it() -> None:
            worker = self._worker
            if worker.runs != run:
                return
            if not worker.attached:
                worker.give_back(self._blocks)
            elif worker.open_offer(self._offer, self._blocks, ttl, None if early else have, secret=self._secret):
                opened()
                self._offering = worker.offers[self._offer]
                self._go_on()

        if early:
            self._worker.process.call_later(self._worker.world.rng.random() * wait, open_it)
        else:
            open_it()

    def _early_ticket(self) -> str:
        """As a router makes it, which may not know the daemon's run."""
        worker = self._worker
        attached = worker.core.attached
        return ticket.growing(
            daemon=attached.daemon,
            address=attached.address,
            pool=worker.name,
            offer=self._offer,
            secret=self._secret,
            incarnation=worker.world.rng.choice((0, attached.incarnation)),
        )

    def _go_on(self) -> None:
        self._worker.process.call_later(self._worker.world.rng.random() * _STEP, self._compute)

    def _compute(self) -> None:
        """Computes one chunk, and says so."""
        worker, closes = self._worker, not self._chunks
        if worker.offers.get(self._offer) is not self._offering or not worker.attached:
            return  # it has ended, and its name and blocks may be another's by now
        tokens = self._chunks.pop(0) if self._chunks else self._tokens
        if not tokens:
            return
        worker.extend_offer(self._offer, tokens, self._fill(tokens, closes=closes), closes=closes)
        if not closes:
            self._go_on()
        elif worker.world.chance(0.3):
            worker.process.call_later(worker.world.rng.random() * _STEP, self._extend_wrongly)

    def _extend_wrongly(self) -> None:
        """Goes on with what is closed, or has ended since."""
        worker = self._worker
        named = worker.offers.get(self._offer)  # by now perhaps another offer, which may be open
        if worker.attached and (named is None or named is self._offering):
            wrong = self._tokens + worker.world.rng.randrange(2)
            make = partial(wire.Extend, offer=self._offer, tokens=wrong, spans=(), closes=worker.world.chance(0.5))
            worker.send_wrong(make, Promise.BAD_INPUT, f"an extension of {self._offer!r}, which is closed,")

    def _fill(self, tokens: int, *, closes: bool) -> tuple[Blocks, ...]:
        """Writes what is complete, and junk behind it. Returns the blocks that are to be named."""
        worker, more = self._worker, []
        assert worker.file is not None
        for number, part in enumerate(self._blocks):
            group = worker.cache.spec.groups[part.group]
            streams = isinstance(group.window, Full)
            stop = len(part.ids) if closes else -(-tokens // group.block_tokens) if streams else 0
            complete = self._tokens if closes else tokens if streams else 0
            whole = content(self._text, part.group, self._tokens)
            rows = np.full((len(part.ids) * group.block_tokens, whole.shape[1]), _JUNK, np.uint8)
            rows[:complete] = whole[:complete]
            worker.cache.fill(worker.file.data, part.group, list(part.ids), rows)
            named, self._named[number] = self._named[number], stop
            more.append(Blocks(part.group, named, list(part.ids)[named:stop]))
        return tuple(part for part in more if part.ids)
