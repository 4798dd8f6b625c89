"""A user's own profile: a JSON file with an affine or seven-feature model and the engine's limits.

```json
{"name": "my-gpu/my-model", "label": "measured", "source": "benchmark of 2026-01-15",
 "num_gpu_blocks": 12000, "block_size": 16, "max_num_batched_tokens": 2048, "max_num_seqs": 256,
 "latency": {"family": "affine", "alpha_p_ms": 4.5, "beta_p_ms": 0.038, "alpha_d_ms": 11.3, "beta_d_ms": 0.064}}
```
affine: alpha_p_ms, beta_p_ms, alpha_d_ms, beta_d_ms; optional alpha_mb_ms, kappa_ms. seven-feature: `decode`,
`prefill`, `mixed`, each an object with any of intercept, x1..x7 (milliseconds per unit; left out means 0), and optional
floor_ms. Times in files are milliseconds.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from slacktide.core.latency import AffineModel, LatencyModel
from slacktide.core.latency_families import SCENES, WEIGHTS, SevenFeatureModel
from slacktide.errors import InputError, unknown_name
from slacktide.profiling.profiles import Profile

TOP = {
    "name", "label", "source", "gpu", "model", "tensor_parallel", "num_gpu_blocks", "block_size",
    "max_num_batched_tokens", "max_num_seqs", "latency",
}  # fmt: skip
LABELS = ("measured", "fitted", "estimate", "prior")
AFFINE_FIELDS = ("alpha_p_ms", "beta_p_ms", "alpha_d_ms", "beta_d_ms")
Fields = dict[str, Any]


def read_profile(path: str | Path) -> Profile:
    """The profile in a JSON file. Raises InputError naming the file, the field, what was found and what is expected."""
    where = f"profile file {path}"
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{where}: cannot be read ({error})") from error
    try:
        data = json.loads(text)
    except ValueError as error:
        raise InputError(f"{where}: not valid JSON ({error})") from error
    fields = _object(where, data)
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
    )


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
    except InputError:
        raise
    except ValueError as error:  # a model's own check, which speaks in seconds
        raise InputError(f"{where}: {error} (seconds)") from error
    raise InputError(f"{where}.family: found {family!r}, expected 'affine' or 'seven-feature'")


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


def _integer(where: str, fields: Fields, name: str, least: int, *, default: int | None = None) -> int:
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{where}: field {name}: found {_shown(value)}, expected a whole number of at least {least}")
    return value


def _seconds(where: str, fields: Fields, name: str, *, negative: bool = True) -> float:
    """A number of milliseconds, as seconds; only alphas and kappa may be negative (the model checks them)."""
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InputError(f"{where}: field {name}: found {_shown(value)}, expected a number of milliseconds")
    if value < 0 and not (negative and (name.startswith("alpha") or name == "kappa_ms")):
        raise InputError(f"{where}: field {name}: found {value:g}, expected a number of milliseconds >= 0")
    return value * 1e-3


def _shown(value: object) -> str:
    return "nothing" if value is None else repr(value)[:60]
