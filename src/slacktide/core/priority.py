"""Orders of prompts: SlidingServe's multi-level priority sorter (MLPS), and what it needs to know of the engine's pace.

Urgency u = r / (rho * s): r tokens to compute, s seconds until the first token is due, rho tokens of prompt computed
per second. u > 1 says: too late at this pace.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from slacktide.core.types import BoolArray, FloatArray, IntArray

PROTECTED, URGENT, NORMAL, HOPELESS, RELEGATED = 0, 1, 2, 3, 4
EPSILON = 1e-3
"""Seconds. Least slack in a division, so that a request due this instant has a finite urgency."""
MEMORY = 0.995
"""Weight of the past in the pace of prefills (QoServe's code): the last 200 steps count."""


@dataclass
class PrefillRate:
    """rho: tokens of prompt per second of the steps that computed any (busy time, so that idling does not lower it)."""

    tokens: float = 0.0
    seconds: float = 0.0
    _planned: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def planned(self, prefill_tokens: int, rows: int) -> None:
        """Remember a plan until its outcome comes."""
        self._planned.append((prefill_tokens, rows))
        if len(self._planned) > 8:  # a host that never reports: its plans must not pile up
            del self._planned[0]

    def observe(self, step_time: float | None, rows: int) -> None:
        """Take the outcome of the oldest plan with that many rows; a step without prefill leaves the pace alone."""
        if step_time is None:
            return
        while self._planned:
            prefill, expected = self._planned.pop(0)
            if expected == rows:
                if prefill > 0:
                    self.tokens = MEMORY * self.tokens + prefill
                    self.seconds = MEMORY * self.seconds + step_time
                return

    def value(self, prior: float) -> float:
        """Tokens per second; `prior` counts as much as one step of a second, so it fades as steps come in."""
        return (self.tokens + prior) / (self.seconds + 1.0)


def urgency(remaining: IntArray, slack: FloatArray, rho: float) -> FloatArray:
    """u = r / (rho * max(s, EPSILON))."""
    return remaining / (rho * np.maximum(slack, EPSILON))


def classes(
    remaining: IntArray,
    slack: FloatArray,
    rho: float,
    protected: BoolArray,
    relegated: BoolArray,
    *,
    alpha: float,
    beta: float,
    least: float = 0.0,
) -> IntArray:
    """Class of each prompt: protected, urgent (alpha < u <= beta), normal, hopeless, relegated.

    Hopeless: less slack than `least` (the shortest step), or u > beta: at the pace of late it will miss. The paper has
    no such class; its late requests count as urgent and outrank those that can still be saved.
    """
    u = urgency(remaining, slack, rho)
    found = np.where(u > alpha, URGENT, NORMAL)
    found = np.where((u > beta) | (slack < least), HOPELESS, found)
    found = np.where(relegated, RELEGATED, found)
    return np.where(protected, PROTECTED, found)


def by_class(found: IntArray, remaining: IntArray) -> IntArray:
    """Positions in the order (class, remaining tokens, arrival, id); rows come in (arrival, id) order."""
    return np.argsort((found << 40) + remaining, kind="stable")


def paper_order(remaining: IntArray, slack: FloatArray, rho: float, protected: BoolArray, alpha: float) -> IntArray:
    """The paper's MLPS: ascending (1 - g, 1 - e, r) with e = [u > alpha]."""
    urgent = urgency(remaining, slack, rho) > alpha
    key = (np.where(protected, 0, 2) + np.where(urgent, 0, 1)).astype(np.int64)
    return by_class(key, remaining)


def hybrid_key(deadline: FloatArray, work: FloatArray | IntArray, alpha: float) -> FloatArray:
    """QoServe: deadline + alpha * work (seconds, tokens, seconds per token): EDF at 0, else rather SRPF."""
    return deadline + alpha * work


def edf_feasible(slack: FloatArray, remaining: IntArray, rho: float) -> bool:
    """Would every prompt that can still be on time be so, if all were computed earliest deadline first at pace rho?"""
    open_rows = (slack > 0) & np.isfinite(slack)
    slack, remaining = slack[open_rows], remaining[open_rows]
    order = np.argsort(slack, kind="stable")
    return bool((np.cumsum(remaining[order]) <= rho * slack[order]).all())


def prior_rate(tokens: float, seconds: float) -> float:
    """Pace of a step of that size, tokens per second; 1 where the model says it takes no time."""
    return tokens / seconds if seconds > 0 and math.isfinite(seconds) and tokens > 0 else 1.0
