"""From measured steps to a profile: a latency model of any family, its cross-validated error, and where it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from slacktide.core import shape as s
from slacktide.core.latency import AffineModel, LatencyModel
from slacktide.core.latency_extended import ExtendedFeatureModel
from slacktide.core.latency_families import SCENES, RooflineModel, SevenFeatureModel, scenes
from slacktide.core.latency_tables import Grid, TablesModel
from slacktide.core.types import FloatArray, IntArray
from slacktide.errors import InputError, unknown_name
from slacktide.profiling.fit import SceneError, describe_errors, fit_extended, nonnegative_least_squares, scene_errors
from slacktide.profiling.measurements import Steps
from slacktide.profiling.profile_file import PARTS, latency_fields, region_fields
from slacktide.profiling.region import Region

FOLDS = 5
"""Parts of cross-validation: each model sees four fifths of the points."""
MIN_STEPS = 30
"""Fewer measured steps cannot tell a model's weights from noise, let alone its error."""
MIN_EXPERT = 24
"""Steps a scene needs for an expert of its own: about one a weight; designed points are far apart, so few suffice."""

Fit = Callable[[FloatArray, FloatArray, FloatArray], LatencyModel]


@dataclass(frozen=True)
class Fitted:
    """A model, how wrong it is on steps it has not seen, and where it was measured."""

    model: LatencyModel
    family: str
    errors: dict[str, SceneError]
    region: Region
    noise: dict[str, float]
    """Scene -> median relative distance of a sample from the median of its own point: nobody can predict better."""


def fit_affine(shapes: FloatArray, times: FloatArray, weights: FloatArray) -> AffineModel:
    """Least squares of relative errors of the EB paper's lines; a scene without steps takes what the others say."""
    scene, w = scenes(shapes), np.sqrt(weights) / times

    def line(rows: FloatArray) -> tuple[float, float]:
        x = np.stack([np.ones(int(rows.sum())), shapes[rows, s.NUM_TOKENS]], axis=1)
        found = nonnegative_least_squares(x * w[rows, None], times[rows] * w[rows])
        return max(float(found[0]), 1e-9), float(found[1])

    every = np.ones(len(times), dtype=bool)
    decode, prefill = ((scene == i) if (scene == i).sum() >= 2 else every for i in (0, 1))
    (alpha_d, beta_d), (alpha_p, beta_p) = line(decode), line(prefill)
    mixed = scene == 2
    if mixed.sum() < 2:
        return AffineModel(alpha_p, beta_p, alpha_d, beta_d)
    n = shapes[mixed, s.NUM_TOKENS]
    r = shapes[mixed, s.NUM_DECODES] / n
    rest = times[mixed] - n * ((1 - r) * beta_p + r * beta_d)
    x = np.stack([np.ones(len(n)), n * r * (1 - r)], axis=1) * w[mixed, None]
    found, *_ = np.linalg.lstsq(x, rest * w[mixed], rcond=None)
    kappa = max(float(found[1]), 0.0)  # a negative one would make a step cheaper with more tokens
    alpha = float(found[0]) if kappa > 0 else float(np.average(rest, weights=w[mixed] ** 2))
    return AffineModel(alpha_p, beta_p, alpha_d, beta_d, max(alpha, 1e-9), kappa)


def _seven(shapes: FloatArray, times: FloatArray, weights: FloatArray) -> SevenFeatureModel:
    del weights  # the paper's fit knows none
    return SevenFeatureModel.fit(shapes, times, relative=True)


def _extended(shapes: FloatArray, times: FloatArray, weights: FloatArray) -> ExtendedFeatureModel:
    return fit_extended(shapes, times, weights=weights, min_samples=MIN_EXPERT)


def fit_roofline(shapes: FloatArray, times: FloatArray, weights: FloatArray) -> RooflineModel:
    """The roofline's nine constants, by least squares of log times (robust: soft L1), from a line's guess on."""
    line = fit_affine(shapes, times, weights)
    per_token = max(line.beta_p, 1e-9)
    start = {
        "fixed": 0.3 * line.alpha_d, "weight_read": 0.7 * line.alpha_d, "per_token": per_token,
        "per_logits_row": per_token, "per_sequence": 0.1 * per_token, "elementwise_per_token": 0.1 * per_token,
        "per_pair": 1e-4 * per_token, "per_kv_token": 1e-3 * per_token, "interference": 1.0,
    }  # fmt: skip

    def made(values: dict[str, float]) -> RooflineModel:
        return RooflineModel(**values, sources={"label": "fitted"})

    return cast("RooflineModel", _scaled(made, start, shapes, times, weights))


def fit_tables(base: str, start: TablesModel) -> Fit:
    """A fit that corrects a composed profile's tables: a factor on each part, and the host's costs."""

    def fitting(shapes: FloatArray, times: FloatArray, weights: FloatArray) -> TablesModel:
        first = dict.fromkeys(PARTS, 1.0) | {"host_per_step": 1e-3, "host_per_sequence": 1e-6}
        found = _scaled(lambda values: scaled_tables(start, values, base), first, shapes, times, weights)
        return cast("TablesModel", found)

    return fitting


def scaled_tables(start: TablesModel, scales: Mapping[str, float], base: str) -> TablesModel:
    """Tables with each part times its factor (`scales`: PARTS, host_per_step, host_per_sequence in seconds)."""

    def grid(found: Grid | None, factor: float) -> Grid | None:
        return None if found is None else replace(found, values=found.values * factor)

    changed: dict[str, Any] = {
        "dense": start.dense * scales["dense"],
        "per_sequence": start.per_sequence * scales["per_sequence"],
        "decode": grid(start.decode, scales["decode"]),
        "prefill": grid(start.prefill, scales["prefill"]),
        "increment": grid(start.increment, scales["beside"]),
        "kv_seconds": start.kv_seconds * scales["prefill"],
        "prefill_launch": start.prefill_launch * scales["prefill"],
        "host_per_step": scales["host_per_step"],
        "host_per_sequence": scales["host_per_sequence"],
    }
    if start.potential_values is not None:
        changed["potential_values"] = start.potential_values * scales["prefill"]
        changed["interference"] = start.interference * scales["beside"] / scales["decode"]
    corrected = ", ".join(f"{name} {scales[name]:.6g}" for name in (*PARTS, "host_per_step", "host_per_sequence"))
    return replace(start, **changed, sources={"label": "fitted", "base": base, "scales": corrected})


def _scaled(
    made: Callable[[dict[str, float]], Any], start: Mapping[str, float], shapes: FloatArray, times: FloatArray,
    weights: FloatArray,
) -> Any:  # fmt: skip
    """The model of the positive constants that fit best, relatively; each may move by e^8 either way."""
    from scipy.optimize import least_squares

    names, first = list(start), np.log(np.maximum(list(start.values()), 1e-15))

    def misses(moved: FloatArray) -> FloatArray:
        values = dict(zip(names, np.exp(first + moved).tolist(), strict=True))
        predicted = np.maximum(made(values).reference(shapes), 1e-12)
        # A weak pull to the start settles what the data leave open.
        return np.concatenate([np.sqrt(weights) * np.log(predicted / times), 1e-3 * moved])

    found = least_squares(misses, np.zeros(len(first)), bounds=(-8.0, 8.0), loss="soft_l1", f_scale=0.05)
    return made(dict(zip(names, np.exp(first + found.x).tolist(), strict=True)))


FAMILIES: dict[str, Fit] = {
    "extended-feature": _extended, "seven-feature": _seven, "affine": fit_affine, "roofline": fit_roofline,
}  # fmt: skip
"""Families that a fit knows by itself; `tables` needs a composed profile to correct (`fit_tables`)."""


def folds(group: IntArray, seed: int = 0, count: int = FOLDS) -> IntArray:
    """int64[m]: the fold of each step; whole groups, at random, so that no copy of a tested step is trained on."""
    names = np.unique(group)
    number = np.random.default_rng(seed).permutation(len(names)) % count
    result: IntArray = number[np.searchsorted(names, group)]
    return result


def cross_validated(fitting: Fit, steps: Steps, seed: int = 0) -> dict[str, SceneError]:
    """Errors per scene of models that have not seen the steps they are judged by."""
    fold, predicted = folds(steps.group, seed), np.empty(len(steps))
    for k in range(FOLDS):
        test = fold == k
        if test.any() and (~test).any():
            model = fitting(steps.shapes[~test], steps.times[~test], steps.weights[~test])
            predicted[test] = model.step_times(steps.shapes[test])
        else:
            predicted[test] = np.nan
    return scene_errors(_Known(predicted), steps.shapes, steps.times)  # type: ignore[arg-type]


class _Known:
    """Predictions made already, as `scene_errors` asks for them."""

    def __init__(self, predicted: FloatArray) -> None:
        self._predicted = predicted

    def step_times(self, shapes: FloatArray) -> FloatArray:
        """What was predicted."""
        del shapes
        return self._predicted


def noise(steps: Steps) -> dict[str, float]:
    """Scene -> median relative distance of samples from the median of their own designed point."""
    middle = np.ones(len(steps))
    for g in np.unique(steps.group[steps.designed]):
        rows = steps.group == g
        middle[rows] = np.median(steps.times[rows])
    away, scene = np.abs(steps.times / middle - 1), np.where(steps.designed, scenes(steps.shapes), -1)
    return {name: float(np.median(away[scene == i])) for i, name in enumerate(SCENES) if (scene == i).any()}


def calibrate(steps: Steps, family: str = "auto", seed: int = 0, base: str | None = None) -> Fitted:
    """Fit the family, or of all of them the one that errs least on unseen steps. Raises InputError.

    `base`: the packaged profile whose tables the family `tables` corrects.
    """
    known = dict(FAMILIES)
    if base is not None:
        known["tables"] = fit_tables(base, _tables_of(base))
    if family not in ("auto", *known):
        hint = "(tables needs --base PROFILE, a composed profile to correct)" if family == "tables" else ""
        raise unknown_name("family", family, ("auto", *known), hint)
    if len(steps) < MIN_STEPS:
        raise InputError(
            f"fit: {len(steps)} measured steps, expected at least {MIN_STEPS}; measure longer, or name more files"
        )
    tried = {}
    for name in known if family == "auto" else (family,):
        tried[name] = cross_validated(known[name], steps, seed)
    best = min(tried, key=lambda name: _mean_error(tried[name]))
    model = known[best](steps.shapes, steps.times, steps.weights)
    text = f"{best} fitted to {steps.source}; cross-validated median error {describe_errors(tried[best])}"
    return Fitted(relabelled(model, text), best, tried[best], Region.of(steps.shapes), noise(steps))


def _tables_of(base: str) -> TablesModel:
    from slacktide.profiling.profiles import load_profile

    model = load_profile(base).latency
    if not isinstance(model, TablesModel):
        raise InputError(f"--base {base}: {model.family}, expected a profile with composed tables")
    return model


def _mean_error(errors: Mapping[str, SceneError]) -> float:
    return float(np.mean([error.median for error in errors.values()]))


def relabelled(model: Any, text: str) -> Any:
    """The model with its source said."""
    return replace(model, sources={**model.sources, "label": "fitted", "latency": text})


def profile_fields(steps: Steps, fitted: Fitted, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The profile file's fields (`profile_file` reads them). `given`: engine settings that the facts lack, by name.

    Raises InputError for a setting that neither tells: none is guessed.
    """
    engine = dict(steps.facts.get("engine", {})) | {key: value for key, value in given.items() if value is not None}
    missing = [key for key in REQUIRED if engine.get(key) is None]
    if missing:
        flags = ", ".join("--" + key.replace("_", "-") for key in missing)
        raise InputError(f"fit: the measurements do not tell {', '.join(missing)}: give {flags} as the engine has them")
    hardware = steps.facts.get("hardware", {})
    host = steps.host
    overlapped = bool(engine.get("async_scheduling", host.overlapped))
    fields: dict[str, Any] = {
        "name": name,
        "label": "fitted",
        "source": fitted.model.sources["latency"],
        "gpu": str(hardware.get("gpu") or hardware.get("cpu") or given.get("gpu") or "unknown"),
        "model": str(engine.get("model") or "unknown"),
        "tensor_parallel": int(engine.get("tensor_parallel", 1)),
        **{key: int(engine[key]) for key in REQUIRED},
        "pipeline_depth": 2 if overlapped else 1,
    }
    for key in ("max_model_len", "enable_prefix_caching"):
        # What a bare stack of layers was measured up to is no limit of an engine.
        if engine.get(key) is not None and "layers_measured" not in engine:
            fields[key] = engine[key]
    if engine.get("frontend_ms") is not None:
        # A lone request waits for its step's host share, too, which is in the model's times already.
        share = 1e3 * (host.per_step + host.per_sequence)
        fields["frontend_ms"] = rounded(max(float(engine["frontend_ms"]) - share, 0.0))
    fields["latency"] = latency_fields(fitted.model)
    if host.known:
        fields["host"] = {
            "per_step_ms": rounded(host.per_step * 1e3),
            "per_sequence_ms": rounded(host.per_sequence * 1e3),
            "overlapped": host.overlapped,
        }
    fields["errors"] = {
        scene: {
            "steps": error.steps,
            "median_percent": rounded(100 * error.median),
            "p90_percent": rounded(100 * error.p90),
            **({"noise_percent": rounded(100 * fitted.noise[scene])} if scene in fitted.noise else {}),
        }
        for scene, error in fitted.errors.items()
    }
    fields["measured"] = region_fields(fitted.region)
    fields["provenance"] = {**steps.facts, "notes": list(steps.notes)}
    return fields


REQUIRED = ("num_gpu_blocks", "block_size", "max_num_batched_tokens", "max_num_seqs")
"""Engine settings that a profile must have."""


def rounded(value: float) -> float:
    """Six digits: more than any measurement has, few enough to compare two files by eye."""
    return float(f"{value:.6g}")
