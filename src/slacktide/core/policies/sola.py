"""SOLA: each step serves the worse of the two targets as well as the other allows.

The share of its target that the worst request has used, t / T, is taken for TTFT and for TPOT. If TTFT is worse, the
step carries as many prompt tokens as keep every running request's mean time per token within its target; if TPOT is
worse, it carries decodes alone, plus the prompts that would otherwise miss their TTFT. Source: "SOLA: Optimizing SLO
Attainment for LLM Serving with State-Aware Scheduling" (MLSys 2025), from a description, not its text: coefficients,
ties and the percentile used when both are violated are not published, so late requests leave the constraint here.
Ignores deadlines of single tokens: a TPOT target bounds the mean.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from slacktide.core.bounded import DEFAULT_MARGIN, begin, cut, decode_only
from slacktide.core.guard import ArrivalGuard
from slacktide.core.loading import kernels
from slacktide.core.policies._shared import require_at_least, require_at_most
from slacktide.core.policy import register
from slacktide.core.priority import PrefillRate, prior_rate
from slacktide.core.types import Plan, StepResult, StepView


@register("sola")
@dataclass(frozen=True)
class Sola:
    """State-aware choice between prompts and decodes."""

    tile: int = 64
    """Prompt tokens come in multiples of this (the paper: the GPU's tile), unless that would stop all progress."""
    margin: float = DEFAULT_MARGIN
    """Predicted times are multiplied by this before they are held against targets."""
    max_chunk: int | None = None
    """Most tokens of a step; none takes the engine's max_num_batched_tokens."""
    guard: float = 0.0
    """Prompts lengthen a step by at most this many times the tightest recent TTFT target, for those who arrive
    during it; 0 is off."""
    expected_output_tokens: int = 256
    """Output tokens a request is expected to want: over these a slow step is averaged."""
    _guard: ArrivalGuard = field(default_factory=ArrivalGuard, init=False, repr=False, compare=False)
    _rate: PrefillRate = field(default_factory=PrefillRate, init=False, repr=False, compare=False)
    decode_runs = True
    steerable = True

    def __post_init__(self) -> None:
        """Raise ValueError naming the parameter that is out of its range."""
        require_at_least(self, 1, "tile", "margin", "max_chunk", "expected_output_tokens")
        require_at_most(self, 1000, "margin")  # no prediction is off by as much
        require_at_least(self, 0, "guard")

    def plan(self, view: StepView) -> Plan:
        """One step."""
        live = view.live
        step = begin(view, self.margin, self.max_chunk, rebase=False, expected_output=self.expected_output_tokens)
        if not step.prefills.size:
            return decode_only(step)
        found, rows = step.survey, step.prefills
        rho = self._rate.value(prior_rate(step.limit, step.full))
        bound, tpot = kernels("orders").sola_bound(
            *live.columns, step.decodes, view.start, self.expected_output_tokens, step.least
        )
        bound = min(bound, self._guard.bound(self.guard, step))
        order, must, ttft = kernels("orders").sola(live.columns[1], rows, found.remaining, rho, view.start, step.least)
        if tpot > ttft:
            # Decodes are worse off: only prompts that cannot wait for one more step of decodes.
            packed = step.packed(np.concatenate((rows[must], rows[~must]))) if must.any() else step.packed(rows[:0])
            if not packed.rows.size:  # a stream back from the prefix cache lacks blocks: half-done prompts go on
                packed = step.packed(order)
            _, chosen, tokens = step.queue(packed)
            most = int(found.remaining[rows[must]].sum())
            prefill = min(step.within(step.load(chosen, tokens), bound), most)
        else:
            packed = step.packed(order)
            _, chosen, tokens = step.queue(packed)
            prefill = step.within(step.load(chosen, tokens), bound)
            if prefill < int(tokens.sum()):
                prefill = prefill // self.tile * self.tile or prefill
        why = {"path": "tpot" if tpot > ttft else "ttft", "t_cur": bound, "ttft": ttft, "tpot": tpot, "greedy": prefill}
        plan = cut(step, packed, prefill, why)
        self._rate.planned(max(min(prefill, int(tokens.sum())), 0), plan.rows.size)
        return plan

    def observe(self, result: StepResult) -> None:
        """Learn the pace of prefills."""
        self._rate.observe(result.step_time, result.indices.size)
