"""A user's own profile: a JSON file with an affine or seven-feature model and the engine's limits.

```json
{"name": "my-gpu/my-model", "label": "measured", "source": "benchmark of 2026-01-15",
 "num_gpu_blocks": 12000, "block_size": 16, "max_num_batched_tokens": 2048, "max_num_seqs": 256,
 "latency": {"family": "affine", "alpha_p_ms": 4.5, "beta_p_ms": 0.038, "alpha_d_ms": 11.3, "beta_d_ms": 0.064}}
```
affine: alpha_p_ms, beta_p_ms, alpha_d_ms, beta_d_ms; optional alpha_mb_ms, kappa_ms. seven-feature: `decode`,
`prefill`, `mixed`, each an object with any of intercept, x1..x7 (milliseconds per unit; left out means 0), and optional
floor_ms. extended-feature: `knots` (rising token counts from 0), and per scene `intercept`, `slopes` (one a knot) and
any of its linear terms. roofline: its nine constants, each with _ms. tables: `base` (a packaged profile) and factors on
its parts. Times in files are milliseconds. What `slacktide fit` writes besides (`pipeline_depth`, `frontend_ms`,
`host`, `errors`, `measured`, `provenance`, and `validation` from `slacktide validate`) is described in
docs/calibration.md.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from slacktide.core.latency import AffineModel, LatencyModel
from slacktide.core.latency_extended import EXTENDED_LINEAR, ExtendedFeatureModel
from slacktide.core.latency_families import SCENES, WEIGHTS, RooflineModel, SevenFeatureModel
from slacktide.core.latency_tables import TablesModel
from slacktide.errors import InputError, unknown_name
from slacktide.profiling import json_text
from slacktide.profiling.json_text import is_number
from slacktide.profiling.profiles import Profile
from slacktide.profiling.region import SIDES, Box, Region

TOP = {
    "name", "label", "source", "gpu", "model", "tensor_parallel", "num_gpu_blocks", "block_size",
    "max_num_batched_tokens", "max_num_seqs", "latency", "max_model_len", "enable_prefix_caching", "pipeline_depth",
    "frontend_ms", "host", "errors", "measured", "provenance", "validation",
}  # fmt: skip
LABELS = ("measured", "fitted", "composed", "estimate", "prior")
MAX_WHOLE = 2**31 - 1
"""Largest whole number read: block counts and token counts beyond it overflow a product in 64 bits."""
MAX_MS = 1e9
"""Most milliseconds of any constant (11 days): no step takes that, and sums stay far from infinity."""
MAX_FACTOR = 1e6
"""Largest factor on a part: beyond it a unit was mistaken."""
AFFINE_FIELDS = ("alpha_p_ms", "beta_p_ms", "alpha_d_ms", "beta_d_ms")
FAMILIES = ("affine", "seven-feature", "extended-feature", "roofline", "tables")
PARTS = ("dense", "per_sequence", "decode", "prefill", "beside")
"""Factors of the family `tables` (`calibrate.scaled_tables`)."""
Fields = dict[str, Any]


def read_profile(path: str | Path) -> Profile:
    """The profile in a JSON file. Raises InputError naming the file, the field, what was found and what is expected."""
    where = f"profile file {path}"
    fields = _object(where, json_text.read(path, where))
    _known(where, fields, TOP)
    label = fields.get("label", "prior")
    if label not in LABELS:
        raise InputError(f"{where}: field label: found {label!r}, expected one of {', '.join(LABELS)}")
    source = _text(where, fields, "source", "user's file")
    latency = _latency(f"{where}: field latency", _object(where, fields.get("latency"), "latency"), label, source)
    return Profile(
        name=_text(where, fields, "name", Path(path).stem),
        gpu=_text(where, fields, "gpu", "unknown"),
        model=_text(where, fields, "model", "unknown"),
        tensor_parallel=_integer(where, fields, "tensor_parallel", 1, default=1),
        latency=latency,
        num_blocks=_integer(where, fields, "num_gpu_blocks", 2) - 1,
        block_size=_integer(where, fields, "block_size", 1, default=16),
        kv_bytes_per_token=0,
        weight_bytes=0.0,
        max_num_batched_tokens=_integer(where, fields, "max_num_batched_tokens", 1, default=2048),
        max_num_seqs=_integer(where, fields, "max_num_seqs", 1, default=256),
        label=label,
        sources={**latency.sources, "basis": source, "KV capacity": "num_gpu_blocks of the file"},
        frontend=_seconds(where, fields, "frontend_ms", negative=False) if "frontend_ms" in fields else 0.0,
        pipeline_depth=_integer(where, fields, "pipeline_depth", 1, default=1, most=2),
        region=_region(where, fields),
        errors=_errors(where, fields),
        validation=_validation(where, fields),
        max_model_len=_integer(where, fields, "max_model_len", 1) if "max_model_len" in fields else None,
        enable_prefix_caching=_switch(where, fields, "enable_prefix_caching"),
    )


def _switch(where: str, fields: Fields, name: str) -> bool | None:
    value = fields.get(name)
    if name in fields and not isinstance(value, bool):
        raise InputError(f"{where}: field {name}: found {_shown(value)}, expected true or false")
    return value


def _region(where: str, fields: Fields) -> Region | None:
    """Where the model was measured; None for a file that does not say."""
    if "measured" not in fields:
        return None
    boxes: dict[str, Box] = {}
    for scene, box in _object(where, fields["measured"], "measured").items():
        inner = f"{where}: field measured.{scene}"
        if scene not in SCENES:
            raise InputError(f"{where}: field measured: {unknown_name('scene', scene, SCENES)}")
        boxes[scene] = {}
        for side, pair in _object(inner, box).items():
            if side not in SIDES:
                raise InputError(f"{inner}: {unknown_name('side', side, SIDES)}")
            numbers = isinstance(pair, list) and len(pair) == 2 and all(is_number(v) for v in pair)
            if not numbers or pair[0] > pair[1] or pair[0] < 0:
                raise InputError(f"{inner}.{side}: found {_shown(pair)}, expected [least, most], both at least 0")
            boxes[scene][side] = (float(pair[0]), float(pair[1]))
        if missing := set(SIDES) - set(boxes[scene]):
            raise InputError(f"{inner}: found no {min(missing)}, expected all of {', '.join(SIDES)}")
    return Region(boxes)


def _errors(where: str, fields: Fields) -> str:
    """`decode 1.1 %, mixed 3.9 %`: the cross-validated median errors that the file tells; empty without."""
    found = []
    for scene, error in _object(where, fields.get("errors", {}), "errors").items():
        value = _object(f"{where}: field errors.{scene}", error).get("median_percent")
        if not is_number(value):
            raise InputError(f"{where}: field errors.{scene}.median_percent: found {_shown(value)}, expected a number")
        found.append(f"{scene} {value:.1f} %")
    return ", ".join(found)


def _validation(where: str, fields: Fields) -> str:
    """What `slacktide validate` found, in a line; empty without."""
    value = _object(where, fields.get("validation", {}), "validation")
    return _text(f"{where}: field validation", value, "text", "") if value else ""


def latency_fields(model: Any) -> Fields:
    """A model as the file's `latency`; `read_profile` makes the same model of it again (to six digits)."""
    if isinstance(model, AffineModel):
        known = model.coefficients().items()
        values = {name: v for name, v in known if name not in ("alpha_mb", "kappa") or model.alpha_mb is not None}
        return {"family": "affine"} | {f"{name}_ms": _ms(value) for name, value in values.items()}
    if isinstance(model, SevenFeatureModel):
        scenes = {
            scene: {name: _ms(w) for name, w in zip(WEIGHTS, row, strict=True) if w or name == "intercept"}
            for scene, row in zip(SCENES, model.weights.tolist(), strict=True)
        }
        return {"family": "seven-feature", "floor_ms": _ms(model.floor), **scenes}
    if isinstance(model, ExtendedFeatureModel):
        k = len(model.knots)
        experts = {
            scene: {"intercept": _ms(row[0]), "slopes": [_ms(w) for w in row[1 : k + 1]]}
            | {name: _ms(w) for name, w in zip(EXTENDED_LINEAR, row[k + 1 :], strict=True) if w}
            for scene, row in zip(SCENES, model.weights.tolist(), strict=True)
        }
        knots = [int(knot) for knot in model.knots]
        return {"family": "extended-feature", "knots": knots, "floor_ms": _ms(model.floor), **experts}
    if isinstance(model, RooflineModel):
        constants = {f"{n}_ms": _ms(v) for n, v in model.coefficients().items() if n != "interference"}
        return {"family": "roofline", **constants, "interference": _six(model.interference)}
    scales = dict(part.split(" ") for part in model.sources["scales"].split(", "))
    parts = {n: _six(float(scales[n])) for n in PARTS}
    hosts = {f"{n}_ms": _ms(float(scales[n])) for n in ("host_per_step", "host_per_sequence")}
    return {"family": "tables", "base": model.sources["base"], **parts, **hosts}


def region_fields(region: Region) -> Fields:
    """A region as the file's `measured`."""
    return {
        scene: {side: [_six(low), _six(high)] for side, (low, high) in box.items()}
        for scene, box in region.boxes.items()
    }


def _ms(seconds: float) -> float:
    return _six(seconds * 1e3)


def _six(value: float) -> float:
    return float(f"{value:.6g}")


def _latency(where: str, fields: Fields, label: str, source: str) -> LatencyModel:
    sources = {"label": label, "latency": source}
    family = fields.get("family")
    try:
        if family == "affine":
            _known(where, fields, {"family", "alpha_mb_ms", "kappa_ms", *AFFINE_FIELDS})
            alpha_p, beta_p, alpha_d, beta_d = (_seconds(where, fields, name) for name in AFFINE_FIELDS)
            mixed = _seconds(where, fields, "alpha_mb_ms") if "alpha_mb_ms" in fields else None
            kappa = _seconds(where, fields, "kappa_ms") if "kappa_ms" in fields else 0.0
            return AffineModel(alpha_p, beta_p, alpha_d, beta_d, mixed, kappa, sources)
        if family == "seven-feature":
            _known(where, fields, {"family", "floor_ms", *SCENES})
            weights = np.zeros((3, 8))
            for i, scene in enumerate(SCENES):
                of_scene = _object(where, fields.get(scene), scene)
                _known(f"{where}.{scene}", of_scene, set(WEIGHTS))
                if not of_scene:
                    raise InputError(f"{where}.{scene}: expected at least one of {', '.join(WEIGHTS)}")
                for name in of_scene:
                    weights[i, WEIGHTS.index(name)] = _seconds(f"{where}.{scene}", of_scene, name, negative=False)
            floor = _seconds(where, fields, "floor_ms", negative=False) if "floor_ms" in fields else 0.0
            return SevenFeatureModel(weights, floor, sources)
        if family == "extended-feature":
            return _extended(where, fields, sources)
        if family == "roofline":
            names = [f.name for f in dataclasses.fields(RooflineModel) if f.name not in ("sources", "interference")]
            _known(where, fields, {"family", "interference", *(f"{name}_ms" for name in names)})
            constants = {name: _seconds(where, fields, f"{name}_ms", negative=False) for name in names}
            constants["interference"] = _factor(where, fields, "interference")
            return RooflineModel(**constants, sources=sources)
        if family == "tables":
            return _tables(where, fields, sources)
    except InputError:
        raise
    except ValueError as error:  # a model's own check, which speaks in seconds
        raise InputError(f"{where}: {error} (seconds)") from error
    raise InputError(f"{where}.family: found {family!r}, expected one of {', '.join(FAMILIES)}")


def _extended(where: str, fields: Fields, sources: dict[str, str]) -> ExtendedFeatureModel:
    _known(where, fields, {"family", "floor_ms", "knots", *SCENES})
    knots = fields.get("knots")
    if not isinstance(knots, list) or not knots or not all(is_number(knot) for knot in knots):
        raise InputError(f"{where}: field knots: found {_shown(knots)}, expected rising token counts from 0 on")
    weights = np.zeros((3, 1 + len(knots) + len(EXTENDED_LINEAR)))
    for i, scene in enumerate(SCENES):
        of_scene, inner = _object(where, fields.get(scene), scene), f"{where}.{scene}"
        _known(inner, of_scene, {"intercept", "slopes", *EXTENDED_LINEAR})
        slopes = of_scene.get("slopes", [])
        if not isinstance(slopes, list) or len(slopes) != len(knots):
            raise InputError(f"{inner}: field slopes: found {_shown(slopes)}, expected {len(knots)}, one for each knot")
        row = {"intercept": of_scene.get("intercept", 0.0)} | {f"slopes[{j}]": v for j, v in enumerate(slopes)}
        row |= {name: of_scene.get(name, 0.0) for name in EXTENDED_LINEAR}
        weights[i] = [_seconds(inner, row, name, negative=False) for name in row]
    floor = _seconds(where, fields, "floor_ms", negative=False) if "floor_ms" in fields else 0.0
    return ExtendedFeatureModel(weights, np.array(knots, dtype=np.float64), floor, sources)


def _tables(where: str, fields: Fields, sources: dict[str, str]) -> LatencyModel:
    """A packaged profile's tables with the file's factors."""
    from slacktide.profiling.calibrate import scaled_tables
    from slacktide.profiling.profiles import load_profile

    hosts = ("host_per_step_ms", "host_per_sequence_ms")
    _known(where, fields, {"family", "base", *PARTS, *hosts})
    base = _text(where, fields, "base", "")
    if base.endswith(".json"):
        raise InputError(f"{where}: field base: found {base!r}, expected a packaged profile ('slacktide profiles')")
    scales = {name: _factor(where, fields, name) for name in PARTS}
    scales |= {name.removesuffix("_ms"): _seconds(where, fields, name, negative=False) for name in hosts}
    start = load_profile(base).latency
    if not isinstance(start, TablesModel):
        raise InputError(f"{where}: field base: found {base!r}, a {start.family}, expected a profile with tables")
    return dataclasses.replace(scaled_tables(start, scales, base), sources=sources)


def _factor(where: str, fields: Fields, name: str) -> float:
    value = fields.get(name)
    if not is_number(value) or not 0 < value <= MAX_FACTOR:  # type: ignore[operator]
        raise InputError(
            f"{where}: field {name}: found {_shown(value)}, expected a factor above 0 (at most {MAX_FACTOR:g})"
        )
    return float(value)  # type: ignore[arg-type]


def _object(where: str, value: object, name: str = "") -> Fields:
    if not isinstance(value, dict):
        field = f": field {name}" if name else ""
        raise InputError(f"{where}{field}: found {_shown(value)}, expected a JSON object")
    return value


def _known(where: str, fields: Fields, known: set[str]) -> None:
    for name in fields:
        if name not in known:
            raise InputError(f"{where}: {unknown_name('field', name, known)}")


def _text(where: str, fields: Fields, name: str, default: str) -> str:
    value = fields.get(name, default)
    if not isinstance(value, str) or not value:
        raise InputError(f"{where}: field {name}: found {_shown(value)}, expected a text")
    return value


def _integer(
    where: str, fields: Fields, name: str, least: int, *, default: int | None = None, most: int = MAX_WHOLE
) -> int:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        wanted = f"of at least {least}" if most == MAX_WHOLE else f"from {least} to {most}"
        raise InputError(f"{where}: field {name}: found {_shown(value)}, expected a whole number {wanted}")
    return value


def _seconds(where: str, fields: Fields, name: str, *, negative: bool = True) -> float:
    """A number of milliseconds, as seconds; only alphas and kappa may be negative (the model checks them)."""
    value: Any = fields.get(name)
    if not is_number(value) or abs(value) > MAX_MS:
        raise InputError(
            f"{where}: field {name}: found {_shown(value)}, expected a number of milliseconds, at most {MAX_MS:g}"
        )
    if value < 0 and not (negative and (name.startswith("alpha") or name == "kappa_ms")):
        raise InputError(f"{where}: field {name}: found {value:g}, expected a number of milliseconds >= 0")
    return float(value) * 1e-3


def _shown(value: object) -> str:
    return "nothing" if value is None else repr(value)[:60]
