"""Shadow mode: our plan beside what vLLM does, one step ahead.

"On time" asks of every output token that a step would yield whether it is due no earlier than the step's predicted end.
It compares the two schedules from the same state in every step; it does not follow our schedule on its own way. For
that, capture the traffic and simulate it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from slacktide.core.live import NUM_IN_FLIGHT, NUM_OUTPUT, NUM_PROMPT
from slacktide.core.types import RUNNING, FloatArray, IntArray, Plan, StepView
from slacktide.vllm.metrics import Metrics
from slacktide.vllm.mirror import Mirror


class Ours(NamedTuple):
    """Our plan's forecast."""

    step_time: float
    on_time: int
    emitted: int


def yielding(mirror: Mirror, rows: IntArray, tokens: IntArray, base: IntArray) -> IntArray:
    """Of `rows` with `tokens` on top of `base` computed ones, those whose step yields an output token."""
    ints = mirror.table.ints
    known = ints[NUM_PROMPT, rows] + ints[NUM_OUTPUT, rows] + ints[NUM_IN_FLIGHT, rows]
    found: IntArray = rows[base + tokens >= known]
    return found


def on_time(mirror: Mirror, rows: IntArray, end: float) -> int:
    """How many of `rows` have their next token due at or after `end`."""
    return int((mirror.table.live.next_deadline[rows] >= end).sum())


def forecast(mirror: Mirror, view: StepView, plan: Plan, shown: IntArray | None) -> Ours:
    """What our plan would yield, at its own or the belief's step time."""
    live, rows, tokens = view.live, plan.rows, plan.num_scheduled_tokens
    base = np.where(live.status[rows] == RUNNING, live.num_computed_tokens[rows], live.num_cached_tokens[rows])
    time = plan.predicted_step_time
    if time is None:
        time = view.latency.step_time(tokens, base, live.is_decode[rows]) if rows.size else 0.0
    mine = yielding(mirror, rows if shown is None else shown[rows], tokens, base)
    return Ours(float(time), on_time(mirror, mine, view.now + time), int(mine.size))


def compare(
    metrics: Metrics, wanted: dict[str, int], ours: Ours, scheduled: dict[str, int], due: FloatArray, end: float
) -> dict[str, Any]:
    """Our plan beside vLLM's step, which yields the tokens that are `due` and is predicted to end at `end`.

    Counts, and returns the entry of the step log.
    """
    stock_on_time, emitted = int((due >= end).sum()), int(due.size)
    same = wanted == dict(scheduled)
    metrics.add("shadow_steps", "yes" if same else "no")
    for schedule, good, every in (("ours", ours.on_time, ours.emitted), ("stock", stock_on_time, emitted)):
        metrics.add("shadow_tokens", schedule, "yes", by=good)
        metrics.add("shadow_tokens", schedule, "no", by=every - good)
    return {
        "same": same,
        "rows_ours": len(wanted),
        "tokens_ours": sum(wanted.values()),
        "only_ours": len(wanted.keys() - scheduled.keys()),
        "only_stock": len(scheduled.keys() - wanted.keys()),
        "predicted_ours_s": ours.step_time,
        "on_time_ours": ours.on_time,
        "emitted_ours": ours.emitted,
        "on_time_stock": stock_on_time,
        "emitted_stock": emitted,
    }
