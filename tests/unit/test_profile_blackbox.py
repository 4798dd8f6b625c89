"""Steps read off token times: from a simulated run, whose true steps are known, and from files."""

from __future__ import annotations

import json

import numpy as np
import pytest

from slacktide.core import shape as s
from slacktide.core.latency import AffineModel
from slacktide.core.latency_families import scenes
from slacktide.core.pack import as_policy
from slacktide.core.policies.vllm_v1 import VllmV1
from slacktide.errors import InputError
from slacktide.profiling.blackbox import frontend_seconds, loads, steps_from_tokens
from slacktide.profiling.calibrate import calibrate
from slacktide.profiling.measurements import read_steps
from slacktide.sim.engine import EngineConfig, simulate
from slacktide.workload.requests import ClosedLoop, Workload

TRUTH = AffineModel(0.02, 1e-4, 0.02, 1e-3, 0.025)
BUDGET = 512


def run(concurrency, n=120, longest=400, seed=0):
    rng = np.random.default_rng(seed)
    work = Workload(
        arrival_time=np.zeros(n),
        num_prompt_tokens=rng.integers(16, longest, n),
        num_output_tokens=rng.integers(4, 30, n),
        closed=ClosedLoop(concurrency),
    )
    config = EngineConfig(max_num_batched_tokens=BUDGET, max_num_seqs=64, num_blocks=10_000)
    log = simulate(work, as_policy(VllmV1()), TRUTH, config).log
    return log, [log.request_times(i) for i in range(log.n)]


def found_steps(log, tokens, jitter=0.0, budget=BUDGET):
    rng = np.random.default_rng(1)
    late = [times + jitter * rng.random(len(times)) for times in tokens]
    return steps_from_tokens(log.arrival_time, log.num_prompt_tokens, late, budget)


@pytest.mark.parametrize("concurrency", [1, 4, 12])
def test_the_steps_of_a_run_are_found_with_their_times(concurrency):
    log, tokens = run(concurrency)
    shapes, seconds = found_steps(log, tokens)
    assert len(seconds) > 0.5 * log.num_steps
    assert seconds == pytest.approx(TRUTH.step_times(shapes), rel=1e-6)
    wanted = {0, 1} if concurrency == 1 else {0, 2}
    assert wanted <= set(scenes(shapes).tolist())


def test_some_milliseconds_of_jitter_do_no_harm():
    log, tokens = run(8)
    shapes, seconds = found_steps(log, tokens, jitter=2e-3)
    assert len(seconds) > 0.4 * log.num_steps
    assert np.median(np.abs(seconds / TRUTH.step_times(shapes) - 1)) < 0.05


def test_prompts_that_were_computed_in_chunks_are_left_out():
    log, tokens = run(6, longest=1500)
    shapes, seconds = found_steps(log, tokens)
    assert len(seconds) > 0
    assert shapes[:, s.NUM_TOKENS].max() <= BUDGET
    # Hidden chunks of long prompts would show as decode steps that took far too long.
    assert np.quantile(seconds / TRUTH.step_times(shapes), 0.99) < 1.05


def test_no_tokens_no_steps():
    shapes, seconds = steps_from_tokens(np.zeros(2), np.array([5, 5]), [np.empty(0), np.empty(0)], BUDGET)
    assert (len(shapes), len(seconds)) == (0, 0)


def result(log, tokens):
    return {
        "start_times": log.arrival_time.tolist(),
        "ttfts": [float(t[0] - a) for t, a in zip(tokens, log.arrival_time, strict=True)],
        "itls": [np.diff(t).tolist() for t in tokens],
        "input_lens": log.num_prompt_tokens.tolist(),
        "output_lens": [len(t) for t in tokens],
    }


def test_a_benchmarks_result_is_a_source_of_steps(tmp_path):
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(result(*run(8, n=200))))
    with pytest.raises(InputError, match="give --max-num-batched-tokens"):
        read_steps(path)
    steps = read_steps(path, BUDGET)
    assert steps.whole.all()
    fitted = calibrate(steps, "affine")
    assert fitted.errors["decode"].median < 0.001
    assert fitted.errors["mixed"].median < 0.05  # without a lone prompt its slope is taken from all steps


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"itls": None}, "expected a detailed result"),
        ({"ttfts": [0.1]}, "have different lengths"),
        ({"input_lens": ["x"]}, "request 0: expected numbers"),
    ],
)
def test_a_result_that_is_none_is_named(tmp_path, change, message):
    path = tmp_path / "bench.json"
    good = {"start_times": [0.0], "ttfts": [0.1], "itls": [[0.1]], "input_lens": [5], "output_lens": [2]}
    if message.startswith("have"):
        good = {name: value * 2 for name, value in good.items()}
    path.write_text(json.dumps(good | change))
    with pytest.raises(InputError, match=message):
        read_steps(path, BUDGET)


def test_the_designed_loads_fit_the_engine():
    found = loads(512, 24, 1024)
    assert (found[0].concurrency, found[-1].concurrency) == (1, 24)
    for load in found:
        assert load.prompt.min() >= 16
        assert load.prompt.max() <= 512
        assert (load.prompt + load.output).max() <= 1024


def test_the_front_end_is_what_lone_requests_wait_beyond_their_steps():
    assert frontend_seconds(np.array([0.110, 0.112, 0.5]), np.array([0.1, 0.1, 0.1])) == pytest.approx(0.012)
    assert frontend_seconds(np.array([]), np.array([])) == 0.0
    assert frontend_seconds(np.array([0.1]), np.array([0.2])) == 0.0
