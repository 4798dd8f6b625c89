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
from slacktide.core.deadlines import Survey, with_e2e
from slacktide.core.kinds import PREFILL
from slacktide.core.loading import kernels
from slacktide.core.pack import pack
from slacktide.core.shape import SHAPE_SIZE
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
    least: float
    """Predicted seconds of the decodes alone; as all times here with the margin on top."""
    smallest: float
    """The same with one token of the first prompt."""
    full: float
    """The same with as many tokens of the first prompt as the step may have."""

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
        first, rows = self.decodes.size, plan.rows
        if first and not (rows.size >= first and rows[first - 1] == self.decodes[-1]):  # not all of them fit
            first = int((self.survey.kind[rows] != PREFILL).sum())
        return first, rows[first:], plan.num_scheduled_tokens[first:]


def begin(
    view: StepView, margin: float, max_chunk: int | None, *, rebase: bool = True, expected_output: float = 256.0
) -> Step:
    """Survey the rows, end-to-end targets included, and sort them by kind (compiled: `kernels_bounded.begin`).

    A decode step of now is the pace of streams without a TBT. Decodes that exceed the token budget run by deadline,
    others in the order of admission.
    """
    live, limits = view.live, view.limits
    n = live.index.size
    columns, times = np.empty((5, n), dtype=np.int64), np.empty((2, n))
    num_decodes, context, longest, listed, num_prefills, limit, in_order, has_e2e, least, smallest, full = (
        kernels("bounded").begin(
            *live.columns, n, view.start, limits.max_model_len, rebase, view.latency.packed,
            limits.max_num_batched_tokens, max_chunk or 0, columns, times, np.empty(SHAPE_SIZE),
        )
    )  # fmt: skip
    found = Survey(columns[0], times[0], times[1], columns[1], columns[2], num_decodes, context, longest)
    if has_e2e:
        none = columns[0, :0]
        found = with_e2e(
            view,
            found,
            expected_output,
            load_time(view.latency, Load(max(num_decodes, 1), context, longest, none, none), 0),
        )
    decodes = columns[3, :listed]
    if listed > limit or not in_order:
        rank = (found.slack if listed > limit else live.admission_order)[decodes]
        decodes = decodes[np.argsort(rank, kind="stable")]
    prefills = columns[4, :num_prefills]
    return Step(view, found, margin, limit, decodes, prefills, margin * least, margin * smallest, margin * full)


def decode_only(step: Step, why: dict[str, Any] | None = None) -> Plan:
    """All decodes, nothing else."""
    plan = step.packed(step.prefills[:0])
    return Plan(
        plan.rows, plan.num_scheduled_tokens, plan.preempted, token_cap=int(plan.num_scheduled_tokens.sum()),
        predicted_step_time=step.least / step.margin if plan.rows.size else None, why=why,
    )  # fmt: skip


def cut(step: Step, plan: Plan, prefill: int, why: dict[str, Any], relegated: IntArray | None = None) -> Plan:
    """The packed plan with at most `prefill` prompt tokens, taken from its end; `plan` is used up.

    What is left was packed in the same order, so seats and blocks suffice and the composition is the predicted one.
    """
    first, _, tokens = step.queue(plan)
    if first == 0 and prefill <= 0 and tokens.size:  # no bound is worth an engine that stands still
        prefill = int(tokens[0])
    found = step.survey
    kept, total, seconds = kernels("bounded").cut(
        plan.rows, plan.num_scheduled_tokens, first, prefill, found.computed, step.view.latency.packed,
        float(found.num_decodes), found.context, found.longest, np.empty(SHAPE_SIZE),
    )  # fmt: skip
    return Plan(
        plan.rows[:kept], plan.num_scheduled_tokens[:kept], plan.preempted,
        relegated=step.prefills[:0] if relegated is None else relegated,
        token_cap=first + total, predicted_step_time=seconds, why=why,
    )  # fmt: skip
