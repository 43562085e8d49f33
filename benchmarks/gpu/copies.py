"""Copies on a GPU: many blocks beside one copy of all, and slices into host memory and out of it."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.gpu.steps import Skipped
from kvd import limits
from kvd.cuda.copies import Words, copy, has_batches, pin, unpin
from kvd.cuda.device import device
from kvd.cuda.memory import Mapping
from kvd.cuda.streams import Stream
from kvd.errors import DeviceError
from kvd.limits import KIB, MIB
from kvd.memory.memfd import Backing, MemfdProvider
from kvd.transport.slices import CHUNK_DESCRIPTORS

SIZES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB)


def speeds(*, quick: bool) -> dict[str, Any]:
    """GB/s of `total` bytes in blocks of each size, adjacent and scattered, slice by slice as reads are."""
    total, rounds = (4 * MIB, 2) if quick else (256 * MIB, 7)
    gpu = device(0)
    source, target = (Mapping.allocate(gpu, 2 * total) for _ in range(2))
    for memory in (source, target):
        memory.zero()
    rows = []
    with gpu.current(), Stream(gpu) as stream:
        one = np.array([total], np.uint64)
        whole = median(rounds, _copy, stream, _at(target), _at(source), one)
        for size in SIZES:
            row: dict[str, Any] = {"block": size}
            for way, step in (("adjacent", 1), ("scattered", 2)):
                offsets = np.arange(total // size, dtype=np.uint64) * np.uint64(size * step)
                lengths = np.full(len(offsets), size, np.uint64)
                here, there = _at(target) + offsets, _at(source) + offsets
                row[f"{way} GB/s"] = total / median(rounds, _in_slices, stream, here, there, lengths) / 1e9
                row[f"{way} of one copy"] = row[f"{way} GB/s"] / (total / whole / 1e9)
            rows.append(row)
        little = np.array([16 * KIB], np.uint64)
        single = median(7 * rounds, _copy, stream, _at(target), _at(source), little)
    return {
        "batched": has_batches(),
        "one copy of all, GB/s": total / whole / 1e9,
        "one block of 16 KiB, us": single * 1e6,
        "blocks": rows,
    }


def host(*, quick: bool) -> dict[str, Any]:
    """GB/s of slices between the GPU and host memory, as staging and pools in host memory have it."""
    total, rounds = (8 * MIB, 2) if quick else (128 * MIB, 7)
    gpu = device(0)
    memory = Mapping.allocate(gpu, total)
    memory.zero()
    pool = MemfdProvider(Backing.PLAIN).allocate("host", total)
    rows = []
    offsets = np.arange(total // limits.SLICE_BYTES, dtype=np.uint64) * np.uint64(limits.SLICE_BYTES)
    lengths = np.full(len(offsets), limits.SLICE_BYTES, np.uint64)
    with gpu.current(), Stream(gpu) as stream:
        for pinned in (False, True):
            if pinned:
                try:
                    pin(gpu, pool.base, pool.length, writable=True)
                except DeviceError as error:
                    raise Skipped(f"host memory cannot be pinned: {error.text}") from error
            here, there = _at(pool) + offsets, _at(memory) + offsets
            out = median(rounds, _in_slices, stream, here, there, lengths)
            back = median(rounds, _in_slices, stream, there, here, lengths)
            rows.append(
                {"pinned": pinned, "out of the GPU, GB/s": total / out / 1e9, "into it, GB/s": total / back / 1e9}
            )
        unpin(gpu, pool.base)
    return {"slices": rows}


def _at(memory: Any) -> Words:
    return np.array([memory.base], np.uint64)


def _copy(stream: Stream, targets: Words, sources: Words, lengths: Words) -> None:
    copy(stream, targets, sources, lengths)
    stream.synchronize()


def _in_slices(stream: Stream, targets: Words, sources: Words, lengths: Words) -> None:
    most = max(1, min(limits.SLICE_DESCRIPTORS, CHUNK_DESCRIPTORS, limits.SLICE_BYTES // int(lengths[0])))
    for start in range(0, len(lengths), most):
        part = slice(start, start + most)
        _copy(stream, targets[part], sources[part], lengths[part])


def median(rounds: int, action: Callable[..., None], *arguments: object) -> float:
    """The median of its seconds; the first time does not count."""
    action(*arguments)
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        action(*arguments)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)
