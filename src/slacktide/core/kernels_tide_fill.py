"""Compiled parts of `tide` that fill a step: blocks, victims, the queue of prompts, sizes. Slot names are in `tide`."""

from __future__ import annotations

import numpy as np

from slacktide.core.fair import AHEAD, COST
from slacktide.core.kernels import compiled
from slacktide.core.kernels_fair import interleave, pending
from slacktide.core.kernels_tide_supply import seconds_of
from slacktide.core.kinds import DECODE, IDLE
from slacktide.core.live import (
    NUM_BLOCKS,
    NUM_CACHED,
    NUM_CACHED_FREE,
    NUM_COMPUTED,
    NUM_OUTPUT,
    NUM_PREEMPTIONS,
    NUM_PROMPT,
    NUM_SHARED,
    PRIORITY,
    STATUS,
    TENANT,
)  # fmt: skip
from slacktide.core.tide import (
    ACCEPTED,
    DEMOTED,
    F_GROWTH,
    F_PACE,
    F_SERVICE,
    F_SLACK,
    I_COMPUTED,
    I_GONE,
    I_KIND,
    I_MISSED,
    I_QUEUE,
    I_QUEUE_DONE,
    I_QUEUE_LEFT,
    I_REMAINING,
    I_ROLE,
    LATE_PREFILL,
    M_BYPASSED,
    ON_TIME_DECODE,
    PER_PAIR,
    PER_TOKEN,
    RELEASED_TIME,
    RELEASED_TOKENS,
    TOKENS_WAITING,
)  # fmt: skip
from slacktide.core.types import RUNNING, FloatArray, IntArray

LEND = 10.0
"""Times as long as computing its KV again that a stream's slack must be before it lends its KV: that takes a tenth of
the time that it may stay away."""
RETURN = 4.0
"""Times as long as blocks are expected to take to come back that its slack must be: others may ask before it."""


@compiled
def blocks_of(ints: IntArray, row: int, tokens: int, block_size: int) -> int:
    """New blocks of a running row that computes `tokens` more."""
    return max(-(-(ints[NUM_COMPUTED, row] + tokens) // block_size) - ints[NUM_BLOCKS, row], 0)  # type: ignore[no-any-return]


@compiled
def whole_blocks(ints: IntArray, row: int, block_size: int, max_model_len: int) -> int:
    """Free blocks that a waiting row takes for all its known tokens; blocks of a cached prefix that others hold are
    free of charge."""
    known = min(ints[NUM_PROMPT, row] + ints[NUM_OUTPUT, row], max_model_len)
    shared = ints[NUM_CACHED, row] // block_size - ints[NUM_CACHED_FREE, row]
    return max(-(-known // block_size) - shared, 0)  # type: ignore[no-any-return]


@compiled
def can_lend(ints: IntArray, row: int, si: IntArray, sf: FloatArray, state: FloatArray) -> bool:
    """Whether a running row can give up its KV for a while and be on time all the same.

    It has to compute again what it knows: where its slack is LEND times as long, it may stay away for so long that this
    takes 1 / LEND of the time. And it has to find blocks again, behind those who wait already. A prompt is not asked:
    its first token is what people wait for.
    """
    if sf[F_SLACK, row] == np.inf:
        return True
    if si[I_KIND, row] != DECODE:
        return False
    u = float(ints[NUM_COMPUTED, row])
    again = u * (state[PER_TOKEN] + 0.5 * state[PER_PAIR] * u)
    back = state[TOKENS_WAITING] + u
    enough = RETURN * back * state[RELEASED_TIME] <= sf[F_SLACK, row] * state[RELEASED_TOKENS]
    return state[RELEASED_TOKENS] > 0.0 and enough and sf[F_SLACK, row] >= LEND * again  # type: ignore[no-any-return]


@compiled
def pick_victim(
    ints: IntArray, n: int, si: IntArray, sf: FloatArray, state: FloatArray, late_only: bool, most: int
) -> int:
    """Running row to preempt, -1 for none: late ones first (least computed), then those who can afford it (`can_lend`;
    least output, so that old ones end and give back what they hold), then those of most slack.

    The oldest running request is spared, so that somebody always ends. `most`: rows preempted so often are spared too
    (negative: none is).
    """
    oldest, best, best_lends = -1, -1, False
    for row in range(n):
        if ints[STATUS, row] != RUNNING or si[I_GONE, row] != 0 or si[I_KIND, row] == IDLE:
            continue
        if oldest < 0:
            oldest = row
            continue
        if most >= 0 and ints[NUM_PREEMPTIONS, row] >= most:
            continue
        late = si[I_MISSED, row] != 0
        if late_only and not late:
            continue
        lends = not late and can_lend(ints, row, si, sf, state)
        if best < 0:
            best, best_lends = row, lends
            continue
        best_late = si[I_MISSED, best] != 0
        if late != best_late:
            better = late
        elif late:
            better = ints[NUM_COMPUTED, row] <= ints[NUM_COMPUTED, best]
        elif lends != best_lends:
            better = lends
        elif lends and ints[NUM_OUTPUT, row] != ints[NUM_OUTPUT, best]:
            better = ints[NUM_OUTPUT, row] < ints[NUM_OUTPUT, best]
        else:
            better = sf[F_SLACK, row] >= sf[F_SLACK, best]
        if better:
            best, best_lends = row, lends
    return best


@compiled
def pick_lender(ints: IntArray, n: int, short: int, si: IntArray, sf: FloatArray, state: FloatArray) -> int:
    """Running on-time decode that lends its KV to a prompt that lacks `short` blocks, -1 for none.

    The smallest that has as many, for it has least to compute again; else the largest. The oldest is spared.
    """
    oldest, best, best_blocks = -1, -1, 0
    for row in range(n):
        if ints[STATUS, row] != RUNNING or si[I_GONE, row] != 0 or si[I_KIND, row] == IDLE:
            continue
        if oldest < 0:
            oldest = row
            continue
        if si[I_ROLE, row] != ON_TIME_DECODE or not can_lend(ints, row, si, sf, state):
            continue
        blocks = ints[NUM_BLOCKS, row] - ints[NUM_SHARED, row]
        enough, best_enough = blocks >= short, best_blocks >= short
        if best < 0 or (enough and not best_enough) or (enough == best_enough and (blocks < best_blocks) == enough):
            best, best_blocks = row, blocks
    return best


@compiled
def sums_of(rows: IntArray, computed: IntArray) -> tuple[float, float]:
    """(contexts summed, the largest) of decodes."""
    context, longest = 0.0, 0.0
    for i in range(rows.size):
        u = float(computed[rows[i]])
        context += u
        longest = max(longest, u)
    return context, longest


@compiled
def fit(packed: FloatArray, factors: FloatArray, decodes: float, context: float, longest: float, left: IntArray,
        done: IntArray, top: int, bound: float, least: float, shape: FloatArray) -> int:  # fmt: skip
    """Prompt tokens, at most `top`, that fill `bound` corrected seconds beside the decodes; 0 when none fit.

    The answer itself is predicted to fit, also where corrected times are not monotone.
    """
    if top <= 0 or not bound > 0.0:
        return 0
    if seconds_of(packed, factors, decodes, context, longest, left, done, float(top), least, shape) <= bound:
        return top
    low, high = 0, top
    while high - low > 1:
        middle = (low + high) >> 1
        if seconds_of(packed, factors, decodes, context, longest, left, done, float(middle), least, shape) <= bound:
            low = middle
        else:
            high = middle
    return low


@compiled
def best_size(packed: FloatArray, factors: FloatArray, decodes: float, context: float, longest: float, left: IntArray,
              done: IntArray, most: int, prices: FloatArray, worth: float, sizes: int, saturation: float, least: float,
              shape: FloatArray) -> tuple[int, float, float]:  # fmt: skip
    """(prompt tokens, value, seconds) of the best step of at most `most` prompt tokens: greatest value per second.

    Looks at `sizes` sizes: the largest, then the tile edges of the whole step below it (multiples of 64 tokens up to
    512, of a fifth beyond). Once compute is saturated larger steps hardly gain: the smallest within the share
    `saturation` of the best wins, because first tokens come sooner.
    """
    best, best_value, best_time, top = 0, 0.0, 1.0, 0.0
    p = most
    for _ in range(sizes):
        if p <= 0:
            break
        seconds = seconds_of(packed, factors, decodes, context, longest, left, done, float(p), least, shape)
        value = prices[0] * p + prices[1] * (shape[5] - 0.5 * shape[6]) + worth
        ratio = value / seconds
        if ratio >= (1.0 - saturation) * max(top, ratio):
            best, best_value, best_time = p, value, seconds
        top = max(top, ratio)
        n = p + int(decodes)
        tile = 64 if n <= 512 else 128 * max(1, n // 640)
        p = (n - 1) // tile * tile - int(decodes)
    return best, best_value, best_time


@compiled
def bounds_of(rows: IntArray, sf: FloatArray, round_time: float) -> tuple[float, float]:
    """(s1, s2): earliest next deadline of the decodes that can make it, and the earliest after that."""
    s1, s2 = np.inf, np.inf
    for i in range(rows.size):
        s = sf[F_SLACK, rows[i]]
        if s >= round_time:
            s1 = min(s1, s)
            s2 = min(s2, s + sf[F_PACE, rows[i]])
    return s1, s2


@compiled
def build_queue(
    order: IntArray,
    count: int,
    room: IntArray,
    ints: IntArray,
    si: IntArray,
    sf: FloatArray,
    memory: FloatArray,
    kv_tokens: float,
    expected: float,
    peaks: FloatArray,
    stride: float,
    gate: bool,
    bypass: float,
    knee_time: float,
    top: int,
    block_size: int,
    max_model_len: int,
) -> tuple[int, int]:
    """The prompts of `order` that blocks and seats allow, up to `top` tokens; returns (prompts, tokens).

    `room`: free blocks, blocks kept back for running prompts, free seats, watermark, 1 when something runs, -1; the
    last is set to the first on-time prompt that was refused. A waiting prompt needs blocks for all of itself, and with
    `gate` the KV tokens that all running requests are expected to reach on average. A refused prompt that is on time is
    passed by others at most `bypass` times, and not once it has hardly time left.
    """
    queued, total = 0, 0
    open_door = True
    for i in range(count):
        if total >= top:
            break
        row = order[i]
        tokens = si[I_REMAINING, row]
        if ints[STATUS, row] == RUNNING:
            need = blocks_of(ints, row, tokens, block_size)
            if need > room[0]:
                tokens = (ints[NUM_BLOCKS, row] + room[0]) * block_size - ints[NUM_COMPUTED, row]
                if tokens <= 0:
                    continue
            room[1] = max(room[1] - need, 0)
            room[0] -= min(need, room[0])
        else:
            if not open_door:
                continue
            whole = whole_blocks(ints, row, block_size, max_model_len)
            own = float(ints[NUM_PROMPT, row] + ints[NUM_OUTPUT, row])
            fits = whole + room[1] + (room[3] if room[4] != 0 else 0) <= room[0] and room[2] > 0
            if fits and gate and room[4] != 0 and expected + own + 0.5 * sf[F_GROWTH, row] > kv_tokens:
                for k in range(peaks.size):
                    more = own + k * stride if sf[F_GROWTH, row] >= (k - 0.5) * stride else 0.0
                    fits = fits and peaks[k] + more <= kv_tokens
            if not fits:
                if si[I_ROLE, row] == ACCEPTED:
                    if room[5] < 0:
                        room[5] = row
                    if memory[M_BYPASSED, row] > bypass or sf[F_SLACK, row] < sf[F_SERVICE, row] + 2.0 * knee_time:
                        open_door = False
                continue
            if room[5] >= 0:
                memory[M_BYPASSED, room[5]] += 1.0
            expected += own + 0.5 * sf[F_GROWTH, row]
            for k in range(peaks.size):
                peaks[k] += own + k * stride if sf[F_GROWTH, row] >= (k - 0.5) * stride else 0.0
            room[0] -= whole
            room[2] -= 1
            room[4] = 1
        si[I_QUEUE, queued], si[I_QUEUE_LEFT, queued], si[I_QUEUE_DONE, queued] = row, tokens, si[I_COMPUTED, row]
        queued += 1
        total += tokens
    return queued, total


@compiled
def order_prompts(
    by_deadline: IntArray, n: int, reserved: bool, backfill: bool, ints: IntArray, si: IntArray, sf: FloatArray,
    order: IntArray, shares: FloatArray,
) -> tuple[int, int]:  # fmt: skip
    """Fill `order` with the prompts to serve, first to last; returns (how many, where they come from: tide.SOURCES).

    The accepted by deadline; without any (or behind them, with `backfill`) the demoted, least work first, then the late
    by arrival, both by priority. `reserved`: the late alone, oldest first. With several tenants (`shares`) those
    without a deadline, the demoted and the late go in a fair order.
    """
    m, source, fair = 0, 0, shares.shape[1] > 0
    if fair:
        shares[AHEAD] = shares[COST]
    if not reserved:
        for i in range(by_deadline.size):
            if si[I_ROLE, by_deadline[i]] == ACCEPTED:
                order[m] = by_deadline[i]
                m += 1
        source = 1 if m > 0 else 0
        if fair:
            dated = 0
            while dated < m and sf[F_SLACK, order[dated]] < np.inf:
                row = order[dated]
                shares[AHEAD, ints[TENANT, row]] += pending(ints, row, si[I_REMAINING], shares)
                dated += 1
            interleave(order[dated:m], ints, si[I_REMAINING], True, True, shares)
        if m > 0 and not backfill:
            return m, source
        first = m
        m = _append(DEMOTED, n, True, True, ints, si, order, m)
        if fair:
            interleave(order[first:m], ints, si[I_REMAINING], True, False, shares)
        source = 2 if source == 0 and m > 0 else source
    first = m
    m = _append(LATE_PREFILL, n, not reserved, False, ints, si, order, m)
    if fair:
        interleave(order[first:m], ints, si[I_REMAINING], not reserved, True, shares)
    if source == 0 and m > 0:
        source = 4 if reserved else 3
    return m, source


@compiled
def _append(role: int, n: int, by_priority: bool, by_work: bool, ints: IntArray, si: IntArray, order: IntArray,
            m: int) -> int:  # fmt: skip
    """Append the rows of a role to `order` from position m on, sorted; returns the new end."""
    count = 0
    for row in range(n):
        count += 1 if si[I_ROLE, row] == role else 0
    rows, keys = np.empty(count, dtype=np.int64), np.empty(count)
    at = 0
    for row in range(n):
        if si[I_ROLE, row] == role:
            rows[at] = row
            keys[at] = (1e9 * ints[PRIORITY, row] if by_priority else 0.0) + (si[I_REMAINING, row] if by_work else 0.0)
            at += 1
    by_key = np.argsort(keys, kind="mergesort")
    for i in range(count):
        order[m + i] = rows[by_key[i]]
    return m + count
