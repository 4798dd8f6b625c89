"""Brute force for the theory of exclusive batching: exact Markov chains and slot-level simulations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from scipy.stats import binom

from slacktide.core.exclusive import Costs, Load

US, MS = 1e-6, 1e-3

# Published calibrations of Qwen3-8B and Qwen3-30B-A3B (authors' repository); alpha_mb = alpha_d unless a test says so.
RTX = Costs(4.691 * MS, 50.08 * US, 10.376 * MS, 103.88 * US, 10.376 * MS)
RTX_MARCH = Costs(6.014 * MS, 49.14 * US, 13.503 * MS, 80.36 * US, 13.503 * MS)
RTX_30B = Costs(31.139 * MS, 26.90 * US, 22.420 * MS, 121.94 * US, 31.139 * MS)
H200 = Costs(1.279 * MS, 24.85 * US, 8.921 * MS, 45.86 * US, 8.921 * MS)


def chain_throughput(k: int, n: int, costs: Costs, load: Load) -> float:
    """Requests per second of EB(k) on n slots with geometric outputs: exact, by first-step analysis.

    From n decoding requests each step ends Binomial(n, p0) of them; the phase is over when n - k or fewer decode.
    """
    p = 1.0 / load.output
    time, freed = np.zeros(n + 1), np.zeros(n + 1)  # from m decoding to the end of the phase
    freed[: n - k + 1] = n - np.arange(n - k + 1)
    for m in range(n - k + 1, n + 1):
        chance = binom.pmf(np.arange(m + 1), m, p)[::-1]  # of ending with 0..m decoding
        stay = chance[m]
        time[m] = (costs.alpha_d + costs.beta_d * m + chance[:m] @ time[:m]) / (1 - stay)
        freed[m] = (chance[:m] @ freed[:m]) / (1 - stay)
    cycle = time[n] + costs.alpha_p + costs.beta_p * load.prompt * freed[n]
    return float(freed[n] / cycle)


def mixed_throughput_slots(n: int, costs: Costs, load: Load, seed: int, steps: int) -> float:
    """Requests per second of mixed batching: n slots, geometric outputs, prompts uniform +-50 %, one step a prompt."""
    rng = np.random.default_rng(seed)
    p = 1.0 / load.output
    decoding = n
    time = done = 0.0
    for step in range(steps + steps // 10):
        waiting = n - decoding  # slots whose request was just admitted: they prefill in this step
        prompt = float(np.round(rng.uniform(0.5, 1.5, waiting) * load.prompt).sum())
        tokens = prompt + decoding
        time += costs.alpha_mb if prompt else costs.alpha_d
        time += prompt * costs.beta_p + decoding * costs.beta_d + costs.kappa * prompt * decoding / max(tokens, 1)
        ended = int(rng.binomial(decoding, p))
        decoding = decoding - ended + waiting
        done += ended
        if step == steps // 10:
            time = done = 0.0
    return done / time


def survivors(kind: str, mean: float) -> np.ndarray:
    """P(O > t) for t = 0, 1, ... of a distribution of outputs with (about) this mean; zero from its end on."""
    t = np.arange(int(40 * mean))
    if kind == "geometric":
        alive = (1 - 1 / mean) ** t
    elif kind == "uniform":
        low, high = round(mean / 2), round(1.5 * mean)
        alive = np.clip((high - t) / (high - low + 1), 0, 1)
    elif kind == "linear":  # hazard p0 + eta t with eta = p0^2, scaled to the mean
        from scipy.optimize import brentq

        def curve(p0: float) -> Any:
            return np.exp(-p0 * t - p0 * p0 * t * t / 2)

        alive = curve(brentq(lambda p0: curve(p0).sum() - mean, 0.1 / mean, 3 / mean))
    elif kind == "hyper":  # decreasing hazard: two geometric halves, means 1:9
        alive = 0.5 * (1 - 5 / mean) ** t + 0.5 * (1 - 1 / (1.8 * mean)) ** t
    else:
        raise ValueError(kind)
    return np.append(alive[alive > 1e-12], 0.0)


def draw(kind: str, mean: float, size: int, rng: np.random.Generator) -> np.ndarray:
    """Outputs of that distribution, by inversion."""
    alive = survivors(kind, mean)
    return np.searchsorted(-alive, -rng.random(size), side="left").clip(1)


def phase_peaks(n: int, theta: float, load: Load, kind: str, seed: int, phases: int) -> np.ndarray:
    """Largest KV tokens of each phase of EB(theta n): slots with ages carried over, prompts uniform +-50 %."""
    rng = np.random.default_rng(seed)
    k = max(int(theta * n), 1)

    def prompts(size: int) -> np.ndarray:
        return np.round(rng.uniform(0.5, 1.5, size) * load.prompt)

    prompt, output = prompts(n), draw(kind, load.output, n, rng)
    age = np.floor(rng.random(n) * output)  # spread over their lives, so that the start is not in step
    peaks = np.empty(phases)
    warm = phases // 2
    for phase in range(-warm, phases):
        alive = np.ones(n, dtype=bool)
        peak = 0.0
        while int(alive.sum()) > n - k:
            age[alive] += 1
            peak = max(peak, float((prompt + age)[alive].sum()))
            alive &= age < output
        free = np.flatnonzero(~alive)
        prompt[free], output[free], age[free] = prompts(free.size), draw(kind, load.output, free.size, rng), 0
        if phase >= 0:
            peaks[phase] = max(peak, float((prompt + age).sum()))
    return peaks


def with_kappa(costs: Costs, kappa: float, alpha_mb: float | None = None) -> Costs:
    return replace(costs, kappa=kappa, alpha_mb=costs.alpha_d if alpha_mb is None else alpha_mb)
