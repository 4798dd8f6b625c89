"""Compiled parts of `fair`: who waits, what each tenant was charged, prompts of several tenants in a fair order.

Row numbers of the table `shares` are in `fair`. Nothing here runs while one tenant exists: the table is empty then.
"""

from __future__ import annotations

import numpy as np

from slacktide.core.fair import AHEAD, COST, INPUT_COST, LEVEL, OUTPUT_COST, QUEUED, SERVED, WEIGHT
from slacktide.core.kernels import compiled
from slacktide.core.kinds import DECODE, PREFILL
from slacktide.core.live import PRIORITY, STATUS, TENANT
from slacktide.core.types import RUNNING, FloatArray, IntArray


@compiled
def lift(ints: IntArray, n: int, kinds: IntArray, shares: FloatArray) -> None:
    """Note who has prompts waiting. A tenant that had none starts at the level of those that had: what it left unused
    is nobody's debt (Sheng et al., algorithm 2). Starts AHEAD at the counters."""
    tenants = shares.shape[1]
    here = np.zeros(tenants)
    for row in range(n):
        if kinds[row] == PREFILL and ints[STATUS, row] != RUNNING:
            here[ints[TENANT, row]] = 1.0
    least, left = np.inf, -np.inf
    for k in range(tenants):
        if shares[QUEUED, k] != 0.0 and here[k] != 0.0:
            least = min(least, shares[COST, k])
        elif shares[QUEUED, k] != 0.0:
            left = max(left, shares[COST, k])
    if least < np.inf:
        shares[LEVEL, 0] = least
    elif left > -np.inf:  # all queues ran empty: the next one starts where the last one left
        shares[LEVEL, 0] = left
    for k in range(tenants):
        if here[k] != 0.0 and shares[QUEUED, k] == 0.0:
            shares[COST, k] = max(shares[COST, k], shares[LEVEL, 0])
        shares[QUEUED, k] = here[k]
        shares[AHEAD, k] = shares[COST, k]


@compiled
def pending(ints: IntArray, row: int, remaining: IntArray, shares: FloatArray) -> float:
    """What admitting a row adds to its tenant's counter; 0 for one that runs: it was charged then."""
    if ints[STATUS, row] == RUNNING:
        return 0.0
    return INPUT_COST * remaining[row] / shares[WEIGHT, ints[TENANT, row]]  # type: ignore[no-any-return]


@compiled
def interleave(
    rows: IntArray, ints: IntArray, remaining: IntArray, by_priority: bool, running_first: bool, shares: FloatArray
) -> None:
    """Put equally urgent `rows` in a fair order, in place: as if the next one were always taken from the tenant with
    the lowest counter, and charged for. The order within a tenant stays, and that of priorities. Adds them to AHEAD.
    """
    keys = np.empty(rows.size)
    alone = True
    for i in range(rows.size):
        row = rows[i]
        tenant = ints[TENANT, row]
        alone = alone and tenant == ints[TENANT, rows[0]]
        keys[i] = shares[AHEAD, tenant]
        if running_first and ints[STATUS, row] == RUNNING:
            keys[i] = -1.0  # its KV is held, and it was charged
        shares[AHEAD, tenant] += pending(ints, row, remaining, shares)
    if alone:
        return
    ordered = rows[np.argsort(keys, kind="mergesort")]
    if by_priority:
        for i in range(rows.size):
            keys[i] = float(ints[PRIORITY, ordered[i]])
        ordered = ordered[np.argsort(keys, kind="mergesort")]
    rows[:] = ordered


@compiled
def charge(ints: IntArray, rows: IntArray, tokens: IntArray, kinds: IntArray, remaining: IntArray,
           shares: FloatArray) -> None:  # fmt: skip
    """Charge a plan: a prompt's tokens when it is admitted, an output token when it is made."""
    for i in range(rows.size):
        row = rows[i]
        cost = 0.0
        if kinds[row] == DECODE or tokens[i] == remaining[row]:
            cost = OUTPUT_COST
        if kinds[row] == PREFILL and ints[STATUS, row] != RUNNING:
            cost += INPUT_COST * remaining[row]
        tenant = ints[TENANT, row]
        shares[COST, tenant] += cost / shares[WEIGHT, tenant]
        shares[SERVED, tenant] += cost
