"""When a prompt's blocks are computed, and when they are read: as text, and as a picture."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.table import Table
from rich.text import Text

IN_TURN: Final = "one after the other"
AT_ONCE: Final = "both at once"
"""How the two engines get a request."""

WIDTH: Final = 130
"""Columns that the table needs, on a terminal or not."""

_BARS: Final = " ▁▂▃▄▅▆▇█"
_COLUMNS: Final = 60


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
    """Of the decode side."""


def as_table(lines: Sequence[Timeline]) -> Table:
    """Two rows for each request, in which a bar's height is the share of the prompt's bytes at that time."""
    until = max(line.first_token for line in lines)
    table = Table(title=f"a long prompt's blocks, over {1e3 * until:.0f} ms", title_justify="left")
    table.add_column("engines get it", no_wrap=True)
    table.add_column("bytes")
    table.add_column("over time", no_wrap=True, min_width=_COLUMNS)
    table.add_column("prefill ends", justify="right")
    table.add_column("first token", justify="right")
    for line in lines:
        ends = f"{1e3 * line.prefilled:.0f} ms", f"{1e3 * (line.first_token - line.prefilled):.0f} ms later"
        table.add_row(line.title, "complete", _bar(line.complete, line, until), *ends)
        table.add_row("", "read", _bar(line.read, line, until))
    return table


def plot(lines: Sequence[Timeline], path: Path) -> None:
    """A PNG with a panel for each request.

    Raises:
        ImportError: matplotlib is not installed (it comes with the extra `plot`).

    """
    import matplotlib as mpl  # noqa: PLC0415 - only pictures need it

    mpl.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    figure, axes = pyplot.subplots(len(lines), 1, figsize=(9, 6), sharex=True, sharey=True, layout="constrained")
    for axis, line in zip(axes, lines, strict=True):
        for points, name in ((line.complete, "complete, at the prefill side"), (line.read, "read, at the decode side")):
            times, sizes = zip(*points, strict=True)
            axis.step([1e3 * moment for moment in times], [size / 1e6 for size in sizes], where="post", label=name)
        axis.axvline(1e3 * line.prefilled, color="gray", linestyle="--", label="prefill ended")
        axis.axvline(1e3 * line.first_token, color="black", label="first token of the decode side")
        axis.set(title=line.title, ylabel="MB")
        axis.grid(visible=True, alpha=0.3)
    axes[0].legend(fontsize="small", loc="upper left")
    axes[-1].set_xlabel("ms since the request")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, format="png")
    pyplot.close(figure)


def _bar(points: Sequence[tuple[float, float]], line: Timeline, until: float) -> Text:
    most = max(size for _, size in (*line.complete, *line.read)) or 1.0
    times = [moment for moment, _ in points]
    text = ""
    for column in range(_COLUMNS):
        moment = until * (column + 1) / _COLUMNS
        if moment > line.first_token + until / _COLUMNS:
            break
        passed = bisect_right(times, moment)
        share = points[passed - 1][1] / most if passed else 0.0
        text += _BARS[round(share * (len(_BARS) - 1))]
    return Text(text)
