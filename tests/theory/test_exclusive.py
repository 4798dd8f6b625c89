"""Formulas of exclusive batching against brute force; tolerances are what the formulas are good for."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import brentq, minimize_scalar

from slacktide.core.exclusive import (
    Costs,
    Load,
    crossover,
    crossover_sides,
    exclusive_lead,
    exclusive_throughput,
    kappa_from_knee,
    mixed_throughput,
    optimal_threshold,
    paper_crossover,
    paper_shift,
    paper_threshold,
    phase_overhead,
    slots_to_free,
    threshold,
    zeta_of,
)


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


brute = _load("exclusive_brute")
RTX, RTX_MARCH, RTX_30B, H200, US = brute.RTX, brute.RTX_MARCH, brute.RTX_30B, brute.H200, brute.US
LOADS = [Load(1024, 128), Load(512, 256), Load(128, 1024)]


# ---- eq. (3)


def test_threshold_solves_eq_3_from_1e_6_to_1e3():
    for x in np.geomspace(1e-6, 1e3, 46):
        exact = brentq(lambda z, x=x: float(np.expm1(np.longdouble(z)) - np.longdouble(z) - x), 1e-9, 10, xtol=1e-15)
        assert zeta_of(x) == pytest.approx(exact, rel=1e-9)
        assert threshold(x) == pytest.approx(-np.expm1(-exact), rel=1e-9)


def test_threshold_equals_the_fluid_optimum():
    """Published check: brute force over the fluid model, five digits."""
    x = [1e-4, 1e-3, 0.01, 0.1, 1, 10]
    assert threshold(x) == pytest.approx([0.01401, 0.04342, 0.12905, 0.34047, 0.68216, 0.92653], abs=6e-6)


def test_threshold_of_nothing_to_amortise():
    assert threshold([0.0, -1.0]).tolist() == [0.0, 0.0]
    assert slots_to_free(0.0, 100) == 1


@pytest.mark.parametrize("n", [64, 256])
@pytest.mark.parametrize("costs", [RTX, H200, RTX_30B], ids=["rtx", "h200", "rtx-30b"])
@pytest.mark.parametrize("load", LOADS, ids=lambda load: f"{load.prompt}/{load.output}")
def test_threshold_and_throughput_against_the_exact_chain(costs: Costs, load: Load, n: int):
    theta = optimal_threshold(costs, load)
    k0 = slots_to_free(theta, n)
    near = sorted({*range(max(k0 - 5, 1), k0 + 6), max(k0 // 2, 1), min(2 * k0, n - 1)})
    exact = {k: brute.chain_throughput(k, n, costs, load) for k in near}
    best = max(exact.values())
    assert exact[k0] >= best * (1 - (1e-4 if n >= 256 else 3.4e-3))
    ends = [exact[near[-1]]] if near[0] == 1 else [exact[near[0]], exact[near[-1]]]
    assert best > max(ends) * (1 + 1e-7)  # the optimum is inside, so k0 had to find it
    formula = float(exclusive_throughput(k0 / n, n, costs, load))
    assert formula == pytest.approx(exact[k0], rel=2.5e-3 if n >= 256 else 1.1e-2)


def test_waiting_for_one_slot_costs_what_the_chain_says():
    """k = 1 (vLLM v0 at saturation) loses 0.3 to 4 % with 8B calibrations, more with 30B ones."""
    n, load = 256, Load(512, 256)
    for costs, low, high in ((RTX, 0.003, 0.04), (RTX_30B, 0.04, 0.20)):
        best = brute.chain_throughput(slots_to_free(optimal_threshold(costs, load), n), n, costs, load)
        loss = 1 - brute.chain_throughput(1, n, costs, load) / best
        assert low < loss < high


def test_budget_caps_the_slots():
    assert slots_to_free(0.0795, 1024) == 81
    assert slots_to_free(0.0795, 1024, budget=16384, mean_prompt=1024) == 16
    costs, load, n = RTX, Load(1024, 128), 1024
    capped = exclusive_throughput(16 / n, n, costs, load, budget=16384)
    assert capped > exclusive_throughput(17 / n, n, costs, load, budget=16384)  # one more pays alpha_p twice
    assert capped < exclusive_throughput(16 / n, n, costs, load) * (1 + 1e-12)


# ---- distributions other than geometric


@pytest.mark.parametrize("kind", ["geometric", "uniform", "linear", "hyper"])
def test_eq_3_with_the_mean_is_near_the_optimum_for_any_outputs(kind: str):
    n = 1024
    for costs, load in ((RTX, Load(512, 256)), (H200, Load(512, 512)), (RTX_30B, Load(512, 512))):
        alive = brute.survivors(kind, load.output)
        mean = Load(load.prompt, float(alive.sum()))
        m = np.arange(1, int(mean.output))
        overhead = phase_overhead(m, alive, costs) / n
        total = overhead + mean.prompt * costs.beta_p + mean.output * costs.beta_d
        theta = 1 / np.array([alive[::each].sum() for each in m])
        chosen = int(np.argmin(np.abs(theta - optimal_threshold(costs, mean))))
        assert total[chosen] <= total.min() * (1 + (2.1e-4 if kind != "hyper" else 2e-3))


def test_phase_overhead_equals_a_simulation_with_ages():
    """Uniform outputs, 400 slots, phases of m steps: alpha_p + alpha_d m per phase over completions per phase."""
    rng, n, m = np.random.default_rng(3), 400, 40
    costs = RTX
    output = brute.draw("uniform", 256, n, rng)
    age = np.floor(rng.random(n) * output)
    done, phases = 0, 3000
    for phase in range(-500, phases):
        age += m
        over = age >= output
        if phase >= 0:
            done += int(over.sum())
        output[over], age[over] = brute.draw("uniform", 256, int(over.sum()), rng), 0
    simulated = (costs.alpha_p + costs.alpha_d * m) * phases / done * n
    assert simulated == pytest.approx(float(phase_overhead(m, brute.survivors("uniform", 256), costs)), rel=0.01)


# ---- eq. (5)


def _own_model_optimum(costs: Costs, load: Load, n: float, p0: float, eta: float) -> float:
    """Best theta of the paper's model: all n slots restart, S(t) = exp(-p0 t - eta t^2 / 2) from the phase's start."""

    def cost(theta: float) -> float:
        zeta = -np.log1p(-theta)
        end = zeta / p0 if eta == 0 else (-p0 + np.sqrt(p0 * p0 + 2 * eta * zeta)) / eta
        t = np.linspace(0, end, 4001)
        y = np.exp(-p0 * t - eta * t * t / 2)
        area = float(((y[1:] + y[:-1]) / 2).sum() * (t[1] - t[0]))
        return float((costs.alpha_p + costs.alpha_d * end + costs.beta_d * n * area) / theta)

    return float(minimize_scalar(cost, bounds=(1e-4, 0.6), method="bounded", options={"xatol": 1e-10}).x)


@pytest.mark.parametrize(("ratio", "expected"), [(1e-3, 0.992), (1e-2, 0.923), (3e-2, 0.765)])
def test_paper_shift_is_first_order_in_its_own_model(ratio: float, expected: float):
    """Published ratios of the brute force, RTX-8B with rho = beta_d N / alpha_d = 10."""
    load = Load(512, 256)
    p0 = 1 / load.output
    n = 10 * RTX.alpha_d / RTX.beta_d
    base = _own_model_optimum(RTX, load, n, p0, 0.0)
    true = _own_model_optimum(RTX, load, n, p0, ratio * p0 * p0) - base
    formula = float(paper_shift(threshold(p0 * RTX.alpha_p / RTX.alpha_d), p0, ratio * p0 * p0, 10.0))
    assert formula / true == pytest.approx(expected, abs=0.02)


def test_paper_threshold_has_the_guards():
    load = Load(512, 256)
    base = optimal_threshold(RTX_MARCH, load)
    # The logged run: intercept at its floor of 1e-4, eta 7.55e-5; unguarded the shift is in the hundreds.
    assert float(paper_shift(0.01, 1e-4, 7.55e-5, 12.0)) > 100
    assert paper_threshold(RTX_MARCH, 2046, 1e-4, 7.55e-5, 256) == pytest.approx(6 * base)
    assert paper_threshold(RTX_MARCH, 2046, 1 / 256, 0.0, 256) == pytest.approx(base)
    assert paper_threshold(RTX_30B, 2046, 1 / 20, 1e-2, 20) == 0.80
    tiny = Costs(1e-9, 1e-6, 1e-2, 1e-6, 1e-2)
    assert paper_threshold(tiny, 100, 1e-3, 0.0, 1000) == 0.01


# ---- mixed batching and the crossover


@pytest.mark.parametrize(
    ("costs", "kappa", "n", "mean_field_error"),
    [(RTX_MARCH, 1.5e-4, 128, 0.08), (RTX_MARCH, 1.5e-4, 512, 0.04), (H200, 2.6e-5, 256, 0.01)],
    ids=["rtx-128", "rtx-512", "h200-256"],
)
def test_mixed_throughput_with_clumped_prompts(costs: Costs, kappa: float, n: int, mean_field_error: float):
    costs, load = brute.with_kappa(costs, kappa), Load(512, 256)
    simulated = brute.mixed_throughput_slots(n, costs, load, seed=1, steps=60_000)
    assert float(mixed_throughput(n, costs, load)) == pytest.approx(simulated, rel=4e-3)
    # The paper's mean-field form overstates the interference: it would switch to EB too early.
    assert float(mixed_throughput(n, costs, load, poisson=False)) < simulated * (1 - mean_field_error)


def test_mixed_steps_without_a_prompt_are_decode_steps():
    """alpha_mb of a third of alpha_d: at N = 64 three quarters of the steps hold no prompt."""
    costs, load = brute.with_kappa(H200, 2.6e-5, alpha_mb=H200.alpha_d / 3), Load(512, 256)
    simulated = brute.mixed_throughput_slots(64, costs, load, seed=4, steps=60_000)
    assert float(mixed_throughput(64, costs, load)) == pytest.approx(simulated, rel=0.01)
    assert float(mixed_throughput(64, costs, load, poisson=False)) > 1.2 * simulated


def test_budget_bounds_mixed_batching():
    costs, load = brute.with_kappa(RTX, 0.0), Load(1024, 128)
    free = float(mixed_throughput(4096, costs, load))
    bound = float(mixed_throughput(4096, costs, load, budget=2048))
    assert 1 / bound - 1 / free == pytest.approx(costs.alpha_mb * (load.tokens / 2048 - 129 / 4096))
    assert float(mixed_throughput(16, costs, load, budget=8192)) == float(mixed_throughput(16, costs, load))


@pytest.mark.parametrize(
    ("logged", "theta_side"),
    [((520.129, 203.69, 2045.868), 2.910411e-6), ((520.0, 259.0386, 174.6616), 4.027798e-5)],
)
def test_logged_evaluations_of_the_authors_run(logged: tuple[float, float, float], theta_side: float):
    """RHS printed by the RTX PRO 6000 run: alpha_mb := alpha_p, theta 0.8.

    The published calibration has four digits, so five digits are what can agree.
    """
    prompt, output, n = logged
    theirs = brute.with_kappa(RTX_MARCH, 0.0, alpha_mb=RTX_MARCH.alpha_p)
    _, right = crossover_sides(n, 0.8, theirs, Load(prompt, output), 9.25e-5)
    assert float(right) == pytest.approx(theta_side, rel=1e-5)


@pytest.mark.parametrize(
    ("costs", "load", "kappa", "theta", "paper", "corrected"),
    [
        (RTX_MARCH, Load(512, 256), 1.5e-4, 0.8, 136, 214),
        (H200, Load(512, 256), 2.6e-5, 0.8, 519, 594),
        (H200, Load(512, 512), 2e-6, None, 195, None),
        (RTX_MARCH, Load(512, 256), 5e-6, None, 228, None),
    ],
)
def test_crossover_concurrency(costs, load, kappa, theta, paper, corrected):
    costs = brute.with_kappa(costs, kappa)
    at = optimal_threshold(costs, load) if theta is None else theta
    assert paper_crossover(at, costs, load) == pytest.approx(paper, abs=1.0)
    if corrected is not None:
        assert crossover(costs, load, theta=theta) == pytest.approx(corrected, abs=1.5)


def test_crossover_is_where_the_simulated_systems_cross():
    """Below it mixed wins, above it EB, in the chain and the slot simulation."""
    costs, load = brute.with_kappa(RTX_MARCH, 1.5e-4), Load(512, 256)
    at = crossover(costs, load)
    for n, sign in ((round(0.7 * at), -1), (round(1.5 * at), 1)):
        k = slots_to_free(optimal_threshold(costs, load), n)
        lead = brute.chain_throughput(k, n, costs, load) / brute.mixed_throughput_slots(n, costs, load, 2, 60_000) - 1
        assert sign * lead > 0.005
        assert float(exclusive_lead(n, costs, load)) == pytest.approx(lead, abs=0.01)


def test_crossover_without_interference_and_always():
    load = Load(512, 256)
    cheap = Costs(1e-3, 50 * US, 10e-3, 50 * US, 10e-3, 0.0)
    assert crossover(cheap, load) == np.inf
    assert paper_crossover(optimal_threshold(cheap, load), cheap, load) == np.inf
    dear = Costs(1e-3, 50 * US, 10e-3, 50 * US, 50e-3, 1e-3)
    assert crossover(dear, load) <= 6  # below, hardly any step holds a prompt beside decodes
    assert paper_crossover(optimal_threshold(dear, load), dear, load) == 0.0


def test_kappa_from_the_published_knees():
    assert kappa_from_knee(RTX_MARCH.beta_p, RTX_MARCH.beta_d, 0.2) == pytest.approx(1.56e-4, rel=0.01)
    assert kappa_from_knee(H200.beta_p, H200.beta_d, 0.8) == pytest.approx(2.6e-5, rel=0.02)
