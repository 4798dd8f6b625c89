"""EB(k): exclusive batching with a fixed threshold; prompts and decodes never share a step.

Decode until k of the N slots are free, then refill them with prompt-only steps under the token budget. Source:
"Threshold-Based Exclusive Batching for LLM Inference" (arXiv 2606.00516), section 3; k = 1 is vLLM v0 at saturation.
When few requests wait, the ratio form `fillable (N - k) >= decodes k` turns it into continuous batching. A refill
leaves a share of the KV blocks free for the growth of the running ones. With SLOs, streams and first tokens that are
about to be late cut a phase short (TTFT and TBT; end-to-end targets are ignored).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from slacktide.core.policies._exclusive import KV_GUARD, Form, Phase, Rule, plan_exclusive
from slacktide.core.policies._shared import require_at_least, require_choice, require_share
from slacktide.core.policy import register
from slacktide.core.types import Plan, StepView

DEFAULT_THETA = 0.1
"""Published calibrations give optimal thresholds of 0.01 to 0.13."""


@register("eb")
@dataclass(frozen=True)
class Eb:
    """At most one of k and theta is given."""

    theta: float | None = None
    """Share of the slots that must be free before a refill; none takes 0.1, unless k is given."""
    k: int | None = None
    """Slots that must be free before a refill, instead of theta."""
    max_num_seqs: int | None = None
    """N, the slots; none takes the engine's."""
    kv_guard: float = KV_GUARD
    """Share of the KV blocks that a refill leaves free (paper: less free than that, and no refill begins)."""
    form: Form = "sound"
    """sound: N is what slots and free KV allow; paper: N is the configured number, as in the authors' code."""
    _phase: Phase = field(default_factory=Phase, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise ValueError naming the parameter that is out of its range."""
        require_at_least(self, 1, "k", "max_num_seqs")
        require_share(self, "theta", "kv_guard")
        require_choice(self, form=("sound", "paper"))
        if self.k is not None and self.theta is not None:
            raise ValueError("k and theta are both given: expected one of them")

    def plan(self, view: StepView) -> Plan:
        """One step: prompts or decodes."""
        slots = view.limits.max_num_seqs if self.max_num_seqs is None else self.max_num_seqs
        slots = min(slots, view.limits.max_num_seqs)
        if self.k is not None:
            theta = min(self.k, slots) / slots
        else:
            theta = DEFAULT_THETA if self.theta is None else self.theta
        # k = N means "wait until nobody decodes", which the ratio form reaches with theta just below 1.
        rule = Rule(slots, min(theta, 1 - 1e-9), kv_guard=self.kv_guard, form=self.form)
        return plan_exclusive(view, self._phase, rule)
