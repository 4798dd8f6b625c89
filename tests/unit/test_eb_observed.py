"""What a policy is told of a step: the tokens that really ran, per request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from slacktide.core.latency import AffineModel
from slacktide.core.policies.vllm_v1 import VllmV1
from slacktide.core.types import Plan, StepResult, StepView
from slacktide.sim.engine import EngineConfig, simulate
from slacktide.workload.requests import Workload

MODEL = AffineModel(alpha_p=0.010, beta_p=0.001, alpha_d=0.005, beta_d=0.001, alpha_mb=0.010, kappa=0.0)


class Listener:
    """vllm-v1 that keeps what it planned and what it was told."""

    def __init__(self) -> None:
        self.inner: Any = VllmV1()
        self.planned: list[dict[int, int]] = []
        self.told: list[dict[int, int]] = []
        self.times: list[float | None] = []

    def plan(self, view: StepView) -> Plan:
        plan: Plan = self.inner.plan(view)
        rows = view.live.index[plan.rows].tolist()
        self.planned.append(dict(zip(rows, plan.num_scheduled_tokens.tolist(), strict=True)))
        return plan

    def observe(self, result: StepResult) -> None:
        self.told.append(dict(zip(result.indices.tolist(), result.tokens.tolist(), strict=True)))
        self.times.append(result.step_time)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_policy_is_told_the_tokens_of_every_step(depth: int) -> None:
    load = Workload(np.zeros(2), np.array([20, 5]), np.array([3, 2]), max_tokens=np.array([3, 2]))
    policy = Listener()
    log = simulate(load, policy, MODEL, EngineConfig(max_num_batched_tokens=16, pipeline_depth=depth), check=True).log
    assert policy.told == [step for step in policy.planned if step]
    assert [sum(each.values()) for each in policy.told] == log.num_tokens.tolist()
    assert policy.told[0] == {0: 16}  # a chunk that emits nothing
    assert policy.times == pytest.approx(log.duration.tolist())
