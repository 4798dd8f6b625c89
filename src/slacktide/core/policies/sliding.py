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
from slacktide.core.constructor import Batch, construct, construct_paper
from slacktide.core.deadlines import windows
from slacktide.core.guard import ArrivalGuard
from slacktide.core.loading import kernels
from slacktide.core.outputs import OutputLengths, StepYield
from slacktide.core.policies._shared import require_at_least, require_at_most, require_choice
from slacktide.core.policies._sliding import (
    Look,
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
from slacktide.core.shape import SHAPE_SIZE
from slacktide.core.types import FloatArray, IntArray, Plan, StepResult, StepView

Chunker = Literal["greedy", "clamped", "frozen", "dual", "paper"]
Constructor = Literal["off", "sound", "paper"]

_NO_ROWS: IntArray = np.empty(0, dtype=np.int64)
_BEHIND = 64  # prompts behind the full batch that a window looks at: more than its steps can reach


_NO_TIME = 1e-6  # seconds; a prompt due sooner cannot be saved even where a step takes no time


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
        look = self._look(step, gain)
        bounds, order, hopeless = look.bounds, look.order, look.hopeless
        cap = math.inf
        if self.guard > 0 and not self._paper:
            cap = self._guard.bound(self.guard, step)
            bounds[0] = min(bounds[0], cap)
        packed = step.packed(*with_aged(step, order, look.aged, self.ageing_tokens))
        first, rows, tokens = step.queue(packed)
        t_cur = float(bounds[0])
        greedy, full, at_risk, prefill = self._fit(step, look, rows, tokens, first, cap)
        why: dict[str, Any] = {
            "path": "window",
            "t_cur": t_cur,
            "t_next": float(bounds[1]) - t_cur if t_cur < math.inf else math.inf,
            "late_decodes": look.late,
        }
        relegated = newly_relegated(step, hopeless) if self.relegation else _NO_ROWS
        if greedy > 0 or not step.decodes.size or self._paper:
            batch, why["at_risk"] = None, 0
            if self._constructor == "paper":
                everything = step.seconds(step.load(rows, tokens), int(tokens.sum()))
                batch, why["at_risk"] = construct_paper(step, order, everything, **self._sizes)
            elif at_risk and self._constructor == "sound":
                batch, why["at_risk"] = self._construct(step, look, t_cur, full)
            if batch is not None:
                return self._done(*self._batch_plan(step, order, batch, why, relegated))
            if self._constructor == "paper" and why["at_risk"] and step.decodes.size:
                # Algorithm 2 found nothing: the paper runs the decodes alone (its overload trap).
                return self._done(cut(step, packed, 0, why | {"path": "empty"}, relegated), 0)
        if self.evict and (victim := eviction_victim(step, order, hopeless)) >= 0:
            return self._done(evicting(step, victim, why | {"path": "evict"}), 0)
        if prefill < -1:
            prefill, greedy = self._split(step, order, rows, tokens, first, bounds, cap)
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

    @property
    def _sizes(self) -> dict[str, int]:
        return {"quantum": self.quantum, "max_candidates": self.max_candidates, "max_anchors": self.max_anchors}

    @property
    def _survival(self) -> float:
        """Share of the decodes that go on after a step."""
        return 1.0 - 1.0 / self._outputs.expected(math.inf) if self.output_statistics else 1.0

    def _look(self, step: Step, tokens_per_step: float) -> Look:
        """The paper protects decodes that are not late; which those are it leaves open."""
        found, least, count = step.survey, step.least, max(self.window, 2)
        rho = self._rate.value(prior_rate(step.limit, step.full))
        name = self.order or ("paper" if self._paper else "mlps")
        alpha = self.alpha if self.alpha is not None else 1.0 if name == "paper" else self.beta
        if name == "mlps" and not self._paper:  # the usual case in one crossing into compiled code
            bounds = np.empty(count)
            late, order, hopeless, overdue_by = kernels("orders").bounds_and_mlps(
                *step.view.live.columns, step.prefills, step.view.start, found.kind, found.slack, found.pace,
                found.remaining, rho, float(alpha), float(self.beta), least, float(self.late_factor),
                float(tokens_per_step), bounds,
            )  # fmt: skip
            aged = int(step.prefills[0]) if overdue_by > self.ageing else -1
            return Look(bounds, late, order, hopeless, rho, aged, least)
        if self._paper:
            bounds, late = windows(found, 0.0, count, late_factor=math.inf)
        else:
            bounds, late = windows(found, least, count, late_factor=self.late_factor, tokens_per_step=tokens_per_step)
        order, hopeless = service_order(step, name, rho, least, alpha, self.beta, relegation=self.relegation)
        return Look(bounds, late, order, hopeless, rho, -1 if self._paper else overdue(step, self.ageing), least)

    def _fit(
        self, step: Step, look: Look, rows: IntArray, tokens: IntArray, first: int, cap: float
    ) -> tuple[int, float, int, int]:
        """(greedy's tokens, their seconds, prompts at risk, the window's tokens; -2: `_split` has to be asked)."""
        found, mode = step.survey, self._chunker
        windowed = mode != "greedy" and self.window > 1
        greedy, full, at_risk, prefill = kernels("sliding").fit(
            step.view.latency.packed, look.bounds[: self.window], float(step.margin), float(found.num_decodes),
            found.context, found.longest, rows, tokens, found.computed, step.limit, first, look.order, look.hopeless,
            found.slack, max(look.least, _NO_TIME), windowed and mode != "paper", self._survival, cap,
            float(self.least_gain), mode == "frozen", mode == "dual", np.zeros(SHAPE_SIZE),
        )  # fmt: skip
        return greedy, full, at_risk, -2 if windowed and mode == "paper" else prefill

    def _construct(self, step: Step, look: Look, bound: float, full: float) -> tuple[Batch | None, int]:
        order = look.order
        if look.hopeless.size:
            gone = np.zeros(step.view.live.index.size, dtype=bool)
            gone[look.hopeless] = True
            order = order[~gone[order]]
        return construct(
            step, order, bound, full, least=max(look.least, _NO_TIME), rho=look.rho,
            endangered_only=self.endangered_only, **self._sizes,
        )  # fmt: skip

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
        rows: IntArray,
        tokens: IntArray,
        first: int,
        bounds: FloatArray,
        cap: float,
    ) -> tuple[int, int]:
        """Tokens of this step by the chunker; the next steps see the prompts behind the full batch too."""
        load = step.load(rows, tokens)
        if rows.size and first + int(tokens.sum()) >= step.limit:
            at = int(np.flatnonzero(order == rows[-1])[0]) + 1
            behind = order[at : at + _BEHIND]
            more = np.concatenate((rows, behind))
            load = step.load(more, step.survey.remaining[more])
        return chunking.split(
            step.view.latency,
            load,
            bounds[: self.window] / step.margin,
            step.limit,
            self._chunker,
            survival=self._survival,
            gain=self.least_gain,
            cap=cap / step.margin,
        )
