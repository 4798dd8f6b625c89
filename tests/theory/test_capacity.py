"""A bound that no policy can pass: each request costs at least its marginal time, whatever it is batched with."""

from __future__ import annotations

import numpy as np
import pytest

from slacktide.core import policy
from slacktide.core.latency import AffineModel
from slacktide.core.pack import as_policy
from slacktide.core.spec import parse_policies
from slacktide.sim.engine import EngineConfig, simulate
from slacktide.workload.requests import Workload

# kappa >= 0: mixing never makes a token cheaper than its own beta.
MODEL = AffineModel(alpha_p=0.004, beta_p=5e-5, alpha_d=0.008, beta_d=1e-4, alpha_mb=0.008, kappa=2e-5)


@pytest.mark.parametrize("name", policy.names())
@pytest.mark.parametrize("blocks", [400, 5000])
def test_no_policy_exceeds_the_marginal_cost_bound(name: str, blocks: int) -> None:
    """Throughput <= 1 / (beta_p * prompt + beta_d * (output - 1)): the first token comes with the prefill, preempted
    work only adds, and a step costs alpha on top. Everything arrives at once, so the engine never idles."""
    n, prompt, output = 120, 300, 60
    load = Workload(
        np.zeros(n), np.full(n, prompt), np.full(n, output), slo_ttft=np.full(n, 1.0), slo_tbt=np.full(n, 0.1)
    )
    log = simulate(load, as_policy(parse_policies([name])[0].build()), MODEL, EngineConfig(num_blocks=blocks)).log
    cost = MODEL.beta_p * prompt + MODEL.beta_d * (output - 1)
    throughput = n / float(log.end_time.max())
    assert log.finished.all()
    assert throughput <= 1 / cost
    # Not vacuous: a busy engine reaches a good part of it, and its steps account for the bound exactly.
    assert throughput > 0.2 / cost
    busy = float(log.duration.sum())
    alphas = np.where(log.num_prefills > 0, np.where(log.num_decodes > 0, 0.008, 0.004), 0.008)
    mixed = 2e-5 * log.num_decodes * log.num_prefill_tokens / np.maximum(log.num_tokens, 1)
    recomputed = log.num_tokens.sum() - n * (prompt + output - 1)
    extra = busy - alphas.sum() - mixed.sum() - n * cost
    assert extra >= -1e-9
    assert recomputed >= 0
    assert extra <= recomputed * max(MODEL.beta_p, MODEL.beta_d) + 1e-9
