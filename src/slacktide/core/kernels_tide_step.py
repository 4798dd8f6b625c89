"""Compiled parts of `tide` that make a step: who joins, what is admitted, four candidate steps, the plan.

docs/background/tide.md derives the formulas; `kernels_tide` holds what they rest on, `tide` the slot names.
"""

from __future__ import annotations

import numpy as np

from slacktide.core.kernels import compiled
from slacktide.core.kernels_fair import lift
from slacktide.core.kernels_latency import step_time_packed
from slacktide.core.kernels_tide import expect, look
from slacktide.core.kernels_tide_fill import (
    best_size,
    blocks_of,
    bounds_of,
    build_queue,
    fit,
    order_prompts,
    pick_victim,
    sums_of,
)
from slacktide.core.kernels_tide_supply import (
    LEAST_CHUNK,
    accept,
    factors_of,
    first_token,
    learn_prices,
    seconds_of,
    size_class,
    time_of,
)
from slacktide.core.kinds import DECODE, PREFILL
from slacktide.core.live import (
    ADMISSION_ORDER,
    NUM_BLOCKS,
    NUM_OUTPUT,
    NUM_PROMPT,
    NUM_SHARED,
    PRIORITY,
    SLO_TTFT,
    STATUS,
)
from slacktide.core.tide import (
    ACCEPTED,
    ARRIVAL_RATE,
    BACKFILL,
    BLOCKING,
    BYPASS,
    CAP_SHARE,
    CREDIT,
    DECODE_ONLY,
    DECODE_TIME,
    DEMOTED,
    DEVIATIONS,
    F_DEMAND,
    F_GROWTH,
    F_HOLD,
    F_PACE,
    F_SERVICE,
    F_SLACK,
    FIXED,
    I_BLOCKING,
    I_COMPUTED,
    I_DECODES,
    I_GONE,
    I_KIND,
    I_MISSED,
    I_ORDER,
    I_QUEUE,
    I_QUEUE_DONE,
    I_QUEUE_LEFT,
    I_REMAINING,
    I_ROLE,
    KAPPA_HIGH,
    KAPPA_LOW,
    KNEE,
    KNEE_TIME,
    LATE_DECODE,
    LATE_EVERY,
    LATE_PREFILL,
    LATE_SHARE,
    LEAST_TIME,
    MEMORY,
    MISS_RATE,
    MIXED,
    NO_ROLE,
    NUM_SIZES,
    ON_TIME_DECODE,
    PACE,
    PER_PAIR,
    PER_TOKEN,
    PREFILL_ONLY,
    RELEASED_COUNT,
    RELEASED_TIME,
    RELEASED_TOKENS,
    SATURATION,
    SEATS,
    SERVED_LATE,
    SINCE_LATE,
    SIZES,
    TIGHTEST,
    USE_BIAS_IN_VALUES,
    USE_BLOCKING,
    USE_DEMOTION,
    USE_EVICTION,
    USE_EXCLUSIVE,
    USE_HOLD,
    USE_KV_GATE,
    USE_MIXED,
    USE_OCCUPANCY,
    USE_RESCUE,
    USE_SIZES,
    W_ACCEPTED,
    W_ACTION,
    W_ACTIONS,
    W_BOUND,
    W_CAP,
    W_DECODES,
    W_DEMOTED,
    W_ETA,
    W_HOLD,
    W_LATE,
    W_LATE_DECODES,
    W_ON_TIME,
    W_PREFILL,
    W_PRESS,
    W_REFUSED,
    W_ROUND,
    W_S1,
    W_S2,
    W_SOURCE,
    W_TIME,
    W_TTFT,
    W_VALUE,
)
from slacktide.core.types import RUNNING, FloatArray, IntArray

ENOUGH_RELEASES = 5.0
"""Finished requests before the pace at which KV and seats come back is believed."""
NEARLY = 0.98
"""A stream is tried to be saved down to this share of the time that a decode round is expected to take."""
WORK_FIRST = 1.02
"""A step with prompt tokens wins ties with a pure decode round: what is done early leaves room for surprises."""
LATE_ROOM = 0.9
"""Late decodes may use this share of the room that a round of on-time decodes has."""
MISSES_FULL = 0.1
"""Miss rate from which the supply counts with its lowest share."""
BLOCKING_SECONDS = 0.2
"""Most seconds that `blocking` looks ahead."""
BLOCKING_REACH = 1.1
"""`blocking` runs the decodes due within this many times the step it allows."""
HOLD_LAXITY = 1.0
"""Seconds of laxity beyond which prompts may wait for company."""
CREDIT_LIMIT = 2.0
"""Seconds of the engine that late work may save up: what it does not use soon is lost, or it would all come at once."""
EVICT_ONCE = 1
"""A late request is evicted at most so often for those on time: each time it loses its whole KV."""


@compiled
def join_late(
    ints: IntArray, n: int, packed: FloatArray, safe: FloatArray, limit: float, free: int, kept_back: int, budget: int,
    block_size: int, round_raw: float, si: IntArray, shape: FloatArray,
) -> tuple[int, int, float]:  # fmt: skip
    """Let late decodes join the round, one by one in order of arrival, while it takes at most `limit` seconds.

    They leave alone the blocks kept back for running prompts, unless nobody else decodes. Appends them behind the
    on-time rows of I_DECODES; returns (how many, new blocks, seconds of the whole round as predicted).
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
        if taken + blocks > (free if alone else free - kept_back) and blocks > 0:
            continue
        u = float(si[I_COMPUTED, row])
        shape[:] = 0.0
        shape[0] = shape[1] = shape[8] = float(count + 1)
        shape[9], shape[10] = context + u, max(longest, u)
        raw = step_time_packed(packed, shape)
        if safe[0, size_class(shape[0])] * raw > limit:
            break
        taken += blocks
        context, longest, seconds = shape[9], shape[10], raw
        decodes[count] = row
        count += 1
        joined += 1
    return joined, taken, seconds


@compiled
def decide(
    ints: IntArray,
    floats: FloatArray,
    n: int,
    now: float,
    start: float,
    limits: IntArray,
    packed: FloatArray,
    prm: FloatArray,
    state: FloatArray,
    learned: FloatArray,
    ring: FloatArray,
    old: FloatArray,
    remembered: int,
    memory: FloatArray,
    finished: IntArray,
    si: IntArray,
    sf: FloatArray,
    shape: FloatArray,
    plan: IntArray,
    why: FloatArray,
    shares: FloatArray,
) -> tuple[int, int, int, float]:
    """One step: rows into plan[0], tokens into plan[1], victims into plan[2].

    Returns (rows, victims, scene, predicted seconds, nothing corrected); no rows and no victims when nothing can run.
    `limits`: max_num_batched_tokens, max_num_seqs, block_size, free blocks, all blocks, watermark blocks,
    max_model_len. `shares`: the tenants' counters (`fair`), without columns where there is one tenant. Long: the steps
    of docs/background/tide.md in their order, which hand each other too much to split.
    """
    budget, seats, block_size, free = limits[0], limits[1], limits[2], limits[3]
    kv_tokens, watermark, max_model_len = float(limits[4] * block_size), limits[5], limits[6]
    if state[KNEE] == 0.0:
        learn_prices(packed, budget, state, shape)
    output = look(
        ints, floats, n, now, start, max_model_len, prm, old, remembered, memory, finished, state, ring, si, sf
    )
    expect(ints, floats, n, start, output, state, si, sf)
    if shares.shape[1] > 0:
        lift(ints, n, si[I_KIND], shares)
    why[:] = 0.0
    safe, mean = np.empty((3, NUM_SIZES)), np.ones((3, NUM_SIZES))
    factors_of(learned, prm[DEVIATIONS], prm[USE_SIZES] != 0.0, safe)
    if prm[USE_BIAS_IN_VALUES] != 0.0:
        factors_of(learned, 0.0, prm[USE_SIZES] != 0.0, mean)

    # ---- roles; what running requests will need of KV
    room = np.empty(6, dtype=np.int64)
    num_running, kept_back, need, num_late, num_prompts, num_decodes, num_late_prompts = 0, 0, 0, 0, 0, 0, 0
    expected = 0.0
    for row in range(n):
        si[I_GONE, row] = 0
        si[I_ROLE, row] = NO_ROLE
        running = ints[STATUS, row] == RUNNING
        kind = si[I_KIND, row]
        if running:
            num_running += 1
            expected += float(si[I_COMPUTED, row] + si[I_REMAINING, row]) + 0.5 * sf[F_GROWTH, row]
            if kind == PREFILL:
                kept_back += blocks_of(ints, row, si[I_REMAINING, row], block_size)
        if kind == DECODE:
            if si[I_MISSED, row] != 0:
                si[I_ROLE, row] = LATE_DECODE
                num_late += 1
            else:
                si[I_ROLE, row] = ON_TIME_DECODE
                num_decodes += 1
                need += blocks_of(ints, row, 1, block_size)
        elif kind == PREFILL:
            if si[I_MISSED, row] != 0:
                si[I_ROLE, row] = LATE_PREFILL
                num_late_prompts += 1
            else:
                si[I_ROLE, row] = DEMOTED
                num_prompts += 1

    # ---- out of blocks: somebody loses its KV
    num_victims = 0
    while need > free:
        row = pick_victim(ints, n, si, sf, False, -1)
        if row < 0:
            break
        plan[2, num_victims] = row
        num_victims += 1
        free += ints[NUM_BLOCKS, row] - ints[NUM_SHARED, row]
        num_running -= 1
        expected -= float(si[I_COMPUTED, row] + si[I_REMAINING, row]) + 0.5 * sf[F_GROWTH, row]
        role = si[I_ROLE, row]
        if role == ON_TIME_DECODE:
            need -= blocks_of(ints, row, 1, block_size)
            num_decodes -= 1
        elif role == LATE_DECODE:
            num_late -= 1
        else:
            kept_back -= blocks_of(ints, row, si[I_REMAINING, row], block_size)
            if role == LATE_PREFILL:
                num_late_prompts -= 1
            else:
                num_prompts -= 1
        si[I_GONE, row] = 1
        si[I_ROLE, row] = NO_ROLE

    # ---- the decode round of those on time
    slack, service = sf[F_SLACK], sf[F_SERVICE]
    decodes = si[I_DECODES]
    count = 0
    for row in range(n):
        if si[I_ROLE, row] == ON_TIME_DECODE:
            decodes[count] = row
            count += 1
    if count > budget:  # more than a step holds: those due first
        keys = np.empty(count)
        for i in range(count):
            keys[i] = slack[decodes[i]]
        by_slack = np.argsort(keys, kind="mergesort")
        kept = decodes[:count].copy()
        for i in range(budget):
            decodes[i] = kept[by_slack[i]]
        count = budget
    on_time = decodes[:count].copy()
    context, longest = sums_of(on_time, si[I_COMPUTED])
    empty = np.empty(0, dtype=np.int64)
    round_raw = time_of(packed, float(count), context, longest, empty, empty, 0.0, shape) if count > 0 else 0.0
    round_time = safe[0, size_class(float(count))] * round_raw
    state[DECODE_TIME] = round_raw if count > 0 else state[FIXED]
    s1, s2 = bounds_of(on_time, sf, round_time)

    # ---- caps and service times
    cap = prm[CAP_SHARE] * state[TIGHTEST]
    cap = max(cap, safe[1, size_class(LEAST_CHUNK)] * state[LEAST_TIME])
    one, none = np.full(1, budget), np.zeros(1, dtype=np.int64)
    chunk = max(fit(packed, safe, 0.0, 0.0, 0.0, one, none, budget, cap, 0.0, shape), 1)
    chunk_time = seconds_of(packed, safe, 0.0, 0.0, 0.0, one, none, float(chunk), 0.0, shape)
    m_p = safe[1, size_class(float(chunk))]
    per_token = max(chunk_time / chunk - 0.5 * m_p * state[PER_PAIR] * chunk, 0.0)
    knee_size = size_class(state[KNEE])
    knee_time = safe[1, knee_size] * state[KNEE_TIME]
    prompts = np.empty(num_prompts, dtype=np.int64)
    keys = np.empty(num_prompts)
    at = 0
    for row in range(n):
        if si[I_ROLE, row] == DEMOTED:
            r, u = float(si[I_REMAINING, row]), float(si[I_COMPUTED, row])
            service[row] = per_token * r + m_p * state[PER_PAIR] * r * (u + 0.5 * r)
            sf[F_HOLD, row] = float(ints[NUM_PROMPT, row] + ints[NUM_OUTPUT, row]) + 0.5 * sf[F_GROWTH, row]
            prompts[at] = row
            # Without a deadline: by priority, then by arrival, behind all that have one.
            keys[at] = slack[row] if slack[row] < np.inf else 1e12 + 1e3 * ints[PRIORITY, row]
            at += 1
    by_deadline = prompts[np.argsort(keys, kind="mergesort")]

    # ---- who can be on time
    beside = round_time
    if count > 0:
        knee = int(state[KNEE])
        one[0] = knee
        mixed = seconds_of(packed, safe, float(count), context, longest, one, none, float(knee), round_raw, shape)
        beside = min(max(mixed - knee_time, 0.0), round_time)
    kappa = prm[KAPPA_HIGH] - (prm[KAPPA_HIGH] - prm[KAPPA_LOW]) * min(1.0, state[MISS_RATE] / MISSES_FULL)
    rest, rates = np.full(2, np.inf), np.full(2, np.inf)
    if state[RELEASED_COUNT] >= ENOUGH_RELEASES:
        if prm[MEMORY] != 0.0:
            rest[0] = max(kv_tokens - expected, 0.0)
            rates[0] = state[RELEASED_TOKENS] / max(state[RELEASED_TIME], 1e-3)
        if prm[SEATS] != 0.0:
            rest[1] = float(seats - num_running)
            rates[1] = state[RELEASED_COUNT] / max(state[RELEASED_TIME], 1e-3)
    accepted, pressed = accept(
        by_deadline, on_time, beside, kappa, prm[USE_DEMOTION] != 0.0, rest, rates, ints, si, sf, shares
    )  # fmt: skip
    own_tokens = float(np.sum(ints[NUM_PROMPT, :n])) / max(n, 1)
    own_time = per_token * own_tokens + 0.5 * m_p * state[PER_PAIR] * own_tokens * own_tokens
    why[W_TTFT] = first_token(by_deadline, on_time, beside, own_time, own_tokens + output, rest, rates, ints, sf)

    # ---- late decodes, from what is left
    late_waits = num_late > 0 or num_late_prompts > 0
    joined, late_cost, all_raw = 0, 0.0, round_raw
    if num_late > 0 and count < budget:
        state[SINCE_LATE] += 1.0
        due = prm[LATE_EVERY] > 0.0 and state[SINCE_LATE] >= prm[LATE_EVERY]
        if num_prompts == 0 or due or state[CREDIT] > 0.0 or count == 0:
            limit = LATE_ROOM * min(s1, s2 - round_time)
            if num_decodes == 0 or state[CREDIT] >= 0.5 * CREDIT_LIMIT:
                limit = np.inf  # what is reserved for them is due, whatever it costs
            joined, blocks, all_raw = join_late(
                ints, n, packed, safe, limit, free - need, kept_back, budget, block_size, round_raw, si, shape
            )
            need += blocks
            late_cost = max(all_raw - round_raw, 0.0)
            count += joined
            context, longest = sums_of(decodes[:count], si[I_COMPUTED])
            if joined > 0:
                state[SINCE_LATE] = 0.0
    every = decodes[:count]
    every_raw = all_raw

    # ---- the queue of prompts
    order = si[I_ORDER]
    reserved = num_late_prompts > 0 and prm[LATE_SHARE] > 0.0 and state[CREDIT] >= state[KNEE_TIME]
    m, source = order_prompts(by_deadline, n, reserved, prm[BACKFILL] != 0.0, ints, si, sf, order, shares)
    room[0], room[1], room[2] = free - need, kept_back, seats - num_running
    room[3], room[4], room[5] = watermark, 1 if num_running > 0 else 0, -1
    if num_victims > 0:
        room[2] = 0
    queued, total = build_queue(
        order, m, room, ints, si, sf, memory, kv_tokens, expected, prm[USE_KV_GATE] != 0.0, prm[BYPASS],
        state[KNEE_TIME], budget, block_size, max_model_len,
    )  # fmt: skip
    if room[5] >= 0 and num_victims == 0 and prm[USE_EVICTION] != 0.0:
        row = pick_victim(ints, n, si, sf, True, EVICT_ONCE)
        if row >= 0 and si[I_ROLE, row] != NO_ROLE:
            used = False
            for i in range(count - joined, count):
                used = used or decodes[i] == row
            for i in range(queued):
                used = used or si[I_QUEUE, i] == row
            if not used:
                plan[2, 0] = row
                num_victims = 1
                si[I_GONE, row] = 1
                kept = 0  # nobody is admitted in a step that preempts
                for i in range(queued):
                    if ints[STATUS, si[I_QUEUE, i]] == RUNNING:
                        si[I_QUEUE, kept], si[I_QUEUE_LEFT, kept] = si[I_QUEUE, i], si[I_QUEUE_LEFT, i]
                        si[I_QUEUE_DONE, kept] = si[I_QUEUE_DONE, i]
                        kept += 1
                queued = kept
    left, done = si[I_QUEUE_LEFT, :queued], si[I_QUEUE_DONE, :queued]
    total = 0
    for i in range(queued):
        total += left[i]
    if source >= 2 and count > 0:
        cap = min(cap, knee_time + round_time)

    # ---- prices
    prices = np.zeros(2)
    held = False
    laxest = np.inf
    if queued > 0:
        full = max(fit(packed, safe, 0.0, 0.0, 0.0, left, done, min(total, budget), cap, 0.0, shape), 1)
        full_time = seconds_of(packed, mean, 0.0, 0.0, 0.0, left, done, float(full), 0.0, shape)
        pairs = shape[5] - 0.5 * shape[6]
        eta = full_time / (state[PER_TOKEN] * full + state[PER_PAIR] * pairs)
        if prm[USE_HOLD] != 0.0 and full < state[KNEE] and count > 0:
            held = 1 <= source <= 2
            for i in range(by_deadline.size):
                row = by_deadline[i]
                if si[I_ROLE, row] != ACCEPTED:
                    continue
                laxity = slack[row] - sf[F_DEMAND, row] - service[row]
                laxest = min(laxest, laxity)
                if not laxity > max(
                    HOLD_LAXITY, 0.5 * floats[SLO_TTFT, row] if floats[SLO_TTFT, row] < np.inf else 0.0
                ):
                    held = False
            if held:
                k = state[KNEE]
                at_knee = mean[1, knee_size] * state[KNEE_TIME] / (state[PER_TOKEN] * k + 0.5 * state[PER_PAIR] * k * k)
                eta = min(eta, at_knee)
        prices[0], prices[1] = eta * state[PER_TOKEN], eta * state[PER_PAIR]
        why[W_ETA] = eta

    # ---- four candidate steps
    occupancy = max(float(count), 1.0)
    if prm[USE_OCCUPANCY] != 0.0:
        wanted = state[ARRIVAL_RATE] * output * (state[PACE] if state[PACE] < np.inf else 1e12)
        mean_context = context / count if count > 0 else 1.0
        most = min(float(seats), kv_tokens / max(mean_context, 1.0))
        occupancy = max(occupancy, min(wanted, most))
    fixed = min(state[FIXED], every_raw)
    sizes, saturation = int(prm[SIZES]), prm[SATURATION]
    tokens4 = np.zeros(4, dtype=np.int64)
    value4, time4 = np.zeros(4), np.ones(4)
    share = count / occupancy
    mu_d = mean[0, size_class(float(count))]
    worth = mu_d * ((every_raw - fixed) + fixed * share) if count > 0 else 0.0
    if count > 0:
        value4[DECODE_ONLY], time4[DECODE_ONLY] = worth, mu_d * every_raw
    top = min(total, budget)
    if queued > 0 and (prm[USE_EXCLUSIVE] != 0.0 or count == 0):
        bound = min(s1 - round_time, cap)
        p = fit(packed, safe, 0.0, 0.0, 0.0, left, done, top, bound, 0.0, shape)
        if p == 0 and count == 0:
            p = min(top, int(state[KNEE]))  # no bound is worth an engine that stands still
        if p > 0:
            p, v, t = best_size(packed, mean, 0.0, 0.0, 0.0, left, done, p, prices, 0.0, sizes, saturation, 0.0, shape)
            tokens4[PREFILL_ONLY], value4[PREFILL_ONLY], time4[PREFILL_ONLY] = p, v, t
    top = min(total, budget - count)
    if queued > 0 and count > 0 and prm[USE_MIXED] != 0.0:
        bound = min(s1, s2 - round_time, cap)
        p = fit(packed, safe, float(count), context, longest, left, done, top, bound, every_raw, shape)
        if p > 0:
            p, v, t = best_size(packed, mean, float(count), context, longest, left, done, p, prices, worth, sizes,
                                saturation, every_raw, shape)  # fmt: skip
            tokens4[MIXED], value4[MIXED], time4[MIXED] = p, v, t
    blocking = si[I_BLOCKING]
    num_blocking = 0
    if queued > 0 and count > 1 and prm[USE_BLOCKING] != 0.0:
        reach = BLOCKING_REACH * min(cap, BLOCKING_SECONDS) + round_time
        soonest, second, others = np.inf, np.inf, np.inf
        for i in range(on_time.size):
            row = on_time[i]
            s = slack[row]
            if s < reach:
                blocking[num_blocking] = row
                num_blocking += 1
                if s >= round_time:
                    soonest = min(soonest, s)
                    second = min(second, s + sf[F_PACE, row])
            else:
                others = min(others, s)
        if 0 < num_blocking < on_time.size:
            rows = blocking[:num_blocking]
            own_context, own_longest = sums_of(rows, si[I_COMPUTED])
            own_raw = time_of(packed, float(num_blocking), own_context, own_longest, empty, empty, 0.0, shape)
            own_fixed = min(fixed, own_raw)
            own_worth = mu_d * ((own_raw - own_fixed) + own_fixed * num_blocking / occupancy)
            bound = min(soonest, second - round_time, others - round_time, cap)
            own = float(num_blocking)
            p = fit(packed, safe, own, own_context, own_longest, left, done, top, bound, own_raw, shape)
            if p > 0:
                p, v, t = best_size(packed, mean, own, own_context, own_longest, left, done, p, prices, own_worth,
                                    sizes, saturation, own_raw, shape)  # fmt: skip
                tokens4[BLOCKING], value4[BLOCKING], time4[BLOCKING] = p, v, t
        else:
            num_blocking = 0

    # ---- the best of them
    action, best = DECODE_ONLY, -1.0
    rescue = False
    if prm[USE_RESCUE] != 0.0:
        likely = mean[0, size_class(float(on_time.size))] * round_raw
        for i in range(on_time.size):
            rescue = rescue or likely * NEARLY <= slack[on_time[i]] < round_time
    if rescue:
        best = np.inf  # some stream can be saved by a decode round at once, and by nothing else
    elif count > 0:
        best = value4[DECODE_ONLY] / time4[DECODE_ONLY]
        if (pressed or reserved) and (tokens4[PREFILL_ONLY] + tokens4[MIXED] + tokens4[BLOCKING] > 0):
            best = 0.0
    for k in range(1, 4):
        if tokens4[k] > 0 and WORK_FIRST * value4[k] / time4[k] > best:
            best = WORK_FIRST * value4[k] / time4[k]
            action = k
    served_late = late_cost
    prefill = tokens4[action]
    if reserved and action == DECODE_ONLY and queued > 0 and state[CREDIT] >= 2.0 * state[KNEE_TIME]:
        # The reserve is due and no deadline leaves room for it: it comes first.
        action = MIXED
        prefill = min(total, budget - count, int(state[KNEE]))
        if prefill <= 0:
            action, prefill = DECODE_ONLY, 0
    if action == DECODE_ONLY:
        prefill = 0

    # ---- the plan
    position = 0
    if action == BLOCKING:
        every = blocking[:num_blocking]
    if action != PREFILL_ONLY:
        in_order = True
        for i in range(1, every.size):
            in_order = in_order and ints[ADMISSION_ORDER, every[i]] > ints[ADMISSION_ORDER, every[i - 1]]
        if not in_order:
            ranks = np.empty(every.size)
            for i in range(every.size):
                ranks[i] = float(ints[ADMISSION_ORDER, every[i]])
            every = every[np.argsort(ranks, kind="mergesort")]
        for i in range(every.size):
            plan[0, position], plan[1, position] = every[i], 1
            position += 1
    run_context, run_longest, run = 0.0, 0.0, 0.0
    if action != PREFILL_ONLY:
        run = float(every.size)
        run_context, run_longest = sums_of(every, si[I_COMPUTED])
    alone = every_raw
    if action == BLOCKING:
        alone = time_of(packed, run, run_context, run_longest, empty, empty, 0.0, shape)
    raw = 0.0
    if run + prefill > 0:
        raw = time_of(packed, run, run_context, run_longest, left, done, float(prefill), shape)
        raw = max(raw, alone if run > 0.0 else 0.0)
    late_tokens, over = 0, prefill
    for i in range(queued):
        tokens = min(left[i], over)
        if tokens <= 0:
            break
        row = si[I_QUEUE, i]
        plan[0, position], plan[1, position] = row, tokens
        position += 1
        over -= tokens
        if si[I_ROLE, row] == LATE_PREFILL:
            late_tokens += tokens
    if late_tokens > 0:
        served_late += state[KNEE_TIME] * late_tokens / max(state[KNEE], 1.0)
    if action not in (DECODE_ONLY, MIXED):
        served_late -= late_cost
    state[SERVED_LATE] += max(served_late, 0.0)
    if late_waits and prm[LATE_SHARE] > 0.0:
        state[CREDIT] = min(state[CREDIT] + prm[LATE_SHARE] * raw - served_late, CREDIT_LIMIT)
        state[CREDIT] = max(state[CREDIT], -CREDIT_LIMIT)
    else:
        state[CREDIT] = 0.0
    scene = 0 if prefill == 0 else (1 if run == 0.0 else 2)
    why[W_TIME] = raw * mean[scene, size_class(run + prefill)]

    why[W_ACTION], why[W_DECODES], why[W_LATE_DECODES], why[W_ON_TIME] = action, num_decodes, joined, num_prompts
    why[W_ACCEPTED], why[W_DEMOTED], why[W_LATE] = accepted, num_prompts - accepted, num_late_prompts
    why[W_PREFILL], why[W_ROUND], why[W_S1], why[W_S2], why[W_CAP] = prefill, round_time, s1, s2, cap
    why[W_PRESS], why[W_HOLD], why[W_SOURCE], why[W_REFUSED] = (
        1.0 if pressed else 0.0,
        1.0 if held else 0.0,
        source,
        room[5],
    )
    why[W_VALUE] = value4[action]
    bound_by = 0
    if prefill > 0 and prefill == total:
        bound_by = 4
    elif prefill > 0 and prefill >= budget - int(run):
        bound_by = 5
    elif queued > 0:
        limit = s1 - round_time if action == PREFILL_ONLY else s1
        if cap <= limit and cap <= s2 - round_time:
            bound_by = 3
        elif limit <= s2 - round_time or action == PREFILL_ONLY:
            bound_by = 1
        else:
            bound_by = 2
    why[W_BOUND] = bound_by
    for k in range(4):
        why[W_ACTIONS + 2 * k], why[W_ACTIONS + 2 * k + 1] = value4[k], time4[k]
    return position, num_victims, scene, raw
