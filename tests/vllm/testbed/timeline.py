"""When a prompt's blocks are computed and when they move: `python -m tests.vllm.testbed.timeline`.

`make demo-vllm` runs it. One long prompt, prefilled in chunks of 512 tokens: first one server after the other, then
both at once. The picture shows what the prefill side's daemon was told to be complete, and what the decode side's has
read, until the first token.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from kvd.cli.arguments import picture
from kvd.engines.demo.timeline import AT_ONCE, IN_TURN, WIDTH, Timeline, as_table, plot
from tests.vllm.testbed.catalog import make_prompt, write_models
from tests.vllm.testbed.client import complete, make_body, prefill
from tests.vllm.testbed.pair import KvdPair
from tests.vllm.testbed.servers import scrape
from tests.vllm.testbed.service import start_all, stop_all

MODEL = "bench"
TOKENS = 1900
CHUNKS = ("--max-num-batched-tokens", "512")
SAMPLE_SECONDS = 0.005


async def _watch(pair: KvdPair, line: Timeline, start: float) -> None:
    before = (await scrape(pair.daemons["decode"])).total("kvd_read_bytes_total")
    most = 0.0
    while True:
        held, read = await asyncio.gather(scrape(pair.daemons["prefill"]), scrape(pair.daemons["decode"]))
        now = time.perf_counter() - start
        most = max(most, held.total("kvd_held_bytes"))
        line.complete.append((now, most))
        line.read.append((now, read.total("kvd_read_bytes_total") - before))
        await asyncio.sleep(SAMPLE_SECONDS)


async def trace(pair: KvdPair, seed: int, *, at_once: bool) -> Timeline:
    """Sends one request and watches it."""
    line = Timeline(AT_ONCE if at_once else IN_TURN)
    body = make_body(MODEL, make_prompt(TOKENS, seed), 2)
    start = time.perf_counter()
    watching = asyncio.create_task(_watch(pair, line, start))
    try:
        if at_once:
            prefilling, decoding = await pair.begin_early(body)
            prefilling.add_done_callback(lambda _: setattr(line, "prefilled", time.perf_counter() - start))
            completion, _ = await asyncio.gather(complete(pair.decode.url, decoding), prefilling)
        else:
            params = await prefill(pair.prefill.url, body)
            line.prefilled = time.perf_counter() - start
            completion = await complete(pair.decode.url, body | {"kv_transfer_params": params})
        line.first_token = completion.times[0] - start
    finally:
        watching.cancel()
        await asyncio.wait((watching,))
    return line


async def traced(folder: Path) -> list[Timeline]:
    """Both ways, on a pair of servers that have had one request of each kind."""
    write_models(folder, MODEL)
    pair = KvdPair(folder / "pair", folder, MODEL)
    pair.prefill.flags = CHUNKS
    try:
        await start_all(pair.services)
        for seed, at_once in enumerate((False, True)):
            await trace(pair, seed, at_once=at_once)
        return [await trace(pair, 2 + seed, at_once=at_once) for seed, at_once in enumerate((False, True))]
    finally:
        stop_all(pair.services)


def main() -> int:
    """Draws it and prints when what came."""
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.testbed.timeline", description=__doc__)
    parser.add_argument("--plot", type=picture, metavar="FILE", default="build/timeline.png", help="the picture")
    path = parser.parse_args().plot
    with tempfile.TemporaryDirectory(prefix="kvd-vllm-") as folder:
        lines = asyncio.run(traced(Path(folder)))
    Console(width=WIDTH).print(as_table(lines))
    plot(lines, path)
    print(f"drawn into {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
