"""What the policy gets to see of a vLLM scheduler: limits, hidden rows, prefix hits, shared blocks."""

from __future__ import annotations

from typing import Any

import numpy as np

from slacktide.core.kv import blocks_for
from slacktide.core.latency import LatencyModel
from slacktide.core.live import (
    NUM_BLOCKS,
    NUM_CACHED,
    NUM_CACHED_FREE,
    NUM_IN_FLIGHT,
    NUM_OUTPUT,
    NUM_PROMPT,
    NUM_SHARED,
    STATUS,
)
from slacktide.core.types import RUNNING, IntArray, Limits, StepResult, StepView
from slacktide.vllm import compat
from slacktide.vllm.mirror import Mirror

_NONE: IntArray = np.empty(0, dtype=np.int64)


class Viewer:
    """Builds a StepView from a scheduler and its mirror."""

    def __init__(self, scheduler: Any, mirror: Mirror, prefix_lookups: int) -> None:
        self._scheduler, self._mirror, self._prefix_lookups = scheduler, mirror, prefix_lookups
        self._caching = compat.prefix_caching(scheduler)
        self._chained = self._caching and compat.chained_prefixes(scheduler)

    def seats(self) -> int:
        """Requests that may run: vLLM's bound on admission, less the seats of paused sessions."""
        scheduler = self._scheduler
        return int(getattr(scheduler, compat.admission_lever(scheduler)) - scheduler.num_waiting_for_streaming_input)

    def view(
        self, now: float, belief: LatencyModel, last: StepResult | None, busy_until: float
    ) -> tuple[StepView, IntArray | None]:
        """The policy's view, and the mirror's row behind each of its rows (None: the same)."""
        scheduler, mirror = self._scheduler, self._mirror
        hidden, seats = self._hidden(), self.seats()
        free = compat.num_free_blocks(scheduler)
        budget = int(scheduler.max_num_scheduled_tokens)
        if self._caching:
            self._look_up_prefixes(hidden, seats)
            self._count_shared(free, budget)
        limits = Limits(
            budget, seats, mirror.block_size, free, compat.num_usable_blocks(scheduler),
            int(scheduler.kv_cache_manager.watermark_blocks), int(scheduler.max_model_len),
        )  # fmt: skip
        live, shown = mirror.view(hidden)
        return StepView(now, live, limits, belief, last, mirror.targets.tenants.names, busy_until), shown

    def _hidden(self) -> IntArray:
        """Rows of waiting requests that vLLM could not admit now."""
        mirror = self._mirror
        if not mirror.blocked:
            return _NONE
        ready = [slot for slot in mirror.blocked if compat.is_ready(mirror.objects[slot])]
        mirror.blocked.difference_update(ready)
        return np.sort(mirror.row_of_slot[sorted(mirror.blocked)])

    def _look_up_prefixes(self, hidden: IntArray, seats: int) -> None:
        """What the prefix cache holds for the first waiting requests; pointless while no seat is free."""
        ints, n = self._mirror.table.ints, self._mirror.table.n
        if not n > len(self._scheduler.running) < seats:
            return
        waiting = np.flatnonzero(ints[STATUS, :n] != RUNNING)
        if hidden.size:
            waiting = waiting[~np.isin(waiting, hidden)]
        if self._scheduler.policy.value == "priority":
            waiting = waiting[np.argsort(self._mirror.table.live.priority[waiting], kind="stable")]
        rows = waiting[: self._prefix_lookups]
        requests = [self._mirror.objects[slot] for slot in self._mirror.slot_of_row[rows].tolist()]
        hits, unheld = compat.cache_hits(self._scheduler, requests, chained=self._chained)
        ints[NUM_CACHED, rows], ints[NUM_CACHED_FREE, rows] = hits, unheld

    def _count_shared(self, free: int, budget: int) -> None:
        """Blocks that a preemption would not free, counted only when this step may have to preempt."""
        if free >= len(self._scheduler.running) + budget // self._mirror.block_size:
            return
        ints, n = self._mirror.table.ints, self._mirror.table.n
        running = np.flatnonzero(ints[STATUS, :n] == RUNNING)
        known = ints[NUM_PROMPT, running] + ints[NUM_OUTPUT, running] + ints[NUM_IN_FLIGHT, running]
        more = np.maximum(blocks_for(known, self._mirror.block_size) - ints[NUM_BLOCKS, running], 0).sum()
        if free >= min(int(more), running.size + budget // self._mirror.block_size):
            return
        slots = self._mirror.slot_of_row[running].tolist()
        ints[NUM_SHARED, running] = [compat.num_shared_blocks(self._scheduler, self._mirror.objects[i]) for i in slots]
