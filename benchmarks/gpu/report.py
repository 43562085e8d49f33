"""The report of `python -m benchmarks.gpu` as Markdown."""

from collections.abc import Iterator, Mapping
from typing import Any


def markdown(document: Mapping[str, Any]) -> str:
    """What each step answers, and what of it a GPU must say again."""
    return "\n".join(_lines(document)) + "\n"


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    steps = document["steps"]
    yield "# What a GPU says of kvd"
    yield ""
    if document["standin"]:
        yield "**A dry run over the stand-in driver.** Its figures say nothing; a GPU must repeat every step."
    else:
        counts = {status: sum(step["status"] == status for step in steps) for status in ("passed", "failed", "skipped")}
        yield ", ".join(f"{count} steps {status}" for status, count in counts.items()) + "."
    yield ""
    yield "| step | question | | seconds | on a GPU |"
    yield "|---|---|---|---|---|"
    for step in steps:
        again = "to be repeated" if document["standin"] or step["status"] != "passed" else "answered"
        yield f"| {step['step']} | {step['question']} | {step['status']} | {step['seconds']:.1f} | {again} |"
    for step in steps:
        yield ""
        yield f"## {step['step']}"
        yield ""
        if step["reason"]:
            yield f"{step['status']}:"
            yield ""
            yield "```"
            yield step["reason"]
            yield "```"
            yield ""
        yield from _answers(step["answers"])


def _answers(answers: Mapping[str, Any]) -> Iterator[str]:
    tables = {name: value for name, value in answers.items() if isinstance(value, list) and value}
    plain = {name: value for name, value in answers.items() if name not in tables}
    if plain:
        yield "| | |"
        yield "|---|---|"
        for name, value in plain.items():
            yield f"| {name} | {_cell(value)} |"
    for name, rows in tables.items():
        yield ""
        yield f"{name}:"
        yield ""
        yield f"| {' | '.join(rows[0])} |"
        yield "|" + "---|" * len(rows[0])
        for row in rows:
            yield f"| {' | '.join(_cell(value) for value in row.values())} |"


def _cell(value: Any) -> str:
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
