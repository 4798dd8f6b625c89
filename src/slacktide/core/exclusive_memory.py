"""How many slots EB(k) may have so that its KV cache overflows in at most a share epsilon of its phases. Tokens.

Right after a refill a slot holds D = mu_L + (mean age of its request) tokens; within a phase the total may still rise.
Equation (6) of arXiv 2606.00516 has the right mean but a margin that does not grow with sqrt(N); the sound rule takes
a normal quantile of the sum over slots.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np

from slacktide.core.exclusive import Load
from slacktide.core.types import FloatArray, IntArray

EPSILON = 0.01
"""Share of phases that may overflow, in the paper and here."""


def mean_age(theta: float, p0: float) -> float:
    """Mean output tokens of a running request right after a refill, constant hazard: (1-theta) zeta / (theta p0)."""
    if theta <= 0:
        return 1.0 / p0
    return (1 - theta) * -math.log1p(-theta) / (theta * p0)


def mean_residual_age(lengths: IntArray | FloatArray) -> float:
    """E[O (O-1)] / (2 E[O]): mean age in a steady state for any outputs; above 1/p0 when the hazard decreases."""
    o = np.asarray(lengths, dtype=np.float64)
    return float((o * (o - 1)).sum() / (2 * o.sum()))


def peak_tokens(prompt: float, age: float, theta: float, p0: float) -> float:
    """Dmax: largest mean KV tokens of a slot within a phase, constant hazard.

    The total follows exp(-p0 t) (D + t): it falls from the start if p0 D >= 1, else peaks at t = 1/p0 - D, or at the
    end of the phase, t = zeta / p0, if that comes first.
    """
    d = prompt + age
    t = min(max(1 / p0 - d, 0.0), -math.log1p(-theta) / p0 if theta < 1 else math.inf)
    return math.exp(-p0 * t) * (d + t)


def slot_variance(prompt_variance: float, mean_output: float, theta: float) -> float:
    """Variance of a slot's KV tokens at the peak: v = Var(L) + m^2 (1-theta) / theta^2, m = max(1, zeta / p0)."""
    m = max(1.0, -math.log1p(-theta) * mean_output)
    return prompt_variance + m * m * (1 - theta) / theta**2


def memory_safe_slots(
    capacity: float,
    load: Load,
    theta: float,
    *,
    prompt_variance: float = 0.0,
    age: float | None = None,
    epsilon: float = EPSILON,
) -> int:
    """Most slots N with N Dmax + z sqrt(N v) <= capacity, z the 1 - epsilon quantile. At least 1.

    `age`: mean age right after a refill, where the outputs are not geometric; with a decreasing hazard the mean
    residual age (larger than the geometric one), with an increasing hazard it may be left out (conservative).
    """
    p0 = 1.0 / max(load.output, 1.0)
    theta = min(max(theta, 1e-6), 1 - 1e-9)
    peak = peak_tokens(load.prompt, mean_age(theta, p0) if age is None else age, theta, p0)
    spread = NormalDist().inv_cdf(1 - epsilon) * math.sqrt(slot_variance(prompt_variance, load.output, theta))
    root = (-spread + math.sqrt(spread * spread + 4 * peak * capacity)) / (2 * peak)
    return max(int(root * root), 1)


def paper_slots(capacity: float, load: Load, theta: float, p0: float, epsilon: float = EPSILON) -> int:
    """N* of eq. (6) as printed: (C - ln(1/eps) / (p0^2 mu_L)) / (mu_L + (1-theta) zeta / (theta p0)). At least 1."""
    margin = math.log(1 / epsilon) / (p0 * p0 * load.prompt)
    return max(int((capacity - margin) / (load.prompt + mean_age(theta, p0))), 1)


def overflow_share(peaks: Any, capacity: float) -> float:
    """Share of phases whose peak exceeds the capacity."""
    return float(np.mean(np.asarray(peaks) > capacity))
