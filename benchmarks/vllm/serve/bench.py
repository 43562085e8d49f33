"""`vllm bench serve` in a process of its own, loaded once for all that it measures."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final

from tests.vllm.testbed.catalog import OFFLINE
from tests.vllm.testbed.http import HttpError
from tests.vllm.testbed.service import with_environment

Bench = Callable[[Sequence[str]], Awaitable[dict[str, Any]]]
"""Runs `vllm bench serve` with these arguments, and returns the figures that it can save as JSON."""

_PROGRAM: Final = """
import json, os, sys

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what else is printed goes to the log

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

for line in sys.stdin:
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    found = main(parser.parse_args(json.loads(line)))
    figures = {name: value for name, value in found.items() if isinstance(value, int | float)}
    print(json.dumps(figures), file=answers, flush=True)
"""
"""What the command does. The command itself asks for the version of a distribution named vllm, and the CPU's is named
otherwise."""


@contextlib.asynccontextmanager
async def bench_serve(log: Path) -> AsyncIterator[Bench]:
    """Starts it, and ends it with the context; `log` gets what it prints."""
    pipe = asyncio.subprocess.PIPE
    with log.open("wb") as printed:
        command = with_environment(OFFLINE, [sys.executable, "-c", _PROGRAM])
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=printed)

    async def bench(arguments: Sequence[str]) -> dict[str, Any]:
        assert process.stdin is not None and process.stdout is not None  # noqa: PT018, S101 - they are pipes
        process.stdin.write(json.dumps(arguments).encode() + b"\n")
        line = await process.stdout.readline()
        if not line:
            raise HttpError(0, f"vllm bench serve ended with status {await process.wait()}; its log is {log}")
        found: dict[str, Any] = json.loads(line)
        return found

    try:
        yield bench
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
