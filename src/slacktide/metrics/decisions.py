"""What the policy decided in each step of a run: prompt chunks, preemptions, its forecast and its reason.

Not part of a `RunLog`, because writing it down costs a simulated run its compiled stretches: a run has it only when
somebody asked (a timeline, an explanation, a report). Who decodes in a step stands in the log's tokens already.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from slacktide.core.types import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class Decisions:
    """Decisions of a run of m steps. Steps are positions in its log, requests its rows; both rise within a column pair.

    Raises ValueError for columns whose lengths do not fit.
    """

    num_steps: int
    chunk_step: IntArray
    """int64[c]: step of each prompt chunk, rising. A chunk may be tokens computed again after a preemption."""
    chunk_request: IntArray
    chunk_tokens: IntArray
    preempted_step: IntArray
    """int64[p]: the step decided together with a preemption, or the next one where nothing else ran; rising.
    `num_steps` where no step followed."""
    preempted_request: IntArray
    predicted: FloatArray
    """float64[m] seconds the policy expected of the step; NaN where it said nothing."""
    reason: IntArray
    """int64[m]: position in `reasons`."""
    reasons: tuple[str, ...]
    """The policy's `why` as JSON texts; "" where it gave none."""

    def __post_init__(self) -> None:
        for name in ("predicted", "reason"):
            if len(getattr(self, name)) != self.num_steps:
                raise ValueError(
                    f"Decisions: {name}: expected {self.num_steps} steps, found {len(getattr(self, name))}"
                )
        chunks = {len(column) for column in (self.chunk_step, self.chunk_request, self.chunk_tokens)}
        if len(chunks) > 1 or len(self.preempted_step) != len(self.preempted_request):
            raise ValueError("Decisions: chunks and preemptions: expected columns of one length")
        top = int(self.reason.max(initial=-1))
        if top >= len(self.reasons) or int(self.chunk_step.max(initial=-1)) >= self.num_steps:
            raise ValueError(f"Decisions: expected {self.num_steps} steps and {len(self.reasons)} reasons")

    def why(self, step: int) -> str:
        """The policy's reason for a step, "" for none."""
        return self.reasons[int(self.reason[step])]

    @cached_property
    def _chunks(self) -> tuple[IntArray, IntArray]:
        return _by_request(self.chunk_request)

    @cached_property
    def _preemptions(self) -> tuple[IntArray, IntArray]:
        return _by_request(self.preempted_request)

    def chunks_of(self, request: int) -> tuple[IntArray, IntArray]:
        """(steps, tokens) of a request's prompt chunks, in order."""
        rows = _find(self._chunks, request)
        return self.chunk_step[rows], self.chunk_tokens[rows]

    def preemptions_of(self, request: int) -> IntArray:
        """The steps at which a request lost its KV, in order."""
        return self.preempted_step[_find(self._preemptions, request)]


def _by_request(requests: IntArray) -> tuple[IntArray, IntArray]:
    order = np.argsort(requests, kind="stable")
    return order, requests[order]


def _find(index: tuple[IntArray, IntArray], request: int) -> IntArray:
    order, sorted_requests = index
    low, high = np.searchsorted(sorted_requests, [request, request + 1])
    return order[low:high]
