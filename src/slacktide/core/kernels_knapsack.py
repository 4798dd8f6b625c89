"""The knapsack of `knapsack.choose`, compiled."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slacktide.core.kernels import compiled
from slacktide.core.types import FloatArray, IntArray

ByteArray = npt.NDArray[np.uint8]


@compiled
def knapsack(
    weights: IntArray,
    counts: IntArray,
    values: FloatArray,
    tokens: IntArray,
    capacity: IntArray,
    taken: ByteArray,
    chosen: ByteArray,
) -> int:
    """Best set {anchor} + some items before it; returns the anchor, -1 for none, and marks the set in `chosen`.

    Item i is an anchor when capacity[i] >= weights[i]; its set may weigh capacity[i]. Best is lexicographic by (sum of
    counts, sum of values, sum of tokens); the first of equals wins. `taken` uint8[n, max capacity + 1] is scratch.
    """
    n, width = weights.size, taken.shape[1]
    count, value, total = np.zeros(width, dtype=np.int64), np.zeros(width), np.zeros(width, dtype=np.int64)
    best = -1
    best_count, best_value, best_total = 0, 0.0, 0
    for i in range(n):
        if capacity[i] >= weights[i]:
            at = capacity[i] - weights[i]
            c, v, t = count[at] + counts[i], value[at] + values[i], total[at] + tokens[i]
            if (
                best < 0
                or c > best_count
                or (c == best_count and (v > best_value or (v == best_value and t > best_total)))
            ):
                best, best_count, best_value, best_total = i, c, v, t
        for at in range(width - 1, weights[i] - 1, -1):
            low = at - weights[i]
            c, v, t = count[low] + counts[i], value[low] + values[i], total[low] + tokens[i]
            better = c > count[at] or (c == count[at] and (v > value[at] or (v == value[at] and t > total[at])))
            taken[i, at] = 1 if better else 0
            if better:
                count[at], value[at], total[at] = c, v, t
        for at in range(min(weights[i], width)):
            taken[i, at] = 0
    chosen[:] = 0
    if best >= 0:
        chosen[best] = 1
        at = capacity[best] - weights[best]
        for i in range(best - 1, -1, -1):
            if taken[i, at] != 0:
                chosen[i] = 1
                at -= weights[i]
    return best
