"""QoServe (Niyama): hybrid priority, dynamic chunks, eager relegation.

Prompts are ordered by deadline + alpha * work: EDF while the load can be carried, shortest work first beyond; a prompt
that is predicted to miss is relegated before it takes time from others, low priorities first, and served from what is
left. Chunks are as large as the tightest decode allows. Source: "QoServe: Breaking the Silos of LLM Inference Serving"
(ASPLOS 2026; Niyama, arXiv 2503.22562) and its artifact. Not taken over: decodes by largest slack with a cap (it leaves
out the tightest), budgets in steps of 256, the estimate of the context from the queue's head, 128 tokens beside a late
decode (here the bound all policies share: late_factor).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from slacktide.core.bounded import DEFAULT_MARGIN, begin, cut, decode_only
from slacktide.core.deadlines import windows
from slacktide.core.guard import ArrivalGuard
from slacktide.core.loading import kernels
from slacktide.core.policies._shared import require_at_least, require_at_most
from slacktide.core.policy import register
from slacktide.core.priority import PrefillRate, prior_rate
from slacktide.core.types import Plan, StepResult, StepView


@register("qoserve")
@dataclass(frozen=True)
class QoServe:
    """Requests with a TTFT target are interactive; those with an end-to-end target alone are batch work."""

    alpha: float = 0.008
    """Seconds of priority per token of work when the load is high (the artifact's 8 ms)."""
    alpha_low: float = 0.001
    """The same while prompts by deadline would all be on time (the paper's 1 ms)."""
    relegation: bool = True
    """Relegate prompts that are predicted to miss."""
    hints: bool = True
    """Relegate a prompt of higher priority only while no lower one is left to relegate."""
    selective_preemption: bool = True
    """A half-done prompt is overtaken only if it can wait a step and still be on time."""
    margin: float = DEFAULT_MARGIN
    """Predicted times are multiplied by this before they are held against deadlines (the artifact: 1.2)."""
    max_chunk: int | None = None
    """Most tokens of a step; none takes the engine's max_num_batched_tokens (the paper: about 2500)."""
    late_factor: float = 1.0
    """A late decode bounds the step by this many times its TBT target."""
    guard: float = 0.0
    """Prompts lengthen a step by at most this many times the tightest recent TTFT target, for those who arrive
    during it; 0 is off."""
    expected_output_tokens: int = 256
    """Output tokens a request is expected to want (the paper's mean + 2 standard deviations of its application)."""
    _guard: ArrivalGuard = field(default_factory=ArrivalGuard, init=False, repr=False, compare=False)
    _rate: PrefillRate = field(default_factory=PrefillRate, init=False, repr=False, compare=False)
    decode_runs = True
    steerable = True

    def __post_init__(self) -> None:
        """Raise ValueError naming the parameter that is out of its range."""
        require_at_least(self, 1, "max_chunk", "margin", "expected_output_tokens")
        require_at_most(self, 1000, "margin")  # no prediction is off by as much
        require_at_least(self, 0, "guard")
        require_at_least(self, 0, "alpha", "alpha_low")
        require_at_most(self, 1e9, "alpha", "alpha_low")  # seconds a token
        require_at_least(self, 1e-3, "late_factor")

    def plan(self, view: StepView) -> Plan:
        """One step."""
        step = begin(view, self.margin, self.max_chunk, expected_output=self.expected_output_tokens)
        if not step.prefills.size:
            return decode_only(step)
        found = step.survey
        bounds, late = windows(found, step.least, 1, late_factor=self.late_factor)
        t_cur = min(float(bounds[0]), self._guard.bound(self.guard, step))
        rho = self._rate.value(prior_rate(step.limit, step.full))
        order, relegated, high = kernels("orders").qoserve(
            *view.live.columns, step.prefills, found.slack, found.remaining, rho, float(self.alpha),
            float(self.alpha_low), self.expected_output_tokens, min(step.limit / rho, t_cur), self.relegation,
            self.hints, self.selective_preemption,
        )  # fmt: skip
        packed = step.packed(order)
        _, chosen, tokens = step.queue(packed)
        prefill = step.within(step.load(chosen, tokens), t_cur)
        why = {"path": "greedy", "t_cur": t_cur, "late_decodes": late, "greedy": prefill, "high_load": high}
        plan = cut(step, packed, prefill, why, relegated)
        self._rate.planned(max(min(prefill, int(tokens.sum())), 0), plan.rows.size)
        return plan

    def observe(self, result: StepResult) -> None:
        """Learn the pace of prefills."""
        self._rate.observe(result.step_time, result.indices.size)
