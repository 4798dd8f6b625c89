"""Fits of the predictor, offline and on line."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from slacktide.core import shape as s
from slacktide.core.latency import AffineModel
from slacktide.core.latency_extended import ExtendedFeatureModel, extended_features
from slacktide.core.pack import as_policy
from slacktide.core.policies.greedy_dynamic import GreedyDynamic
from slacktide.errors import InputError
from slacktide.profiling.belief import fit_belief, sample_shapes
from slacktide.profiling.fit import fit, fit_extended, nonnegative_least_squares, scene_errors
from slacktide.profiling.kernel_tables import gpus, models
from slacktide.profiling.mlp import fit_mlp
from slacktide.profiling.online import Calibrating, Refitter
from slacktide.profiling.profiles import load_profile
from slacktide.profiling.transfer import TransferModel
from slacktide.sim.engine import EngineConfig, simulate
from slacktide.workload.requests import Workload

KNOTS = np.array([0.0, 64.0, 512.0])


@pytest.fixture(scope="module")
def shapes() -> np.ndarray:
    return sample_shapes(load_profile("rtx-4090/llama-3-8b"), 3, 400)


def truth(seed: int = 1) -> ExtendedFeatureModel:
    rng = np.random.default_rng(seed)
    scale = [8e-3, 1e-5, 2e-5, 4e-5, 2e-5, 1e-9, 1e-8, 1e-8, 1e-5, 1e-6, 1e-5]
    return ExtendedFeatureModel(rng.uniform(0.5, 1.5, (3, 11)) * scale, KNOTS, 1e-4)


def test_features_split_the_tokens_between_knots(shapes):
    found = extended_features(shapes, KNOTS)
    assert found[:, 1:4].sum(axis=1) == pytest.approx(shapes[:, 0])
    assert (found[:, 1] <= 64).all()
    assert (found[:, 2] <= 448).all()


def test_fit_recovers_a_model_of_its_own_family(shapes):
    times = truth().step_times(shapes)
    found = fit_extended(shapes, times)
    assert np.abs(found.step_times(shapes) / times - 1).max() < 0.02
    errors = scene_errors(found, shapes, times)
    assert set(errors) == {"decode", "prefill", "mixed"}
    assert all(error.r2 > 0.999 and error.mae < 1e-3 for error in errors.values())


def test_a_scene_with_few_steps_takes_the_global_expert(shapes):
    times = truth().step_times(shapes)
    few = np.concatenate([np.arange(20), np.arange(400, 1200)])
    found = fit_extended(shapes[few], times[few])
    everything = fit_extended(shapes[few], times[few], min_samples=10_000)
    assert np.array_equal(found.weights[0], everything.weights[0])
    assert not np.array_equal(found.weights[2], everything.weights[2])


def test_weights_let_samples_count_less(shapes):
    times = truth().step_times(shapes)
    spoilt = times.copy()
    spoilt[::7] *= 3
    trust = np.ones(len(times))
    trust[::7] = 1e-6
    plain, weighted = fit_extended(shapes, spoilt), fit_extended(shapes, spoilt, weights=trust)
    assert np.median(np.abs(weighted.step_times(shapes) / times - 1)) < 0.01
    assert np.median(np.abs(plain.step_times(shapes) / times - 1)) > 0.03


def test_errors_name_what_they_measure(shapes):
    model = truth()
    times = model.step_times(shapes)
    off = replace(model, weights=model.weights * 1.1)
    errors = scene_errors(off, shapes, times)
    assert errors["mixed"].median == pytest.approx(0.1)
    assert errors["mixed"].mae == pytest.approx(0.1 * times[800:].mean())
    assert scene_errors(model, shapes[:3], np.full(3, 0.5))["decode"].steps == 3


@pytest.mark.parametrize("name", ["rtx-pro-6000/qwen3-8b", "rtx-4090/llama-3-8b"])
def test_mixed_batches_within_five_percent(name):
    profile = load_profile(name)
    held = sample_shapes(profile, seed=77)
    times = profile.latency.step_times(held)
    assert scene_errors(fit_belief(profile), held, times)["mixed"].median < 0.05
    assert scene_errors(fit_belief(profile, features="paper"), held, times)["mixed"].median < 0.10


def test_refuses_what_it_cannot_fit(shapes):
    with pytest.raises(InputError, match="features"):
        fit(shapes, np.ones(len(shapes)), features="seven")
    for times in (np.zeros(len(shapes)), np.full(len(shapes), np.nan), np.ones(3)):
        with pytest.raises(ValueError, match="fit: expected"):
            fit(shapes, times)


def test_nonnegative_least_squares_is_optimal():
    rng = np.random.default_rng(0)
    x, y = rng.uniform(0, 1, (60, 6)) * [1, 10, 1e3, 1e-3, 1, 1], rng.uniform(-1, 1, 60)
    w = nonnegative_least_squares(x, y, ridge=0.0)
    gradient = (x.T @ (x @ w - y)) / np.abs(x).max(axis=0)
    assert (w >= 0).all()
    assert np.abs(gradient[w > 0]).max() < 1e-9
    assert (gradient[w == 0] >= -1e-9).all()


def test_a_fit_on_one_gpu_predicts_another():
    one, other = load_profile("h100/llama-3-8b"), load_profile("h200/llama-3-8b")
    steps = sample_shapes(one, 0, 300)
    model = TransferModel.fit(steps, one.latency.step_times(steps), gpus()["H100-SXM"], models()["llama-3-8b"])
    held = sample_shapes(other, 1, 300)
    predicted = model.step_times(held, gpus()["H200-SXM"], models()["llama-3-8b"])
    assert np.median(np.abs(predicted / other.latency.step_times(held) - 1)) < 0.25
    with pytest.raises(ValueError, match="transfer fit"):
        TransferModel.fit(steps[:300], np.ones(300), gpus()["H100-SXM"], models()["llama-3-8b"])


def test_network_learns_and_stays_small(shapes):
    times = truth().step_times(shapes)
    model = fit_mlp(shapes, times, hidden=(32, 16), epochs=120)
    assert model.num_weights == 11 * 32 + 32 + 32 * 16 + 16 + 16 + 1
    assert np.median(np.abs(model.step_times(shapes) / times - 1)) < 0.10
    one, other = (fit_mlp(shapes, times, hidden=(4,), epochs=2) for _ in range(2))
    assert np.array_equal(one.step_times(shapes), other.step_times(shapes))


# ---- on line ---------------------------------------------------------------------------------------------------------


def feed(refitter: Refitter, real: ExtendedFeatureModel, steps: np.ndarray, noise: float = 0.0, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    for shape, took in zip(steps, real.step_times(steps).tolist(), strict=True):
        refitter.observe(shape, took * float(np.exp(noise * rng.standard_normal())))


def error(model: ExtendedFeatureModel, real: ExtendedFeatureModel, steps: np.ndarray) -> float:
    return float(np.median(np.abs(model.step_times(steps) / real.step_times(steps) - 1)))


def test_refits_follow_a_slower_engine(shapes):
    model, mixed = truth(), shapes[800:]
    real = replace(model, weights=model.weights * 1.07)
    refitter = Refitter(model)
    feed(refitter, real, np.concatenate([mixed] * 5), noise=0.02)
    assert refitter.refits >= 1
    assert error(refitter.model, real, mixed) < 0.025 < error(model, real, mixed)
    assert np.array_equal(refitter.model.weights[0], model.weights[0])  # no step of pure decoding was seen


def test_drift_is_noticed_and_the_past_forgotten(shapes):
    model, mixed = truth(), shapes[800:]
    refitter = Refitter(model, refit_every=10**9)
    feed(refitter, model, np.concatenate([mixed] * 3))
    assert refitter.drifts == 0
    real = replace(model, weights=model.weights * 1.5)
    feed(refitter, real, np.concatenate([mixed] * 5))
    assert refitter.drifts >= 1
    assert error(refitter.model, real, mixed) < 0.15 < error(model, real, mixed)


def test_a_refit_that_is_worse_on_the_steps_kept_out_is_rejected(shapes):
    model, mixed = truth(), shapes[800:]
    refitter = Refitter(model, refit_every=10**9)
    rng = np.random.default_rng(1)
    real = model.step_times(mixed)
    for i in range(800):
        kept_out = (i + 1) % 5 == 0
        factor = 1.0 if kept_out else 1.0 + 0.08 * rng.choice([0.0, 1.0])
        refitter.observe(mixed[i % 400], float(real[i % 400]) * factor)
    assert not refitter.refit()
    assert refitter.rejected == 1
    assert refitter.model is model


def test_outliers_teach_nothing(shapes):
    """Five hiccups in a row, and one step in twenty."""
    model = truth()
    refitter = Refitter(model, refit_every=10**9)
    for i, shape in enumerate(shapes[800:1100]):
        if i < 5 or i % 20 == 0:
            refitter.observe(shape, 30.0)
            refitter.observe(shape, float("nan"))
        else:
            refitter.observe(shape, float(model.step_times(shape[None, :])[0]))
    assert refitter.outliers == 5 + 14
    refitter.refit()
    assert error(refitter.model, model, shapes[800:]) < 1e-6


def test_where_many_steps_are_far_off_the_prediction_is_wrong(shapes):
    """Every third kind of step takes a sixth of what the model says: no median shows it, and no refit may miss it."""
    model, mixed = truth(), shapes[800:]
    few = mixed[:, s.PREFILL_TOKENS] < np.percentile(mixed[:, s.PREFILL_TOKENS], 33)
    real = np.where(few, 1 / 6, 1.0) * model.step_times(mixed)
    refitter = Refitter(model)
    for _ in range(12):
        for shape, took in zip(mixed, real.tolist(), strict=True):
            refitter.observe(shape, took)
    assert refitter.refits >= 1
    wrong = [np.median(np.abs(one.step_times(mixed[few]) / real[few] - 1)) for one in (model, refitter.model)]
    assert wrong[1] < 0.5 * wrong[0]
    assert refitter.outliers < 0.2 * 12 * few.sum()


def test_background_refit_swaps_the_model(shapes):
    model, mixed = truth(), shapes[800:]
    refitter = Refitter(model, background=True)
    feed(refitter, replace(model, weights=model.weights * 1.08), np.concatenate([mixed] * 3))
    end = time.monotonic() + 20
    while refitter.refits == 0 and time.monotonic() < end:
        time.sleep(0.01)
    assert refitter.refits >= 1


def test_a_calibrating_policy_learns_the_engine_it_runs_on():
    n = 400
    load = Workload(
        arrival_time=np.arange(n) * 0.05, num_prompt_tokens=np.tile([300, 60, 900, 150], n // 4),
        num_output_tokens=np.tile([20, 30], n // 2), slo_ttft=np.full(n, 1.0), slo_tbt=np.full(n, 0.05),
    )  # fmt: skip
    real = AffineModel(0.012, 5e-5, 0.012, 1e-4)
    steps = sample_shapes(load_profile("rtx-4090/llama-3-8b"), 5, 300)
    wrong = fit_extended(steps, real.step_times(steps) * 0.9)
    refitter = Refitter(wrong, refit_every=200)
    policy = Calibrating(GreedyDynamic(), refitter)
    config = EngineConfig(max_num_batched_tokens=2048)
    one = simulate(load, as_policy(policy), real, config, belief=wrong).log
    again = Refitter(wrong, refit_every=200)
    other = simulate(load, as_policy(Calibrating(GreedyDynamic(), again)), real, config, belief=wrong).log
    assert refitter.refits >= 1
    assert np.array_equal(one.start, other.start)
    seen = refitter.model.step_times(steps[600:]) / real.step_times(steps[600:])
    assert np.median(np.abs(seen - 1)) < 0.05
