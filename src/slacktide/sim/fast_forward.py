"""Stretches that need no Python: plain decoding in closed form, and whole runs of policies that are one walk.

Both end in exactly the bytes of the step-by-step run (tested): times come from the same compiled latency function on
the same integers, and tokens, blocks and retirements are booked as `steps.launch` and `steps.complete` would.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from slacktide.core.kernels import compiled, list_order, walk
from slacktide.core.kernels_latency import step_time_packed
from slacktide.core.live import (
    ARRIVAL,
    INDEX,
    LAST_TOKEN,
    NUM_BLOCKS,
    NUM_COMPUTED,
    NUM_OUTPUT,
    NUM_PROMPT,
    STATUS,
)
from slacktide.core.shape import DECODE_CONTEXT, DECODE_MAX_CONTEXT, NUM_DECODES, NUM_SEQUENCES, NUM_TOKENS, SHAPE_SIZE
from slacktide.core.types import RUNNING, FloatArray, IntArray
from slacktide.sim.prefix import PrefixState, is_short, publish, refresh_hits, take_new
from slacktide.sim.steps import (
    BLOCK_SIZE,
    DELIVERED,
    END_REASON,
    END_TIME,
    FINISHED,
    FREE,
    LOG_DECODES,
    LOG_DURATION,
    LOG_FREE,
    LOG_PREEMPTED,
    LOG_PREFILL_TOKENS,
    LOG_PREFILLS,
    LOG_RUNNING,
    LOG_START,
    LOG_TOKENS,
    LOG_WAITING,
    MAX_SEQS,
    MAX_TOKENS_STEP,
    ROW,
    SCHEDULED,
    STAMP,
    STEPS,
    TOKEN_OFFSET,
    TRUE_OUTPUT,
    RunArrays,
    bundle,
    close_gaps,
    complete,
    drop,
    launch,
)

# Rows move up once one in so many is gone: moving 22 columns of a long queue for each would cost more than the step.
_GONE_SHARE = 8

# Why `walk_run` came back.
PAUSED, NEXT_NEEDS_PYTHON, FAILED, LAUNCHED = range(4)


@compiled
def all_decode(ints: IntArray, n: int) -> bool:
    """Every live row runs, has output, and needs one token."""
    for row in range(n):
        if ints[STATUS, row] < 0:
            continue
        if ints[STATUS, row] != RUNNING or ints[NUM_OUTPUT, row] == 0:
            return False
        if ints[NUM_PROMPT, row] + ints[NUM_OUTPUT, row] - ints[NUM_COMPUTED, row] != 1:
            return False
    return True


@compiled
def _allocate(
    ints: IntArray, n: int, order: IntArray, advance: int, block_size: int, run: RunArrays, px: PrefixState
) -> int:
    """Blocks for the step that computes token `computed + advance` of every row; -1 when they do not suffice."""
    need = 0
    for row in range(n):
        if (ints[NUM_COMPUTED, row] + advance) % block_size == 0:
            need += 1
    if need > run.counters[FREE]:
        return -1
    for i in range(n):
        row = order[i]
        after = ints[NUM_COMPUTED, row] + advance + 1
        if after % block_size == 1 or block_size == 1:
            take_new(
                px, ints[INDEX, row], after // block_size if block_size > 1 else after - 1, -(-after // block_size)
            )
        if after % block_size == 0:
            publish(px, ints[INDEX, row], after // block_size - 1, after // block_size)
    return need


@compiled
def decode_stretch(
    ints: IntArray,
    floats: FloatArray,
    n: int,
    run: RunArrays,
    px: PrefixState,
    latency: FloatArray,
    start: float,
    until: float,
    next_abort: float,
    max_steps: int,
    finished: IntArray,
    scratch: IntArray,
) -> tuple[int, int, float]:
    """Give every row one token a step: until one finishes, the clock reaches `until`, or blocks run short.

    Stops before a step that would last until `next_abort`: Python drops who leaves before the step's tokens come.
    All rows must decode. The batch grows by n context tokens a step, so a step costs one evaluation of the latency
    model; rows are brought up to date at the end. Returns (rows left, how many finished, clock).
    """
    block_size = run.limits[BLOCK_SIZE]
    caching = px.slot_of.size > 0
    shape = np.zeros(SHAPE_SIZE)
    shape[NUM_TOKENS] = shape[NUM_SEQUENCES] = shape[NUM_DECODES] = n
    crossing = scratch[1]  # rows that need a block in a step, by step number modulo block_size
    crossing[:block_size] = 0
    for row in range(n):
        computed = ints[NUM_COMPUTED, row]
        index = ints[INDEX, row]
        shape[DECODE_CONTEXT] += computed
        shape[DECODE_MAX_CONTEXT] = max(shape[DECODE_MAX_CONTEXT], float(computed))
        crossing[-computed % block_size] += 1
        max_steps = min(max_steps, run.request_ints[TRUE_OUTPUT, index] - ints[NUM_OUTPUT, row])
    if caching:
        list_order(ints, n, scratch[0])
    first = run.counters[STEPS]
    done = 0
    while done < max_steps and start < until:
        duration = step_time_packed(latency, shape)
        if start + duration >= next_abort:
            break
        need = crossing[done % block_size]
        if caching:
            need = _allocate(ints, n, scratch[0], done, block_size, run, px)
        if need < 0 or need > run.counters[FREE]:
            break
        run.counters[FREE] -= need
        step = first + done
        run.log_floats[LOG_START, step] = start
        run.log_floats[LOG_DURATION, step] = duration
        run.log_ints[LOG_TOKENS, step] = n
        run.log_ints[LOG_PREFILL_TOKENS, step] = 0
        run.log_ints[LOG_PREFILLS, step] = 0
        run.log_ints[LOG_DECODES, step] = n
        run.log_ints[LOG_RUNNING, step] = n
        run.log_ints[LOG_WAITING, step] = 0
        run.log_ints[LOG_FREE, step] = run.counters[FREE]
        run.log_ints[LOG_PREEMPTED, step] = 0
        start += duration
        shape[DECODE_CONTEXT] += n
        shape[DECODE_MAX_CONTEXT] += 1.0
        done += 1
    if done == 0:
        return n, 0, start
    run.counters[STEPS] = first + done
    n, num_finished = _book(ints, floats, n, run, px, first, done, start, finished, scratch[0])
    return n, num_finished, start


@compiled
def _book(
    ints: IntArray,
    floats: FloatArray,
    n: int,
    run: RunArrays,
    px: PrefixState,
    first: int,
    done: int,
    end: float,
    finished: IntArray,
    order: IntArray,
) -> tuple[int, int]:
    """Bring the rows up to date after `done` decode steps from step `first`; retire those that are complete."""
    block_size = run.limits[BLOCK_SIZE]
    num_finished = 0
    for row in range(n):
        index = ints[INDEX, row]
        output = ints[NUM_OUTPUT, row]
        at = run.request_ints[TOKEN_OFFSET, index] + output
        for j in range(done):
            run.token_step[at + j] = first + j
        computed = ints[NUM_COMPUTED, row] + done
        ints[NUM_OUTPUT, row] = output + done
        ints[NUM_COMPUTED, row] = computed
        ints[NUM_BLOCKS, row] = -(-computed // block_size)
        floats[LAST_TOKEN, row] = end
        run.request_ints[SCHEDULED, index] += done
        run.request_ints[STAMP, index] = first + done - 1
        if output + done == run.request_ints[TRUE_OUTPUT, index]:
            num_finished += 1
    if num_finished == 0:
        return n, 0
    # Retire in order of admission, as a planned step does: the order of freeing is the order of the block cache.
    list_order(ints, n, order)
    num_finished = 0
    for i in range(n):
        row = order[i]
        index = ints[INDEX, row]
        if ints[NUM_OUTPUT, row] == run.request_ints[TRUE_OUTPUT, index]:
            drop(ints, row, run, px)
            run.request_ints[END_REASON, index] = FINISHED
            run.request_ints[DELIVERED, index] = ints[NUM_OUTPUT, row]
            run.request_floats[END_TIME, index] = end
            run.request_ints[ROW, index] = -1
            finished[num_finished] = index
            num_finished += 1
    for i in range(num_finished):  # only now: list_order looks at the status
        for row in range(n):
            if ints[INDEX, row] == finished[i]:
                ints[STATUS, row] = -1
                break
    return close_gaps(ints, floats, n, run), num_finished


@compiled
def decode_run(
    ints: IntArray,
    floats: FloatArray,
    n: int,
    latency: FloatArray,
    start: float,
    until: float,
    next_abort: float,
    max_steps: int,
    finished: IntArray,
    scratch: IntArray,
    *state: Any,
) -> tuple[int, int, float]:
    """`decode_stretch` if every row decodes and the limits allow them all; else nothing. `state` as in `step_once`."""
    run, px = bundle(state)
    if n > min(run.limits[MAX_TOKENS_STEP], run.limits[MAX_SEQS]) or not all_decode(ints, n):
        return n, 0, start
    return decode_stretch(ints, floats, n, run, px, latency, start, until, next_abort, max_steps, finished, scratch)


@compiled
def walk_run(
    ints: IntArray,
    floats: FloatArray,
    n: int,
    latency: FloatArray,
    now: float,
    next_request: int,
    until: float,
    next_abort: float,
    max_steps: int,
    stop_when_finished: bool,
    arguments: IntArray,
    request_rows: IntArray,
    request_targets: FloatArray,
    flight: IntArray,
    finished: IntArray,
    scratch: IntArray,
    *state: Any,
) -> tuple[int, int, int, int, int, float]:
    """Run a policy that is `walk` with constant arguments, from arrival to retirement.

    arguments: token budget, long-prefill threshold, chunked prefill?, reserve the full prompt?, watermark blocks,
        max_model_len.
    request_rows, request_targets: `RunRecorder.entry_columns` (index -1: leave the request to Python).
    until: clock at which Python wants control; stop_when_finished: also after any step that ended a request;
        next_abort: a step that lasts until then is launched only, and comes back in `flight`.
    Returns (why, rows, next request, ended requests in `finished`, offending row or rows in flight, clock).
    """
    run, px = bundle(state)
    no_order, no_key = scratch[0, :0], floats[0, :0]
    block_size = run.limits[BLOCK_SIZE]
    num_requests = request_rows.shape[1]
    ended = 0
    gone = 0  # rows of finished requests that still stand among the others
    last_step = run.counters[STEPS] + max_steps
    while run.counters[STEPS] < last_step and now < until:
        while next_request < num_requests and request_targets[ARRIVAL, next_request] <= now:
            if n == ints.shape[1] or request_rows[INDEX, next_request] < 0:
                return NEXT_NEEDS_PYTHON, close_gaps(ints, floats, n, run), next_request, ended, -1, now
            ints[:, n] = request_rows[:, next_request]
            floats[:, n] = request_targets[:, next_request]
            run.request_ints[ROW, next_request] = n
            n += 1
            next_request += 1
        arrival = request_targets[ARRIVAL, next_request] if next_request < num_requests else math.inf
        if n == gone:
            n = gone = 0
            if arrival == math.inf or arrival >= until:
                break
            now = arrival
            continue
        if gone * _GONE_SHARE > n:
            n, gone = close_gaps(ints, floats, n, run), 0
        if n - gone <= min(arguments[0], run.limits[MAX_SEQS]) and all_decode(ints, n):
            if gone > 0:
                n, gone = close_gaps(ints, floats, n, run), 0
            steps_before = run.counters[STEPS]
            limit = min(arrival, until)
            left = last_step - steps_before
            n, count, now = decode_stretch(
                ints, floats, n, run, px, latency, now, limit, next_abort, left, finished[ended:], scratch
            )
            ended += count
            if run.counters[STEPS] > steps_before:
                if (count > 0 and stop_when_finished) or ended + n >= finished.size:
                    break
                continue
        if px.slot_of.size > 0:
            short = is_short(n, run.counters[FREE], arguments[0], block_size)
            refresh_hits(ints, n, px, block_size, short)
        rows, num_preempted = walk(
            ints, n, no_order, arguments[0], run.limits[MAX_SEQS], block_size, run.counters[FREE], arguments[4],
            arguments[5], arguments[1], no_order, no_key, arguments[2] != 0, arguments[3] != 0, True, True, scratch,
        )  # fmt: skip
        if rows == 0 and num_preempted == 0:
            return NEXT_NEEDS_PYTHON, close_gaps(ints, floats, n, run), next_request, ended, -1, now
        step = run.counters[STEPS]
        error, row, count = launch(
            ints, n, scratch[0, :rows], scratch[1, :rows], scratch[2, :num_preempted], run, px, latency, now, flight
        )
        if error != 0:
            return FAILED, n, next_request, error, row, now
        if count > 0:
            end = run.log_floats[LOG_START, step] + run.log_floats[LOG_DURATION, step]
            if end >= next_abort:
                return LAUNCHED, close_gaps(ints, floats, n, run), next_request, ended, count, now
            num_finished = complete(ints, floats, run, px, flight, count, step, finished[ended:])
            ended += num_finished
            gone += num_finished
            now = end
            if (num_finished > 0 and stop_when_finished) or ended + n >= finished.size:
                break
    return PAUSED, close_gaps(ints, floats, n, run), next_request, ended, -1, now
