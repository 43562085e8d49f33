"""What a decode engine keeps of its answers, for the prefill of the next turn of each conversation.

The blocks of a kept turn have a reference of the connector's own in vLLM's block pool. vLLM ends the request as usual:
its engine makes no steps because of what is kept, and finds the blocks in its prefix cache. They are given back when
every rank's daemon has let go of them: once the next turn's prefill has read them, after the turn's time, or after they
were given up. That happens when more would be kept than a share of the cache: the oldest turns go. It also happens when
vLLM has no blocks for a request that waits or runs: the oldest turn whose blocks nobody else has goes, and then the
turns that it continued, whose blocks it had, too.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from kvd.engines.vllm.block_manager import BlockManager
from kvd.engines.vllm.step_clock import StepClock

_SCARCE = 1 / 16
"""The share of the cache that must be free for an answer to be kept: with less it would soon be given up."""

_LEAST_GIVEN_UP = 1 / 32
"""The share of the cache that is given up at a time where a running request lacks blocks: more soon will."""

_FREED_SECONDS = 1.0
"""How long vLLM waits for blocks that are given up before it preempts a request: daemons answer in milliseconds."""

_FREED_STEPS = 3
"""So many steps at least are within that time, however long they take: vLLM plans one ahead, and hears after it what
came in it. What a daemon answers while a step goes on is heard of at the end of the next one."""


@dataclass(slots=True)
class _Kept:
    """One turn."""

    offer: str
    name: str
    """By which its parameters are asked for; empty if the answer had them."""
    params: dict[str, Any] = field(repr=False)
    blocks: list[Any] = field(repr=False)
    """VLLM's, without null blocks."""
    ranks: int
    """Whose daemons have not let go of it."""
    given_up: bool = False
    awaited_until: float = 0.0
    """If it is given up, how long its blocks are waited for, by the clock of steps; without end until the step is
    planned that tells the workers."""
    lost: str = ""
    """Why it ended on the first rank on which it was not read: then nobody can read all of it."""


class KeptTurns:
    """Of an engine of `ranks` ranks: blocks of at most a `share` of the cache."""

    def __init__(self, ranks: int, share: float, manager: BlockManager) -> None:
        self._ranks = ranks
        self._share = share
        self._manager = manager
        self._kept: dict[str, _Kept] = {}
        """By offer, the oldest first."""
        self._named: dict[str, _Kept] = {}
        self._held: Counter[int] = Counter()
        """How many turns that are not given up have a block, by its identity: groups may have pools of their own."""
        self._going: Counter[int] = Counter()
        """How many that are given up have a block, until daemons have let go of them."""
        self._leaving: dict[int, Any] = {}
        """The blocks that these have."""
        self._loaded: dict[str, Any] = {}
        """Requests whose blocks have come, and that have not been scheduled since: they may need more."""
        self._asked: dict[str, Any] = {}
        """Requests without blocks that vLLM has come to in this step, and has given none yet."""
        self._withdrawals: list[str] = []
        self._ends: list[str] = []
        self._clock = StepClock(longest=_FREED_SECONDS / _FREED_STEPS)

    # --- one turn ---------------------------------------------------------------------------------------------------

    def room(self, request: Any, block_ids: Iterable[int]) -> list[Any] | None:
        """The blocks with these ids of `request`, which has ended, if they can be kept; older turns are given up.

        None if they are too many, or blocks are scarce.
        """
        pool, wanted = self._manager.pool, set(block_ids)
        held = self._manager.blocks(request.request_id)
        blocks = [block for block in held if block.block_id in wanted and not block.is_null]
        most = int(self._share * pool.num_gpu_blocks)
        if len(blocks) > most or pool.get_num_free_blocks() < _SCARCE * pool.num_gpu_blocks:
            self._ends.append("not kept")
            return None
        own = set(map(id, blocks))
        above = len(self._held.keys() | own) - most
        for kept in self._standing():
            if above <= 0:
                break
            above -= len(self._give_up(kept) - own)
        return blocks

    def keep(self, offer: str, name: str, params: dict[str, Any], blocks: list[Any]) -> None:
        """Keeps the `blocks` until `offer` has ended on every rank; `params` can be asked for by the turn's `name`."""
        self._manager.pool.touch(blocks)
        self._held.update(map(id, blocks))
        self._kept[offer] = kept = _Kept(offer, name, params, blocks, self._ranks)
        if name:
            if name in self._named:
                self._give_up(self._named[name])
            self._named[name] = kept

    def take(self, name: str) -> dict[str, Any] | None:
        """The parameters of a kept turn, once; None if there is none, or not any more."""
        kept = self._named.pop(name, None)
        return None if kept is None or kept.given_up else kept.params

    def ended(self, ends: Iterable[tuple[str, str]]) -> None:
        """These offers have ended, on one rank each, and why: nobody reads their blocks there any more."""
        for offer, reason in ends:
            kept = self._kept[offer]
            kept.ranks -= 1
            if reason != "read":
                kept.lost = kept.lost or reason
            if kept.ranks == 0:
                self._ends.append(kept.lost or reason)
                self._forget(kept)
            elif kept.lost:
                self._give_up(kept)

    def take_ends(self) -> list[str]:
        """Why turns are no longer kept, or were not, since the last call."""
        ends, self._ends = self._ends, []
        return ends

    # --- when vLLM is short of blocks -------------------------------------------------------------------------------

    def asked(self, request: Any) -> None:
        """VLLM is about to give a request its blocks, if it has enough: a new one, or one that has lost its own."""
        self._asked[request.request_id] = request

    def loaded(self, request: Any) -> None:
        """A request's load is complete. VLLM gives it the blocks for all that is not loaded without asking."""
        self._loaded[request.request_id] = request

    def admitted(self, request: str) -> None:
        """It has its blocks, or has ended."""
        self._asked.pop(request, None)
        self._loaded.pop(request, None)

    def relieve(self) -> None:
        """A step was planned: whoever still waits was passed over. Gives up what the first one lacks.

        Those that are loaded come first, as they do at vLLM, which comes to nothing behind one that lacks blocks.
        It may be more than that lacks (`BlockManager.shortage`).
        """
        self._clock.look()
        request = next(chain(self._loaded.values(), self._asked.values()), None)
        self._asked.clear()
        if self._kept and request is not None:
            self._free(self._manager.shortage(request) - self._coming())

    def frees(self) -> bool:
        """A running request lacks a block: whether some will be free soon. Gives turns up if none are on their way."""
        self._clock.look()
        if not self._coming():
            self._free(max(1, int(_LEAST_GIVEN_UP * self._manager.pool.num_gpu_blocks)) if self._kept else 0)
        return self.freeing and self._coming() > 0

    def clear(self) -> None:
        """Gives everything up: the cache is to be emptied."""
        for kept in self._standing():
            self._give_up(kept)

    @property
    def freeing(self) -> bool:
        """Whether blocks were given up that are not free yet, not long ago."""
        return any(kept.awaited_until > self._clock.now for kept in self._kept.values())

    def take_withdrawals(self) -> list[str]:
        """Offers that the workers are to withdraw in the step that was just planned."""
        withdrawals, self._withdrawals = self._withdrawals, []
        for offer in withdrawals:
            if offer in self._kept:
                self._kept[offer].awaited_until = self._clock.now + _FREED_SECONDS
        return withdrawals

    # --- inside -----------------------------------------------------------------------------------------------------

    def _standing(self) -> list[_Kept]:
        return [kept for kept in self._kept.values() if not kept.given_up]

    def _coming(self) -> int:
        """Blocks that will be free once daemons have let go of what is given up."""
        return sum(block.ref_cnt == self._going[number] for number, block in self._leaving.items())

    def _adds(self, kept: _Kept) -> int:
        """How many more will be if this turn is given up, too: requests and other turns may share its blocks."""
        return sum(block.ref_cnt == self._going.get(id(block), 0) + 1 for block in kept.blocks)

    def _free(self, blocks: int) -> None:
        """Gives up turns that have so many blocks: the oldest that frees some, those that it continued, and so on."""
        skipped: list[_Kept] = []
        having: defaultdict[int, list[_Kept]] = defaultdict(list)
        """Those that were skipped, by their blocks, the newest last."""
        for kept in self._standing():
            if blocks <= 0:
                return
            if not self._adds(kept):
                skipped.append(kept)  # one that continues it stands, or a request runs on its blocks
                continue
            for turn in skipped:
                for block in turn.blocks:
                    having[id(block)].append(turn)
            skipped.clear()
            going = [kept]
            while going and blocks > 0:
                turn = going.pop()
                if not turn.given_up:
                    blocks -= self._adds(turn)
                    self._give_up(turn)
                    going += self._last_with(turn.blocks, having)

    def _last_with(self, blocks: Sequence[Any], having: dict[int, list[_Kept]]) -> Iterator[_Kept]:
        """The turns that are each the last to have one of these `blocks`: they free it."""
        for block in blocks:
            turns = having.get(id(block), [])
            while turns and turns[-1].given_up:
                turns.pop()
            if turns and block.ref_cnt == self._going[id(block)] + 1:
                yield turns[-1]

    def _give_up(self, kept: _Kept) -> set[int]:
        """Returns the blocks that no turn holds any more."""
        if kept.given_up:
            return set()
        kept.given_up, kept.awaited_until = True, math.inf
        self._withdrawals.append(kept.offer)
        self._going.update(map(id, kept.blocks))
        self._leaving.update((id(block), block) for block in kept.blocks)
        return _uncount(self._held, kept)

    def _forget(self, kept: _Kept) -> None:
        del self._kept[kept.offer]
        if self._named.get(kept.name) is kept:
            del self._named[kept.name]
        if kept.given_up:
            for number in _uncount(self._going, kept):
                del self._leaving[number]
        else:
            _uncount(self._held, kept)
        # The last ones first, as vLLM does: those of beginnings stay in the prefix cache for longest.
        self._manager.pool.free_blocks(reversed(kept.blocks))


def _uncount(having: Counter[int], kept: _Kept) -> set[int]:
    """Its blocks have one turn less there; those that no turn has any more."""
    having.subtract(map(id, kept.blocks))
    gone = {number for number in map(id, kept.blocks) if not having[number]}
    for number in gone:
        del having[number]
    return gone
