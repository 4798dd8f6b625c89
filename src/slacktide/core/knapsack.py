"""Which prompts end in this step: SlidingServe's BatchConstructor as a knapsack, exact.

An anchor is a prompt that would miss its TTFT in the full batch. Its set holds prompts with at least its slack, which
end together within its time; weights are remaining tokens in units of `quantum`, rounded up, so a set that fits in
units fits in tokens. The best set ends the most requests, then has the most value, then the most tokens.
"""

from __future__ import annotations

import itertools

import numpy as np

from slacktide.core.types import FloatArray, IntArray


def choose(
    slack: FloatArray,
    remaining: IntArray,
    values: FloatArray,
    capacity: IntArray,
    *,
    counts: IntArray | None = None,
    quantum: int = 16,
) -> IntArray:
    """Positions of the best set, the anchor first; empty without a feasible anchor.

    slack float64[n], remaining int64[n] tokens, values float64[n]; capacity int64[n]: tokens that an anchor's step can
    hold beside the decodes, -1 for prompts that are no anchor. `counts` int64[n]: what ending a request is worth, 1
    each by default. One pass over the items serves all anchors: sorted by falling slack, those before an anchor are
    just those that it may take along. Of equal slacks the shortest prompt is the anchor.
    """
    from slacktide.core.kernels_knapsack import knapsack

    order = np.lexsort((-remaining, -slack))
    weights = -(-remaining[order] // quantum)
    room = np.where(capacity[order] >= remaining[order], capacity[order] // quantum, -1)
    taken = np.empty((order.size, max(int(room.max(initial=0)), 0) + 1), dtype=np.uint8)
    chosen = np.empty(order.size, dtype=np.uint8)
    count = np.ones(order.size, dtype=np.int64) if counts is None else counts[order]
    anchor = knapsack(weights, count, values[order], remaining[order], room, taken, chosen)
    if anchor < 0:
        return np.empty(0, dtype=np.int64)
    chosen[anchor] = 0
    return np.concatenate((order[anchor : anchor + 1], order[np.flatnonzero(chosen)]))


def choose_brute_force(
    slack: FloatArray,
    remaining: IntArray,
    values: FloatArray,
    capacity: IntArray,
    *,
    counts: IntArray | None = None,
    quantum: int = 16,
) -> tuple[int, float, int]:
    """(requests, value, tokens) of the best set over all subsets: the oracle for `choose` up to some 15 prompts."""
    n = slack.size
    weights = -(-remaining // quantum)
    worth = np.ones(n, dtype=np.int64) if counts is None else counts
    best = (0, 0.0, 0)
    for size in range(1, n + 1):
        for rows in itertools.combinations(range(n), size):
            chosen = list(rows)
            fits = any(
                capacity[a] >= remaining[a]
                and slack[a] == slack[chosen].min()
                and int(weights[chosen].sum()) <= capacity[a] // quantum
                for a in chosen
            )
            if fits:
                found = (int(worth[chosen].sum()), float(values[chosen].sum()), int(remaining[chosen].sum()))
                best = max(best, found)
    return best


def choose_paper(slack: FloatArray, remaining: IntArray, capacity: IntArray, *, quantum: int = 16) -> IntArray:
    """Algorithm 2 as printed: values (`paper_values`) anew for each anchor, a knapsack by value alone, and anchors
    compared by (requests, value, tokens). Late prompts may be anchors. Positions, anchor first; empty without one."""
    best, best_key = np.empty(0, dtype=np.int64), (0, 0.0, 0)
    for a in np.flatnonzero(capacity >= remaining).tolist():
        others = np.flatnonzero(slack >= slack[a])
        values = paper_values(slack[others], remaining[others])
        keep = others != a
        chosen = _by_value(
            -(-remaining[others[keep]] // quantum), values[keep], int(capacity[a] // quantum), a, remaining, quantum
        )
        rows = np.concatenate(([a], others[keep][chosen]))
        key = (rows.size, float(values[keep][chosen].sum() + values[~keep].sum()), int(remaining[rows].sum()))
        if key > best_key:
            best, best_key = rows, key
    return best


def _by_value(
    weights: IntArray, values: FloatArray, capacity: int, anchor: int, remaining: IntArray, quantum: int
) -> IntArray:
    """Positions of the subset with the largest sum of values beside the anchor."""
    from slacktide.core.kernels_knapsack import knapsack

    n = weights.size
    own = -(-int(remaining[anchor]) // quantum)
    if capacity < own or n == 0:
        return np.empty(0, dtype=np.int64)
    # The anchor stands last, as in `choose`; counts of 0 leave the objective to the values.
    weights, values = np.append(weights, own), np.append(values, 0.0)
    room = np.full(n + 1, -1, dtype=np.int64)
    room[n] = capacity
    zeros = np.zeros(n + 1, dtype=np.int64)
    chosen = np.empty(n + 1, dtype=np.uint8)
    knapsack(weights, zeros, values, zeros, room, np.empty((n + 1, capacity + 1), dtype=np.uint8), chosen)
    return np.flatnonzero(chosen[:n])


def paper_values(slack: FloatArray, remaining: IntArray) -> FloatArray:
    """v = 1 / (s / sum s + r / sum r) of the paper's eq. 18; slacks are floored at 1 ms, where it would divide by 0.

    Infinite slacks count as ten times the largest finite one: no hurry, but still a value.
    """
    finite = slack[np.isfinite(slack)]
    s = np.clip(slack, 1e-3, 10.0 * max(float(finite.max(initial=0.0)), 1e-3))
    values: FloatArray = 1.0 / (s / s.sum() + remaining / remaining.sum())
    return values
