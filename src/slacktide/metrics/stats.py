"""Exact distribution of many numbers, most of which repeat: sorted values with counts.

In a simulated run every request that decodes through two consecutive steps has the same gap, so 130 million gaps are a
few million distinct values. Percentiles equal numpy's linear ones (which vllm bench uses) on the repeated values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from slacktide.core.types import FloatArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Distribution:
    """Values (ascending, float64[v]) and how often each occurs (int64[v])."""

    values: FloatArray
    counts: IntArray

    @classmethod
    def of(cls, values: FloatArray, counts: IntArray | None = None) -> Distribution:
        """From unsorted values; NaN entries (not defined for that request) are left out."""
        weights = np.ones(len(values), dtype=np.int64) if counts is None else counts
        keep = ~np.isnan(values) & (weights > 0)
        if not keep.all():
            values, weights = values[keep], weights[keep]
        order = np.argsort(values, kind="stable")
        return cls(values[order], weights[order])

    @property
    def size(self) -> int:
        """How many numbers, repeats counted."""
        return int(self.counts.sum())

    def mean(self) -> float | None:
        """Arithmetic mean; None when empty."""
        return float((self.values * self.counts).sum() / self.size) if self.size else None

    def std(self) -> float | None:
        """Population standard deviation (numpy's default, as vllm bench); None when empty."""
        mean = self.mean()
        if mean is None:
            return None
        return math.sqrt(float((np.square(self.values - mean) * self.counts).sum() / self.size))

    def max(self) -> float | None:
        """Largest value; None when empty."""
        return float(self.values[-1]) if self.size else None

    def percentile(self, q: float) -> float | None:
        """q-th percentile, 0..100, linear between neighbours (numpy's default); None when empty."""
        if not self.size:
            return None
        rank = q / 100.0 * (self.size - 1)
        low = math.floor(rank)
        upto = np.cumsum(self.counts)
        a, b = (float(self.values[np.searchsorted(upto, r, side="right")]) for r in (low, math.ceil(rank)))
        t = rank - low
        # numpy works from the nearer end; the same here, so that the last bit agrees.
        return a + (b - a) * t if t < 0.5 else b - (b - a) * (1 - t)

    def cdf(self) -> tuple[FloatArray, FloatArray]:
        """Values and the share of all numbers that are at most the value, float64[v] each."""
        return self.values, np.cumsum(self.counts) / max(self.size, 1)
