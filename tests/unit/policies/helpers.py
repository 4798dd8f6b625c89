"""Small runs with every step written down, for schedules worked out by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from slacktide.core.latency import AffineModel
from slacktide.core.pack import as_policy
from slacktide.core.types import StepView
from slacktide.sim.engine import EngineConfig, RunResult, simulate
from slacktide.workload.requests import Workload

# A step takes 1 s whatever it holds (almost): arrivals can be written as step numbers.
ONE_SECOND = AffineModel(alpha_p=1.0, beta_p=1e-12, alpha_d=1.0, beta_d=1e-12)


@dataclass(frozen=True)
class Req:
    """A request of a hand-made workload."""

    prompt: int
    output: int
    arrival: float = 0.0
    max_tokens: int | None = None
    ttft: float = math.inf
    tbt: float = math.inf
    e2e: float = math.inf
    priority: int = 0


def workload(requests: list[Req], hash_ids: list[list[int]] | None = None, hash_block_size: int = 4) -> Workload:
    hashes = None
    if hash_ids is not None:
        offsets = np.concatenate([[0], np.cumsum([len(ids) for ids in hash_ids])])
        hashes = (np.array([i for ids in hash_ids for i in ids], dtype=np.int64), offsets)
    return Workload(
        arrival_time=np.array([r.arrival for r in requests], dtype=np.float64),
        num_prompt_tokens=np.array([r.prompt for r in requests]),
        num_output_tokens=np.array([r.output for r in requests]),
        max_tokens=np.array([r.max_tokens or r.output for r in requests]),
        slo_ttft=np.array([r.ttft for r in requests], dtype=np.float64),
        slo_tbt=np.array([r.tbt for r in requests], dtype=np.float64),
        slo_e2e=np.array([r.e2e for r in requests], dtype=np.float64),
        priority=np.array([r.priority for r in requests]),
        hash_ids=hashes,
        hash_block_size=hash_block_size,
    )


def run(policy: Any, requests: list[Req], hash_ids: list[list[int]] | None = None, **engine: Any) -> RunResult:
    """All requests to their end, with the invariants checked after every step."""
    config = EngineConfig(**({"block_size": 4, "num_blocks": 100, "max_num_batched_tokens": 100} | engine))
    return simulate(workload(requests, hash_ids), as_policy(policy), ONE_SECOND, config, check=True, fast_forward=False)


def schedule(
    policy: Any, requests: list[Req], hash_ids: list[list[int]] | None = None, **engine: Any
) -> list[dict[str, int]]:
    """What each step held: request -> tokens, requests called A, B, C... in order of arrival.

    "-B": 0 says that B was preempted before the step.
    """
    steps: list[dict[str, int]] = []

    def note(view: StepView, plan: Any) -> None:
        names = [chr(ord("A") + i) for i in view.live.index.tolist()]
        lost = {"-" + names[row]: 0 for row in plan.preempted.tolist()}
        given = zip(plan.rows.tolist(), plan.num_scheduled_tokens.tolist(), strict=True)
        steps.append(lost | {names[row]: tokens for row, tokens in given})

    config = EngineConfig(**({"block_size": 4, "num_blocks": 100, "max_num_batched_tokens": 100} | engine))
    load = workload(requests, hash_ids)
    simulate(load, as_policy(policy), ONE_SECOND, config, check=True, fast_forward=False, on_step=note)
    return steps
