"""Greedy dynamic chunking: Sarathi-EDF whose token budget is what the decodes' deadlines leave, by prediction.

As `sarathi-edf`, every decode runs and prompts follow by deadline, but the budget is no fixed number: it is the most
tokens whose predicted time ends before the earliest deadline of a decode. This is dynamic chunking as QoServe
(ASPLOS 2026) and the baselines of SlidingServe (arXiv 2606.05933) understand it, without their orders or a window:
without this arm a window's worth cannot be told from that of dynamic chunks. Ignores that late prompts hold up others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from slacktide.core.bounded import DEFAULT_MARGIN, begin, cut, decode_only
from slacktide.core.deadlines import windows
from slacktide.core.guard import ArrivalGuard
from slacktide.core.policies._shared import require_at_least
from slacktide.core.policy import register
from slacktide.core.types import Plan, StepView


@register("greedy-dynamic")
@dataclass(frozen=True)
class GreedyDynamic:
    """Decodes first, then chunks by deadline, as many tokens as the tightest decode has time for."""

    margin: float = DEFAULT_MARGIN
    """Predicted times are multiplied by this before they are held against deadlines."""
    max_chunk: int | None = None
    """Most tokens of a step; none takes the engine's max_num_batched_tokens."""
    late_factor: float = 1.0
    """A late decode bounds the step by this many times its TBT target."""
    guard: float = 0.0
    """Prompts lengthen a step by at most this many times the tightest recent TTFT target, for those who arrive
    during it; 0 is off."""
    expected_output_tokens: int = 256
    """Output tokens a request is expected to want, where an end-to-end target must be turned into a pace."""
    _guard: ArrivalGuard = field(default_factory=ArrivalGuard, init=False, repr=False, compare=False)
    decode_runs: ClassVar[bool] = True
    steerable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Raise ValueError naming the parameter that is out of its range."""
        require_at_least(self, 1, "max_chunk", "margin", "expected_output_tokens")
        require_at_least(self, 0, "guard")
        require_at_least(self, 1e-3, "late_factor")

    def plan(self, view: StepView) -> Plan:
        """One step."""
        step = begin(view, self.margin, self.max_chunk, expected_output=self.expected_output_tokens)
        if not step.prefills.size:
            return decode_only(step)
        found = step.survey
        bounds, late = windows(found, step.least, 1, late_factor=self.late_factor)
        t_cur = min(float(bounds[0]), self._guard.bound(self.guard, step))
        rows = step.prefills
        packed = step.packed(rows[np.argsort(found.slack[rows], kind="stable")])
        _, rows, tokens = step.queue(packed)
        prefill = step.within(step.load(rows, tokens), t_cur)
        why = {"path": "greedy", "t_cur": t_cur, "late_decodes": late, "greedy": prefill}
        return cut(step, packed, prefill, why)
