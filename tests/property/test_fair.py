"""Tenants under `tide`: the bound on the difference in service, who gives way in overload, and what changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slacktide.core.fair import INPUT_COST, OUTPUT_COST
from slacktide.core.latency import AffineModel
from slacktide.core.policies.tide import Tide
from slacktide.core.types import RUNNING, Plan, StepView
from slacktide.metrics.log import RunLog
from slacktide.metrics.slo import judge
from slacktide.sim.engine import EngineConfig, simulate
from slacktide.workload.requests import Workload

TRUTH = AffineModel(alpha_p=0.01, beta_p=0.0003, alpha_d=0.008, beta_d=0.0001, kappa=0.0001)
ENGINE = EngineConfig(max_num_batched_tokens=512, max_num_seqs=32, num_blocks=400, block_size=16)
NAMES = ("flood", "quiet")


def load(arrival: Any, tenant: Any, rng: np.random.Generator, ttft: float, tbt: float, *, longest: int = 300,
         most: int = 40, names: tuple[str, ...] = NAMES) -> Workload:  # fmt: skip
    order = np.argsort(arrival, kind="stable")
    n = order.size
    return Workload(
        arrival_time=np.asarray(arrival, dtype=np.float64)[order],
        num_prompt_tokens=rng.integers(5, longest + 1, n),
        num_output_tokens=rng.integers(2, most + 1, n),
        max_tokens=np.full(n, most),
        slo_ttft=np.full(n, ttft),
        slo_tbt=np.full(n, tbt),
        tenant=np.asarray(tenant, dtype=np.int64)[order],
        tenants=names,
    )


def flooded(seed: int, flood: float, quiet: float, seconds: float = 12.0, ttft: float = 0.5) -> Workload:
    """Two tenants, Poisson, at `flood` and `quiet` requests per second."""
    rng = np.random.default_rng(seed)
    times = [np.cumsum(rng.exponential(1 / rate, int(rate * seconds))) for rate in (flood, quiet)]
    tenant = np.repeat([0, 1], [t.size for t in times])
    return load(np.concatenate(times), tenant, rng, ttft, 0.05)


def attainment(log: RunLog, tenant: int) -> float:
    return float(judge(log).met[log.tenant == tenant].mean())


def run(workload: Workload, config: EngineConfig = ENGINE, on_step: Any = None, **parameters: Any) -> RunLog:
    return simulate(workload, Tide(**parameters), TRUTH, config, check=True, on_step=on_step).log


# ---- the bound: while both wait, weighted service differs by at most U


SEATS, LONGEST, MOST = 4, 100, 20


def service_apart(workload: Workload, weights: list[float], **parameters: Any) -> tuple[float, float]:
    """(largest difference of weighted service while all tenants wait, total service of the least served)."""
    served = np.zeros(len(weights))
    apart = [0.0]
    over = [False]

    def look(view: StepView, plan: Plan) -> None:
        live = view.live
        waits = [bool(((live.tenant == k) & (live.status != RUNNING)).any()) for k in range(len(weights))]
        over[0] = over[0] or (not all(waits) and view.now > 0.0)
        if not over[0]:
            apart[0] = max(apart[0], float(np.ptp(served / weights)))
        rows, tokens = plan.rows, plan.num_scheduled_tokens
        outputs = tokens == live.num_tokens_needed[rows]
        prompt = np.where(live.is_decode[rows], 0, tokens)
        np.add.at(served, live.tenant[rows], INPUT_COST * prompt + OUTPUT_COST * outputs)

    config = EngineConfig(max_num_batched_tokens=256, max_num_seqs=SEATS, num_blocks=1000, block_size=16)
    run(workload, config, look, **parameters)
    return apart[0], float(served.min())


@given(st.integers(0, 10_000), st.sampled_from([(1.0, 1.0), (3.0, 1.0), (1.0, 2.0)]), st.floats(0.3, 0.7))
@settings(max_examples=8)
def test_weighted_service_of_two_who_wait_stays_within_the_bound(seed, weights, split):
    rng = np.random.default_rng(seed)
    tenant = (rng.random(160) > split).astype(np.int64)
    workload = load(np.sort(tenant) * 1e-6, np.sort(tenant), rng, np.inf, np.inf, longest=LONGEST, most=MOST)
    named = "+".join(f"{name}:{weight}" for name, weight in zip(NAMES, weights, strict=True))
    # A prompt's cost and the outputs of all seats after the last admission; prompts of the seats, charged but not run.
    bound = (INPUT_COST * (LONGEST + SEATS * LONGEST) + OUTPUT_COST * SEATS * MOST) / min(weights)
    apart, least = service_apart(workload, list(weights), tenant_weights=named)
    assert apart <= bound
    assert least > 2 * bound  # or the bound would say nothing


def test_without_fairness_who_came_first_takes_all():
    rng = np.random.default_rng(0)
    workload = load(np.repeat([0.0, 1e-6], 80), np.repeat([0, 1], 80), rng, np.inf, np.inf, longest=LONGEST, most=MOST)
    apart, _ = service_apart(workload, [1.0, 1.0], fairness=False)
    assert apart > 3 * (INPUT_COST * (LONGEST + SEATS * LONGEST) + OUTPUT_COST * SEATS * MOST)


# ---- overload: who stays within its share keeps its targets


@pytest.mark.parametrize("seed", [1, 2])
def test_a_flood_does_not_push_a_quiet_tenant_out_of_its_targets(seed):
    workload = flooded(seed, flood=60.0, quiet=3.0)
    fair, unfair = run(workload), run(workload, fairness=False)
    assert attainment(fair, 1) >= 0.95
    assert attainment(unfair, 1) < attainment(fair, 1) - 0.15
    assert attainment(fair, 0) >= attainment(unfair, 0) - 0.06  # the flood pays with what the quiet one gets


def test_weights_move_who_gives_way():
    workload = flooded(3, flood=25.0, quiet=25.0)
    even, tilted = run(workload), run(workload, tenant_weights="quiet:4")
    assert attainment(tilted, 1) > attainment(even, 1) + 0.1
    assert attainment(tilted, 0) < attainment(even, 0)


# ---- no load, one tenant: nothing changes


@given(st.integers(0, 10_000))
@settings(max_examples=8)
def test_at_no_load_nobody_is_late_for_fairness(seed):
    workload = flooded(seed, flood=2.0, quiet=1.0, seconds=15.0, ttft=1.0)
    before, after = judge(run(workload, fairness=False)).met, judge(run(workload)).met
    assert np.all(after[before])


@pytest.mark.parametrize("names", [("flood",), NAMES])
def test_one_tenant_is_served_to_the_byte_as_without_fairness(names):
    rng = np.random.default_rng(5)
    workload = load(np.cumsum(rng.exponential(1 / 40, 200)), np.zeros(200), rng, 0.5, 0.05, names=names)
    with_it, without = run(workload), run(workload, fairness=False)
    assert np.array_equal(with_it.first_token_time, without.first_token_time)
    assert np.array_equal(with_it.end_time, without.end_time)
