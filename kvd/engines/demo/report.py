"""The results of a demo, for people and for programs.

What a pull moves comes from the plan that the daemons make of the same layouts and block ids.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from rich.table import Table

from kvd.engines.demo.router import Request
from kvd.engines.demo.timeline import Timeline
from kvd.layout import CacheSpec
from kvd.plan import Planner, SpanPair, check_compatible, route
from kvd.protocol import ticket


@dataclass(frozen=True, slots=True)
class Amount:
    """Bytes, and the descriptors that name them."""

    bytes: int = 0
    descriptors: int = 0

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(self.bytes + other.bytes, self.descriptors + other.descriptors)


class Traffic:
    """Plans between every rank of a producer and every rank of a consumer."""

    def __init__(self, producers: Sequence[CacheSpec], consumers: Sequence[CacheSpec]) -> None:
        """Raises `BadRequest` (`INCOMPATIBLE`), naming both sides, for caches that kvd cannot map onto each other."""
        for producer, consumer in itertools.product(producers, consumers):
            check_compatible(producer, consumer)
        self._plans = [
            Planner(producers[share.source], consumer, share)
            for consumer in consumers
            for share in route(producers, consumer).shares
        ]

    def of(self, text: str, blocks: Sequence[int]) -> Amount:
        """What the ticket `text` moves into the consumer's `blocks`, over all ranks, which share block ids."""
        pulled = ticket.decode(text)
        offered = np.frombuffer(pulled.blocks[0][0].ids, dtype="<u4")
        spans = [SpanPair(0, offered, 0, np.array(blocks, dtype=np.uint32))]
        plans = [plan.plan(spans, pulled.tokens) for plan in self._plans]
        return Amount(sum(plan.bytes for plan in plans), sum(plan.count for plan in plans))


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One request, or all of them. `seconds` is the time during which KV was pulled."""

    request: str
    prompt_tokens: int
    bytes: int
    descriptors: int
    seconds: float
    tokens_equal: bool

    @property
    def gigabytes_per_second(self) -> float:
        """Bytes over `seconds`, in 10^9 a second."""
        return self.bytes / self.seconds / 1e9


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A row for each request, and `total`, which counts time shared by several pulls once."""

    requests: list[Row]
    total: Row


def make_report(requests: Sequence[Request], amounts: Sequence[Amount], expected: Sequence[list[int]]) -> Report:
    """The report on `requests`, with the amounts they moved and the tokens they should have."""
    rows = [
        Row(
            request=request.name,
            prompt_tokens=len(request.prompt),
            bytes=amount.bytes,
            descriptors=amount.descriptors,
            seconds=request.pull_ended - request.pull_started,
            tokens_equal=request.tokens == tokens,
        )
        for request, amount, tokens in zip(requests, amounts, expected, strict=True)
    ]
    total = Row(
        request="all",
        prompt_tokens=sum(row.prompt_tokens for row in rows),
        bytes=sum(row.bytes for row in rows),
        descriptors=sum(row.descriptors for row in rows),
        seconds=_covered([(request.pull_started, request.pull_ended) for request in requests]),
        tokens_equal=all(row.tokens_equal for row in rows),
    )
    return Report(requests=rows, total=total)


def as_table(report: Report) -> Table:
    """The report for people."""
    table = Table(title="KV pulled by the decode engine", title_justify="left")
    table.add_column("request")
    for column in ("prompt tokens", "MB", "descriptors", "pull ms", "GB/s"):
        table.add_column(column, justify="right")
    table.add_column("tokens")
    for row in [*report.requests, report.total]:
        if row is report.total:
            table.add_section()
        table.add_row(
            row.request,
            str(row.prompt_tokens),
            f"{row.bytes / 1e6:.2f}",
            str(row.descriptors),
            f"{row.seconds * 1e3:.2f}",
            f"{row.gigabytes_per_second:.2f}",
            "[green]equal[/]" if row.tokens_equal else "[bold red]DIFFERENT[/]",
        )
    return table


def as_json(report: Report, timelines: Sequence[Timeline]) -> str:
    """The report, and when a long prompt's blocks were complete and read, for programs."""

    def fields(row: Row) -> dict[str, object]:
        return {**msgspec.structs.asdict(row), "gigabytes_per_second": row.gigabytes_per_second}

    document: dict[str, object] = {"requests": [fields(row) for row in report.requests], "total": fields(report.total)}
    document |= {"timelines": list(timelines)}
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


def _covered(intervals: Sequence[tuple[float, float]]) -> float:
    """The length of the union of `intervals`."""
    covered, reach = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        covered += max(0.0, stop - max(start, reach))
        reach = max(reach, stop)
    return covered
