"""Family `extended-feature`: SlidingServe's predictor with the terms that its seven features lack.

A step's time is not linear in its tokens: below the knee it is the time to read the weights, above it arithmetic, and
tiles make stairs. Here it is a piecewise-linear curve of the tokens with slopes >= 0 (any rising curve, not only a
convex one), plus linear terms, one expert per scene (pure decode, pure prefill, mixed) as in the paper. Still linear in
its weights, so it is fitted by least squares, refitted on line, and inverted like the seven-feature model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from slacktide.core import shape as s
from slacktide.core.latency import PackedModel, check_seconds
from slacktide.core.latency_families import SCENES, scenes
from slacktide.core.packing import (
    EXTENDED,
    EXTENDED_FLOOR,
    EXTENDED_KNOTS,
    EXTENDED_WEIGHTS,
    FAMILY,
    MONOTONE,
    pack,
)
from slacktide.core.types import FloatArray

KNOTS = (0, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)
"""Tokens of a step where the slope may change: about every factor 1.4, the spacing of measured GEMM tiles' steps."""
EXTENDED_LINEAR = (
    "sequences", "pairs", "prefill_context", "decode_context", "decodes", "prefill_max", "prefills",
)  # fmt: skip
"""Linear terms behind the curve. `pairs` = x1 - x2 / 2 is what causal attention of the chunks really computes."""


def extended_features(shapes: FloatArray, knots: FloatArray) -> FloatArray:
    """1, the part of the tokens between each two knots, and EXTENDED_LINEAR: float64[m, 12] -> float64[m, 8 + k]."""
    width = np.append(np.diff(knots), np.inf)
    linear = [
        shapes[:, s.NUM_SEQUENCES],
        shapes[:, s.PREFILL_WORK] - 0.5 * shapes[:, s.PREFILL_SQUARE],
        shapes[:, s.PREFILL_CONTEXT],
        shapes[:, s.DECODE_CONTEXT],
        shapes[:, s.NUM_DECODES],
        shapes[:, s.PREFILL_MAX],
        shapes[:, s.NUM_PREFILLS],
    ]
    parts = np.clip(shapes[:, s.NUM_TOKENS, None] - knots, 0.0, width)
    return np.concatenate([np.ones((len(shapes), 1)), parts, np.stack(linear, axis=1)], axis=1)


@dataclass(frozen=True, eq=False)
class ExtendedFeatureModel(PackedModel):
    """One expert per scene over `extended_features`; at least `floor` seconds.

    `weights` float64[3, 8 + k] >= 0: scenes decode, prefill, mixed; intercept, k slopes (seconds per token), then
    EXTENDED_LINEAR. `knots` float64[k]: rising token counts from 0 on. Non-negative weights keep it monotone.
    """

    weights: FloatArray
    knots: FloatArray
    floor: float = 0.0
    sources: Mapping[str, str] = field(default_factory=lambda: {"label": "fitted"})

    def __post_init__(self) -> None:
        """Raise ValueError for shapes that do not match, and for weights that are negative or not finite."""
        expected = (len(SCENES), len(self.knots) + 1 + len(EXTENDED_LINEAR))
        if self.weights.shape != expected or not np.all(np.isfinite(self.weights)) or self.weights.min() < 0:
            raise ValueError(f"extended-feature model: expected finite weights >= 0 of shape {expected}")
        if len(self.knots) == 0 or self.knots[0] != 0 or np.any(np.diff(self.knots) <= 0):
            raise ValueError("extended-feature model: expected rising knots that begin with 0")
        check_seconds("extended-feature model", {"floor": self.floor})

    @property
    def family(self) -> str:
        """Always extended-feature."""
        return "extended-feature"

    def coefficients(self) -> dict[str, float]:
        """floor and SCENE.intercept, SCENE.tokens_from_0, ..., SCENE.sequences, ..."""
        names = ["intercept", *(f"tokens_from_{k:g}" for k in self.knots), *EXTENDED_LINEAR]
        named = {
            f"{scene}.{name}": float(self.weights[i, j])
            for i, scene in enumerate(SCENES)
            for j, name in enumerate(names)
        }
        return {"floor": self.floor} | named

    def _pack(self) -> FloatArray:
        header = {FAMILY: EXTENDED, MONOTONE: 1.0, EXTENDED_FLOOR: self.floor, EXTENDED_KNOTS + 1: len(self.knots)}
        return pack(header, [(EXTENDED_KNOTS, [self.knots]), (EXTENDED_WEIGHTS, [self.weights])])

    def reference(self, shapes: FloatArray) -> FloatArray:
        """Numpy twin."""
        time = (extended_features(shapes, self.knots) * self.weights[scenes(shapes)]).sum(axis=1)
        return np.where(shapes[:, s.NUM_TOKENS] > 0, np.maximum(time, self.floor), 0.0)
