"""Copies on a GPU: many blocks beside one copy of all, and slices into host memory and out of it."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.gpu.steps import Skipped
from kvd import limits
from kvd.bench.gpu import SIZES
from kvd.cuda.copies import Words, has_batches
from kvd.cuda.device import device
from kvd.cuda.memory import Mapping
from kvd.errors import DeviceError
from kvd.limits import KIB, MIB
from kvd.memory.memfd import Backing, MemfdProvider
from kvd.transport.samehost.devices import GPU_SLICES
from kvd.transport.samehost.gpu import Gpu
from kvd.transport.slices import SliceBounds


def speeds(*, quick: bool) -> dict[str, Any]:
    """GB/s of `total` bytes in blocks of each size, adjacent and scattered, by the driver's call and by kvd's kernel.

    Both in slices as reads within a GPU have them; by the call only some of the bytes, as it is slow.
    """
    total, rounds = (4 * MIB, 2) if quick else (256 * MIB, 7)
    memory = [Mapping.allocate(device(0), 2 * total) for _ in range(2)]
    for each in memory:
        each.zero()
    target, source = (np.array([each.base], np.uint64) for each in memory)
    gpu = Gpu(device(0).uuid)
    whole = median(rounds, gpu.copy, target, source, np.array([total], np.uint64))
    rows = []
    for size in SIZES:
        row: dict[str, Any] = {"block": size}
        for way, step in (("adjacent", 1), ("scattered", 2)):
            offsets = np.arange(total // size, dtype=np.uint64) * np.uint64(size * step)
            lengths = np.full(len(offsets), size, np.uint64)
            some = slice(0, min(len(offsets), 2048))
            called = median(3, gpu.copy, target + offsets[some], source + offsets[some], lengths[some])
            row[f"{way}, call, GB/s"] = int(lengths[some].sum()) / called / 1e9
            seconds = median(
                rounds, _in_slices, gpu.copy_within, GPU_SLICES, target + offsets, source + offsets, lengths
            )
            row[f"{way}, kernel, GB/s"] = total / seconds / 1e9
            row[f"{way}, kernel, of one copy"] = whole / seconds
        rows.append(row)
    little = target, source, np.array([16 * KIB], np.uint64)
    called, launched = (1e6 * median(7 * rounds, copy, *little) for copy in (gpu.copy, gpu.copy_within))
    gpu.close()
    return {
        "batched": has_batches(),
        "one copy of all, GB/s": total / whole / 1e9,
        "one block of 16 KiB by the call, us": called,
        "by the kernel, us": launched,
        "blocks": rows,
    }


def host(*, quick: bool) -> dict[str, Any]:
    """GB/s of slices between the GPU and host memory, whole and in small blocks, as staging and pools there have it."""
    total, rounds = (8 * MIB, 2) if quick else (128 * MIB, 5)
    memory = Mapping.allocate(device(0), total)
    memory.zero()
    pool = MemfdProvider(Backing.PLAIN).allocate("host", total)
    gpu = Gpu(device(0).uuid)
    rows = []
    for pinned in (False, True):
        if pinned:
            try:
                gpu.pin(pool.base, pool.length)
            except DeviceError as error:
                raise Skipped(f"host memory cannot be pinned: {error.text}") from error
        for size in (16 * KIB, limits.SLICE_BYTES):
            offsets = np.arange(total // size, dtype=np.uint64) * np.uint64(size)
            lengths = np.full(len(offsets), size, np.uint64)
            here, there = offsets + np.uint64(pool.base), offsets + np.uint64(memory.base)
            out = median(rounds, _in_slices, gpu.copy, SliceBounds.usual(), here, there, lengths)
            back = median(rounds, _in_slices, gpu.copy, SliceBounds.usual(), there, here, lengths)
            speed = {"out of the GPU, GB/s": total / out / 1e9, "into it, GB/s": total / back / 1e9}
            rows.append({"pinned": pinned, "block": size, **speed})
    gpu.unpin(pool.base)
    gpu.close()
    return {"slices": rows}


def _in_slices(copy: Callable[..., None], bounds: SliceBounds, targets: Words, sources: Words, lengths: Words) -> None:
    most = max(1, min(bounds.descriptors, bounds.bytes // int(lengths[0])))
    for start in range(0, len(lengths), most):
        part = slice(start, start + most)
        copy(targets[part], sources[part], lengths[part])


def median(rounds: int, action: Callable[..., None], *arguments: object) -> float:
    """The median of its seconds; the first time does not count."""
    action(*arguments)
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        action(*arguments)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)
