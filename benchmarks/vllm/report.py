"""What `python -m benchmarks.vllm` found, as tables and as a picture. Figures are medians over rounds."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final, Literal

import numpy as np
from rich.table import Table

from benchmarks.estimate import cell, estimate
from benchmarks.vllm.run import Side

WIDTH: Final = 160
"""Columns that the tables need, on a terminal or not."""


@dataclass(frozen=True, slots=True)
class Figure:
    """How a figure is shown: `factor` converts the measured value to `unit`; `best` says which of two is better.

    Beside the median of a `worst` one stands the most of all rounds.
    """

    name: str
    text: str
    factor: float = 1e3
    unit: str = "ms"
    best: Literal["least", "most"] = "least"
    worst: bool = False


FIGURES: Final = (
    Figure("first_token", "time to first token, prefill included"),
    Figure("handover", "handover: end of prefill to first token of decode"),
    Figure("at_decode", "time to first token at the decode side, another decoding"),
    Figure("at_decode_worst", "the same, the worst of a turn", worst=True),
    Figure("transfer", "in transfer: first post to last byte"),
    Figure("posting", "posts of a transfer, which copy on the same host"),
    Figure("pull", "one pull, with claim and fence"),
    Figure("pull_worst", "the same, the worst of a turn", worst=True),
    Figure("bytes", "bytes per pull", 1e-6, "MB", "most"),
    Figure("descriptors", "descriptors per pull", 1, ""),
    Figure("quiet_p50", "between tokens, nothing arriving, p50"),
    Figure("quiet_p99", "between tokens, nothing arriving, p99"),
    Figure("quiet_worst", "between tokens, nothing arriving, worst"),
    Figure("busy_p50", "between tokens, blocks arriving, p50"),
    Figure("busy_p99", "between tokens, blocks arriving, p99"),
    Figure("busy_worst", "between tokens, blocks arriving, worst"),
    Figure("engine_processor", "processor time of the decode engine while one arrives"),
    Figure("daemons_processor", "processor time of both daemons while one arrives"),
    Figure("serves_again", "killed under load: to the first token that the next daemon pulled", worst=True),
)
_THROUGHPUT: Final = "tokens_a_second_"


def tables(sides: Sequence[Side]) -> list[Table]:
    """One per placement, with the sides that finished a round; the last column is the first, kvd, over the best other.

    Raises:
        ValueError: No round finished.

    """
    found = []
    for placement, (kvd, *others) in _by_placement(sides):
        table = Table(title=f"vLLM, prefill on one server and decode on another, {placement}: {len(kvd.rounds)} rounds")
        for heading in ("", kvd.name, *(other.name for other in others), "kvd / best"):
            table.add_column(heading, justify="right" if heading else "left")
        for figure in _shown(kvd):
            columns = [_column(side, figure.name) for side in (kvd, *others)]
            cells = [_measured(figure, column) if column else "-" for column in columns]
            rivals = [column for side, column in zip((kvd, *others), columns, strict=True) if not side.ours]
            against = [column for column in rivals if any(column)]  # over 0 there is no ratio
            ratio = "-"
            if columns[0] and against:
                choose = min if figure.best == "least" else max
                ratio = cell(estimate(columns[0], choose(against, key=lambda column: float(np.median(column)))))
            table.add_row(figure.text, *cells, ratio)
        worst = [estimate(_column(side, "busy_worst"), _column(side, "quiet_worst")) for side in (kvd, *others)]
        table.add_row("worst gap, blocks arriving / nothing arriving", *map(cell, worst), "")
        found.append(table)
    return found


def plot(sides: Sequence[Side], path: Path) -> None:
    """A PNG with one panel per figure: medians and intervals of all sides and placements.

    Raises:
        ImportError: matplotlib is not installed (it comes with the extra `plot`).
        ValueError: No round finished.

    """
    import matplotlib as mpl  # noqa: PLC0415 - only pictures need it

    mpl.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    placed = _by_placement(sides)
    shown = _shown(placed[0][1][0])
    rows = -(-len(shown) // 4)
    step = 0.84 / max(len(group) for _, group in placed)
    figure, axes = pyplot.subplots(rows, 4, figsize=(17, 3 * rows), layout="constrained", squeeze=False)
    for axis, each in zip(axes.flat, shown, strict=False):
        for offset, (_, group) in enumerate(placed):
            for number, side in enumerate(group):
                if column := _column(side, each.name):
                    found = estimate([each.factor * value for value in column])
                    spread = [[found.value - found.low], [found.high - found.value]]
                    place, color = offset + step * number, f"C{number}"
                    axis.bar(place, found.value, 0.93 * step, yerr=spread, color=color, capsize=2, label=side.name)
        axis.set_xticks(
            [offset + 0.42 - step / 2 for offset in range(len(placed))], [placement for placement, _ in placed]
        )
        axis.set_title(each.text, fontsize="small")
        axis.set_ylabel(each.unit)
        axis.grid(visible=True, axis="y", alpha=0.3)
    for axis in axes.flat[len(shown) :]:
        axis.set_axis_off()
    handles, labels = axes.flat[0].get_legend_handles_labels()
    named = dict(zip(labels, handles, strict=True))
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _by_placement(sides: Sequence[Side]) -> list[tuple[str, list[Side]]]:
    measured = [side for side in sides if side.rounds]
    if not measured:
        raise ValueError("no round finished in time; raise --seconds")
    return [(placement, list(group)) for placement, group in groupby(measured, key=lambda side: side.placement)]


def _shown(side: Side) -> list[Figure]:
    """All figures, and one throughput per measured number of concurrent requests."""
    numbers = [name.removeprefix(_THROUGHPUT) for name in side.rounds[0] if name.startswith(_THROUGHPUT)]
    at_once = [Figure(_THROUGHPUT + n, f"tokens a second, {n} at once", 1, "/s", "most") for n in numbers]
    return [*(figure for figure in FIGURES if figure.name != "serves_again" or figure.name in side.rounds[0]), *at_once]


def _column(side: Side, name: str) -> list[float]:
    return [figures[name] for figures in side.rounds if name in figures]


def _measured(figure: Figure, column: Sequence[float]) -> str:
    median = cell(estimate(column), figure.factor, figure.unit)
    return f"{median}, most {max(column) * figure.factor:,.0f}" if figure.worst else median
