"""eb-plus: chooses the better mode, learns what its steps cost, explores cheaply, and holds still otherwise."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from slacktide.core.exclusive import Load
from slacktide.core.latency import AffineModel
from slacktide.core.policies._exclusive import plan_mixed
from slacktide.core.policies._exclusive_learning import Account, MixedFit
from slacktide.core.policies.eb_adaptive import EbAdaptive
from slacktide.core.policies.eb_plus import EbPlus
from slacktide.core.policies.vllm_v1 import VllmV1
from slacktide.core.types import Plan, StepView
from slacktide.metrics.log import RunLog
from slacktide.sim.engine import EngineConfig, simulate
from slacktide.workload.requests import Workload

from .test_eb_adaptive import COSTS, LARGE, MODEL, load_of

# Without interference mixed batching always wins; with it EB wins from about 110 requests on.
CALM = AffineModel(0.005, 5e-5, 0.010, 1e-4, 0.010, 0.0)


def run(policy: Any, load: Workload, truth: AffineModel = MODEL, **options: Any) -> RunLog:
    return simulate(load, policy, truth, options.pop("config", LARGE), **options).log


def modes(policy: EbPlus, load: Workload, truth: AffineModel = MODEL, **options: Any) -> tuple[RunLog, list[str]]:
    seen: list[str] = []

    def watch(view: StepView, plan: Plan) -> None:
        seen.append(policy._select.mode)

    return run(policy, load, truth, on_step=watch, **options), seen


@pytest.mark.parametrize("truth", [MODEL, CALM], ids=["interference", "calm"])
@pytest.mark.parametrize("concurrency", [32, 128, 512])
def test_within_1_percent_of_the_better_mode(truth: AffineModel, concurrency: int):
    load = load_of(2500, 512, 256)
    best = min(
        run(policy, load, truth, max_concurrency=concurrency).sim_duration for policy in (VllmV1(), EbAdaptive())
    )
    assert run(EbPlus(), load, truth, max_concurrency=concurrency).sim_duration <= 1.01 * best


@pytest.mark.parametrize(
    ("truth", "belief", "right"),
    [(MODEL, CALM, "exclusive"), (CALM, replace(CALM, kappa=1.8e-5), "mixed")],
    ids=["unseen-interference", "imagined-interference"],
)
def test_a_wrong_belief_is_found_out(truth: AffineModel, belief: AffineModel, right: str):
    """The belief names the wrong mode; what the steps really take corrects it."""
    load = load_of(5000, 512, 256)
    policy = EbPlus()
    log, seen = modes(policy, load, truth, belief=belief, max_concurrency=400)
    assert seen[0] != right
    late = seen[len(seen) // 2 : -len(seen) // 8]
    assert late.count(right) > 0.8 * len(late)
    mode = VllmV1() if right == "mixed" else EbAdaptive()
    best = run(mode, load, truth, belief=truth, max_concurrency=400).sim_duration
    assert log.sim_duration < 1.05 * best


def test_mixed_steps_teach_alpha_and_kappa():
    policy = EbPlus(explore_every=0)
    truth, belief = replace(CALM, kappa=1e-5), replace(CALM, alpha_mb=0.008)
    run(policy, load_of(1200, 512, 256), truth, belief=belief, max_concurrency=48)
    select = policy._select
    assert select.mixed_fit.steps > 500
    assert select.control.costs is not None
    alpha, kappa = select.mixed_fit.values(select.control.costs)
    assert kappa == pytest.approx(1e-5, rel=0.2)  # believed 0
    assert alpha == pytest.approx(0.010, rel=0.05)  # believed 0.008
    assert MixedFit().values(COSTS) == (COSTS.alpha_mb, COSTS.kappa)  # nothing measured: the belief


def test_trials_are_short_and_rare():
    log, seen = modes(EbPlus(explore_every=1000), load_of(4000, 512, 256), CALM, max_concurrency=256)
    v1 = run(VllmV1(), load_of(4000, 512, 256), CALM, max_concurrency=256)
    share = seen.count("exclusive") / len(seen)
    assert 0 < share < 0.15
    assert log.sim_duration < 1.01 * v1.sim_duration
    never, seen = modes(EbPlus(explore_every=0), load_of(4000, 512, 256), CALM, max_concurrency=256)
    assert "exclusive" not in seen
    assert never.sim_duration == v1.sim_duration


def test_follows_a_shift_of_concurrency():
    """400 requests trickle in 24 at a time, then 2,000 come at once: mixed, then exclusive."""
    few, many = load_of(400, 512, 128, 1), load_of(2000, 512, 256, 2)
    load = Workload(
        np.concatenate([np.arange(400) * 0.16, np.full(2000, 70.0)]),
        np.concatenate([few.num_prompt_tokens, many.num_prompt_tokens]),
        np.concatenate([few.num_output_tokens, many.num_output_tokens]),
    )
    policy = EbPlus()
    log, seen = modes(policy, load)
    before = int(np.searchsorted(log.start, 70.0))
    assert set(seen[:before]) == {"mixed"}
    crowd = seen[before + 20 : before + (len(seen) - before) // 2]
    assert crowd.count("exclusive") > 0.9 * len(crowd)  # the burst is judged at once


def test_an_account_is_not_biased_by_the_phase_its_window_ends_in():
    load = Load(500, 100)
    account = Account()
    account.add(np.array([500, 500]), 0.055)
    account.add(np.array([500]), 0.030)
    for _ in range(3):
        account.add(np.ones(20, dtype=np.int64), 0.012)
    assert account.exclusive_cost(load) == pytest.approx(500 * 0.085 / 1500 + 100 * 0.036 / 60)
    mixed = Account()
    mixed.add(np.array([500, 1, 1]), 0.04)
    assert mixed.exclusive_cost(load) is None
    assert mixed.overall_cost(load, 5e-5, 2e-4) == pytest.approx(0.04 * (0.025 + 0.02) / (0.025 + 0.0004))
    assert Account().overall_cost(load, 1.0, 1.0) is None


def test_mixed_steps_are_cut_where_a_stream_is_due():
    n = 30
    load = Workload(
        np.concatenate([[0.0], np.full(n, 0.2)]),
        np.concatenate([[50], np.full(n, 4000)]),
        np.concatenate([[200], np.full(n, 5)]),
        slo_ttft=np.full(n + 1, 0.2),
        slo_tbt=np.full(n + 1, 0.1),
    )

    class Mixed:
        def plan(self, view: StepView) -> Plan:
            return plan_mixed(view)

    due = 0.2 + 0.1 * np.arange(200)
    assert (run(Mixed(), load).request_times(0) <= due).all()
    assert (run(VllmV1(), load).request_times(0) > due).any()


def test_paper_form_starts_mixed_and_is_sticky():
    policy = EbPlus(form="paper")
    _, seen = modes(policy, load_of(2500, 512, 256), max_concurrency=600)
    assert seen[0] == "mixed"
    assert "exclusive" in seen
    assert sum(a != b for a, b in pairwise(seen)) <= 2
    _, seen = modes(EbPlus(form="paper"), load_of(600, 512, 256), CALM, max_concurrency=600)
    assert set(seen) == {"mixed"}  # kappa 0: LHS = 0


def test_same_run_twice_and_async():
    load = load_of(300, 100, 40)
    config = EngineConfig(2048, 64, 700, 16, pipeline_depth=2)
    one, two = (run(EbPlus(), load, config=config, check=True) for _ in range(2))
    assert one.token_step.tolist() == two.token_step.tolist()  # type: ignore[union-attr]
    assert (one.end_reason == 0).all()


def test_values_that_are_refused():
    for wrong in ({"margin": -1}, {"explore_every": -1}, {"window": 0}, {"kv_guard": 1.5}, {"form": "x"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            EbPlus(**wrong)  # type: ignore[arg-type]
