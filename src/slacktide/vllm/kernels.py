"""The two loops over the rows of a step that the plug-in adds to `schedule()`, compiled. Import on first use only.

Each stands for some twenty numpy calls on small arrays, which at 256 rows cost ten times as much as the arithmetic.
"""

from __future__ import annotations

from slacktide.core import shape as s
from slacktide.core.kernels import compiled
from slacktide.core.live import (
    ADMISSION_ORDER,
    INDEX,
    MAX_TOKENS,
    NUM_BLOCKS,
    NUM_CACHED,
    NUM_CACHED_FREE,
    NUM_COMPUTED,
    NUM_IN_FLIGHT,
    NUM_OUTPUT,
    NUM_PROMPT,
    STATUS,
)
from slacktide.core.types import RUNNING, BoolArray, FloatArray, IntArray

NO_LIMIT = 1 << 62
"""Chunk of a row that gets all it needs: vLLM may then add speculative tokens, which no plan counts."""

SLOT, MOST, RUNS, SPECIAL, LEFT = range(5)
"""Lines of what `read_plan` writes. An entry for each planned row: the mirror's slot; most tokens that vLLM may give
it; 1 for a running row. Then positions in the plan of rows that wait or have a limit, and slots of running rows that
are left out."""


@compiled
def read_plan(
    ints: IntArray,
    n: int,
    rows: IntArray,
    tokens: IntArray,
    preempted: IntArray,
    rejected: IntArray,
    shown: IntArray,
    slot_of_row: IntArray,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    speculative: bool,
    out: IntArray,
) -> tuple[bool, int, int, int, bool]:
    """Check a plan by the rules of `steering.check_plan` and put it in the mirror's terms: int64[5, n] `out`.

    `ints` are the columns that the policy saw, `shown` the mirror's row behind each (empty: the same row).
    Returns whether the plan can be run (nothing else is valid if not), how many planned rows run already, how many
    positions SPECIAL has and how many slots LEFT (running rows that could get a token), and whether the planned running
    rows are in vLLM's order.
    """
    taken = out[LEFT]  # first: rows that are named already
    if rows.size != tokens.size or rows.size > n:
        return False, 0, 0, 0, False
    taken[:n] = 0
    num_running = 0
    for row in range(n):
        if ints[STATUS, row] == RUNNING:
            num_running += 1
    for which in range(2):
        lost = preempted if which == 0 else rejected
        for i in range(lost.size):
            row = lost[i]
            if row < 0 or row >= n or taken[row] != 0:
                return False, 0, 0, 0, False
            taken[row] = 1
            if ints[STATUS, row] == RUNNING:
                num_running -= 1
            elif which == 0:
                return False, 0, 0, 0, False
    served, total, special, last, in_order = 0, 0, 0, -1, True
    for i in range(rows.size):
        row, chunk = rows[i], tokens[i]
        if row < 0 or row >= n or taken[row] != 0:
            return False, 0, 0, 0, False
        taken[row] = 1
        known = ints[NUM_PROMPT, row] + ints[NUM_OUTPUT, row] + ints[NUM_IN_FLIGHT, row]
        needed = known - ints[NUM_COMPUTED, row]
        if chunk <= 0 or chunk > needed:
            return False, 0, 0, 0, False
        total += chunk
        out[SLOT, i] = slot_of_row[shown[row] if shown.size > 0 else row]
        if ints[STATUS, row] == RUNNING:
            out[RUNS, i] = 1
            served += 1
            in_order = in_order and ints[ADMISSION_ORDER, row] > last
            last = ints[ADMISSION_ORDER, row]
        else:
            # Its hits may be fewer than believed: only with speculation, whose padding must stay whole, is it free.
            out[RUNS, i] = 0
            needed = needed - ints[NUM_CACHED, row] if speculative else NO_LIMIT
        out[MOST, i] = NO_LIMIT if chunk >= needed else chunk
        if chunk < needed or out[RUNS, i] == 0:
            out[SPECIAL, special] = i
            special += 1
    if rows.size > 0 and (total > max_num_batched_tokens or num_running + rows.size - served > max_num_seqs):
        return False, 0, 0, 0, False
    left = 0
    if served < num_running:
        for row in range(n):
            if ints[STATUS, row] != RUNNING or taken[row] != 0:
                continue
            in_flight = ints[NUM_IN_FLIGHT, row]
            ends = in_flight > 0 and ints[NUM_OUTPUT, row] + in_flight >= ints[MAX_TOKENS, row]
            if speculative or not ends:  # vLLM itself passes over a row that the step in flight surely ends
                out[LEFT, left] = slot_of_row[shown[row] if shown.size > 0 else row]  # left <= row: read already
                left += 1
    return True, served, special, left, in_order


@compiled
def note_step(
    ints: IntArray,
    slots: IntArray,
    tokens: IntArray,
    row_of_slot: IntArray,
    next_admission: int,
    block_size: int,
    stale: BoolArray,
    indices: IntArray,
    shape: FloatArray,
) -> int:
    """Write a scheduled step into the mirror's columns; returns the next admission's number.

    NUM_COMPUTED must hold what each row had computed before the step. Admits waiting rows in the order of `slots`, adds
    tokens and blocks, marks the slots as stale (vLLM's own numbers are read later), fills `indices` int64[m] with the
    requests' numbers and `shape` float64[12] (zeros) with the batch's shape (`core.shape.batch_shape`).
    """
    for i in range(slots.size):
        row, chunk = row_of_slot[slots[i]], tokens[i]
        context = ints[NUM_COMPUTED, row]
        emitted = ints[NUM_OUTPUT, row] + ints[NUM_IN_FLIGHT, row]
        if emitted > 0 and ints[NUM_PROMPT, row] + emitted - context <= 1:
            shape[s.NUM_DECODES] += 1
            shape[s.DECODE_CONTEXT] += context
            shape[s.DECODE_MAX_CONTEXT] = max(shape[s.DECODE_MAX_CONTEXT], float(context))
        else:
            c, u = float(chunk), float(context)
            shape[s.NUM_PREFILLS] += 1
            shape[s.PREFILL_TOKENS] += c
            shape[s.PREFILL_CONTEXT] += u
            shape[s.PREFILL_WORK] += c * (u + c)
            shape[s.PREFILL_SQUARE] += c * c
            shape[s.PREFILL_MAX] = max(shape[s.PREFILL_MAX], c)
        shape[s.NUM_TOKENS] += chunk
        if ints[STATUS, row] != RUNNING:
            ints[STATUS, row], ints[ADMISSION_ORDER, row] = RUNNING, next_admission
            ints[NUM_CACHED, row] = ints[NUM_CACHED_FREE, row] = 0
            next_admission += 1
        ints[NUM_COMPUTED, row] = context + chunk
        ints[NUM_BLOCKS, row] = max(ints[NUM_BLOCKS, row], -(-(context + chunk) // block_size))
        stale[slots[i]] = True
        indices[i] = ints[INDEX, row]
    shape[s.NUM_SEQUENCES] = slots.size
    return next_admission
