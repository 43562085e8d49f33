"""Where the stamps of peers are read to: words of this process that NIXL may write."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from kvd.limits import STAMP_BYTES

_WORDS: Final = 512
"""Stamps on their way at once; where there are more the others are not read, which costs those pulls a message."""

_PAGE_BYTES: Final = _WORDS * STAMP_BYTES

_NUMBERS: Final = np.arange(_WORDS, dtype=np.int32)
"""Of the words of a list: NIXL takes indices as arrays, and to cut one is half of making one."""


class StampReader:
    """Some words, and for each peer the page of its stamps that was read last: both are prepared when first used.

    To prepare a list for each stamp would cost as much as to read it. Peers use the same few words again and again.
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
        """The number of a word that nobody else uses, None where all are in use."""
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
        """What lies in the word, which may be taken again: nothing writes to it any more."""
        self._free.append(word)
        return int(self._words[word])

    def forget(self, agent: str) -> None:
        """Releases what is prepared for a peer. A handle that was made of it stays good."""
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
        rows = np.zeros((_WORDS, 3), dtype=np.uint64)
        rows[:, 0] = np.uint64(base) + np.arange(_WORDS, dtype=np.uint64) * np.uint64(STAMP_BYTES)
        rows[:, 1] = STAMP_BYTES
        return self._nixl.prep_xfer_dlist(agent, rows, mem_type="DRAM")
