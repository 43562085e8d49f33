"""How measurements are shown: progress, tables, JSON and a picture."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvd.bench.load import Interference, Rate
from kvd.bench.transfers import Case, Measured
from kvd.limits import KIB, MIB
from kvd.units import size

if TYPE_CHECKING:
    from kvd.bench import gpu  # CUDA is an extra

WIDTH = 150
"""Columns that the widest table needs, on a terminal or not."""


@contextlib.contextmanager
def progress(what: str, total: int | None) -> Iterator[Callable[[], None]]:
    """A progress bar on standard error; yields the function that moves it one step."""
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def write_json(path: Path | None, figures: Mapping[str, object]) -> None:
    """Writes the figures and the machine's description to `path`, if there is one."""
    if path is not None:
        document = {"machine": _machine(), **figures}
        path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")


def _machine() -> dict[str, object]:
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return {"cpu": cpu, "cores": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version()}


def transfers_table(results: Sequence[Measured], busy: int) -> Table:
    """One row per case: throughputs in GB/s, latencies in microseconds. `busy` processes spun meanwhile."""
    table = Table(title=f"one pull, from the request to Done, with claim and fence{_beside(busy)}")
    for heading in (
        "blocks",
        "",
        "bytes",
        "desc.",
        "memcpy",
        "NIXL",
        "kvd",
        "kvd/NIXL",
        "NIXL p50",
        "NIXL p99",
        "kvd p50",
        "kvd p99",
        "added",
    ):
        table.add_column(heading, justify="right")
    for row in results:
        case = row.case
        table.add_row(
            _blocks(case),
            "scattered" if case.scattered else "adjacent",
            size(case.bytes),
            str(row.descriptors),
            *(f"{row.rate(seconds):.2f}" for seconds in (row.memcpy, row.raw, row.kvd)),
            f"{row.ratio:.2f}",
            *(f"{seconds * 1e6:.0f} us" for seconds in (row.raw, row.raw_p99, row.kvd, row.kvd_p99, row.added)),
        )
    return table


def gpu_row(row: gpu.Measured) -> dict[str, float]:
    """What was measured of one size of blocks on a GPU, by the headings of `gpu_table`."""
    figures: dict[str, float] = {"block": row.block}
    for way, seconds in (("adjacent", row.adjacent), ("scattered", row.scattered)):
        figures[f"{way}, GB/s"] = row.rate(seconds)
        figures[f"{way}, of one copy"] = row.one_copy / seconds
    return figures


def gpu_table(rows: Sequence[Mapping[str, float]]) -> Table:
    """One row per size of blocks."""
    table = Table(title="pulls between two pools on one GPU, beside one copy of all their bytes")
    for heading in rows[0]:
        table.add_column(heading, justify="right")
    for row in rows:
        block, *others = row.values()
        table.add_row(size(int(block)), *(f"{value:.3g}" for value in others))
    return table


def interference_table(result: Interference, busy: int) -> Table:
    """How quick the daemon stays during a big pull."""
    table = Table("what", "value", title=f"while a pull of 1 GiB runs{_beside(busy)}")
    table.add_row("pull of 1 GiB", f"{result.big_pull * 1e3:.0f} ms")
    table.add_row(f"status round trip, p50 of {result.statuses}", f"{result.status_p50 * 1e3:.2f} ms")
    table.add_row("status round trip, p99", f"{result.status_p99 * 1e3:.2f} ms")
    table.add_row("pull of one 256 KiB block, alone", f"{result.small_alone * 1e6:.0f} us")
    table.add_row("the same, during the pull of 1 GiB", f"{result.small_beside * 1e6:.0f} us")
    table.add_row("slowdown", f"{result.slowdown:.1f}")
    return table


def rate_table(result: Rate, busy: int) -> Table:
    """The sustained rate, and the memory and descriptors it leaves behind."""
    table = Table("what", "value", title=f"pulls of one 16 KiB block, for {result.seconds:.0f} s{_beside(busy)}")
    table.add_row("pulls a second", f"{result.per_second:.0f}")
    table.add_row("pulls measured, pulls of the warm-up", f"{result.pulls}, {result.warm_up}")
    table.add_row(
        "memory of both daemons, before -> after", " -> ".join(f"{used / MIB:.1f} MiB" for used in result.memory)
    )
    table.add_row("open descriptors of both daemons, before -> after", " -> ".join(map(str, result.descriptors)))
    table.add_row("one empty poll() of the client", f"{result.poll_seconds * 1e6:.1f} us")
    return table


def plot(results: Sequence[Measured], path: Path) -> None:
    """Throughput over bytes as a PNG: memcpy, raw NIXL and kvd.

    Raises:
        ImportError: matplotlib is not installed (it comes with the extra `plot`).

    """
    import matplotlib as mpl  # noqa: PLC0415 - only pictures need it

    mpl.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    for axis, scattered in zip(axes, (False, True), strict=True):
        rows = sorted((row for row in results if row.case.scattered is scattered), key=lambda row: row.case.bytes)
        for block_bytes, style in ((16 * KIB, "--"), (256 * KIB, "-")):
            _lines(axis, [row for row in rows if row.case.block_bytes == block_bytes], style, size(block_bytes))
        axis.set(xscale="log", yscale="log", xlabel="bytes per pull", title="scattered" if scattered else "adjacent")
        axis.grid(visible=True, which="both", alpha=0.3)
    axes[0].set_ylabel("GB/s")
    axes[1].legend(fontsize="small")
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)


def _lines(axis: Any, rows: Sequence[Measured], style: str, blocks: str) -> None:
    sizes = [row.case.bytes for row in rows]
    for color, name, times in (
        ("gray", "memcpy", [row.memcpy for row in rows]),
        ("tab:blue", "raw NIXL", [row.raw for row in rows]),
        ("tab:orange", "kvd", [row.kvd for row in rows]),
    ):
        rates = [row.rate(seconds) for row, seconds in zip(rows, times, strict=True)]
        axis.plot(sizes, rates, style, marker="o", markersize=3, color=color, label=f"{name}, {blocks} blocks")


def _beside(busy: int) -> str:
    return f", beside {busy} spinning processes" if busy else ""


def _blocks(case: Case) -> str:
    blocks = f"{case.count} x {size(case.block_bytes)}"
    if case.layers == 1:
        return blocks
    return f"{blocks} {'cross-layer' if case.cross_layer else 'per layer'}"
