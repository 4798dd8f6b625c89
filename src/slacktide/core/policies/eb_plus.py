"""EB+: exclusive or mixed batching, whichever serves a request in less time at the present load.

Starts from the belief's step costs and the crossover of Proposition 4 (clumped prompts, token budget, memory-safe
slots); then the mode that runs corrects its own prediction by what its steps really cost: alpha_mb and kappa from every
mixed step, and the seconds a request took per mode. A mode not run for long is tried for a few dozen completions, if
its predicted cost is near enough. Source: arXiv 2606.00516, section 3 and Proposition 4, whose code learns nothing of
mixed steps online. paper: their selector (LHS against RHS +- delta, alpha_mb = alpha_p, sticky EB, drain gate, burst
trigger) with theta and N of `eb-adaptive:form=paper`. Ignores end-to-end targets.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from slacktide.core.exclusive import (
    Costs,
    Load,
    crossover_sides,
    exclusive_beta,
    exclusive_throughput,
    mixed_throughput,
)
from slacktide.core.exclusive_hazard import Ema
from slacktide.core.policies._exclusive import KV_GUARD, Form, plan_exclusive, plan_mixed
from slacktide.core.policies._exclusive_learning import (
    Account,
    MixedFit,
    recomputed,
    running_and_waiting,
    step_seconds,
)
from slacktide.core.policies._shared import require_at_least, require_choice, require_share
from slacktide.core.policies.eb_adaptive import Controller
from slacktide.core.policy import register
from slacktide.core.types import Plan, StepResult, StepView

Mode = Literal["exclusive", "mixed"]

RISE, FALL = 0.3, 0.03
"""Weights of the demand's average per step: up fast, down slowly, or every drained queue would read as low load."""
DRAIN_GATE = 16
"""Below this demand no decision is taken: the queue drains (authors' code)."""
COOLDOWN = 3
"""Evaluations after a switch without another one."""
MISTAKE = 0.1
"""A gain beyond this ends the cool-down of the sound form: no oscillation is that large, the switch was wrong."""
STICKY = 3.0
"""paper: leaving EB takes this many margins."""
BURST = 2.0
"""Demand beyond this many times its average is judged at once."""
CORRECTION = 0.5
"""Weight of a new measurement in a mode's correction."""
NEAR_TIE = 0.2
"""Share of explore_every after which a mode is tried again that promises the same throughput."""
TRUST = 3.0
"""A measurement further from its prediction than this factor is a disturbance (a burst of preemptions), not a cost."""
TRIAL = 60
"""Completions of a trial of the other mode; the first half, which still feels the switch, is not measured."""


class Selector:
    """State of the choice between the modes."""

    def __init__(self, control: Controller, first_at: int) -> None:
        self.control = control
        self.mode: Mode = "mixed"
        self.demand = Ema(RISE)
        self.account = Account()
        self.mixed_fit = MixedFit()
        self.corrections: dict[Mode, Ema] = {"exclusive": Ema(CORRECTION), "mixed": Ema(CORRECTION)}
        self.last_run: dict[Mode, int] = {}  # completions when a mode was last measured
        self.cooldown = 0
        self.next_at = first_at  # completions at which the next evaluation is due
        self.settle_until = 0  # completions before which steps are not measured
        self.trial_of: Mode | None = None
        self.lead = 0.0  # predicted cost of mixed over that of exclusive, minus 1

    def switch(self, mode: Mode, settle: int) -> None:
        """Run `mode` from now on."""
        self.mode = mode
        self.control.phase.prefilling = True
        self.account = Account()
        self.settle_until = self.control.lengths.completions + settle


@register("eb-plus")
@dataclass(frozen=True)
class EbPlus:
    """The parameters bound what is computed and learned."""

    form: Form = "sound"
    """sound: corrected formulas and online learning; paper: the authors' selector and controller."""
    max_num_seqs: int | None = None
    """Most slots in exclusive mode; none takes the engine's."""
    window: int = 500
    """Finished and admitted requests that the estimates rest on."""
    update_every: int = 100
    """Completions between two evaluations."""
    margin: float = 0.005
    """sound: the other mode must promise so much more throughput (share) before a switch."""
    delta: float = 1e-6
    """paper: margin between LHS and RHS, seconds per token; the experiments used 1e-6 to 1e-5."""
    explore_every: int = 3000
    """Completions after which a mode that has not run is tried again, sooner where both are close; 0 never tries."""
    explore_within: float = 0.05
    """A mode is tried only while its predicted throughput is at most this share below the other's."""
    kv_guard: float = KV_GUARD
    """Share of the KV blocks that a refill leaves free."""
    _select: Selector = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise ValueError naming the parameter that is out of its range."""
        require_at_least(self, 1, "max_num_seqs", "window", "update_every")
        require_at_least(self, 0, "margin", "explore_every", "explore_within")
        require_share(self, "kv_guard")
        require_choice(self, form=("sound", "paper"))
        control = Controller(self.window, self.form, self.kv_guard)
        # The authors' selector sees its first completions before it decides; the belief can be asked at once.
        first_at = self.update_every if self.form == "paper" else 0
        object.__setattr__(self, "_select", Selector(control, first_at))

    def plan(self, view: StepView) -> Plan:
        """One step in the mode of the moment."""
        select = self._select
        control = select.control
        most = view.limits.max_num_seqs if self.max_num_seqs is None else self.max_num_seqs
        control.refresh(view, self.update_every, min(most, view.limits.max_num_seqs))
        demand = float(view.live.index.size)
        known = select.demand.value
        select.demand.add(demand, FALL if known is not None and demand < known else None)
        burst = known is not None and demand > BURST * known and select.cooldown == 0
        if control.lengths.completions >= select.next_at or burst:
            if burst:
                select.demand.value = demand
            select.next_at = control.lengths.completions + self.update_every
            if self.form == "paper":
                self._evaluate_paper(view)
            else:
                self._evaluate(view)
        plan = plan_mixed(view) if select.mode == "mixed" else plan_exclusive(view, control.phase, control.rule())
        select.account.recomputed_tokens += recomputed(view, plan)
        control.lengths.planned(view, plan)
        return plan

    def observe(self, result: StepResult) -> None:
        """Learn from a finished step."""
        select = self._select
        select.control.observe(result)
        seconds = step_seconds(result)
        if seconds is None or self.form == "paper":
            return
        completions = select.control.lengths.completions
        if completions < select.settle_until:
            select.account = Account()
            return
        prompt, decodes = select.account.add(result.tokens, seconds)
        if prompt and decodes and select.control.costs is not None:
            select.mixed_fit.add(prompt, decodes, seconds, select.control.costs)

    # ---- the sound selector

    def _evaluate(self, view: StepView) -> None:
        select, control = self._select, self._select.control
        costs, load = control.costs, control.load
        demand = select.demand.value or 0.0
        if costs is None or load is None:
            return
        predicted = self._predictions(view, costs, load, demand)
        self._measure(costs, load, predicted)
        if demand < DRAIN_GATE:
            if select.mode != "mixed":  # so few requests that every step is bound by reading the weights
                select.switch("mixed", 0)
            return
        # A mode never measured shares the error of the one that was: what lies in the belief or the lengths, not in it.
        shared = select.corrections[select.mode].value or 1.0
        cost = {mode: predicted[mode] * (select.corrections[mode].value or shared) for mode in predicted}
        select.lead = cost["mixed"] / cost["exclusive"] - 1.0
        other: Mode = "exclusive" if select.mode == "mixed" else "mixed"
        gain = cost[select.mode] / cost[other] - 1.0
        first = not select.last_run
        if select.trial_of is not None:
            select.trial_of = None
            select.cooldown = 0
        if select.cooldown > 0:
            select.cooldown -= 1
            if gain < MISTAKE:
                return
        done = control.lengths.completions
        if gain > (0.0 if first else self.margin):
            select.switch(other, 0 if first else min(TRIAL // 2, self.update_every))
            select.cooldown = 0 if first else COOLDOWN
        elif self.explore_every and not first and gain > -self.explore_within:
            # The nearer the two are, the less a trial costs and the more it may tell. A mode never measured rests on
            # the belief alone: it is tried once the first generation is through.
            pause = self.explore_every * min(max(-gain / self.explore_within, NEAR_TIE), 1.0)
            since = done - select.last_run.get(other, -self.explore_every)
            if since >= pause and done >= max(self.window, demand):
                select.switch(other, TRIAL // 2)
                select.trial_of = other
                select.next_at = done + TRIAL

    def _predictions(self, view: StepView, costs: Costs, load: Load, demand: float) -> dict[Mode, float]:
        """Seconds per request that the closed forms expect of each mode."""
        control, limits = self._select.control, view.limits
        budget = float(limits.max_num_batched_tokens)
        alpha_mb, kappa = self._select.mixed_fit.values(costs)
        learned = Costs(costs.alpha_p, costs.beta_p, costs.alpha_d, costs.beta_d, max(alpha_mb, 1e-9), kappa)
        age = control.lengths.age() or load.output / 2
        held = limits.num_blocks * limits.block_size / (load.prompt + age)
        exclusive_n = max(min(demand, control.slots), 2.0)
        mixed_n = max(min(demand, limits.max_num_seqs, held), 2.0)
        theta = min(control.theta, (control.enough or np.inf) / exclusive_n)
        theta = min(max(theta, 1.0 / exclusive_n), 1 - 1e-9)
        return {
            "exclusive": float(1 / exclusive_throughput(theta, exclusive_n, learned, load, budget=budget)),
            "mixed": float(1 / mixed_throughput(mixed_n, learned, load, budget=budget)),
        }

    def _measure(self, costs: Costs, load: Load, predicted: dict[Mode, float]) -> None:
        """Correct the prediction of the mode that ran by what its steps took."""
        select = self._select
        done = select.control.lengths.completions
        if select.mode == "exclusive":
            measured = select.account.exclusive_cost(load)
        else:
            n = max(select.demand.value or 1.0, 1.0)
            decode_weight = costs.beta_d + costs.alpha_d / n
            measured = select.account.overall_cost(load, costs.beta_p, decode_weight)
        if measured is not None and done >= select.settle_until and done > 0:
            ratio = measured / predicted[select.mode]
            select.corrections[select.mode].add(min(max(ratio, 1 / TRUST), TRUST))
            select.last_run[select.mode] = done
            select.account = Account()

    # ---- the paper's selector

    def _evaluate_paper(self, view: StepView) -> None:
        select, control = self._select, self._select.control
        costs, load = control.costs, control.load
        demand = select.demand.value or 0.0
        if costs is None or load is None:
            return
        if select.cooldown > 0:
            select.cooldown -= 1
            return
        if demand < DRAIN_GATE:
            return
        # alpha_mb := alpha_p as in their code; beta_MB is what the belief says of mixed steps at the mean share.
        theirs = Costs(costs.alpha_p, costs.beta_p, costs.alpha_d, costs.beta_d, costs.alpha_p, costs.kappa)
        r = load.decode_share
        beta_mb = exclusive_beta(costs, load) + costs.kappa * r * (1 - r)
        left, right = (float(side) for side in crossover_sides(demand, control.theta, theirs, load, beta_mb))
        if select.mode == "mixed" and left > right + self.delta:
            running, waiting = running_and_waiting(view)
            select.switch("exclusive", 0)
            control.phase.prefilling = running == 0 and waiting > 0
            select.cooldown = COOLDOWN
        elif select.mode == "exclusive" and left < right - STICKY * self.delta:
            select.switch("mixed", 0)
            select.cooldown = COOLDOWN
