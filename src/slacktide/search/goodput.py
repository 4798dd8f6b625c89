"""Goodput: the highest request rate at which a policy still meets the SLO of (by default) 99 % of all arrivals.

Method. For each policy and seed the rate is bisected geometrically. Random numbers are common: a seed gives the same
requests and the same pattern of arrivals at every rate and for every policy; only the time between arrivals is scaled.

- Bracket: from a start the rate is doubled while the target is met, or halved while it is missed. The first seed
  starts at the trace's own rate, or, with random arrivals, at 16 times the rate of a server that takes one request
  after the other; the others start at the first seed's answer, with steps of 1.1, 1.1^2, ... up to 2 (`HINTED_STEP`).
- Bisection at sqrt(low * high) until high / low <= 1 + resolution. The seed's answer is low: the target was met there.
- The policy's answer is the mean of the seeds' answers. Its interval is mean(low) - h .. mean(high) + h with
  h = t(0.975, S - 1) * sd / sqrt(S): Student's 95 % interval over S seeds, widened by what bisection left open. With
  one seed it is low .. high: the search alone.
- Seeds: with random arrivals, seed s draws other arrivals (and lengths). A trace's own times are one realisation, so
  seed s replays it from s / S of its span on, wrapped around; its bursts stay, so these seeds differ less than
  days of traffic do.
- Early stop: a run ends once so many requests have missed for certain that the target cannot be met any more. The
  verdict is that of the whole run; only the attainment is then an upper bound (`stopped`).

Special cases: missed at 2^-10 of the start (or of the one-by-one rate, whichever is lower): rate 0. Met even when all
requests arrive at once: not limited by the rate, rate None. Either spares the other seeds. Attainment need not fall
monotonically with the rate; the first seed looks 10 % below and above its answer, and a note tells when that disagrees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from slacktide.core.spec import PolicySpec
from slacktide.errors import InputError
from slacktide.search.evaluate import NEEDS_SLO, Evaluation, Task, evaluate
from slacktide.search.pool import Store, key_of, run_tasks
from slacktide.search.scenario import Scenario, Setup, build_policy, isolated_service, prepare
from slacktide.search.truth import outside_notes, profile_facts
from slacktide.sim.engine import EngineConfig
from slacktide.workload.arrivals import parse_arrival
from slacktide.workload.load import load_trace
from slacktide.workload.requests import MAX_RATE

TARGET, SEEDS, RESOLUTION = 0.99, 3, 0.02
CONFIDENCE = 0.95
LOWEST = 2.0**-10
"""Share of the start below which the rate counts as 0: at a thousandth of it requests hardly ever meet."""
HINTED_STEP = 1.1
"""First step from another seed's answer: seeds seldom differ by more, and a narrow bracket saves three runs."""
START = 16
"""Times the one-by-one rate: continuous batching serves tens at a time. Too high costs little: such runs stop early."""
DOUBLINGS = 4
"""Steps up before all requests at once are tried: that run has no early stop, so it should not come first."""
PROBE = 1.1
"""How far from the answer the first seed looks for a second crossing: well beyond the resolution."""


@dataclass(frozen=True, slots=True)
class Bracket:
    """The target is met at `low` and missed at `high` (requests/s). low 0: never met; low infinite: always met."""

    low: float
    high: float


def bisect(
    start: float, lowest: float, resolution: float, *, step: float = 2.0, probe: bool = False
) -> Generator[float, bool, Bracket]:
    """The search of one seed: yields rates, is sent whether the target was met there, returns the bracket.

    `step`: first factor of the bracket's search, squared each time up to 2. `probe`: look beyond the answer too.
    """
    low, high, rate, ups = 0.0, math.inf, start, 0
    while low == 0 or high == math.inf:
        if (yield rate):
            low = rate
        else:
            high = rate
        if low == 0 and high <= lowest:
            return Bracket(0.0, high)
        if high == math.inf:
            ups += 1
            if low >= MAX_RATE or (ups == DOUBLINGS and (yield math.inf)):
                return Bracket(math.inf, math.inf)
        rate = max(high / step, lowest) if low == 0 else min(low * step, MAX_RATE)
        step = min(step * step, 2.0)
    while high / low > 1 + resolution:
        middle = math.sqrt(low * high)
        if (yield middle):
            low = middle
        else:
            high = middle
    if probe:
        yield low / PROBE
        yield min(high * PROBE, MAX_RATE)
    return Bracket(low, high)


@dataclass(slots=True)
class _Search:
    """The search of one policy and seed, driven from outside: `advance` gives the next task, or None at the end."""

    base: Scenario
    spec: PolicySpec
    target: float
    path: Generator[float, bool, Bracket]
    store: Store
    evaluations: list[Evaluation] = field(default_factory=list)
    bracket: Bracket | None = None

    def advance(self, found: Evaluation | None) -> Task | None:
        """Take the outcome of the last task. What the store knows is not asked again."""
        while True:
            try:
                if found is None:
                    rate = next(self.path)
                else:
                    self.evaluations.append(found)
                    rate = self.path.send(found.attainment >= self.target)
            except StopIteration as end:
                self.bracket = end.value
                return None
            task = Task(replace(self.base, rate=rate), self.spec, self.target)
            known = self.store.get(self._key(task))
            if known is None:
                return task
            found = Evaluation(
                rate, known["attainment"], known["stopped"], known["wall_time"], known.get("steps_outside")
            )

    def record(self, task: Task, found: Evaluation) -> None:
        """Put an outcome into the store, readable by people too."""
        self.store.put(
            self._key(task),
            {"policy": self.spec.label, "seed": self.base.seed, "rotate": self.base.rotate, "rate": found.rate,
             "attainment": found.attainment, "stopped": found.stopped, "wall_time": found.wall_time,
             "steps_outside": found.steps_outside},
        )  # fmt: skip

    def _key(self, task: Task) -> str:
        return key_of(task.scenario, task.spec, target=self.target, search="goodput")


def find_goodput(
    scenario: Scenario,
    specs: list[PolicySpec],
    *,
    target: float = TARGET,
    seeds: int = SEEDS,
    resolution: float = RESOLUTION,
    jobs: int = 1,
    store: Store | None = None,
    on_done: Callable[[int], None] | None = None,
) -> list[dict[str, Any]]:
    """One record per policy, in their order (see the top of this file). The same for any number of `jobs`.

    `scenario.rate` is where to start, when given. `on_done` is told how many of the len(specs) * seeds searches ended.
    Raises InputError for a scenario without an SLO, and for arrivals that have no rate.
    """
    _check(scenario, target, seeds, resolution)
    known = Store() if store is None else store
    timed, notes = _has_times(scenario), []
    if not timed and scenario.burstiness is None and (scenario.arrival or "trace") == "trace":
        scenario = replace(scenario, arrival="poisson")
        notes.append(f"{scenario.trace} has no arrival times: Poisson arrivals")
    setups = [_setup(scenario, spec, timed) for spec in specs]  # all input errors before the first run
    starts: dict[str, tuple[float, float]] = {}
    searches: dict[tuple[int, int], _Search] = {}

    def begin(p: int, s: int, hint: float | None) -> _Search:
        own = repr(sorted(specs[p].engine.items()))
        if own not in starts:
            starts[own] = _start(scenario, setups[p], timed)
        start, lowest = starts[own]
        base = replace(scenario, seed=scenario.seed + s, rotate=s / seeds if timed else 0.0)
        path = (
            bisect(start, lowest, resolution, probe=True)
            if hint is None
            else bisect(hint, lowest, resolution, step=HINTED_STEP)
        )
        searches[p, s] = _Search(base, specs[p], target, path, known)
        return searches[p, s]

    def follow(p: int, s: int, found: Evaluation | None) -> Iterator[tuple[tuple[int, int, Task], Task]]:
        """Tasks that an outcome leads to: the next of this search, or, at the first seed's end, the other seeds'."""
        search = searches[p, s]
        task = search.advance(found)
        if task is not None:
            yield (p, s, task), task
            return
        assert search.bracket is not None
        others = range(1, seeds) if s == 0 else range(0)
        skipped = not 0 < search.bracket.low < math.inf
        if on_done is not None:
            on_done(1 + len(others) if skipped else 1)
        for other in () if skipped else others:
            begin(p, other, search.bracket.low)
            yield from follow(p, other, None)

    def then(key: tuple[int, int, Task], found: Evaluation) -> list[tuple[tuple[int, int, Task], Task]]:
        p, s, task = key
        searches[p, s].record(task, found)
        return list(follow(p, s, found))

    first = []
    for p in range(len(specs)):
        begin(p, 0, None)
        first += list(follow(p, 0, None))
    run_tasks(evaluate, first, then, min(jobs, len(specs) * seeds))
    return [
        _record(scenario, spec, setup, [searches[p, s] for s in range(seeds) if (p, s) in searches], resolution, notes)
        for p, (spec, setup) in enumerate(zip(specs, setups, strict=True))
    ]


def _check(scenario: Scenario, target: float, seeds: int, resolution: float) -> None:
    kind = parse_arrival(scenario.arrival or "trace").kind
    if kind == "closed":
        raise InputError("a closed loop has no rate to search: vary its users instead, with 'slacktide sweep'")
    if kind == "ramp":
        raise InputError("a ramp has its own rates, none to search: use --arrival trace, poisson, gamma or onoff")
    if not 0 < target <= 1:
        raise InputError(f"target {target}: expected a share above 0, at most 1")
    if seeds < 1:
        raise InputError(f"seeds {seeds}: expected at least 1")
    if not 1e-4 <= resolution <= 1:
        raise InputError(f"resolution {resolution}: expected 0.0001 to 1")


def _has_times(scenario: Scenario) -> bool:
    """The arrivals are the trace's own."""
    if scenario.burstiness is not None or parse_arrival(scenario.arrival or "trace").kind != "trace":
        return False
    return load_trace(scenario.trace, scenario.num_prompts, scenario.seed).arrival_time is not None


def _setup(scenario: Scenario, spec: PolicySpec, timed: bool) -> Setup:
    """The scenario at its start, to read lengths, SLO and engine from. Raises InputError."""
    setup = prepare(replace(scenario, rate=None if timed else 1.0), spec.engine)  # random arrivals: any rate does
    build_policy(spec, scenario.engine)
    workload = setup.workload
    if len(workload) < 2 or (timed and not workload.span > 0):
        raise InputError(f"{workload.name}: {len(workload)} request(s) over {workload.span:g} s have no rate to scale")
    if not any(np.isfinite(column).any() for column in (workload.slo_ttft, workload.slo_tbt, workload.slo_e2e)):
        raise InputError(f"no request has an SLO: {NEEDS_SLO}")
    return setup


def _start(scenario: Scenario, setup: Setup, timed: bool) -> tuple[float, float]:
    """(where to start, where to give up), requests/s."""
    workload = setup.workload
    service = isolated_service(setup.profile.latency, setup.config.max_num_batched_tokens)
    one_by_one = 1.0 / float(service(workload.num_prompt_tokens, workload.num_output_tokens).mean())
    start = workload.rate if timed else START * one_by_one
    if scenario.rate is not None and math.isfinite(scenario.rate):
        start = scenario.rate
    return start, min(start, one_by_one) * LOWEST


def _record(
    scenario: Scenario,
    spec: PolicySpec,
    setup: Setup,
    searches: list[_Search],
    resolution: float,
    notes: list[str],
) -> dict[str, Any]:
    """What is told of a policy."""
    target, brackets = searches[0].target, [search.bracket for search in searches if search.bracket is not None]
    rate, low, high = interval(brackets)
    outside = _outside_at_answer(searches, brackets)
    return {
        "policy": spec.name,
        "label": spec.label,
        "oracle": bool(getattr(spec.cls, "oracle", False)),
        "parameters": spec.all_parameters(),
        **profile_facts(setup.profile),
        "seed": scenario.seed,
        "trace": setup.workload.name,
        "num_prompts": len(setup.workload),
        "arrival": scenario.arrival or "trace",
        "slo": scenario.slo,
        "slo_mode": scenario.slo_mode,
        "late_tolerance": scenario.late_tolerance,
        "target": target,
        "resolution": resolution,
        "rate": rate,
        "rate_low": low,
        "rate_high": high,
        "confidence": CONFIDENCE if len(brackets) > 1 else None,
        "seeds": [
            {"seed": s.base.seed, "rotate": s.base.rotate, "rate": _finite(b.low), "rate_high": _finite(b.high)}
            for s, b in zip(searches, brackets, strict=True)
        ],
        "evaluations": [
            {"seed": s.base.seed, "rate": e.rate, "attainment": e.attainment, "stopped": e.stopped,
             "wall_time": e.wall_time, "steps_outside": e.steps_outside}
            for s in searches for e in s.evaluations
        ],
        "steps_outside": outside,
        "wall_time": math.fsum(e.wall_time for s in searches for e in s.evaluations),
        "engine": {name: getattr(setup.config, name) for name in EngineConfig.__dataclass_fields__},
        "notes": [*setup.workload.notes, *notes, *_notes(searches, brackets), *outside_notes(outside, spec.label)],
    }  # fmt: skip


def _outside_at_answer(searches: list[_Search], brackets: list[Bracket]) -> float | None:
    """The largest share of steps beyond the profile's measurements among the runs that the answer rests on."""
    shares = [
        evaluation.steps_outside
        for search, bracket in zip(searches, brackets, strict=True)
        for evaluation in search.evaluations
        if evaluation.rate in (bracket.low, bracket.high) and evaluation.steps_outside is not None
    ]
    return max(shares, default=None)


def _finite(rate: float) -> float | None:
    return rate if math.isfinite(rate) else None


def interval(brackets: list[Bracket]) -> tuple[float | None, float | None, float | None]:
    """(rate, low, high) of a policy from its seeds' brackets; None where the rate does not limit it."""
    lows, highs = np.array([b.low for b in brackets]), np.array([b.high for b in brackets])
    if np.isinf(lows).any():
        finite = lows[np.isfinite(lows)]
        return None, float(finite.min()) if finite.size else None, None
    rate, half = float(lows.mean()), 0.0
    if lows.size > 1:
        from scipy.special import stdtrit  # Student's t quantile; scipy.stats has the same, a second of import later

        quantile = float(stdtrit(lows.size - 1, (1 + CONFIDENCE) / 2))
        half = quantile * float(lows.std(ddof=1)) / math.sqrt(lows.size)
    return rate, max(rate - half, 0.0), float(highs.mean()) + half


def _notes(searches: list[_Search], brackets: list[Bracket]) -> list[str]:
    notes = []
    for search, bracket in zip(searches, brackets, strict=True):
        name = f"{search.spec.label}, seed {search.base.seed}"
        if bracket.low == 0:
            notes.append(f"{name}: the target is missed even at {bracket.high:.3g} requests/s")
        elif bracket.low == math.inf:
            notes.append(f"{name}: not limited by the rate: the target is met even when all requests arrive at once")
        met = [e.rate for e in search.evaluations if e.attainment >= search.target]
        missed = [e.rate for e in search.evaluations if e.attainment < search.target]
        if met and missed and min(missed) < max(met):
            notes.append(
                f"{name}: attainment does not fall steadily with the rate: {min(missed):.4g} requests/s misses the "
                f"target, {max(met):.4g} meets it; the answer is one crossing of several"
            )
    return notes
