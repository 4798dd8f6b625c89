"""The compiled half of the simulator: carry a plan out, end the step, run through stretches of plain decoding.

All functions work on the live table's matrices and on the run's own arrays (layout below).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slacktide.core.kernels import compiled
from slacktide.core.kernels_latency import potential_packed, step_time_packed
from slacktide.core.live import (
    ADMISSION_ORDER,
    FIRST_TOKEN,
    INDEX,
    LAST_TOKEN,
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
    STATUS,
)
from slacktide.core.shape import (
    DECODE_CONTEXT,
    DECODE_MAX_CONTEXT,
    NUM_DECODES,
    NUM_PREFILLS,
    NUM_SEQUENCES,
    NUM_TOKENS,
    PREFILL_CONTEXT,
    PREFILL_MAX,
    PREFILL_POTENTIAL,
    PREFILL_SQUARE,
    PREFILL_TOKENS,
    PREFILL_WORK,
    SHAPE_SIZE,
)
from slacktide.core.types import PREEMPTED, RUNNING, FloatArray, IntArray
from slacktide.sim.prefix import PrefixState, lookup, publish, release, take_hits, take_new

Int32Array = npt.NDArray[np.int32]

# RunArrays.counters
FREE, ADMISSIONS, STEPS = range(3)
# RunArrays.limits
MAX_TOKENS_STEP, MAX_SEQS, BLOCK_SIZE = range(3)
# RunArrays.request_ints, per request
TRUE_OUTPUT, TOKEN_OFFSET, END_REASON, PREEMPTIONS, RECOMPUTED, CACHED, SCHEDULED, ROW, STAMP, DELIVERED, LOST = range(
    11
)  # LOST: the most tokens that a preemption took; computing one of them again is a recomputation
# RunArrays.request_floats, per request
FIRST_SCHEDULED, END_TIME = range(2)
# RunArrays.log_ints, per step; log_floats: start and duration in seconds
(LOG_TOKENS, LOG_PREFILL_TOKENS, LOG_PREFILLS, LOG_DECODES, LOG_RUNNING, LOG_WAITING, LOG_FREE, LOG_PREEMPTED) = range(
    8
)
LOG_START, LOG_DURATION = range(2)

OPEN = -1  # END_REASON of a request that has not ended
FINISHED = 0
# What can be wrong with a plan; the messages are in engine.py.
BAD_ROW, TWICE, BAD_TOKENS, OVER_BUDGET, OVER_SEQS, NO_BLOCKS, BAD_VICTIM = range(1, 8)


class RunArrays(NamedTuple):
    """Everything a run writes, apart from the live table."""

    counters: IntArray
    limits: IntArray
    request_ints: IntArray
    request_floats: FloatArray
    token_step: Int32Array
    log_ints: Int32Array
    log_floats: FloatArray


@compiled
def drop(ints: IntArray, row: int, run: RunArrays, px: PrefixState) -> None:
    """Free the KV of a row."""
    blocks = ints[NUM_BLOCKS, row]
    if px.slot_of.size > 0:
        blocks = release(px, ints[INDEX, row], blocks)
    run.counters[FREE] += blocks
    ints[NUM_BLOCKS, row] = 0


@compiled
def preempt(ints: IntArray, row: int, run: RunArrays, px: PrefixState) -> None:
    """Recompute preemption: the row waits again and loses all computed tokens."""
    index = ints[INDEX, row]
    drop(ints, row, run, px)
    run.request_ints[LOST, index] = max(run.request_ints[LOST, index], ints[NUM_COMPUTED, row])
    run.request_ints[PREEMPTIONS, index] += 1
    ints[NUM_PREEMPTIONS, row] += 1
    ints[NUM_COMPUTED, row] = 0
    ints[NUM_IN_FLIGHT, row] = 0  # the token in flight is still delivered when its step ends
    ints[STATUS, row] = PREEMPTED
    ints[ADMISSION_ORDER, row] = -1


@compiled
def _admit(ints: IntArray, row: int, tokens: int, run: RunArrays, px: PrefixState) -> int:
    """Seat a waiting row; returns the tokens it can take (0: its blocks do not fit after all)."""
    index, block_size = ints[INDEX, row], run.limits[BLOCK_SIZE]
    if px.slot_of.size > 0:
        known = ints[NUM_PROMPT, row] + ints[NUM_OUTPUT, row]
        hits, unheld = lookup(px, index, known, block_size)
        computed = hits * block_size
        tokens = min(tokens, known - computed)
        if -(-(computed + tokens) // block_size) - hits + unheld > run.counters[FREE]:
            return 0  # rows before it in this step evicted blocks that it would have found
        run.counters[FREE] -= take_hits(px, index, hits)
        ints[NUM_COMPUTED, row] = computed
        ints[NUM_BLOCKS, row] = hits
        run.request_ints[CACHED, index] += computed
        ints[NUM_CACHED, row] = 0
        ints[NUM_CACHED_FREE, row] = 0
    ints[STATUS, row] = RUNNING
    ints[ADMISSION_ORDER, row] = run.counters[ADMISSIONS]
    run.counters[ADMISSIONS] += 1
    return tokens


@compiled
def launch(
    ints: IntArray,
    n: int,
    rows: IntArray,
    tokens: IntArray,
    preempted: IntArray,
    run: RunArrays,
    px: PrefixState,
    latency: FloatArray,
    start: float,
    flight: IntArray,
) -> tuple[int, int, int]:
    """Carry out a plan: preempt, admit, allocate, advance, and log a step that begins at `start`.

    Writes (request, its tokens; negative when no output token follows) of each row into `flight`; returns (error code,
    offending row, rows in flight).
    The step's duration is in the log. `latency` is the truth model, packed. Long: one pass over the plan's rows.
    """
    for i in range(preempted.size):
        row = preempted[i]
        if row < 0 or row >= n or ints[STATUS, row] != RUNNING:
            return BAD_VICTIM, row, 0
        preempt(ints, row, run, px)
    num_running, num_waiting = 0, 0
    for row in range(n):
        if ints[STATUS, row] == RUNNING:
            num_running += 1
        elif ints[STATUS, row] >= 0:
            num_waiting += 1
    shape = np.zeros(SHAPE_SIZE)
    block_size, step, count = run.limits[BLOCK_SIZE], run.counters[STEPS], 0
    for i in range(rows.size):
        row, c = rows[i], tokens[i]
        if row < 0 or row >= n:
            return BAD_ROW, row, count
        index = ints[INDEX, row]
        if run.request_ints[STAMP, index] == step:
            return TWICE, row, count
        known = ints[NUM_PROMPT, row] + ints[NUM_OUTPUT, row] + ints[NUM_IN_FLIGHT, row]
        if c <= 0 or c > known - ints[NUM_COMPUTED, row]:
            return BAD_TOKENS, row, count
        if ints[STATUS, row] != RUNNING:
            c = _admit(ints, row, c, run, px)
            if c == 0:
                continue
            num_running += 1
            num_waiting -= 1
            if np.isnan(run.request_floats[FIRST_SCHEDULED, index]):
                run.request_floats[FIRST_SCHEDULED, index] = start
        u = ints[NUM_COMPUTED, row]
        held = ints[NUM_BLOCKS, row]
        blocks = -(-(u + c) // block_size)
        if blocks - held > run.counters[FREE]:
            if px.slot_of.size > 0:
                continue  # a victim's blocks were shared, so it freed fewer than a policy can see: wait a step
            return NO_BLOCKS, row, count
        run.request_ints[STAMP, index] = step  # not before: who waits may come in a later plan for this same step
        run.counters[FREE] -= blocks - held
        ints[NUM_BLOCKS, row] = blocks
        if px.slot_of.size > 0:
            if blocks > held:  # calls that do nothing cost as much as the rest of a row
                take_new(px, index, held, blocks)
            # Only blocks of tokens whose values are known: not of the one in flight.
            in_flight = ints[NUM_IN_FLIGHT, row]
            first, last = (u - in_flight) // block_size, min(u + c, known - in_flight) // block_size
            if last > first:
                publish(px, index, first, last)
        emits = u + c == known
        shape[NUM_TOKENS] += c
        if known - u == 1 and known > ints[NUM_PROMPT, row]:
            shape[NUM_DECODES] += 1
            shape[DECODE_CONTEXT] += u
            shape[DECODE_MAX_CONTEXT] = max(shape[DECODE_MAX_CONTEXT], float(u))
        else:
            shape[NUM_PREFILLS] += 1
            shape[PREFILL_TOKENS] += c
            shape[PREFILL_CONTEXT] += u
            shape[PREFILL_WORK] += float(c) * float(u + c)
            shape[PREFILL_SQUARE] += float(c) * float(c)
            shape[PREFILL_MAX] = max(shape[PREFILL_MAX], float(c))
            shape[PREFILL_POTENTIAL] += potential_packed(latency, float(u + c)) - potential_packed(latency, float(u))
        ints[NUM_COMPUTED, row] = u + c
        ints[NUM_IN_FLIGHT, row] += 1 if emits else 0
        run.request_ints[SCHEDULED, index] += c
        run.request_ints[RECOMPUTED, index] += max(0, min(run.request_ints[LOST, index] - u, c))
        flight[0, count] = index
        flight[1, count] = c if emits else -c
        count += 1
    if shape[NUM_TOKENS] > run.limits[MAX_TOKENS_STEP]:
        return OVER_BUDGET, -1, count
    if num_running > run.limits[MAX_SEQS]:
        return OVER_SEQS, -1, count
    if count > 0:
        shape[NUM_SEQUENCES] = count
        run.log_floats[LOG_START, step] = start
        run.log_floats[LOG_DURATION, step] = step_time_packed(latency, shape)
        run.log_ints[LOG_TOKENS, step] = int(shape[NUM_TOKENS])
        run.log_ints[LOG_PREFILL_TOKENS, step] = int(shape[PREFILL_TOKENS])
        run.log_ints[LOG_PREFILLS, step] = int(shape[NUM_PREFILLS])
        run.log_ints[LOG_DECODES, step] = int(shape[NUM_DECODES])
        run.log_ints[LOG_RUNNING, step] = num_running
        run.log_ints[LOG_WAITING, step] = num_waiting
        run.log_ints[LOG_FREE, step] = run.counters[FREE]
        run.log_ints[LOG_PREEMPTED, step] = preempted.size
        run.counters[STEPS] += 1
    return 0, 0, count


@compiled
def complete(
    ints: IntArray,
    floats: FloatArray,
    run: RunArrays,
    px: PrefixState,
    flight: IntArray,
    count: int,
    step: int,
    finished: IntArray,
) -> int:
    """End a step: deliver its tokens, retire what is done. Returns how many finished.

    Writes the finished requests' numbers into `finished`, in the order of the step's rows. Their rows stay, with a
    negative status, until `close_gaps`.
    """
    end = run.log_floats[LOG_START, step] + run.log_floats[LOG_DURATION, step]
    num_finished, block_size = 0, run.limits[BLOCK_SIZE]
    for i in range(count):
        index = flight[0, i]
        row = run.request_ints[ROW, index]
        if row < 0 or flight[1, i] < 0:
            continue  # ended while the step ran, or a chunk that emits nothing
        output = ints[NUM_OUTPUT, row]
        run.token_step[run.request_ints[TOKEN_OFFSET, index] + output] = step
        ints[NUM_OUTPUT, row] = output + 1
        if ints[NUM_IN_FLIGHT, row] > 0:
            ints[NUM_IN_FLIGHT, row] -= 1
        if output == 0:
            floats[FIRST_TOKEN, row] = end
        floats[LAST_TOKEN, row] = end
        if px.slot_of.size > 0 and ints[STATUS, row] == RUNNING:
            known = ints[NUM_COMPUTED, row] - ints[NUM_IN_FLIGHT, row]
            if known % block_size == 0:  # with two steps in flight the token now known may complete a block
                publish(px, index, known // block_size - 1, known // block_size)
        if output + 1 == run.request_ints[TRUE_OUTPUT, index]:
            drop(ints, row, run, px)
            run.request_ints[END_REASON, index] = FINISHED
            run.request_ints[DELIVERED, index] = output + 1
            run.request_floats[END_TIME, index] = end
            run.request_ints[ROW, index] = -1
            ints[STATUS, row] = -1
            finished[num_finished] = index
            num_finished += 1
    return num_finished


@compiled
def complete_and_close(
    ints: IntArray,
    floats: FloatArray,
    n: int,
    run: RunArrays,
    px: PrefixState,
    flight: IntArray,
    count: int,
    step: int,
    finished: IntArray,
) -> tuple[int, int]:
    """`complete`, then `close_gaps`. Returns (rows left, how many finished)."""
    num_finished = complete(ints, floats, run, px, flight, count, step, finished)
    if num_finished > 0:
        n = close_gaps(ints, floats, n, run)
    return n, num_finished


@compiled
def close_gaps(ints: IntArray, floats: FloatArray, n: int, run: RunArrays) -> int:
    """Drop rows whose status is negative, keeping the order of the others; returns how many are left."""
    first = 0
    while first < n and ints[STATUS, first] >= 0:
        first += 1
    # Whole runs of rows at a time, field by field: memory moves in order.
    left = first
    row = first
    while row < n:
        while row < n and ints[STATUS, row] < 0:
            row += 1
        begin = row
        while row < n and ints[STATUS, row] >= 0:
            row += 1
        if row > begin:
            for at in range(begin, row):
                run.request_ints[ROW, ints[INDEX, at]] = left + at - begin
            for field in range(NUM_INT_FIELDS):
                for at in range(begin, row):
                    ints[field, left + at - begin] = ints[field, at]
            for field in range(NUM_FLOAT_FIELDS):
                for at in range(begin, row):
                    floats[field, left + at - begin] = floats[field, at]
            left += row - begin
    return left


@compiled
def bundle(state: Any) -> tuple[RunArrays, PrefixState]:
    """The named tuples again, from their arrays in order."""
    run = RunArrays(state[0], state[1], state[2], state[3], state[4], state[5], state[6])
    return run, PrefixState(state[7], state[8], state[9], state[10], state[11])


@compiled
def step_once(
    ints: IntArray,
    floats: FloatArray,
    n: int,
    rows: IntArray,
    tokens: IntArray,
    preempted: IntArray,
    latency: FloatArray,
    start: float,
    flight: IntArray,
    finished: IntArray,
    *state: Any,
) -> tuple[int, int, int, int, int, float]:
    """Launch and complete in one call: (error, offending row, rows run, rows left, finished, end of the step).

    `state` is the arrays of RunArrays and PrefixState, one by one: numba takes a named tuple apart five times slower.
    """
    run, px = bundle(state)
    step = run.counters[STEPS]
    error, row, count = launch(ints, n, rows, tokens, preempted, run, px, latency, start, flight)
    if error != 0 or count == 0:
        return error, row, count, n, 0, start
    n, num_finished = complete_and_close(ints, floats, n, run, px, flight, count, step, finished)
    return 0, 0, count, n, num_finished, run.log_floats[LOG_START, step] + run.log_floats[LOG_DURATION, step]
