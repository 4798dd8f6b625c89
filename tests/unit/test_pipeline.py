"""Pipeline depth 2: a decision is made while a step runs, and starts when that one ends."""

from __future__ import annotations

import numpy as np
import pytest

from slacktide.core.latency import AffineModel
from slacktide.core.pack import as_policy
from slacktide.core.spec import parse_policies
from slacktide.core.types import Plan, StepView
from slacktide.metrics.slo import judge
from slacktide.search.scenario import build_policy
from slacktide.sim.engine import EngineConfig, simulate
from slacktide.workload.requests import Workload

TRUTH = AffineModel(alpha_p=0.01, beta_p=0.0003, alpha_d=0.008, beta_d=0.0001, kappa=0.0001)
BOUNDED = ("greedy-dynamic", "qoserve", "sliding", "sola", "tide")


def load(n=80, rate=2.5, seed=0):
    rng = np.random.default_rng(seed)
    return Workload(
        np.cumsum(rng.exponential(1 / rate, n)), rng.integers(50, 1500, n), np.full(n, 60), slo_ttft=np.full(n, 2.0),
        slo_tbt=np.full(n, 0.05),
    )  # fmt: skip


def config(depth):
    return EngineConfig(max_num_batched_tokens=1024, max_num_seqs=64, num_blocks=8000, pipeline_depth=depth)


def policy(text):
    (spec,) = parse_policies([text])
    return build_policy(spec, {})


class Watching:
    """Notes what the host says of the start of each step."""

    def __init__(self, inner):
        self.inner, self.starts = as_policy(inner), []

    def plan(self, view: StepView) -> Plan:
        plan = self.inner.plan(view)
        self.starts.append((view.now, view.start, plan.rows.size))
        return plan


def test_the_start_told_is_the_start_that_comes():
    """The belief is the truth here, so what was expected of the step in flight is what it takes."""
    watching = Watching(policy("greedy-dynamic"))
    log = simulate(load(), watching, TRUTH, config(2)).log
    told = [start for _, start, rows in watching.starts if rows]
    assert told == pytest.approx(log.start.tolist(), abs=1e-9)
    ahead = [start - now for now, start, _ in watching.starts]
    assert max(ahead) > 0.02


def test_with_nothing_in_flight_a_step_starts_now():
    watching = Watching(policy("greedy-dynamic"))
    simulate(load(), watching, TRUTH, config(1))
    assert all(start == now for now, start, _ in watching.starts)


@pytest.mark.parametrize("name", BOUNDED)
def test_a_step_in_flight_makes_no_token_late(name):
    """A bound that counts from now, while the step before still runs, is too long by the rest of that one."""
    late = [int(judge(simulate(load(), policy(name), TRUTH, config(depth)).log).tbt.sum()) for depth in (1, 2)]
    assert late[1] <= late[0] + 1
