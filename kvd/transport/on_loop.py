"""Calls on the thread of a loop, for who is on another one: only there may its readers and timers be touched."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def on_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], T]) -> T:
    """Makes a call on the thread of `loop`, which must run, and waits for it: what it returns, or raises.

    On that thread the call is made at once.
    """
    try:
        here = asyncio.get_running_loop() is loop
    except RuntimeError:
        here = False
    if here:
        return call()

    async def made() -> T:
        return call()

    return asyncio.run_coroutine_threadsafe(made(), loop).result()
