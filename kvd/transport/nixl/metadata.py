"""Whose metadata it is, before NIXL takes it in."""

import struct

_MAGIC = b"nixlSerDes|Agent"


def agent_of(metadata: bytes) -> str | None:
    """The agent that NIXL metadata is about, None where it is no metadata of NIXL's.

    NIXL itself tells only after it has taken the metadata in, and by then a peer that claims another's name has
    changed that one's entry.
    """
    start = len(_MAGIC) + 8
    if not metadata.startswith(_MAGIC) or len(metadata) < start:
        return None
    (length,) = struct.unpack_from("<Q", metadata, len(_MAGIC))
    return metadata[start : start + min(length, len(metadata))].decode(errors="replace")
