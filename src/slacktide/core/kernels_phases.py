"""Compiled halves of `policies/_shared`: rows by what they can do, and blocks set aside until completion."""

from __future__ import annotations

import numpy as np

from slacktide.core.kernels import compiled
from slacktide.core.live import (
    ADMISSION_ORDER,
    MAX_TOKENS,
    NUM_BLOCKS,
    NUM_CACHED,
    NUM_CACHED_FREE,
    NUM_COMPUTED,
    NUM_IN_FLIGHT,
    NUM_OUTPUT,
    NUM_PROMPT,
    STATUS,
)
from slacktide.core.types import RUNNING, BoolArray, IntArray

IS_RUNNING, IS_DECODE, IS_OVER = range(3)
DECODES, HALF_DONE, WITHOUT_SEAT = range(3)
"""Lines of what `phases` writes: what a row is, and the rows of each kind."""


@compiled
def phases(ints: IntArray, n: int, max_model_len: int, flags: BoolArray, rows: IntArray) -> tuple[int, int, int, bool]:
    """Fill bool[3, n] `flags` and int64[3, n] `rows`: see `policies._shared.Phases`.

    Returns how many rows of each kind there are, and whether any output is in flight. Rows with a seat come in the
    order of their admission: insertion, because that nearly always follows arrival.
    """
    decodes, half_done, waiting, in_flight = 0, 0, 0, False
    for row in range(n):
        ahead = ints[NUM_IN_FLIGHT, row]
        in_flight = in_flight or ahead != 0
        output = ints[NUM_OUTPUT, row] + ahead
        computed = ints[NUM_COMPUTED, row]
        flags[IS_RUNNING, row] = ints[STATUS, row] == RUNNING
        flags[IS_DECODE, row] = ints[NUM_PROMPT, row] + output - computed == 1 and output > 0
        flags[IS_OVER, row] = (ahead > 0 and output >= ints[MAX_TOKENS, row]) or computed >= max_model_len - 1
    for row in range(n):
        if flags[IS_DECODE, row] and not (in_flight and flags[IS_OVER, row]):
            _insert(ints, rows[DECODES], decodes, row)
            decodes += 1
        if flags[IS_RUNNING, row]:
            if not flags[IS_DECODE, row]:
                _insert(ints, rows[HALF_DONE], half_done, row)
                half_done += 1
        else:
            rows[WITHOUT_SEAT, waiting] = row
            waiting += 1
    return decodes, half_done, waiting, in_flight


@compiled
def _insert(ints: IntArray, rows: IntArray, at: int, row: int) -> None:
    """Put a row into rows[:at], which is in the order of admission."""
    rank = ints[ADMISSION_ORDER, row]
    while at > 0 and ints[ADMISSION_ORDER, rows[at - 1]] > rank:
        rows[at] = rows[at - 1]
        at -= 1
    rows[at] = row


@compiled
def within_free(ints: IntArray, rows: IntArray, free: int, block_size: int) -> IntArray:
    """Those of the decodes `rows` whose next token's block is free, when those before have theirs."""
    kept, count, taken = np.empty(rows.size, dtype=np.int64), 0, 0
    for row in rows:
        taken += ints[NUM_COMPUTED, row] // block_size + 1 - ints[NUM_BLOCKS, row]
        if taken <= free:
            kept[count] = row
            count += 1
    return kept[:count]


@compiled
def reserved_room(
    ints: IntArray, n: int, waiting: IntArray, max_model_len: int, block_size: int, num_blocks: int, free: int
) -> tuple[int, IntArray]:
    """(blocks not set aside for a row with a seat, blocks that each of the rows `waiting` would set aside)."""
    room = free
    for row in range(n):
        room += ints[NUM_BLOCKS, row] - _whole(ints, row, max_model_len, block_size, num_blocks)
    costs = np.empty(waiting.size, dtype=np.int64)
    for i in range(waiting.size):
        row = waiting[i]
        whole = _whole(ints, row, max_model_len, block_size, num_blocks)
        room += whole
        shared = ints[NUM_CACHED, row] // block_size - ints[NUM_CACHED_FREE, row]
        costs[i] = max(whole - shared, 0)
    return room, costs


@compiled
def _whole(ints: IntArray, row: int, max_model_len: int, block_size: int, num_blocks: int) -> int:
    """Blocks of a row at its longest. The last token needs no slot: blocks for length - 1."""
    length = min(ints[NUM_PROMPT, row] + ints[MAX_TOKENS, row], max_model_len)
    return min((length + block_size - 2) // block_size, num_blocks)  # type: ignore[no-any-return]
