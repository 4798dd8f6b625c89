"""One run of a search: does a policy reach the target at this rate? Ends early once it cannot any more."""

from __future__ import annotations

import math
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from slacktide.core.spec import PolicySpec
from slacktide.core.types import BoolArray
from slacktide.errors import InputError
from slacktide.metrics.log import CUT_OFF, RunLog
from slacktide.metrics.slo import judge
from slacktide.search.scenario import Scenario, build_policy, prepare
from slacktide.search.truth import as_clients_see, at_the_engine, steps_outside
from slacktide.sim.engine import simulate

NEEDS_SLO = "goodput needs an SLO, for example --slo ttft:500,tbt:50"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One run of a search. `attainment` is an upper bound when the run was `stopped`. wall_time in seconds.

    `steps_outside`: share of its steps beyond what the profile was measured on; None where nobody can tell.
    """

    rate: float
    attainment: float
    stopped: bool
    wall_time: float
    steps_outside: float | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """What a worker is asked: one run, and whether it reaches the target."""

    scenario: Scenario
    spec: PolicySpec
    target: float
    early_stop: bool = True


def evaluate(task: Task) -> Evaluation:
    """Simulate and judge; the same verdict as `run_policy`, without the rest of its record. Raises InputError."""
    began = perf_counter()
    scenario, spec, target = task.scenario, task.spec, task.target
    setup = prepare(scenario, spec.engine)
    n, bound = len(setup.workload), 1.0

    def hopeless(log: RunLog) -> bool:
        nonlocal bound
        log = as_clients_see(log, setup.workload, setup.profile)
        bound = (n - int(certainly_missed(log, scenario.slo_mode, scenario.late_tolerance).sum())) / n
        return bound < target

    result = simulate(
        at_the_engine(setup.workload, setup.profile), build_policy(spec, scenario.engine), setup.profile.latency,
        setup.config, belief=setup.belief,
        max_concurrency=scenario.max_concurrency, stop=hopeless if task.early_stop else None,
    )  # fmt: skip
    attainment: float | None = bound
    if not result.stopped:
        log = as_clients_see(result.log, setup.workload, setup.profile)
        attainment = judge(log, scenario.slo_mode, scenario.late_tolerance).attainment()
    if attainment is None:
        raise InputError(f"{setup.workload.name}: no request can be judged: {NEEDS_SLO}")
    outside = steps_outside(setup.profile, result.log)
    return Evaluation(float(scenario.rate or math.nan), attainment, result.stopped, perf_counter() - began, outside)


def certainly_missed(log: RunLog, mode: str = "deadline", tolerated_late_share: float = 0.0) -> BoolArray:
    """bool[n]: requests of a log so far whose verdict is "missed", whatever follows.

    The deadlines of an open request that have passed decide, except those of single tokens where a share of late
    tokens is tolerated: the tokens to come may dilute it.
    """
    verdict = judge(log, mode, tolerated_late_share)
    passed = verdict.ttft | verdict.e2e
    if tolerated_late_share == 0:
        passed = passed | verdict.tbt
    return np.asarray(np.where(log.end_reason == CUT_OFF, passed, verdict.missed))
