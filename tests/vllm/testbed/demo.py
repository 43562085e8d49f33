"""The demo with a real vLLM: `python -m tests.vllm.testbed.demo`, which `make demo-vllm` runs.

Two daemons, a prefill server, a decode server and a router; every completion that comes through the router is compared
with the one of a single server.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.vllm.testbed.catalog import BLOCK, make_prompt, write_models
from tests.vllm.testbed.client import Completion, complete, make_body
from tests.vllm.testbed.pair import KvdPair
from tests.vllm.testbed.servers import Engine, RouterProcess, Server, scrape
from tests.vllm.testbed.service import start_all, stop_all

LENGTHS = (3, BLOCK, 3 * BLOCK + 5, 500, 1000, 1000)
TOKENS = 16


@dataclass
class Row:
    """One request: what moved for it, and whether its tokens are right."""

    prompt: int
    nbytes: int
    first_token: float
    equal: bool


async def demo(model: str, folder: Path, console: Console) -> list[Row]:
    """Runs the demo with the model and returns its rows."""
    write_models(folder, model)
    pair = KvdPair(folder / "pair", folder, model)
    single = Server("single", folder, Engine(folder, model))
    router = RouterProcess(folder, pair.prefill, pair.decode)
    services = [*pair.services, single, router]
    try:
        with console.status("two daemons, three vLLM servers, a router: this takes a minute"):
            await start_all(services)
            # The first request of each server pays for what it loads then.
            await _row(pair, single, router, make_prompt(LENGTHS[0], seed=len(LENGTHS)))
        rows = []
        for number, length in enumerate(LENGTHS):
            with console.status(f"request {number + 1} of {len(LENGTHS)}"):
                rows.append(await _row(pair, single, router, make_prompt(length, seed=number)))
        return rows
    finally:
        stop_all(services)


async def _row(pair: KvdPair, single: Server, router: RouterProcess, prompt: list[int]) -> Row:
    body = make_body(single.engine.model, prompt, TOKENS)
    before = await _read_bytes(pair)
    start = time.perf_counter()
    got = await complete(router.url, body)
    moved = await _read_bytes(pair) - before
    want: Completion = await complete(single.url, body)
    return Row(len(prompt), int(moved), got.times[0] - start, got.tokens == want.tokens)


async def _read_bytes(pair: KvdPair) -> float:
    return (await scrape(pair.daemons["decode"])).total("kvd_read_bytes_total")


def as_table(model: str, rows: list[Row]) -> Table:
    """The rows for people."""
    table = Table(title=f"vLLM with {model}: prefill on one server, decode on another, kvd between them")
    for name in ("prompt tokens", "MB moved", "first token after", f"{TOKENS} tokens as a single server's"):
        table.add_column(name, justify="right")
    for row in rows:
        verdict = "yes" if row.equal else "[red]NO[/red]"
        table.add_row(str(row.prompt), f"{row.nbytes / 1e6:.2f}", f"{row.first_token * 1e3:.0f} ms", verdict)
    return table


def main() -> int:
    """0 if every token is right, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.testbed.demo", description=__doc__)
    choices = ("gemma", "granite", "llama")
    parser.add_argument("--model", choices=choices, default="gemma", help="default: gemma, a hybrid")
    model = parser.parse_args().model
    with tempfile.TemporaryDirectory(prefix="kvd-vllm-") as folder:
        rows = asyncio.run(demo(model, Path(folder), Console(stderr=True)))
    Console().print(as_table(model, rows))
    return 0 if all(row.equal for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
