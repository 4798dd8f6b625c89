"""The phase machine of exclusive batching: prompt-only steps and decode-only steps take turns. Used by eb, eb-adaptive
and eb-plus.

Decode until enough slots are free, refill them without decodes, and so on (EB(k), arXiv 2606.00516, section 3). With
SLOs two guards cut a phase short: a prompt step ends before the first running stream is due, and a waiting prompt that
would miss its first token by waiting any longer starts the refill at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from slacktide.core.budget import max_tokens
from slacktide.core.kv import blocks_for
from slacktide.core.pack import pack
from slacktide.core.policies._shared import by_admission, phases, uncached_tokens, with_seats
from slacktide.core.types import RUNNING, BoolArray, FloatArray, IntArray, Plan, StepView

Form = Literal["sound", "paper"]

MIN_CHUNK = 256
"""Least prompt tokens worth a step of their own: below it the step's time is that of reading the weights."""
HOLD = 0.5
"""Share of its TTFT that a prompt may wait for slots: the rest is for what nobody foresees (bursts, wrong beliefs)."""
KV_GUARD = 0.05
"""Share of the KV blocks that a refill leaves free: about z sqrt(N v) of the memory-safe rule at 300 to 600 slots."""
PAPER_GUARD = (0.05, 0.6)
"""Bounds of the authors' KV guard, as shares of the pool."""


@dataclass(slots=True)
class Phase:
    """What the machine remembers."""

    prefilling: bool = True
    yielded: bool = False
    """The last step decoded although the refill was not done, because a stream was due."""


@dataclass(frozen=True, slots=True)
class Rule:
    """When to refill, and how far."""

    slots: int
    """N."""
    theta: float
    """Share of the slots that must be free."""
    enough: int | None = None
    """So many waiting prompts are enough in any case (a full prompt step); None: no such cap."""
    kv_guard: float = KV_GUARD
    form: Form = "sound"

    def ready(self, decodes: int, fillable: int) -> bool:
        """The ratio form of "k of N slots are free": with few waiting it becomes continuous batching.

        paper: fillable (N - k) >= decodes k. sound: the same with N = decodes + fillable, the population that slots
        and KV memory really allow, and no more prompts than fill a step.
        """
        if fillable <= 0:
            return False
        if self.form == "paper":
            k = max(int(self.theta * self.slots), 1)
            return fillable * (self.slots - k) >= decodes * k
        need = max(int(self.theta * (decodes + fillable) + 1e-6), 1)  # k / N times N may fall short of k by one bit
        return fillable >= (need if self.enough is None else min(need, max(self.enough, 1)))


def plan_exclusive(view: StepView, phase: Phase, rule: Rule) -> Plan:
    """One step of the machine; `phase` is updated."""
    view = with_seats(view, rule.slots)
    live = view.live
    now = phases(view)
    running, decode, half_done, waiting = now.running, now.decode, now.half_done, now.waiting
    num_decodes = now.decodes.size
    reserve = max(view.limits.watermark_blocks, int(rule.kv_guard * view.limits.num_blocks))
    fillable = num_fillable(view, waiting, int(running.sum()), reserve)
    has_slo = bool(np.isfinite(live.slo_tbt).any() or np.isfinite(live.slo_ttft).any())
    if not phase.prefilling:
        offered = fillable if rule.form == "sound" else _paper_fillable(view, waiting.size, running, rule)
        phase.prefilling = (
            num_decodes == 0
            or half_done.size > 0
            or rule.ready(num_decodes, offered)
            or (has_slo and fillable > 0 and first_token_at_risk(view, decode, waiting[:fillable]))
        )
    if phase.prefilling and (half_done.size or fillable):
        plan = _prompt_step(view, phase, decode, half_done, waiting, reserve, has_slo)
        if plan.rows.size or plan.preempted.size:
            return plan
    phase.prefilling, phase.yielded = False, False
    plan = pack(view, chunk_cap=decode.astype(np.int64), admit=False)
    if plan.rows.size or plan.preempted.size:
        return plan
    phase.prefilling = True
    return pack(view)  # neither phase can run anything (a single request larger than what is free): vLLM's own order


def num_fillable(view: StepView, waiting: IntArray, num_running: int, reserve: int) -> int:
    """How many leading waiting prompts seats and free KV blocks admit now, `reserve` blocks left free."""
    live, limits = view.live, view.limits
    heads = waiting[: max(limits.max_num_seqs - num_running, 0)]
    if not heads.size:
        return 0
    known = np.minimum(live.num_prompt_tokens[heads] + live.num_output_tokens[heads], limits.max_model_len)
    shared = live.num_cached_tokens[heads] // limits.block_size - live.num_cached_free_blocks[heads]
    blocks = np.cumsum(blocks_for(known, limits.block_size) - shared)
    room = limits.num_free_blocks - (reserve if num_running else 0)
    return int(np.searchsorted(blocks, room, side="right"))


def _paper_fillable(view: StepView, num_waiting: int, running: BoolArray, rule: Rule) -> int:
    """min(waiting, N - n), or 0 while less of the KV pool is free than the guard asks for (authors' code)."""
    limits = view.limits
    if limits.num_free_blocks < rule.kv_guard * limits.num_blocks:
        return 0
    return min(num_waiting, max(limits.max_num_seqs - int(running.sum()), 0))


def _prompt_step(
    view: StepView, phase: Phase, decode: BoolArray, half_done: IntArray, waiting: IntArray, reserve: int, has_slo: bool
) -> Plan:
    """Prompt chunks alone; a decode step first, or both in one step, where a running stream is due."""
    budget = view.limits.max_num_batched_tokens
    order = np.concatenate((half_done, waiting))
    if has_slo and decode.any():
        slack, gap = streams_slack(view, decode)
        if slack < np.inf:
            ready = budget_within(view, order, slack - decode_time(view, decode))
            if ready < min(MIN_CHUNK, int(uncached_tokens(view)[order].sum())):
                if not phase.yielded:
                    phase.yielded = True
                    return pack(view, chunk_cap=decode.astype(np.int64), admit=False)
                # Not even a fresh gap has room for both kinds of step: they share one.
                order = np.concatenate((by_admission(view, np.flatnonzero(decode)), order))
                ready = max(budget_within(view, order, gap), int(decode.sum()) + MIN_CHUNK)
            budget = min(budget, ready)
    phase.yielded = False
    return pack(view, order, token_budget=budget, watermark_blocks=reserve)


# ---- SLO guards --------------------------------------------------------------------------------------------------


def streams_slack(view: StepView, decode: BoolArray) -> tuple[float, float]:
    """(seconds until the first running stream is due, smallest TBT target among them); infinite without targets.

    A stream is due at its deadline, or, if that is nearer than one TBT after its last token (it is late already, or
    has no TTFT target to count deadlines from), at that moment: a late stream still gets a token every TBT.
    """
    live = view.live
    tbt = live.slo_tbt[decode]
    last = live.last_token_time[decode]
    last = np.where(np.isnan(last), view.now, last)  # its first token is on the way (async scheduling)
    deadline = live.next_deadline[decode]
    deadline = np.where(np.isfinite(live.slo_ttft[decode]), deadline, -np.inf)
    due = np.where(np.isfinite(tbt), np.maximum(deadline, last + tbt), np.inf)
    return float(due.min(initial=np.inf) - view.now), float(tbt.min(initial=np.inf))


def first_token_at_risk(view: StepView, decode: BoolArray, heads: IntArray) -> bool:
    """One of the admissible `heads` can still meet its TTFT, and has waited for slots as long as it may.

    It may wait until HOLD of its TTFT is over, and no longer than its prefill allows: full prompt steps for all tokens
    up to its own, which take longer where running streams interrupt them once every TBT.
    """
    live, limits = view.live, view.limits
    ttft = live.slo_ttft[heads]
    target = live.arrival_time[heads] + ttft
    if not np.isfinite(target).any():
        return False
    tokens = np.cumsum(np.maximum(uncached_tokens(view)[heads], 1)).astype(np.float64)
    budget = limits.max_num_batched_tokens
    # T(n) is near a line: its two ends give it.
    first, full = (
        view.latency.step_time(np.array([max(int(n), 1)]), np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.bool_))
        for n in (min(tokens[0], budget), budget)
    )
    left = tokens % budget
    share = np.clip((left - tokens[0]) / max(budget - tokens[0], 1.0), 0.0, 1.0)
    needed = (tokens // budget) * full + np.where(left > 0, first + share * (full - first), 0.0)
    step = decode_time(view, decode)
    tbt = float(live.slo_tbt[decode].min(initial=np.inf))
    needed = needed / max(1.0 - step / tbt, 0.1)
    slack = target - view.now - needed
    patience = live.arrival_time[heads] + HOLD * ttft - view.now
    return bool(((slack >= 0) & (np.minimum(slack, patience) < step)).any())


def decode_time(view: StepView, decode: BoolArray) -> float:
    """Predicted seconds of a decode step of all running streams."""
    contexts = view.live.num_computed_tokens[decode]
    return view.latency.step_time(np.ones_like(contexts), contexts, np.ones(contexts.size, dtype=np.bool_))


def budget_within(view: StepView, order: IntArray, seconds: float) -> int:
    """Most tokens of a step within `seconds`: the decodes among `order`, one token each, then its prompts in order."""
    live = view.live
    decode = live.is_decode[order]
    contexts, prompts = live.num_computed_tokens[order[decode]], order[~decode]
    computed = np.where(live.status == RUNNING, live.num_computed_tokens, live.num_cached_tokens)[prompts]
    return max_tokens(
        view.latency,
        seconds,
        num_decodes=int(contexts.size),
        decode_context=float(contexts.sum()),
        decode_max_context=float(contexts.max(initial=0)),
        prefill_remaining=live.num_prompt_tokens[prompts] + live.num_output_tokens[prompts] - computed,
        prefill_computed=computed,
        limit=view.limits.max_num_batched_tokens,
    )


def plan_mixed(view: StepView) -> Plan:
    """vLLM's own mixed batch; with TBT targets cut so that no running stream waits past its due time."""
    live = view.live
    if np.isfinite(live.slo_tbt).any():
        decode = live.is_decode
        if decode.any() and not decode.all():
            slack, _ = streams_slack(view, decode)
            if slack < np.inf:
                running = live.status == RUNNING
                order = np.concatenate((by_admission(view, np.flatnonzero(running)), np.flatnonzero(~running)))
                budget = budget_within(view, order, slack)
                budget = max(budget, int(decode.sum()) + MIN_CHUNK)
                return pack(view, token_budget=min(budget, view.limits.max_num_batched_tokens))
    return pack(view)


def output_prior(view: StepView) -> float:
    """Mean output tokens to assume before any request ended: half of what the live ones may produce, at most 512.

    Clients often send no limit, so that max_tokens is the model's whole length; 512 tokens is twice the mean of chat
    traces.
    """
    return max(min(float(view.live.max_tokens.mean()), 512.0) / 2, 1.0)


def mean_of(values: FloatArray | IntArray, default: float) -> float:
    """The mean, or `default` of nothing."""
    return float(values.mean()) if len(values) else default
