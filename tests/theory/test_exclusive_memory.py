"""Memory-safe slots and hazard estimates against simulated phases and drawn lengths."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slacktide.core.exclusive import Costs, Load
from slacktide.core.exclusive_hazard import (
    Ema,
    costs_of,
    empirical_hazard,
    fit_line,
    fit_linear_hazard,
    fit_mixed,
)
from slacktide.core.exclusive_memory import (
    mean_age,
    mean_residual_age,
    memory_safe_slots,
    overflow_share,
    paper_slots,
    peak_tokens,
)
from slacktide.core.latency import AffineModel

_SPEC = importlib.util.spec_from_file_location("exclusive_brute", Path(__file__).with_name("exclusive_brute.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
brute: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(brute)

CAPACITY = 429_184.0  # KV tokens of an RTX PRO 6000 with Qwen3-8B, as logged by the authors


@pytest.mark.parametrize(
    ("prompt", "output", "theta", "paper", "sound"),
    [
        (1024, 128, 0.080, 374, 361), (512, 256, 0.057, 563, 543), (512, 256, 0.7, 665, 640),
        (512, 512, 0.041, 421, 399), (512, 512, 0.3, 454, 430), (128, 1024, 0.029, 344, 338),
        (128, 1024, 0.3, 399, 389), (128, 1024, 0.7, 596, 527),
    ],
)  # fmt: skip
def test_slots_of_both_rules(prompt: int, output: int, theta: float, paper: int, sound: int):
    load = Load(prompt, output)
    assert paper_slots(CAPACITY, load, theta, 1 / output) == paper
    assert memory_safe_slots(CAPACITY, load, theta, prompt_variance=prompt**2 / 12) == sound


@pytest.mark.parametrize(
    ("load", "theta"),
    [(Load(512, 256), 0.057), (Load(1024, 128), 0.08), (Load(128, 512), 0.3)],
    ids=["512/256", "1024/128", "128/512"],
)
def test_the_quantile_rule_overflows_as_rarely_as_asked(load: Load, theta: float):
    capacity = 150_000.0  # fewer slots: faster, and the fluctuation weighs more
    variance = load.prompt**2 / 12
    sound = memory_safe_slots(capacity, load, theta, prompt_variance=variance)
    share = overflow_share(brute.phase_peaks(sound, theta, load, "geometric", 5, 500), capacity)
    assert share <= 0.03
    printed = paper_slots(capacity, load, theta, 1 / load.output)
    if load.prompt > 128:  # eq. (6) has nearly no margin there
        assert overflow_share(brute.phase_peaks(printed, theta, load, "geometric", 5, 500), capacity) > 0.2


def test_increasing_and_decreasing_hazards():
    """Uniform outputs stay below the geometric rule; a decreasing hazard needs the mean residual age."""
    load, theta, capacity = Load(128, 256), 0.05, 100_000.0
    geometric = memory_safe_slots(capacity, load, theta, prompt_variance=load.prompt**2 / 12)
    assert overflow_share(brute.phase_peaks(geometric, theta, load, "uniform", 6, 300), capacity) == 0.0
    peaks = brute.phase_peaks(geometric, theta, load, "hyper", 6, 300)
    assert overflow_share(peaks, capacity) > 0.9
    drawn = brute.draw("hyper", load.output, 200_000, np.random.default_rng(0))
    age = mean_residual_age(drawn)
    assert age > 1.3 * mean_age(theta, 1 / load.output)
    safe = memory_safe_slots(capacity, load, theta, prompt_variance=load.prompt**2 / 12, age=age)
    assert safe < geometric
    assert overflow_share(brute.phase_peaks(safe, theta, load, "hyper", 6, 300), capacity) < 0.12


def test_peak_is_at_the_start_or_within_the_phase():
    assert peak_tokens(512, 250, 0.1, 1 / 256) == pytest.approx(762)  # p0 D >= 1: it only falls
    d = mean_age(0.7, 1 / 1024) + 128
    t = np.linspace(0, -np.log(0.3) * 1024, 100_001)
    assert peak_tokens(128, d - 128, 0.7, 1 / 1024) == pytest.approx((np.exp(-t / 1024) * (d + t)).max(), rel=1e-8)


def test_hazard_of_drawn_lengths():
    rng = np.random.default_rng(1)
    p0, eta = fit_linear_hazard(rng.geometric(1 / 100, 200_000))
    assert p0 == pytest.approx(0.01, rel=0.1)
    assert eta < 1e-5
    hazard, survivors = empirical_hazard(np.array([1, 2, 2, 4]))
    assert survivors.tolist() == [4, 4, 3, 1, 1]
    assert hazard.tolist() == [0, 1 / 4, 2 / 3, 0, 1]
    linear = brute.draw("linear", 200, 200_000, rng)
    p0, eta = fit_linear_hazard(linear)
    alive = brute.survivors("linear", 200)
    rate = -np.log(alive[1]) - 0.0
    assert p0 == pytest.approx(rate, rel=0.1)
    assert eta == pytest.approx(rate**2, rel=0.1)
    assert fit_linear_hazard(np.array([7, 7, 7])) == (1 / 7, 0.0)


def test_costs_from_steps_and_from_a_model():
    rng = np.random.default_rng(2)
    costs = Costs(4e-3, 5e-5, 1e-2, 1e-4, 1.1e-2, 1.5e-4)
    tokens = rng.integers(100, 8000, 500).astype(float)
    decodes = np.floor(tokens * rng.uniform(0.02, 0.98, 500))
    r = decodes / tokens
    times = costs.alpha_mb + tokens * ((1 - r) * costs.beta_p + r * costs.beta_d + costs.kappa * r * (1 - r))
    assert fit_mixed(tokens, decodes, times, costs) == pytest.approx((1.1e-2, 1.5e-4))
    assert fit_mixed(tokens, decodes, times - 2 * costs.kappa * tokens * r * (1 - r), costs)[1] == 0.0
    assert fit_line(np.array([1.0, 2.0, 3.0]), np.array([5.0, 7.0, 9.0])) == pytest.approx((3.0, 2.0))
    model = AffineModel(4e-3, 5e-5, 1e-2, 1e-4, 1.1e-2, 1.5e-4)
    found = costs_of(model, Load(512, 256), 300, 8192)
    for name in ("alpha_p", "beta_p", "alpha_d", "beta_d", "alpha_mb", "kappa"):
        assert getattr(found, name) == pytest.approx(getattr(costs, name), rel=1e-6), name


def test_average_takes_its_first_value_whole():
    average = Ema(0.25)
    assert average.add(8.0) == 8.0
    assert average.add(4.0) == 7.0
    assert average.add(0.0, 0.5) == 3.5
