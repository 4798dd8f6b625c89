"""A policy whose plans a test writes down: request number -> tokens, for each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slacktide.core.types import RUNNING, IntArray, Plan, StepResult, StepView

Script = Callable[[StepView, int], Any]
"""(view, step) -> Plan, or whatever a broken policy returns."""


def rows_of(view: StepView, numbers: list[int]) -> IntArray:
    """Rows of requests, by the order in which they arrived."""
    row = {int(index): i for i, index in enumerate(view.live.index)}
    return np.array([row[number] for number in numbers if number in row], dtype=np.int64)


def plan(view: StepView, tokens: dict[int, int], **parts: Any) -> Plan:
    """A plan by request numbers; `preempted`, `rejected` and `relegated` are lists of them."""
    named = {k: rows_of(view, v) if k in ("preempted", "rejected", "relegated") else v for k, v in parts.items()}
    here = {number: t for number, t in tokens.items() if number in set(view.live.index.tolist())}
    return Plan(rows_of(view, list(here)), np.array(list(here.values()), dtype=np.int64), **named)


def needs(view: StepView) -> dict[int, int]:
    """Request number -> tokens it needs, running rows first; none for one that its step in flight surely ends."""
    live = view.live
    order = np.lexsort((np.arange(live.index.size), live.status != RUNNING))
    known = live.num_prompt_tokens + live.num_output_tokens + live.num_in_flight_tokens
    base = np.where(live.status == RUNNING, live.num_computed_tokens, live.num_cached_tokens)
    ends = (live.num_in_flight_tokens > 0) & (live.num_output_tokens + live.num_in_flight_tokens >= live.max_tokens)
    return {int(live.index[r]): int(known[r] - base[r]) for r in order if known[r] > base[r] and not ends[r]}


def running(view: StepView) -> set[int]:
    """Numbers of running requests."""
    return set(view.live.index[view.live.status == RUNNING].tolist())


@dataclass
class Scripted:
    """Follows a script; keeps what it planned and what it was told."""

    script: Script
    step: int = 0
    planned: list[dict[int, int] | None] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)
    views: list[Any] = field(default_factory=list)

    def plan(self, view: StepView) -> Any:
        self.step += 1
        self.views.append((view.limits, view.live.relegated.copy(), view.live.index.copy()))
        made = self.script(view, self.step - 1)
        good = isinstance(made, Plan)
        numbers = view.live.index[made.rows].tolist() if good and made.rows.dtype.kind == "i" else []
        self.planned.append(dict(zip(numbers, made.num_scheduled_tokens.tolist(), strict=False)) if good else None)
        return made

    def observe(self, result: StepResult) -> None:
        self.results.append(result)
