"""Compiled parts of `tide` that make a step: the parts in their order, the best option, the plan.

docs/background/tide.md derives the formulas; `tide` has the slot names.
"""

from __future__ import annotations

import numpy as np

from slacktide.core.kernels import compiled
from slacktide.core.kernels_fair import lift
from slacktide.core.kernels_tide import expect, look
from slacktide.core.kernels_tide_fill import sums_of
from slacktide.core.kernels_tide_kv import make_room
from slacktide.core.kernels_tide_late import OVERDUE, late_decodes, settle
from slacktide.core.kernels_tide_queue import hurried, price_decodes, queue_prompts, set_prices, weigh_options
from slacktide.core.kernels_tide_roles import give_roles, judge_prompts, set_cap, take_round, value_prompts
from slacktide.core.kernels_tide_supply import factors_of, hope_for_new, learn_prices, size_class, time_of
from slacktide.core.live import ADMISSION_ORDER
from slacktide.core.tide import (
    BLOCKING,
    CREDIT,
    DECODE_ONLY,
    DEVIATIONS,
    F_SLACK,
    I_BLOCKING,
    I_COMPUTED,
    I_DECODES,
    I_KIND,
    I_QUEUE,
    I_QUEUE_DONE,
    I_QUEUE_LEFT,
    I_ROLE,
    KNEE,
    KNEE_TIME,
    LATE_PREFILL,
    LATE_SHARE,
    MIXED,
    NUM_SIZES,
    PREFILL_ONLY,
    SIZES,
    USE_BIAS_IN_VALUES,
    USE_RESCUE,
    USE_SIZES,
    W_ACTION,
    W_ACTIONS,
    W_BLOCKING,
    W_BOUND,
    W_CAP,
    W_EVERY_RAW,
    W_FREE,
    W_PREFILL,
    W_PRESS,
    W_RESERVED,
    W_ROUND,
    W_ROUND_RAW,
    W_S1,
    W_S2,
    W_TIME,
    W_TOKENS,
    W_TOTAL,
    W_VICTIMS,
)
from slacktide.core.types import FloatArray, IntArray

NEARLY = 0.98
"""A stream is tried to be saved down to this share of the time that a decode round is expected to take."""
WORK_FIRST = 1.02
"""A step with prompt tokens wins ties with a pure decode round: what is done early leaves room for surprises."""
AS_IF_NOTHING, RANGE_ARRIVALS, ALL_PROMPTS, WHOLE_BUDGET = 0, 3, 4, 5
NEXT_TOKENS, TOKENS_AFTER = 1, 2
"""What bounds a step, as positions in `tide.BOUNDS`."""


@compiled
def choose(
    on_time: IntArray, count: int, queued: int, budget: int, mean: FloatArray, prm: FloatArray, sf: FloatArray,
    state: FloatArray, why: FloatArray,
) -> tuple[int, int]:  # fmt: skip
    """(option of the most value per second, its prompt tokens).

    Prompts that have little time to spare run alone, if as many of their tokens fit as beside the decodes: the round
    would only make them later. A decode round comes first where a stream can just be saved by it. It comes last where a
    prompt is pressed, or where it is the turn of late prompts. Where these are overdue and the step would give them
    less than it adds to what they have coming, they get a step at the knee whatever the options say.
    """
    action, best, rescue = DECODE_ONLY, -1.0, False
    if prm[USE_RESCUE] != 0.0:
        likely = mean[0, size_class(float(on_time.size))] * why[W_ROUND_RAW] * NEARLY
        for i in range(on_time.size):
            rescue = rescue or likely <= sf[F_SLACK, on_time[i]] < why[W_ROUND]
    reserved = why[W_RESERVED] != 0.0
    if rescue:
        best = np.inf
    elif count > 0:
        best = why[W_ACTIONS] / why[W_ACTIONS + 1]
        some = why[W_TOKENS + PREFILL_ONLY] + why[W_TOKENS + MIXED] + why[W_TOKENS + BLOCKING] > 0.0
        if (why[W_PRESS] != 0.0 or reserved) and some:
            best = 0.0
    alone = why[W_TOKENS + PREFILL_ONLY]
    urgent = hurried(prm, why) and alone > 0.0 and alone >= why[W_TOKENS + MIXED]
    for option in range(PREFILL_ONLY, (PREFILL_ONLY if urgent else BLOCKING) + 1):
        ratio = WORK_FIRST * why[W_ACTIONS + 2 * option] / why[W_ACTIONS + 2 * option + 1]
        if why[W_TOKENS + option] > 0.0 and ratio > best:
            best, action = ratio, option
    prefill = int(why[W_TOKENS + action])
    if reserved and queued > 0 and state[CREDIT] >= OVERDUE * state[KNEE_TIME]:
        paid = state[KNEE_TIME] * prefill / state[KNEE]
        most = min(int(why[W_TOTAL]), budget - count, int(state[KNEE]))
        if paid < prm[LATE_SHARE] * why[W_ACTIONS + 2 * action + 1] and most > prefill:
            return MIXED if count > 0 else PREFILL_ONLY, most
    return action, 0 if action == DECODE_ONLY else prefill


@compiled
def in_order_of_admission(ints: IntArray, rows: IntArray) -> IntArray:
    """The rows as vLLM runs them."""
    ordered = True
    for i in range(1, rows.size):
        ordered = ordered and ints[ADMISSION_ORDER, rows[i]] > ints[ADMISSION_ORDER, rows[i - 1]]
    if ordered:
        return rows
    ranks = np.empty(rows.size)
    for i in range(rows.size):
        ranks[i] = float(ints[ADMISSION_ORDER, rows[i]])
    return rows[np.argsort(ranks, kind="mergesort")]


@compiled
def write_plan(rows: IntArray, prefill: int, left: IntArray, si: IntArray, plan: IntArray) -> tuple[int, int]:
    """Write the decodes `rows` and `prefill` tokens of the queue; returns (rows written, tokens of late prompts)."""
    position, late, over = 0, 0, prefill
    for i in range(rows.size):
        plan[0, position], plan[1, position] = rows[i], 1
        position += 1
    for i in range(left.size):
        tokens = min(left[i], over)
        if tokens <= 0:
            break
        row = si[I_QUEUE, i]
        plan[0, position], plan[1, position] = row, tokens
        position += 1
        over -= tokens
        if si[I_ROLE, row] == LATE_PREFILL:
            late += tokens
    return position, late


@compiled
def bound_by(action: int, prefill: int, queued: int, room: int, why: FloatArray) -> int:
    """What kept the step from being longer: a position in `tide.BOUNDS`. `room`: prompt tokens that the budget has."""
    if prefill > 0 and prefill == int(why[W_TOTAL]):
        return ALL_PROMPTS
    if prefill > 0 and prefill >= room:
        return WHOLE_BUDGET
    if queued == 0:
        return AS_IF_NOTHING
    alone = action == PREFILL_ONLY
    cap, first, second = why[W_CAP], why[W_S1], why[W_S2] - why[W_ROUND]
    if alone:
        first -= why[W_ROUND]
    if cap <= first and cap <= second:
        return RANGE_ARRIVALS
    return NEXT_TOKENS if alone or first <= second else TOKENS_AFTER


@compiled
def finish(
    action: int, prefill: int, every: IntArray, left: IntArray, done: IntArray, budget: int, packed: FloatArray,
    prm: FloatArray, mean: FloatArray, ints: IntArray, si: IntArray, state: FloatArray, shape: FloatArray,
    plan: IntArray, why: FloatArray,
) -> tuple[int, int, float]:  # fmt: skip
    """Write the chosen step and book it; returns (rows, scene, predicted seconds, nothing corrected)."""
    none = np.empty(0, dtype=np.int64)
    rows, alone = every, why[W_EVERY_RAW]
    if action == PREFILL_ONLY:
        rows, alone = none, 0.0
    elif action == BLOCKING:
        rows = si[I_BLOCKING, : int(why[W_BLOCKING])]
    rows = in_order_of_admission(ints, rows)
    run = float(rows.size)
    context, longest = sums_of(rows, si[I_COMPUTED])
    if action == BLOCKING:
        alone = time_of(packed, run, context, longest, none, none, 0.0, shape)
    raw = 0.0
    if run + prefill > 0:
        raw = max(time_of(packed, run, context, longest, left, done, float(prefill), shape), alone)
    position, late = write_plan(rows, prefill, left, si, plan)
    settle(late, action in (DECODE_ONLY, MIXED), raw, prm[LATE_SHARE], state, why)
    scene = 0 if prefill == 0 else (1 if run == 0.0 else 2)
    why[W_TIME] = raw * mean[scene, size_class(run + prefill)]
    why[W_ACTION], why[W_PREFILL] = action, prefill
    why[W_BOUND] = bound_by(action, prefill, left.size, budget - rows.size, why)
    return position, scene, raw


@compiled
def decide(
    ints: IntArray, floats: FloatArray, n: int, now: float, start: float, limits: IntArray, packed: FloatArray,
    prm: FloatArray, state: FloatArray, learned: FloatArray, ring: FloatArray, old: FloatArray, remembered: int,
    memory: FloatArray, finished: IntArray, si: IntArray, sf: FloatArray, shape: FloatArray, plan: IntArray,
    why: FloatArray, shares: FloatArray,
) -> tuple[int, int, int, float]:  # fmt: skip
    """One step: rows into plan[0], tokens into plan[1], victims into plan[2].

    Returns (rows, victims, scene, predicted seconds, nothing corrected); no rows and no victims when nothing can run.
    `limits`: max_num_batched_tokens, max_num_seqs, block_size, free blocks, all blocks, watermark blocks,
    max_model_len. `shares`: the tenants' counters (`fair`), without columns where there is one tenant.
    """
    budget, seats, block_size, kv_tokens = limits[0], limits[1], limits[2], float(limits[4] * limits[2])
    if state[KNEE] == 0.0:
        learn_prices(packed, budget, state, shape)
    output = look(
        ints, floats, n, now, start, limits[6], prm, old, remembered, memory, finished, state, ring, si, sf
    )  # fmt: skip
    expect(ints, floats, n, start, output, state, si, sf)
    if shares.shape[1] > 0:
        lift(ints, n, si[I_KIND], shares)
    safe, mean = np.empty((3, NUM_SIZES)), np.ones((3, NUM_SIZES))
    factors_of(learned, prm[DEVIATIONS], prm[USE_SIZES] != 0.0, safe)
    if prm[USE_BIAS_IN_VALUES] != 0.0:
        factors_of(learned, 0.0, prm[USE_SIZES] != 0.0, mean)
    hope = mean.copy()
    if prm[SIZES] > 1.0:
        hope_for_new(learned, hope)

    why[:] = 0.0
    why[W_FREE] = limits[3]
    give_roles(ints, n, block_size, si, sf, state, why)
    make_room(ints, n, block_size, si, sf, state, plan, why)
    on_time = take_round(n, budget, packed, safe, si, sf, state, shape, why)
    set_cap(prm, safe, state, why)
    by_deadline = value_prompts(ints, n, budget, packed, safe, mean, si, sf, state, shape, why)
    judge_prompts(
        ints, by_deadline, on_time, seats, kv_tokens, packed, prm, mean, si, sf, state, shape, why, shares, output
    )  # fmt: skip
    count = late_decodes(ints, n, on_time.size, budget, block_size, packed, prm, safe, si, sf, state, shape, why)
    queued = queue_prompts(ints, n, count, by_deadline, limits, prm, si, sf, state, memory, plan, why, shares)
    left, done = si[I_QUEUE_LEFT, :queued], si[I_QUEUE_DONE, :queued]
    set_prices(by_deadline, floats, count, left, done, budget, packed, prm, safe, mean, si, sf, state, shape, why)
    worth = price_decodes(count, output, seats, kv_tokens, prm, mean, state, why)
    weigh_options(count, worth, on_time, left, done, budget, packed, prm, safe, hope, si, sf, state, shape, why)
    action, prefill = choose(on_time, count, queued, budget, mean, prm, sf, state, why)
    every = si[I_DECODES, :count]
    position, scene, raw = finish(
        action, prefill, every, left, done, budget, packed, prm, mean, ints, si, state, shape, plan, why
    )  # fmt: skip
    return position, int(why[W_VICTIMS]), scene, raw
