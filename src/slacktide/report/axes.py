"""Axes of the charts: linear, log, and shares by their nines; and their ticks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from slacktide.core.types import FloatArray

MOST_NINES = 4.0
"""Top of the percentile axis, in nines: 99.99 %. Rarer values pile up there."""


def nines(share: FloatArray | float) -> FloatArray:
    """-log10(1 - share), at most MOST_NINES: the position on the percentile axis."""
    return np.asarray(-np.log10(np.maximum(1.0 - np.asarray(share, dtype=np.float64), 10.0**-MOST_NINES)))


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a plot: its range of values, and where it lies in the drawing."""

    low: float
    high: float
    scale: str
    start: float
    length: float

    def at(self, values: FloatArray | float) -> FloatArray:
        """Positions in the drawing."""
        v = np.asarray(values, dtype=np.float64)
        if self.scale == "log":
            low, high, v = math.log10(self.low), math.log10(self.high), np.log10(np.maximum(v, self.low))
        elif self.scale == "tail":
            low, high, v = 0.0, self.high, nines(v)
        else:
            low, high = self.low, self.high
        return np.asarray(self.start + (v - low) / (high - low) * self.length)


def linear_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten) from low to high, about `count`."""
    step = 10.0 ** math.floor(math.log10((high - low) / count))
    step *= next(m for m in (1, 2, 5, 10) if (high - low) / (step * m) <= count)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) + 0.0 for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten; with 2 and 5 between them where there would be few."""
    factors = (1.0, 2.0, 5.0) if math.log10(high / low) < 2.5 else (1.0,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [factor * 10.0**power for power in powers for factor in factors]
    found = [tick for tick in ticks if low <= tick <= high]
    return found if len(found) > 1 else linear_ticks(low, high, 4)


def short(value: float) -> str:
    """A number of an axis in few characters: 0.5, 20, 5k, 2M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"
