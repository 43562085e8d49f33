"""The demo with a real SGLang: `python -m tests.sglang.testbed.demo`, which `make demo-sglang` runs.

Two daemons, a prefill server and a decode server; each completion is compared with the one of a single server.
"""

import asyncio
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.sglang.testbed.client import complete, make_body
from tests.sglang.testbed.pair import KvdPair
from tests.sglang.testbed.servers import CHUNK, PAGE, Engine, Server
from tests.vllm.testbed.catalog import make_prompt, write_models
from tests.vllm.testbed.servers import scrape
from tests.vllm.testbed.service import start_all, stop_all

MODEL = "llama"
TOKENS = 16
LENGTHS = (1, PAGE, PAGE + 1, CHUNK, CHUNK + 1, 5 * CHUNK + 7)


async def _compare(pair: KvdPair, single: Server, console: Console) -> bool:
    table = Table("prompt", "seconds", "read", "tokens", title=f"{TOKENS} tokens of the pair beside a single server's")
    same = True
    for length in LENGTHS:
        prompt = make_prompt(length, seed=length)
        expected = await complete(single.url, make_body(prompt, TOKENS))
        before, began = await _read(pair), time.perf_counter()
        got = await pair.complete(prompt, TOKENS)
        seconds = time.perf_counter() - began
        same = same and got.tokens == expected.tokens
        verdict = "the same" if got.tokens == expected.tokens else f"[red]{got.tokens}, not {expected.tokens}"
        table.add_row(f"{length} tokens", f"{seconds:.2f}", f"{await _read(pair) - before:,.0f} bytes", verdict)
    console.print(table)
    return same


async def _read(pair: KvdPair) -> float:
    return (await scrape(pair.daemons["decode"])).total("kvd_read_bytes_total")


async def _demo(folder: Path, console: Console) -> bool:
    write_models(folder, MODEL)
    engine = Engine(folder, MODEL)
    pair, single = KvdPair(folder / "servers", engine), Server("single", folder / "servers", engine)
    services = [*pair.services, single]
    console.print("starting two daemons, a prefill server, a decode server and a single one: a minute or two")
    try:
        await start_all(services)
        return await _compare(pair, single, console)
    finally:
        stop_all(services)


def main() -> int:
    """Runs the demo; 0 if all tokens were the same."""
    with tempfile.TemporaryDirectory(prefix="kvd-") as folder:
        return 0 if asyncio.run(_demo(Path(folder), Console())) else 1


if __name__ == "__main__":
    sys.exit(main())
