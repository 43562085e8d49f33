"""Windows: which block positions of a sequence a group of layers still needs.

A *position* is a block's place in its sequence: with blocks of b tokens, position p holds tokens p*b to (p+1)*b - 1.
`needed(tokens, block_tokens)` answers for a sequence whose first `tokens` tokens are computed and whose next token,
number `tokens` counted from 0, is computed next. An engine that computes the last token of a prompt once more (to
sample from it) therefore asks with one token less.
"""

from typing import TypeAlias

import msgspec


class _Window(msgspec.Struct, frozen=True, tag_field="kind"):
    def first_token(self, tokens: int) -> int:
        """The first token whose keys and values the token number `tokens` attends to."""
        raise NotImplementedError

    def needed(self, tokens: int, block_tokens: int) -> range:
        """Positions that hold the tokens still needed once `tokens` are computed; empty if there are none."""
        first = self.first_token(tokens)
        if first >= tokens:
            return range(0)
        return range(first // block_tokens, -(-tokens // block_tokens))


class Full(_Window, frozen=True, tag="full"):
    """Every token attends to all before it: positions 0 .. ceil(n/b)."""

    def first_token(self, tokens: int) -> int:  # noqa: ARG002
        """Token 0."""
        return 0


class Sliding(_Window, frozen=True, tag="sliding"):
    """Every token attends to the last `window` tokens, itself included: positions max(0, n-W+1)//b .. ceil(n/b)."""

    window: int

    def first_token(self, tokens: int) -> int:
        """The token `window - 1` before the next."""
        return max(0, tokens - self.window + 1)


class Chunked(_Window, frozen=True, tag="chunked"):
    """Tokens attend within their chunk of `chunk` tokens only (Llama 4): positions (n//C)*C//b .. ceil(n/b).

    Nothing is needed where `chunk` divides n: the next token begins a chunk.
    """

    chunk: int

    def first_token(self, tokens: int) -> int:
        """The first token of the chunk that the next token belongs to."""
        return tokens // self.chunk * self.chunk


class State(_Window, frozen=True, tag="state"):
    """A recurrent state (Mamba and kin) that stands for all tokens before it: the last position only.

    The block at position p holds the state after min((p+1)*b, n) tokens. An engine that keeps one state a sequence
    declares blocks of its longest sequence, so that the position is always 0.
    """

    def first_token(self, tokens: int) -> int:
        """The last token: its position's block holds the state after it."""
        return max(0, tokens - 1)


Window: TypeAlias = Full | Sliding | Chunked | State
