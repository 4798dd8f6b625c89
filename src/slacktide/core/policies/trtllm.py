"""TensorRT-LLM: a capacity scheduler (who may hold KV), then a micro-batch scheduler (who runs in this step).

guaranteed-no-evict admits a request only when blocks for its prompt plus max_tokens can be set aside, so that nobody
is ever evicted; max-utilization counts the next step's blocks alone and pauses the last started request when they run
out; static-batch admits only once the whole last batch has ended. In the step itself generation requests come first,
then context (prompt) chunks, first come first served or all at equal progress. Source: TensorRT-LLM's
capacityScheduler.cpp, microBatchScheduler.cpp and their Python twins. Ignores SLOs, block reuse across requests of
one step, adapters and beams; a prompt longer than the token budget, which TensorRT-LLM refuses when chunking is off,
is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from slacktide.core.kv import blocks_for
from slacktide.core.policies._shared import (
    Phases,
    fitting,
    phases,
    require_at_least,
    require_choice,
    reserved_decodes,
    reserved_room,
    smaller,
    uncached_tokens,
)
from slacktide.core.policy import register
from slacktide.core.types import IntArray, Plan, StepView

CapacityPolicy = Literal["guaranteed-no-evict", "max-utilization", "static-batch"]
Chunking = Literal["fcfs", "equal-progress", "off"]

_NONE: IntArray = np.empty(0, dtype=np.int64)
_NONE.flags.writeable = False


@register("trtllm")
@dataclass(frozen=True)
class TrtLlm:
    """Parameters by TensorRT-LLM's names; none leaves the engine's value."""

    capacity_scheduler_policy: CapacityPolicy = "guaranteed-no-evict"
    """Who may hold KV: guaranteed-no-evict, max-utilization or static-batch."""
    context_chunking_policy: Chunking = "fcfs"
    """How prompts share what generation leaves of the budget: fcfs, equal-progress, or off (whole prompts only)."""
    max_num_tokens: int | None = None
    """Most tokens of a step; none takes the engine's max_num_batched_tokens."""
    max_batch_size: int | None = None
    """Most requests in flight; none takes the engine's max_num_seqs."""

    def __post_init__(self) -> None:
        """Raise ValueError naming the parameter that is out of its range."""
        require_at_least(self, 1, "max_num_tokens", "max_batch_size")
        require_choice(self, capacity_scheduler_policy=("guaranteed-no-evict", "max-utilization", "static-batch"))
        require_choice(self, context_chunking_policy=("fcfs", "equal-progress", "off"))

    @property
    def decode_runs(self) -> bool:
        """An own token budget might be smaller than the number of decodes."""
        return self.max_num_tokens is None

    @property
    def steerable(self) -> bool:
        """vLLM cannot be told whom to pause."""
        return self.capacity_scheduler_policy != "max-utilization"

    def plan(self, view: StepView) -> Plan:
        """One step: capacity first, then the micro batch."""
        now, paused = phases(view), _NONE
        if self.capacity_scheduler_policy == "max-utilization":
            decodes, contexts, paused = self._max_utilization(view, now)
        else:
            decodes, contexts = reserved_decodes(view, now), self._reserving(view, now)
        budget = smaller(view.limits.max_num_batched_tokens, self.max_num_tokens)
        decodes = decodes[:budget]
        if not contexts.size:
            return Plan(decodes, np.ones_like(decodes), paused)
        chunks = self._chunks(uncached_tokens(view)[contexts], budget - decodes.size, budget, view.limits.block_size)
        contexts, chunks = contexts[chunks > 0], chunks[chunks > 0]
        return Plan(np.concatenate((decodes, contexts)), np.concatenate((np.ones_like(decodes), chunks)), paused)

    def _reserving(self, view: StepView, now: Phases) -> IntArray:
        """Contexts of the two policies that set blocks aside until completion."""
        num_running = now.running.size - now.waiting.size
        seats = smaller(view.limits.max_num_seqs, self.max_batch_size) - num_running
        if not now.waiting.size or seats <= 0 or (self.capacity_scheduler_policy == "static-batch" and num_running):
            return now.half_done
        room, costs = reserved_room(view, now)
        new = now.waiting[: min(seats, fitting(costs, room))]
        return np.concatenate((now.half_done, new)) if now.half_done.size else new

    def _max_utilization(self, view: StepView, now: Phases) -> tuple[IntArray, IntArray, IntArray]:
        """Walk all requests by arrival; where blocks run out, pause the last started one behind and try again."""
        live, limits = view.live, view.limits
        n, bs = live.index.size, limits.block_size
        # The next step's blocks: one more token for a decode, the whole prompt for a context.
        known = live.num_computed_tokens + live.num_tokens_needed
        blocks = blocks_for(known, bs) - live.num_blocks - (live.num_cached_tokens // bs - live.num_cached_free_blocks)
        if now.over is not None:
            blocks[now.over] = 0
        seats = smaller(limits.max_num_seqs, self.max_batch_size)
        free, end, paused = limits.num_free_blocks, n, list[int]()
        while (fits := min(fitting(blocks[:end], free), seats)) < end:
            started = np.flatnonzero(now.running[fits:end])
            if not started.size:
                break
            end = fits + int(started[-1])
            paused.append(end)
            free += int(live.num_blocks[end] - live.num_shared_blocks[end])
        contexts = np.flatnonzero(~now.decode[:fits])
        return now.decodes[now.decodes < fits], contexts, np.array(paused, dtype=np.int64)

    def _chunks(self, remaining: IntArray, capacity: int, budget: int, unit: int) -> IntArray:
        """Tokens of each context in this step; a chunk that ends no prompt is whole units (KV blocks)."""
        total = np.cumsum(remaining)
        if int(total[-1]) <= capacity:
            return remaining
        if self.context_chunking_policy == "off":
            chunks = np.where(total <= capacity, remaining, 0)
            if int(remaining[0]) > budget:  # no step could ever hold it
                chunks[0] = capacity
        elif self.context_chunking_policy == "fcfs":
            chunks = _chunks_fcfs(remaining, total, capacity, unit)
        else:
            chunks = _chunks_equal(remaining, capacity, unit)
        if capacity == budget and not chunks.any():
            chunks[0] = min(int(remaining[0]), capacity)  # a budget below one unit: TensorRT-LLM would not start
        return chunks


def _chunks_fcfs(remaining: IntArray, total: IntArray, capacity: int, unit: int) -> IntArray:
    """Whole prompts while they fit, then one cut down to whole units, then any that fit into the rest."""
    chunks = np.where(total <= capacity, remaining, 0)
    at = int(np.searchsorted(total, capacity, side="right"))
    left = capacity - (int(total[at - 1]) if at else 0)
    while at < remaining.size and left > 0:
        chunk = int(min(remaining[at], left // unit * unit if remaining[at] > left else left))
        chunks[at] = chunk
        left -= chunk
        ahead = np.flatnonzero((remaining[at + 1 :] <= left) | (left >= unit))
        at = at + 1 + int(ahead[0]) if ahead.size else remaining.size
    return chunks


def _chunks_equal(remaining: IntArray, capacity: int, unit: int) -> IntArray:
    """One unit to each in turn until nothing fits."""
    low, high = 0, capacity // unit + 1  # whole rounds that fit: the total grows with their number
    while low < high:
        middle = (low + high + 1) // 2
        if int(np.minimum(remaining, middle * unit).sum()) <= capacity:
            low = middle
        else:
            high = middle - 1
    chunks = np.minimum(remaining, low * unit)
    left, moved = capacity - int(chunks.sum()), True
    while moved and left > 0:
        moved = False
        for i, (chunk, rest) in enumerate(zip(chunks.tolist(), remaining.tolist(), strict=True)):
            step = min(unit, rest - chunk)
            if 0 < step <= left:
                chunks[i] += step
                left -= step
                moved = True
    return chunks
