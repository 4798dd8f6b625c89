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

import numpy as np

from slacktide.core.bounded import DEFAULT_MARGIN, Step, begin, cut, decode_only, look
from slacktide.core.deadlines import windows
from slacktide.core.guard import ArrivalGuard
from slacktide.core.policies._shared import require_at_least, require_at_most
from slacktide.core.policy import register
from slacktide.core.priority import PrefillRate, edf_feasible, hybrid_key, prior_rate
from slacktide.core.types import RUNNING, BoolArray, FloatArray, IntArray, Plan, StepResult, StepView

_LAST = 1e9
"""Seconds added to a relegated prompt's key: behind every deadline, in the same order among themselves."""


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
        found = look(view, expected_output=self.expected_output_tokens)
        step = begin(view, found, self.margin, self.max_chunk)
        if not step.prefills.size:
            return decode_only(step)
        least = step.seconds(step.decode_load, 0)
        bounds, late = windows(found, least, 1, late_factor=self.late_factor)
        t_cur = min(float(bounds[0]), self._guard.bound(self.guard, step))
        rows = step.prefills
        slack, remaining, rho = found.slack[rows], found.remaining[rows], self._rho(step)
        misses = self._relegated(view, rows, slack, remaining, rho)
        out = misses | (view.live.relegated[rows] != 0)
        high = not edf_feasible(slack[~out], remaining[~out], rho)
        key = self._key(view, step, slack, remaining, rho, self.alpha if high else self.alpha_low, t_cur)
        packed = step.packed(rows[np.argsort(np.where(out, key + _LAST, key), kind="stable")])
        _, chosen, tokens = step.queue(packed)
        prefill = step.within(step.load(chosen, tokens), t_cur)
        why = {"path": "greedy", "t_cur": t_cur, "late_decodes": late, "greedy": prefill, "high_load": high}
        plan = cut(step, packed, prefill, why, rows[misses])
        self._rate.planned(max(min(prefill, int(tokens.sum())), 0), plan.rows.size)
        return plan

    def observe(self, result: StepResult) -> None:
        """Learn the pace of prefills."""
        self._rate.observe(result.step_time, result.indices.size)

    def _rho(self, step: Step) -> float:
        load = step.load(step.prefills[:1], np.array([step.limit]))
        return self._rate.value(prior_rate(step.limit, step.seconds(load, step.limit)))

    def _key(
        self, view: StepView, step: Step, slack: FloatArray, remaining: IntArray, rho: float, alpha: float, t_cur: float
    ) -> FloatArray:
        """Seconds, relative to now (the same order); a half-done prompt that cannot wait stands first.

        Batch work counts its expected output too; its slack already ends before that output must begin.
        """
        live, rows = view.live, step.prefills
        batch = np.isinf(live.slo_ttft[rows]) & np.isfinite(live.slo_e2e[rows])
        work = remaining + np.where(batch, np.maximum(self.expected_output_tokens - live.num_output_tokens[rows], 1), 0)
        slack = np.minimum(slack, _LAST / 4)  # no target: behind all that have one, shortest first
        key = hybrid_key(slack, work, alpha)
        if self.selective_preemption:
            spare = slack - remaining / rho
            one_step = min(step.limit / rho, t_cur)
            urgent = (live.status[rows] == RUNNING) & (spare >= 0) & (spare < one_step)
            key = np.where(urgent, -_LAST, key)
        return key

    def _relegated(
        self, view: StepView, rows: IntArray, slack: FloatArray, remaining: IntArray, rho: float
    ) -> BoolArray:
        """bool[m]: prompts to relegate now: predicted to miss, without KV, not relegated before."""
        live = view.live
        waiting: BoolArray = (live.status[rows] != RUNNING) & (live.relegated[rows] == 0)
        misses: BoolArray = waiting & (slack < remaining / rho) & (live.num_output_tokens[rows] == 0)
        if not self.relegation:
            return np.zeros_like(misses)
        if self.hints and misses.any():
            # Priority is vLLM's: larger is less important. Only the least important level present may be relegated.
            lowest = live.priority[rows][waiting].max()
            misses &= live.priority[rows] == lowest
        return misses
