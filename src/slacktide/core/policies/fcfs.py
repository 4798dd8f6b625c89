"""First come, first served: the oldest request first, whatever its phase.

One order by arrival over running and waiting requests; each gets what it needs until the token budget is spent, so an
old prompt's chunk goes before a younger request's decode. When KV blocks run out the youngest is preempted. Source:
the textbook rule, as a plain control beside the engines. Ignores SLOs, priorities and phases.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slacktide.core.pack import pack
from slacktide.core.policies._shared import by_admission, require_at_least, smaller
from slacktide.core.policy import register
from slacktide.core.types import Plan, StepView


@register("fcfs")
@dataclass(frozen=True)
class Fcfs:
    """Arrival order, chunked under the token budget."""

    max_num_batched_tokens: int | None = None
    """Most tokens of a step; none takes the engine's."""

    def __post_init__(self) -> None:
        """Raise ValueError naming the parameter that is out of its range."""
        require_at_least(self, 1, "max_num_batched_tokens")

    @property
    def decode_runs(self) -> bool:
        """Plain decoding gives every row its token, unless an own budget is smaller than the engine's."""
        return self.max_num_batched_tokens is None

    def plan(self, view: StepView) -> Plan:
        """One step."""
        rows = np.arange(view.live.index.size)  # the table is in arrival order, so a row's number is its age
        rank = view.live.admission_order
        if rank.size > 1 and bool((rank[1:] < rank[:-1]).any()) and bool(view.live.is_decode.all()):
            rows = by_admission(view, rows)  # all get their token whatever the order: keep to the simulator's
        budget = smaller(view.limits.max_num_batched_tokens, self.max_num_batched_tokens)
        return pack(view, rows, token_budget=budget, victim_key=rows.astype(np.float64))
