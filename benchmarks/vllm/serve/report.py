"""What `python -m benchmarks.vllm.serve` found, as Markdown and as a picture."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from benchmarks.vllm.serve.run import Measured

_PANELS: Final = (
    ("first_token_p50", "time to first token, p50, ms"),
    ("first_token_p99", "time to first token, p99, ms"),
    ("between_p50", "between tokens, p50, ms"),
    ("between_p99", "between tokens, p99, ms"),
    ("tokens_a_second", "tokens of answers a second"),
)


def table(found: Sequence[Measured]) -> Iterator[str]:
    """A Markdown table with a line for each workload, rate and system."""
    yield "| requests | a second | served by | first token, p50 / p99 | between tokens, p50 / p99 | tokens/s | failed |"
    yield "|---|---|---|---|---|---|---|"
    order = list(dict.fromkeys(one.workload for one in found))
    for one in sorted(found, key=lambda one: (order.index(one.workload), one.rate)):
        first = f"{one.first_token_p50:,.0f} / {one.first_token_p99:,.0f} ms"
        between = f"{one.between_p50:.1f} / {one.between_p99:.1f} ms"
        rest = f"{one.tokens_a_second:.1f} | {one.failed} of {one.completed + one.failed}"
        yield f"| {one.workload} | {one.rate:g} | {one.system} | {first} | {between} | {rest} |"


def plot(found: Sequence[Measured], path: Path) -> None:
    """A PNG with a row for each workload and a panel for each figure, over the rate.

    Raises:
        ImportError: matplotlib is not installed (it comes with the extra `plot`).

    """
    import matplotlib as mpl  # noqa: PLC0415 - only pictures need it

    mpl.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    workloads = list(dict.fromkeys(one.workload for one in found))
    size = (3.6 * len(_PANELS), 2.8 * len(workloads))
    figure, axes = pyplot.subplots(len(workloads), len(_PANELS), figsize=size, layout="constrained", squeeze=False)
    for row, workload in zip(axes, workloads, strict=True):
        for axis, (name, text) in zip(row, _PANELS, strict=True):
            for system in dict.fromkeys(one.system for one in found):
                points = sorted(
                    (one.rate, getattr(one, name)) for one in found if (one.workload, one.system) == (workload, system)
                )
                axis.plot([rate for rate, _ in points], [value for _, value in points], marker="o", label=system)
            axis.set_title(f"{workload}: {text}", fontsize="small")
            axis.set_xlabel("requests a second", fontsize="small")
            axis.set_ylim(bottom=0)
            axis.grid(visible=True, alpha=0.3)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
