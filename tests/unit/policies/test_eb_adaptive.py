"""eb-adaptive: estimates, the update of threshold and slots, and that low load costs nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from slacktide.core.exclusive import Costs, Load, optimal_threshold
from slacktide.core.exclusive_memory import memory_safe_slots
from slacktide.core.latency import AffineModel
from slacktide.core.policies._exclusive_learning import Lengths
from slacktide.core.policies.eb import Eb
from slacktide.core.policies.eb_adaptive import EbAdaptive
from slacktide.core.policies.vllm_v1 import VllmV1
from slacktide.core.types import StepResult
from slacktide.metrics.log import RunLog
from slacktide.sim.engine import EngineConfig, simulate
from slacktide.workload.requests import Workload

COSTS = Costs(0.005, 5e-5, 0.010, 1e-4, 0.011, 1.5e-4)
MODEL = AffineModel(0.005, 5e-5, 0.010, 1e-4, 0.011, 1.5e-4)
LARGE = EngineConfig(8192, 1024, 26_000, 16)


def load_of(n: int, prompt: int, output: int, seed: int = 0) -> Workload:
    rng = np.random.default_rng(seed)
    return Workload(
        np.zeros(n), rng.integers(prompt // 2, prompt * 3 // 2, n), rng.integers(output // 2, output * 3 // 2, n)
    )


def run(policy: Any, load: Workload, config: EngineConfig = LARGE, **options: Any) -> RunLog:
    return simulate(load, policy, MODEL, config, **options).log


def test_learns_the_lengths_of_admitted_and_finished_requests():
    load = load_of(900, 100, 40)
    policy = EbAdaptive(window=300)
    run(policy, load, max_concurrency=100)
    lengths = policy._control.lengths
    assert lengths.completions == 900
    assert sorted(lengths.outputs) != sorted(load.num_output_tokens[:300])
    assert list(lengths.prompts) == load.num_prompt_tokens[-300:].tolist()
    assert np.mean(lengths.outputs) == pytest.approx(load.num_output_tokens[-300:].mean(), rel=0.05)
    # Every output is one that a request really had, to the token.
    assert set(lengths.outputs) <= set(load.num_output_tokens.tolist())


def test_threshold_and_slots_follow_the_formulas():
    policy = EbAdaptive()
    load = load_of(3000, 512, 256)
    config = EngineConfig(8192, 2048, 12_000, 16)
    run(policy, load, config, max_concurrency=900)
    control = policy._control
    mean = Load(float(load.num_prompt_tokens.mean()), float(load.num_output_tokens.mean()))
    assert control.theta == pytest.approx(optimal_threshold(COSTS, mean), rel=0.05)
    assert control.enough == pytest.approx(8192 / mean.prompt, abs=1)
    safe = memory_safe_slots(192_000, mean, control.theta, prompt_variance=mean.prompt**2 / 12)
    assert safe <= control.slots <= 1.35 * safe  # uniform outputs are younger than geometric ones


def test_slots_shrink_at_once_and_grow_gradually():
    policy = EbAdaptive()
    first, second = load_of(1500, 100, 20, 1), load_of(1500, 100, 600, 2)
    load = Workload(
        np.zeros(4500),
        np.concatenate([first.num_prompt_tokens, second.num_prompt_tokens, first.num_prompt_tokens]),
        np.concatenate([first.num_output_tokens, second.num_output_tokens, first.num_output_tokens]),
    )
    slots: list[int] = []

    def watch(view: object, plan: object) -> None:
        if not slots or slots[-1] != policy._control.slots:
            slots.append(policy._control.slots)

    run(policy, load, EngineConfig(8192, 4096, 6000, 16), max_concurrency=3000, on_step=watch)
    change = np.array(slots[1:]) / np.array(slots[:-1])
    assert change.max() <= 1.1 + 1 / min(slots)
    assert change.min() < 0.8


def test_low_load_costs_nothing():
    load = load_of(600, 512, 128)
    calm = replace(MODEL, alpha_mb=0.010, kappa=0.0)

    def run(policy: Any, load: Workload, max_concurrency: int) -> RunLog:
        return simulate(load, policy, calm, LARGE, max_concurrency=max_concurrency).log

    v1 = run(VllmV1(), load, max_concurrency=32)
    assert run(EbAdaptive(), load, max_concurrency=32).sim_duration == pytest.approx(v1.sim_duration, rel=0.01)
    always = run(EbAdaptive(mixed_below=0), load, max_concurrency=32)
    assert always.sim_duration > 1.02 * v1.sim_duration  # the guard is what does it


def test_beats_fixed_thresholds_and_mixed_batching_at_saturation():
    load = load_of(3000, 512, 256)
    adaptive = run(EbAdaptive(), load, max_concurrency=600).sim_duration
    assert adaptive < run(Eb(theta=0.5), load, max_concurrency=600).sim_duration
    assert adaptive < 0.99 * run(Eb(theta=0.8), load, max_concurrency=600).sim_duration
    assert adaptive < 0.95 * run(VllmV1(), load, max_concurrency=600).sim_duration


def test_paper_form_uses_its_own_guards():
    policy = EbAdaptive(form="paper")
    assert policy._control.theta == 0.70  # cold start
    run(policy, load_of(2500, 512, 256), max_concurrency=600)
    control = policy._control
    assert control.theta > 2 * optimal_threshold(COSTS, Load(512, 256))  # uniform outputs: eq. (5) at its cap
    assert control.theta <= 0.80
    assert 0.05 <= control.kv_guard <= 0.6


def test_a_finished_request_that_was_never_seen_is_counted_only():
    lengths = Lengths(10)
    lengths.finished(np.array([3, 4]))
    assert lengths.completions == 2
    assert not lengths.outputs
    policy = EbAdaptive()
    nothing = np.empty(0, dtype=np.int64)
    policy.observe(StepResult(nothing, nothing, nothing, nothing, None))
    assert policy._control.lengths.completions == 0


def test_values_that_are_refused():
    for wrong in ({"window": 0}, {"update_every": 0}, {"mixed_below": -1}, {"kv_guard": 1.5}, {"form": "x"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            EbAdaptive(**wrong)  # type: ignore[arg-type]
