"""Room for those who are not here yet: a step cannot be interrupted, so a long one makes late who arrives during it.

The bounds of a step come from requests that are live. A short prompt with a tight TTFT target that arrives just after
the step began has lost the step's time before it is seen. Neither SlidingServe nor QoServe looks at this; where TTFT
targets are a few times the prompt's own time, it costs more requests than all orders and windows gain
(benchmarks/slidingserve).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from slacktide.core.bounded import Step
from slacktide.core.types import FloatArray, IntArray, Live

RECENT = 256
"""Arrivals whose targets are remembered: enough for a 5th percentile, and a minute or so of traffic."""
QUANTILE = 0.05
"""Which of the recent targets is guarded: the tightest but for one in twenty."""


@dataclass
class ArrivalGuard:
    """Remembers the TTFT targets of recent arrivals."""

    last_arrival: float = -math.inf
    count: int = 0
    tightest: float = math.inf
    _recent: FloatArray = field(default_factory=lambda: np.full(RECENT, np.inf))

    def watch(self, live: Live, prefills: IntArray) -> None:
        """Take in prompts that came since the last look. `prefills` are rows in order of arrival."""
        if live.arrival_time[prefills[-1]] <= self.last_arrival:
            return
        arrivals = live.arrival_time[prefills]
        fresh = prefills[int(np.searchsorted(arrivals, self.last_arrival, side="right")) :]
        self.last_arrival = float(arrivals[-1])
        for target in live.slo_ttft[fresh].tolist():
            self._recent[self.count % RECENT] = target
            self.count += 1
        seen = self._recent[: min(self.count, RECENT)]
        self.tightest = float(np.partition(seen, int(QUANTILE * seen.size))[int(QUANTILE * seen.size)])

    def bound(self, share: float, step: Step) -> float:
        """Most seconds of a step: those of its decodes with one prompt token, and `share` times the tightest target.

        Infinite for share 0. The one token stands for what any step with prompts costs: measured from nothing, a small
        share would leave an engine without decodes less than its shortest step.
        """
        if share <= 0:
            return math.inf
        self.watch(step.view.live, step.prefills)
        return step.smallest + share * self.tightest
