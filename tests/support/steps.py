"""How much Python a call takes, counted: the same on any machine, however busy."""

import sys
from collections.abc import Callable
from typing import Any


def steps(call: Callable[[], object]) -> int:
    """How many lines of Python run and functions are called, C's included."""
    counted = 0

    def count(*_: Any) -> Any:
        nonlocal counted
        counted += 1
        return count

    before = sys.gettrace(), sys.getprofile()
    sys.settrace(count)
    sys.setprofile(count)
    try:
        call()
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    return counted
