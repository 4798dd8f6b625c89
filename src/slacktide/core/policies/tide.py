"""Tide: every step is the one that makes most of its time, as far as the deadlines of running streams leave slack.

Before every step it compares a decode round, prompts alone, prompts beside all decodes and prompts beside those decodes
that cannot wait, by predicted value per predicted second; exclusive or mixed batching is decided step by step. Prompts
that can be on time are found by Moore and Hodgson's algorithm with the decodes' demand taken off; the others wait, and
come back when there is room. What can no longer be on time is served from what is left, and from a reserved share.
Margins are learned per scene from what steps really took. Tenants share by weighted token cost. Derivation:
docs/background/tide.md. Ignores that output lengths could be known one by one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np

from slacktide.core import tide as t
from slacktide.core.fair import Shares, parse_weights
from slacktide.core.pack import pack
from slacktide.core.policies._shared import require_at_least, require_choice, require_share
from slacktide.core.policy import register
from slacktide.core.tide import ACTIONS, BOUNDS, SOURCES, Margins, Store
from slacktide.core.tide_learned import learned
from slacktide.core.types import WAITING, FloatArray, IntArray, Plan, StepResult, StepView

_decide: Any = None
_charge: Any = None


@register("tide")
@dataclass(frozen=True)
class Tide:
    """Nothing has to be set: every part can be switched off, so that each is an arm of an experiment."""

    slo_mode: Literal["deadline", "gap"] = "deadline"
    """How later tokens are judged: by their deadline, or each by its gap to the one before."""
    mixed: bool = True
    """Prompts may run beside all decodes."""
    exclusive: bool = True
    """Prompts may run alone while decodes wait."""
    blocking: bool = True
    """Prompts may run beside only those decodes that cannot wait."""
    demotion: bool = True
    """Prompts that cannot be on time give way (Moore-Hodgson)."""
    eviction: bool = True
    """A request that has missed may lose its KV to a prompt that can be on time."""
    lending: bool = True
    """So may a stream that is so far ahead of its deadlines that it can compute its KV again in time."""
    keep_slack: bool = True
    """In overload prompts that can wait leave the running streams slack for prompts to come that cannot."""
    kv_gate: Literal["auto", "on", "off"] = "auto"
    """Admit only what running requests are expected to leave KV for; auto: in mode gap, and while no live request has a
    TTFT target. With deadlines an early first token is worth a preemption later, which a late request pays for first;
    with gaps whoever is preempted has missed."""
    hold: bool = True
    """Prompts with ample time wait for company."""
    occupancy: bool = True
    """A decode round is worth less while fewer streams run than the load asks for."""
    bias_in_values: bool = True
    """Learned bias corrects values and not only times."""
    size_classes: bool = True
    """The prediction's error is learned by the size of a step too, and not only by its kind."""
    rescue: bool = True
    """A decode round comes first where a stream can just be saved by it."""
    cap_share: float = 0.4
    """Most time of a step, as a share of the tightest recent TTFT target, for prompts that arrive meanwhile."""
    urgency: float = 4.0
    """Prompts run alone where one of them has less than this many decode rounds to spare; 0 leaves it to value."""
    deviations: float | None = None
    """Mean deviations of the prediction's error that are added as a margin; none takes 8, and 12 in mode gap, where one
    step in thousands that takes longer than predicted makes every running stream miss."""
    supply: float = 0.9
    """Share of the time that is counted on while nobody misses."""
    least_supply: float = 0.6
    """The same when a tenth of the requests misses."""
    late_every: int = 8
    """Late decodes run at least every so many steps as far as there is room; 0 never for that reason."""
    late_share: float = 0.02
    """Share of the engine's time that is reserved for late requests; 0 reserves none."""
    sizes: int = 24
    """Step sizes compared beside all decodes while nobody else can be admitted; 1 takes the largest that fits."""
    saturation: float = 0.01
    """A smaller step is taken if it loses at most this share of value per second."""
    seats: bool = True
    """Prompts must find a seat in time too."""
    memory: bool = True
    """Prompts must find KV tokens in time too, at the pace at which finished requests give them back."""
    backfill: bool = False
    """Fill a step behind the prompts that are on time with others."""
    bypass: int = 64
    """Requests that may be admitted before an on-time prompt that lacks KV blocks."""
    max_gap: float | None = None
    """Most seconds between two tokens of a stream, whatever its deadlines leave; none has no such bound."""
    reject: Literal["off", "shed", "demote"] = "off"
    """A waiting prompt whose first token cannot be on time any more, even alone: off serves it from what is left, shed
    ends it (the host answers), demote marks it as relegated."""
    expected_output_tokens: int = 256
    """Output tokens a request is expected to want, until some have ended."""
    fairness: bool = True
    """Several tenants share by token cost: where requests are equally urgent, and in who gives way in overload."""
    tenant_weights: str = ""
    """Weights of tenants by name, as search:2+batch:0.5; who is not named has 1."""
    _shares: Shares = field(init=False, repr=False, compare=False)
    _store: Store = field(default_factory=Store, init=False, repr=False, compare=False)
    _margins: Margins = field(default_factory=Margins, init=False, repr=False, compare=False)
    _clock: dict[str, Any] = field(default_factory=dict[str, Any], init=False, repr=False, compare=False)
    _parameters: FloatArray = field(init=False, repr=False, compare=False)
    steerable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Raise ValueError naming the parameter that is out of its range."""
        require_choice(
            self, slo_mode=("deadline", "gap"), reject=("off", "shed", "demote"), kv_gate=("auto", "on", "off")
        )
        require_at_least(self, 0, "deviations", "late_every", "bypass", "urgency")
        require_at_least(self, 1, "sizes", "expected_output_tokens")
        require_at_least(self, 1e-3, "cap_share", "max_gap", "supply", "least_supply")
        require_share(self, "late_share", "saturation")
        object.__setattr__(self, "_parameters", self._as_array())
        object.__setattr__(self, "_shares", Shares(parse_weights(self.tenant_weights)))

    def _as_array(self) -> FloatArray:
        p = np.zeros(t.PARAMETER_SIZE)
        values: dict[int, float] = {
            t.CAP_SHARE: self.cap_share, t.DEVIATIONS: self._deviations(), t.KAPPA_HIGH: self.supply,
            t.KAPPA_LOW: min(self.least_supply, self.supply), t.LATE_EVERY: self.late_every,
            t.LATE_SHARE: self.late_share, t.USE_MIXED: self.mixed, t.USE_EXCLUSIVE: self.exclusive,
            t.USE_BLOCKING: self.blocking, t.USE_DEMOTION: self.demotion, t.USE_EVICTION: self.eviction,
            t.USE_LENDING: self.lending, t.USE_KEEPING: self.keep_slack,
            t.USE_KV_GATE: self.kv_gate == "on", t.USE_HOLD: self.hold, t.USE_OCCUPANCY: self.occupancy,
            t.USE_BIAS_IN_VALUES: self.bias_in_values, t.GAP_MODE: self.slo_mode == "gap", t.SIZES: self.sizes,
            t.SATURATION: self.saturation, t.BYPASS: self.bypass, t.SEATS: self.seats,
            t.MAX_GAP: math.inf if self.max_gap is None else self.max_gap, t.BACKFILL: self.backfill,
            t.USE_SIZES: self.size_classes, t.USE_RESCUE: self.rescue, t.MEMORY: self.memory,
            t.PRIOR_OUTPUT: self.expected_output_tokens, t.URGENCY: self.urgency,
        }  # fmt: skip
        for slot, value in values.items():
            p[slot] = float(value)
        return p

    def _deviations(self) -> float:
        if self.deviations is not None:
            return self.deviations
        return 12.0 if self.slo_mode == "gap" else 8.0

    def plan(self, view: StepView) -> Plan:
        """One step."""
        global _decide, _charge
        if _decide is None:
            from slacktide.core.kernels_fair import charge
            from slacktide.core.kernels_tide_step import decide

            _decide, _charge = decide, charge
        store, clock, live = self._store, self._clock, view.live
        n = live.index.size
        store.fit(n)
        if clock.get("belief") is not view.latency:  # a new fit: its prices are not known yet
            if "belief" in clock:
                self._margins.forget()  # they are errors of the belief before
            clock["belief"] = view.latency
            store.state[t.KNEE] = 0.0
        if self.kv_gate == "auto":
            gate = self.slo_mode == "gap" or not np.isfinite(live.slo_ttft).any()
            self._parameters[t.USE_KV_GATE] = float(gate)
        # With async scheduling the step in flight ends first: what is decided now starts then.
        shares = self._shares.of(view.tenants if self.fairness else ())
        start = view.start
        count, victims, scene, seconds = _decide(
            live.columns[0], live.columns[1], n, view.now, start, np.array(view.limits, dtype=np.int64),
            view.latency.packed, self._parameters, store.state, self._margins.learned, store.ring, store.memory,
            store.remembered, store.spare, store.finished, store.ints, store.floats, store.shape, store.plan, store.why,
            shares,
        )  # fmt: skip
        store.memory, store.spare, store.remembered = store.spare, store.memory, n
        store.finished = _NO_ROWS
        rows, tokens = store.plan[0, :count].copy(), store.plan[1, :count].copy()
        if not count and not victims:
            return self._anything(view)
        if shares.shape[1]:
            _charge(live.columns[0], rows, tokens, store.ints[t.I_KIND], store.ints[t.I_REMAINING], shares)
        total = int(tokens.sum())
        if count:
            self._margins.planned(int(scene), float(seconds), int(count), total)
        hopeless = self._hopeless(view, rows) if self.reject != "off" else _NO_ROWS
        return Plan(
            rows, tokens, store.plan[2, :victims].copy(), token_cap=total if count else None,
            rejected=hopeless if self.reject == "shed" else _NO_ROWS,
            relegated=hopeless if self.reject == "demote" else _NO_ROWS,
            predicted_step_time=float(store.why[t.W_TIME]) if count else None, why=self._why(hopeless.size),
        )  # fmt: skip

    def _hopeless(self, view: StepView, rows: IntArray) -> IntArray:
        """Waiting prompts without output, not in the plan, that are late or would be if they ran alone at once."""
        store, live, n = self._store, view.live, view.live.index.size
        role = store.ints[t.I_ROLE, :n]
        alone = store.floats[t.F_SERVICE, :n] > store.floats[t.F_SLACK, :n]
        lost = (role == t.LATE_PREFILL) | ((role == t.DEMOTED) & alone)
        lost &= (live.status == WAITING) & (live.num_output_tokens == 0) & (live.relegated == 0)
        lost[rows] = False
        return np.flatnonzero(lost)

    def _anything(self, view: StepView) -> Plan:
        """No candidate could run (blocks, or rows whose end is in flight): vLLM's own order always goes on."""
        plan = pack(view)
        return Plan(plan.rows, plan.num_scheduled_tokens, plan.preempted, why={"action": "fallback"})

    def observe(self, result: StepResult) -> None:
        """Learn from what a step took and who finished."""
        self._margins.observe(result)
        if result.finished.size:
            self._store.finished = np.concatenate((self._store.finished, result.finished.astype(np.int64)))

    def learned(self) -> dict[str, Any]:
        """What it learned so far, for people: see `tide_learned.learned`."""
        return learned(self._store, self._margins.learned, self._deviations(), self._shares)

    def _why(self, hopeless: int) -> dict[str, Any]:
        w = self._store.why.tolist()
        tightest = float(self._store.state[t.TIGHTEST])
        options = {
            name: (w[t.W_ACTIONS + 2 * k], w[t.W_ACTIONS + 2 * k + 1])
            for k, name in enumerate(ACTIONS)
            if w[t.W_ACTIONS + 2 * k] > 0
        }
        return {
            "action": ACTIONS[int(w[t.W_ACTION])], "options": options, "bound_by": BOUNDS[int(w[t.W_BOUND])],
            "prefill": int(w[t.W_PREFILL]), "source": SOURCES[int(w[t.W_SOURCE])],
            "on_time_decodes": int(w[t.W_DECODES]),
            "late_decodes": int(w[t.W_LATE_DECODES]), "on_time_prompts": int(w[t.W_ON_TIME]),
            "accepted": int(w[t.W_ACCEPTED]), "late_prompts": int(w[t.W_LATE]), "round": w[t.W_ROUND],
            "next_due": w[t.W_S1], "due_after": w[t.W_S2], "cap": w[t.W_CAP], "pressed": bool(w[t.W_PRESS]),
            "held": bool(w[t.W_HOLD]), "predicted_ttft": w[t.W_TTFT],
            "retry_after": max(w[t.W_TTFT] - tightest, 0.0), "hopeless": hopeless,
        }  # fmt: skip


_NO_ROWS: IntArray = np.empty(0, dtype=np.int64)
