"""Draws the dashboard without Grafana: every panel's queries, asked of a running Prometheus, where the panel lies.

    python deploy/grafana/draw.py http://127.0.0.1:9090 dashboard.png --minutes 5

It shows that each query has an answer, and roughly how the dashboard looks; Grafana's own styling it does not have.
"""

import argparse
import json
import re
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, MaxNLocator

DASHBOARD = Path(__file__).parent / "kvd.json"
STEP = 2


def ask(prometheus: str, expression: str, minutes: float, variables: dict[str, str]) -> list[dict[str, Any]]:
    """The series of one query over the last `minutes`."""
    for name, value in {**variables, "__rate_interval": "20s"}.items():
        expression = expression.replace(f"${name}", value)
    now = time.time()
    query = urllib.parse.urlencode({"query": expression, "start": now - 60 * minutes, "end": now, "step": STEP})
    with urllib.request.urlopen(f"{prometheus}/api/v1/query_range?{query}", timeout=20) as answer:  # noqa: S310
        return list(json.loads(answer.read())["data"]["result"])


def legend(template: str, labels: dict[str, str]) -> str:
    """Grafana's `{{label}}`, filled in."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), template) or "value"


def readable(unit: str, value: float) -> str:
    """A value as Grafana writes it in this unit."""
    if unit in ("bytes", "Bps"):
        for name in ("B", "KiB", "MiB", "GiB"):
            if abs(value) < 1024 or name == "GiB":
                return f"{value:.3g} {name}" + ("/s" if unit == "Bps" else "")
            value /= 1024
    if unit == "s":
        return f"{value * 1e3:.3g} ms" if abs(value) < 1 else f"{value:.3g} s"
    if unit == "percentunit":
        return f"{value * 100:.3g}%"
    return f"{value:.4g}" + (" /s" if unit == "reqps" else "")


def binary_ticks(top: float) -> list[float]:
    """At most five round numbers of bytes (of KiB, MiB, ...) from 0 to `top`."""
    unit = 1.0
    while top / unit >= 1024:
        unit *= 1024
    return [tick * unit for tick in MaxNLocator(5).tick_values(0, top / unit) if tick * unit <= top]


def draw_stat(axes: Any, panel: dict[str, Any], series: list[tuple[str, list[float], list[float]]]) -> None:
    """One large number, coloured by the panel's thresholds."""
    defaults = panel["fieldConfig"]["defaults"]
    last = series[0][2][-1] if series else float("nan")
    reached = [step for step in defaults["thresholds"]["steps"] if step["value"] is None or last >= step["value"]]
    colour = {"green": "#5fbf61", "red": "#e0475b"}[reached[-1]["color"]] if reached else "#888888"
    axes.set_xticks([])
    axes.set_yticks([])
    text = readable(defaults["unit"], last) if series else "no data"
    axes.text(0.5, 0.45, text, ha="center", va="center", fontsize=17, color=colour, transform=axes.transAxes)


def draw_series(axes: Any, panel: dict[str, Any], series: list[tuple[str, list[float], list[float]]]) -> None:
    """Lines, or areas on each other where the panel stacks."""
    defaults = panel["fieldConfig"]["defaults"]
    stacked = defaults["custom"]["stacking"]["mode"] == "normal"
    times = sorted({at for _, points, _ in series for at in points})
    if stacked and times:
        rows = [[dict(zip(points, values, strict=True)).get(at, 0.0) for at in times] for _, points, values in series]
        axes.stackplot(times, rows, labels=[name for name, _, _ in series], alpha=0.75)
    for name, points, values in [] if stacked else series:
        axes.plot(points, values, label=name, linewidth=1.2)
    axes.set_ylim(bottom=0)
    if defaults["unit"] in ("bytes", "Bps"):
        axes.set_yticks(binary_ticks(axes.get_ylim()[1]))
    else:
        axes.locator_params(axis="y", nbins=5)
    axes.grid(alpha=0.15)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: readable(defaults["unit"], value)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: time.strftime("%H:%M:%S", time.localtime(at))))
    axes.tick_params(labelsize=8)
    axes.locator_params(axis="x", nbins=5)
    if not series:
        axes.text(0.5, 0.5, "no data", ha="center", va="center", color="#888888", transform=axes.transAxes)
        axes.set_xticks([])
    else:
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(-0.02, -0.1), ncols=4, frameon=False)


def main() -> None:
    """Asks and draws."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("prometheus")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--job", default="kvd")
    args = parser.parse_args()
    variables = {"job": args.job, "instance": ".*"}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    plt.style.use("dark_background")
    figure = plt.figure(figsize=(16, rows * 0.4), dpi=90)
    for panel in panels:
        at = panel["gridPos"]
        width, height = at["w"] / 24, at["h"] / rows
        axes = figure.add_axes(
            (at["x"] / 24 + 0.05, 1 - at["y"] / rows - height + 0.032, width - 0.065, height - 0.054)
        )
        axes.set_title(panel["title"], fontsize=10, loc="left")
        axes.set_facecolor("#181b1f")
        series = []
        for target in panel["targets"]:
            for found in ask(args.prometheus, target["expr"], args.minutes, variables):
                points = [(float(at), float(value)) for at, value in found["values"] if value != "NaN"]
                name = legend(target["legendFormat"], found["metric"])
                if points:
                    series.append((name, [at for at, _ in points], [value for _, value in points]))
        (draw_stat if panel["type"] == "stat" else draw_series)(axes, panel, series)
    figure.savefig(args.picture, facecolor="#111217")


if __name__ == "__main__":
    main()
