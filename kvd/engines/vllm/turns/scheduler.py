"""Which answers a decode engine keeps, and what of them the next turn's prefill engine pulls.

`kept` has the blocks that are kept, `params` what passes through the router. The scheduler's half asks here.
"""

import logging
from dataclasses import dataclass, replace
from typing import Any

from kvd.engines.vllm import transfer_params
from kvd.engines.vllm.block_manager import BlockManager
from kvd.engines.vllm.metadata import OfferOrder, TurnCounts
from kvd.engines.vllm.transfer_params import Prompt, TransferParams
from kvd.engines.vllm.turns import params as turn_params
from kvd.engines.vllm.turns.kept import KeptTurns

_COMPLETE = {"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"}

_WORTH_A_PULL = 64
"""Tokens of an earlier turn that are worth one: to compute fewer is quicker than a step that waits for blocks."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TurnPolicy:
    """What becomes of a conversation's turns, by the engine's settings (`kvd.engines.vllm.settings`)."""

    ttl: float = 300.0
    share: float = 0.25
    every: bool = False
    recompute: bool = True
    """Whether vLLM computes what could not be loaded. If not, nothing is pulled that may as well be computed."""
    copies: bool = False
    """Whether workers have copies of others' caches. Nothing can be pulled into those, so nothing is pulled."""

    @property
    def pulls(self) -> bool:
        """Whether a prefill pulls what an earlier turn left."""
        return self.recompute and not self.copies


def is_complete(request: Any) -> bool:
    """Whether it ended as it should."""
    return request.status.name in _COMPLETE


class Turns:
    """Of an engine of `ranks` ranks. `whole`: caches lack what a turn's beginning alone needs (windows, states)."""

    def __init__(self, policy: TurnPolicy, ranks: int, manager: BlockManager, *, whole: bool) -> None:
        self.policy = policy
        self._whole = whole
        self._pulled: set[str] = set()
        """Prefills that wait for what an earlier turn left."""
        self._outcomes: list[str] = []
        self._warned = False
        self.kept = KeptTurns(ranks, policy.share, manager)

    # --- a prefill engine -------------------------------------------------------------------------------------------

    def offered(self, request: Any, prompt: Prompt) -> TransferParams | None:
        """What an earlier turn left for `request`, if its router says so."""
        if not turn_params.is_turn(request.kv_transfer_params):
            return None
        offered = turn_params.read(request.kv_transfer_params, prompt, whole=self._whole)
        if self.policy.pulls:
            return offered
        if not (self.policy.recompute or self._warned):
            self._warned = True
            text = "earlier turns are computed again: their blocks are pulled with kv_load_failure_policy 'recompute'"
            logger.warning(text + ", this engine has 'fail'")
        return replace(offered, tokens=0)

    def worth(self, tokens: int) -> int:
        """How many of `tokens` to pull: all or none."""
        return tokens if tokens >= _WORTH_A_PULL else 0

    def allocated(self, request: str, offered: TransferParams, external: int) -> None:
        """`external` tokens of it are pulled."""
        if external:
            self._pulled.add(request)
        elif not self.policy.pulls:
            self._outcomes.append("policy")
        else:
            self._outcomes.append("cached" if offered.tokens else "differs")

    def received(self, request: str, *, failed: bool) -> None:
        """A pull has ended, perhaps one of these."""
        if request in self._pulled:
            self._pulled.remove(request)
            self._outcomes.append("gone" if failed else "pulled")

    # --- a decode engine --------------------------------------------------------------------------------------------

    def keeps(self, request: Any) -> bool:
        """Whether the answer of `request`, which has ended, is to be kept."""
        params = request.kv_transfer_params
        if not is_complete(request) or request.prompt_embeds is not None:  # which do not come back as tokens
            return False
        if turn_params.name_of(params):
            return transfer_params.is_consumer(params)  # others ask for the turn of this name
        return turn_params.in_answer(params) or (self.policy.every and not transfer_params.is_producer(params))

    def keep(
        self, request: Any, order: OfferOrder, ticket: str, prompt: Prompt, blocks: list[Any]
    ) -> tuple[dict[str, Any], bool]:
        """Keeps the `blocks` of `request`, which `order` offers, for the next turn.

        Returns the parameters of the turn, and whether they belong into the answer: otherwise they are asked for.
        """
        sequence = replace(prompt, tokens=request._all_token_ids)
        params = turn_params.write(ticket, order.tokens, sequence, order.turn_ttl)
        name = turn_params.name_of(request.kv_transfer_params)
        self.kept.keep(order.offer, name, params, blocks)
        return params, not name

    def take(self, request: Any) -> dict[str, Any] | None:
        """The parameters of the turn that `request` asks for, if it does, and it is still kept."""
        params = request.kv_transfer_params
        return None if transfer_params.is_consumer(params) else self.kept.take(turn_params.name_of(params))

    # --- both -------------------------------------------------------------------------------------------------------

    def ended(self, request: str) -> None:
        """`request` has ended; whether its pull has does not matter any more."""
        self._pulled.discard(request)
        self.kept.admitted(request)

    def take_counts(self) -> TurnCounts:
        """What was counted since the last call."""
        outcomes, self._outcomes = self._outcomes, []
        return TurnCounts(outcomes, self.kept.take_ends())
