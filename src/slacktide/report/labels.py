"""Where the names of lines go: beside their own line, away from the others and from one another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slacktide.core.types import FloatArray

CHARACTER, LINE = 7.4, 15.0
"""Width and height of a character of the 13-unit type, with some air."""

TRIES = 36
"""Places tried along each line."""

FAR = 36.0
"""Units from the next line beyond which a place is no better."""

Curve = tuple[FloatArray, FloatArray]
Box = tuple[float, float, float, float]


def place(curves: Sequence[Curve], lengths: Sequence[int], room: Box) -> list[tuple[float, float] | None]:
    """Lower left corner of each name, or None where there is no room. `lengths` in characters, `room` as x0, y0, x1,
    y1; y grows downwards."""
    taken: list[Box] = []
    found: list[tuple[float, float] | None] = []
    for i, (curve, length) in enumerate(zip(curves, lengths, strict=True)):
        best: tuple[float, Box] | None = None
        others = [other for j, other in enumerate(curves) if j != i]
        for box in _candidates(curve, length * CHARACTER, room):
            if any(_overlap(box, other) for other in taken):
                continue
            score = min((_distance(box, other) for other in others), default=FAR)
            score = min(score, FAR) + 0.3 * min(_distance(box, curve), 6.0)
            if best is None or score > best[0] + 1e-9:
                best = (score, box)
        if best is None:
            found.append(None)
            continue
        taken.append(best[1])
        found.append((best[1][0], best[1][3] - 4))
    return found


def _candidates(curve: Curve, width: float, room: Box) -> list[Box]:
    """Boxes above, below and to the right of points along the line that lie in the room."""
    x, y = curve
    boxes = []
    for at in np.unique(np.linspace(0, x.size - 1, TRIES).astype(int)) if x.size else []:
        a, b = float(x[at]), float(y[at])
        for left, top in (
            (a + 6, b - LINE / 2),
            (a - width / 2, b - LINE - 4),
            (a - width / 2, b + 4),
            (a - width - 6, b - 8),
        ):
            box = (left, top, left + width, top + LINE)
            if box[0] >= room[0] + 2 and box[1] >= room[1] and box[2] <= room[2] and box[3] <= room[3]:
                boxes.append(box)
    return boxes


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] + 4 and b[0] < a[2] + 4 and a[1] < b[3] and b[1] < a[3]


def _distance(box: Box, curve: Curve) -> float:
    """Least distance between a box and a line's points (linear between them), in units; 0 where it crosses."""
    x, y = curve
    if not x.size:
        return FAR
    inside = np.linspace(box[0], box[2], 12)
    level = np.interp(inside, x, y) if x.size > 1 else np.full(12, y[0])
    level = np.concatenate([level, y[(x >= box[0] - 4) & (x <= box[2] + 4)]])
    gap = np.maximum(np.maximum(box[1] - level, level - box[3]), 0.0)
    outside = np.maximum(np.maximum(x[0] - box[2], box[0] - x[-1]), 0.0)
    return float(np.hypot(gap.min(), outside))
