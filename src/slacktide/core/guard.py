"""Room for those who are not here yet: a step cannot be interrupted, so a long one makes late who arrives during it.

The bounds of a step come from requests that are live. A short prompt with a tight TTFT target that arrives just after
the step began has lost the step's time before it is seen. Neither SlidingServe nor QoServe looks at this; where TTFT
targets are a few times the prompt's own time, it costs more requests than all orders and windows gain
(benchmarks/slidingserve).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field

from slacktide.core.bounded import Step
from slacktide.core.types import IntArray, Live

RECENT = 256
"""Arrivals whose targets are remembered: enough for a 5th percentile, and a minute or so of traffic."""
QUANTILE = 0.05
"""Which of the recent targets is guarded: the tightest but for one in twenty."""


@dataclass
class ArrivalGuard:
    """Remembers the TTFT targets of recent arrivals."""

    last_arrival: float = -math.inf
    tightest: float = math.inf
    _recent: deque[float] = field(default_factory=lambda: deque[float](maxlen=RECENT))
    _sorted: list[float] = field(default_factory=list[float])

    def watch(self, live: Live, prefills: IntArray) -> None:
        """Take in prompts that came since the last look. `prefills` are rows in order of arrival."""
        fresh, arrival, oldest = prefills.size, live.arrival_time, max(prefills.size - RECENT, 0)
        while fresh > oldest and arrival[prefills[fresh - 1]] > self.last_arrival:  # few: faster than numpy's search
            fresh -= 1
        if fresh == prefills.size:
            return
        self.last_arrival = float(arrival[prefills[-1]])
        for target in live.slo_ttft[prefills[fresh:]].tolist():
            if len(self._recent) == RECENT:
                del self._sorted[bisect_left(self._sorted, self._recent[0])]
            self._recent.append(target)
            insort(self._sorted, target)
        self.tightest = self._sorted[int(QUANTILE * len(self._sorted))]

    def bound(self, share: float, step: Step) -> float:
        """Most seconds of a step: those of its decodes with one prompt token, and `share` times the tightest target.

        Infinite for share 0. The one token stands for what any step with prompts costs: measured from nothing, a small
        share would leave an engine without decodes less than its shortest step.
        """
        if share <= 0:
            return math.inf
        self.watch(step.view.live, step.prefills)
        return step.smallest + share * self.tightest
