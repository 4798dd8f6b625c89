"""LiveTable: the one store of live requests, as columns. Rows stay in (arrival_time, id) order.

The integers sit in one int64 matrix, the floats in one float64 matrix, a field per line: a kernel takes the two
matrices, a policy reads the named, read-only views of `Live`.
"""

from __future__ import annotations

import math

import numpy as np

from slacktide.core.kv import blocks_for
from slacktide.core.types import PREEMPTED, RUNNING, WAITING, FloatArray, IntArray, Live, Request

# Lines of the integer matrix, in the order of Live's fields.
(
    INDEX, STATUS, NUM_PROMPT, MAX_TOKENS, NUM_COMPUTED, NUM_OUTPUT, NUM_IN_FLIGHT, NUM_BLOCKS, NUM_CACHED,
    NUM_CACHED_FREE, PRIORITY, NUM_PREEMPTIONS, ADMISSION_ORDER, TENANT, SLO_CLASS, RELEGATED, NUM_SHARED,
) = range(17)  # fmt: skip
# Lines of the float matrix.
ARRIVAL, SLO_TTFT, SLO_TBT, SLO_E2E, FIRST_TOKEN, LAST_TOKEN = range(6)
NUM_INT_FIELDS, NUM_FLOAT_FIELDS = 17, 6


class LiveTable:
    """Owns the columns of all live requests."""

    def __init__(self, capacity: int = 256) -> None:
        self.ints: IntArray = np.zeros((NUM_INT_FIELDS, capacity), dtype=np.int64)
        self.floats: FloatArray = np.zeros((NUM_FLOAT_FIELDS, capacity), dtype=np.float64)
        self.n = 0
        self._live: Live | None = None

    def append(self, request: Request) -> int:
        """Add a waiting request; returns its row. Raises ValueError when it would break the (arrival, id) order."""
        n = self.n
        if n and (request.arrival_time, request.id) <= (self.floats[ARRIVAL, n - 1], self.ints[INDEX, n - 1]):
            raise ValueError(
                f"request {request.id} (arrival {request.arrival_time}) comes after request {self.ints[INDEX, n - 1]} "
                f"(arrival {self.floats[ARRIVAL, n - 1]}); rows must be appended in (arrival, id) order"
            )
        slo = request.slo
        self.append_row(
            (request.id, WAITING, request.num_prompt_tokens, request.max_tokens, 0, 0, 0, 0, 0, 0, request.priority,
             0, -1, request.tenant, request.slo_class, 0, 0),
            (request.arrival_time, slo.ttft, slo.tbt, slo.e2e, math.nan, math.nan),
        )  # fmt: skip
        return n

    def append_row(self, ints: object, floats: object) -> None:
        """Add a row given as its column values, in the order of the field numbers above. No checks: for hosts."""
        if self.n == self.ints.shape[1]:
            self.ints = np.concatenate([self.ints, np.zeros_like(self.ints)], axis=1)
            self.floats = np.concatenate([self.floats, np.zeros_like(self.floats)], axis=1)
        self.ints[:, self.n] = ints  # type: ignore[call-overload]
        self.floats[:, self.n] = floats  # type: ignore[call-overload]
        self.n += 1
        self._live = None

    def retire(self, rows: IntArray) -> None:
        """Drop rows; the others keep their order."""
        keep = np.ones(self.n, dtype=bool)
        keep[rows] = False
        left = int(keep.sum())
        self.ints[:, :left] = self.ints[:, : self.n][:, keep]
        self.floats[:, :left] = self.floats[:, : self.n][:, keep]
        self.resized(left)

    def resized(self, n: int) -> None:
        """Tell the table that a kernel dropped rows and left `n`."""
        self.n = n
        self._live = None

    @property
    def live(self) -> Live:
        """Read-only view of the rows; valid until rows are added or dropped. Values in it follow the table."""
        if self._live is None:
            ints, floats = self.ints.view(), self.floats.view()
            ints.flags.writeable = floats.flags.writeable = False
            n = self.n
            self._live = Live._make([*(c[:n] for c in ints), *(c[:n] for c in floats), (ints, floats)])
        return self._live

    def check(self, block_size: int) -> None:
        """Audit every row (AssertionError): statuses, counts and blocks agree, rows are in order.

        Blocks are checked against computed tokens for a host without look-ahead slots.
        """
        t = self.live
        assert np.all((t.status >= WAITING) & (t.status <= PREEMPTED)), "unknown status"
        running = t.status == RUNNING
        known = t.num_prompt_tokens + t.num_output_tokens + t.num_in_flight_tokens
        assert np.all((t.num_computed_tokens >= 0) & (t.num_computed_tokens <= known)), "more computed than known"
        assert np.all(t.num_output_tokens <= t.max_tokens), "more output than max_tokens"
        assert np.all(t.num_blocks == np.where(running, blocks_for(t.num_computed_tokens, block_size), 0)), (
            "held blocks do not match computed tokens"
        )
        assert np.all((t.admission_order >= 0) == running), "only running rows have an admission order"
        assert np.all(t.num_computed_tokens[~running] == 0), "a waiting row has computed tokens"
        later = (np.diff(t.arrival_time) > 0) | ((np.diff(t.arrival_time) == 0) & (np.diff(t.index) > 0))
        assert np.all(later), "rows are not in (arrival, id) order"
