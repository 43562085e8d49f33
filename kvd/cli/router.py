"""`kvd router`: routes requests between prefill and decode servers until SIGTERM or SIGINT."""

import argparse
import asyncio
import logging
import signal
import time
from typing import Any

import uvloop

from kvd.cli.arguments import positive_seconds
from kvd.errors import ErrorCode, refusal
from kvd.holders import Ports, wait_until_free
from kvd.host import raise_open_files
from kvd.protocol.address import LAST_PORT
from kvd.router import limits
from kvd.router.clients.http import HttpServer
from kvd.router.engines import place
from kvd.router.upstream import Timeouts
from kvd.units import printable

_DESCRIPTION = """\
Serves OpenAI's completions and chat completions: each is prefilled on one server and decoded on another, chosen by
load. Passes on what the connector of the servers says to each other (kv_transfer_params), unchanged."""


def add_parser(subparsers: Any) -> None:
    """Adds the command."""
    parser = subparsers.add_parser("router", description=_DESCRIPTION)
    for role in ("prefill", "decode"):
        text = (
            f"a {role} server: http://host:port of a vLLM, sglang://host:port of an SGLang; may be given several times"
        )
        parser.add_argument(f"--{role}", action="append", required=True, metavar="URL", help=text)
    parser.add_argument(
        "--listen", default="127.0.0.1:8000", metavar="HOST:PORT", help="where clients connect (default: %(default)s)"
    )
    parser.add_argument(
        "--prefill-timeout",
        type=positive_seconds,
        default=120.0,
        metavar="SECONDS",
        help="for a prefill (default: 120)",
    )
    parser.add_argument(
        "--decode-timeout",
        type=positive_seconds,
        default=120.0,
        metavar="SECONDS",
        help="until the first token of a decode server, and between any two, if it streams (default: 120)",
    )
    parser.add_argument(
        "--single-turn",
        action="store_true",
        help="decode servers keep nothing for the next turn of a conversation: its prefill computes the last answer",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serves.

    Raises:
        BadRequest: `BAD_CONFIG`.

    """
    handler = logging.StreamHandler()
    handler.addFilter(FewLines())
    handler.setFormatter(OneLine("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    host, _, port = args.listen.rpartition(":")
    # Of a larger port uvloop would take the rest modulo 65536.
    if not host or not port.isdecimal() or len(port) > len(str(LAST_PORT)) or int(port) > LAST_PORT:
        text = f"--listen is {args.listen!r}; it must be HOST:PORT, the port at most {LAST_PORT}"
        raise refusal(ErrorCode.BAD_CONFIG, text)
    prefill, decode = ([url.rstrip("/") for url in urls] for urls in (args.prefill, args.decode))
    for url in (*prefill, *decode):
        place(url)
    timeouts = Timeouts(prefill=args.prefill_timeout, decode=args.decode_timeout)
    server = HttpServer(host.strip("[]"), int(port), prefill, decode, timeouts, turns=not args.single_turn)
    raise_open_files(limits.OPEN_FILES)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(server, Ports.of(args.listen), len(prefill), len(decode)))
    return 0


async def _serve(server: HttpServer, ports: list[Ports], prefill: int, decode: int) -> None:
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    log = logging.getLogger(__name__)
    await wait_until_free(ports, stopping, lambda what: log.warning("waiting for %s", what))
    if stopping.is_set():
        return
    async with server:
        text = "routing on http://%s between %d prefill and %d decode servers"
        log.info(text, server.address, prefill, decode)
        await stopping.wait()


class OneLine(logging.Formatter):
    """Has a message on one line, without terminal escapes: servers have a say in it."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # logging's name
        """What is logged of `record`, but for its traceback."""
        record.message = printable(record.message)
        return super().formatMessage(record)


class FewLines(logging.Filter):
    """Lets `limits.LINES` lines a minute through from each place in the code, and says how many it left out."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: dict[tuple[str, int], tuple[float, int]] = {}
        """Where a line comes from: when its minute began, in monotonic time, and how many came since."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether `record` is logged."""
        now, place = time.monotonic(), (record.pathname, record.lineno)
        began, lines = self._lines.get(place, (now, 0))
        if now - began >= 60:
            if lines > limits.LINES:
                record.msg, record.args = (
                    f"{record.getMessage()} ({lines - limits.LINES} more were not logged)",
                    (),
                )
            began, lines = now, 0
        self._lines[place] = began, lines + 1
        return lines < limits.LINES
