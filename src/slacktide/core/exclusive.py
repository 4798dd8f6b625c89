"""Theory of exclusive batching EB(k): thresholds, throughputs, and where mixed batching overtakes it.

EB(k) decodes until k of N slots are free, then refills them with prompt-only steps. A step of n tokens takes
alpha + beta n; subscripts p, d, mb stand for prompt-only, decode-only and mixed steps. Equation numbers are those of
"Threshold-Based Exclusive Batching for LLM Inference" (arXiv 2606.00516). Where its formula is unsound, the printed
form stands here under `paper_` and the sound one beside it. All functions take numbers or arrays and broadcast.

theta = k / N, zeta = -ln(1 - theta), mu_L and mu_O = mean prompt and output tokens, p0 = chance that a request ends in
a decode step (1 / mu_O for geometric outputs). Seconds, tokens, requests per second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from slacktide.core.types import FloatArray

THETA_MIN, THETA_MAX = 0.01, 0.80
"""Bounds that the authors' code puts on theta (paper form)."""
MAX_SHIFT = 5.0
"""The authors' code caps Delta-theta of eq. (5) at this many times theta_0: far out of its range it gives hundreds."""
_NEWTON_STEPS = 60  # from an upper bound of a convex function: quadratic, 6 suffice for x in [1e-6, 1e3]
_POISSON_WIDTH = 9.0  # standard deviations of the Poisson sum; what lies beyond weighs less than 1e-15


@dataclass(frozen=True, slots=True)
class Costs:
    """Affine step costs: seconds (alpha) and seconds per token (beta); `kappa` is the interference of mixed steps.

    A mixed step with decode share r of its n tokens takes alpha_mb + n ((1-r) beta_p + r beta_d + kappa r (1-r)).
    """

    alpha_p: float
    beta_p: float
    alpha_d: float
    beta_d: float
    alpha_mb: float
    kappa: float = 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """Mean prompt and output tokens of the requests (mu_L, mu_O), both at least 1."""

    prompt: float
    output: float

    @property
    def tokens(self) -> float:
        """Tokens that a request costs, prompt and output."""
        return self.prompt + self.output

    @property
    def decode_share(self) -> float:
        """r*: decode tokens over all tokens in a steady state."""
        return self.output / self.tokens


# ---- the threshold -----------------------------------------------------------------------------------------------


def zeta_of(x: Any) -> FloatArray:
    """The zeta >= 0 with exp(zeta) - 1 - zeta = x: eq. (3) in zeta = -ln(1 - theta_0). x <= 0 gives 0.

    Newton from min(sqrt(2x), ln(1 + x + sqrt(2x))), which is never below the root, so the steps only come down.
    """
    x = np.maximum(np.asarray(x, dtype=np.float64), 0.0)
    root = np.sqrt(2 * x)
    zeta = np.minimum(root, np.log1p(x + root))
    for _ in range(_NEWTON_STEPS):
        slope = np.expm1(zeta)
        step = np.where(slope > 0, (_exp_beyond_linear(zeta) - x) / np.where(slope > 0, slope, 1.0), 0.0)
        if not np.any(np.abs(step) > 1e-16 * zeta):
            break
        zeta = np.maximum(zeta - step, 0.0)
    return np.asarray(zeta)


def _exp_beyond_linear(z: FloatArray) -> FloatArray:
    """exp(z) - 1 - z without cancellation: a series below 0.1 (six terms leave less than 1e-13 of it)."""
    series = z * z / 2 * (1 + z / 3 * (1 + z / 4 * (1 + z / 5 * (1 + z / 6 * (1 + z / 7 * (1 + z / 8))))))
    return np.asarray(np.where(z < 0.1, series, np.expm1(z) - z))


def threshold(x: Any) -> FloatArray:
    """theta_0 of eq. (3): theta/(1-theta) + ln(1-theta) = x, where x = p0 alpha_p / alpha_d."""
    return np.asarray(-np.expm1(-zeta_of(x)))


def optimal_threshold(costs: Costs, load: Load, *, exact: bool = False) -> float:
    """theta_0 with p0 = 1 / mean output, the sound choice for every distribution of outputs.

    Survivors of a phase keep their ages, so the shape of the distribution enters the best theta only at second order.
    `exact` takes -ln(1 - p0) for p0, which matters for outputs of a few tokens.
    """
    p0 = 1.0 / max(load.output, 1.0)
    if exact:
        p0 = -np.log1p(-min(p0, 1 - 1e-12))
    return float(threshold(p0 * costs.alpha_p / costs.alpha_d))


def paper_shift(theta0: Any, p0: Any, eta: Any, rho: Any) -> FloatArray:
    """Delta-theta of eq. (5) for a hazard p0 + eta t, rho = beta_d N / alpha_d.

    Exact to first order in eta for a model in which all N slots restart their clocks in every phase. They do not, so
    the term with rho does not exist in EB(k): only for the `paper` form.
    """
    theta0 = np.asarray(theta0, dtype=np.float64)
    zeta = -np.log1p(-theta0)
    duration = zeta * (theta0 / (1 - theta0) - zeta / 2)
    per_token = rho * (zeta - theta0)
    return np.asarray(eta * (1 - theta0) ** 2 / (p0**2 * theta0) * (duration + per_token))


def paper_threshold(costs: Costs, n: float, p0: float, eta: float, mean_output: float) -> float:
    """theta of the authors' controller: eq. (3) + eq. (5), with the guards of their code.

    p0 is floored at 1 / mean output, eta at 0; the shift is at most MAX_SHIFT theta_0; theta in [THETA_MIN, THETA_MAX].
    """
    p0 = max(p0, 1.0 / max(mean_output, 1.0))
    theta0 = float(np.clip(threshold(p0 * costs.alpha_p / costs.alpha_d), THETA_MIN, THETA_MAX))
    shift = float(paper_shift(theta0, p0, max(eta, 0.0), costs.beta_d * n / costs.alpha_d))
    return min(max(theta0 + min(shift, MAX_SHIFT * theta0), THETA_MIN), THETA_MAX)


def slots_to_free(theta: float, n: int, *, budget: int | None = None, mean_prompt: float | None = None) -> int:
    """k = floor(theta N), at least 1; with a token budget at most floor(budget / mean prompt).

    A refill larger than one step pays alpha_p again for every further step, so waiting for more slots gains nothing.
    """
    k = int(theta * n)
    if budget is not None and mean_prompt is not None:
        k = min(k, int(budget / max(mean_prompt, 1.0)))
    return max(k, 1)


# ---- throughputs -------------------------------------------------------------------------------------------------


def exclusive_beta(costs: Costs, load: Load) -> float:
    """beta_EB^w: marginal cost per token of a request whose prompt and output run in separate steps."""
    return (costs.beta_p * load.prompt + costs.beta_d * load.output) / load.tokens


def exclusive_throughput(theta: Any, n: Any, costs: Costs, load: Load, *, budget: float | None = None) -> FloatArray:
    """Requests per second of EB(theta N) at saturation, eq. (4). With a `budget` alpha_p is paid once per step."""
    theta, n = np.asarray(theta, dtype=np.float64), np.asarray(n, dtype=np.float64)
    k = theta * n
    steps = 1.0 if budget is None else np.maximum(np.ceil(k * load.prompt / budget), 1.0)
    fixed = (costs.alpha_p * steps - costs.alpha_d * load.output * np.log1p(-theta)) / k
    return np.asarray(1.0 / (fixed + exclusive_beta(costs, load) * load.tokens))


def phase_overhead(steps: Any, survivors: FloatArray, costs: Costs) -> FloatArray:
    """Fixed seconds per request, times N, of EB with m decode steps a phase: (alpha_p + alpha_d m) sum_j P(O > j m).

    The exact cost for any distribution of outputs (survivors: P(O > t) for t = 0, 1, ...), as survivors of a phase
    keep their ages; theta(m) = 1 / sum_j P(O > j m). Its minimum over m is the best threshold.
    """
    m = np.asarray(steps, dtype=np.int64)
    sums = np.array([survivors[:: int(each)].sum() for each in m.ravel()]).reshape(m.shape)
    return np.asarray((costs.alpha_p + costs.alpha_d * m) * sums, dtype=np.float64)


def mixed_beta(costs: Costs, load: Load) -> float:
    """beta_MB at the mean decode share, the paper's form: mean-field, so it overstates the interference."""
    r = load.decode_share
    return (1 - r) * costs.beta_p + r * costs.beta_d + costs.kappa * r * (1 - r)


def poisson_interference(n: Any, load: Load) -> FloatArray:
    """E[n_d P / (n_d + P)] / E[n_d + P]: what multiplies kappa in a mixed step, with prompts arriving in clumps.

    J ~ Poisson(N / (1 + mu_O)) prompts of mu_L tokens a step, P = J mu_L, n_d = N - J. Many steps hold no prompt and
    few hold several, so the mean is below r (1 - r) of the mean share, more so at small N.
    """
    n = np.asarray(n, dtype=np.float64)
    return np.array([_poisson_mean(float(each), load) for each in n.ravel()]).reshape(n.shape)


def _poisson_mean(n: float, load: Load) -> float:
    rate = n / (1 + load.output)
    most = int(min(np.ceil(rate + _POISSON_WIDTH * np.sqrt(rate) + _POISSON_WIDTH), n))
    j = np.arange(most + 1)
    logs = j * np.log(rate) - rate - np.concatenate([[0.0], np.cumsum(np.log(j[1:]))])
    weight = np.exp(logs)
    weight /= weight.sum()
    prompt, decodes = j * load.prompt, np.maximum(n - j, 0.0)
    tokens = prompt + decodes
    share = weight @ (decodes * prompt / np.maximum(tokens, 1e-300))
    return float(share / (weight @ tokens))


def mixed_beta_poisson(n: Any, costs: Costs, load: Load) -> FloatArray:
    """beta_MB at N with clumped prompts: the sound form, within 0.3 % of a slot simulation at strong interference."""
    r = load.decode_share
    chord = (1 - r) * costs.beta_p + r * costs.beta_d
    return np.asarray(chord + costs.kappa * poisson_interference(n, load))


def mixed_throughput(
    n: Any, costs: Costs, load: Load, *, budget: float | None = None, poisson: bool = True
) -> FloatArray:
    """Requests per second of mixed batching at N running: TP_MB of Proposition 4.

    A step prefills N / (1 + mu_O) requests and decodes the others; with a `budget` below the N (mu_L + mu_O) / (1 +
    mu_O) tokens of such a step, steps hold `budget` tokens and pay alpha_mb for each of them. `poisson`: prompts arrive
    in clumps, and the steps without one pay alpha_d; False is the paper's form.
    """
    n = np.asarray(n, dtype=np.float64)
    beta = mixed_beta_poisson(n, costs, load) if poisson else mixed_beta(costs, load)
    alone = np.exp(-n / (1 + load.output)) if poisson else 0.0  # steps without a prompt are decode steps
    fixed = (alone * costs.alpha_d + (1 - alone) * costs.alpha_mb) * (1 + load.output) / n
    if budget is not None:
        fixed = np.maximum(fixed, costs.alpha_mb * load.tokens / budget)
    return np.asarray(1.0 / (fixed + beta * load.tokens))


# ---- the crossover -----------------------------------------------------------------------------------------------


def crossover_sides(n: Any, theta: float, costs: Costs, load: Load, beta_mb: Any) -> tuple[FloatArray, FloatArray]:
    """(LHS, RHS) of Proposition 4, seconds per token: mixed batching wins where LHS < RHS.

    LHS = beta_MB - beta_EB^w is what contention costs a token; RHS what mixing saves of the fixed costs.
    """
    n = np.asarray(n, dtype=np.float64)
    left = np.asarray(beta_mb - exclusive_beta(costs, load), dtype=np.float64)
    return left, np.asarray(fixed_gain(theta, costs, load) / n)


def fixed_gain(theta: float, costs: Costs, load: Load) -> float:
    """K of RHS = K / N, at k = theta N."""
    exclusive = (costs.alpha_p - costs.alpha_d * load.output * float(np.log1p(-theta))) / theta
    return (exclusive - costs.alpha_mb * (1 + load.output)) / load.tokens


def paper_crossover(theta: float, costs: Costs, load: Load) -> float:
    """N_cross = K / LHS: the concurrency from which EB wins. 0: always; inf: never (mean-field form)."""
    left, gain = mixed_beta(costs, load) - exclusive_beta(costs, load), fixed_gain(theta, costs, load)
    if left > 0:
        return max(gain / left, 0.0)
    return np.inf if gain >= 0 else 0.0


def crossover(
    costs: Costs, load: Load, *, theta: float | None = None, budget: float | None = None, most: int = 65536
) -> float:
    """The smallest N from which EB beats mixed batching, with clumped prompts and the token budget. inf: not up to
    `most`; 0: from the first request on. `theta` None takes the best one, lowered to what the budget holds.
    """
    n = np.unique(np.round(np.geomspace(1, most, 400)).astype(np.int64))
    wins = exclusive_lead(n, costs, load, theta=theta, budget=budget) > 0
    if wins.all():
        return 0.0
    if not wins[-1]:
        return float(np.inf)
    last = int(np.flatnonzero(~wins)[-1])  # above it EB always wins
    low, high = int(n[last]), int(n[last + 1])
    while high - low > 1:
        middle = (low + high) // 2
        if exclusive_lead(middle, costs, load, theta=theta, budget=budget) > 0:
            high = middle
        else:
            low = middle
    return float(high)


def exclusive_lead(
    n: Any, costs: Costs, load: Load, *, theta: float | None = None, budget: float | None = None
) -> FloatArray:
    """TP_EB / TP_MB - 1 at N: positive where exclusive batching wins."""
    n = np.asarray(n, dtype=np.float64)
    best = optimal_threshold(costs, load) if theta is None else theta
    share = np.full(n.shape, best)
    if budget is not None and theta is None:
        share = np.minimum(share, np.maximum(budget // load.prompt, 1) / n)
    share = np.clip(np.maximum(share, 1 / np.maximum(n, 2)), 0.0, 1 - 1e-9)
    exclusive = exclusive_throughput(share, n, costs, load, budget=budget)
    return np.asarray(exclusive / mixed_throughput(n, costs, load, budget=budget) - 1.0)


def kappa_from_knee(beta_p: float, beta_d: float, knee: float) -> float:
    """kappa for which a mixed token costs more than a decode token from decode share `knee` on."""
    return (beta_d - beta_p) / knee
