"""Compiled parts of `tide` that reckon time: corrected predictions, prices, and who can be on time.

docs/background/tide.md derives the formulas; slot names are in `tide`.
"""

from __future__ import annotations

import numpy as np

from slacktide.core.fair import AHEAD
from slacktide.core.kernels import compiled
from slacktide.core.kernels_fair import pending
from slacktide.core.kernels_latency import fill_packed, step_time_packed
from slacktide.core.live import PRIORITY, STATUS, TENANT
from slacktide.core.tide import (
    ACCEPTED,
    DEMOTED,
    F_DEMAND,
    F_EVENT,
    F_GROWTH,
    F_HOLD,
    F_JUMP,
    F_PACE,
    F_SERVICE,
    F_SLACK,
    F_SLOPE,
    FIXED,
    I_REMAINING,
    I_ROLE,
    KNEE,
    KNEE_TIME,
    LEAST_TIME,
    NEIGHBOUR,
    NUM_SIZES,
    PER_PAIR,
    PER_TOKEN,
    PRIOR_DEVIATION,
    SCENE_ALONE,
    SEEN,
    SHARED,
    SIZE_EDGES,
)  # fmt: skip
from slacktide.core.types import RUNNING, FloatArray, IntArray

KNEE_SHARE = 0.95
"""A prefill step is large enough where its tokens cost at most 1 / 0.95 of the cheapest."""
ROUNDING = 1e-9
"""Seconds: sums in another order differ by less; nobody is demoted for that."""
MOST_DECODE = 0.95
"""Largest share of time that decodes are taken to ask for: a forecast stays finite when they ask for all of it."""
HOPE = 0.1
"""Share of its time that a size is hoped to be shorter while it was not tried: what kernels' tile steps make, which a
fitted belief smooths over."""
TRIED = 8.0
"""Steps of a size after which it is believed."""
LEAST_CHUNK = 32
"""Tokens of the smallest chunk worth a step, about a tile's rows: below it a step costs the same and does less."""


@compiled
def time_of(packed: FloatArray, decodes: float, context: float, longest: float, left: IntArray, done: IntArray,
            prefill: float, shape: FloatArray) -> float:  # fmt: skip
    """Predicted seconds of the decodes plus `prefill` tokens of the queue, nothing corrected."""
    shape[8] = decodes
    shape[9] = context
    shape[10] = longest if decodes > 0.0 else 0.0
    fill_packed(packed, prefill, left, done, shape)
    return step_time_packed(packed, shape)


@compiled
def size_class(tokens: float) -> int:
    """Size class of a step (`tide.SIZE_EDGES`)."""
    size = 0
    while size < NUM_SIZES - 1 and tokens > SIZE_EDGES[size]:
        size += 1
    return size


@compiled
def factors_of(learned: FloatArray, deviations: float, by_size: bool, factors: FloatArray) -> None:
    """Fill float64[3, 20]: what predictions are multiplied by, per scene and size: mean + `deviations` deviations.

    A size class weighs as many steps as it was seen, its neighbours less and less, the belief itself SHARED.
    """
    for scene in range(3):
        for size in range(NUM_SIZES):
            mean, deviation, weight = SHARED, SHARED * PRIOR_DEVIATION, SHARED
            for other in range(NUM_SIZES):
                w = min(learned[2, scene, other], SEEN) * NEIGHBOUR ** abs(size - other)
                mean += w * learned[0, scene, other]
                deviation += w * learned[1, scene, other]
                weight += w
            factors[scene, size] = (mean + deviations * deviation) / weight
            if not by_size:
                factors[scene, size] = learned[0, scene, SCENE_ALONE] + deviations * learned[1, scene, SCENE_ALONE]


@compiled
def hope_for_new(learned: FloatArray, factors: FloatArray) -> None:
    """Take sizes with prompts that were hardly tried for shorter than believed, by HOPE at first, so that they are."""
    for scene in range(1, 3):
        for size in range(NUM_SIZES):
            factors[scene, size] *= 1.0 - HOPE * max(1.0 - learned[2, scene, size] / TRIED, 0.0)


@compiled
def seconds_of(packed: FloatArray, factors: FloatArray, decodes: float, context: float, longest: float, left: IntArray,
               done: IntArray, prefill: float, least: float, shape: FloatArray) -> float:  # fmt: skip
    """Corrected seconds of the decodes plus `prefill` tokens of the queue.

    `least`: predicted seconds of the decodes alone. A fitted belief may say that a few prompt tokens make a step
    shorter; they do not.
    """
    raw = max(time_of(packed, decodes, context, longest, left, done, prefill, shape), least)
    scene = 0 if prefill == 0.0 else (1 if decodes == 0.0 else 2)
    return raw * factors[scene, size_class(shape[0])]  # type: ignore[no-any-return]


@compiled
def learn_prices(packed: FloatArray, limit: int, state: FloatArray, shape: FloatArray) -> None:
    """What prompt tokens, attended pairs and decode rounds cost by the belief; only once per belief.

    Pairs: what 4,096 cached tokens add to a step of `limit` tokens. Tokens: the rest of such a step, attention taken
    off. Knee: the smallest power-of-two step (times 1 or 1.5) whose tokens cost at most 1 / KNEE_SHARE of the cheapest.
    """
    left, done = np.full(1, limit), np.zeros(1, dtype=np.int64)
    size = min(limit, 2048)
    plain = time_of(packed, 0.0, 0.0, 0.0, left, done, float(size), shape)
    done[0] = 4096
    deep = time_of(packed, 0.0, 0.0, 0.0, left, done, float(size), shape)
    done[0] = 0
    state[PER_PAIR] = max(deep - plain, 0.0) / (4096.0 * size)
    state[PER_TOKEN] = max(plain / size - state[PER_PAIR] * 0.5 * size, 1e-12)
    state[FIXED] = time_of(packed, 1.0, 1.0, 1.0, left, done, 0.0, shape)
    best = 0.0
    for i in range(2):
        tokens = 16
        while True:
            for half in range(2):
                p = min(tokens + half * (tokens // 2), limit)
                seconds = time_of(packed, 0.0, 0.0, 0.0, left, done, float(p), shape)
                linear = p * (state[PER_TOKEN] + 0.5 * state[PER_PAIR] * p) / seconds
                if i == 0:
                    best = max(best, linear)
                elif linear >= KNEE_SHARE * best:
                    state[KNEE], state[KNEE_TIME] = float(p), seconds
                    state[LEAST_TIME] = time_of(
                        packed, 0.0, 0.0, 0.0, left, done, float(min(LEAST_CHUNK, limit)), shape
                    )
                    return
            if tokens >= limit:
                break
            tokens *= 2


@compiled
def demand_events(
    decodes: IntArray, slack: FloatArray, pace: FloatArray, growth: FloatArray, times: FloatArray, jumps: FloatArray,
    slopes: FloatArray,
) -> int:  # fmt: skip
    """The decode rounds that deadlines ask for, as events; returns how many.

    Decode i wants its next token by s, then one per pace, until it has its c expected tokens: min((t - s) / pace + 1,
    c) tokens by time t >= s. That is a jump of 1 at s, a slope of 1 / pace from there on, and its end at
    s + (c - 1) pace.
    """
    m = 0
    for i in range(decodes.size):
        row = decodes[i]
        if slack[row] == np.inf:
            continue
        begin = max(slack[row], 0.0)
        times[m], jumps[m], slopes[m] = begin, 1.0, 0.0
        if pace[row] < np.inf and growth[row] > 1.0:
            slopes[m] = 1.0 / pace[row]
            m += 1
            times[m], jumps[m], slopes[m] = begin + (growth[row] - 1.0) * pace[row], 0.0, -1.0 / pace[row]
        m += 1
    return m


@compiled
def accept(
    order: IntArray,
    decodes: IntArray,
    round_time: float,
    kappa: float,
    demote: bool,
    room: FloatArray,
    rates: FloatArray,
    ints: IntArray,
    si: IntArray,
    sf: FloatArray,
    shares: FloatArray,
) -> tuple[int, float]:
    """Moore-Hodgson over on-time prompts: mark the largest set that can be on time; returns (accepted, laxity).

    `order`: rows by deadline. Prompt j may end at kappa * (t_j - demand(t_j)): the engine's time until then less what
    the decodes ask for, `round_time` seconds per round of all of them. Where the accepted work does not fit, the
    least important of the longest prompts is demoted; with several tenants (`shares`), of those of the tenant that has
    most, its accepted prompts counted as served. The accepted who wait must also find KV tokens and seats until
    then: `room` has those free now, `rates` those that come back per second (infinite: not looked at). Fills F_DEMAND
    (seconds that decodes want until t_j) and marks I_ROLE. Laxity: least seconds that an accepted prompt has beside
    its own service and that of those before it.
    """
    slack, service, hold, fair = sf[F_SLACK], sf[F_SERVICE], sf[F_HOLD], shares.shape[1] > 0
    times, jumps, slopes = sf[F_EVENT], sf[F_JUMP], sf[F_SLOPE]
    m = demand_events(decodes, slack, sf[F_PACE], sf[F_GROWTH], times, jumps, slopes)
    by_time = np.argsort(times[:m], kind="mergesort")
    per_round = round_time / decodes.size if decodes.size > 0 else 0.0
    event, last, level, slope = 0, 0.0, 0.0, 0.0
    total, tokens, count, seats = 0.0, 0.0, 0, 0
    for i in range(order.size):
        row = order[i]
        t = slack[row]
        wanted = 0.0
        if t < np.inf:
            while event < m and times[by_time[event]] <= t:
                e = by_time[event]
                level += slope * (times[e] - last) + jumps[e]
                slope += slopes[e]
                last = times[e]
                event += 1
            wanted = per_round * (level + slope * max(t - last, 0.0))
        sf[F_DEMAND, row] = wanted
        si[I_ROLE, row] = ACCEPTED
        total += service[row]
        count += 1
        if ints[STATUS, row] != RUNNING:
            seats += 1
            tokens += hold[row]
        if fair:
            shares[AHEAD, ints[TENANT, row]] += pending(ints, row, si[I_REMAINING], shares)
        if not demote or t == np.inf:
            continue
        supply = kappa * (t - wanted)
        while count > 0:
            late = total > supply + ROUNDING
            short = tokens > room[0] + rates[0] * t
            if not (late or short or seats > room[1] + rates[1] * t):
                break
            worst = -1
            for k in range(i + 1):
                other = order[k]
                if si[I_ROLE, other] != ACCEPTED or (not late and ints[STATUS, other] == RUNNING):
                    continue  # KV or seats alone are short: who has them frees none
                if worst < 0 or ints[PRIORITY, other] > ints[PRIORITY, worst]:
                    worst = other
                    continue
                if ints[PRIORITY, other] < ints[PRIORITY, worst]:
                    continue
                if fair:
                    own, others = shares[AHEAD, ints[TENANT, other]], shares[AHEAD, ints[TENANT, worst]]
                    if own != others:
                        worst = other if own > others else worst
                        continue
                weight = service[other] if late or not short else hold[other]
                if weight >= (service[worst] if late or not short else hold[worst]):
                    worst = other
            if worst < 0:
                break
            si[I_ROLE, worst] = DEMOTED
            if fair:
                shares[AHEAD, ints[TENANT, worst]] -= pending(ints, worst, si[I_REMAINING], shares)
            total -= service[worst]
            count -= 1
            if ints[STATUS, worst] != RUNNING:
                seats -= 1
                tokens -= hold[worst]
    total, laxity = 0.0, np.inf
    for i in range(order.size):
        row = order[i]
        if si[I_ROLE, row] == ACCEPTED:
            total += service[row]
            laxity = min(laxity, slack[row] - total)
    return count, laxity


@compiled
def first_token(
    prompts: IntArray, decodes: IntArray, round_time: float, own: float, hold: float, room: FloatArray,
    rates: FloatArray, ints: IntArray, sf: FloatArray,
) -> float:  # fmt: skip
    """Predicted seconds until the first token of a prompt of `own` seconds and `hold` KV tokens that arrives now.

    All `prompts` that can still be on time go before it, beside the rounds that decodes ask for: (own + sum of their
    seconds) / (1 - share of decodes), the share being `round_time` times the mean 1 / pace. Or, if later, when those
    who wait and it have found KV tokens and seats, at the pace at which they come back (`room`, `rates` as for
    `accept`). Who is late already is passed.
    """
    asked = 0.0
    for i in range(decodes.size):
        asked += 1.0 / sf[F_PACE, decodes[i]]
    share = min(round_time * asked / max(decodes.size, 1), MOST_DECODE)
    work, seats, tokens = own, 1.0, hold
    for i in range(prompts.size):
        work += sf[F_SERVICE, prompts[i]]
        if ints[STATUS, prompts[i]] != RUNNING:
            seats += 1.0
            tokens += sf[F_HOLD, prompts[i]]
    soonest = work / (1.0 - share)
    if tokens > room[0]:
        soonest = max(soonest, (tokens - room[0]) / max(rates[0], 1e-9) + own)
    if seats > room[1]:
        soonest = max(soonest, (seats - room[1]) / max(rates[1], 1e-9) + own)
    return soonest
