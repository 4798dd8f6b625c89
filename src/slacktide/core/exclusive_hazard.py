"""Estimates from recent requests and steps: hazard of output lengths, means, and affine step costs.

Section 3.4 of arXiv 2606.00516; the guards are those of the authors' code where noted.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from slacktide.core import shape as s
from slacktide.core.exclusive import Costs, Load
from slacktide.core.latency import LatencyModel
from slacktide.core.types import FloatArray, IntArray

MIN_SURVIVORS = 5
"""A hazard from fewer survivors is noise (authors' code)."""


class Ema:
    """Exponential moving average; the first value is taken whole. `value` is None before it."""

    def __init__(self, weight: float, value: float | None = None) -> None:
        self.weight = weight
        self.value = value

    def add(self, x: float, weight: float | None = None) -> float:
        """Take a value in, with a weight of its own if given; returns the new average."""
        w = self.weight if weight is None else weight
        self.value = x if self.value is None else self.value + w * (x - self.value)
        return self.value


def empirical_hazard(lengths: IntArray) -> tuple[FloatArray, IntArray]:
    """(h(t), survivors) for t = 0 .. max: #{O = t} / #{O >= t}, and #{O >= t}."""
    counts = np.bincount(np.asarray(lengths, dtype=np.int64))
    survivors = counts[::-1].cumsum()[::-1]
    return counts / np.maximum(survivors, 1), survivors


def fit_linear_hazard(lengths: IntArray) -> tuple[float, float]:
    """(p0, eta) of h(t) = p0 + eta t: least squares weighted by survivors, for t from the 5th to the 95th percentile.

    Every t of the range counts, also those at which nothing ended (their hazard is 0). Steps with fewer than
    MIN_SURVIVORS are passed over. eta is at least 0; with fewer than two steps left the hazard is constant.
    """
    o = np.asarray(lengths, dtype=np.int64)
    constant = (1.0 / max(float(o.mean()), 1.0), 0.0)
    hazard, survivors = empirical_hazard(o)
    low, high = np.percentile(o, (5, 95))
    t = np.arange(max(int(low), 1), min(int(high), len(hazard) - 1) + 1)
    t = t[survivors[t] >= MIN_SURVIVORS]
    if t.size < 2:
        return constant
    weight = survivors[t].astype(np.float64)
    center = float(weight @ t / weight.sum())
    spread = float(weight @ (t - center) ** 2)
    if spread == 0:
        return constant
    mean = float(weight @ hazard[t] / weight.sum())
    eta = float(weight @ ((t - center) * hazard[t]) / spread)
    return (mean - eta * center, eta) if eta > 0 else (mean, 0.0)


def fit_mixed(tokens: FloatArray, decodes: FloatArray, times: FloatArray, costs: Costs) -> tuple[float, float]:
    """(alpha_mb, kappa) from measured mixed steps by least squares: float64[m] tokens, of them decodes, seconds.

    What the prompt and decode slopes explain is taken off; kappa is at least 0 (then alpha_mb is the mean rest).
    """
    r = decodes / tokens
    rest = times - tokens * ((1 - r) * costs.beta_p + r * costs.beta_d)
    x = tokens * r * (1 - r)
    spread = float(((x - x.mean()) ** 2).sum())
    kappa = float(((x - x.mean()) @ rest) / spread) if spread > 0 else 0.0
    if kappa <= 0:
        return float(rest.mean()), 0.0
    return float(rest.mean() - kappa * x.mean()), kappa


def fit_costs(prompt: FloatArray, decodes: FloatArray, seconds: FloatArray, fallback: Costs) -> tuple[Costs, set[str]]:
    """Affine costs of measured steps: float64[m] prompt tokens, decodes and seconds of each. Relative least squares.

    One intercept for each kind of step that occurs, common slopes, and kappa on the mixed ones. What no step tells
    comes from `fallback`, as does kappa below 0 from 0; the second value names those fields. Raises ValueError without
    steps, or for times that are not > 0.
    """
    p, d, t = (np.asarray(x, dtype=np.float64) for x in (prompt, decodes, seconds))
    if not t.size or not np.all(t > 0) or not np.all(p + d > 0):
        raise ValueError("fit_costs: expected at least one step, each with tokens and a time > 0")
    kinds = {"alpha_p": (d == 0), "alpha_d": (p == 0), "alpha_mb": (p > 0) & (d > 0)}
    columns = {name: rows.astype(np.float64) for name, rows in kinds.items() if rows.sum() >= MIN_SURVIVORS}
    columns |= {"beta_p": p} if p.any() else {}
    columns |= {"beta_d": d} if d.any() else {}
    if "alpha_mb" in columns:
        columns["kappa"] = p * d / (p + d)
    values = {name: getattr(fallback, name) for name in ("alpha_p", "beta_p", "alpha_d", "beta_d", "alpha_mb", "kappa")}
    while True:
        x = np.stack(list(columns.values()), axis=1) / t[:, None]
        known = np.zeros(t.size)  # rows of a kind too rare to fit keep the fallback's intercept
        for name, rows in kinds.items():
            if name not in columns:
                known[rows] = values[name]
        scale = np.maximum(np.abs(x).max(axis=0), 1e-300)
        found, *_ = np.linalg.lstsq(x / scale, 1.0 - known / t, rcond=None)
        found = found / scale
        worst = [name for name, value in zip(columns, found, strict=True) if value < 0]
        if not worst:
            break
        drop = "kappa" if "kappa" in worst else worst[0]
        values[drop] = 0.0
        columns.pop(drop)
    values |= {name: float(value) for name, value in zip(columns, found, strict=True)}
    for name in ("alpha_p", "alpha_d", "alpha_mb"):
        values[name] = max(values[name], 1e-9)
    return Costs(**values), set(values) - set(columns)


def fit_line(x: FloatArray, y: FloatArray) -> tuple[float, float]:
    """(intercept, slope) of a least-squares line; slope 0 when all x are one."""
    spread = float(((x - x.mean()) ** 2).sum())
    slope = float((x - x.mean()) @ y / spread) if spread > 0 else 0.0
    return float(y.mean() - slope * x.mean()), slope


_SPREAD = np.arange(6) / 5
"""Exponents of the six counts of prompts at which `costs_of` looks at mixed steps."""


def costs_of(model: LatencyModel, load: Load, n: float, budget: int, *, context: float | None = None) -> Costs:
    """Affine costs of a step-time model around a working point: `n` running requests of this load, `budget` tokens.

    Decode line through n/4 to n decodes, prompt line through one prompt to a full step of whole prompts, and
    (alpha_mb, kappa) fitted to the mixed steps that this load gives: n decodes, and 3/4 of them, beside 1 prompt up to
    the mean of n / (1 + mu_O) and three standard deviations more, as far as the budget goes. `context`: mean KV tokens
    of a decode; by default prompt + half the output.
    """
    at = load.prompt + load.output / 2 if context is None else context
    n = max(n, 2.0)
    prompts = max(budget / load.prompt, 2.0)
    rate = n / (1 + load.output)
    most = min(rate + 3 * np.sqrt(rate), max(budget - n, load.prompt) / load.prompt)
    counts = np.round(max(most, 2.0) ** _SPREAD)  # whole prompts, evenly spread in ratio, each number once
    counts = counts[np.concatenate(([True], counts[1:] > counts[:-1]))]
    both = np.concatenate((np.full(counts.size, n), np.full(counts.size, 0.75 * n)))
    shapes = step_shapes(
        model,
        load,
        np.concatenate((np.zeros(4), (1.0, prompts / 3, 2 * prompts / 3, prompts), counts, counts)),
        np.concatenate(((n / 4, n / 2, 3 * n / 4, n), np.zeros(4), both)),
        at,
    )
    times = model.step_times(shapes)
    alpha_d, beta_d = fit_line(shapes[:4, s.NUM_DECODES], times[:4])
    alpha_p, beta_p = fit_line(shapes[4:8, s.PREFILL_TOKENS], times[4:8])
    alpha_p, alpha_d = max(alpha_p, 1e-6), max(alpha_d, 1e-6)  # a curved model may put a line's start below zero
    costs = Costs(alpha_p, beta_p, alpha_d, beta_d, max(alpha_p, alpha_d))
    mixed = shapes[8:]
    alpha_mb, kappa = fit_mixed(mixed[:, s.NUM_TOKENS], mixed[:, s.NUM_DECODES], times[8:], costs)
    return Costs(alpha_p, beta_p, alpha_d, beta_d, max(alpha_mb, 1e-6), kappa)


def step_shapes(
    model: LatencyModel, load: Load, prompts: FloatArray, decodes: FloatArray, context: float
) -> FloatArray:
    """float64[m, 12]: steps of so many whole prompts of the mean length beside so many decodes at a mean context."""
    length = load.prompt
    shapes = np.zeros((prompts.size, s.SHAPE_SIZE))
    shapes[:, s.NUM_PREFILLS] = np.ceil(prompts)
    shapes[:, s.PREFILL_TOKENS] = prompts * length
    shapes[:, s.PREFILL_WORK] = shapes[:, s.PREFILL_SQUARE] = prompts * length * length
    shapes[:, s.PREFILL_MAX] = np.where(prompts > 0, length, 0.0)
    shapes[:, s.NUM_DECODES] = decodes
    shapes[:, s.DECODE_CONTEXT] = decodes * context
    shapes[:, s.DECODE_MAX_CONTEXT] = np.where(decodes > 0, context, 0.0)
    whole: Callable[[FloatArray], FloatArray] = model.potential
    from_zero, to_end = whole(np.array([0.0, length]))
    shapes[:, s.PREFILL_POTENTIAL] = prompts * (to_end - from_zero)
    shapes[:, s.NUM_TOKENS] = shapes[:, s.PREFILL_TOKENS] + decodes
    shapes[:, s.NUM_SEQUENCES] = shapes[:, s.NUM_PREFILLS] + decodes
    return shapes
