"""EB(k) whose threshold and slots follow the load: the online controller of the paper's section 3.4.

Every 100 completions: mean prompt and output from sliding windows, step costs from the belief, then theta (eq. 3) and
the memory-safe number of slots, which shrinks at once and grows gradually. Source: arXiv 2606.00516. sound (default):
eq. (3) with p0 = 1 / mean output, capped so that a refill fits one step; slots by the normal-quantile rule; below
`mixed_below` requests in the system steps are mixed, as waiting for slots then costs more than mixing. paper: hazard
fitted to the window, eq. (5) with the authors' guards, slots by eq. (6), the authors' KV guard and smoothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from slacktide.core.exclusive import Costs, Load, optimal_threshold, paper_threshold
from slacktide.core.exclusive_hazard import Ema, fit_linear_hazard
from slacktide.core.exclusive_memory import mean_age, memory_safe_slots, paper_slots
from slacktide.core.policies._exclusive import (
    KV_GUARD,
    PAPER_GUARD,
    Form,
    Phase,
    Rule,
    plan_exclusive,
    plan_mixed,
)
from slacktide.core.policies._exclusive_learning import (
    MIN_SAMPLES,
    Lengths,
    believed_costs,
    running_and_waiting,
)
from slacktide.core.policies._shared import require_at_least, require_choice, require_share
from slacktide.core.policy import register
from slacktide.core.types import Plan, StepResult, StepView

GROWTH = 0.1
"""Share by which the slots may grow at an update."""
PAPER_START = 0.70
"""The authors' threshold before the first update."""
PAPER_SMOOTHING = 0.3
"""Weight of a new theta in the authors' average."""


class Controller:
    """State of the online controller: windows, threshold, slots."""

    def __init__(self, window: int, form: Form, kv_guard: float) -> None:
        self.lengths = Lengths(window)
        self.form: Form = form
        self.kv_guard = kv_guard
        self.phase = Phase()
        self.theta = PAPER_START if form == "paper" else 0.0
        self.slots = 0
        self.enough: int | None = None
        self.costs: Costs | None = None
        self.load: Load | None = None
        self.updated_at = 0
        self._theta_average = Ema(PAPER_SMOOTHING)

    def refresh(self, view: StepView, update_every: int, max_num_seqs: int) -> bool:
        """Update when it is time; True when it did."""
        done = self.lengths.completions
        if self.costs is not None and done - self.updated_at < update_every:
            return False
        first = self.costs is None
        self.updated_at = done
        self.load = load = self.lengths.load(view)
        capacity = float(view.limits.num_blocks * view.limits.block_size)
        running, waiting = running_and_waiting(view)
        n = min(running + waiting, max_num_seqs)
        self.costs = costs = believed_costs(view, load, max(n, 1))
        if self.form == "paper":
            self._paper_update(costs, load, capacity, max_num_seqs, n)
            return True
        self.theta = min(optimal_threshold(costs, load), 0.99)
        self.enough = max(int(view.limits.max_num_batched_tokens / load.prompt), 1)
        age, share = self.lengths.age(), mean_age(self.theta, 1.0)  # after a refill, relative to just any moment
        safe = memory_safe_slots(
            capacity,
            load,
            self.theta,
            prompt_variance=self.lengths.prompt_variance(),
            age=None if age is None else age * share,
        )
        target = min(safe, max_num_seqs)
        self.slots = target if first or target < self.slots else min(target, self.slots + _step(self.slots))
        return True

    def _paper_update(self, costs: Costs, load: Load, capacity: float, max_num_seqs: int, n: int) -> None:
        if len(self.lengths.outputs) < MIN_SAMPLES:
            self.slots = max_num_seqs
            return
        p0, eta = fit_linear_hazard(np.fromiter(self.lengths.outputs, dtype=np.int64))
        theta0 = paper_threshold(costs, n, p0, 0.0, load.output)
        self.theta = self._theta_average.add(paper_threshold(costs, n, p0, eta, load.output))
        target = min(paper_slots(capacity, load, theta0, max(p0, 1.0 / load.output)), max_num_seqs)
        self.slots = target if target < self.slots else min(target, self.slots + _step(self.slots))
        self.kv_guard = float(np.clip(self.slots * load.output * 0.5 / capacity, *PAPER_GUARD))

    def rule(self) -> Rule:
        """The rule of the phase machine now."""
        return Rule(max(self.slots, 1), self.theta, self.enough, self.kv_guard, self.form)

    def observe(self, result: StepResult) -> None:
        """Learn the lengths of what finished."""
        self.lengths.finished(result.finished)


def _step(slots: int) -> int:
    return max(int(GROWTH * slots), 1)


@register("eb-adaptive")
@dataclass(frozen=True)
class EbAdaptive:
    """Threshold and slots are computed; the parameters bound them."""

    form: Form = "sound"
    """sound: corrected formulas; paper: those printed, with the guards of the authors' code."""
    max_num_seqs: int | None = None
    """Most slots; none takes the engine's."""
    window: int = 500
    """W_O and W_L: finished and admitted requests that the estimates rest on."""
    update_every: int = 100
    """Completions between two updates."""
    kv_guard: float = KV_GUARD
    """Share of the KV blocks that a refill leaves free (paper: computed)."""
    mixed_below: int = 64
    """Requests in the system below which steps are mixed (sound form); 0 never mixes."""
    _control: Controller = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise ValueError naming the parameter that is out of its range."""
        require_at_least(self, 1, "max_num_seqs", "window", "update_every")
        require_at_least(self, 0, "mixed_below")
        require_share(self, "kv_guard")
        require_choice(self, form=("sound", "paper"))
        object.__setattr__(self, "_control", Controller(self.window, self.form, self.kv_guard))

    def plan(self, view: StepView) -> Plan:
        """One step: prompts or decodes (or both, at low load)."""
        control = self._control
        most = view.limits.max_num_seqs if self.max_num_seqs is None else self.max_num_seqs
        control.refresh(view, self.update_every, min(most, view.limits.max_num_seqs))
        if self.form == "sound" and view.live.index.size < self.mixed_below:
            plan = plan_mixed(view)
        else:
            plan = plan_exclusive(view, control.phase, control.rule())
        control.lengths.planned(view, plan)
        return plan

    def observe(self, result: StepResult) -> None:
        """Learn from a finished step."""
        self._control.observe(result)
