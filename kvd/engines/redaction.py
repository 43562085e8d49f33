"""Keeps tickets out of engines' logs: whoever has one may read what it names, until the offer has ended.

Engines print the parameters of requests where they are asked to (vLLM: `--enable-log-requests`) and where they fail,
and have no hook for what should not be printed. So their messages are looked through as they are logged.
"""

import logging
import re
from collections.abc import Callable
from typing import Any

_TICKET = re.compile(r"kvd[ot]?1\.[A-Za-z0-9_-]+")
"""A ticket, or what a router drew for an offer that grows or a turn that is kept, by which tickets are made or asked
for; or as much of one as a log's bound left of it."""

_NOT_SHOWN = "kvd1.(not shown)"

_formatter = logging.Formatter()
_installed = False


def keep_tickets_out_of_logs(engine: str) -> None:
    """From now on, out of what the loggers of the package `engine` log; a second call does nothing."""
    global _installed  # noqa: PLW0603 - of the process, as the factory is
    if not _installed:
        logging.setLogRecordFactory(_redacting(engine, logging.getLogRecordFactory()))
        _installed = True


def _redacting(engine: str, make: Callable[..., logging.LogRecord]) -> Callable[..., logging.LogRecord]:
    def make_redacted(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        # `logging.makeLogRecord` gives none, and puts it in afterwards.
        if (record.name or "").partition(".")[0] == engine:
            _redact(record)
        return record

    return make_redacted


def _redact(record: logging.LogRecord) -> None:
    try:
        message = record.getMessage()
    except Exception:  # noqa: BLE001 - logging itself says what is wrong with the message, and goes on
        return
    if _TICKET.search(message):
        record.msg, record.args = _TICKET.sub(_NOT_SHOWN, message), ()
    if record.exc_info and record.exc_info[0] is not None:
        raised = _formatter.formatException(record.exc_info)
        if _TICKET.search(raised):
            record.exc_text, record.exc_info = _TICKET.sub(_NOT_SHOWN, raised), None
