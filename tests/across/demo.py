"""One engine prefills and the other decodes: `python -m tests.across.demo`, which `make demo-across` runs.

Each completion is compared with those of a single server of either engine; and these with each other, as their kernels
differ, too.
"""

import argparse
import asyncio
import sys
import tempfile
from itertools import combinations
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.across.pairs import INTERPRETERS, Compared
from tests.vllm.testbed.catalog import make_prompt, write_models
from tests.vllm.testbed.client import Completion, complete
from tests.vllm.testbed.servers import scrape
from tests.vllm.testbed.service import start_all, stop_all

MODEL = "llama"
TOKENS = 8
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 191, 192, 333)


def _apart(one: Completion, other: Completion) -> float:
    """The largest difference of log-probabilities."""
    return max(abs(ours - theirs) for ours, theirs in zip(one.logprobs, other.logprobs, strict=True))


async def _read(pair: Compared) -> float:
    return (await scrape(pair.daemons["decode"])).total("kvd_read_bytes_total")


async def _compare(pair: Compared, console: Console) -> bool:
    table = Table(
        *("prompt", "read", "tokens", "from vLLM alone", "from SGLang alone", "these two"),
        title=f"prefill in {pair.engines['prefill']}, decode in {pair.engines['decode']}: largest difference of the "
        f"log-probabilities of {TOKENS} tokens",
    )
    same = True
    for length in LENGTHS:
        prompt = make_prompt(length, seed=length)
        before = await _read(pair)
        got = await pair.complete(prompt, TOKENS)
        moved = await _read(pair) - before
        alone = [await complete(server.url, pair.body(prompt, TOKENS)) for server in pair.single.values()]
        equal = all(other.tokens == got.tokens for other in alone)
        same = same and equal
        apart = [f"{_apart(*two):.1e}" for two in combinations((got, *alone), 2)]
        table.add_row(f"{length} tokens", f"{moved:,.0f} bytes", "the same" if equal else "[red]others", *apart)
    console.print(table)
    return same


async def _demo(prefill: str, folder: Path, console: Console) -> bool:
    write_models(folder, MODEL, interpreter=str(INTERPRETERS["vllm"]))
    decode = "sglang" if prefill == "vllm" else "vllm"
    pair = Compared(folder / "servers", folder, MODEL, (prefill, decode))
    console.print("starting two daemons, four servers and a router: two minutes or three")
    try:
        await start_all(pair.services)
        return await _compare(pair, console)
    finally:
        stop_all(pair.services)


def main() -> int:
    """Runs the demo; 0 if all tokens were the same."""
    parser = argparse.ArgumentParser(prog="python -m tests.across.demo", description=__doc__)
    parser.add_argument("--prefill", choices=("vllm", "sglang"), default="vllm", help="the engine that prefills")
    prefill = parser.parse_args().prefill
    with tempfile.TemporaryDirectory(prefix="kvd-") as folder:
        return 0 if asyncio.run(_demo(prefill, Path(folder), Console(width=120))) else 1


if __name__ == "__main__":
    sys.exit(main())
