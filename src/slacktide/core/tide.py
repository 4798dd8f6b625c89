"""Where `tide` keeps what it learns and what it is set to: slot numbers shared by its compiled parts, and the learners.

The policy's Python half holds these arrays; `kernels_tide` and `kernels_tide_step` read and write them. A slot's name
says what it holds; units are seconds, tokens and requests.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from slacktide.core.types import FloatArray, IntArray, StepResult

# ---- what was learned: float64[STATE_SIZE]
MISS_RATE = 6
"""Share of the last hundred or so requests that missed."""
OUT_SUM, OUT_WEIGHT = 7, 8
"""Output tokens of finished requests and their number, both forgotten at the same pace."""
TIGHTEST = 9
"""A low quantile of the TTFT targets of recent arrivals; infinite without one."""
NUM_ARRIVALS = 10
ARRIVAL_RATE = 11
"""Requests per second over the remembered arrivals."""
CREDIT = 12
"""Seconds of the engine that late work has coming."""
SINCE_LATE = 13
"""Steps since late decodes ran last."""
PACE = 14
"""Shortest TBT target of recent arrivals; infinite without one."""
DECODE_TIME = 15
"""Predicted seconds of the last decode round."""
PER_TOKEN, PER_PAIR = 16, 17
"""Prices of the belief: seconds per prompt token and per attended pair in a large pure prefill."""
FIXED = 18
"""Seconds of a decode step of one short request: what a round costs whoever takes part."""
KNEE = 19
"""Tokens from which a larger pure prefill step is hardly more efficient."""
KNEE_TIME = 20
"""Predicted seconds of such a step."""
LEAST_TIME = 21
"""Predicted seconds of the smallest chunk worth a step."""
SERVED_LATE = 22
"""Seconds of the engine that late work got."""
RELEASED_TOKENS, RELEASED_COUNT, RELEASED_TIME, LAST_RELEASE = 23, 24, 25, 26
"""KV tokens and seats that finished requests gave back, the seconds in which they did, and when the last one did."""
TOKENS_WAITING = 27
"""KV tokens that on-time rows wait for."""
REFUSED, SHORT_BLOCKS = 28, 29
"""INDEX of the on-time prompt that lacks blocks or a seat and cannot wait until they come back by themselves, -1 for
none; how many blocks."""
STATE_SIZE = 30

# ---- what it is set to: float64[PARAMETER_SIZE], in the order in which `Tide.parameters` fills them
(
    CAP_SHARE, DEVIATIONS, KAPPA_HIGH, KAPPA_LOW, LATE_EVERY, LATE_SHARE, USE_MIXED, USE_EXCLUSIVE, USE_BLOCKING,
    USE_DEMOTION, USE_EVICTION, USE_KV_GATE, USE_HOLD, USE_OCCUPANCY, USE_BIAS_IN_VALUES, GAP_MODE, SIZES,
    SATURATION, BYPASS, SEATS, MAX_GAP, BACKFILL, PRIOR_OUTPUT, USE_SIZES, USE_RESCUE,
    MEMORY, URGENCY, USE_LENDING, USE_KEEPING,
) = range(29)  # fmt: skip
PARAMETER_SIZE = 29

# ---- memory of each live request from step to step: float64[MEMORY_SIZE, n]
M_INDEX, M_OUTPUT, M_MISSED, M_BYPASSED, M_LAST, M_PROMPT = range(6)
MEMORY_SIZE = 6

# ---- what a decision is made of, each found by one part for the next, and shown by `why`: float64[WHY_SIZE]
(
    W_ACTION, W_BOUND, W_DECODES, W_LATE_DECODES, W_ON_TIME, W_ACCEPTED, W_LATE, W_PREFILL, W_ROUND, W_S1,
    W_S2, W_CAP, W_PRESS, W_HOLD, W_TIME, W_SOURCE,
) = range(16)  # fmt: skip
W_ACTIONS = 16
"""Four pairs from here: value and time (seconds) of decode-only, prefill-only, mixed, blocking."""
W_TOKENS = 24
"""Prompt tokens of the four."""
(
    W_FREE, W_NEED, W_KEPT_BACK, W_RUNNING, W_EXPECTED, W_LATE_STREAMS, W_VICTIMS, W_ROUND_RAW, W_LAXITY,
    W_KNEE_TIME, W_EVERY_RAW, W_LATE_COST, W_RESERVED, W_CONTEXT, W_LONGEST, W_TOTAL, W_PRICE, W_PAIR_PRICE,
    W_OCCUPANCY, W_BLOCKING, W_STREAMS_TURN, W_FORCED, W_TTFT, W_TURN_JOINED, W_FULL,
    W_MEAN_PROMPT, W_MEAN_TIME,
) = range(28, 55)  # fmt: skip
"""Free blocks; blocks that the round takes; those kept back for running prompts; running rows; KV tokens they are
expected to hold; late streams; rows preempted. Predicted seconds of the on-time round, least seconds that an accepted
prompt has to spare, corrected seconds of a step at the knee, predicted seconds of all decodes that run, what the late
of them add; whether the late share's turn is due. Context of the decodes, the largest, prompt tokens queued, value of a
prompt token and of an attended pair (seconds), streams that a round could have, streams of `blocking`; whether the late
share is for streams now, and whether one of them has to run; predicted seconds until the first token of a prompt of
mean length that arrives now; whether the stream whose turn it is joined the round; whether an accepted prompt was
refused for KV or a seat; the tokens of a prompt of mean length and the seconds that it takes alone."""
WHY_SIZE = 55

ACTIONS = ("decode", "prefill", "mixed", "blocking")
DECODE_ONLY, PREFILL_ONLY, MIXED, BLOCKING = range(4)
BOUNDS = ("nothing", "next tokens", "tokens after the next", "arrivals to come", "prompts", "budget")
"""What kept the step from being longer."""
SOURCES = ("none", "accepted", "demoted", "late", "reserved share")

RECENT = 256
"""Arrivals that are remembered: enough for a 5th percentile, and a minute or so of traffic."""
PRIOR_DEVIATION = 0.025
"""Deviation of a scene before its first step: with eight of them the margin starts at 1.2, twice the 90th percentile of
the default predictor's error on mixed batches (`bounded.DEFAULT_MARGIN`), which a long step at the edge of many
streams' slack should not pass once in hundreds."""
WEIGHT = 0.05
"""Weight of a new step in a mean or deviation: the last twenty count."""
SIZE_EDGES = (8, 16, 32, 64, 112, 128, 192, 240, 256, 368, 384, 496, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Most tokens of the first nineteen size classes of a step; measured kernels step at multiples of 64 and 128 tokens,
which a fitted belief smooths over, so that its error is one of the step's size. Those just below a multiple of 128 are
classes of their own: there a step is cheapest for what it does, and the belief is wrong by most."""
NUM_SIZES = 20
SCENE_ALONE = 20
"""Column of a scene's own mean, over all sizes."""
SHARED = 4.0
"""Steps that the belief itself counts for in the mean of a size class: a class is believed after as many."""
NEIGHBOUR = 1 / 3
"""What a step of the next size class counts for, one two classes away for the square of it. A belief may be off by a
factor of two for prompts of a few tokens and right for those of a hundred; were it one mean for all sizes, sizes that
were never tried would look too long to be tried."""
SEEN = 20.0
"""Most steps that a class counts for: the last twenty make its mean (WEIGHT)."""
WILD = 4.0
"""A step further from its prediction than this factor is a disturbance (a page fault, a compilation), not a cost."""


def _learned() -> FloatArray:
    """float64[3, 3, 21]: mean of real / predicted, its mean absolute deviation, steps; by scene and size class."""
    table = np.zeros((3, 3, NUM_SIZES + 1))
    table[0], table[1] = 1.0, PRIOR_DEVIATION
    return table


@dataclass
class Margins:
    """Learns real / predicted step time per scene and size class of the step.

    Predictions wait for their results in order, as steps end in order. `learned` as `_learned` says.
    """

    learned: FloatArray = field(default_factory=_learned)
    waiting: deque[tuple[int, float, int, int]] = field(default_factory=deque[tuple[int, float, int, int]])

    def forget(self) -> None:
        """Another belief: what was learned of the last one's error does not hold for it."""
        self.learned[:] = _learned()
        self.waiting.clear()

    def planned(self, scene: int, seconds: float, rows: int, tokens: int) -> None:
        """Note a prediction (seconds, nothing corrected) of a step of so many rows and tokens."""
        self.waiting.append((scene, seconds, rows, tokens))

    def observe(self, result: StepResult) -> None:
        """Learn from a finished step, if it is the one that was predicted."""
        if result.step_time is None or not result.indices.size:
            return
        tokens = int(result.tokens.sum())
        while self.waiting:  # a step that the host never ran is skipped
            scene, seconds, rows, planned = self.waiting.popleft()
            if rows == result.indices.size and planned == tokens:
                self._learn(scene, tokens, result.step_time / seconds if seconds > 0 else 1.0)
                return

    def _learn(self, scene: int, tokens: int, ratio: float) -> None:
        if not 1 / WILD < ratio < WILD:
            return
        size = int(np.searchsorted(SIZE_EDGES, tokens))
        for column in (SCENE_ALONE, size):
            mean, deviation, steps = self.learned[:, scene, column].tolist()
            # Early on the plain average, then an exponential one.
            weight = max(WEIGHT, 1.0 / (steps + SHARED))
            deviation += weight * (abs(ratio - mean) - deviation)
            self.learned[:, scene, column] = mean + weight * (ratio - mean), deviation, steps + 1


def fresh_state() -> FloatArray:
    """Nothing learned yet."""
    state = np.zeros(STATE_SIZE)
    state[TIGHTEST] = state[PACE] = np.inf
    state[REFUSED] = -1.0
    return state


@dataclass
class Store:
    """The arrays that one policy object keeps: state, memory of requests, scratch. Grown when needed."""

    state: FloatArray = field(default_factory=fresh_state)
    ring: FloatArray = field(default_factory=lambda: np.full((3, RECENT), np.inf))
    """TTFT targets, TBT targets and arrival times of recent arrivals."""
    memory: FloatArray = field(default_factory=lambda: np.zeros((MEMORY_SIZE, 0)))
    remembered: int = 0
    finished: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    ints: IntArray = field(default_factory=lambda: np.empty((0, 0), dtype=np.int64))
    floats: FloatArray = field(default_factory=lambda: np.empty((0, 0)))
    spare: FloatArray = field(default_factory=lambda: np.zeros((MEMORY_SIZE, 0)))
    plan: IntArray = field(default_factory=lambda: np.empty((3, 0), dtype=np.int64))
    shape: FloatArray = field(default_factory=lambda: np.zeros(12))
    why: FloatArray = field(default_factory=lambda: np.zeros(WHY_SIZE))

    def fit(self, n: int) -> None:
        """Make room for n live rows."""
        if self.plan.shape[1] >= n:
            return
        size = max(256, 2 * n)
        memory = np.zeros((MEMORY_SIZE, size))
        memory[:, : self.remembered] = self.memory[:, : self.remembered]
        self.memory, self.spare = memory, np.zeros((MEMORY_SIZE, size))
        self.ints, self.floats = np.zeros((INT_SCRATCH, size), dtype=np.int64), np.zeros((FLOAT_SCRATCH, 2 * size))
        self.plan = np.zeros((3, size), dtype=np.int64)


# ---- scratch, one line per column of the live rows
(
    I_KIND, I_REMAINING, I_COMPUTED, I_MISSED, I_ROLE, I_ORDER, I_QUEUE, I_QUEUE_LEFT, I_QUEUE_DONE, I_GONE, I_DECODES,
    I_BLOCKING,
) = range(12)  # fmt: skip
INT_SCRATCH = 12
(F_SLACK, F_PACE, F_SERVICE, F_DEMAND, F_GROWTH, F_EVENT, F_JUMP, F_SLOPE, F_HOLD) = range(9)
FLOAT_SCRATCH = 9
# Roles of a row in this step (I_ROLE).
NO_ROLE, ON_TIME_DECODE, LATE_DECODE, ACCEPTED, DEMOTED, LATE_PREFILL = range(6)
