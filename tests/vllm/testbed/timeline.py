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
from dataclasses import dataclass, field
from pathlib import Path

from tests.vllm.testbed.catalog import make_prompt, write_models
from tests.vllm.testbed.client import complete, make_body, prefill
from tests.vllm.testbed.pair import KvdPair
from tests.vllm.testbed.servers import scrape
from tests.vllm.testbed.service import start_all, stop_all

MODEL = "bench"
TOKENS = 1900
CHUNKS = ("--max-num-batched-tokens", "512")
SAMPLE_SECONDS = 0.005


@dataclass
class Timeline:
    """One request; times in seconds since it was sent."""

    title: str
    complete: list[tuple[float, float]] = field(default_factory=list)
    """Bytes that may be read, by time."""
    read: list[tuple[float, float]] = field(default_factory=list)
    """Bytes that were read, by time."""
    prefilled: float = 0.0
    first_token: float = 0.0


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
    line = Timeline("both servers at once" if at_once else "one server after the other")
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


def plot(lines: list[Timeline], path: Path) -> None:
    """The picture, as a PNG."""
    import matplotlib as mpl  # noqa: PLC0415 - only pictures need it

    mpl.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    figure, axes = pyplot.subplots(len(lines), 1, figsize=(9, 6), sharex=True, sharey=True, layout="constrained")
    for axis, line in zip(axes, lines, strict=True):
        for points, name in ((line.complete, "complete, at the prefill side"), (line.read, "read, at the decode side")):
            times, sizes = zip(*points, strict=True)
            axis.step([1e3 * moment for moment in times], [size / 1e6 for size in sizes], where="post", label=name)
        axis.axvline(1e3 * line.prefilled, color="gray", linestyle="--", label="prefill answered")
        axis.axvline(1e3 * line.first_token, color="black", label="first token of the decode side")
        axis.set(title=line.title, ylabel="MB")
        axis.grid(visible=True, alpha=0.3)
    axes[0].legend(fontsize="small", loc="upper left")
    axes[-1].set_xlabel("ms since the request")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def main() -> int:
    """Draws it and prints when what came."""
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.testbed.timeline", description=__doc__)
    parser.add_argument("--plot", type=Path, metavar="FILE", default=Path("build/timeline.png"), help="the picture")
    path = parser.parse_args().plot
    path.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvd-vllm-") as folder:
        lines = asyncio.run(traced(Path(folder)))
    for line in lines:
        print(
            f"{line.title}: prefill answered after {1e3 * line.prefilled:.0f} ms, "
            f"first token {1e3 * (line.first_token - line.prefilled):.0f} ms later"
        )
    plot(lines, path)
    print(f"drawn into {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
