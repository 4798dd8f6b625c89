"""SlidingServe: prompts sorted by urgency, a batch that saves those at risk, chunks chosen over a window of steps.

Every step runs all decodes. Prompts are ordered by class (protected, urgent, normal, hopeless), then length (MLPS). If
the full batch would make a prompt miss its first deadline, a knapsack chooses which prompts end in a step short enough
(BatchConstructor); otherwise the number of tokens is chosen by looking at this step and the next ones together
(SlidingChunker). Source: "Beyond Greedy Chunking" (arXiv 2606.05933). `reading=paper` follows its algorithms to the
letter; the default mends them (docs/background/slidingserve.md says what and why). Every part can be exchanged or
switched off: order, chunker, constructor, relegation. Ignores that output lengths could be known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from slacktide.core import chunker as chunking
from slacktide.core.bounded import DEFAULT_MARGIN, Step, begin, cut, decode_only
from slacktide.core.chunker import Load
from slacktide.core.constructor import Batch, construct, construct_paper
from slacktide.core.deadlines import Survey, windows
from slacktide.core.guard import ArrivalGuard
from slacktide.core.outputs import OutputLengths, StepYield
from slacktide.core.policies._shared import require_at_least, require_at_most, require_choice
from slacktide.core.policies._sliding import (
    Order,
    evicting,
    eviction_victim,
    newly_relegated,
    overdue,
    service_order,
    with_aged,
)
from slacktide.core.policy import register
from slacktide.core.priority import PrefillRate, prior_rate
from slacktide.core.types import FloatArray, IntArray, Plan, StepResult, StepView

Chunker = Literal["greedy", "clamped", "frozen", "dual", "paper"]
Constructor = Literal["off", "sound", "paper"]

_NO_ROWS: IntArray = np.empty(0, dtype=np.int64)
_BEHIND = 64  # prompts behind the full batch that a window looks at: more than its steps can reach


@register("sliding")
@dataclass(frozen=True)
class Sliding:
    """`none` stands for what the reading says: mlps, clamped and sound, or paper for all three."""

    reading: Literal["sound", "paper"] = "sound"
    """sound: the mended algorithms. paper: the published ones; margin, rebasing and ageing are then off."""
    order: Order | None = None
    """Order of prompts: mlps (classes), paper (its keys), edf, srpf, hybrid (QoServe's), fcfs."""
    chunker: Chunker | None = None
    """How many tokens a step gets: greedy, clamped, frozen, dual, paper (`core.chunker`)."""
    window: int = 2
    """Steps that the chunker looks at; 1 is greedy."""
    least_gain: float = 0.03
    """A window's split must save this share of its time (dual: add this share of its tokens) to replace greedy's."""
    constructor: Constructor | None = None
    """How a batch is chosen when prompts are at risk: off, sound, paper."""
    backfill: bool = True
    """Fill the time a chosen batch leaves with chunks of other prompts."""
    endangered_only: bool = False
    """A batch counts only prompts that would miss if they waited a step, not every prompt that it ends."""
    relegation: bool = False
    """Mark waiting prompts that are hopeless as relegated, for good (QoServe's eager relegation)."""
    evict: bool = False
    """Where lack of KV blocks leaves a prompt at risk no batch, take them from a request that has missed already."""
    output_statistics: bool = False
    """Learn how many output tokens requests want; the next steps' decodes and end-to-end targets are reckoned by it."""
    alpha: float | None = None
    """Urgency from which a prompt is urgent; none: 1 in the paper's reading (the paper gives no value), else beta, so
    that nobody is: to lift those about to miss above the shorter ones costs more requests than it saves."""
    beta: float = 1.5
    """Urgency from which a prompt is hopeless."""
    margin: float = DEFAULT_MARGIN
    """Predicted times are multiplied by this before they are held against deadlines."""
    max_chunk: int | None = None
    """Most tokens of a step; none takes the engine's max_num_batched_tokens (the paper's server maximum B)."""
    late_factor: float = 1.0
    """A late decode bounds the step by this many times its TBT target."""
    ageing: float = 60.0
    """Seconds that a prompt may be overdue before it gets `ageing_tokens` of every step; inf never."""
    ageing_tokens: int = 16
    """Tokens of a step for the oldest such prompt, so that it ends under any load."""
    quantum: int = 16
    """Tokens per unit of the knapsack (a KV block)."""
    max_candidates: int = 50
    """Prompts that the knapsack chooses from."""
    max_anchors: int = 8
    """Prompts at risk whose time is tried as the step's."""
    tokens_per_step: float = 1.0
    """Output tokens per step and request, above 1 with speculative decoding (accepted drafts + 1); 0 measures it."""
    guard: float = 0.5
    """Prompts lengthen a step by at most this many times the tightest recent TTFT target, for those who arrive
    during it; 0 is off, as in reading=paper. Searched over three data sets (benchmarks/slidingserve/tune.py)."""
    expected_output_tokens: int = 256
    """Output tokens a request is expected to want, where an end-to-end target must be turned into a pace."""
    _guard: ArrivalGuard = field(default_factory=ArrivalGuard, init=False, repr=False, compare=False)
    _rate: PrefillRate = field(default_factory=PrefillRate, init=False, repr=False, compare=False)
    _yield: StepYield = field(default_factory=StepYield, init=False, repr=False, compare=False)
    _outputs: OutputLengths = field(default_factory=OutputLengths, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise ValueError naming the parameter that is out of its range."""
        require_choice(
            self,
            reading=("sound", "paper"),
            order=(None, "mlps", "paper", "edf", "srpf", "hybrid", "fcfs"),
            chunker=(None, *chunking.MODES),
            constructor=(None, "off", "sound", "paper"),
        )
        require_at_most(self, 1000, "window", "margin")  # seconds of steps ahead; no prediction is off by as much
        require_at_least(self, 1, "window", "margin", "max_chunk", "quantum", "max_candidates", "max_anchors")
        require_at_least(self, 1, "expected_output_tokens", "ageing_tokens")
        if self.tokens_per_step != 0:
            require_at_least(self, 1, "tokens_per_step")
        require_at_least(self, 0, "alpha", "beta", "ageing", "guard", "least_gain")
        require_at_least(self, 1e-3, "late_factor")

    @property
    def decode_runs(self) -> bool:
        """A step of plain decoding teaches something only where outputs are learnt."""
        return not self.output_statistics and self.tokens_per_step > 0

    @property
    def steerable(self) -> bool:
        """vLLM cannot be told whom to evict."""
        return not self.evict

    @property
    def _paper(self) -> bool:
        return self.reading == "paper"

    @property
    def _margin(self) -> float:
        return 1.0 if self._paper else self.margin

    def plan(self, view: StepView) -> Plan:
        """One step."""
        expected = float(self.expected_output_tokens)
        if self.output_statistics:
            self._outputs.watch(view.live)
            expected = self._outputs.expected(expected)
        step = begin(view, self._margin, self.max_chunk, rebase=not self._paper, expected_output=expected)
        gain = self.tokens_per_step or self._yield.watch(view.live, step.decodes)
        if not step.prefills.size:
            return self._done(decode_only(step), 0)
        least = step.least
        bounds, late = self._bounds(step.survey, least, gain)
        cap = math.inf
        if self.guard > 0 and not self._paper:
            cap = self._guard.bound(self.guard, step)
            bounds[0] = min(bounds[0], cap)
        order, hopeless, rho = self._sorted(step, least)
        aged = -1 if self._paper else overdue(step, self.ageing)
        packed = step.packed(*with_aged(step, order, aged, self.ageing_tokens))
        first, rows, tokens = step.queue(packed)
        load = step.load(rows, tokens)
        t_cur = float(bounds[0])
        greedy = step.within(load, t_cur)
        why: dict[str, Any] = {
            "path": "window",
            "t_cur": t_cur,
            "t_next": float(bounds[1]) - t_cur if t_cur < math.inf else math.inf,
            "late_decodes": late,
        }
        relegated = newly_relegated(step, hopeless) if self.relegation else _NO_ROWS
        if greedy > 0 or not step.decodes.size or self._paper:
            batch, why["at_risk"] = self._construct(step, order, hopeless, load, greedy, t_cur, least, rho)
            if batch is not None:
                return self._done(*self._batch_plan(step, order, batch, why, relegated))
            if self._constructor == "paper" and why["at_risk"] and step.decodes.size:
                # Algorithm 2 found nothing: the paper runs the decodes alone (its overload trap).
                return self._done(cut(step, packed, 0, why | {"path": "empty"}, relegated), 0)
        if self.evict and (victim := eviction_victim(step, order, hopeless)) >= 0:
            return self._done(evicting(step, victim, why | {"path": "evict"}), 0)
        prefill = greedy
        if self._chunker != "greedy" and self.window > 1:
            prefill, greedy = self._split(step, order, load, rows, tokens, first, bounds, cap)
        why["greedy"] = greedy
        plan = cut(step, packed, prefill, why, relegated)
        return self._done(plan, max(min(prefill, int(tokens.sum())), 0))

    def observe(self, result: StepResult) -> None:
        """Learn the pace of prefills, and output lengths where wanted."""
        self._rate.observe(result.step_time, result.indices.size)
        if self.output_statistics:
            self._outputs.observe(result.finished)

    def _done(self, plan: Plan, prefill: int) -> Plan:
        self._rate.planned(prefill, plan.rows.size)
        return plan

    @property
    def _chunker(self) -> Chunker:
        return self.chunker or ("paper" if self._paper else "clamped")

    @property
    def _constructor(self) -> Constructor:
        return self.constructor or ("paper" if self._paper else "sound")

    def _bounds(self, found: Survey, least: float, tokens_per_step: float) -> tuple[FloatArray, int]:
        """The paper protects decodes that are not late; which those are it leaves open."""
        count = max(self.window, 2)
        if self._paper:
            return windows(found, 0.0, count, late_factor=math.inf)
        return windows(found, least, count, late_factor=self.late_factor, tokens_per_step=tokens_per_step)

    def _sorted(self, step: Step, least: float) -> tuple[IntArray, IntArray, float]:
        """(prompts in service order, those of them that are hopeless or relegated, pace of prefills)."""
        rho = self._rate.value(prior_rate(step.limit, step.full))
        order = self.order or ("paper" if self._paper else "mlps")
        alpha = self.alpha if self.alpha is not None else 1.0 if order == "paper" else self.beta
        rows, lost = service_order(step, order, rho, least, alpha, self.beta, relegation=self.relegation)
        return rows, lost, rho

    def _construct(
        self,
        step: Step,
        order: IntArray,
        hopeless: IntArray,
        load: Load,
        greedy: int,
        bound: float,
        least: float,
        rho: float,
    ) -> tuple[Batch | None, int]:
        kind = self._constructor
        if kind == "off":
            return None, 0
        sizes = {"quantum": self.quantum, "max_candidates": self.max_candidates, "max_anchors": self.max_anchors}
        if kind == "paper":
            full = step.seconds(load, int(load.remaining.sum()))
            return construct_paper(step, order, full, **sizes)
        if hopeless.size:
            gone = np.zeros(step.view.live.index.size, dtype=bool)
            gone[hopeless] = True
            order = order[~gone[order]]
        full = step.seconds(load, max(greedy, 0))
        least = max(least, 1e-6)
        return construct(step, order, bound, full, least=least, rho=rho, endangered_only=self.endangered_only, **sizes)

    def _batch_plan(
        self, step: Step, order: IntArray, batch: Batch, why: dict[str, Any], relegated: IntArray
    ) -> tuple[Plan, int]:
        """The chosen prompts whole, then, with backfill, chunks of the others within the same bound."""
        literal = self._constructor == "paper"
        others = order[~np.isin(order, batch.rows)] if self.backfill and not literal else _NO_ROWS
        packed = step.packed(np.concatenate((batch.rows, others)))
        if not packed.rows.size:  # half-done prompts that were not chosen keep the blocks: they go on
            packed = step.packed(order)
        _, rows, tokens = step.queue(packed)
        prefill = int(step.survey.remaining[batch.rows].sum())
        if not literal:
            prefill = step.within(step.load(rows, tokens), batch.bound)
        why |= {"path": "constructor", "bound": batch.bound, "chosen": batch.rows.size, "greedy": prefill}
        return cut(step, packed, prefill, why, relegated), max(min(prefill, int(tokens.sum())), 0)

    def _split(
        self,
        step: Step,
        order: IntArray,
        load: Load,
        rows: IntArray,
        tokens: IntArray,
        first: int,
        bounds: FloatArray,
        cap: float,
    ) -> tuple[int, int]:
        """Tokens of this step by the chunker; the next steps see the prompts behind the full batch too."""
        if rows.size and first + int(tokens.sum()) >= step.limit:
            at = int(np.flatnonzero(order == rows[-1])[0]) + 1
            behind = order[at : at + _BEHIND]
            more = np.concatenate((rows, behind))
            load = step.load(more, step.survey.remaining[more])
        survival = 1.0 - 1.0 / self._outputs.expected(math.inf) if self.output_statistics else 1.0
        return chunking.split(
            step.view.latency,
            load,
            bounds[: self.window] / step.margin,
            step.limit,
            self._chunker,
            survival=survival,
            gain=self.least_gain,
            cap=cap / step.margin,
        )
