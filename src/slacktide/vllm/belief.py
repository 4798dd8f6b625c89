"""What the plug-in believes of step times: SlidingServe's seven features, refitted online from measured steps.

Per scene (decode, prefill, mixed) the normal equations of relative errors are kept up sample by sample, old samples
fading; a refit solves them with weights >= 0. They start from a few made-up samples of a prior, so that the first
steps have a sane prediction and real ones soon outweigh it. The prior is printed as such: nobody measured it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from slacktide.core import shape as s
from slacktide.core.latency import AffineModel, LatencyModel
from slacktide.core.latency_families import SevenFeatureModel
from slacktide.core.types import FloatArray

PRIOR_MS = {"alpha_p": 10.0, "beta_p": 0.1, "alpha_d": 10.0, "beta_d": 0.05}
"""A server GPU with a model of some 8 billion weights, to the order of magnitude: 10,000 prompt tokens a second."""

PRIOR_SAMPLES = 24
"""Made-up steps per scene (3 per weight): outweighed after as many real ones, which come within seconds."""

MEMORY = 4000
"""Steps after which a sample counts 1/e: minutes of serving, so that the belief follows a change of load or clocks."""

REFIT_EVERY = 128
"""Steps between two refits; a refit takes about 0.3 ms, outside schedule()."""

OUTLIER = 8.0
"""A step this many times longer or shorter than predicted is left out, and counted: a hiccup, not the batch's cost."""

MIN_FITTED = 64
"""Samples of a scene before outliers are judged: until then the prediction may be the one that is wrong."""


def prior_model(prior_ms: Mapping[str, float]) -> AffineModel:
    """The affine prior, from milliseconds. Raises ValueError for values that give no positive time."""
    values = {name: value / 1e3 for name, value in (PRIOR_MS | dict(prior_ms)).items()}
    return AffineModel(values["alpha_p"], values["beta_p"], values["alpha_d"], values["beta_d"])


def prior_samples(model: LatencyModel, rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
    """Made-up steps of every scene, and what the prior says they take."""
    m = 3 * PRIOR_SAMPLES
    shapes = np.zeros((m, s.SHAPE_SIZE))
    scene = np.arange(m) % 3
    decodes = np.where(scene == 1, 0.0, np.floor(np.exp(rng.uniform(0, np.log(256), m))))
    chunk = np.where(scene == 0, 0.0, np.floor(np.exp(rng.uniform(np.log(16), np.log(4096), m))))
    context = np.floor(rng.uniform(0, 2048, m))
    shapes[:, s.NUM_DECODES], shapes[:, s.PREFILL_TOKENS] = decodes, chunk
    shapes[:, s.NUM_TOKENS] = decodes + chunk
    shapes[:, s.NUM_PREFILLS] = chunk > 0
    shapes[:, s.NUM_SEQUENCES] = decodes + (chunk > 0)
    shapes[:, s.DECODE_CONTEXT] = decodes * (context + 64)
    shapes[:, s.DECODE_MAX_CONTEXT] = np.where(decodes > 0, 2 * context + 64, 0)
    shapes[:, s.PREFILL_WORK] = shapes[:, s.PREFILL_SQUARE] = chunk * chunk
    shapes[:, s.PREFILL_MAX] = chunk
    return shapes, model.step_times(shapes)


class OnlineBelief:
    """The current model, and the samples behind it."""

    def __init__(self, prior_ms: Mapping[str, float] | None = None) -> None:
        from slacktide.core.kernels_latency import step_time_packed

        self._step_time = step_time_packed
        prior = prior_model(prior_ms or {})
        self.gram = np.zeros((3, 8, 8))
        self.right = np.zeros((3, 8))
        self.counts = np.zeros(3, dtype=np.int64)
        self.num_samples = self.num_outliers = 0
        self._since_refit = 0
        self._shortest = np.inf
        shapes, times = prior_samples(prior, np.random.default_rng(0))
        for shape, time in zip(shapes, times, strict=True):
            self._accumulate(shape, float(time))
        self.model: LatencyModel = self._solve()

    def predict(self, shape: FloatArray) -> float:
        """Seconds of a step (float64[12]) by the current model."""
        return float(self._step_time(self.model.packed, shape))

    def observe(self, shape: FloatArray, time: float) -> bool:
        """A measured step: its shape (float64[12]) and its seconds. True when a refit is due."""
        if not 0 < time < 1e6 or shape[s.NUM_TOKENS] <= 0:
            return False
        scene = _scene(shape)
        if self.counts[scene] >= MIN_FITTED:
            expected = self.predict(shape)
            if not expected / OUTLIER <= time <= expected * OUTLIER:
                self.num_outliers += 1
                return False
        self._accumulate(shape, time)
        self.counts[scene] += 1
        self.num_samples += 1
        self._shortest = min(self._shortest, time)
        self._since_refit += 1
        return self._since_refit >= REFIT_EVERY

    def _accumulate(self, shape: FloatArray, time: float) -> None:
        """Add a sample to its scene's normal equations of |x w / time - 1|^2."""
        scene = _scene(shape)
        row = _features(shape) / time
        keep = 1.0 - 1.0 / MEMORY
        self.gram[scene] *= keep
        self.right[scene] *= keep
        self.gram[scene] += row[:, None] * row
        self.right[scene] += row

    def refit(self) -> None:
        """Solve anew; the model is replaced in one assignment."""
        self._since_refit = 0
        self.model = self._solve()

    def _solve(self) -> SevenFeatureModel:
        weights = np.stack([nonnegative(self.gram[i], self.right[i]) for i in range(3)])
        # Half the shortest step seen bounds what a line through longer ones may extrapolate to.
        floor = 0.5 * self._shortest if np.isfinite(self._shortest) else 0.0
        label = "fitted" if self.num_samples >= MIN_FITTED else "prior"
        text = f"{self.num_samples} measured steps, {self.num_outliers} outliers left out"
        return SevenFeatureModel(weights, floor, {"label": label, "latency": text})


def _scene(shape: FloatArray) -> int:
    """`latency_families.scenes` of one shape."""
    if not shape[s.PREFILL_TOKENS] > 0:
        return 0
    return 2 if shape[s.NUM_DECODES] > 0 else 1


def _features(shape: FloatArray) -> FloatArray:
    """`latency_families.features` of one shape."""
    x = shape.tolist()
    context = x[s.PREFILL_CONTEXT] + x[s.DECODE_CONTEXT]
    return np.array([
        1.0, x[s.PREFILL_WORK], x[s.PREFILL_SQUARE], context, x[s.NUM_DECODES], x[s.DECODE_CONTEXT],
        x[s.PREFILL_TOKENS], x[s.PREFILL_MAX],
    ])  # fmt: skip


def nonnegative(gram: FloatArray, right: FloatArray) -> FloatArray:
    """argmin w' gram w - 2 right' w over w >= 0: Lawson and Hanson's active set, on normal equations.

    Lawson, Hanson: Solving Least Squares Problems, 1974, chapter 23. Features are scaled to a diagonal of ones; a
    small ridge makes features solvable that never varied.
    """
    scale = np.sqrt(np.maximum(np.diag(gram), 1e-300))
    a = gram / np.outer(scale, scale) + 1e-9 * np.eye(len(right))
    b = right / scale
    w, active = np.zeros(len(b)), np.zeros(len(b), dtype=bool)
    for _ in range(3 * len(b)):  # Lawson and Hanson's own bound on the turns of the outer loop
        slope = b - a @ w
        slope[active] = -np.inf
        best = int(slope.argmax())
        if slope[best] <= 1e-10 * max(1.0, float(np.abs(b).max())):
            break
        active[best] = True
        while True:
            trial = np.zeros(len(b))
            trial[active] = np.linalg.solve(a[np.ix_(active, active)], b[active])
            if trial[active].min() > 0:
                w = trial
                break
            falling = active & (trial <= 0)
            share = float((w[falling] / np.maximum(w[falling] - trial[falling], 1e-300)).min())
            w = w + share * (trial - w)
            active &= w > 1e-15
            w[~active] = 0.0
            if not active.any():
                break
    result: FloatArray = w / scale
    return result
