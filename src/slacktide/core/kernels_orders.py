"""Orders of prompts and bounds of decodes that need many small steps over a few rows; compiled.

Decodes first (Sarathi), QoServe's order with its relegations, SlidingServe's MLPS, SOLA's bound: the policies say what
for.
"""

from __future__ import annotations

import numpy as np

from slacktide.core.kernels import compiled
from slacktide.core.kernels_deadlines import windows
from slacktide.core.live import (
    ADMISSION_ORDER,
    ARRIVAL,
    FIRST_TOKEN,
    MAX_TOKENS,
    NUM_COMPUTED,
    NUM_IN_FLIGHT,
    NUM_OUTPUT,
    NUM_PROMPT,
    PRIORITY,
    RELEGATED,
    SLO_E2E,
    SLO_TBT,
    SLO_TTFT,
    STATUS,
)
from slacktide.core.priority import EPSILON, HOPELESS, NORMAL, PROTECTED, URGENT
from slacktide.core.priority import RELEGATED as RELEGATED_CLASS
from slacktide.core.types import RUNNING, BoolArray, FloatArray, IntArray

LAST = 1e9
"""Seconds added to a relegated prompt's key: behind every deadline, in the same order among themselves."""


@compiled
def _relegate(
    ints: IntArray, rows: IntArray, slack: FloatArray, remaining: IntArray, rho: float, hints: bool, misses: BoolArray
) -> None:
    """Mark the prompts to relegate now: predicted to miss, without KV, not relegated before.

    Priority is vLLM's: larger is less important. With `hints` only the least important level present may be relegated.
    """
    found, lowest = False, -(1 << 62)
    for i in range(rows.size):
        row = rows[i]
        misses[i] = False
        if ints[STATUS, row] == RUNNING or ints[RELEGATED, row] != 0:
            continue
        lowest = max(lowest, ints[PRIORITY, row])
        misses[i] = slack[row] < remaining[row] / rho and ints[NUM_OUTPUT, row] == 0
        found = found or misses[i]
    if hints and found:
        for i in range(rows.size):
            misses[i] = misses[i] and ints[PRIORITY, rows[i]] == lowest


@compiled
def _edf_feasible(slack: FloatArray, remaining: IntArray, rows: IntArray, out: BoolArray, rho: float) -> bool:
    """`priority.edf_feasible` of the rows that are not `out`."""
    left, needed, count = np.empty(rows.size), np.empty(rows.size, dtype=np.int64), 0
    for i in range(rows.size):
        row = rows[i]
        if not out[i] and 0.0 < slack[row] < np.inf:
            left[count], needed[count] = slack[row], remaining[row]
            count += 1
    total = 0
    for i in np.argsort(left[:count], kind="mergesort"):
        total += needed[i]
        if total > rho * left[i]:
            return False
    return True


@compiled
def qoserve(
    ints: IntArray,
    floats: FloatArray,
    rows: IntArray,
    slack: FloatArray,
    remaining: IntArray,
    rho: float,
    alpha: float,
    alpha_low: float,
    expected_output: int,
    one_step: float,
    relegation: bool,
    hints: bool,
    selective_preemption: bool,
) -> tuple[IntArray, IntArray, bool]:
    """(the prompts `rows` in service order, those to relegate now, whether the load is high).

    Keys are seconds relative to now: slack + alpha * work. Batch work counts its expected output too; its slack already
    ends before that output must begin. A half-done prompt that can be on time, but not wait `one_step`, stands first.
    """
    misses, out = np.zeros(rows.size, dtype=np.bool_), np.zeros(rows.size, dtype=np.bool_)
    if relegation:
        _relegate(ints, rows, slack, remaining, rho, hints, misses)
    for i in range(rows.size):
        out[i] = misses[i] or ints[RELEGATED, rows[i]] != 0
    high = not _edf_feasible(slack, remaining, rows, out, rho)
    weight = alpha if high else alpha_low
    key = np.empty(rows.size)
    for i in range(rows.size):
        row = rows[i]
        work = remaining[row]
        if np.isinf(floats[SLO_TTFT, row]) and floats[SLO_E2E, row] < np.inf:
            work += max(expected_output - ints[NUM_OUTPUT, row], 1)
        left = min(slack[row], LAST / 4)  # no target: behind all that have one, shortest first
        key[i] = left + weight * work
        if selective_preemption and ints[STATUS, row] == RUNNING:
            spare = left - remaining[row] / rho
            if 0.0 <= spare < one_step:
                key[i] = -LAST
        if out[i]:
            key[i] += LAST
    return rows[np.argsort(key, kind="mergesort")], rows[misses], high


@compiled
def mlps(
    ints: IntArray,
    rows: IntArray,
    slack: FloatArray,
    remaining: IntArray,
    rho: float,
    alpha: float,
    beta: float,
    least: float,
) -> tuple[IntArray, IntArray]:
    """(prompts by class, then length; those that are hopeless or relegated): `priority.classes` and `by_class`."""
    key, lost = np.empty(rows.size, dtype=np.int64), np.zeros(rows.size, dtype=np.bool_)
    for i in range(rows.size):
        row = rows[i]
        u = remaining[row] / (rho * max(slack[row], EPSILON))
        if ints[PRIORITY, row] < 0 or ints[NUM_OUTPUT, row] > 0:
            kind = PROTECTED
        elif ints[RELEGATED, row] != 0:
            kind = RELEGATED_CLASS
        elif u > beta or slack[row] < least:
            kind = HOPELESS
        else:
            kind = URGENT if u > alpha else NORMAL
        lost[i] = kind >= HOPELESS
        key[i] = (kind << 40) + remaining[row]
    return rows[np.argsort(key, kind="mergesort")], rows[lost]


@compiled
def bounds_and_mlps(
    ints: IntArray,
    floats: FloatArray,
    rows: IntArray,
    now: float,
    kind: IntArray,
    slack: FloatArray,
    pace: FloatArray,
    remaining: IntArray,
    rho: float,
    alpha: float,
    beta: float,
    least: float,
    late_factor: float,
    tokens_per_step: float,
    bounds: FloatArray,
) -> tuple[int, IntArray, IntArray, float]:
    """`kernels_deadlines.windows`, `mlps` and for how many seconds the first prompt's first token is overdue."""
    late = windows(kind, slack, pace, least, late_factor, tokens_per_step, bounds)
    order, lost = mlps(ints, rows, slack, remaining, rho, alpha, beta, least)
    target = floats[SLO_TTFT, rows[0]]
    return late, order, lost, now - floats[ARRIVAL, rows[0]] - (target if target < np.inf else 0.0)


@compiled
def decodes_first(ints: IntArray, n: int, key: FloatArray) -> tuple[IntArray, int]:
    """(all rows, how many decode): decodes by admission, then the others by `key` float64[n], ties by arrival."""
    order, others = np.empty(n, dtype=np.int64), np.empty(n, dtype=np.int64)
    decodes, last, in_order = 0, -1, True
    for row in range(n):
        output = ints[NUM_OUTPUT, row] + ints[NUM_IN_FLIGHT, row]
        if output > 0 and ints[NUM_PROMPT, row] + output - ints[NUM_COMPUTED, row] == 1:
            order[decodes] = row
            decodes += 1
            in_order = in_order and ints[ADMISSION_ORDER, row] > last
            last = ints[ADMISSION_ORDER, row]
        else:
            others[row - decodes] = row
    if not in_order:
        rank = ints[ADMISSION_ORDER][order[:decodes]]
        order[:decodes] = order[:decodes][np.argsort(rank, kind="mergesort")]
    others = others[: n - decodes]
    order[decodes:] = others[np.argsort(key[others], kind="mergesort")]
    return order, decodes


@compiled
def sola(
    floats: FloatArray, rows: IntArray, remaining: IntArray, rho: float, now: float, least: float
) -> tuple[IntArray, BoolArray, float]:
    """(prompts in service order, which of `rows` cannot wait `least` seconds, worst share of a TTFT target used).

    Used is what a prompt has waited and its own tokens take; first who uses most, late ones behind: they constrain
    nobody.
    """
    share, late, must = np.empty(rows.size), np.zeros(rows.size, dtype=np.int64), np.zeros(rows.size, dtype=np.bool_)
    worst = 0.0
    for i in range(rows.size):
        row = rows[i]
        target, predicted = floats[SLO_TTFT, row], now - floats[ARRIVAL, row] + remaining[row] / rho
        share[i] = -(predicted / target)
        if predicted <= target:
            must[i] = predicted + least > target
            worst = max(worst, predicted / target)
        else:
            late[i] = 1
    order = np.argsort(share, kind="mergesort")
    return rows[order[np.argsort(late[order], kind="mergesort")]], must, worst


@compiled
def sola_bound(
    ints: IntArray, floats: FloatArray, rows: IntArray, now: float, expected_output: int, least: float
) -> tuple[float, float]:
    """(longest step that keeps the mean time per token of all decodes `rows` within target, worst share of one used).

    Other tokens to come take a decode step of `least` seconds each: (elapsed + this step + rest) / tokens <= target.
    A decode that cannot be saved counts in neither.
    """
    bound, worst = np.inf, 0.0
    for i in range(rows.size):
        row = rows[i]
        first, target = floats[FIRST_TOKEN, row], floats[SLO_TBT, row]
        output = ints[NUM_OUTPUT, row] + ints[NUM_IN_FLIGHT, row]
        elapsed = 0.0 if np.isnan(first) else now - first
        left = float(min(max(expected_output - output, 1), max(ints[MAX_TOKENS, row] - output, 1)))
        most = target * (output - 1 + left) - elapsed - (left - 1) * least
        if most >= least:
            bound = min(bound, most)
            worst = max(worst, elapsed / max(output - 1, 1) / target)
    return bound, worst
