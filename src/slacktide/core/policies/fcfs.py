"""First come, first served, whole prompts: continuous batching in its plainest form.

One order by arrival over running and waiting requests; every running request gets its token, and a prompt joins the
step only as a whole, when token budget and KV blocks allow; the first that cannot ends admission. When blocks run out
the youngest is preempted. Source: the textbook rule, as a plain control beside the engines: vllm-v1 without chunks,
orca without reservations. Ignores SLOs, priorities and phases. A prompt beyond any step's budget is cut all the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slacktide.core.pack import pack
from slacktide.core.policies._shared import by_admission, require_at_least, smaller, uncached_tokens
from slacktide.core.policy import register
from slacktide.core.types import RUNNING, IntArray, Plan, StepView


@register("fcfs")
@dataclass(frozen=True)
class Fcfs:
    """Arrival order under the token budget."""

    chunked_prefill: bool = False
    """Cut prompts to what is left of the budget; an old prompt's chunk then goes before a younger request's decode."""
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
        return pack(
            view,
            rows,
            token_budget=budget,
            chunk_cap=None if self.chunked_prefill else _cuts(view, budget),
            victim_key=rows.astype(np.float64),
            chunked_prefill=self.chunked_prefill,
        )


def _cuts(view: StepView, budget: int) -> IntArray | None:
    """Caps that cut waiting prompts which no step can hold to what running requests leave; None when there are none."""
    waiting = view.live.status != RUNNING
    too_long = waiting & (uncached_tokens(view) > budget)
    if not too_long.any():
        return None
    left = budget - int(uncached_tokens(view)[~waiting].sum())
    return np.where(too_long, max(left, 0), budget)
