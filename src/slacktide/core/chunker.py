"""How many tokens this step gets: greedily, or looking ahead over a window of steps (SlidingServe's SlidingChunker).

bounds[j] is when step j + 1 must have ended (`deadlines.windows`), T the predicted time, b a step's tokens.

    greedy   the largest b with T(b) <= bounds[0]
    clamped  the tokens that greedy steps would run in the window, split to take the least time, every step within its
             bound; the queue and the decodes are advanced between the steps. Equals greedy where T is convex and
             bounds[0] <= bounds[1] - bounds[0], where T is affine (ties go to the larger first step), and where greedy
             steps end the whole queue within the window (a split would only delay first tokens)
    frozen   clamped, but the next steps are predicted with the queue as it is now (the paper's shortcut)
    dual     the most tokens in the window within the bounds: what the paper's figure 1 shows
    paper    Algorithm 1 as printed: nothing keeps the chosen step within bounds[0]

Searches run over a grid of at most 48 first steps, because T has a kink at every prompt's end: a ternary search may
end in any local minimum.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import numpy as np

from slacktide.core import shape as s
from slacktide.core.budget import fill_shapes, max_tokens
from slacktide.core.latency import LatencyModel
from slacktide.core.loading import kernels
from slacktide.core.types import FloatArray, IntArray

Mode = Literal["greedy", "clamped", "frozen", "dual", "paper"]
MODES: tuple[Mode, ...] = ("greedy", "clamped", "frozen", "dual", "paper")


class Load(NamedTuple):
    """What a step can be made of: the decodes, and the prompts in service order."""

    num_decodes: int
    context: float
    longest: float
    remaining: IntArray
    """int64[q]: tokens each prompt may take."""
    computed: IntArray
    """int64[q]: tokens it has computed before."""


def load_time(model: LatencyModel, load: Load, prefill: int, scratch: FloatArray | None = None) -> float:
    """Predicted seconds of the decodes plus `prefill` tokens of the queue in order."""
    return float(
        kernels("sliding").time_of(
            model.packed, float(load.num_decodes), load.context, load.longest, load.remaining, load.computed,
            float(prefill), np.empty(s.SHAPE_SIZE) if scratch is None else scratch,
        )
    )  # fmt: skip


def prefill_within(model: LatencyModel, load: Load, time: float, limit: int) -> int:
    """Most prompt tokens beside the decodes within `time` seconds and `limit` tokens; -1: the decodes take longer.

    Monotone in `time`, whatever the model does (`budget.max_tokens`).
    """
    return int(
        kernels("sliding").prefill_within(
            model.packed, time, float(load.num_decodes), load.context, load.longest, load.remaining, load.computed,
            limit, np.empty(s.SHAPE_SIZE),
        )
    )  # fmt: skip


def split(
    model: LatencyModel,
    load: Load,
    bounds: FloatArray,
    limit: int,
    mode: Mode,
    *,
    survival: float = 1.0,
    gain: float = 0.0,
    cap: float = math.inf,
) -> tuple[int, int]:
    """(prompt tokens of this step, greedy's), -1 when the decodes alone exceed bounds[0].

    `bounds` float64[W]: already divided by the safety margin. `survival`: share of the decodes that go on after a step
    (1 unless output lengths are learnt). `gain`: a split must beat greedy by this share. `cap`: most seconds of any one
    step; bounds[0] respects it already. Mode `paper` may exceed the bound; it looks at two steps only.
    """
    if mode == "greedy" or bounds.size < 2 or not np.isfinite(bounds[0]):
        most = prefill_within(model, load, float(bounds[0]), limit)
        return most, most
    if mode == "paper":
        budget = kernels("sliding").split_literal(
            model.packed, float(bounds[0]), float(bounds[1] - bounds[0]), load.num_decodes, load.context, load.longest,
            load.remaining, load.computed, limit, np.zeros(s.SHAPE_SIZE),
        )  # fmt: skip
        most = prefill_within(model, load, float(bounds[0]), limit)
        return min(max(int(budget) - load.num_decodes, 0), int(load.remaining.sum())), most
    chosen, most = kernels("sliding").split_window(
        model.packed, bounds, float(load.num_decodes), load.context, load.longest, load.remaining, load.computed, limit,
        survival, cap, gain, mode == "frozen", mode == "dual", np.zeros(s.SHAPE_SIZE),
    )  # fmt: skip
    return int(chosen), int(most)


def advanced(load: Load, prefill: int) -> Load:
    """The load of the next step: decodes one token on, finished prompts among them (their first token is out)."""
    before = np.cumsum(load.remaining) - load.remaining
    c = np.clip(prefill - before, 0, load.remaining)
    ended = (c > 0) & (c == load.remaining)
    contexts = (load.computed + c)[ended]
    return Load(
        load.num_decodes + int(ended.sum()),
        load.context + load.num_decodes + float(contexts.sum()),
        max(load.longest + 1.0, float(contexts.max(initial=0))),
        load.remaining - c,
        load.computed + c,
    )


def split_reference(
    model: Any, load: Load, bounds: FloatArray, limit: int, *, frozen: bool = False, dual: bool = False
) -> tuple[int, int]:
    """`split` of modes clamped, frozen and dual over every first step instead of a grid; for tests. Slow."""

    def within(load: Load, time: float) -> int:
        budget = max_tokens(
            model, time, num_decodes=load.num_decodes, decode_context=load.context, decode_max_context=load.longest,
            prefill_remaining=load.remaining, prefill_computed=load.computed, limit=limit,
        )  # fmt: skip
        return -1 if budget == 0 and load.num_decodes else min(budget - load.num_decodes, int(load.remaining.sum()))

    def time(load: Load, prefill: int) -> float:
        shapes = fill_shapes(
            model, np.array([load.num_decodes + prefill]), num_decodes=load.num_decodes, decode_context=load.context,
            decode_max_context=load.longest, prefill_remaining=load.remaining, prefill_computed=load.computed,
        )  # fmt: skip
        return float(model.reference(shapes)[0])

    def later(prefill: int, elapsed: float, share: int | None) -> tuple[int, float]:
        total, state, step = 0, load, prefill
        for bound in bounds[1:].tolist():
            state = state if frozen else advanced(state, step)
            step = within(state, bound - elapsed) if share is None else share
            if step < 0:
                return total, np.inf
            elapsed += time(state, step)
            total += step
            if elapsed > bound + 1e-9:
                return total, np.inf
        return total, elapsed

    most, windows = within(load, float(bounds[0])), bounds.size - 1
    queue = int(load.remaining.sum())
    if most <= 0 or most >= queue or windows < 1:
        return most, most
    total, end = later(most, time(load, most), None)
    everything, low = most + total, 0 if load.num_decodes else 1
    if not dual:
        low = max(low, everything - windows * max(limit - load.num_decodes, 0))
    if end == np.inf or low >= most or (not frozen and everything >= queue):
        return most, most
    best, best_time, best_total = most, end, everything
    for b in range(most - 1, low - 1, -1):
        total, end = later(b, time(load, b), None if dual else -(-(everything - b) // windows))
        if end == np.inf:
            continue
        if dual and b + total > best_total:
            best, best_total = b, b + total
        elif not dual and end < best_time - 1e-9:
            best, best_time = b, end
    return best, most
