"""Compiled parts of `tide` that fill a step: the queue of prompts, sizes. Slot names are in `tide`."""

from __future__ import annotations

import numpy as np

from slacktide.core.fair import AHEAD, COST
from slacktide.core.kernels import compiled
from slacktide.core.kernels_fair import interleave, pending
from slacktide.core.kernels_tide_kv import blocks_of, whole_blocks
from slacktide.core.kernels_tide_supply import seconds_of
from slacktide.core.live import (
    NUM_BLOCKS,
    NUM_COMPUTED,
    NUM_OUTPUT,
    NUM_PROMPT,
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
    I_QUEUE,
    I_QUEUE_DONE,
    I_QUEUE_LEFT,
    I_REMAINING,
    I_ROLE,
    LATE_PREFILL,
    M_BYPASSED,
)  # fmt: skip
from slacktide.core.types import RUNNING, FloatArray, IntArray


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
    last is set to the first on-time prompt that was refused. A waiting prompt needs blocks for all of itself. With
    `gate` there must also be room among `kv_tokens` for what running requests and it are expected to hold: on average
    (`expected`), or at each of the times of `peaks` (`kernels_tide_kv.foresee_kv`); both grow by who is admitted. A
    refused prompt that is on time is passed by others at most `bypass` times, and not once it has hardly time left.
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
