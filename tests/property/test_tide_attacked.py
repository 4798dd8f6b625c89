"""`tide` where its host works otherwise: beliefs replaced, steps of prompts in flight, streams back from the cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slacktide.core import tide as t
from slacktide.core.fair import Shares
from slacktide.core.kernels_tide_supply import accept
from slacktide.core.latency import AffineModel
from slacktide.core.live import NUM_INT_FIELDS
from slacktide.core.pack import as_policy
from slacktide.core.policies.tide import Tide
from slacktide.core.types import Plan, StepResult, StepView
from slacktide.metrics.slo import judge
from slacktide.sim.engine import EngineConfig, simulate
from slacktide.workload.requests import Workload

TRUTH = AffineModel(alpha_p=0.01, beta_p=0.0003, alpha_d=0.008, beta_d=0.0001, kappa=0.0001)
TWICE = AffineModel(alpha_p=0.02, beta_p=0.0006, alpha_d=0.016, beta_d=0.0002, kappa=0.0002)


class Swapping:
    """Shows `tide` one belief for some steps and another from then on."""

    def __init__(self, beliefs: tuple[Any, Any], after: int) -> None:
        self.tide, self.beliefs, self.left = Tide(), beliefs, after
        self.pairs: list[tuple[float, float]] = []
        self.predicted: float | None = None

    def plan(self, view: StepView) -> Plan:
        self.left -= 1
        plan = self.tide.plan(view._replace(latency=self.beliefs[self.left < 0]))
        self.predicted = plan.predicted_step_time
        return plan

    def observe(self, result: StepResult) -> None:
        if self.left < 0 and self.predicted and result.step_time:
            self.pairs.append((self.predicted, result.step_time))
        self.tide.observe(result)


@pytest.mark.parametrize("beliefs", [(TWICE, TRUTH), (TRUTH, TWICE)])
def test_what_was_learned_of_one_belief_is_not_held_against_the_next(beliefs):
    n = 40
    load = Workload(
        np.arange(n) * 0.1, np.full(n, 200), np.full(n, 30), slo_ttft=np.full(n, 1.0), slo_tbt=np.full(n, 0.1)
    )
    policy = Swapping(beliefs, after=100)
    simulate(load, policy, TRUTH, EngineConfig(max_num_batched_tokens=512, max_num_seqs=32, num_blocks=2000))
    off = 1.0 if beliefs[1] is TRUTH else 2.0
    predicted, real = policy.pairs[0]
    assert predicted == pytest.approx(off * real, rel=0.02)


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0.01, 0.5), st.integers(1, 40)), min_size=1, max_size=6),
       st.lists(st.floats(0.01, 4), min_size=1, max_size=6))  # fmt: skip
def test_demand_is_what_the_page_says(decodes, prompts):
    """Decode i wants min((t - s) / tau + 1, c) tokens until t; the mean over i costs one round each."""
    m, p = len(decodes), len(prompts)
    n = m + p
    ints, si = np.zeros((NUM_INT_FIELDS, n), dtype=np.int64), np.zeros((t.INT_SCRATCH, n), dtype=np.int64)
    sf = np.zeros((t.FLOAT_SCRATCH, 2 * n))
    sf[t.F_SLACK, :m], sf[t.F_PACE, :m], sf[t.F_GROWTH, :m] = zip(*decodes, strict=True)
    sf[t.F_SLACK, m:n] = sorted(prompts)
    far = np.full(2, np.inf)
    accept(np.arange(m, n), np.arange(m), 0.02, 1.0, False, far, far, ints, si, sf, Shares({}).of(()))
    for j in range(m, n):
        until = sf[t.F_SLACK, j]
        wanted = [min((until - s) / tau + 1, c) if until >= s else 0.0 for s, tau, c in decodes]
        assert sf[t.F_DEMAND, j] == pytest.approx(0.02 * np.mean(wanted), abs=1e-9)


def test_with_a_step_of_prompts_in_flight_streams_are_not_late():
    """A step that emits nothing is in flight too: what is decided meanwhile starts only when it ends."""
    n, rng = 60, np.random.default_rng(0)
    load = Workload(
        np.cumsum(rng.exponential(0.5, n)), rng.integers(50, 1500, n), np.full(n, 60), slo_ttft=np.full(n, 1.5),
        slo_tbt=np.full(n, 0.05),
    )  # fmt: skip
    for depth in (1, 2):
        config = EngineConfig(max_num_batched_tokens=512, max_num_seqs=32, num_blocks=4000, pipeline_depth=depth)
        assert judge(simulate(load, as_policy(Tide()), TRUTH, config).log).tbt.sum() == 0


@pytest.mark.parametrize("seed", [20, 59])
def test_streams_back_from_the_prefix_cache_wait_for_a_seat(seed):
    """Few seats, little KV, small blocks: what a preemption lost is found again but for one token."""
    rng = np.random.default_rng(seed)
    n, size = int(rng.integers(5, 60)), int(rng.choice([1, 2, 4, 8]))
    prompt, output = rng.integers(1, 60, n), rng.integers(1, 40, n)
    arrival = np.cumsum(rng.choice([0, 0, 0, 0.01, 0.03, 0.2], n))
    blocks: dict[str, Any] = {}
    if rng.random() < 0.6:
        ids = [rng.integers(0, 2, p // 8) for p in prompt]
        ends = np.concatenate([[0], np.cumsum([len(i) for i in ids])])
        blocks = {"hash_ids": (np.concatenate(ids).astype(np.int64), ends), "hash_block_size": 8}
    load = Workload(
        arrival, prompt, output, max_tokens=output + rng.integers(0, 3, n),
        slo_ttft=rng.choice([np.inf, 0.1, 0.5, 3.0], n), slo_tbt=rng.choice([np.inf, 0.02, 0.05, 0.2], n),
        slo_e2e=rng.choice([np.inf, np.inf, 2.0, 9.0], n), priority=rng.integers(-1, 2, n),
        abort_time=arrival + rng.choice([np.inf, np.inf, 0.05, 0.4], n), **blocks,
    )  # fmt: skip
    most = int((-(-np.maximum(prompt + output - 1, 1) // size)).max())
    budget, seats = int(rng.choice([3, 16, 40, 200])), int(rng.choice([2, 3, 4, 6, 64]))
    config = EngineConfig(
        max_num_batched_tokens=budget, max_num_seqs=seats, num_blocks=most + int(rng.choice([0, 1, 3, 10, 60])),
        block_size=size, enable_prefix_caching=True,
    )  # fmt: skip
    log = simulate(load, as_policy(Tide()), TRUTH, config, check=True).log
    assert log.num_preemptions.sum() > 0
    assert (log.finished | np.isfinite(load.abort_time)).all()


def test_what_tiny_prompts_teach_does_not_make_others_look_too_long():
    """The belief is off by a factor of two for prompts of a few tokens and by 8 % for those of 130."""
    truth = AffineModel(alpha_p=0.022, beta_p=0.0003, alpha_d=0.008, beta_d=0.0001, kappa=0.0001)
    belief = AffineModel(alpha_p=0.011, beta_p=0.00035, alpha_d=0.008, beta_d=0.0001, kappa=0.0001)
    prompts = np.concatenate((np.resize([1, 2, 4], 30), np.full(10, 130)))
    n = prompts.size
    load = Workload(np.arange(n) * 1.0, prompts, np.full(n, 2), slo_ttft=np.full(n, 0.2), slo_tbt=np.full(n, 0.5))
    config = EngineConfig(max_num_batched_tokens=2048, max_num_seqs=32, num_blocks=2000)
    log = simulate(load, as_policy(Tide()), truth, config, belief=belief).log
    assert judge(log).ttft.sum() == 0
    assert log.num_steps == 2 * n  # whole prompts, no crumbs
