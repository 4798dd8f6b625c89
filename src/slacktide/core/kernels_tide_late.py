"""Compiled parts of `tide` for late work: decodes that join a round, KV taken from it, and the share that is its own.

docs/background/tide.md, section 7, says what it is promised; slot names are in `tide`.
"""

from __future__ import annotations

import numpy as np

from slacktide.core.kernels import compiled
from slacktide.core.kernels_latency import step_time_packed
from slacktide.core.kernels_tide_fill import sums_of
from slacktide.core.kernels_tide_kv import blocks_of, pick_victim
from slacktide.core.kernels_tide_supply import size_class
from slacktide.core.live import STATUS
from slacktide.core.tide import (
    CREDIT,
    F_PACE,
    I_COMPUTED,
    I_DECODES,
    I_GONE,
    I_QUEUE,
    I_QUEUE_DONE,
    I_QUEUE_LEFT,
    I_ROLE,
    KNEE,
    KNEE_TIME,
    LATE_DECODE,
    LATE_EVERY,
    LATE_PREFILL,
    NO_ROLE,
    ON_TIME_DECODE,
    SERVED_LATE,
    SINCE_LATE,
    W_CONTEXT,
    W_DECODES,
    W_EVERY_RAW,
    W_FORCED,
    W_FREE,
    W_KEPT_BACK,
    W_LATE,
    W_LATE_COST,
    W_LATE_DECODES,
    W_LATE_STREAMS,
    W_LONGEST,
    W_NEED,
    W_ON_TIME,
    W_ROUND,
    W_ROUND_RAW,
    W_S1,
    W_S2,
    W_STREAMS_TURN,
    W_TURN_JOINED,
    W_VICTIMS,
)
from slacktide.core.types import RUNNING, FloatArray, IntArray

LATE_ROOM = 0.9
"""Late decodes may use this share of the room that a round of on-time decodes has."""
OVERDUE = 2.0
"""Steps at the knee that late work has coming when it is served without regard to deadlines. From one on it comes first
as far as they leave room, so that half of the time for a gentle turn is there."""
EVICT_ONCE = 1
"""A late request is evicted at most so often for those on time: each time it loses its whole KV."""


@compiled
def join_late(
    ints: IntArray, n: int, packed: FloatArray, safe: FloatArray, limit: float, free: int, kept_back: int, budget: int,
    block_size: int, round_raw: float, forced: bool, si: IntArray, shape: FloatArray,
) -> tuple[int, int, float]:  # fmt: skip
    """Let late decodes join the round, one by one in order of arrival, while it takes at most `limit` seconds.

    They leave alone the blocks kept back for running prompts, unless nobody else decodes. `forced`: the first joins
    whatever it takes. Appends them behind the on-time rows of I_DECODES; returns (how many, new blocks, seconds of the
    whole round as predicted).
    """
    decodes = si[I_DECODES]
    count, context, longest = 0, 0.0, 0.0
    for row in range(n):
        if si[I_ROLE, row] == ON_TIME_DECODE and count < budget:
            u = float(si[I_COMPUTED, row])
            context += u
            longest = max(longest, u)
            count += 1
    joined, taken, seconds = 0, 0, round_raw
    alone = count == 0
    for row in range(n):
        if count >= budget:
            break
        if si[I_ROLE, row] != LATE_DECODE:
            continue
        blocks = blocks_of(ints, row, 1, block_size)
        must = forced and joined == 0
        if taken + blocks > (free if alone or must else free - kept_back) and blocks > 0:
            continue
        u = float(si[I_COMPUTED, row])
        shape[:] = 0.0
        shape[0] = shape[1] = shape[8] = float(count + 1)
        shape[9], shape[10] = context + u, max(longest, u)
        raw = step_time_packed(packed, shape)
        if safe[0, size_class(shape[0])] * raw > limit and not must:
            break
        taken += blocks
        context, longest, seconds = shape[9], shape[10], raw
        decodes[count] = row
        count += 1
        joined += 1
    return joined, taken, seconds


@compiled
def late_decodes(
    ints: IntArray, n: int, count: int, budget: int, block_size: int, packed: FloatArray, prm: FloatArray,
    safe: FloatArray, si: IntArray, sf: FloatArray, state: FloatArray, shape: FloatArray, why: FloatArray,
) -> int:  # fmt: skip
    """Late decodes beside the `count` on-time ones, from what is left; returns how many decodes there are then.

    The late share belongs to the oldest late request: to the streams while that is one.
    """
    why[W_EVERY_RAW] = why[W_ROUND_RAW]
    oldest = -1
    for row in range(n):
        if si[I_ROLE, row] in (LATE_DECODE, LATE_PREFILL):
            why[W_STREAMS_TURN], oldest = 1.0 if si[I_ROLE, row] == LATE_DECODE else 0.0, row
            break
    if why[W_LATE_STREAMS] == 0.0 or count >= budget:
        return count
    state[SINCE_LATE] += 1.0
    due = prm[LATE_EVERY] > 0.0 and state[SINCE_LATE] >= prm[LATE_EVERY]
    turn = why[W_STREAMS_TURN] != 0.0
    if not (why[W_ON_TIME] == 0.0 or due or (turn and state[CREDIT] > 0.0) or count == 0):
        return count
    limit = LATE_ROOM * min(why[W_S1], why[W_S2] - why[W_ROUND]) if why[W_DECODES] > 0.0 else np.inf
    for i in range(count):  # longer than the pace, each round would cost those on time slack, with no end to it
        limit = min(limit, sf[F_PACE, si[I_DECODES, i]])
    forced = turn and state[CREDIT] >= OVERDUE * state[KNEE_TIME]
    joined, blocks, why[W_EVERY_RAW] = join_late(
        ints, n, packed, safe, limit, int(why[W_FREE] - why[W_NEED]), int(why[W_KEPT_BACK]), budget, block_size,
        why[W_ROUND_RAW], forced, si, shape,
    )  # fmt: skip
    why[W_NEED] += blocks
    why[W_LATE_COST] = max(why[W_EVERY_RAW] - why[W_ROUND_RAW], 0.0)
    why[W_LATE_DECODES] = joined
    why[W_CONTEXT], why[W_LONGEST] = sums_of(si[I_DECODES, : count + joined], si[I_COMPUTED])
    why[W_FORCED] = 1.0 if forced and joined > 0 else 0.0
    why[W_TURN_JOINED] = 1.0 if turn and joined > 0 and si[I_DECODES, count] == oldest else 0.0
    return count + joined


@compiled
def evict_late(
    ints: IntArray, n: int, count: int, queued: int, si: IntArray, sf: FloatArray, state: FloatArray, plan: IntArray,
    why: FloatArray,
) -> int:  # fmt: skip
    """A late row that does not run in this step loses its KV to an on-time prompt; returns the prompts left queued."""
    row = pick_victim(ints, n, si, sf, state, True, EVICT_ONCE)
    if row < 0 or si[I_ROLE, row] == NO_ROLE:
        return queued
    for i in range(count - int(why[W_LATE_DECODES]), count):
        if si[I_DECODES, i] == row:
            return queued
    for i in range(queued):
        if si[I_QUEUE, i] == row:
            return queued
    plan[2, 0] = row
    why[W_VICTIMS] = 1.0
    si[I_GONE, row] = 1
    kept = 0  # nobody is admitted in a step that preempts
    for i in range(queued):
        if ints[STATUS, si[I_QUEUE, i]] == RUNNING:
            si[I_QUEUE, kept], si[I_QUEUE_LEFT, kept] = si[I_QUEUE, i], si[I_QUEUE_LEFT, i]
            si[I_QUEUE_DONE, kept] = si[I_QUEUE_DONE, i]
            kept += 1
    return kept


@compiled
def settle(tokens: int, decoded: bool, raw: float, share: float, state: FloatArray, why: FloatArray) -> None:
    """Book a step of `raw` seconds: late work has its share of it coming, less what those whose turn it is got.

    `tokens`: prompt tokens of late prompts in the step, priced as at the knee; `decoded`: late decodes that joined ran.
    Nothing is owed by late work that got more than its share, and no more than one step to a stream that just ran: else
    cheap rounds of it would save up for the next prompt, which would then be served without regard to deadlines.
    """
    prompts = state[KNEE_TIME] * tokens / max(state[KNEE], 1.0)
    streams = why[W_LATE_COST] if decoded else 0.0
    if decoded and why[W_LATE_DECODES] > 0.0:
        state[SINCE_LATE] = 0.0
    state[SERVED_LATE] += prompts + streams
    if why[W_LATE_STREAMS] > 0.0 or why[W_LATE] > 0.0:
        state[CREDIT] = max(state[CREDIT] + share * raw - (streams if why[W_STREAMS_TURN] != 0.0 else prompts), 0.0)
        if decoded and why[W_TURN_JOINED] != 0.0:
            state[CREDIT] = min(state[CREDIT], state[KNEE_TIME])
    else:
        state[CREDIT] = 0.0
