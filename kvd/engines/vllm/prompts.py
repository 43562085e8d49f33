"""Which tokens of a prompt the prefill engine computes, and which of them the decode engine takes.

The decode engine computes the last token of the prompt itself, to sample from it, so it needs what attention to that
token needs. With sliding or chunked windows that can be a block more than a prefill of the whole prompt keeps. The
prefill engine then leaves the last token out; with recurrent states always, as they cannot be cut back by a token. With
several MTP modules it leaves out as many as they look ahead: their caches would hold what they made of drafts.
"""

from dataclasses import dataclass
from typing import Any

from kvd.layout import State, Window


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
