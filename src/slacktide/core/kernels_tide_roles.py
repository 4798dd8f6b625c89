"""Compiled parts of `tide` that sort the rows: roles, blocks for the round, caps, what prompts need, who is on time.

docs/background/tide.md derives the formulas; slot names are in `tide`. What a part finds for the next ones stands in
`why` (`tide.W_*`).
"""

from __future__ import annotations

import numpy as np

from slacktide.core.kernels import compiled
from slacktide.core.kernels_tide_fill import bounds_of, fit, sums_of
from slacktide.core.kernels_tide_kv import blocks_of, can_lend, expected_kv
from slacktide.core.kernels_tide_supply import LEAST_CHUNK, accept, first_token, seconds_of, size_class, time_of
from slacktide.core.kinds import DECODE, IDLE, PREFILL
from slacktide.core.live import NUM_OUTPUT, NUM_PROMPT, PRIORITY, STATUS
from slacktide.core.tide import (
    CAP_SHARE,
    DECODE_TIME,
    DEMOTED,
    F_GROWTH,
    F_HOLD,
    F_SERVICE,
    F_SLACK,
    FIXED,
    I_COMPUTED,
    I_DECODES,
    I_GONE,
    I_KIND,
    I_MISSED,
    I_REMAINING,
    I_ROLE,
    KAPPA_HIGH,
    KAPPA_LOW,
    KNEE,
    KNEE_TIME,
    LATE_DECODE,
    LATE_PREFILL,
    LEAST_TIME,
    MEMORY,
    MISS_RATE,
    NO_ROLE,
    ON_TIME_DECODE,
    PER_PAIR,
    RELEASED_COUNT,
    RELEASED_TIME,
    RELEASED_TOKENS,
    SEATS,
    TIGHTEST,
    TOKENS_WAITING,
    USE_DEMOTION,
    USE_LENDING,
    W_ACCEPTED,
    W_CAP,
    W_CONTEXT,
    W_DECODES,
    W_EXPECTED,
    W_KEPT_BACK,
    W_KNEE_TIME,
    W_LATE,
    W_LATE_STREAMS,
    W_LAXITY,
    W_LONGEST,
    W_MEAN_PROMPT,
    W_MEAN_TIME,
    W_NEED,
    W_ON_TIME,
    W_PRESS,
    W_ROUND,
    W_ROUND_RAW,
    W_RUNNING,
    W_S1,
    W_S2,
    W_TTFT,
)
from slacktide.core.types import RUNNING, FloatArray, IntArray

ENOUGH_RELEASES = 5.0
"""Finished requests before the pace at which KV and seats come back is believed."""
MISSES_FULL = 0.1
"""Miss rate from which the supply counts with its lowest share."""


@compiled
def give_roles(
    ints: IntArray, n: int, block_size: int, si: IntArray, sf: FloatArray, state: FloatArray, why: FloatArray
) -> None:
    """Give every row its role, count the roles, and add up what running rows need of KV."""
    state[TOKENS_WAITING] = 0.0
    for row in range(n):
        si[I_GONE, row], si[I_ROLE, row] = 0, NO_ROLE
        kind, missed = si[I_KIND, row], si[I_MISSED, row] != 0
        if kind != IDLE and not missed and ints[STATUS, row] != RUNNING:
            state[TOKENS_WAITING] += float(ints[NUM_PROMPT, row] + ints[NUM_OUTPUT, row])
        if kind == DECODE and ints[STATUS, row] != RUNNING:
            kind = PREFILL  # back from the prefix cache: it needs a seat and all its blocks, as a prompt of one token
        if ints[STATUS, row] == RUNNING:
            why[W_RUNNING] += 1.0
            why[W_EXPECTED] += expected_kv(row, si, sf)
            if kind == PREFILL:
                why[W_KEPT_BACK] += blocks_of(ints, row, si[I_REMAINING, row], block_size)
        if kind == DECODE and missed:
            si[I_ROLE, row] = LATE_DECODE
            why[W_LATE_STREAMS] += 1.0
        elif kind == DECODE:
            si[I_ROLE, row] = ON_TIME_DECODE
            why[W_DECODES] += 1.0
            why[W_NEED] += blocks_of(ints, row, 1, block_size)
        elif kind == PREFILL and missed:
            si[I_ROLE, row] = LATE_PREFILL
            why[W_LATE] += 1.0
        elif kind == PREFILL:
            si[I_ROLE, row] = DEMOTED
            why[W_ON_TIME] += 1.0


@compiled
def take_round(n: int, budget: int, packed: FloatArray, safe: FloatArray, si: IntArray, sf: FloatArray,
               state: FloatArray, shape: FloatArray, why: FloatArray) -> IntArray:  # fmt: skip
    """The on-time decodes, also at the head of I_DECODES; what a round of them takes, and by when it must be.

    More than a step holds: those due first.
    """
    decodes, count = si[I_DECODES], 0
    for row in range(n):
        if si[I_ROLE, row] == ON_TIME_DECODE:
            decodes[count] = row
            count += 1
    if count > budget:
        keys = np.empty(count)
        for i in range(count):
            keys[i] = sf[F_SLACK, decodes[i]]
        by_slack = np.argsort(keys, kind="mergesort")
        kept = decodes[:count].copy()
        for i in range(budget):
            decodes[i] = kept[by_slack[i]]
        count = budget
    on_time: IntArray = decodes[:count].copy()
    why[W_CONTEXT], why[W_LONGEST] = sums_of(on_time, si[I_COMPUTED])
    if count > 0:
        none = np.empty(0, dtype=np.int64)
        why[W_ROUND_RAW] = time_of(packed, float(count), why[W_CONTEXT], why[W_LONGEST], none, none, 0.0, shape)
    why[W_ROUND] = safe[0, size_class(float(count))] * why[W_ROUND_RAW]
    state[DECODE_TIME] = why[W_ROUND_RAW] if count > 0 else state[FIXED]
    why[W_S1], why[W_S2] = bounds_of(on_time, sf, why[W_ROUND])
    return on_time


@compiled
def set_cap(prm: FloatArray, safe: FloatArray, state: FloatArray, why: FloatArray) -> None:
    """Most seconds of a step with prompts, for those who arrive during it; what one at the knee takes."""
    least = safe[1, size_class(LEAST_CHUNK)] * state[LEAST_TIME]
    why[W_CAP] = max(prm[CAP_SHARE] * state[TIGHTEST], least)
    why[W_KNEE_TIME] = safe[1, size_class(state[KNEE])] * state[KNEE_TIME]


@compiled
def value_prompts(ints: IntArray, n: int, budget: int, packed: FloatArray, safe: FloatArray, mean: FloatArray,
                  si: IntArray, sf: FloatArray, state: FloatArray, shape: FloatArray,
                  why: FloatArray) -> IntArray:  # fmt: skip
    """Seconds and KV tokens that each prompt that is on time needs; returns these rows by deadline.

    Without a deadline: by priority, then by arrival, behind all that have one.
    """
    one, none = np.full(1, budget), np.zeros(1, dtype=np.int64)
    chunk = max(fit(packed, safe, 0.0, 0.0, 0.0, one, none, budget, why[W_CAP], 0.0, shape), 1)
    seconds = seconds_of(packed, mean, 0.0, 0.0, 0.0, one, none, float(chunk), 0.0, shape)
    per_pair = mean[1, size_class(float(chunk))] * state[PER_PAIR]
    per_token = max(seconds / chunk - 0.5 * per_pair * chunk, 0.0)
    why[W_MEAN_PROMPT] = length = float(np.sum(ints[NUM_PROMPT, :n])) / max(n, 1)
    why[W_MEAN_TIME] = per_token * length + 0.5 * per_pair * length * length
    count = int(why[W_ON_TIME])
    prompts, keys = np.empty(count, dtype=np.int64), np.empty(count)
    at = 0
    for row in range(n):
        if si[I_ROLE, row] == DEMOTED:
            r, u = float(si[I_REMAINING, row]), float(si[I_COMPUTED, row])
            sf[F_SERVICE, row] = per_token * r + per_pair * r * (u + 0.5 * r)
            sf[F_HOLD, row] = float(ints[NUM_PROMPT, row] + ints[NUM_OUTPUT, row]) + 0.5 * sf[F_GROWTH, row]
            prompts[at] = row
            keys[at] = sf[F_SLACK, row] if sf[F_SLACK, row] < np.inf else 1e12 + 1e3 * ints[PRIORITY, row]
            at += 1
    return prompts[np.argsort(keys, kind="mergesort")]


@compiled
def judge_prompts(
    ints: IntArray, by_deadline: IntArray, on_time: IntArray, seats: int, kv_tokens: float, packed: FloatArray,
    prm: FloatArray, mean: FloatArray, si: IntArray, sf: FloatArray, state: FloatArray, shape: FloatArray,
    why: FloatArray, shares: FloatArray, output: float,
) -> None:  # fmt: skip
    """Who of the prompts can be on time (`accept`), by what decodes, KV and seats leave; what a newcomer can expect.

    `output`: tokens that a request is expected to want.
    """
    count = float(on_time.size)
    beside = 0.0
    if on_time.size > 0:
        one, none = np.full(1, int(state[KNEE])), np.zeros(1, dtype=np.int64)
        mixed = seconds_of(packed, mean, count, why[W_CONTEXT], why[W_LONGEST], one, none, state[KNEE],
                           why[W_ROUND_RAW], shape)  # fmt: skip
        alone = mean[1, size_class(state[KNEE])] * state[KNEE_TIME]
        beside = min(max(mixed - alone, 0.0), mean[0, size_class(count)] * why[W_ROUND_RAW])
    kappa = prm[KAPPA_HIGH] - (prm[KAPPA_HIGH] - prm[KAPPA_LOW]) * min(1.0, state[MISS_RATE] / MISSES_FULL)
    rest, rates = np.full(2, np.inf), np.full(2, np.inf)
    if state[RELEASED_COUNT] >= ENOUGH_RELEASES:
        seconds = max(state[RELEASED_TIME], 1e-3)
        if prm[MEMORY] != 0.0:
            rest[0], rates[0] = max(kv_tokens - why[W_EXPECTED], 0.0), state[RELEASED_TOKENS] / seconds
        if prm[SEATS] != 0.0:
            rest[1], rates[1] = float(seats - int(why[W_RUNNING])), state[RELEASED_COUNT] / seconds
        for i in range(on_time.size):
            row = on_time[i]
            if prm[USE_LENDING] != 0.0 and can_lend(ints, row, si, sf, state):
                rest[0] += float(si[I_COMPUTED, row])
                rest[1] += 1.0
    why[W_ACCEPTED], why[W_LAXITY] = accept(
        by_deadline, on_time, beside, kappa, prm[USE_DEMOTION] != 0.0, rest, rates, ints, si, sf, shares
    )  # fmt: skip
    why[W_PRESS] = 1.0 if why[W_LAXITY] < beside else 0.0
    hold = why[W_MEAN_PROMPT] + output
    why[W_TTFT] = first_token(by_deadline, on_time, beside, why[W_MEAN_TIME], hold, rest, rates, ints, sf)
