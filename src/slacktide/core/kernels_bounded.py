"""Compiled halves of `bounded`: the rows of a step with what it takes at least, and a plan cut to its prompt tokens.

One crossing from Python costs about as much as the arithmetic over a hundred rows, so what every step needs is done in
one.
"""

from __future__ import annotations

import numpy as np

from slacktide.core.kernels import compiled
from slacktide.core.kernels_deadlines import survey
from slacktide.core.kernels_sliding import time_of
from slacktide.core.kinds import DECODE, PREFILL
from slacktide.core.live import ADMISSION_ORDER, SLO_E2E
from slacktide.core.types import FloatArray, IntArray

KIND, REMAINING, COMPUTED, DECODES, PREFILLS = range(5)
SLACK, PACE = range(2)
"""Lines of what `begin` writes: columns of the survey, rows that decode, rows with prompt tokens to compute."""


@compiled
def begin(
    ints: IntArray,
    floats: FloatArray,
    n: int,
    now: float,
    max_model_len: int,
    rebase: bool,
    packed: FloatArray,
    max_num_batched_tokens: int,
    max_chunk: int,
    columns: IntArray,
    times: FloatArray,
    shape: FloatArray,
) -> tuple[int, float, float, int, int, int, bool, bool, float, float, float]:
    """Fill int64[5, n] `columns` and float64[2, n] `times`; `max_chunk` 0 leaves the engine's limit.

    Returns the survey's (decodes, their contexts summed, the largest); how many rows decode and how many prefill, as
    listed; most tokens of the step; whether the decodes stand in the order of admission; whether any row has an
    end-to-end target; predicted seconds of the decodes alone, with one token of the first prompt, and with as many as
    the step may have.
    """
    decodes, context, longest = survey(
        ints, floats, n, now, max_model_len, rebase, columns[KIND], times[SLACK], times[PACE], columns[REMAINING],
        columns[COMPUTED],
    )  # fmt: skip
    listed, prefills, last, in_order, has_e2e = 0, 0, -1, True, False
    for row in range(n):
        has_e2e = has_e2e or floats[SLO_E2E, row] < np.inf
        if columns[KIND, row] == DECODE:
            columns[DECODES, listed] = row
            in_order = in_order and ints[ADMISSION_ORDER, row] > last
            last = ints[ADMISSION_ORDER, row]
            listed += 1
        elif columns[KIND, row] == PREFILL:
            columns[PREFILLS, prefills] = row
            prefills += 1
    limit = max_num_batched_tokens
    if max_chunk > 0:
        limit = min(limit, max(max_chunk, decodes))
    tokens, done = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    alone = time_of(packed, float(decodes), context, longest, tokens[:0], done[:0], 0.0, shape)
    smallest, full = alone, alone
    if prefills > 0:
        tokens[0], done[0] = 1, columns[COMPUTED, columns[PREFILLS, 0]]
        smallest = time_of(packed, float(decodes), context, longest, tokens, done, 1.0, shape)
        tokens[0] = limit
        full = time_of(packed, float(decodes), context, longest, tokens, done, float(limit), shape)
    return decodes, context, longest, listed, prefills, limit, in_order, has_e2e, alone, smallest, full


@compiled
def cut(
    rows: IntArray,
    tokens: IntArray,
    first: int,
    prefill: int,
    computed: IntArray,
    packed: FloatArray,
    decodes: float,
    context: float,
    longest: float,
    shape: FloatArray,
) -> tuple[int, int, float]:
    """Cut a plan, whose prompts begin at `first`, to `prefill` prompt tokens; the last one's are cut in `tokens`.

    Returns how many rows are left, their prompt tokens, and the predicted seconds beside the decodes.
    """
    remaining, done = np.empty(rows.size - first, dtype=np.int64), np.empty(rows.size - first, dtype=np.int64)
    kept, total = 0, 0
    while total < prefill and first + kept < rows.size:
        at = first + kept
        tokens[at] = min(tokens[at], prefill - total)
        remaining[kept], done[kept] = tokens[at], computed[rows[at]]
        total += tokens[at]
        kept += 1
    seconds = time_of(packed, decodes, context, longest, remaining[:kept], done[:kept], float(total), shape)
    return first + kept, total, seconds
