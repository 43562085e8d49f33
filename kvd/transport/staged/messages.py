"""What two ends of a staged read say to each other, and the tags by which a window says whose bytes it has.

A reader has a *secret* with each owner. For each slice it sends a `Wanted` under a number that it uses once. The owner
copies the bytes into a window of the pool and writes the tag of secret, number and `READY` on the pool's *board*, which
has a line for each window. A line is wiped before anything else is copied into its window. So bytes that were read
between two looks at the board that both found one tag are those that the tag stands for.

The first line of a board says whose it is. A reader that does not find it reads from where a pool has been: memory that
is registered no longer reads as zeros, and whoever had it answers no requests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from enum import IntEnum
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from kvd import limits
from kvd.protocol.codec import Decoder

LINE_BYTES: Final = 16
"""A line of the board: its heading, a tag, or zeros."""

BOARD_BYTES: Final = 4096
"""Before the windows."""

MAX_LINES: Final = BOARD_BYTES // LINE_BYTES

_Secret = Annotated[bytes, Meta(min_length=16, max_length=16)]
_Number = Annotated[int, Meta(ge=1)]
_Address = Annotated[int, Meta(ge=0)]


class Wanted(Struct, frozen=True, gc=False, tag=True, array_like=True):
    """Copy these pieces of a pool into a window. `table` has all offsets, then all lengths, as uint64.

    `token` is the one that the owner's metadata has for the pool.
    """

    secret: _Secret
    number: _Number
    token: _Secret
    table: Annotated[bytes, Meta(max_length=16 * limits.SLICE_DESCRIPTORS)]


class Finished(Struct, frozen=True, gc=False, tag=True, array_like=True):
    """The reader needs no window for this request of the pool with this token, or none any more."""

    secret: _Secret
    number: _Number
    token: _Secret


class StagedPool(Struct, frozen=True, gc=False, array_like=True):
    """A pool of `size` bytes that is read by way of the windows of its arena; whoever knows the token may.

    The arena is at address `arena`: the board, and after `BOARD_BYTES` the windows. The board has `lines` lines: its
    heading, one for each window, and behind them those of requests that were refused.
    """

    token: _Secret
    size: _Number
    arena: _Address
    lines: Annotated[int, Meta(ge=1, le=MAX_LINES)]


class Metadata(Struct, frozen=True, array_like=True):
    """What a peer needs: `network` is the transport's below, `staged` the pools read by windows, by their addresses."""

    network: Annotated[bytes, Meta(max_length=limits.MAX_METADATA_BYTES)]
    staged: Annotated[dict[_Address, StagedPool], Meta(max_length=limits.MAX_POOLS)]


class State(IntEnum):
    """What a line says of its window."""

    READY = 1
    """the bytes are there"""
    REFUSED = 2
    """there is no such pool, or not so many bytes of it"""
    FAILED = 3
    """they could not be copied"""


encode = msgspec.msgpack.Encoder().encode
message: Callable[[bytes], Wanted | Finished | None] = Decoder[Wanted | Finished](Wanted | Finished).try_decode
"""What an agent sent; None if it is no message."""
metadata: Callable[[bytes], Metadata | None] = Decoder[Metadata](Metadata).try_decode
"""What a peer sent, taken apart; None if it is none."""


def heading(token: bytes) -> bytes:
    """The first line of the board of the pool with this token."""
    return hashlib.blake2b(digest_size=LINE_BYTES, key=token).digest()


def owner_secret(key: bytes, agent: str) -> bytes:
    """The secret with an owner of a reader with this key: no owner can ask another one for what that reader then reads.

    It stays the same when the owner is forgotten and found again, as numbers are used once.
    """
    return hashlib.blake2b(agent.encode(), digest_size=16, key=key).digest()


def tag(secret: bytes, number: int, state: State) -> bytes:
    """The line for a request: nobody else's, whoever reads the board, and none that is half written."""
    return hashlib.blake2b(number.to_bytes(8, "little") + bytes([state]), digest_size=LINE_BYTES, key=secret).digest()
