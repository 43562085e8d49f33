"""Which tokens of a prompt the prefill engine computes, which of them the decode engine takes, and their blocks.

The decode engine computes the last token of the prompt itself, to sample from it, so it needs what attention to that
token needs. With sliding or chunked windows that can be a block more than a prefill of the whole prompt keeps. The
prefill engine then leaves the last token out; with recurrent states always, as they cannot be cut back by a token. With
several MTP modules it leaves out as many as they look ahead: their caches would hold what they made of drafts.

Of the blocks of those tokens, the ones move that attention to the next token needs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvd.client import Blocks
from kvd.layout import State, Window

_NULL_BLOCK = 0
"""vLLM's block id at positions without a block."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Of an engine with these `groups`: the window and tokens per block of each.

    `lookahead` is how many tokens of the prompt a drafter reads beyond those that are computed.
    """

    groups: tuple[tuple[Window, int], ...]
    lookahead: int

    def left_out(self, tokens: int) -> int:
        """How many tokens of a prompt its prefill should leave out."""
        return max(int(self._keeps_too_little(tokens)), self.lookahead - 1)

    def taken(self, tokens: int) -> int:
        """How many tokens of the cache a decode engine takes of a prefill that leaves out what it should."""
        return max(0, tokens - max(1, self.left_out(tokens)))

    def _keeps_too_little(self, tokens: int) -> bool:
        """Whether a prefill of the whole prompt drops blocks that its last token, computed again, needs."""
        return tokens > 1 and any(
            isinstance(window, State)
            or not set(window.needed(tokens - 1, block_tokens)) <= set(window.needed(tokens, block_tokens))
            for window, block_tokens in self.groups
        )

    def missing(self, blocks: Sequence[Sequence[Any]], tokens: int) -> Iterable[Blocks]:
        """The blocks that attention to the next token needs and that have no hash: they are not here."""
        for group, (window, block_tokens) in enumerate(self.groups):
            table = blocks[group]
            wanted = [
                position
                for position in window.needed(tokens, block_tokens)
                if not table[position].is_null and table[position].block_hash is None
            ]
            yield from _runs(group, wanted, [table[position].block_id for position in wanted])

    def held(self, block_ids: Sequence[Sequence[int]], tokens: int) -> tuple[Blocks, ...]:
        """The last run of blocks of each group: attention to the next token needs none before a gap.

        Of a recurrent state it is the last block alone. What vLLM keeps behind it is for drafts, and before it older.
        """
        held = []
        for group, (window, block_tokens) in enumerate(self.groups):
            table = block_ids[group][: -(-tokens // block_tokens)]
            first = window.needed(tokens, block_tokens).start if isinstance(window, State) else 0
            positions = [position for position in range(first, len(table)) if table[position] != _NULL_BLOCK]
            held += list(_runs(group, positions, [table[position] for position in positions]))[-1:]
        return tuple(held)


def leave_out(request: Any, tokens: int) -> None:
    """Makes the prefill of a request end early. It samples a wrong token, which nobody reads, only to end."""
    if request.prompt_embeds is not None:
        request.prompt_embeds = request.prompt_embeds[:-tokens]
    for of_tokens in (request.prompt_token_ids, request.prompt_is_token_ids):
        if of_tokens is not None:
            del of_tokens[-tokens:]
    del request._all_token_ids[-tokens:]
    request.num_prompt_tokens -= tokens
    request.max_tokens = 1


def _runs(group: int, positions: Sequence[int], ids: Sequence[int]) -> Iterable[Blocks]:
    """`Blocks` of each run of consecutive positions."""
    start = 0
    for end in range(1, len(positions) + 1):
        if end == len(positions) or positions[end] != positions[end - 1] + 1:
            yield Blocks(group, positions[start], ids[start:end])
            start = end
