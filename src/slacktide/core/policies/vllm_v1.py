"""vLLM's v1 scheduler (0.32): mixed batches under a token budget, running requests first.

Every request wants the tokens it knows minus those it has computed. Running requests are served in the order of their
admission, then waiting ones by arrival (or priority); decodes come first only because at most one prompt is ever half
done. Source: vllm/v1/core/sched/scheduler.py of vLLM 0.32.0, read for its rules. Ignores all SLOs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from slacktide.core.pack import WalkArguments, pack
from slacktide.core.policies._shared import (
    require_at_least,
    require_choice,
    require_share,
    smaller,
    watermark_blocks,
)
from slacktide.core.policy import register
from slacktide.core.types import RUNNING, FloatArray, IntArray, Limits, Plan, StepView

Victim = Literal["tail", "priority", "least-computed", "most-slack"]


@register("vllm-v1")
@dataclass(frozen=True)
class VllmV1:
    """Parameters are vLLM's own flags; 0 or None leaves the engine's value."""

    max_num_batched_tokens: int | None = None
    """Most tokens of a step; None takes the engine's."""
    long_prefill_token_threshold: int = 0
    """Most tokens of one prompt in a step, unless it is the only request; 0 is off."""
    long_prefill_token_threshold_adaptive: bool = False
    """Raise the threshold to an equal share of the budget where that is larger."""
    prefill_schedule_interval: int = 1
    """Prefill only in every N-th step, unless the last such step left requests waiting (vLLM: data-parallel only)."""
    watermark: float | None = None
    """Share of the KV blocks that admission leaves free; None takes the engine's."""
    scheduler_reserve_full_isl: bool = True
    """Admit a prompt only when blocks for all of it are free."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Order of the waiting queue."""
    victim: Victim | None = None
    """Who is preempted when blocks run out: tail (latest admitted; vLLM's fcfs), priority (largest priority value, then
    latest arrival; vLLM's priority), least-computed (least work lost), most-slack (latest next deadline). None takes
    vLLM's choice for the scheduling policy."""
    _cadence: dict[str, int] = field(default_factory=lambda: {"step": 0, "bound": 0}, init=False, repr=False)

    def __post_init__(self) -> None:
        """Raise ValueError naming the parameter that is out of its range."""
        require_at_least(self, 1, "max_num_batched_tokens", "prefill_schedule_interval")
        require_at_least(self, 0, "long_prefill_token_threshold")
        require_share(self, "watermark")
        require_choice(self, scheduling_policy=("fcfs", "priority"))
        require_choice(self, victim=(None, "tail", "priority", "least-computed", "most-slack"))

    @property
    def steerable(self) -> bool:
        """vLLM itself knows no other victim than that of its scheduling policy."""
        return self.victim in (None, "priority" if self.scheduling_policy == "priority" else "tail")

    @property
    def decode_runs(self) -> bool:
        """A step of plain decoding changes nothing here, unless steps are counted."""
        return self.prefill_schedule_interval == 1 and self.max_num_batched_tokens is None

    def walk_arguments(self, limits: Limits) -> WalkArguments | None:
        """The constant arguments of `walk` that make up the plan, unless something depends on the step."""
        plain = self.prefill_schedule_interval == 1 and self.long_prefill_token_threshold == 0
        if not plain or self.scheduling_policy != "fcfs" or self.victim not in (None, "tail"):
            return None
        own = watermark_blocks(limits, self.watermark)
        return WalkArguments(
            token_budget=smaller(limits.max_num_batched_tokens, self.max_num_batched_tokens),
            long_prefill_threshold=0,
            chunked_prefill=True,
            reserve_full_isl=self.scheduler_reserve_full_isl,
            watermark_blocks=limits.watermark_blocks if own is None else own,
        )

    def plan(self, view: StepView) -> Plan:
        """One step by vLLM's rules."""
        limits, n = view.limits, view.live.index.size
        budget = smaller(limits.max_num_batched_tokens, self.max_num_batched_tokens)
        threshold = self.long_prefill_token_threshold if n > 1 else 0
        if threshold > 0 and self.long_prefill_token_threshold_adaptive:
            threshold = max(threshold, budget // n)
        order = _priority_order(view) if self.scheduling_policy == "priority" else None
        defer = self._defers_prefill(view) if self.prefill_schedule_interval > 1 else False
        plan = pack(
            view,
            order,
            token_budget=budget,
            long_prefill_threshold=threshold,
            chunk_cap=_deferred_caps(view, order) if defer else None,
            victim_key=self._victim_key(view),
            reserve_full_isl=self.scheduler_reserve_full_isl,
            watermark_blocks=watermark_blocks(view.limits, self.watermark),
            list_rules=True,
        )
        if self.prefill_schedule_interval > 1:
            self._cadence["step"] += 1
            if not defer and not plan.preempted.size:
                waiting = int((view.live.status != RUNNING).sum())
                admitted = int((view.live.status[plan.rows] != RUNNING).sum())
                self._cadence["bound"] = int(waiting > admitted)
        return plan

    def _defers_prefill(self, view: StepView) -> bool:
        """vLLM's throttle: off its beat, while the queue was drained last time and something can decode.

        The beat starts anew when the engine was idle, that is when even the oldest request arrives only now.
        """
        if view.live.arrival_time[0] >= view.now:
            self._cadence["step"] = 0
        off_beat = self._cadence["step"] % self.prefill_schedule_interval != 0
        return off_beat and not self._cadence["bound"] and bool(view.live.is_decode.any())

    def _victim_key(self, view: StepView) -> FloatArray | None:
        victim = self.victim or ("priority" if self.scheduling_policy == "priority" else "tail")
        if victim == "priority":
            return view.live.priority.astype(np.float64)
        if victim == "least-computed":
            return -view.live.num_computed_tokens.astype(np.float64)
        if victim == "most-slack":
            return view.live.next_deadline
        return None


def _deferred_caps(view: StepView, order: IntArray | None) -> IntArray:
    """Caps of a step without prefills: decodes, and what leads the queue with all but its last token cached."""
    live = view.live
    caps = live.is_decode.astype(np.int64)
    rows = np.arange(caps.size) if order is None else order
    waiting = rows[live.status[rows] != RUNNING]
    one_token = live.num_tokens_needed[waiting] - live.num_cached_tokens[waiting] == 1
    caps[waiting[np.cumprod(one_token).astype(bool)]] = 1
    return caps


def _priority_order(view: StepView) -> IntArray:
    """Running rows by admission, then waiting rows by (priority, arrival)."""
    live = view.live
    running = live.status == RUNNING
    key = np.where(running, live.admission_order, live.priority)
    return np.asarray(np.lexsort((np.arange(key.size), key, ~running)), dtype=np.int64)
