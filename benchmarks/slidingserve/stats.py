"""Goodputs by cell, their intervals, and ratios on the same seeds."""

from __future__ import annotations

from typing import Any

import numpy as np
from common import FLOOR

from slacktide.search.goodput import CONFIDENCE, Bracket, interval


class Cells:
    """Rows of results/goodput.jsonl by policy, data set and profile."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows: dict[tuple[str, str, str], dict[int, dict[str, Any]]] = {}
        for row in rows:
            self._rows.setdefault((row["policy"], row["data"], row["profile"]), {})[row["seed"]] = row

    def rows(self, policy: str, data: str, profile: str) -> list[dict[str, Any]]:
        """One row per seed."""
        return list(self._rows.get((policy, data, profile), {}).values())

    def brackets(self, policy: str, data: str, profile: str) -> dict[int, tuple[float, float]]:
        """Seed -> (met, missed) in requests/s, at least FLOOR; seeds that no rate limits are left out."""
        found = self._rows.get((policy, data, profile), {})
        return {
            seed: (max(row["rate"], FLOOR), max(row["rate_high"], FLOOR))
            for seed, row in found.items() if row["rate"] is not None
        }  # fmt: skip

    def profiles(self) -> list[str]:
        """In the order they were run."""
        return list(dict.fromkeys(profile for _, _, profile in self._rows))

    def datasets(self, profile: str) -> list[str]:
        """Of one profile, in the order they were run."""
        return list(dict.fromkeys(data for _, data, p in self._rows if p == profile))

    def seeds(self, profile: str) -> str:
        """How many seeds the profile's cells have: one number, or a range while a run is unfinished."""
        counts = [len(found) for (_, _, p), found in self._rows.items() if p == profile]
        return f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"

    def ratio(self, over: str, under: str, data: str, profile: str) -> tuple[float, float, float] | None:
        """Geometric mean of the ratios on the seeds that both have, and its 95 % interval.

        Student's interval of the logarithms, widened by what the searches left open (5 % each), so that equal answers
        of two searches are no proof. With one seed it is 0 to infinity.
        """
        a, b = self.brackets(over, data, profile), self.brackets(under, data, profile)
        seeds = [seed for seed in a if seed in b]
        if not seeds:
            return None
        logs = np.log([a[seed][0] / b[seed][0] for seed in seeds])
        middle = float(np.exp(logs.mean()))
        if len(seeds) == 1:
            return middle, 0.0, float("inf")
        from scipy.special import stdtrit

        half = stdtrit(logs.size - 1, (1 + CONFIDENCE) / 2) * logs.std(ddof=1) / np.sqrt(logs.size)
        lowest = np.mean(np.log([a[seed][0] / b[seed][1] for seed in seeds]))
        highest = np.mean(np.log([a[seed][1] / b[seed][0] for seed in seeds]))
        return middle, float(np.exp(lowest - half)), float(np.exp(highest + half))


def mean_text(rows: list[dict[str, Any]]) -> str:
    """Mean goodput and its interval."""
    if not rows:
        return ""
    if any(row["rate"] is None for row in rows):
        return "any"
    rate, low, high = interval([Bracket(row["rate"], row["rate_high"]) for row in rows])
    assert rate is not None
    assert low is not None
    assert high is not None
    return f"{rate:.2f} ({low:.2f}-{high:.2f})" if len(rows) > 1 else f"{rate:.2f}"


def percent(ratio: float) -> str:
    """A ratio as a change; beyond tenfold as a factor."""
    return f"x {ratio:.0f}" if ratio >= 10 else f"{100 * (ratio - 1):+.0f} %"


def ratio_text(found: Cells, over: str, under: str, data: str, profile: str) -> str:
    """A paired ratio and its interval."""
    got = found.ratio(over, under, data, profile)
    if got is None:
        return ""
    ratio, low, high = got
    return f"{percent(ratio)} ({percent(low)} to {percent(high)})" if low > 0 else percent(ratio)
