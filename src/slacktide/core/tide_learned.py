"""What `tide` learned while it served, as plain values for people: margins, outputs, targets, tenants' shares."""

from __future__ import annotations

from typing import Any

import numpy as np

from slacktide.core import tide as t
from slacktide.core.fair import Shares
from slacktide.core.tide import Store
from slacktide.core.types import FloatArray

SCENES = ("decode", "prefill", "mixed")
QUANTILES = (0.05, 0.5, 0.95)


def learned(store: Store, margins: FloatArray, deviations: float, shares: Shares) -> dict[str, Any]:
    """Plain values, ready for JSON; times in seconds. Keys:

    `margins`: scene -> steps, mean (real / predicted time), deviation (its mean absolute deviation) and factor, by
    which bounds multiply predictions. `mean_output_tokens`: of recently finished requests; None before the first.
    `ttft_targets`, `tbt_targets`: the 5 %, 50 % and 95 % quantile of recent arrivals that had one, and their number.
    `arrival_rate`: requests per second. `miss_rate`: share of the last hundred or so requests. `tenants`: name ->
    weight, cost (token cost served) and share of it; empty for one tenant.
    """
    state = store.state
    scenes = {}
    for scene, name in enumerate(SCENES):
        mean, deviation, steps = margins[:, scene, t.SCENE_ALONE].tolist()
        if steps:
            scenes[name] = {"steps": int(steps), "mean": mean, "deviation": deviation,
                            "factor": mean + deviations * deviation}  # fmt: skip
    seen = min(int(state[t.NUM_ARRIVALS]), t.RECENT)
    weight = float(state[t.OUT_WEIGHT])
    return {
        "margins": scenes,
        "mean_output_tokens": float(state[t.OUT_SUM]) / weight if weight > 0 else None,
        "ttft_targets": _quantiles(store.ring[0, :seen]),
        "tbt_targets": _quantiles(store.ring[1, :seen]),
        "arrival_rate": float(state[t.ARRIVAL_RATE]),
        "miss_rate": float(state[t.MISS_RATE]),
        "tenants": shares.served(),
    }


def _quantiles(values: FloatArray) -> dict[str, Any]:
    known = values[np.isfinite(values)]
    if not known.size:
        return {"requests": 0, "quantiles": None}
    return {"requests": int(known.size), "quantiles": [float(q) for q in np.quantile(known, QUANTILES)]}
