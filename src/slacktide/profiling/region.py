"""Where a model was measured: per scene the range of what a batch is made of. Beyond it every prediction is a guess.

A box, not a convex hull: the sums among its sides (KV read by decodes, cached tokens read by chunks) already forbid
the combinations that no side alone would, and a box can be read and compared line by line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from slacktide.core import shape as s
from slacktide.core.latency_families import SCENES, scenes
from slacktide.core.types import BoolArray, FloatArray, IntArray

SIDES = {
    "num_tokens": s.NUM_TOKENS,
    "num_prefills": s.NUM_PREFILLS,
    "prefill_tokens": s.PREFILL_TOKENS,
    "prefill_context": s.PREFILL_CONTEXT,
    "num_decodes": s.NUM_DECODES,
    "decode_context": s.DECODE_CONTEXT,
}
"""Sides of the box, by the shape's own names."""
TOLERANCE = 0.1
"""Share by which a step may lie beyond a side: curves that bend over factors of 1.4 do not break within a tenth."""

Box = dict[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Region:
    """Scene -> side -> (least, most) measured. A scene that was not measured is missing."""

    boxes: Mapping[str, Box]

    @classmethod
    def of(cls, shapes: FloatArray) -> Region:
        """The region that measured steps float64[m, 12] span."""
        scene, boxes = scenes(shapes), {}
        for i, name in enumerate(SCENES):
            rows = shapes[scene == i]
            if len(rows):
                boxes[name] = {
                    side: (float(rows[:, column].min()), float(rows[:, column].max())) for side, column in SIDES.items()
                }
        return cls(boxes)

    def outside(self, columns: Mapping[str, FloatArray | IntArray]) -> BoolArray:
        """bool[m]: steps that lie beyond. `columns`: any of SIDES; at least prefill_tokens and num_decodes."""
        prefill, decodes = np.asarray(columns["prefill_tokens"]), np.asarray(columns["num_decodes"])
        kind = np.where((prefill > 0) & (decodes > 0), 2, np.where(prefill > 0, 1, 0))
        found = np.zeros(len(prefill), dtype=bool)
        for i, name in enumerate(SCENES):
            rows, box = kind == i, self.boxes.get(name)
            if box is None:
                found |= rows
                continue
            for side, values in columns.items():
                low, high = box[side]
                wide = np.asarray(values)
                found |= rows & ((wide < low * (1 - TOLERANCE)) | (wide > high * (1 + TOLERANCE)))
        return found & (prefill + decodes > 0)

    def outside_shapes(self, shapes: FloatArray) -> BoolArray:
        """bool[m] for steps float64[m, 12]."""
        return self.outside({side: shapes[:, column] for side, column in SIDES.items()})


def decode_contexts(
    num_steps: int, token_step: IntArray, token_offsets: IntArray, num_prompt_tokens: IntArray
) -> FloatArray:
    """Context sum of each step's decodes, float64[num_steps], from which step produced which token.

    `token_step` int[tokens]; the tokens of request i are at token_offsets[i] : token_offsets[i + 1]. The k-th output
    token (k = 0 is the prefill's) comes of a decode that had prompt + k - 1 tokens in the cache.
    """
    counts = np.diff(token_offsets)
    k = np.arange(len(token_step)) - np.repeat(token_offsets[:-1], counts)
    contexts = np.where(k > 0, np.repeat(num_prompt_tokens, counts) + k - 1, 0)
    return np.bincount(token_step, weights=contexts, minlength=num_steps).astype(np.float64)
