"""Compiled twins of `deadlines`: one pass over the live rows, by function name.

They work on caller-owned arrays: a decision of 100 live requests has to stay below 100 us.
"""

from __future__ import annotations

import numpy as np

from slacktide.core.kernels import compiled
from slacktide.core.kinds import DECODE, IDLE, PREFILL
from slacktide.core.live import (
    ARRIVAL,
    FIRST_TOKEN,
    MAX_TOKENS,
    NUM_CACHED,
    NUM_COMPUTED,
    NUM_IN_FLIGHT,
    NUM_OUTPUT,
    NUM_PROMPT,
    SLO_TBT,
    SLO_TTFT,
    STATUS,
)
from slacktide.core.types import RUNNING, FloatArray, IntArray


@compiled
def needs(ints: IntArray, row: int, max_model_len: int) -> tuple[int, int, int]:
    """(kind, tokens computed, tokens needed) of a row; a waiting one has its cached prefix computed. Kinds: `kinds`.

    Idle: nothing to compute, or its last token is in flight.
    """
    in_flight = ints[NUM_IN_FLIGHT, row]
    output = ints[NUM_OUTPUT, row] + in_flight
    running = ints[STATUS, row] == RUNNING
    done = ints[NUM_COMPUTED, row] if running else ints[NUM_CACHED, row]
    known = ints[NUM_PROMPT, row] + output
    need = known - done
    if running:
        need = min(need, max_model_len - 1 - done)
    if need <= 0 or (in_flight > 0 and output >= ints[MAX_TOKENS, row]):
        kind = IDLE
    elif known - done == 1 and output > 0:
        kind = DECODE
    else:
        kind = PREFILL
    return kind, done, max(need, 0)


@compiled
def survey(
    ints: IntArray,
    floats: FloatArray,
    n: int,
    now: float,
    max_model_len: int,
    rebase: bool,
    kind: IntArray,
    slack: FloatArray,
    pace: FloatArray,
    remaining: IntArray,
    computed: IntArray,
) -> tuple[int, float, float]:
    """Fill the columns of `deadlines.Survey`; returns (decodes, their contexts summed, the largest)."""
    decodes = 0
    context = 0.0
    longest = 0.0
    for row in range(n):
        output = ints[NUM_OUTPUT, row] + ints[NUM_IN_FLIGHT, row]
        kind[row], done, remaining[row] = needs(ints, row, max_model_len)
        computed[row] = done
        if kind[row] == DECODE:
            decodes += 1
            context += done
            longest = max(longest, float(done))
        pace[row] = floats[SLO_TBT, row]
        anchor = floats[ARRIVAL, row] + floats[SLO_TTFT, row]
        first = floats[FIRST_TOKEN, row]
        if first == first and (np.isinf(anchor) or (rebase and first > anchor)):  # noqa: PLR0124 (NaN: no token yet)
            anchor = first
        elif output > 0 and np.isinf(anchor):
            anchor = now  # its first token is in flight
        slack[row] = anchor - now
        if output > 0:
            slack[row] += output * pace[row]
    return decodes, context, longest


@compiled
def windows(
    kind: IntArray,
    slack: FloatArray,
    pace: FloatArray,
    least: float,
    late_factor: float,
    tokens_per_step: float,
    bounds: FloatArray,
) -> int:
    """Fill bounds[j] = seconds within which step j + 1 must end for every decode; returns how many decodes are late."""
    late = 0
    bounds[:] = np.inf
    for row in range(kind.size):
        if kind[row] != DECODE:
            continue
        first = slack[row]
        if first < least:
            late += 1
            first = late_factor * pace[row]
        if first == np.inf:
            continue
        for j in range(bounds.size):
            bounds[j] = min(bounds[j], first + (j * tokens_per_step * pace[row] if j > 0 else 0.0))
    return late
