"""A batch of one step summarised as float64[12]: all that a latency model looks at.

The first eleven entries are sums and maxima over the rows of the batch (c = tokens of a row in this step, u = tokens it
has computed before); SlidingServe's features are x1 = PREFILL_WORK, x2 = PREFILL_SQUARE, x3 = PREFILL_CONTEXT +
DECODE_CONTEXT, x4 = NUM_DECODES, x5 = DECODE_CONTEXT, x6 = PREFILL_TOKENS, x7 = PREFILL_MAX. The last is the model's
own attention cost of the chunks: the sum of V(u + c) - V(u) over prefills, with V a table of the model.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from slacktide.core.types import BoolArray, FloatArray, IntArray

NUM_TOKENS = 0
NUM_SEQUENCES = 1
NUM_PREFILLS = 2
PREFILL_TOKENS = 3
PREFILL_CONTEXT = 4
PREFILL_WORK = 5
PREFILL_SQUARE = 6
PREFILL_MAX = 7
NUM_DECODES = 8
DECODE_CONTEXT = 9
DECODE_MAX_CONTEXT = 10
PREFILL_POTENTIAL = 11
SHAPE_SIZE = 12

FIELD_NAMES = (
    "num_tokens", "num_sequences", "num_prefills", "prefill_tokens", "prefill_context", "prefill_work",
    "prefill_square", "prefill_max", "num_decodes", "decode_context", "decode_max_context", "prefill_potential",
)  # fmt: skip


def batch_shape(
    tokens: IntArray,
    contexts: IntArray,
    phases: BoolArray,
    potential: Callable[[FloatArray], FloatArray] | None = None,
) -> FloatArray:
    """Shape of one batch: float64[12].

    `tokens` and `contexts` are int64[n] (tokens in this step, tokens computed before), `phases` bool[n], True for a
    decode. `potential` maps positions to the model's V; None leaves that entry 0.
    """
    shape = np.zeros(SHAPE_SIZE)
    prefill = ~phases
    c, u = tokens[prefill].astype(np.float64), contexts[prefill].astype(np.float64)
    decode_context = contexts[phases]
    shape[NUM_TOKENS] = tokens.sum()
    shape[NUM_SEQUENCES] = tokens.size
    shape[NUM_PREFILLS] = c.size
    shape[PREFILL_TOKENS] = c.sum()
    shape[PREFILL_CONTEXT] = u.sum()
    shape[PREFILL_WORK] = (c * (u + c)).sum()
    shape[PREFILL_SQUARE] = (c * c).sum()
    shape[PREFILL_MAX] = c.max(initial=0.0)
    shape[NUM_DECODES] = decode_context.size
    shape[DECODE_CONTEXT] = decode_context.sum()
    shape[DECODE_MAX_CONTEXT] = decode_context.max(initial=0)
    if potential is not None and c.size:
        shape[PREFILL_POTENTIAL] = (potential(u + c) - potential(u)).sum()
    return shape
