"""Messages of the export socket, over which daemons of one host lend each other pools for reading.

The importing daemon connects, shows a token and gets each pool that the token covers, with its descriptor beside the
message, then `Exported`. The connection stays open: `Withdrawn` says that one of them has ended, the connection's end
that the exporting daemon has.
"""

from typing import Annotated

from msgspec import Meta

from kvd import limits
from kvd.protocol.types import Code, Count, Message, Text

AgentName = Annotated[str, Meta(min_length=1, max_length=2 * limits.MAX_NAME_BYTES)]
Token = Annotated[bytes, Meta(min_length=limits.SECRET_BYTES, max_length=limits.SECRET_BYTES)]
"""Random, drawn for a set of pools: whoever shows it may read them."""
Word = Annotated[bytes, Meta(min_length=8, max_length=8)]
"""Unsigned 64-bit, little-endian."""


class ExportAddress(Message, frozen=True):
    """Where the pools of `agent` can be imported: what a peer is told in its welcome."""

    agent: AgentName
    host: Annotated[str, Meta(max_length=limits.MAX_NAME_BYTES)]
    """Identifies the running kernel."""
    path: Annotated[str, Meta(max_length=512)]
    token: Token


class Import(Message, frozen=True, tag="import"):
    """Asks for the pools that `token` covers."""

    token: Token


class ExportedPool(Message, frozen=True, tag="pool"):
    """One pool; its descriptor comes with the frame. `base` is its address in the exporting daemon's process."""

    base: Word
    size: Count
    length: Count
    """Bytes of the mapping behind the descriptor: whole pages."""
    device: Annotated[str, Meta(max_length=limits.MAX_NAME_BYTES)] = ""
    """UUID of the GPU that it lies on; empty for host memory."""


class Exported(Message, frozen=True, tag="exported"):
    """That was all. At the address `word` of the exporting daemon's process lie the 8 bytes `value`.

    An importer that finds them there may read that process's memory, and has the right process.
    """

    word: Word
    value: Word


class ImportRefused(Message, frozen=True, tag="refused"):
    """The token covers nothing; the connection ends."""

    code: Code
    text: Text


class Withdrawn(Message, frozen=True, tag="withdrawn"):
    """The pool that was lent with this `base` has ended, or was registered anew: unmap it once no read uses it.

    A GPU's memory is free only when all have.
    """

    base: Word


Export = ExportedPool | Exported | ImportRefused | Withdrawn
