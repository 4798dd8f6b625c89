"""The inverse of a latency model: the most tokens of a step that keep it within a time.

Walked or bisected in compiled code (`kernels_latency.max_tokens_packed`); `max_tokens_reference` says the same in
numpy over every integer budget and is the oracle of the tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from slacktide.core import shape as s
from slacktide.core.types import FloatArray, IntArray

if TYPE_CHECKING:
    from slacktide.core.latency import LatencyModel


def max_tokens(
    model: LatencyModel,
    time: float,
    *,
    num_decodes: int,
    decode_context: float,
    decode_max_context: float,
    prefill_remaining: IntArray,
    prefill_computed: IntArray,
    limit: int,
) -> int:
    """The largest total token budget b in [num_decodes, limit] whose step takes at most `time` seconds.

    The step of a budget b is: all decodes, one token each (`decode_context` their contexts summed,
    `decode_max_context` the largest), and b - num_decodes prompt tokens taken from the queue in order
    (`prefill_remaining`, `prefill_computed`: int64[q]). Measured times may dip as b grows, so b counts only if every
    smaller budget fits too (running maximum): the result never shrinks when `time` grows. `limit` is returned when
    the whole queue fits. 0 when the decodes alone do not fit into `time` or into `limit`, or nothing fits; NaN as
    `time` fits nothing. Raises ValueError for negative numbers.
    """
    from slacktide.core.kernels_latency import max_tokens_packed

    if num_decodes < 0 or limit < 0 or decode_context < 0 or decode_max_context < 0:
        raise ValueError(
            f"max_tokens: expected num_decodes, contexts and limit >= 0, found {num_decodes}, {decode_context}, "
            f"{decode_max_context}, {limit}"
        )
    remaining = np.require(prefill_remaining, np.int64, ["C", "W"])
    computed = np.require(prefill_computed, np.int64, ["C", "W"])
    if remaining.shape != computed.shape or remaining.ndim != 1:
        raise ValueError(f"max_tokens: expected two int64[q], found {remaining.shape} and {computed.shape}")
    found = max_tokens_packed(
        model.packed,
        float(time),
        int(num_decodes),
        float(decode_context),
        float(decode_max_context),
        remaining,
        computed,
        int(limit),
        np.zeros(s.SHAPE_SIZE),
    )
    return int(found)


def fill_shapes(
    model: LatencyModel,
    budgets: IntArray,
    *,
    num_decodes: int,
    decode_context: float,
    decode_max_context: float,
    prefill_remaining: IntArray,
    prefill_computed: IntArray,
) -> FloatArray:
    """Shapes float64[m, 12] of the steps of m total budgets (each >= num_decodes), queue filled in order."""
    remaining = np.maximum(np.asarray(prefill_remaining, dtype=np.int64), 0)
    before = np.cumsum(remaining) - remaining
    c = np.clip(np.asarray(budgets)[:, None] - num_decodes - before, 0, remaining).astype(np.float64)
    u = np.where(c > 0, np.asarray(prefill_computed, dtype=np.float64), 0.0)
    shapes = np.zeros((len(budgets), s.SHAPE_SIZE))
    shapes[:, s.NUM_PREFILLS] = (c > 0).sum(axis=1)
    shapes[:, s.PREFILL_TOKENS] = c.sum(axis=1)
    shapes[:, s.PREFILL_CONTEXT] = u.sum(axis=1)
    shapes[:, s.PREFILL_WORK] = (c * (u + c)).sum(axis=1)
    shapes[:, s.PREFILL_SQUARE] = (c * c).sum(axis=1)
    shapes[:, s.PREFILL_MAX] = c.max(axis=1, initial=0.0)
    shapes[:, s.NUM_DECODES] = num_decodes
    shapes[:, s.DECODE_CONTEXT] = decode_context
    shapes[:, s.DECODE_MAX_CONTEXT] = decode_max_context
    shapes[:, s.PREFILL_POTENTIAL] = (model.potential(u + c) - model.potential(u)).sum(axis=1)
    shapes[:, s.NUM_TOKENS] = shapes[:, s.PREFILL_TOKENS] + num_decodes
    shapes[:, s.NUM_SEQUENCES] = shapes[:, s.NUM_PREFILLS] + num_decodes
    return shapes


def max_tokens_reference(
    model: LatencyModel,
    time: float,
    *,
    num_decodes: int,
    decode_context: float,
    decode_max_context: float,
    prefill_remaining: IntArray,
    prefill_computed: IntArray,
    limit: int,
) -> int:
    """`max_tokens` by brute force over every integer budget."""
    if num_decodes > limit:
        return 0
    budgets = np.arange(num_decodes, limit + 1)
    shapes = fill_shapes(
        model,
        budgets,
        num_decodes=num_decodes,
        decode_context=decode_context,
        decode_max_context=decode_max_context,
        prefill_remaining=prefill_remaining,
        prefill_computed=prefill_computed,
    )
    fits = np.maximum.accumulate(model.step_times(shapes)) <= time
    return int(budgets[fits][-1]) if fits.any() else 0
