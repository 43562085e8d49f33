"""Where the stamps of peers are read to: words of this process that NIXL may write."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

_WORDS: Final = 512
"""Stamps on their way at once; where there are more the others are not read, which costs those pulls a message."""


class Landing:
    """Some words, registered with NIXL when the first of them is taken."""

    def __init__(self, nixl: Any) -> None:
        self._nixl = nixl
        self._words = np.zeros(_WORDS, dtype=np.uint64)
        self._free = list(range(_WORDS))
        self._registration: Any = None

    def take(self) -> int | None:
        """The number of a word that nobody else uses, None where all are in use; raises NIXL's errors."""
        if self._registration is None:
            region = np.array([[self._words.ctypes.data, self._words.nbytes, 0]], dtype=np.uint64)
            self._registration = self._nixl.register_memory(region, mem_type="DRAM")
        if not self._free:
            return None
        word = self._free.pop()
        self._words[word] = 0
        return word

    def address(self, word: int) -> int:
        """Of that word."""
        return int(self._words.ctypes.data) + word * self._words.itemsize

    def give_back(self, word: int) -> int:
        """What lies in the word, which may be taken again: nothing writes to it any more."""
        self._free.append(word)
        return int(self._words[word])

    def close(self) -> None:
        """Ends the registration."""
        if self._registration is not None:
            self._nixl.deregister_memory(self._registration)
            self._registration = None
