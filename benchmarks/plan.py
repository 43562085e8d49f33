"""`python -m benchmarks.plan`: how fast transfers are planned, beside a plain Python loop and NIXL's preparation."""

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Final, TypeAlias

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import command
from benchmarks.preparation import Preparation
from kvd.bench import report
from kvd.layout import CacheSpec, Full, Group, Shard
from kvd.layout.presets import LAYOUTS, Attention, Placement
from kvd.plan import Descriptors, Planner, SpanPair, route
from tests.simulator.virtual.cache import offsets

NixlPrepare: TypeAlias = Callable[[Descriptors, int], None]
"""Prepares the same list with NIXL (prep_xfer_dlist on both sides, then make_prepped_xfer) between two registered
pools of that many bytes."""

_LAYERS: Final = 80
_BLOCK_TOKENS: Final = 16
_HEAD_BYTES: Final = 4  # planning costs the same whatever a block holds, and small pools fit any machine
_REPEATS: Final = 5


@dataclass(frozen=True, slots=True)
class PlanTiming:
    """The best of several runs, in seconds of the thread's own time, so that a busy machine does not matter.

    `plain` is a Python loop over layers and blocks; `nixl` is None if not measured.
    """

    case: str
    descriptors: int
    plan: float
    plain: float
    nixl: float | None

    @property
    def nanoseconds_each(self) -> float:
        """Planning time of one descriptor."""
        return self.plan / self.descriptors * 1e9

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {**asdict(self), "nanoseconds_each": self.nanoseconds_each}


def bench_plan(nixl_prepare: NixlPrepare | None = None) -> list[PlanTiming]:
    """Times the plans that the project promises figures for, and how they grow; takes about 10 seconds.

    - A request of one block, 100,000 tokens of 80 layers in cross-layer blocks, and the same in per-layer blocks with
      K and V apart: 1,000,000 descriptors.
    - The same layout with an eighth, a quarter, half and twice as many blocks.
    """
    cross_layer, per_layer = LAYOUTS["cross-layer-hnd"], LAYOUTS["flash-hnd"]
    timings = [
        _measure("one cross-layer block", cross_layer, 1, nixl_prepare),
        _measure("100,000 tokens, cross-layer", cross_layer, 6250, nixl_prepare),
    ]
    for blocks in (781, 1562, 3125, 6250, 12500):
        timings.append(_measure(f"{blocks * _BLOCK_TOKENS:,} tokens, per layer", per_layer, blocks, nixl_prepare))
    return timings


def scattered_request(order: str, blocks: int) -> tuple[CacheSpec, Planner, SpanPair]:
    """A spec of 80 layers in that layout, its planner to itself, and a request of `blocks` blocks in random places."""
    spec = _spec(order, 2 * blocks)
    random = np.random.default_rng(0)
    source, destination = (random.permutation(2 * blocks)[:blocks].astype(np.uint32) for _ in range(2))
    return spec, Planner(spec, spec, route([spec], spec).shares[0]), SpanPair(0, source, 0, destination)


def print_timings(timings: Iterable[PlanTiming]) -> None:
    """The timings as a table, in milliseconds."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("case", no_wrap=True)
    for heading in ("descriptors", "plan ms", "ns each", "Python loop ms", "NIXL ms"):
        table.add_column(heading, justify="right")
    for timing in timings:
        nixl = "" if timing.nixl is None else f"{timing.nixl * 1e3:.1f}"
        figures = (f"{timing.plan * 1e3:.3f}", f"{timing.nanoseconds_each:.0f}", f"{timing.plain * 1e3:.1f}", nixl)
        table.add_row(timing.case, f"{timing.descriptors:,}", *figures)
    Console().print(table)


def _measure(case: str, order: str, blocks: int, nixl_prepare: NixlPrepare | None) -> PlanTiming:
    spec, planner, span = scattered_request(order, blocks)
    descriptors = planner.plan([span])
    return PlanTiming(
        case=case,
        descriptors=descriptors.count,
        plan=_best(lambda: planner.plan([span]), _REPEATS),
        plain=_best(lambda: _enumerate(spec, span.source_ids.tolist(), span.destination_ids.tolist()), 2),
        nixl=None if nixl_prepare is None else _best(lambda: nixl_prepare(descriptors, spec.pool_bytes), 2),
    )


def _spec(order: str, num_blocks: int) -> CacheSpec:
    shard = Shard(stages=((0, _LAYERS),))
    place = Placement(
        order=order, shard=shard, layers=range(_LAYERS), num_blocks=num_blocks, block_tokens=_BLOCK_TOKENS
    )
    views = Attention(heads=1, head_bytes=_HEAD_BYTES).views(place)
    group = Group(window=Full(), block_tokens=_BLOCK_TOKENS, num_blocks=num_blocks, views=views)
    return CacheSpec(dtype="bfloat16", pool_bytes=views[0].end, groups=(group,), shard=shard)


def _enumerate(spec: CacheSpec, source: Sequence[int], destination: Sequence[int]) -> list[tuple[int, int, int]]:
    """What connectors do: (source, destination, bytes) per layer, K and V, and block, none merged."""
    (view,) = spec.groups[0].views
    stride, length = view.block_stride, _BLOCK_TOKENS * _HEAD_BYTES
    return [
        (layer + half + ours * stride, layer + half + theirs * stride, length)
        for layer in offsets(view, "layer")
        for half in offsets(view, "kv")
        for ours, theirs in zip(source, destination, strict=True)
    ]


def _best(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return min(times)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    return command.run(command.make_parser("plan", "Measures how fast transfers are planned."), _run, arguments)


def _run(args: argparse.Namespace) -> None:
    timings = bench_plan(Preparation())
    print_timings(timings)
    report.write_json(args.json, {"plan": [timing.as_dict() for timing in timings]})


if __name__ == "__main__":
    sys.exit(main())
