"""Compiled parts of `tide` that look and judge: what every row needs, what is learned of traffic, who can be on time.

`kernels_tide_step` makes the step from it. docs/background/tide.md derives the formulas; slot names are in `tide`.
"""

from __future__ import annotations

import numpy as np

from slacktide.core.kernels import compiled
from slacktide.core.kernels_latency import fill_packed, step_time_packed
from slacktide.core.kinds import DECODE, IDLE, PREFILL
from slacktide.core.live import (
    ARRIVAL,
    FIRST_TOKEN,
    INDEX,
    LAST_TOKEN,
    MAX_TOKENS,
    NUM_CACHED,
    NUM_COMPUTED,
    NUM_IN_FLIGHT,
    NUM_OUTPUT,
    NUM_PROMPT,
    PRIORITY,
    SLO_E2E,
    SLO_TBT,
    SLO_TTFT,
    STATUS,
)
from slacktide.core.tide import (
    ACCEPTED,
    ARRIVAL_RATE,
    DECODE_TIME,
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
    GAP_MODE,
    I_COMPUTED,
    I_KIND,
    I_MISSED,
    I_REMAINING,
    I_ROLE,
    KNEE,
    KNEE_TIME,
    LAST_RELEASE,
    LEAST_TIME,
    M_BYPASSED,
    M_INDEX,
    M_LAST,
    M_MISSED,
    M_OUTPUT,
    M_PROMPT,
    MAX_GAP,
    MISS_RATE,
    NUM_ARRIVALS,
    NUM_SIZES,
    OUT_SUM,
    OUT_WEIGHT,
    PACE,
    PER_PAIR,
    PER_TOKEN,
    PRIOR_OUTPUT,
    RECENT,
    RELEASED_COUNT,
    RELEASED_TIME,
    RELEASED_TOKENS,
    SCENE_ALONE,
    SHARED,
    SIZE_EDGES,
    TIGHTEST,
)
from slacktide.core.types import RUNNING, FloatArray, IntArray

QUANTILE = 0.05
"""Which of the recent targets is guarded: the tightest but for one in twenty (as `guard.QUANTILE`)."""
FORGET = 0.99
"""Weight of the past per finished request: the last hundred count."""
PRIOR_WEIGHT = 10.0
"""Finished requests that the prior output length counts for."""
EPSILON = 1e-9
"""Seconds: a token this much behind its deadline is on time, whatever rounding did."""
KNEE_SHARE = 0.95
"""A prefill step is large enough where its tokens cost at most 1 / 0.95 of the cheapest."""
LEAST_CHUNK = 32
"""Tokens of the smallest chunk worth a step, about a tile's rows: below it a step costs the same and does less."""


@compiled
def _watch_arrivals(state: FloatArray, ring: FloatArray, now: float) -> None:
    """Refresh what the remembered arrivals say; called when some came."""
    count = min(int(state[NUM_ARRIVALS]), RECENT)
    targets = np.sort(ring[0, :count])
    state[TIGHTEST] = targets[int(QUANTILE * count)]
    paces = np.sort(ring[1, :count])
    state[PACE] = paces[int(QUANTILE * count)]
    oldest = np.min(ring[2, :count])
    state[ARRIVAL_RATE] = count / max(now - oldest, 1e-3) if count > 1 else 0.0


@compiled
def _retire(memory: FloatArray, at: int, finished: IntArray, now: float, state: FloatArray) -> None:
    """A remembered request is gone: what its life tells of outputs, misses, and how fast KV and seats come back."""
    index = int(memory[M_INDEX, at])
    for i in range(finished.size):
        if finished[i] == index:
            state[OUT_SUM] = FORGET * state[OUT_SUM] + memory[M_OUTPUT, at] + 1.0
            state[OUT_WEIGHT] = FORGET * state[OUT_WEIGHT] + 1.0
            if memory[M_MISSED, at] == 0.0:
                state[MISS_RATE] *= FORGET
            waited = now - state[LAST_RELEASE] if state[RELEASED_COUNT] > 0.0 else 0.0
            state[RELEASED_TOKENS] = FORGET * state[RELEASED_TOKENS] + memory[M_PROMPT, at] + memory[M_OUTPUT, at]
            state[RELEASED_COUNT] = FORGET * state[RELEASED_COUNT] + 1.0
            state[RELEASED_TIME] = FORGET * state[RELEASED_TIME] + waited
            state[LAST_RELEASE] = now
            return


@compiled
def look(
    ints: IntArray,
    floats: FloatArray,
    n: int,
    now: float,
    start: float,
    max_model_len: int,
    parameters: FloatArray,
    old: FloatArray,
    remembered: int,
    memory: FloatArray,
    finished: IntArray,
    state: FloatArray,
    ring: FloatArray,
    si: IntArray,
    sf: FloatArray,
) -> float:
    """Fill kind, remaining, computed, missed, slack (seconds from `start`) and pace of every row; returns the output
    tokens that requests are expected to want.

    A row has missed once one of its tokens came late, or is late already: it cannot count any more, whatever is done.
    That is remembered, because a stream may catch up. Long: one pass over the rows.
    """
    gap = parameters[GAP_MODE] != 0.0
    at = 0
    arrived = False
    for row in range(n):
        index = ints[INDEX, row]
        found = at
        while found < remembered and old[M_INDEX, found] != index:
            found += 1
        missed, bypassed, last = 0.0, 0.0, np.nan
        if found < remembered:
            for gone in range(at, found):
                _retire(old, gone, finished, now, state)
            at = found + 1
            missed, bypassed, last = old[M_MISSED, found], old[M_BYPASSED, found], old[M_LAST, found]
        else:
            slot = int(state[NUM_ARRIVALS]) % RECENT
            ring[0, slot], ring[1, slot], ring[2, slot] = (
                floats[SLO_TTFT, row],
                floats[SLO_TBT, row],
                floats[ARRIVAL, row],
            )
            state[NUM_ARRIVALS] += 1.0
            arrived = True
        in_flight = ints[NUM_IN_FLIGHT, row]
        known_output = ints[NUM_OUTPUT, row]
        output = known_output + in_flight
        known = ints[NUM_PROMPT, row] + output
        running = ints[STATUS, row] == RUNNING
        done = ints[NUM_COMPUTED, row] if running else ints[NUM_CACHED, row]
        need = known - done
        if running:
            need = min(need, max_model_len - 1 - done)
        if need <= 0 or (in_flight > 0 and output >= ints[MAX_TOKENS, row]):
            si[I_KIND, row] = IDLE
        elif known - done == 1 and output > 0:
            si[I_KIND, row] = DECODE
        else:
            si[I_KIND, row] = PREFILL
        si[I_REMAINING, row] = max(need, 0)
        si[I_COMPUTED, row] = done
        pace = floats[SLO_TBT, row]
        first, newest = floats[FIRST_TOKEN, row], floats[LAST_TOKEN, row]
        anchor = floats[ARRIVAL, row] + floats[SLO_TTFT, row]
        if known_output > 0 and first > anchor + EPSILON:
            missed = 1.0
        if np.isinf(anchor):  # no target for the first token: the stream begins where it comes
            if known_output > 0:
                anchor = first
            elif output > 0:
                anchor = start
        if output == 0:
            due = anchor
        elif gap:
            due = (start if in_flight > 0 else newest) + pace
        else:
            due = anchor + output * pace
        if known_output > 1 and pace < np.inf:
            if gap:
                if newest - last > pace + EPSILON:  # NaN compares false: the one before was not seen
                    missed = 1.0
            elif newest > anchor + (known_output - 1) * pace + EPSILON:
                missed = 1.0
        if parameters[MAX_GAP] < np.inf and output > 0:
            due = min(due, (start if in_flight > 0 else newest) + parameters[MAX_GAP])
            pace = min(pace, parameters[MAX_GAP])
        if due < now - EPSILON and in_flight == 0:
            missed = 1.0
        if floats[ARRIVAL, row] + floats[SLO_E2E, row] < now - EPSILON:
            missed = 1.0
        sf[F_SLACK, row] = due - start
        sf[F_PACE, row] = pace
        memory[M_INDEX, row], memory[M_OUTPUT, row], memory[M_BYPASSED, row] = index, output, bypassed
        memory[M_LAST, row], memory[M_PROMPT, row] = newest, ints[NUM_PROMPT, row]
        memory[M_MISSED, row] = missed
        si[I_MISSED, row] = int(missed)
        if missed != 0.0 and (found >= remembered or old[M_MISSED, found] == 0.0):
            state[MISS_RATE] = FORGET * state[MISS_RATE] + (1.0 - FORGET)
    for gone in range(at, remembered):
        _retire(old, gone, finished, now, state)
    if arrived:
        _watch_arrivals(state, ring, now)
    prior = parameters[PRIOR_OUTPUT]
    return (state[OUT_SUM] + PRIOR_WEIGHT * prior) / (state[OUT_WEIGHT] + PRIOR_WEIGHT)  # type: ignore[no-any-return]


@compiled
def expect(ints: IntArray, floats: FloatArray, n: int, start: float, output: float, state: FloatArray,
           si: IntArray, sf: FloatArray) -> None:  # fmt: skip
    """Fill the output tokens that each row is expected to want yet; turn end-to-end targets into slacks and paces.

    Remaining output: the mean of those that ended, less what there is, at least a quarter of it, because who has
    outlived the mean is a long one. An end-to-end target asks a decode for the pace (time left) / (tokens left), and
    a prompt to begin early enough for its tokens (`deadlines.with_e2e`).
    """
    for row in range(n):
        so_far = ints[NUM_OUTPUT, row] + ints[NUM_IN_FLIGHT, row]
        left = max(output - so_far, 0.25 * output)
        left = max(min(left, float(ints[MAX_TOKENS, row] - so_far)), 1.0)
        sf[F_GROWTH, row] = left
        if np.isinf(floats[SLO_E2E, row]):
            continue
        time = floats[ARRIVAL, row] + floats[SLO_E2E, row] - start
        if time <= 0.0:
            continue
        if si[I_KIND, row] == DECODE:
            own = time / left
            sf[F_PACE, row] = min(sf[F_PACE, row], own)
        else:
            own = time - (left - 1.0) * min(sf[F_PACE, row], max(state[DECODE_TIME], 1e-6))
        sf[F_SLACK, row] = min(sf[F_SLACK, row], own)


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
    """Fill float64[3, 16]: what predictions are multiplied by, per scene and size: mean + `deviations` deviations.

    A size class seen k times weighs k against the SHARED of its scene.
    """
    for scene in range(3):
        mean, deviation = learned[0, scene, SCENE_ALONE], learned[1, scene, SCENE_ALONE]
        for size in range(NUM_SIZES):
            w = learned[2, scene, size] / (learned[2, scene, size] + SHARED) if by_size else 0.0
            own_mean = w * learned[0, scene, size] + (1.0 - w) * mean
            own_deviation = w * learned[1, scene, size] + (1.0 - w) * deviation
            factors[scene, size] = own_mean + deviations * own_deviation


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
) -> tuple[int, bool]:
    """Moore-Hodgson over on-time prompts: mark the largest set that can be on time; returns (accepted, pressed).

    `order`: rows by deadline. Prompt j may end at kappa * (t_j - demand(t_j)): the engine's time until then less what
    the decodes ask for, `round_time` seconds per round of all of them. Where the accepted work does not fit, the
    least important of the longest prompts is demoted. The accepted who wait must also find KV tokens and seats until
    then: `room` has those free now, `rates` those that come back per second (infinite: not looked at). Fills F_DEMAND
    (seconds that decodes want until t_j) and marks I_ROLE. Pressed: some accepted prompt has no time for another
    decode round.
    """
    slack, service, hold = sf[F_SLACK], sf[F_SERVICE], sf[F_HOLD]
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
        if not demote or t == np.inf:
            continue
        supply = kappa * (t - wanted)
        while count > 0:
            late = total > supply
            short = tokens > room[0] + rates[0] * t
            if not (late or short or seats > room[1] + rates[1] * t):
                break
            worst = -1
            for k in range(i + 1):
                other = order[k]
                if si[I_ROLE, other] != ACCEPTED or (not late and ints[STATUS, other] == RUNNING):
                    continue  # KV or seats alone are short: who has them frees none
                weight = service[other] if late or not short else hold[other]
                most = 0.0 if worst < 0 else (service[worst] if late or not short else hold[worst])
                if (
                    worst < 0
                    or ints[PRIORITY, other] > ints[PRIORITY, worst]
                    or (ints[PRIORITY, other] == ints[PRIORITY, worst] and weight >= most)
                ):
                    worst = other
            if worst < 0:
                break
            si[I_ROLE, worst] = DEMOTED
            total -= service[worst]
            count -= 1
            if ints[STATUS, worst] != RUNNING:
                seats -= 1
                tokens -= hold[worst]
    total, pressed = 0.0, False
    for i in range(order.size):
        row = order[i]
        if si[I_ROLE, row] == ACCEPTED:
            total += service[row]
            if slack[row] < np.inf and slack[row] - total < round_time:
                pressed = True
    return count, pressed
