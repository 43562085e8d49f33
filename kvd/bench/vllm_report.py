"""What `kvd bench vllm` found: its summary, as a table, as JSON, and as a picture."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from rich.table import Table

from kvd.bench.vllm import Request, Side

_Best = Callable[[Sequence[float]], float]


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One connector. Times in seconds: medians over the requests that were alone, percentiles over all gaps.

    `worst_quiet` and `worst_busy` are medians over the rounds of a round's worst gap.
    """

    name: str
    requests: int
    first_token: float
    handover: float
    transfer: float
    transfer_mean: float
    pull: float | None
    """With claim and fence; only kvd has these."""
    nbytes: float
    descriptors: float
    tokens_a_second: float
    quiet: dict[str, float]
    busy: dict[str, float]
    worst_quiet: float
    worst_busy: float


def summary(side: Side) -> Summary:
    """The figures of one side.

    Raises:
        ValueError: Nothing was measured.

    """
    if not side.requests:
        raise ValueError(f"{side.name}: no round ended in the time that was given; raise --seconds")

    def median(figure: Callable[[Request], float]) -> float:
        return statistics.median(figure(request) for request in side.requests)

    pull = median(lambda request: request.transfers.whole)
    return Summary(
        name=side.name,
        requests=len(side.requests),
        first_token=median(lambda request: request.first_token),
        handover=median(lambda request: request.handover),
        transfer=median(lambda request: request.transfers.seconds),
        transfer_mean=statistics.fmean(request.transfers.seconds for request in side.requests),
        pull=pull or None,
        nbytes=median(lambda request: request.transfers.nbytes),
        descriptors=median(lambda request: request.transfers.descriptors),
        tokens_a_second=statistics.median(side.throughputs),
        quiet=percentiles(side.quiet_gaps),
        busy=percentiles(side.busy_gaps),
        worst_quiet=statistics.median(side.quiet_worst),
        worst_busy=statistics.median(side.busy_worst),
    )


def percentiles(gaps: Sequence[float]) -> dict[str, float]:
    """p50, p99 and the largest."""
    ordered = sorted(gaps)
    return {
        "p50": ordered[len(ordered) // 2],
        "p99": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "max": ordered[-1],
    }


def table(kvd: Summary, *others: Summary) -> Table:
    """All side by side; the last column is kvd's figure over the best of the others."""
    result = Table(title=f"vLLM, prefill on one server and decode on another; medians of {kvd.requests} requests")
    for heading in ("", kvd.name, *(other.name for other in others), "kvd / best"):
        result.add_column(heading, justify="left" if not heading else "right")

    def row(name: str, figure: Callable[[Summary], float], form: Callable[[float], str], best: _Best = min) -> None:
        theirs = [figure(other) for other in others]
        cells = [form(value) for value in (figure(kvd), *theirs)]
        result.add_row(name, *cells, _ratio(figure(kvd), best(theirs)))

    row("time to first token", lambda side: side.first_token, _ms)
    row("handover: end of prefill to first token of decode", lambda side: side.handover, _ms)
    row("in transfer: first post to last byte", lambda side: side.transfer, _ms)
    row("the same with claim and fence, where there are such", lambda side: side.pull or side.transfer, _ms)
    row("bytes", lambda side: side.nbytes, lambda nbytes: f"{nbytes / 1e6:.1f} MB")
    row("descriptors", lambda side: side.descriptors, lambda count: f"{count:.0f}")
    row("tokens a second, several at once", lambda side: side.tokens_a_second, lambda rate: f"{rate:.0f}", max)
    result.add_section()
    for share in ("p50", "p99", "max"):
        row(f"between tokens, nothing arriving, {share}", _gap("quiet", share), _ms)
    for share in ("p50", "p99", "max"):
        row(f"between tokens, blocks arriving, {share}", _gap("busy", share), _ms)
    result.add_section()
    row("worst gap of a round, nothing arriving", lambda side: side.worst_quiet, _ms)
    row("worst gap of a round, blocks arriving", lambda side: side.worst_busy, _ms)
    ratios = [_ratio(side.worst_busy, side.worst_quiet) for side in (kvd, *others)]
    result.add_row("blocks arriving / nothing arriving", *ratios, "")
    return result


def _gap(when: Literal["quiet", "busy"], share: str) -> Callable[[Summary], float]:
    return lambda side: (side.quiet if when == "quiet" else side.busy)[share]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _ratio(ours: float, theirs: float) -> str:
    return f"{ours / theirs:.2f}" if theirs else "-"


def plot(sides: Sequence[Side], path: Path) -> None:
    """Handover, transfer and gaps between tokens as a PNG.

    Raises:
        ImportError: matplotlib is not installed (it comes with the extra `plot`).

    """
    import matplotlib as mpl  # noqa: PLC0415 - only pictures need it

    mpl.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 4.5), layout="constrained")
    names = {side.name: side.name.replace(", ", ",\n") for side in sides}
    boxes = {f"handover\n{names[side.name]}": [request.handover for request in side.requests] for side in sides}
    boxes |= {
        f"in transfer\n{names[side.name]}": [request.transfers.seconds for request in side.requests] for side in sides
    }
    left.boxplot([[1e3 * seconds for seconds in box] for box in boxes.values()], tick_labels=list(boxes))
    left.set(ylabel="ms", yscale="log", title="one request alone")
    left.tick_params(axis="x", labelsize="x-small")
    for side, color in zip(sides, ("tab:orange", "tab:blue", "tab:green"), strict=False):
        for gaps, style, what in ((side.quiet_gaps, ":", "nothing arriving"), (side.busy_gaps, "-", "blocks arriving")):
            ordered = sorted(1e3 * gap for gap in gaps)
            share = [1 - index / len(ordered) for index in range(len(ordered))]
            right.plot(ordered, share, style, color=color, label=f"{side.name}, {what}")
    right.set(xscale="log", yscale="log", xlabel="ms between tokens", ylabel="share of gaps that are longer")
    right.set_title("a decoding request")
    right.legend(fontsize="small")
    for axis in (left, right):
        axis.grid(visible=True, which="both", alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
