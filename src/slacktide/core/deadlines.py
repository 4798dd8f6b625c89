"""How much time each live request has: slacks, paces, and the bounds they put on the next steps.

Control, not the metric (`metrics.slo` judges). A token's deadline is SlidingServe's eq. 1 (`types.token_deadline`);
with `rebase`, a first token that came late moves the later deadlines by its delay (QoServe's code does so too), because
a stream that can never be on time again still deserves its pace. Without a TTFT target the first token is the anchor.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from slacktide.core.kinds import DECODE, IDLE, PREFILL
from slacktide.core.loading import kernels
from slacktide.core.types import RUNNING, BoolArray, FloatArray, IntArray, StepView


class Survey(NamedTuple):
    """All live rows as a scheduler sees them at one moment; arrays of length n."""

    kind: IntArray
    """IDLE (its end is in flight), DECODE (one token) or PREFILL (a prompt, or what a preemption lost)."""
    slack: FloatArray
    """Seconds from the start of the step until the row's next output token is due; infinite without a target, negative
    when late."""
    pace: FloatArray
    """Seconds per later token; infinite without a target."""
    remaining: IntArray
    """Tokens to compute until the next output token, cached prefixes taken off."""
    computed: IntArray
    """Tokens computed or cached before."""
    num_decodes: int
    context: float
    """Sum of the decodes' computed tokens."""
    longest: float
    """Largest of them."""


def survey(view: StepView, *, rebase: bool = True) -> Survey:
    """Look at every row once, without end-to-end targets (compiled; `survey_reference` is its twin)."""
    live = view.live
    n = live.index.size
    ints, floats = np.empty((3, n), dtype=np.int64), np.empty((2, n))
    decodes, context, longest = kernels("deadlines").survey(
        live.columns[0], live.columns[1], n, view.start, view.limits.max_model_len, rebase, ints[0], floats[0],
        floats[1], ints[1], ints[2],
    )  # fmt: skip
    return Survey(ints[0], floats[0], floats[1], ints[1], ints[2], decodes, context, longest)


def survey_reference(view: StepView, *, rebase: bool = True) -> Survey:
    """`survey` in numpy."""
    live = view.live
    output = live.num_output_tokens + live.num_in_flight_tokens
    known = live.num_prompt_tokens + output
    running = live.status == RUNNING
    computed = np.where(running, live.num_computed_tokens, live.num_cached_tokens)
    need = known - computed
    need = np.where(running, np.minimum(need, view.limits.max_model_len - 1 - computed), need)
    ends = (live.num_in_flight_tokens > 0) & (output >= live.max_tokens)
    decode = (known - computed == 1) & (output > 0)
    kind = np.where((need <= 0) | ends, IDLE, np.where(decode, DECODE, PREFILL))
    anchor, first = live.arrival_time + live.slo_ttft, live.first_token_time
    has_first = ~np.isnan(first)
    late = has_first & (np.isinf(anchor) | (rebase & (first > anchor)))
    anchor = np.where(late, first, np.where(~has_first & (output > 0) & np.isinf(anchor), view.start, anchor))
    later = np.where(output > 0, np.where(output > 0, output, 1) * live.slo_tbt, 0.0)
    rows = kind == DECODE
    contexts = computed[rows]
    return Survey(
        kind=kind.astype(np.int64),
        slack=anchor - view.start + later,
        pace=live.slo_tbt.copy(),
        remaining=np.maximum(need, 0),
        computed=computed,
        num_decodes=int(rows.sum()),
        context=float(contexts.sum()),
        longest=float(contexts.max(initial=0)),
    )


def with_e2e(view: StepView, found: Survey, expected_output: float, token_time: float) -> Survey:
    """The survey with end-to-end targets turned into slacks and paces.

    The true output length is hidden: `expected_output` tokens are expected, at least 1 and at most max_tokens. A
    decode must then keep a pace of (time left) / (tokens left); a prompt must begin early enough for its tokens at
    their pace (or, without one, at `token_time`). A target that has passed binds nobody.
    """
    live = view.live
    output = live.num_output_tokens + live.num_in_flight_tokens
    left = np.clip(expected_output - output, 1.0, np.maximum(live.max_tokens - output, 1))
    time = live.arrival_time + live.slo_e2e - view.start
    decode = found.kind == DECODE
    step = np.where(np.isfinite(found.pace), np.minimum(found.pace, token_time), token_time)
    own = np.where(decode, time / left, time - (left - 1) * step)
    binds = np.isfinite(time) & (time > 0)
    return found._replace(
        slack=np.where(binds, np.minimum(found.slack, own), found.slack),
        pace=np.where(binds & decode, np.minimum(found.pace, own), found.pace),
    )


def windows(
    found: Survey, least: float, count: int, *, late_factor: float = 1.0, tokens_per_step: float = 1.0
) -> tuple[FloatArray, int]:
    """Bounds float64[count] and the number of late decodes (compiled; `windows_reference` is its twin).

    bounds[j]: seconds from now within which step j + 1 must end, min over decodes of slack + j * pace *
    tokens_per_step; infinite where nothing binds. T_cur = bounds[0], T_next = bounds[1] - bounds[0]. A decode whose
    slack is below `least` (the decodes' own step) cannot be saved: it binds only softly, by late_factor * pace.
    `tokens_per_step` > 1 with speculative decoding: each step then earns that many tokens' time.
    """
    bounds = np.empty(count)
    late = kernels("deadlines").windows(
        found.kind, found.slack, found.pace, least, late_factor, tokens_per_step, bounds
    )
    return bounds, int(late)


def windows_reference(
    found: Survey, least: float, count: int, *, late_factor: float = 1.0, tokens_per_step: float = 1.0
) -> tuple[FloatArray, int]:
    """`windows` in numpy."""
    rows = found.kind == DECODE
    slack, pace = found.slack[rows], found.pace[rows]
    late: BoolArray = slack < least
    first = np.where(late, late_factor * pace, slack)
    rows = np.isfinite(first)
    steps = np.arange(count)[:, None]
    with np.errstate(invalid="ignore"):
        ends = first[rows] + np.where(steps > 0, steps * tokens_per_step * pace[rows], 0.0)
    return ends.min(axis=1, initial=np.inf), int(late.sum())


def speculative_deadline(arrival: float, ttft: float, tbt: float, k: int, rate: float, form: str = "token") -> float:
    """When output token k (from 0) is due, if a step yields `rate` >= 1 tokens on average.

    form `token`: arrival + ttft + k * tbt, as without speculation. This is what a user reads and what was promised, so
    metrics and control use it; a burst of accepted tokens is credit for later ones. form `step`: arrival + ttft +
    floor(k / rate) * tbt, the form of the note on SlidingServe: every *step* gets one tbt, so the faster the draft
    guesses, the earlier the same token is due. It tightens the promise by `rate` and takes the gain away from the
    schedule. Kept to compare. Raises ValueError for a rate below 1 or another form.
    """
    if not rate >= 1:
        raise ValueError(f"tokens per step: {rate}: expected at least 1")
    if form not in ("token", "step"):
        raise ValueError(f"form {form!r}: expected token or step")
    steps = k if form == "token" else math.floor(k / rate)
    return arrival + ttft + (steps * tbt if steps else 0.0)
