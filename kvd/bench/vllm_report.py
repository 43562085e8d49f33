"""What `kvd bench vllm` found: its summary, as a table, as JSON, and as a picture."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.table import Table

from kvd.bench.vllm import Request, Side


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


def table(kvd: Summary, nixl: Summary) -> Table:
    """Both side by side; the last column is kvd's figure over NixlConnector's."""
    result = Table(title=f"vLLM, prefill on one server and decode on another; medians of {kvd.requests} requests")
    for heading in ("", "kvd", "NixlConnector", "kvd / NixlConnector"):
        result.add_column(heading, justify="left" if not heading else "right")

    def times(name: str, ours: float, theirs: float) -> None:
        result.add_row(name, _ms(ours), _ms(theirs), _ratio(ours, theirs))

    times("time to first token", kvd.first_token, nixl.first_token)
    times("handover: end of prefill to first token of decode", kvd.handover, nixl.handover)
    times("in transfer: first post to last byte", kvd.transfer, nixl.transfer)
    result.add_row("the same with claim and fence", _ms(kvd.pull), "-", _ratio(kvd.pull, nixl.transfer))
    result.add_row(
        "bytes", f"{kvd.nbytes / 1e6:.1f} MB", f"{nixl.nbytes / 1e6:.1f} MB", _ratio(kvd.nbytes, nixl.nbytes)
    )
    result.add_row(
        "descriptors", f"{kvd.descriptors:.0f}", f"{nixl.descriptors:.0f}", _ratio(kvd.descriptors, nixl.descriptors)
    )
    rates = kvd.tokens_a_second, nixl.tokens_a_second
    result.add_row("tokens a second, several requests at once", *(f"{rate:.0f}" for rate in rates), _ratio(*rates))
    result.add_section()
    for name in ("p50", "p99", "max"):
        times(f"between tokens, nothing arriving, {name}", kvd.quiet[name], nixl.quiet[name])
    for name in ("p50", "p99", "max"):
        times(f"between tokens, blocks arriving, {name}", kvd.busy[name], nixl.busy[name])
    result.add_section()
    times("worst gap of a round, nothing arriving", kvd.worst_quiet, nixl.worst_quiet)
    times("worst gap of a round, blocks arriving", kvd.worst_busy, nixl.worst_busy)
    result.add_row(
        "blocks arriving / nothing arriving",
        _ratio(kvd.worst_busy, kvd.worst_quiet),
        _ratio(nixl.worst_busy, nixl.worst_quiet),
        "",
    )
    return result


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"


def _ratio(ours: float | None, theirs: float) -> str:
    return "-" if ours is None or not theirs else f"{ours / theirs:.2f}"


def plot(sides: Sequence[Side], path: Path) -> None:
    """Handover, transfer and gaps between tokens as a PNG.

    Raises:
        ImportError: matplotlib is not installed (it comes with the extra `plot`).

    """
    import matplotlib as mpl  # noqa: PLC0415 - only pictures need it

    mpl.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    boxes = {f"handover\n{side.name}": [request.handover for request in side.requests] for side in sides}
    boxes |= {f"in transfer\n{side.name}": [request.transfers.seconds for request in side.requests] for side in sides}
    left.boxplot([[1e3 * seconds for seconds in box] for box in boxes.values()], tick_labels=list(boxes))
    left.set(ylabel="ms", ylim=(0, None), title="one request alone")
    for side, color in zip(sides, ("tab:orange", "tab:blue"), strict=True):
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
