"""Which agent a piece of NIXL metadata is about, read before NIXL loads it."""

import struct

_MAGIC = b"nixlSerDes|Agent"


def agent_of(metadata: bytes) -> str | None:
    """The name of the agent that `metadata` is about; None if it is not NIXL's.

    NIXL tells only after it has loaded the metadata, and by then a peer that claims another's name has changed that
    one's entry.
    """
    start = len(_MAGIC) + 8
    if not metadata.startswith(_MAGIC) or len(metadata) < start:
        return None
    (length,) = struct.unpack_from("<Q", metadata, len(_MAGIC))
    return metadata[start : start + min(length, len(metadata))].decode(errors="replace")
