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
    blocks_to_completion,
    by_admission,
    fitting,
    require_at_least,
    runnable_decodes,
    smaller,
    uncached_tokens,
    with_room,
)
from slacktide.core.policy import register
from slacktide.core.types import RUNNING, Plan, StepView


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
        live, limits = view.live, view.limits
        decodes = with_room(view, runnable_decodes(view))
        if decodes.size == live.index.size:
            return Plan(decodes, np.ones_like(decodes))
        running = live.status == RUNNING
        budget = limits.max_num_batched_tokens - decodes.size
        needs, reserve = uncached_tokens(view), blocks_to_completion(view)
        half_done = by_admission(view, np.flatnonzero(running & ~live.is_decode))
        chunks = np.minimum(needs[half_done], np.maximum(budget - np.cumsum(needs[half_done]) + needs[half_done], 0))
        budget -= int(chunks.sum())

        waiting = np.flatnonzero(~running)
        seats = smaller(limits.max_num_seqs, self.max_batch_size) - int(running.sum())
        room = limits.num_free_blocks - int(reserve[running].sum())
        waiting = waiting[: min(max(seats, 0), fitting(reserve[waiting], room))]
        whole = fitting(needs[waiting], budget)
        new, tokens = waiting[:whole], needs[waiting[:whole]]
        if not whole and waiting.size and budget > 0 and not half_done.size:
            new, tokens = waiting[:1], np.array([budget], dtype=np.int64)
        half_done, chunks = half_done[chunks > 0], chunks[chunks > 0]
        return Plan(
            np.concatenate((decodes, half_done, new)),
            np.concatenate((np.ones_like(decodes), chunks, tokens)),
        )
