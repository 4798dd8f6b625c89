"""What exclusive batching must know of the rows, in one pass, and the two predictions it asks for; compiled.

`policies/_exclusive` says what for. Each function stands for ten to thirty numpy calls on small arrays.
"""

from __future__ import annotations

import numpy as np

from slacktide.core.kernels import compiled
from slacktide.core.kernels_latency import max_tokens_packed
from slacktide.core.kernels_sliding import time_of
from slacktide.core.live import (
    ARRIVAL,
    LAST_TOKEN,
    MAX_TOKENS,
    NUM_CACHED,
    NUM_CACHED_FREE,
    NUM_COMPUTED,
    NUM_IN_FLIGHT,
    NUM_OUTPUT,
    NUM_PROMPT,
    SLO_TBT,
    SLO_TTFT,
    STATUS,
)
from slacktide.core.types import RUNNING, FloatArray, IntArray

DECODE, HALF_DONE, WAITING = range(3)
"""Lines of what `look` writes: 1 for each row that decodes, else 0; running rows with a part of their prompt left, as
they stand; rows without a seat, in order of arrival."""


@compiled
def look(
    ints: IntArray,
    floats: FloatArray,
    n: int,
    now: float,
    max_num_seqs: int,
    block_size: int,
    num_free_blocks: int,
    max_model_len: int,
    reserve: int,
    rows: IntArray,
) -> tuple[int, int, int, int, int, bool, int, float, float, float, float]:
    """Sort the rows into int64[3, n] `rows`; returns the numbers of `_exclusive.Look`, in its order."""
    in_flight_at_all = False
    for row in range(n):
        in_flight_at_all = in_flight_at_all or ints[NUM_IN_FLIGHT, row] != 0
    running, decodes, half_done, waiting, has_slo = 0, 0, 0, 0, False
    streams, context, longest, due, gap = 0, 0.0, 0.0, np.inf, np.inf
    for row in range(n):
        in_flight, computed = ints[NUM_IN_FLIGHT, row], ints[NUM_COMPUTED, row]
        output = ints[NUM_OUTPUT, row] + in_flight
        ttft, tbt = floats[SLO_TTFT, row], floats[SLO_TBT, row]
        has_slo = has_slo or ttft < np.inf or tbt < np.inf
        decode = output > 0 and ints[NUM_PROMPT, row] + output - computed == 1
        rows[DECODE, row] = 1 if decode else 0
        if ints[STATUS, row] != RUNNING:
            rows[WAITING, waiting] = row
            waiting += 1
        else:
            running += 1
            if not decode:
                rows[HALF_DONE, half_done] = row
                half_done += 1
        if not decode:
            continue
        streams += 1
        context += computed
        longest = max(longest, float(computed))
        ends = (in_flight > 0 and output >= ints[MAX_TOKENS, row]) or computed >= max_model_len - 1
        if not (in_flight_at_all and ends):
            decodes += 1
        if tbt < np.inf:
            gap = min(gap, tbt)
            last = floats[LAST_TOKEN, row]
            if np.isnan(last):
                last = now  # its first token is on the way (async scheduling)
            next_due = last + tbt
            if ttft < np.inf:
                next_due = max(next_due, floats[ARRIVAL, row] + ttft + output * tbt)
            due = min(due, next_due)
    room = num_free_blocks - (reserve if running > 0 else 0)
    fillable = 0
    for i in range(min(waiting, max(max_num_seqs - running, 0))):
        row = rows[WAITING, i]
        known = min(ints[NUM_PROMPT, row] + ints[NUM_OUTPUT, row], max_model_len)
        shared = ints[NUM_CACHED, row] // block_size - ints[NUM_CACHED_FREE, row]
        room -= -(-known // block_size) - shared
        if room < 0:
            break
        fillable += 1
    return running, decodes, half_done, waiting, fillable, has_slo, streams, context, longest, due - now, gap


@compiled
def _prompt_time(packed: FloatArray, tokens: float, shape: FloatArray) -> float:
    """Seconds of a step of one new prompt's `tokens`, nothing beside it."""
    remaining, computed = np.full(1, int(tokens)), np.zeros(1, dtype=np.int64)
    return time_of(packed, 0.0, 0.0, 0.0, remaining, computed, tokens, shape)


@compiled
def first_token_at_risk(
    ints: IntArray,
    floats: FloatArray,
    now: float,
    packed: FloatArray,
    max_num_batched_tokens: int,
    hold: float,
    heads: IntArray,
    streams: float,
    context: float,
    longest: float,
    gap: float,
    shape: FloatArray,
) -> bool:
    """One of the waiting prompts `heads` can still meet its TTFT, and has waited for slots as long as it may.

    It may wait until the share `hold` of its TTFT is over, and no longer than its prefill allows: full prompt steps for
    all tokens up to its own, which take longer where running streams interrupt them once every `gap` seconds.
    """
    step = time_of(packed, streams, context, longest, heads[:0], heads[:0], 0.0, shape)
    budget, tokens, start, first, full = float(max_num_batched_tokens), 0.0, 0.0, 0.0, 0.0
    for i in range(heads.size):
        row = heads[i]
        known = ints[NUM_PROMPT, row] + ints[NUM_OUTPUT, row] + ints[NUM_IN_FLIGHT, row]
        tokens += max(known - ints[NUM_COMPUTED, row] - ints[NUM_CACHED, row], 1)
        if i == 0:  # T(n) is near a line: its two ends give it
            start = tokens
            first = _prompt_time(packed, max(min(tokens, budget), 1.0), shape)
            full = _prompt_time(packed, max(budget, 1.0), shape)
        ttft = floats[SLO_TTFT, row]
        if ttft == np.inf:
            continue
        left = tokens % budget
        needed = (tokens // budget) * full
        if left > 0.0:
            needed += first + min(max((left - start) / max(budget - start, 1.0), 0.0), 1.0) * (full - first)
        slack = floats[ARRIVAL, row] + ttft - now - needed / max(1.0 - step / gap, 0.1)
        patience = floats[ARRIVAL, row] + hold * ttft - now
        if slack >= 0.0 and min(slack, patience) < step:
            return True
    return False


@compiled
def budget_within(
    ints: IntArray, packed: FloatArray, order: IntArray, seconds: float, limit: int, shape: FloatArray
) -> int:
    """Most tokens of a step within `seconds`: the decodes among `order`, one token each, then its prompts in order."""
    remaining, computed = np.empty(order.size, dtype=np.int64), np.empty(order.size, dtype=np.int64)
    decodes, context, longest, prompts = 0, 0.0, 0.0, 0
    for i in range(order.size):
        row = order[i]
        done, known = ints[NUM_COMPUTED, row], ints[NUM_PROMPT, row] + ints[NUM_OUTPUT, row]
        in_flight = ints[NUM_IN_FLIGHT, row]
        if known + in_flight - done == 1 and ints[NUM_OUTPUT, row] + in_flight > 0:
            decodes += 1
            context += done
            longest = max(longest, float(done))
            continue
        if ints[STATUS, row] != RUNNING:
            done = ints[NUM_CACHED, row]
        remaining[prompts], computed[prompts] = known - done, done
        prompts += 1
    return max_tokens_packed(
        packed, seconds, decodes, context, longest, remaining[:prompts], computed[:prompts], limit, shape
    )
