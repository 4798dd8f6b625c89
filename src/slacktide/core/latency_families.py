"""Families `seven-feature` (SlidingServe's predictor) and `roofline` (a GPU nobody measured)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from slacktide.core import shape as s
from slacktide.core.latency import PackedModel, check_seconds
from slacktide.core.packing import FAMILY, MONOTONE, ROOFLINE, ROOFLINE_VALUES, SEVEN_FEATURE, SEVEN_VALUES, pack
from slacktide.core.types import FloatArray, IntArray

SCENES = ("decode", "prefill", "mixed")
WEIGHTS = ("intercept", "x1", "x2", "x3", "x4", "x5", "x6", "x7")
MIN_SAMPLES = 16
"""A scene with fewer samples (two per weight) gets the global expert: its own would follow the noise."""
RIDGE = 1e-9
"""Relative weight of the penalty that makes collinear features solvable; too small to move a prediction."""


def features(shapes: FloatArray) -> FloatArray:
    """1, x1, ..., x7 of SlidingServe for float64[m, 12] -> float64[m, 8]."""
    columns = [
        np.ones(len(shapes)),
        shapes[:, s.PREFILL_WORK],
        shapes[:, s.PREFILL_SQUARE],
        shapes[:, s.PREFILL_CONTEXT] + shapes[:, s.DECODE_CONTEXT],
        shapes[:, s.NUM_DECODES],
        shapes[:, s.DECODE_CONTEXT],
        shapes[:, s.PREFILL_TOKENS],
        shapes[:, s.PREFILL_MAX],
    ]
    return np.stack(columns, axis=1)


def scenes(shapes: FloatArray) -> IntArray:
    """Scene number (index into SCENES) of each row of float64[m, 12]."""
    prefill, decode = shapes[:, s.PREFILL_TOKENS] > 0, shapes[:, s.NUM_DECODES] > 0
    return np.where(prefill & decode, 2, np.where(prefill, 1, 0))


def least_squares(x: FloatArray, y: FloatArray, *, nonnegative: bool, ridge: float = RIDGE) -> FloatArray:
    """Weights w of min |x w - y|^2 on features scaled to at most 1; with `nonnegative`, of w >= 0.

    The non-negative optimum is found exactly, as the best feasible least-squares solution over all subsets of the
    eight features: at it, the features with positive weight solve their own unconstrained problem.
    """
    scale = np.abs(x).max(axis=0)
    scale[scale == 0] = 1.0
    scaled = x / scale
    gram = scaled.T @ scaled + ridge * len(x) * np.eye(x.shape[1])
    right = scaled.T @ y
    if not nonnegative:
        return _unscaled(np.linalg.solve(gram, right), scale)
    best, best_cost = np.zeros(x.shape[1]), 0.0
    for size in range(1, x.shape[1] + 1):
        for chosen in itertools.combinations(range(x.shape[1]), size):
            index = np.array(chosen)
            w = np.linalg.solve(gram[np.ix_(index, index)], right[index])
            cost = -w @ right[index]  # |x w - y|^2 - |y|^2 at the optimum of a subset
            if cost < best_cost and w.min() >= 0:
                best, best_cost = np.zeros(x.shape[1]), float(cost)
                best[index] = w
    return _unscaled(best, scale)


def _unscaled(weights: FloatArray, scale: FloatArray) -> FloatArray:
    result: FloatArray = weights / scale
    return result


@dataclass(frozen=True, eq=False)
class SevenFeatureModel(PackedModel):
    """One linear expert per scene over SlidingServe's features: T = intercept + sum w_j x_j, at least `floor` seconds.

    `weights` float64[3, 8]: scenes decode, prefill, mixed; intercept, x1..x7 (seconds per unit of the feature).
    """

    weights: FloatArray
    floor: float = 0.0
    sources: Mapping[str, str] = field(default_factory=lambda: {"label": "fitted"})

    def __post_init__(self) -> None:
        """Raise ValueError for weights of another shape or values that are not finite."""
        if self.weights.shape != (3, 8) or not np.all(np.isfinite(self.weights)):
            raise ValueError(f"seven-feature model: expected finite weights [3, 8], found shape {self.weights.shape}")
        check_seconds("seven-feature model", {"floor": self.floor})

    @property
    def family(self) -> str:
        """Always seven-feature."""
        return "seven-feature"

    @classmethod
    def fit(
        cls, shapes: FloatArray, times: FloatArray, *, method: str = "nnls", relative: bool = False
    ) -> SevenFeatureModel:
        """Least squares on measured or sampled steps: shapes float64[m, 12], times float64[m] seconds.

        `method` nnls (weights >= 0: times are positive and grow with the batch) or ridge. `relative` minimises errors
        relative to the time, so that short steps, which deadlines depend on, count as much as long ones. `sources`
        says what was fitted, with each scene's median relative error. Raises ValueError without samples or for times
        that are not > 0.
        """
        if method not in ("nnls", "ridge"):
            raise ValueError(f"fit: method {method!r}: expected nnls or ridge")
        if len(shapes) == 0 or len(shapes) != len(times) or not np.all(np.isfinite(times)) or not np.all(times > 0):
            raise ValueError("fit: expected as many times as shapes, at least one, all finite and > 0")
        x, scene = features(shapes), scenes(shapes)
        weight = 1.0 / times if relative else np.ones(len(times))
        weights = np.empty((3, 8))
        for i in range(3):
            own = scene == i
            chosen = own if own.sum() >= MIN_SAMPLES else np.ones(len(x), dtype=bool)
            rows, target = x[chosen] * weight[chosen, None], times[chosen] * weight[chosen]
            weights[i] = least_squares(rows, target, nonnegative=method == "nnls")
        # No step can cost much less than the cheapest seen: half of it bounds what a ridge line may extrapolate to.
        model = cls(weights, 0.5 * float(times.min()))
        errors = model.errors(shapes, times)
        text = ", ".join(f"{name} {100 * error:.1f} %" for name, error in errors.items())
        label = {"label": "fitted", "latency": f"{method} on {len(times)} steps; median relative error {text}"}
        return cls(weights, model.floor, label)

    def errors(self, shapes: FloatArray, times: FloatArray) -> dict[str, float]:
        """Median relative error of the model per scene that occurs."""
        relative = np.abs(self.reference(shapes) / times - 1.0)
        scene = scenes(shapes)
        return {name: float(np.median(relative[scene == i])) for i, name in enumerate(SCENES) if np.any(scene == i)}

    def coefficients(self) -> dict[str, float]:
        """floor and SCENE.intercept, SCENE.x1, ..."""
        named = {
            f"{scene}.{name}": float(self.weights[i, j])
            for i, scene in enumerate(SCENES)
            for j, name in enumerate(WEIGHTS)
        }
        return {"floor": self.floor} | named

    def _pack(self) -> FloatArray:
        values = [self.floor, *self.weights.ravel().tolist()]
        header = {SEVEN_VALUES + i: value for i, value in enumerate(values)}
        return pack(header | {FAMILY: SEVEN_FEATURE, MONOTONE: float(self.weights.min() >= 0)}, [])

    def reference(self, shapes: FloatArray) -> FloatArray:
        """Numpy twin."""
        time = np.maximum((features(shapes) * self.weights[scenes(shapes)]).sum(axis=1), self.floor)
        return np.where(shapes[:, s.NUM_TOKENS] > 0, time, 0.0)


@dataclass(frozen=True)
class RooflineModel(PackedModel):
    """Step time from dimensions and efficiencies; always a prior.

    T = fixed + per_sequence * sequences + max(weight_read, per_token * tokens + per_logits_row * sequences)
      + elementwise_per_token * tokens + max(per_pair * attended pairs, per_kv_token * prefill positions)
      + interference (mixed batches only) * per_kv_token * decode positions. All in seconds.
    """

    fixed: float
    weight_read: float
    per_token: float
    per_logits_row: float
    per_sequence: float
    elementwise_per_token: float
    per_pair: float
    per_kv_token: float
    interference: float = 1.0
    sources: Mapping[str, str] = field(default_factory=lambda: {"label": "prior"})

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is NaN, infinite or negative."""
        check_seconds("roofline model", self.coefficients())

    @property
    def family(self) -> str:
        """Always roofline."""
        return "roofline"

    def coefficients(self) -> dict[str, float]:
        """All nine values, in the order of the packed block."""
        return {
            "fixed": self.fixed,
            "weight_read": self.weight_read,
            "per_token": self.per_token,
            "per_logits_row": self.per_logits_row,
            "per_sequence": self.per_sequence,
            "elementwise_per_token": self.elementwise_per_token,
            "per_pair": self.per_pair,
            "per_kv_token": self.per_kv_token,
            "interference": self.interference,
        }

    def _pack(self) -> FloatArray:
        header = {ROOFLINE_VALUES + i: value for i, value in enumerate(self.coefficients().values())}
        return pack(header | {FAMILY: ROOFLINE, MONOTONE: 1.0}, [])

    def reference(self, shapes: FloatArray) -> FloatArray:
        """Numpy twin."""
        n, sequences, prefill = shapes[:, s.NUM_TOKENS], shapes[:, s.NUM_SEQUENCES], shapes[:, s.PREFILL_TOKENS]
        linear = np.maximum(self.weight_read, self.per_token * n + self.per_logits_row * sequences)
        time = self.fixed + self.per_sequence * sequences + linear + self.elementwise_per_token * n
        pairs = shapes[:, s.PREFILL_WORK] - 0.5 * shapes[:, s.PREFILL_SQUARE]
        attention = np.maximum(self.per_pair * pairs, self.per_kv_token * (shapes[:, s.PREFILL_CONTEXT] + prefill))
        decode = self.per_kv_token * (shapes[:, s.DECODE_CONTEXT] + shapes[:, s.NUM_DECODES])
        decode = decode * np.where(prefill > 0, self.interference, 1.0)
        return np.where(n > 0, time + attention + decode, 0.0)
