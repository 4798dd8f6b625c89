"""The phase machine of exclusive batching: prompt-only steps and decode-only steps take turns. Used by eb, eb-adaptive
and eb-plus.

Decode until enough slots are free, refill them without decodes, and so on (EB(k), arXiv 2606.00516, section 3). With
SLOs two guards cut a phase short: a prompt step ends before the first running stream is due, and a waiting prompt that
would miss its first token by waiting any longer starts the refill at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from slacktide.core.chunker import Load, load_time
from slacktide.core.loading import kernels
from slacktide.core.pack import pack
from slacktide.core.policies._shared import by_admission, uncached_tokens, with_seats
from slacktide.core.shape import SHAPE_SIZE
from slacktide.core.types import RUNNING, FloatArray, IntArray, Plan, StepView

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


class Look(NamedTuple):
    """What the machine must know of the rows (compiled: `kernels_exclusive.look`)."""

    num_running: int
    num_decodes: int
    """Streams that can decode in this step."""
    num_half_done: int
    num_waiting: int
    fillable: int
    """How many leading waiting prompts seats and free KV blocks admit now, a reserve of blocks left free."""
    has_slo: bool
    """Any row has a TTFT or TBT target."""
    streams: int
    """All rows that decode; one may end with the step in flight."""
    context: float
    """Their computed tokens, summed."""
    longest: float
    """Most of them."""
    slack: float
    """Seconds until the first stream is due, infinite without targets. It is due at its deadline, or, if that is nearer
    than one TBT after its last token (it is late already, or has no TTFT target to count deadlines from), at that
    moment: a late stream still gets a token every TBT."""
    gap: float
    """Smallest TBT target of the streams."""
    rows: IntArray
    """int64[3, n], see `kernels_exclusive`."""

    @property
    def decode(self) -> IntArray:
        """int64[n]: 1 for each row that decodes: as caps for the packer, a step of decodes alone."""
        decode: IntArray = self.rows[0]
        return decode

    @property
    def waiting(self) -> IntArray:
        """Rows without a seat, in order of arrival."""
        waiting: IntArray = self.rows[2, : self.num_waiting]
        return waiting


def look(view: StepView, reserve: int = 0) -> Look:
    """Look at every row once; `reserve`: blocks that admission leaves free while something runs."""
    live, limits = view.live, view.limits
    rows = np.empty((3, live.index.size), dtype=np.int64)
    found = kernels("exclusive").look(
        *live.columns, live.index.size, view.start, limits.max_num_seqs, limits.block_size, limits.num_free_blocks,
        limits.max_model_len, reserve, rows,
    )  # fmt: skip
    return Look._make((*found, rows))


def plan_exclusive(view: StepView, phase: Phase, rule: Rule) -> Plan:
    """One step of the machine; `phase` is updated."""
    view = with_seats(view, rule.slots)
    reserve = max(view.limits.watermark_blocks, int(rule.kv_guard * view.limits.num_blocks))
    now = look(view, reserve)
    if not phase.prefilling:
        offered = now.fillable if rule.form == "sound" else _paper_fillable(view, now, rule)
        phase.prefilling = (
            now.num_decodes == 0
            or now.num_half_done > 0
            or rule.ready(now.num_decodes, offered)
            or (now.has_slo and now.fillable > 0 and _first_token_at_risk(view, now))
        )
    if phase.prefilling and (now.num_half_done or now.fillable):
        plan = _prompt_step(view, phase, now, reserve)
        if plan.rows.size or plan.preempted.size:
            return plan
    phase.prefilling, phase.yielded = False, False
    plan = pack(view, chunk_cap=now.decode, admit=False)
    if plan.rows.size or plan.preempted.size:
        return plan
    phase.prefilling = True
    return pack(view)  # neither phase can run anything (a single request larger than what is free): vLLM's own order


def _paper_fillable(view: StepView, now: Look, rule: Rule) -> int:
    """min(waiting, N - n), or 0 while less of the KV pool is free than the guard asks for (authors' code)."""
    limits = view.limits
    if limits.num_free_blocks < rule.kv_guard * limits.num_blocks:
        return 0
    return min(now.num_waiting, max(limits.max_num_seqs - now.num_running, 0))


def _prompt_step(view: StepView, phase: Phase, now: Look, reserve: int) -> Plan:
    """Prompt chunks alone; a decode step first, or both in one step, where a running stream is due."""
    budget = view.limits.max_num_batched_tokens
    order = np.concatenate((by_admission(view, now.rows[1, : now.num_half_done]), now.waiting))
    if now.slack < np.inf:
        ready = budget_within(view, order, now.slack - _decode_time(view, now))
        if ready < MIN_CHUNK and ready < int(uncached_tokens(view)[order].sum()):
            if not phase.yielded:
                phase.yielded = True
                return pack(view, chunk_cap=now.decode, admit=False)
            # Not even a fresh gap has room for both kinds of step: they share one.
            order = np.concatenate((by_admission(view, np.flatnonzero(now.decode)), order))
            ready = max(budget_within(view, order, now.gap), now.streams + MIN_CHUNK)
        budget = min(budget, ready)
    phase.yielded = False
    return pack(view, order, token_budget=budget, watermark_blocks=reserve)


def _first_token_at_risk(view: StepView, now: Look) -> bool:
    """Whether a prompt that could be admitted must not wait for slots any longer (TTFT)."""
    found = kernels("exclusive").first_token_at_risk(
        *view.live.columns, view.start, view.latency.packed, view.limits.max_num_batched_tokens, HOLD,
        now.waiting[: now.fillable], float(now.streams), now.context, now.longest, now.gap, np.zeros(SHAPE_SIZE),
    )  # fmt: skip
    return bool(found)


def _decode_time(view: StepView, now: Look) -> float:
    """Predicted seconds of a decode step of all running streams."""
    nobody = now.rows[0, :0]
    return load_time(view.latency, Load(now.streams, now.context, now.longest, nobody, nobody), 0)


def budget_within(view: StepView, order: IntArray, seconds: float) -> int:
    """Most tokens of a step within `seconds`: the decodes among `order`, one token each, then its prompts in order."""
    limit = view.limits.max_num_batched_tokens
    packed, shape = view.latency.packed, np.zeros(SHAPE_SIZE)
    return int(kernels("exclusive").budget_within(view.live.columns[0], packed, order, seconds, limit, shape))


def plan_mixed(view: StepView) -> Plan:
    """vLLM's own mixed batch; with TBT targets cut so that no running stream waits past its due time."""
    now = look(view)
    if now.streams == view.live.index.size or not now.slack < np.inf:
        return pack(view)
    running = np.flatnonzero(view.live.status == RUNNING)
    budget = budget_within(view, np.concatenate((by_admission(view, running), now.waiting)), now.slack)
    budget = max(budget, now.streams + MIN_CHUNK)
    return pack(view, token_budget=min(budget, view.limits.max_num_batched_tokens))


def output_prior(view: StepView) -> float:
    """Mean output tokens to assume before any request ended: half of what the live ones may produce, at most 512.

    Clients often send no limit, so that max_tokens is the model's whole length; 512 tokens is twice the mean of chat
    traces.
    """
    return max(min(float(view.live.max_tokens.mean()), 512.0) / 2, 1.0)


def mean_of(values: FloatArray | IntArray, default: float) -> float:
    """The mean, or `default` of nothing."""
    return float(values.mean()) if len(values) else default
