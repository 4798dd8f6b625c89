"""Orca: iteration-level scheduling, whole prompts mixed with decodes, KV reserved for the longest output.

Every step runs all admitted requests; a new one is admitted first come first served when a seat is free and KV slots
for its prompt plus max_tokens can be set aside, so nothing is ever preempted. Its whole prompt runs in one step beside
the others' decodes, which therefore wait for it. Source: Yu et al., "Orca", OSDI 2022, sections 3 and 4. Ignores SLOs
and pipelining; Orca has no token budget, so where an engine's is too small a prompt waits for the next step, and one
that exceeds what decodes leave of a step is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from slacktide.core.policies._shared import (
    Phases,
    fitting,
    phases,
    require_at_least,
    reserved_decodes,
    reserved_room,
    smaller,
)
from slacktide.core.policy import register
from slacktide.core.types import IntArray, Plan, StepView


@register("orca")
@dataclass(frozen=True)
class Orca:
    """Iteration-level FCFS with reservation of the maximum length."""

    max_batch_size: int | None = None
    """Most admitted requests; none takes the engine's max_num_seqs."""
    decode_runs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Raise ValueError naming the parameter that is out of its range."""
        require_at_least(self, 1, "max_batch_size")

    def plan(self, view: StepView) -> Plan:
        """One step."""
        limits, now = view.limits, phases(view)
        decodes = reserved_decodes(view, now)
        if not now.waiting.size and not now.half_done.size:
            return Plan(decodes, np.ones_like(decodes))
        budget = limits.max_num_batched_tokens - decodes.size
        half_done, chunks = now.half_done, view.live.num_tokens_needed[now.half_done]
        if half_done.size:
            chunks = np.minimum(np.maximum(budget - np.cumsum(chunks) + chunks, 0), chunks)
            budget -= int(chunks.sum())
            half_done, chunks = half_done[chunks > 0], chunks[chunks > 0]
        new, tokens = self._admit(view, now, budget)
        return Plan(np.concatenate((decodes, half_done, new)), np.concatenate((np.ones_like(decodes), chunks, tokens)))

    def _admit(self, view: StepView, now: Phases, budget: int) -> tuple[IntArray, IntArray]:
        """New requests whose maximum length can be set aside and whose prompt fits the step, with their tokens."""
        live, limits, waiting = view.live, view.limits, now.waiting
        seats = smaller(limits.max_num_seqs, self.max_batch_size) - (now.running.size - waiting.size)
        if budget <= 0 or seats <= 0 or not waiting.size:
            return waiting[:0], waiting[:0]
        room, costs = reserved_room(view, now)
        waiting = waiting[: min(seats, fitting(costs, room))]
        needs = live.num_prompt_tokens[waiting] + live.num_output_tokens[waiting] - live.num_cached_tokens[waiting]
        whole = fitting(needs, budget)
        if not whole and waiting.size and not now.half_done.size:
            return waiting[:1], np.array([budget], dtype=np.int64)
        return waiting[:whole], needs[:whole]
