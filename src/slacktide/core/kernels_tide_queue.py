"""Compiled parts of `tide` that line prompts up for a step and price the step's options. Slot names are in `tide`."""

from __future__ import annotations

import numpy as np

from slacktide.core.kernels import compiled
from slacktide.core.kernels_tide_fill import best_size, build_queue, fit, order_prompts, sums_of
from slacktide.core.kernels_tide_kv import PEAKS, ask_for_kv, foresee_kv, whole_blocks
from slacktide.core.kernels_tide_late import evict_late
from slacktide.core.kernels_tide_roles import MISSES_FULL
from slacktide.core.kernels_tide_supply import seconds_of, size_class, time_of
from slacktide.core.live import SLO_TTFT, STATUS
from slacktide.core.tide import (
    ACCEPTED,
    ARRIVAL_RATE,
    BACKFILL,
    BLOCKING,
    BYPASS,
    CREDIT,
    DECODE_ONLY,
    F_DEMAND,
    F_PACE,
    F_SERVICE,
    F_SLACK,
    FIXED,
    GAP_MODE,
    I_BLOCKING,
    I_COMPUTED,
    I_ORDER,
    I_QUEUE_LEFT,
    I_ROLE,
    KNEE,
    KNEE_TIME,
    LATE_PREFILL,
    LATE_SHARE,
    MISS_RATE,
    MIXED,
    PACE,
    PER_PAIR,
    PER_TOKEN,
    PREFILL_ONLY,
    REFUSED,
    SATURATION,
    SIZES,
    URGENCY,
    USE_BLOCKING,
    USE_EVICTION,
    USE_EXCLUSIVE,
    USE_HOLD,
    USE_KEEPING,
    USE_KV_GATE,
    USE_LENDING,
    USE_MIXED,
    USE_OCCUPANCY,
    W_ACTIONS,
    W_BLOCKING,
    W_CAP,
    W_CONTEXT,
    W_EVERY_RAW,
    W_EXPECTED,
    W_FORCED,
    W_FREE,
    W_FULL,
    W_HOLD,
    W_KEPT_BACK,
    W_KNEE_TIME,
    W_LATE,
    W_LAXITY,
    W_LONGEST,
    W_MEAN_TIME,
    W_NEED,
    W_OCCUPANCY,
    W_PAIR_PRICE,
    W_PRICE,
    W_RESERVED,
    W_ROUND,
    W_RUNNING,
    W_S1,
    W_S2,
    W_SOURCE,
    W_STREAMS_TURN,
    W_TOKENS,
    W_TOTAL,
    W_VICTIMS,
)
from slacktide.core.types import RUNNING, FloatArray, IntArray

BLOCKING_SECONDS = 0.2
"""Most seconds that `blocking` looks ahead."""
BLOCKING_REACH = 1.1
"""`blocking` runs the decodes due within this many times the step it allows."""
LATE_PATIENCE = 60.0
"""Seconds behind its deadline from which blocks and a seat are kept for the oldest late prompt (as the `ageing` of
`sliding`): by then short bursts are over, and an interactive user is gone."""
HOLD_LAXITY = 1.0
"""Seconds of laxity beyond which prompts may wait for company."""


@compiled
def longest_waiting(ints: IntArray, n: int, si: IntArray, sf: FloatArray) -> int:
    """The oldest late request, if it waits for blocks or a seat longer than it should have to; else -1."""
    for row in range(n):
        if si[I_ROLE, row] == LATE_PREFILL:
            return row if ints[STATUS, row] != RUNNING and -sf[F_SLACK, row] > LATE_PATIENCE else -1
    return -1


@compiled
def queue_prompts(
    ints: IntArray, n: int, count: int, by_deadline: IntArray, limits: IntArray, prm: FloatArray, si: IntArray,
    sf: FloatArray, state: FloatArray, memory: FloatArray, plan: IntArray, why: FloatArray, shares: FloatArray,
) -> int:  # fmt: skip
    """Line up the prompts that this step may serve, beside `count` decodes; returns how many."""
    turn = why[W_LATE] > 0.0 and why[W_STREAMS_TURN] == 0.0
    reserved = turn and prm[LATE_SHARE] > 0.0 and state[CREDIT] >= state[KNEE_TIME]
    m, source = order_prompts(by_deadline, n, reserved, prm[BACKFILL] != 0.0, ints, si, sf, si[I_ORDER], shares)
    room = np.empty(6, dtype=np.int64)
    room[0], room[1] = int(why[W_FREE] - why[W_NEED]), int(why[W_KEPT_BACK])
    room[2] = limits[1] - int(why[W_RUNNING]) if why[W_VICTIMS] == 0.0 else 0
    room[3], room[4], room[5] = limits[5], 1 if why[W_RUNNING] > 0.0 else 0, -1
    oldest = longest_waiting(ints, n, si, sf) if turn and not reserved and prm[LATE_SHARE] > 0.0 else -1
    if oldest >= 0:
        room[1] += whole_blocks(ints, oldest, limits[2], limits[6])
        room[2] = max(room[2] - 1, 0)
    peaks, stride = np.zeros(PEAKS), 1.0
    if prm[USE_KV_GATE] != 0.0:
        stride = foresee_kv(ints, n, si, sf, peaks)
    queued, _ = build_queue(
        si[I_ORDER], m, room, ints, si, sf, memory, float(limits[4] * limits[2]), why[W_EXPECTED], peaks, stride,
        prm[USE_KV_GATE] != 0.0, prm[BYPASS], state[KNEE_TIME], limits[0], limits[2], limits[6],
    )  # fmt: skip
    state[REFUSED] = -1.0
    why[W_FULL] = 1.0 if room[5] >= 0 else 0.0
    if room[5] >= 0 and why[W_VICTIMS] == 0.0 and prm[USE_EVICTION] != 0.0:
        queued = evict_late(ints, n, count, queued, si, sf, state, plan, why)
    if room[5] >= 0 and why[W_VICTIMS] == 0.0 and prm[USE_LENDING] != 0.0:
        ask_for_kv(ints, room, limits[2], limits[6], sf, state)
    for i in range(queued):
        why[W_TOTAL] += si[I_QUEUE_LEFT, i]
    why[W_RESERVED], why[W_SOURCE] = 1.0 if reserved else 0.0, source
    if source >= 2 and count > 0:
        why[W_CAP] = min(why[W_CAP], why[W_KNEE_TIME] + why[W_ROUND])
    return queued


@compiled
def _all_lax(by_deadline: IntArray, floats: FloatArray, si: IntArray, sf: FloatArray) -> bool:
    """Whether every accepted prompt has ample time."""
    for i in range(by_deadline.size):
        row = by_deadline[i]
        if si[I_ROLE, row] == ACCEPTED:
            target = floats[SLO_TTFT, row]
            enough = max(HOLD_LAXITY, 0.5 * target if target < np.inf else 0.0)
            if not sf[F_SLACK, row] - sf[F_DEMAND, row] - sf[F_SERVICE, row] > enough:
                return False
    return True


@compiled
def set_prices(
    by_deadline: IntArray, floats: FloatArray, count: int, left: IntArray, done: IntArray, budget: int,
    packed: FloatArray, prm: FloatArray, safe: FloatArray, mean: FloatArray, si: IntArray, sf: FloatArray,
    state: FloatArray, shape: FloatArray, why: FloatArray,
) -> None:  # fmt: skip
    """What a prompt token and an attended pair are worth: the batch that fits under the cap is worth its own time.

    While every prompt has ample time, a smaller batch than the knee is priced as at the knee: it waits for company.
    """
    if left.size == 0:
        return
    top = min(int(why[W_TOTAL]), budget)
    full = max(fit(packed, safe, 0.0, 0.0, 0.0, left, done, top, why[W_CAP], 0.0, shape), 1)
    seconds = seconds_of(packed, mean, 0.0, 0.0, 0.0, left, done, float(full), 0.0, shape)
    price = seconds / (state[PER_TOKEN] * full + state[PER_PAIR] * (shape[5] - 0.5 * shape[6]))
    k = state[KNEE]
    small = prm[USE_HOLD] != 0.0 and full < k and count > 0 and 1.0 <= why[W_SOURCE] <= 2.0
    if small and _all_lax(by_deadline, floats, si, sf):
        why[W_HOLD] = 1.0
        at_knee = mean[1, size_class(k)] * state[KNEE_TIME]
        price = min(price, at_knee / (state[PER_TOKEN] * k + 0.5 * state[PER_PAIR] * k * k))
    why[W_PRICE], why[W_PAIR_PRICE] = price * state[PER_TOKEN], price * state[PER_PAIR]


@compiled
def note(option: int, tokens: int, value: float, seconds: float, why: FloatArray) -> None:
    """Note an option of this step."""
    why[W_TOKENS + option] = tokens
    why[W_ACTIONS + 2 * option], why[W_ACTIONS + 2 * option + 1] = value, seconds


@compiled
def price_decodes(
    count: int, output: float, seats: int, kv_tokens: float, prm: FloatArray, mean: FloatArray, state: FloatArray,
    why: FloatArray,
) -> float:  # fmt: skip
    """Value of a round of all `count` decodes that run, seconds; noted as the first option.

    A round costs `FIXED` whoever takes part; it is worth that in full with as many streams as could share it.
    """
    most = max(float(count), 1.0)
    if prm[USE_OCCUPANCY] != 0.0:
        wanted = state[ARRIVAL_RATE] * output * (state[PACE] if state[PACE] < np.inf else 1e12)
        context = why[W_CONTEXT] / count if count > 0 else 1.0
        most = max(most, min(wanted, float(seats), kv_tokens / max(context, 1.0)))
    why[W_OCCUPANCY] = most
    if count == 0:
        note(DECODE_ONLY, 0, 0.0, 1.0, why)
        return 0.0
    fixed = min(state[FIXED], why[W_EVERY_RAW])
    factor = mean[0, size_class(float(count))]
    worth = factor * ((why[W_EVERY_RAW] - fixed) + fixed * count / most)
    note(DECODE_ONLY, 0, worth, factor * why[W_EVERY_RAW], why)
    return worth  # type: ignore[no-any-return]


@compiled
def try_size(
    option: int, decodes: float, context: float, longest: float, least: float, bound: float, top: int, worth: float,
    left: IntArray, done: IntArray, packed: FloatArray, prm: FloatArray, safe: FloatArray, mean: FloatArray,
    knee: int, sizes: int, shape: FloatArray, why: FloatArray,
) -> None:  # fmt: skip
    """Note the best step of prompts beside these decodes within `bound` seconds, if one fits.

    `knee`: tokens that are taken where none fit (0: none): no bound is worth an engine that stands still. `sizes`: how
    many step sizes are compared.
    """
    p = fit(packed, safe, decodes, context, longest, left, done, top, bound, least, shape)
    if p == 0:
        p = min(top, knee)
    if p > 0:
        prices = np.array((why[W_PRICE], why[W_PAIR_PRICE]))
        p, value, seconds = best_size(packed, mean, decodes, context, longest, left, done, p, prices, worth,
                                      sizes, prm[SATURATION], least, shape)  # fmt: skip
        note(option, p, value, seconds, why)


@compiled
def hurried(prm: FloatArray, why: FloatArray) -> bool:
    """Whether an accepted prompt has hardly time for more rounds of the decodes."""
    return why[W_SOURCE] == 1.0 and why[W_LAXITY] < prm[URGENCY] * why[W_ROUND]  # type: ignore[no-any-return]


@compiled
def slack_to_keep(prm: FloatArray, state: FloatArray, why: FloatArray) -> float:
    """Seconds of slack that prompts with time to spare leave to the streams, beside the next round.

    Who comes next may have less time than they, and can run alone only where streams can wait: so long as a prompt of
    mean length takes, at most a step under the cap. As the set of those who can be in time, it follows the miss rate:
    where all can be in time, nothing is kept. In mode gap slack cannot be kept.
    """
    if hurried(prm, why) or prm[GAP_MODE] != 0.0 or prm[USE_KEEPING] == 0.0:
        return 0.0
    return min(why[W_CAP], why[W_MEAN_TIME]) * min(1.0, state[MISS_RATE] / MISSES_FULL)  # type: ignore[no-any-return]


@compiled
def weigh_options(
    count: int, worth: float, on_time: IntArray, left: IntArray, done: IntArray, budget: int, packed: FloatArray,
    prm: FloatArray, safe: FloatArray, mean: FloatArray, si: IntArray, sf: FloatArray, state: FloatArray,
    shape: FloatArray, why: FloatArray,
) -> None:  # fmt: skip
    """Note the steps with prompts: alone, beside all decodes, beside those that cannot wait.

    Sizes are compared where all decodes run and nobody else can come in: then a step is worth what it does for those
    who are in. Else the largest is taken, for more streams make every later round worth more.
    """
    for option in range(PREFILL_ONLY, BLOCKING + 1):
        note(option, 0, 0.0, 1.0, why)
    if left.size == 0:
        return
    round_time, total = why[W_ROUND], int(why[W_TOTAL])
    after = round_time + slack_to_keep(prm, state, why)
    waits = why[W_FORCED] == 0.0  # a late stream that has to run keeps the decodes in the step
    if (prm[USE_EXCLUSIVE] != 0.0 and waits) or count == 0:
        bound = min(why[W_S1] - after, why[W_CAP])
        try_size(PREFILL_ONLY, 0.0, 0.0, 0.0, 0.0, bound, min(total, budget), 0.0, left, done, packed, prm, safe, mean,
                 int(state[KNEE]) if count == 0 else 0, 1, shape, why)  # fmt: skip
    top = min(total, budget - count)
    sizes = int(prm[SIZES]) if why[W_FULL] != 0.0 else 1
    if count > 0 and prm[USE_MIXED] != 0.0:
        bound = min(why[W_S1], why[W_S2] - after, why[W_CAP])
        try_size(MIXED, float(count), why[W_CONTEXT], why[W_LONGEST], why[W_EVERY_RAW], bound, top, worth, left, done,
                 packed, prm, safe, mean, 0, sizes, shape, why)  # fmt: skip
    if count > 1 and prm[USE_BLOCKING] != 0.0 and waits:
        _weigh_blocking(count, on_time, after, left, done, top, packed, prm, safe, mean, si, sf, state, shape, why)


@compiled
def _weigh_blocking(
    count: int, on_time: IntArray, after: float, left: IntArray, done: IntArray, top: int, packed: FloatArray,
    prm: FloatArray, safe: FloatArray, mean: FloatArray, si: IntArray, sf: FloatArray, state: FloatArray,
    shape: FloatArray, why: FloatArray,
) -> None:  # fmt: skip
    """Note the step of prompts beside the decodes that are due within it; they stand in I_BLOCKING."""
    round_time = why[W_ROUND]
    reach = BLOCKING_REACH * min(why[W_CAP], BLOCKING_SECONDS) + round_time
    soonest, second, others, m = np.inf, np.inf, np.inf, 0
    for i in range(on_time.size):
        row = on_time[i]
        s = sf[F_SLACK, row]
        if s >= reach:
            others = min(others, s)
            continue
        si[I_BLOCKING, m] = row
        m += 1
        if s >= round_time:
            soonest, second = min(soonest, s), min(second, s + sf[F_PACE, row])
    if m in (0, on_time.size):
        return
    context, longest = sums_of(si[I_BLOCKING, :m], si[I_COMPUTED])
    none = np.empty(0, dtype=np.int64)
    own = time_of(packed, float(m), context, longest, none, none, 0.0, shape)
    fixed = min(state[FIXED], why[W_EVERY_RAW], own)
    worth = mean[0, size_class(float(count))] * ((own - fixed) + fixed * m / why[W_OCCUPANCY])
    bound = min(soonest, second - after, others - after, why[W_CAP])
    try_size(BLOCKING, float(m), context, longest, own, bound, top, worth, left, done, packed, prm, safe, mean, 0, 1,
             shape, why)  # fmt: skip
    why[W_BLOCKING] = m
