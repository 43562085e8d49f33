"""Who has served the beginning of a prompt, and so may have it in its prefix cache.

A beginning is known by a hash of the request's own JSON, not of tokens: the router has no tokenizer. Of a chat each
message ends one, of another prompt, or where messages are too many, each power of two of bytes.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvd.router import limits
from kvd.router.servers import Server

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Pair:
    """The servers that prefilled and decoded a request."""

    prefill: Server
    decode: Server


class Affinity:
    """The pairs that served the last `capacity` beginnings."""

    def __init__(self, capacity: int = limits.PREFIXES) -> None:
        self._capacity = capacity
        self._pairs: OrderedDict[bytes, Pair] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pairs)

    def find(self, prefixes: Sequence[bytes]) -> Pair | None:
        """The pair that served the longest known one of `prefixes`, which are ordered by length."""
        return next((self._pairs[prefix] for prefix in reversed(prefixes) if prefix in self._pairs), None)

    def learn(self, prefixes: Sequence[bytes], pair: Pair) -> None:
        """Notes that `pair` served a prompt with these `prefixes`; the oldest ones are forgotten."""
        for prefix in prefixes:
            self._pairs[prefix] = pair
            self._pairs.move_to_end(prefix)
        while len(self._pairs) > self._capacity:
            self._pairs.popitem(last=False)


def of_messages(model: bytes, messages: Iterable[bytes]) -> tuple[bytes, ...]:
    """The beginnings of a chat: after each of its last messages, given as JSON."""
    digest = hashlib.blake2b(model, digest_size=_DIGEST_BYTES)
    found = []
    for message in messages:
        digest.update(b"\0" + message)
        found.append(digest.digest())
    return tuple(found[-limits.PREFIXES_PER_REQUEST :])


def of_text(model: bytes, text: memoryview) -> tuple[bytes, ...]:
    """The beginnings of a prompt or of a chat with very many messages, given as JSON."""
    digest = hashlib.blake2b(model, digest_size=_DIGEST_BYTES)
    found = []
    start, end = 0, limits.FIRST_PREFIX_BYTES
    while end < len(text):  # its last byte is a bracket or a quotation mark, which a longer prompt has elsewhere
        digest.update(text[start:end])
        found.append(digest.digest())
        start, end = end, 2 * end
    return tuple(found)
