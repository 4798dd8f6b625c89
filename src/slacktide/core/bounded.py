"""Steps bounded in time: what `greedy-dynamic`, `qoserve`, `sola` and `sliding` share.

All of them run every decode, then prompts in an order of their own, as many tokens as the predictor says fit the time
that the decodes have. They use the same survey, bounds, margin and packing, so that a comparison tells their orders and
searches apart and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from slacktide.core.chunker import Load, load_time, prefill_within
from slacktide.core.deadlines import Survey, survey, with_e2e
from slacktide.core.kinds import DECODE, PREFILL
from slacktide.core.pack import pack
from slacktide.core.types import IntArray, Plan, StepView

DEFAULT_MARGIN = 1.1
"""Predicted times count 10 % more: about the 90th percentile of the default predictor's error on mixed batches."""


@dataclass(slots=True)
class Step:
    """One decision in the making."""

    view: StepView
    survey: Survey
    margin: float
    limit: int
    """Most tokens of the step."""
    decodes: IntArray
    prefills: IntArray
    """Rows that have prompt tokens to compute, in (arrival, id) order."""

    @property
    def decode_load(self) -> Load:
        """The decodes alone."""
        return self.load(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))

    def load(self, rows: IntArray, tokens: IntArray) -> Load:
        """The decodes and the prompts `rows` with `tokens` each."""
        found = self.survey
        return Load(found.num_decodes, found.context, found.longest, tokens, found.computed[rows])

    def seconds(self, load: Load, prefill: int) -> float:
        """Predicted time with the margin on top."""
        return self.margin * load_time(self.view.latency, load, prefill)

    def within(self, load: Load, time: float) -> int:
        """Most prompt tokens within `time` seconds, margin included; -1 when the decodes alone take longer."""
        return prefill_within(self.view.latency, load, time / self.margin, self.limit)

    def packed(self, order: IntArray, chunk_cap: IntArray | None = None, limit: int | None = None) -> Plan:
        """Decodes, then the prompts `order`, as many as tokens, seats and blocks allow; time not looked at."""
        rows = np.concatenate((self.decodes, order)) if order.size else self.decodes
        return pack(self.view, rows, token_budget=self.limit if limit is None else limit, chunk_cap=chunk_cap)

    def queue(self, plan: Plan) -> tuple[int, IntArray, IntArray]:
        """(decodes in the plan, rows of its prompts, their tokens); decodes stand first."""
        first = int((self.survey.kind[plan.rows] != PREFILL).sum())
        return first, plan.rows[first:], plan.num_scheduled_tokens[first:]


def look(view: StepView, *, rebase: bool = True, expected_output: float = 256.0) -> Survey:
    """Survey the rows, end-to-end targets included; a decode step of now is the pace of streams without a TBT."""
    found = survey(view, rebase=rebase)
    if not np.isfinite(view.live.slo_e2e).any():
        return found
    none = np.empty(0, dtype=np.int64)
    decodes = Load(max(found.num_decodes, 1), found.context, found.longest, none, none)
    return with_e2e(view, found, expected_output, load_time(view.latency, decodes, 0))


def begin(view: StepView, survey: Survey, margin: float, max_chunk: int | None) -> Step:
    """Sort the rows by kind. Decodes that exceed the token budget run by deadline, others in the order of admission."""
    limit = view.limits.max_num_batched_tokens
    limit = limit if max_chunk is None else min(limit, max(max_chunk, survey.num_decodes))
    decodes = np.flatnonzero(survey.kind == DECODE)
    key = survey.slack if decodes.size > limit else view.live.admission_order
    rank = key[decodes]
    if decodes.size > 1 and not bool((rank[1:] > rank[:-1]).all()):
        decodes = decodes[np.argsort(rank, kind="stable")]
    return Step(view, survey, margin, limit, decodes, np.flatnonzero(survey.kind == PREFILL))


def decode_only(step: Step, why: dict[str, Any] | None = None) -> Plan:
    """All decodes, nothing else."""
    plan = step.packed(np.empty(0, dtype=np.int64))
    seconds = step.seconds(step.decode_load, 0) / step.margin if plan.rows.size else None
    return Plan(
        plan.rows, plan.num_scheduled_tokens, plan.preempted, token_cap=int(plan.num_scheduled_tokens.sum()),
        predicted_step_time=seconds, why=why,
    )  # fmt: skip


def cut(step: Step, plan: Plan, prefill: int, why: dict[str, Any], relegated: IntArray | None = None) -> Plan:
    """The packed plan with at most `prefill` prompt tokens, taken from its end.

    What is left was packed in the same order, so seats and blocks suffice and the composition is the predicted one.
    """
    first, rows, tokens = step.queue(plan)
    if first == 0 and prefill <= 0 and rows.size:  # no bound is worth an engine that stands still
        prefill = int(tokens[0])
    ends = np.cumsum(tokens)
    kept = int(np.searchsorted(ends, prefill, side="left")) + 1 if prefill > 0 else 0
    rows, tokens = rows[:kept], tokens[:kept].copy()
    if kept and kept <= ends.size and int(ends[kept - 1]) > prefill:
        tokens[-1] -= int(ends[kept - 1]) - prefill
    seconds = load_time(step.view.latency, step.load(rows, tokens), int(tokens.sum()))
    return Plan(
        np.concatenate((plan.rows[:first], rows)),
        np.concatenate((plan.num_scheduled_tokens[:first], tokens)),
        plan.preempted,
        relegated=np.empty(0, dtype=np.int64) if relegated is None else relegated,
        token_cap=first + int(tokens.sum()),
        predicted_step_time=seconds,
        why=why,
    )
