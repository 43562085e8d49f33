"""What the daemon and the process of its NIXL transport say to each other, a frame each: msgpack, by tag.

The process answers with lists of `Reported`. Whoever reaches its port may have written to its memory, so the daemon
takes nothing from it that it did not ask for. What peers are told of it is its `Metadata`.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable
from functools import partial
from typing import Annotated, Final

import msgspec
import numpy as np
from msgspec import Meta, Struct

from kvd import limits
from kvd.errors import on_error
from kvd.plan import Descriptors
from kvd.protocol.codec import Decoder
from kvd.protocol.types import Text
from kvd.transport.interface import (
    AgentEvent,
    Landed,
    Notified,
    OwnMetadata,
    PeerAdded,
    ReadFailed,
    ReadRequest,
)

INLINE_BYTES: Final = 64 * limits.KIB
"""Longer tables of descriptors travel as a memfd."""

MAX_EVENTS: Final = 4096
"""Events in one frame: the daemon's loop takes them in milliseconds."""


class Message(Struct, frozen=True, gc=False, tag=True, array_like=True):
    """Base of the messages; the class name is the tag."""


class Register(Message, frozen=True):
    """The descriptor that comes along has `length` bytes of memory; the daemon has its first `size` at `base`."""

    pool: int
    base: int
    size: int
    length: int
    hidden: bool = False


class Deregister(Message, frozen=True):
    """As `Transport.deregister`."""

    pool: int


class Describe(Message, frozen=True):
    """As `Transport.describe`."""

    pools: tuple[int, ...]


class AddPeer(Message, frozen=True):
    """As `Transport.add_peer`, of metadata that was examined."""

    agent: str
    metadata: bytes


class RemovePeer(Message, frozen=True):
    """As `Transport.remove_peer`."""

    agent: str


class Read(Message, frozen=True):
    """As `ReadRequest`, with addresses in the daemons. `table` has all of src, then dst, then length.

    It is empty if a memfd with the same comes along.
    """

    read: int
    agent: str
    local_base: int
    remote_base: int
    table: bytes
    part: bool


class Abort(Message, frozen=True):
    """As `Transport.abort`."""

    read: int


class Notify(Message, frozen=True):
    """As `Network.notify`."""

    agent: str
    content: bytes


class ExpectConnection(Message, frozen=True):
    """As `Transport.expect_connection`."""


class ExpectReaders(Message, frozen=True):
    """As `Transport.expect_readers`."""

    expected: bool


class Ping(Message, frozen=True):
    """As `Transport.ping`."""

    number: int


class Stop(Message, frozen=True):
    """Post nothing more, wait so long for what is posted, and end."""

    seconds: float


Command = (
    Register
    | Deregister
    | Describe
    | AddPeer
    | RemovePeer
    | Read
    | Abort
    | Notify
    | ExpectConnection
    | ExpectReaders
    | Ping
    | Stop
)


class Opened(Message, frozen=True):
    """The first word of the process: its agent runs, and has this metadata."""

    metadata: OwnMetadata


class NotOpened(Message, frozen=True):
    """Its first and last word: UCX does not start."""

    reason: Text


Reported = AgentEvent | Notified
"""The events that the process may tell of."""
Reports = Annotated[list[Reported], Meta(min_length=1, max_length=MAX_EVENTS)]

_Address = Annotated[int, Meta(ge=0)]


class Metadata(Struct, frozen=True, array_like=True):
    """What peers need: `nixl` is NIXL's own, `addresses` has where the process has the pools, by those in the daemon.

    `process` are random bytes that tell that process from the next one, whose agent has the same name.
    """

    nixl: Annotated[bytes, Meta(max_length=limits.MAX_METADATA_BYTES)]
    process: Annotated[bytes, Meta(min_length=8, max_length=8)]
    addresses: Annotated[dict[_Address, _Address], Meta(max_length=limits.MAX_POOLS)]


encode = msgspec.msgpack.Encoder().encode
command: Callable[[bytes], Command] = Decoder[Command](Command).decode
first_word: Callable[[bytes], Opened | NotOpened] = Decoder[Opened | NotOpened](Opened | NotOpened).decode
events: Callable[[bytes], list[Reported]] = Decoder[list[Reported]](Reports).decode
metadata: Callable[[bytes], Metadata | None] = Decoder[Metadata](Metadata).try_decode
"""What a peer sent, taken apart; None if it is none."""


def is_of_network(event: Reported) -> bool:
    """Whether an event says nothing that only copies within the host can tell: of stamps, or that they are those."""
    match event:
        case Landed():
            return not event.stamp
        case ReadFailed():
            return not event.unproven
        case PeerAdded():
            return not (event.same_host or event.stamps or event.detour)
        case _:
            return True


def read_command(request: ReadRequest) -> tuple[Read, tuple[int, ...]]:
    """The command for a read, and the memfd to send with it, if there is one, for the caller to close.

    Raises:
        OSError: no memfd can be made.

    """
    descriptors = request.descriptors
    columns = [np.ascontiguousarray(column) for column in (descriptors.src, descriptors.dst, descriptors.length)]
    small = 3 * columns[0].nbytes <= INLINE_BYTES
    table = b"".join(column.tobytes() for column in columns) if small else b""
    asked = Read(request.read, request.agent, request.local_base, request.remote_base, table, request.part)
    if small:
        return asked, ()
    memfd = os.memfd_create("kvd-descriptors", os.MFD_CLOEXEC)
    with on_error(partial(os.close, memfd)), open(memfd, "wb", closefd=False) as file:
        for column in columns:
            file.write(column.data)
    return asked, (memfd,)


def request_of(asked: Read, descriptors: tuple[int, ...]) -> ReadRequest:
    """The read that `asked` stands for; `descriptors` came with it and stay the caller's."""
    table = mmap.mmap(descriptors[0], 0, access=mmap.ACCESS_READ) if descriptors else asked.table
    columns = np.frombuffer(table, dtype=np.uint64).reshape(3, -1)
    wanted = Descriptors(*columns)
    return ReadRequest(asked.read, asked.agent, asked.local_base, asked.remote_base, wanted, part=asked.part)


_MAGIC: Final = b"nixlSerDes|Agent"


def agent_of(nixl: bytes) -> str | None:
    """The name of the agent that NIXL's metadata is about; None if it is not NIXL's.

    NIXL tells only after it has loaded the metadata, and by then a peer that claims another's name has changed that
    one's entry.
    """
    start = len(_MAGIC) + 8
    if not nixl.startswith(_MAGIC) or len(nixl) < start:
        return None
    (length,) = struct.unpack_from("<Q", nixl, len(_MAGIC))
    return nixl[start : start + min(length, len(nixl))].decode(errors="replace")
