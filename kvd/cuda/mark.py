"""The mark at the end of a pool's memory, as a descriptor tells neither what is behind it nor whether it is another's.

To stat(2) all exports of a driver are one device, and what compares open files is new (F_DUPFD_QUERY) or forbidden in
many containers (kcmp).
"""

import os
import struct
from typing import Final

from kvd.cuda.memory import Mapping

_MARK: Final = struct.Struct("<8sQ16s")
_MAGIC: Final = b"kvd pool"
MARK_BYTES: Final = _MARK.size


def mark(memory: Mapping, size: int) -> None:
    """Marks the memory as a new pool of `size` bytes, unlike any other."""
    memory.write(memory.length - MARK_BYTES, _MARK.pack(_MAGIC, size, os.urandom(16)))


def read_mark(memory: Mapping) -> bytes:
    """The last bytes of the memory; those of two mappings are the same only if they are of one pool."""
    return memory.read(memory.length - MARK_BYTES, MARK_BYTES)


def is_pool(memory: Mapping, size: int) -> bool:
    """Whether the memory is a pool of `size` bytes that has not ended."""
    magic, marked, _ = _MARK.unpack(read_mark(memory))
    return (magic, marked) == (_MAGIC, size)
