"""The mirror: vLLM's live requests as a LiveTable, one row each, only touched rows refreshed.

A request keeps its slot for life; its row moves as others come and go. vLLM's `Request` objects stay the truth: columns
that a step changes are read from them, never computed twice. Rows are in (arrival_time, number) order; the number is
given in the order in which the scheduler got the requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from slacktide.core.kv import blocks_for
from slacktide.core.live import (
    ADMISSION_ORDER,
    ARRIVAL,
    FIRST_TOKEN,
    INDEX,
    LAST_TOKEN,
    MAX_TOKENS,
    NUM_BLOCKS,
    NUM_CACHED,
    NUM_CACHED_FREE,
    NUM_COMPUTED,
    NUM_FLOAT_FIELDS,
    NUM_IN_FLIGHT,
    NUM_INT_FIELDS,
    NUM_OUTPUT,
    NUM_PREEMPTIONS,
    NUM_PROMPT,
    NUM_SHARED,
    PRIORITY,
    RELEGATED,
    SLO_CLASS,
    SLO_E2E,
    SLO_TBT,
    SLO_TTFT,
    STATUS,
    TENANT,
    LiveTable,
)
from slacktide.core.types import PREEMPTED, RUNNING, WAITING, BoolArray, IntArray, Live
from slacktide.vllm.targets import Targets


class Mirror:
    """Rows of a scheduler's live requests. Times are seconds since `epoch` (Unix time)."""

    def __init__(self, targets: Targets, block_size: int, epoch: float) -> None:
        self.targets, self.block_size, self.epoch = targets, block_size, epoch
        self.table = LiveTable(1024)
        self.objects: list[Any] = []
        """vLLM's Request by slot; None in a free slot."""
        self.ids: list[str] = []
        """Request ids by slot."""
        self.slot_of: dict[str, int] = {}
        self.row_of_slot: IntArray = np.full(1024, -1, dtype=np.int64)
        self.slot_of_row: IntArray = np.full(1024, -1, dtype=np.int64)
        self.blocked: set[int] = set()
        """Slots of waiting requests that vLLM may not be able to admit yet (see compat.is_ready)."""
        self.missed: IntArray = np.zeros(1024, dtype=np.int64)
        """By slot: which targets the request has missed so far (bits of outcome.MISSED_TTFT, MISSED_TBT)."""
        self.stale: BoolArray = np.zeros(1024, dtype=bool)
        """By slot: scheduled since vLLM's numbers were read last."""
        self._free: list[int] = []
        self._next_index = 0
        self.next_admission = 0
        """Number of the next admission: ADMISSION_ORDER."""

    def __len__(self) -> int:
        return self.table.n

    def clear(self) -> None:
        """Forget every row; numbers go on."""
        self.table.resized(0)
        self.objects.clear()
        self.ids.clear()
        self.slot_of.clear()
        self.blocked.clear()
        self._free.clear()
        self.row_of_slot[:] = self.slot_of_row[:] = -1
        self.stale[:] = False

    # ---- coming and going ----------------------------------------------------------------------------------------

    def add(self, request: Any, now: float, *, blocked: bool = False) -> None:
        """A new waiting request. One that says it arrives later than now (another machine's clock) arrives now."""
        if request.request_id in self.slot_of:
            self.retire([request.request_id])
        slot = self._free.pop() if self._free else len(self.objects)
        if slot == len(self.objects):
            self.objects.append(None)
            self.ids.append("")
        self.objects[slot], self.ids[slot] = request, request.request_id
        self.slot_of[request.request_id] = slot
        if blocked:
            self.blocked.add(slot)
        arrival = min(float(request.arrival_time) - self.epoch, now)
        self._insert(slot, request, arrival)

    def _insert(self, slot: int, request: Any, arrival: float) -> None:
        """Append the row, then move it up past rows that arrived later: requests reach the engine slightly mixed up,
        because long prompts take longer to tokenise."""
        slo, slo_class, tenant = self.targets.of(getattr(request.sampling_params, "extra_args", None))
        ints, floats = [0] * NUM_INT_FIELDS, [math.nan] * NUM_FLOAT_FIELDS
        ints[INDEX], ints[STATUS] = self._next_index, WAITING
        ints[NUM_PROMPT], ints[MAX_TOKENS] = request.num_prompt_tokens, request.max_tokens
        ints[NUM_OUTPUT], ints[NUM_PREEMPTIONS] = request.num_output_tokens, request.num_preemptions
        ints[PRIORITY], ints[TENANT], ints[SLO_CLASS], ints[ADMISSION_ORDER] = request.priority, tenant, slo_class, -1
        floats[ARRIVAL] = arrival
        floats[SLO_TTFT], floats[SLO_TBT], floats[SLO_E2E] = slo.ttft, slo.tbt, slo.e2e
        self._next_index += 1
        table, n = self.table, self.table.n
        table.append_row(ints, floats)
        capacity = table.ints.shape[1]
        if capacity > self.slot_of_row.size:
            self.slot_of_row = _grown(self.slot_of_row, capacity)
        if slot >= self.row_of_slot.size:
            self.row_of_slot = _grown(self.row_of_slot, 2 * slot)
            self.missed = _grown(self.missed, 2 * slot)
            self.stale = np.concatenate([self.stale, np.zeros(2 * slot - self.stale.size, dtype=bool)])
        self.missed[slot], self.stale[slot] = 0, False
        at = int(np.searchsorted(table.floats[ARRIVAL, :n], arrival, side="right"))
        self.slot_of_row[n] = slot
        if at < n:
            order = np.concatenate([np.arange(at), [n], np.arange(at, n)])
            table.ints[:, : n + 1] = table.ints[:, order]
            table.floats[:, : n + 1] = table.floats[:, order]
            self.slot_of_row[: n + 1] = self.slot_of_row[order]
        self._number_rows(at)

    def _number_rows(self, start: int = 0) -> None:
        n = self.table.n
        self.row_of_slot[self.slot_of_row[start:n]] = np.arange(start, n)

    def retire(self, request_ids: Iterable[str]) -> None:
        """Drop rows of requests that ended; ids that are not here are ignored."""
        slots = [slot for slot in (self.slot_of.pop(i, None) for i in request_ids) if slot is not None]
        if not slots:
            return
        rows = self.row_of_slot[slots]
        keep = np.ones(self.table.n, dtype=bool)
        keep[rows] = False
        left = self.table.n - len(slots)
        self.slot_of_row[:left] = self.slot_of_row[: self.table.n][keep]
        self.table.retire(rows)
        self.row_of_slot[slots] = -1
        self.stale[slots] = False
        for slot in slots:
            self.objects[slot] = None
            self.blocked.discard(slot)
        self._free.extend(slots)
        self._number_rows(int(rows.min()))

    # ---- refreshing ----------------------------------------------------------------------------------------------

    def slots(self, request_ids: Iterable[str]) -> list[int]:
        """Slots of requests that are here, in order."""
        slot_of = self.slot_of
        return [slot_of[i] for i in request_ids if i in slot_of]

    def admitted(self, rows: IntArray) -> None:
        """Rows among `rows` that vLLM moved into its running list in this step, in that order."""
        ints = self.table.ints
        fresh = rows[ints[STATUS, rows] != RUNNING]
        if fresh.size:
            ints[STATUS, fresh] = RUNNING
            ints[ADMISSION_ORDER, fresh] = np.arange(self.next_admission, self.next_admission + fresh.size)
            ints[NUM_CACHED, fresh] = ints[NUM_CACHED_FREE, fresh] = 0
            self.next_admission += int(fresh.size)

    def preempted(self, request_ids: Iterable[str]) -> IntArray:
        """Mark requests that lost their KV: they wait again. Returns their rows."""
        slots = self.slots(request_ids)
        rows = self.row_of_slot[slots]
        ints = self.table.ints
        ints[STATUS, rows], ints[ADMISSION_ORDER, rows] = PREEMPTED, -1
        ints[NUM_COMPUTED, rows] = ints[NUM_IN_FLIGHT, rows] = ints[NUM_BLOCKS, rows] = ints[NUM_SHARED, rows] = 0
        ints[NUM_PREEMPTIONS, rows] = [self.objects[slot].num_preemptions for slot in slots]
        self.blocked.update(slots)  # tokens in flight must be delivered before it may resume
        return rows

    def stale_rows(self) -> tuple[IntArray, IntArray]:
        """Slots and rows scheduled since vLLM's numbers were read last."""
        slots = np.flatnonzero(self.stale)
        return slots, self.row_of_slot[slots]

    def catch_up(self) -> None:
        """Read what is stale yet, as before the output of any step came (pipeline parallel)."""
        slots, rows = self.stale_rows()
        if slots.size:
            self.refresh(slots, rows, outputs=False)

    def refresh(self, slots: IntArray, rows: IntArray, *, outputs: bool) -> None:
        """Read from vLLM's objects what a step changed: computed tokens, blocks, placeholders; `outputs`: those too."""
        ints = self.table.ints
        self.stale[slots] = False
        requests = list(map(self.objects.__getitem__, slots.tolist()))
        ints[NUM_COMPUTED, rows] = [r.num_computed_tokens for r in requests]
        ints[NUM_IN_FLIGHT, rows] = [r.num_output_placeholders for r in requests]
        if outputs:
            ints[NUM_OUTPUT, rows] = [r.num_output_tokens for r in requests]
        held = blocks_for(ints[NUM_COMPUTED, rows], self.block_size)
        ints[NUM_BLOCKS, rows] = np.where(ints[STATUS, rows] == RUNNING, np.maximum(held, ints[NUM_BLOCKS, rows]), 0)

    def tokens_out(self, rows: IntArray, now: float) -> None:
        """Rows that just got output tokens."""
        floats = self.table.floats
        first = rows[np.isnan(floats[FIRST_TOKEN, rows])]
        floats[FIRST_TOKEN, first] = now
        floats[LAST_TOKEN, rows] = now

    def relegate(self, rows: IntArray) -> None:
        """Mark rows as served only from what others leave."""
        self.table.ints[RELEGATED, rows] = 1

    # ---- showing -------------------------------------------------------------------------------------------------

    def view(self, hidden: IntArray) -> tuple[Live, IntArray | None]:
        """What a policy sees: all rows but the `hidden` ones, and the row behind each (None: all rows as they are)."""
        table = self.table
        if not hidden.size:
            return table.live, None
        keep = np.ones(table.n, dtype=bool)
        keep[hidden] = False
        rows = np.flatnonzero(keep)
        shown = LiveTable(max(rows.size, 1))
        shown.ints[:, : rows.size] = table.ints[:, rows]
        shown.floats[:, : rows.size] = table.floats[:, rows]
        shown.resized(rows.size)
        return shown.live, rows


def _grown(array: IntArray, size: int) -> IntArray:
    larger = np.full(size, -1, dtype=np.int64)
    larger[: array.size] = array
    return larger
