"""The simulator against queueing theory, in a configuration where the engine is a single server."""

from __future__ import annotations

import numpy as np
import pytest

from slacktide.core.latency import AffineModel
from slacktide.core.policies.vllm_v1 import VllmV1
from slacktide.core.types import FloatArray, IntArray
from slacktide.metrics.log import RunLog
from slacktide.sim.engine import EngineConfig, simulate
from slacktide.workload.requests import Workload

# One request at a time, one output token: a request is one prefill step of 10 ms + 0.1 ms per prompt token.
MODEL = AffineModel(alpha_p=0.010, beta_p=1e-4, alpha_d=0.005, beta_d=0.001)
SERVER = EngineConfig(max_num_seqs=1, max_num_batched_tokens=100_000, num_blocks=100_000)


def serve(gaps: FloatArray, prompts: IntArray) -> RunLog:
    load = Workload(np.cumsum(gaps), prompts, np.ones(prompts.size, dtype=np.int64))
    return simulate(load, VllmV1(), MODEL, SERVER).log


def lindley(gaps: FloatArray, service: FloatArray) -> FloatArray:
    """Waiting times of a single FIFO server, by Lindley's recursion."""
    wait = np.zeros(service.size)
    for i in range(1, service.size):
        wait[i] = max(0.0, wait[i - 1] + service[i - 1] - gaps[i])
    return wait


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_md1_waiting_time(load: float) -> None:
    """M/D/1: mean wait = rho S / (2 (1 - rho)). Batch means give the bounds; Lindley's recursion checks every wait."""
    n, service = 60_000, 0.020
    gaps = np.random.default_rng(int(load * 100)).exponential(service / load, n)
    log = serve(gaps, np.full(n, 100))
    wait = log.first_scheduled_time - log.arrival_time
    assert wait == pytest.approx(lindley(gaps, np.full(n, service)), abs=1e-9)
    expected = load * service / (2 * (1 - load))
    batches = wait.reshape(30, -1).mean(axis=1)
    assert abs(wait.mean() - expected) < 4 * batches.std() / np.sqrt(30)
    assert wait.mean() == pytest.approx(expected, rel=0.08)


def test_mg1_waiting_time() -> None:
    """M/G/1, Pollaczek-Khinchine: mean wait = lambda E[S^2] / (2 (1 - rho)), S = 10 ms + 0.1 ms * prompt."""
    n, rng = 60_000, np.random.default_rng(5)
    prompts = rng.choice([50, 800], n, p=[0.9, 0.1])
    service = 0.010 + 1e-4 * prompts
    mean = 0.9 * 0.015 + 0.1 * 0.090
    second = 0.9 * 0.015**2 + 0.1 * 0.090**2
    gaps = rng.exponential(mean / 0.6, n)
    log = serve(gaps, prompts)
    wait = log.first_scheduled_time - log.arrival_time
    assert wait == pytest.approx(lindley(gaps, service), abs=1e-9)
    assert wait.mean() == pytest.approx((0.6 / mean) * second / (2 * 0.4), rel=0.08)


def test_littles_law_exactly() -> None:
    """Time average of requests in the system = arrivals * mean time in system / length of the run, in any one run."""
    rng = np.random.default_rng(9)
    load = Workload(np.cumsum(rng.exponential(0.05, 500)), rng.integers(1, 400, 500), rng.integers(1, 60, 500))
    log = simulate(load, VllmV1(), MODEL, EngineConfig(max_num_seqs=16, num_blocks=500)).log
    events = np.concatenate([np.column_stack([log.arrival_time, np.ones(500)]),
                             np.column_stack([log.end_time, -np.ones(500)])])  # fmt: skip
    events = events[np.argsort(events[:, 0], kind="stable")]
    in_system = np.cumsum(events[:, 1])
    area = float((in_system[:-1] * np.diff(events[:, 0])).sum())
    assert area == pytest.approx(float((log.end_time - log.arrival_time).sum()), rel=1e-12)


def test_processor_sharing_of_equal_decodes() -> None:
    """n requests that arrive together and decode in lockstep end together: ideal processor sharing of the steps."""
    load = Workload(np.zeros(8), np.full(8, 10), np.full(8, 50))
    log = simulate(load, VllmV1(), MODEL, EngineConfig()).log
    # One prefill step of 80 tokens, then 49 decode steps of 8.
    assert log.end_time == pytest.approx(np.full(8, 0.010 + 80e-4 + 49 * (0.005 + 0.008)))
