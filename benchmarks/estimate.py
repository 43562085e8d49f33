"""Medians over rounds, each with its 95 % bootstrap interval.

A ratio's interval draws the same rounds for both sides, because those ran at the same time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

_SAMPLES: Final = 2000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median, or a ratio of medians, and its 95 % interval."""

    value: float
    low: float
    high: float


def estimate(values: Sequence[float], over: Sequence[float] | None = None) -> Estimate:
    """The median of `values`, or its ratio to the median of `over`, whose rounds are those of `values`."""
    count = min(len(values), len(values if over is None else over))
    draws = np.random.default_rng(0).integers(count, size=(_SAMPLES, count))

    def medians(of: Sequence[float]) -> tuple[float, NDArray[np.float64]]:
        column = np.asarray(of[:count], dtype=np.float64)
        return float(np.median(column)), np.median(column[draws], axis=1)

    value, drawn = medians(values)
    if over is not None:
        base, below = medians(over)
        with np.errstate(divide="ignore", invalid="ignore"):  # a base of 0 has no ratio
            value, drawn = float(np.divide(value, base)), np.divide(drawn, below)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Estimate(value, float(low), float(high))


def cell(found: Estimate, factor: float = 1.0, unit: str = "") -> str:
    """As text, times `factor`, with its unit."""
    value, low, high = (f"{number * factor:,.{_digits(found.value * factor)}f}" for number in _three(found))
    return f"{value} {unit} ({low} to {high})".replace("  ", " ")


def _three(found: Estimate) -> tuple[float, float, float]:
    return found.value, found.low, found.high


def _digits(value: float) -> int:
    return 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
