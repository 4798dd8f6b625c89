"""Where each family keeps its parameters in a model's packed block (float64, header first).

Slot numbers only, so that the compiled functions (`kernels_latency`) and the models that build a block agree. A slot
that describes a table holds (offset, sizes...); offset 0 means the model has no such table.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slacktide.core.types import FloatArray

# Family codes (packed[FAMILY]).
AFFINE, SEVEN_FEATURE, TABLES, ROOFLINE, EXTENDED = 1.0, 2.0, 3.0, 4.0, 5.0

FAMILY = 0
MONOTONE = 1
"""1 when, with the decodes fixed, time never falls as prefill tokens are added: its inverse may bisect."""
POTENTIAL = 2
"""V, a uniform curve: (offset, count, step)."""

HEADER_SIZE = 32

# Families with few numbers keep them from here on.
AFFINE_VALUES = 5
"""alpha_p, beta_p, alpha_d, beta_d, alpha_mb, kappa."""
SEVEN_VALUES = 5
"""floor, then 8 weights (intercept, x1..x7) each for pure decode, pure prefill, mixed."""
ROOFLINE_VALUES = 5
"""fixed, weight_read, per_token, per_logits_row, per_sequence, elementwise_per_token, per_pair, per_kv_token,
interference."""

# Family `extended-feature`.
EXTENDED_FLOOR = 5
EXTENDED_KNOTS = 6
"""Token counts where the slope changes: (offset, count); the first is 0."""
EXTENDED_WEIGHTS = 8
"""Decode, prefill, mixed in turn: intercept, one slope per knot, then the weights of EXTENDED_LINEAR: (offset)."""

# Family `tables`.
HOST_PER_STEP = 5
HOST_PER_SEQUENCE = 6
DENSE = 7
"""All work that depends on the number of tokens, per step: (offset, count, step 1)."""
PER_SEQUENCE = 10
"""lm_head and sampler by number of sequences: (offset, count, step 1)."""
PREFILL_GRID = 13
"""Attention of one chunk: (offset, nodes of chunk, nodes of cached)."""
PREFILL_LAUNCH = 16
"""Cost of a prefill attention of one token, all layers."""
DECODE_GRID = 17
"""Pure decode attention: (offset, nodes of n, nodes of context)."""
INCREMENT_GRID = 20
"""What decodes add beside a chunk: (offset, nodes of chunk, cached, n, context)."""
INTERFERENCE = 25
"""Factor on the decode attention of mixed batches, for models without INCREMENT_GRID."""
KV_SECONDS = 26
"""Least seconds to read the KV of one token in all layers."""
SKEW = 27
"""Share of (max - mean) added to the mean decode context."""


def pack(header: dict[int, float], tables: Sequence[tuple[int, Sequence[FloatArray]]]) -> FloatArray:
    """One read-only block of the header values and the tables' arrays; `tables` pairs a slot with its arrays.

    Writes the table's offset into its slot; the sizes behind it belong into `header`.
    """
    head = np.zeros(HEADER_SIZE)
    for slot, value in header.items():
        head[slot] = value
    parts = [head]
    offset = HEADER_SIZE
    for slot, arrays in tables:
        head[slot] = offset
        for array in arrays:
            parts.append(np.asarray(array, dtype=np.float64).ravel())
            offset += array.size
    block = np.ascontiguousarray(np.concatenate(parts))
    block.flags.writeable = False
    return block
