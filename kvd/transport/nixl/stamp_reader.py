"""Reads the stamps of peers into words of this process that NIXL may write to."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from kvd.limits import STAMP_BYTES

_WORDS: Final = 512
"""Stamps that can be read at once. Any more are not read, which costs each of those pulls a message."""

_PAGE_BYTES: Final = _WORDS * STAMP_BYTES

_NUMBERS: Final = np.arange(_WORDS, dtype=np.int32)
"""Indices into a list of words. NIXL takes them as arrays, and slicing this one takes half as long as making one."""


class StampReader:
    """Local words to read stamps into, and for each peer the page of its stamps that was read last.

    Both are prepared as lists when first used: preparing a list per stamp would take as long as reading it, and peers
    use the same few words again and again.
    """

    def __init__(self, nixl: Any) -> None:
        self._nixl = nixl
        self._words = np.zeros(_WORDS, dtype=np.uint64)
        self._free = list(range(_WORDS))
        self._registration: Any = None
        self._local: Any = None
        self._pages: dict[str, tuple[int, Any]] = {}
        """By agent: the page's address and its list."""

    def take(self) -> int | None:
        """The number of a free word; None if all are in use."""
        if not self._free:
            return None
        word = self._free.pop()
        self._words[word] = 0
        return word

    def transfer_of(self, word: int, agent: str, stamp: int) -> Any:
        """A NIXL transfer handle from the address `stamp` of `agent` to `word`; raises NIXL's errors."""
        if self._local is None:
            base = int(self._words.ctypes.data)
            self._registration = self._nixl.register_memory(
                np.array([[base, self._words.nbytes, 0]], dtype=np.uint64), mem_type="DRAM"
            )
            self._local = self._list_of("NIXL_INIT_AGENT", base)
        base, offset = stamp - stamp % _PAGE_BYTES, stamp % _PAGE_BYTES
        page, remote = self._pages.get(agent, (0, None))
        if page != base:
            self.forget(agent)
            remote = self._list_of(agent, base)
            self._pages[agent] = base, remote
        slot = offset // STAMP_BYTES
        here, there = _NUMBERS[word : word + 1], _NUMBERS[slot : slot + 1]
        return self._nixl.make_prepped_xfer("READ", self._local, here, remote, there)

    def give_back(self, word: int) -> int:
        """Frees a word that nothing writes to any more; returns what lies in it."""
        self._free.append(word)
        return int(self._words[word])

    def forget(self, agent: str) -> None:
        """Releases the list of a peer. Handles made from it stay valid."""
        _, remote = self._pages.pop(agent, (0, None))
        if remote is not None:
            remote.release()

    def close(self) -> None:
        """Ends the registration."""
        for agent in list(self._pages):
            self.forget(agent)
        if self._local is not None:
            self._local.release()
            self._nixl.deregister_memory(self._registration)
            self._local = None

    def _list_of(self, agent: str, base: int) -> Any:
        rows = np.zeros((_WORDS, 3), dtype=np.uint64)  # address, bytes, device
        rows[:, 0] = np.uint64(base) + np.arange(_WORDS, dtype=np.uint64) * np.uint64(STAMP_BYTES)
        rows[:, 1] = STAMP_BYTES
        return self._nixl.prep_xfer_dlist(agent, rows, mem_type="DRAM")
