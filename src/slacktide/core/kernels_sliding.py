"""Compiled search of the windows. Readable twin: `chunker`, by function name.

All of it works on caller-owned arrays and allocates little: a decision of 100 live requests has to stay below 100 us.
"""

from __future__ import annotations

import numpy as np

from slacktide.core.kernels import compiled
from slacktide.core.kernels_latency import fill_packed, max_tokens_packed, step_time_packed
from slacktide.core.types import FloatArray, IntArray

GRID = 48
"""Most candidates of a window's search: finer than the 32 tokens below which two splits cannot be told apart, up to a
budget of 1536, and 3 % of any larger one."""
SAME_TIME = 1e-9
"""Seconds. Splits closer than this tie; then the larger first step wins, as in the paper."""


@compiled
def time_of(
    packed: FloatArray,
    decodes: float,
    context: float,
    longest: float,
    remaining: IntArray,
    computed: IntArray,
    prefill: float,
    shape: FloatArray,
) -> float:
    """Predicted seconds of the decodes plus `prefill` tokens of the queue."""
    shape[8] = decodes
    shape[9] = context
    shape[10] = longest if decodes > 0.0 else 0.0
    fill_packed(packed, prefill, remaining, computed, shape)
    return step_time_packed(packed, shape)


@compiled
def advance(
    remaining: IntArray, computed: IntArray, prefill: int, next_remaining: IntArray, next_computed: IntArray
) -> tuple[int, float, float]:
    """The queue after `prefill` tokens; returns (prompts finished, their lengths summed, the largest)."""
    finished = 0
    context = 0.0
    longest = 0.0
    left = prefill
    for i in range(remaining.size):
        c = min(max(remaining[i], 0), left)
        left -= c
        next_remaining[i] = remaining[i] - c
        next_computed[i] = computed[i] + c
        if c > 0 and next_remaining[i] == 0:
            finished += 1
            context += next_computed[i]
            longest = max(longest, float(next_computed[i]))
    return finished, context, longest


@compiled
def prefill_within(
    packed: FloatArray,
    time: float,
    decodes: float,
    context: float,
    longest: float,
    remaining: IntArray,
    computed: IntArray,
    limit: int,
    shape: FloatArray,
) -> int:
    """Most prefill tokens whose step beside the decodes takes at most `time`; -1 when the decodes alone take longer."""
    whole = int(decodes + 0.5)
    budget = max_tokens_packed(packed, time, whole, context, longest, remaining, computed, limit, shape)
    if budget == 0 and whole > 0:
        return -1
    total = 0
    for i in range(remaining.size):
        total += max(remaining[i], 0)
    return min(budget - whole, total)


@compiled
def _later_windows(
    packed: FloatArray,
    bounds: FloatArray,
    first: int,
    elapsed: float,
    share: int,
    decodes: float,
    context: float,
    longest: float,
    remaining: IntArray,
    computed: IntArray,
    limit: int,
    survival: float,
    cap: float,
    frozen: bool,
    shape: FloatArray,
) -> tuple[int, float]:
    """The windows after a first step of `first` prefill tokens: (prefill tokens, time when they end; inf = infeasible).

    `share` >= 0 gives each later window that many tokens (the last one what is left of share * windows); negative
    fills each to its bound. `frozen` keeps the queue and the decodes as they are now, as the paper does.
    """
    left, done = remaining.copy(), computed.copy()
    total = 0
    step = first
    for j in range(1, bounds.size):
        if not frozen:
            finished, new_context, new_longest = advance(left, done, step, left, done)
            context = (context + decodes) * survival + new_context
            longest = max(longest + 1.0, new_longest)
            decodes = decodes * survival + finished
        if share >= 0:
            step = share
        else:
            room = min(bounds[j] - elapsed, cap)
            step = prefill_within(packed, room, decodes, context, longest, left, done, limit, shape)
            if step < 0:
                return total, np.inf
        spent = time_of(packed, decodes, context, longest, left, done, float(step), shape)
        elapsed += spent
        if elapsed > bounds[j] + SAME_TIME or spent > cap + SAME_TIME:
            return total, np.inf
        total += step
    return total, elapsed


@compiled
def split_window(
    packed: FloatArray,
    bounds: FloatArray,
    decodes: float,
    context: float,
    longest: float,
    remaining: IntArray,
    computed: IntArray,
    limit: int,
    survival: float,
    cap: float,
    gain: float,
    frozen: bool,
    dual: bool,
    shape: FloatArray,
) -> tuple[int, int]:
    """(prefill tokens of this step, greedy's); -1 when the decodes alone exceed bounds[0].

    Primal: the tokens that greedy steps would run in all windows, split so that they take least time. Dual: the most
    tokens. Every candidate keeps all bounds, no step takes longer than `cap`, and a split must beat greedy by the share
    `gain`. Ties go to the larger first step. Where greedy steps end the whole queue within the window, greedy stands:
    there is nothing to gain then, and a split only delays first tokens.
    """
    queue = 0
    for i in range(remaining.size):
        queue += max(remaining[i], 0)
    most = prefill_within(packed, bounds[0], decodes, context, longest, remaining, computed, limit, shape)
    if most <= 0 or most >= queue or bounds.size < 2:
        return most, most
    spent = time_of(packed, decodes, context, longest, remaining, computed, float(most), shape)
    later = bounds.size - 1
    if not dual and bounds[0] <= bounds[later] - bounds[later - 1]:
        return most, most  # this window is no longer than a later one: greedy is optimal where times are convex
    total, end = _later_windows(
        packed, bounds, most, spent, -1, decodes, context, longest, remaining, computed, limit, survival, cap, frozen,
        shape,
    )  # fmt: skip
    everything = most + total
    low = 0 if decodes > 0.0 else 1  # without decodes an empty step would be no step
    if not dual:
        low = max(low, everything - later * max(limit - int(decodes), 0))
    if end == np.inf or low >= most or (not frozen and everything >= queue):
        return most, most
    best, best_time, best_total = most, end * (1.0 - gain), int(everything * (1.0 + gain))
    step = max(32, (most - low) // GRID)
    prefill = most
    while prefill > low:
        prefill = max(prefill - step, low)
        spent = time_of(packed, decodes, context, longest, remaining, computed, float(prefill), shape)
        share = -1 if dual else -(-(everything - prefill) // later)
        total, end = _later_windows(
            packed, bounds, prefill, spent, share, decodes, context, longest, remaining, computed, limit, survival, cap,
            frozen, shape,
        )  # fmt: skip
        if end == np.inf:
            continue
        if dual and prefill + total > best_total:
            best, best_total = prefill, prefill + total
        elif not dual and end < best_time - SAME_TIME:
            best, best_time = prefill, end
    return best, most


@compiled
def fit(
    packed: FloatArray,
    bounds: FloatArray,
    margin: float,
    decodes: float,
    context: float,
    longest: float,
    rows: IntArray,
    remaining: IntArray,
    computed: IntArray,
    limit: int,
    first: int,
    order: IntArray,
    hopeless: IntArray,
    slack: FloatArray,
    least: float,
    window: bool,
    survival: float,
    cap: float,
    gain: float,
    frozen: bool,
    dual: bool,
    shape: FloatArray,
) -> tuple[int, float, int, int]:
    """A step's usual decision at once: what fits, whom it would make late and, if nobody, how a window splits it.

    `rows`, `remaining`: prompts of the full batch and their tokens, behind `first` decodes; `computed`, `slack` of all
    rows; `bounds` and `cap` with the margin on top. Returns greedy's tokens (-1: the decodes alone take longer), their
    seconds with the margin, how many prompts of `order` but not `hopeless` are at risk (`constructor.construct`), and
    the split's tokens: greedy's without a `window`, -2 where `Sliding._split` has to be asked, because somebody is at
    risk or the window reaches behind the full batch.
    """
    done = np.empty(rows.size, dtype=np.int64)
    total = first
    for i in range(rows.size):
        done[i] = computed[rows[i]]
        total += remaining[i]
    within = bounds / margin
    greedy = prefill_within(packed, within[0], decodes, context, longest, remaining, done, limit, shape)
    full = margin * time_of(packed, decodes, context, longest, remaining, done, float(max(greedy, 0)), shape)
    at_risk = 0
    for i in range(order.size):
        if least <= slack[order[i]] < full:
            at_risk += 1
    for i in range(hopeless.size):
        if least <= slack[hopeless[i]] < full:
            at_risk -= 1
    if window and (at_risk > 0 or (rows.size > 0 and total >= limit)):
        return greedy, full, at_risk, -2
    if not window or not np.isfinite(within[0]):
        return greedy, full, at_risk, greedy
    chosen, _ = split_window(
        packed, within, decodes, context, longest, remaining, done, limit, survival, cap / margin, gain, frozen, dual,
        shape,
    )  # fmt: skip
    return greedy, full, at_risk, chosen


@compiled
def _literal_time(
    packed: FloatArray,
    budget: int,
    decodes: int,
    context: float,
    longest: float,
    remaining: IntArray,
    computed: IntArray,
    shape: FloatArray,
) -> float:
    """T^(b) of the paper's batch forwarder: a budget below the decodes runs that many of them, none takes no time."""
    if budget <= 0:
        return 0.0
    run = min(budget, decodes)
    part = context * run / decodes if decodes > 0 else 0.0
    return time_of(packed, float(run), part, longest, remaining, computed, float(budget - run), shape)


@compiled
def split_literal(
    packed: FloatArray,
    now_bound: float,
    next_bound: float,
    decodes: int,
    context: float,
    longest: float,
    remaining: IntArray,
    computed: IntArray,
    limit: int,
    shape: FloatArray,
) -> int:
    """The paper's Algorithm 1 as printed: total tokens of this step. It may break `now_bound`; see the errata."""
    b_cur = max_tokens_packed(packed, now_bound, decodes, context, longest, remaining, computed, limit, shape)
    b_next = max_tokens_packed(packed, next_bound, decodes, context, longest, remaining, computed, limit, shape)
    b_sum = b_cur + b_next
    low, high = decodes, limit
    while high - low > 30:
        third = (high - low) // 3
        a, b = low + third, high - third
        at_a = _literal_time(packed, a, decodes, context, longest, remaining, computed, shape)
        at_a += _literal_time(packed, b_sum - a, decodes, context, longest, remaining, computed, shape)
        at_b = _literal_time(packed, b, decodes, context, longest, remaining, computed, shape)
        at_b += _literal_time(packed, b_sum - b, decodes, context, longest, remaining, computed, shape)
        if at_a < at_b:
            high = b
        else:
            low = a
    best, best_time = limit, np.inf
    for candidate in (limit, (low + high) // 2, decodes):  # from large to small: ties go to the larger
        time = _literal_time(packed, candidate, decodes, context, longest, remaining, computed, shape)
        time += _literal_time(packed, b_sum - candidate, decodes, context, longest, remaining, computed, shape)
        if time < best_time - SAME_TIME:
            best, best_time = candidate, time
    return best
