"""Compiled parts of `tide` for KV memory: blocks that rows take, what they will hold, who loses or lends them.

docs/background/tide.md, section 6; slot names are in `tide`.
"""

from __future__ import annotations

import numpy as np

from slacktide.core.kernels import compiled
from slacktide.core.kinds import DECODE, IDLE
from slacktide.core.live import (
    INDEX,
    NUM_BLOCKS,
    NUM_CACHED,
    NUM_CACHED_FREE,
    NUM_COMPUTED,
    NUM_OUTPUT,
    NUM_PREEMPTIONS,
    NUM_PROMPT,
    NUM_SHARED,
    STATUS,
)
from slacktide.core.tide import (
    DEMOTED,
    F_GROWTH,
    F_SERVICE,
    F_SLACK,
    I_COMPUTED,
    I_GONE,
    I_KIND,
    I_MISSED,
    I_REMAINING,
    I_ROLE,
    KNEE_TIME,
    LATE_DECODE,
    LATE_PREFILL,
    NO_ROLE,
    ON_TIME_DECODE,
    PER_PAIR,
    PER_TOKEN,
    REFUSED,
    RELEASED_TIME,
    RELEASED_TOKENS,
    SHORT_BLOCKS,
    TOKENS_WAITING,
    W_DECODES,
    W_EXPECTED,
    W_FREE,
    W_KEPT_BACK,
    W_LATE,
    W_LATE_STREAMS,
    W_NEED,
    W_ON_TIME,
    W_RUNNING,
    W_VICTIMS,
)
from slacktide.core.types import RUNNING, FloatArray, IntArray

LEND = 10.0
"""Times as long as computing its KV again that a stream's slack must be before it lends its KV: that takes a tenth of
the time that it may stay away."""
RETURN = 4.0
"""Times as long as blocks are expected to take to come back that its slack must be: others may ask before it."""
PEAKS = 9
"""Points in time at which the KV that running requests will hold is foreseen: an eighth of an output apart."""


@compiled
def blocks_of(ints: IntArray, row: int, tokens: int, block_size: int) -> int:
    """New blocks of a running row that computes `tokens` more."""
    return max(-(-(ints[NUM_COMPUTED, row] + tokens) // block_size) - ints[NUM_BLOCKS, row], 0)  # type: ignore[no-any-return]


@compiled
def whole_blocks(ints: IntArray, row: int, block_size: int, max_model_len: int) -> int:
    """Free blocks that a waiting row takes for all its known tokens; blocks of a cached prefix that others hold are
    free of charge."""
    known = min(ints[NUM_PROMPT, row] + ints[NUM_OUTPUT, row], max_model_len)
    shared = ints[NUM_CACHED, row] // block_size - ints[NUM_CACHED_FREE, row]
    return max(-(-known // block_size) - shared, 0)  # type: ignore[no-any-return]


@compiled
def expected_kv(row: int, si: IntArray, sf: FloatArray) -> float:
    """KV tokens that a running row is expected to hold on average: all it knows, and half of what it wants yet."""
    return float(si[I_COMPUTED, row] + si[I_REMAINING, row]) + 0.5 * sf[F_GROWTH, row]  # type: ignore[no-any-return]


@compiled
def foresee_kv(ints: IntArray, n: int, si: IntArray, sf: FloatArray, peaks: FloatArray) -> float:
    """Fill `peaks` with the KV tokens that running rows will hold when each has made 0, 1, 2, ... strides of tokens;
    returns the stride. Who has ended by then holds none. The last is where the one that wants most ends.
    """
    longest = 1.0
    for row in range(n):
        if si[I_KIND, row] != IDLE:
            longest = max(longest, sf[F_GROWTH, row])
    stride = longest / (peaks.size - 1)
    peaks[:] = 0.0
    for row in range(n):
        if ints[STATUS, row] == RUNNING and si[I_GONE, row] == 0:
            known = float(si[I_COMPUTED, row] + si[I_REMAINING, row])
            for k in range(peaks.size):
                peaks[k] += known + k * stride if sf[F_GROWTH, row] >= (k - 0.5) * stride else 0.0
    return stride


@compiled
def can_lend(ints: IntArray, row: int, si: IntArray, sf: FloatArray, state: FloatArray) -> bool:
    """Whether a running row can give up its KV for a while and be on time all the same.

    It has to compute again what it knows: where its slack is LEND times as long, it may stay away for so long that this
    takes 1 / LEND of the time. And it has to find blocks again, behind those who wait already. A prompt is not asked:
    its first token is what people wait for.
    """
    if sf[F_SLACK, row] == np.inf:
        return True
    if si[I_KIND, row] != DECODE:
        return False
    u = float(ints[NUM_COMPUTED, row])
    again = u * (state[PER_TOKEN] + 0.5 * state[PER_PAIR] * u)
    back = state[TOKENS_WAITING] + u
    enough = RETURN * back * state[RELEASED_TIME] <= sf[F_SLACK, row] * state[RELEASED_TOKENS]
    return state[RELEASED_TOKENS] > 0.0 and enough and sf[F_SLACK, row] >= LEND * again  # type: ignore[no-any-return]


@compiled
def pick_victim(
    ints: IntArray, n: int, si: IntArray, sf: FloatArray, state: FloatArray, late_only: bool, most: int
) -> int:
    """Running row to preempt, -1 for none: late ones first (least computed), then those who can afford it (`can_lend`;
    least output, so that old ones end and give back what they hold), then those of most slack.

    The oldest running request is spared, so that somebody always ends. `most`: rows preempted so often are spared too
    (negative: none is).
    """
    oldest, best, best_lends = -1, -1, False
    for row in range(n):
        if ints[STATUS, row] != RUNNING or si[I_GONE, row] != 0 or si[I_KIND, row] == IDLE:
            continue
        if oldest < 0:
            oldest = row
            continue
        if most >= 0 and ints[NUM_PREEMPTIONS, row] >= most:
            continue
        late = si[I_MISSED, row] != 0
        if late_only and not late:
            continue
        lends = not late and can_lend(ints, row, si, sf, state)
        if best < 0:
            best, best_lends = row, lends
            continue
        best_late = si[I_MISSED, best] != 0
        if late != best_late:
            better = late
        elif late:
            better = ints[NUM_COMPUTED, row] <= ints[NUM_COMPUTED, best]
        elif lends != best_lends:
            better = lends
        elif lends and ints[NUM_OUTPUT, row] != ints[NUM_OUTPUT, best]:
            better = ints[NUM_OUTPUT, row] < ints[NUM_OUTPUT, best]
        else:
            better = sf[F_SLACK, row] >= sf[F_SLACK, best]
        if better:
            best, best_lends = row, lends
    return best


@compiled
def pick_lender(ints: IntArray, n: int, short: int, si: IntArray, sf: FloatArray, state: FloatArray) -> int:
    """Running on-time decode that lends its KV to a prompt that lacks `short` blocks, -1 for none.

    The smallest that has as many, for it has least to compute again; else the largest. The oldest is spared.
    """
    oldest, best, best_blocks = -1, -1, 0
    for row in range(n):
        if ints[STATUS, row] != RUNNING or si[I_GONE, row] != 0 or si[I_KIND, row] == IDLE:
            continue
        if oldest < 0:
            oldest = row
            continue
        if si[I_ROLE, row] != ON_TIME_DECODE or not can_lend(ints, row, si, sf, state):
            continue
        blocks = ints[NUM_BLOCKS, row] - ints[NUM_SHARED, row]
        enough, best_enough = blocks >= short, best_blocks >= short
        if best < 0 or (enough and not best_enough) or (enough == best_enough and (blocks < best_blocks) == enough):
            best, best_blocks = row, blocks
    return best


@compiled
def _preempt(
    ints: IntArray, row: int, block_size: int, si: IntArray, sf: FloatArray, plan: IntArray, why: FloatArray
) -> None:
    """Write the row into plan[2] and take it out of the sums."""
    plan[2, int(why[W_VICTIMS])] = row
    why[W_VICTIMS] += 1.0
    why[W_FREE] += ints[NUM_BLOCKS, row] - ints[NUM_SHARED, row]
    why[W_RUNNING] -= 1.0
    why[W_EXPECTED] -= expected_kv(row, si, sf)
    role = si[I_ROLE, row]
    if role == ON_TIME_DECODE:
        why[W_NEED] -= blocks_of(ints, row, 1, block_size)
        why[W_DECODES] -= 1.0
    elif role == LATE_DECODE:
        why[W_LATE_STREAMS] -= 1.0
    else:
        why[W_KEPT_BACK] -= blocks_of(ints, row, si[I_REMAINING, row], block_size)
        why[W_LATE if role == LATE_PREFILL else W_ON_TIME] -= 1.0
    si[I_GONE, row], si[I_ROLE, row] = 1, NO_ROLE


@compiled
def make_room(
    ints: IntArray, n: int, block_size: int, si: IntArray, sf: FloatArray, state: FloatArray, plan: IntArray,
    why: FloatArray,
) -> None:  # fmt: skip
    """While the on-time round lacks blocks somebody loses its KV: victims go into plan[2].

    So does a stream with time to spare, for an on-time prompt that the last step had to refuse.
    """
    while why[W_NEED] > why[W_FREE]:
        row = pick_victim(ints, n, si, sf, state, False, -1)
        if row < 0:
            return
        _preempt(ints, row, block_size, si, sf, plan, why)
    if why[W_VICTIMS] > 0.0 or state[REFUSED] < 0.0:
        return
    for row in range(n):
        if float(ints[INDEX, row]) == state[REFUSED]:
            if ints[STATUS, row] != RUNNING and si[I_ROLE, row] == DEMOTED:  # on time, not judged yet
                lender = pick_lender(ints, n, int(state[SHORT_BLOCKS]), si, sf, state)
                if lender >= 0:
                    _preempt(ints, lender, block_size, si, sf, plan, why)
            return


@compiled
def ask_for_kv(ints: IntArray, room: IntArray, block_size: int, max_model_len: int, sf: FloatArray,
               state: FloatArray) -> None:  # fmt: skip
    """Note what the refused prompt room[5] lacks, if it may come too late when it waits until others end.

    Whether they end is not known: twice the time in which as many tokens came back so far. While nothing has come back
    it is noted in the last moment: a lender gives its blocks at once.
    """
    row = room[5]
    short = whole_blocks(ints, row, block_size, max_model_len) + room[1] + room[3] - room[0]
    if short <= 0 and room[2] > 0:
        return  # held back by the gate alone
    pace = state[RELEASED_TOKENS] / max(state[RELEASED_TIME], 1e-3)
    wait = 2.0 * max(short, 0) * block_size / pace if pace > 0.0 else 0.0
    if sf[F_SLACK, row] < sf[F_SERVICE, row] + 2.0 * state[KNEE_TIME] + wait:
        state[REFUSED], state[SHORT_BLOCKS] = float(ints[INDEX, row]), float(max(short, 0))
