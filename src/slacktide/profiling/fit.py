"""Fits a predictor to measured or sampled steps, and says how good it is on steps it has not seen.

`features` names the predictor: `extended` (the default), or `paper` (SlidingServe's plain seven). Both have one expert
per scene; a scene with fewer than `min_samples` steps takes the expert fitted to all of them (the paper's fallback).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slacktide.core.latency import LatencyModel
from slacktide.core.latency_extended import KNOTS, ExtendedFeatureModel, extended_features
from slacktide.core.latency_families import SCENES, SevenFeatureModel, scenes
from slacktide.core.types import FloatArray
from slacktide.errors import unknown_name

FEATURES = ("extended", "paper")
MIN_SAMPLES = 64
"""Steps a scene needs for an expert of its own: about two and a half per weight."""
RIDGE = 1e-6
"""Penalty on scaled weights, relative to the number of steps: settles what the data leave open, moves nothing else."""


@dataclass(frozen=True, slots=True)
class SceneError:
    """Errors of a model on the steps of one scene. MAE and RMSE in seconds; `median` and `p90` relative, 0.05 = 5 %."""

    steps: int
    mae: float
    rmse: float
    r2: float
    median: float
    p90: float


def scene_errors(model: LatencyModel, shapes: FloatArray, times: FloatArray) -> dict[str, SceneError]:
    """Errors per scene that occurs. R2 is 1 - sum of squares / sum of squares about the scene's mean (NaN if 0)."""
    predicted, scene = model.step_times(shapes), scenes(shapes)
    found = {}
    for i, name in enumerate(SCENES):
        rows = scene == i
        if not rows.any():
            continue
        error, spread = predicted[rows] - times[rows], times[rows] - times[rows].mean()
        total = float((spread**2).sum())
        relative = np.abs(error) / times[rows]
        found[name] = SceneError(
            steps=int(rows.sum()),
            mae=float(np.abs(error).mean()),
            rmse=float(np.sqrt((error**2).mean())),
            r2=1.0 - float((error**2).sum()) / total if total > 0 else float("nan"),
            median=float(np.median(relative)),
            p90=float(np.quantile(relative, 0.9)),
        )
    return found


def describe_errors(errors: dict[str, SceneError]) -> str:
    """`decode 1.1 %, prefill 3.2 %, mixed 3.9 %`: the median relative errors."""
    return ", ".join(f"{name} {100 * error.median:.1f} %" for name, error in errors.items())


def nonnegative_least_squares(x: FloatArray, y: FloatArray, ridge: float = RIDGE) -> FloatArray:
    """Weights w >= 0 of min |x w - y|^2 + ridge len(x) |w|^2 on columns scaled to at most 1 (Lawson-Hanson)."""
    from scipy.optimize import nnls

    scale = np.abs(x).max(axis=0)
    scale[scale == 0] = 1.0
    rows = np.concatenate([x / scale, np.sqrt(ridge * len(x)) * np.eye(x.shape[1])])
    weights, _ = nnls(rows, np.concatenate([y, np.zeros(x.shape[1])]), maxiter=100 * x.shape[1])
    result: FloatArray = weights / scale
    return result


def fit_extended(
    shapes: FloatArray,
    times: FloatArray,
    *,
    weights: FloatArray | None = None,
    relative: bool = True,
    min_samples: int = MIN_SAMPLES,
) -> ExtendedFeatureModel:
    """Fit to steps: shapes float64[m, 12], times float64[m] seconds, weights float64[m] >= 0 (all 1 by default).

    `relative` minimises errors relative to the time, so that short steps, which deadlines depend on, count as much as
    long ones. Raises ValueError without steps, or for times that are not finite and > 0.
    """
    check_steps(shapes, times)
    knots = np.array([k for k in KNOTS if k < shapes[:, 0].max()] or [0], dtype=np.float64)
    x, scene = extended_features(shapes, knots), scenes(shapes)
    w = np.ones(len(times)) if weights is None else np.sqrt(weights)
    w = w / times if relative else w
    fitted = np.empty((3, x.shape[1]))
    for i in range(3):
        own = scene == i
        chosen = own if own.sum() >= min_samples else np.ones(len(x), dtype=bool)
        fitted[i] = nonnegative_least_squares(x[chosen] * w[chosen, None], times[chosen] * w[chosen])
    # No step can cost much less than the cheapest seen.
    return ExtendedFeatureModel(fitted, knots, 0.5 * float(times.min()))


def check_steps(shapes: FloatArray, times: FloatArray) -> None:
    """Raise ValueError unless there are as many times as shapes, at least one, all finite and > 0."""
    if len(shapes) == 0 or len(shapes) != len(times) or not np.all(np.isfinite(times)) or not np.all(times > 0):
        raise ValueError("fit: expected as many times as shapes, at least one, all finite and > 0")


def fit(
    shapes: FloatArray, times: FloatArray, *, features: str = "extended", weights: FloatArray | None = None
) -> ExtendedFeatureModel | SevenFeatureModel:
    """Fit by the name of the features. `weights` only with `extended`. Raises InputError for another name."""
    if features == "extended":
        return fit_extended(shapes, times, weights=weights)
    if features == "paper":
        return SevenFeatureModel.fit(shapes, times, relative=True)
    raise unknown_name("features", features, FEATURES)


def labelled(model: ExtendedFeatureModel | SevenFeatureModel, latency: str) -> ExtendedFeatureModel | SevenFeatureModel:
    """The model with its source said."""
    sources = {"label": "fitted", "latency": latency}
    if isinstance(model, SevenFeatureModel):
        return SevenFeatureModel(model.weights, model.floor, sources)
    return ExtendedFeatureModel(model.weights, model.knots, model.floor, sources)
