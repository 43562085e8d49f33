"""Slow work on threads, for what must not hold up the loop."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

import structlog

from kvd.errors import ErrorCode, KvdError, refusal

T = TypeVar("T")

_log = structlog.get_logger("kvd")


class Background:
    """Runs slow work on a thread: faulting in gigabytes takes seconds, decoding a spec milliseconds."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def __call__(self, work: Callable[[], T], done: Callable[[T | KvdError], None]) -> None:
        """Runs `work` on a thread, then `done` on the loop, with the result or with why there is none."""

        def attempt() -> T | KvdError:
            try:
                return work()
            except KvdError as error:
                return error
            except Exception as error:  # noqa: BLE001 - reported to the caller
                _log.error("background work failed", exc_info=error)
                return refusal(ErrorCode.INTERNAL, f"internal {type(error).__name__}; see the daemon's log")

        future = self._loop.run_in_executor(None, attempt)
        future.add_done_callback(lambda finished: done(finished.result()))
