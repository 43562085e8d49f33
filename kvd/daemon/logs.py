"""Structured logs, an event per line: JSON, or readable text on a terminal.

Exceptions are logged with their type and the lines they passed, and kvd's own with their text. The text of others and
the values of variables may hold tickets, block ids or users' keys.
"""

import contextlib
import logging
import sys
import traceback
from typing import Literal

import structlog

from kvd.errors import describe
from kvd.units import printable

_MAX_FRAMES = 20


def configure(level: str, style: Literal["auto", "console", "json"]) -> None:
    """Sets up this process's log, on standard error."""
    console = style == "console" or (style == "auto" and sys.stderr.isatty())
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _redacted_traceback,
        *((_printable, structlog.dev.ConsoleRenderer()) if console else (structlog.processors.JSONRenderer(),)),
    ]
    lines = _Lines(sys.stderr)
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=lambda *_names: lines,
        cache_logger_on_first_use=True,
    )


class _Lines(structlog.PrintLogger):
    """Lines that nobody reads any more (a pipe without a reader, a full disk) are lost; what logs them goes on."""

    def msg(self, message: str) -> None:
        """Prints `message`."""
        with contextlib.suppress(OSError):
            super().msg(message)

    log = debug = info = warn = warning = msg
    fatal = failure = err = error = critical = exception = msg


def _printable(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """For a terminal: peers, users and engines have a say in the values. JSON has escapes for what is in them."""
    return {key: printable(value) if isinstance(value, str) else value for key, value in event.items()}


def _redacted_traceback(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Replaces `exc_info`, an exception, by what may be logged of it."""
    error = event.pop("exc_info", None)
    if not isinstance(error, BaseException):
        return event
    event["error"] = describe(error)
    event["traceback"] = [
        f"{frame.filename}:{frame.lineno} {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__, limit=-_MAX_FRAMES)
    ]
    return event
