"""Compiled parts of `tide` that look and judge: what every row needs, what is learned of traffic, who can be on time.

`kernels_tide_step` makes the step from it. docs/background/tide.md derives the formulas; slot names are in `tide`.
"""

from __future__ import annotations

import numpy as np

from slacktide.core.kernels import compiled
from slacktide.core.kernels_deadlines import needs
from slacktide.core.kinds import DECODE
from slacktide.core.live import (
    ARRIVAL,
    FIRST_TOKEN,
    INDEX,
    LAST_TOKEN,
    MAX_TOKENS,
    NUM_IN_FLIGHT,
    NUM_OUTPUT,
    NUM_PROMPT,
    SLO_E2E,
    SLO_TBT,
    SLO_TTFT,
)
from slacktide.core.tide import (
    ARRIVAL_RATE,
    DECODE_TIME,
    F_GROWTH,
    F_PACE,
    F_SLACK,
    GAP_MODE,
    I_COMPUTED,
    I_KIND,
    I_MISSED,
    I_REMAINING,
    LAST_RELEASE,
    M_BYPASSED,
    M_INDEX,
    M_LAST,
    M_MISSED,
    M_OUTPUT,
    M_PROMPT,
    MAX_GAP,
    MISS_RATE,
    NUM_ARRIVALS,
    OUT_SUM,
    OUT_WEIGHT,
    PACE,
    PRIOR_OUTPUT,
    RECENT,
    RELEASED_COUNT,
    RELEASED_TIME,
    RELEASED_TOKENS,
    TIGHTEST,
)
from slacktide.core.types import FloatArray, IntArray

QUANTILE = 0.05
"""Which of the recent targets is guarded: the tightest but for one in twenty (as `guard.QUANTILE`)."""
FORGET = 0.99
"""Weight of the past per finished request: the last hundred count."""
PRIOR_WEIGHT = 10.0
"""Finished requests that the prior output length counts for."""
EPSILON = 1e-9
"""Seconds: a token this much behind its deadline is on time, whatever rounding did."""


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
        si[I_KIND, row], si[I_COMPUTED, row], si[I_REMAINING, row] = needs(ints, row, max_model_len)
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
