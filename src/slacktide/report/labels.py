"""Where the names of lines go: beside their own line, away from the others and from one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slacktide.core.types import FloatArray

CHARACTER, LINE = 7.4, 15.0
"""Width and height of a character of the 13-unit type, with some air."""

PHONE = 20 / 13
"""A phone's type is that much larger (page.css)."""

TRIES = 36
"""Places tried along each line."""

FAR = 36.0
"""Units from the next line beyond which a place is no better."""

Curve = tuple[FloatArray, FloatArray]
Box = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a name is written."""

    x: float
    y: float
    """Its base line."""
    anchor: str
    """Which end of it lies at x: start, middle or end."""
    box: Box
    """What it covers."""
    phone: bool
    """It has room in a phone's type, too."""


def place(curves: Sequence[Curve], lengths: Sequence[int], room: Box, written: Sequence[Box] = ()) -> list[Spot | None]:
    """A spot for each name, or None where there is no room. `lengths` in characters, `room` as x0, y0, x1, y1; y grows
    downwards. `written`: boxes of other texts."""
    found: list[Spot | None] = []
    for i, (curve, length) in enumerate(zip(curves, lengths, strict=True)):
        others = [other for j, other in enumerate(curves) if j != i]
        taken = [*written, *(spot.box for spot in found if spot is not None)]
        best = _best(curve, others, length, room, taken, PHONE)
        found.append(best or _best(curve, others, length, room, taken, 1.0))
    return found


def _best(
    curve: Curve, others: Sequence[Curve], length: int, room: Box, taken: Sequence[Box], size: float
) -> Spot | None:
    """The spot farthest from the other lines, and near its own."""
    best: tuple[float, Spot] | None = None
    for spot in _candidates(curve, length * CHARACTER * size, LINE * size, room, phone=size > 1):
        if any(_overlap(spot.box, other) for other in taken):
            continue
        score = min((_distance(spot.box, other) for other in others), default=FAR)
        score = min(score, FAR) + 0.3 * min(_distance(spot.box, curve), 6.0)
        if best is None or score > best[0] + 1e-9:
            best = (score, spot)
    return None if best is None else best[1]


def _candidates(curve: Curve, width: float, height: float, room: Box, *, phone: bool) -> list[Spot]:
    """Spots beside, above and below points along the line that lie in the room."""
    x, y = curve
    spots = []
    for at in np.unique(np.linspace(0, x.size - 1, TRIES).astype(int)) if x.size else []:
        a, b = float(x[at]), float(y[at])
        for left, top, anchor, from_left in (
            (a + 6, b - height / 2, "start", 0.0),
            (a - width / 2, b - height - 4, "middle", width / 2),
            (a - width / 2, b + 4, "middle", width / 2),
            (a - width - 6, b - height / 2, "end", width),
        ):
            box = (left, top, left + width, top + height)
            if box[0] >= room[0] + 2 and box[1] >= room[1] and box[2] <= room[2] and box[3] <= room[3]:
                spots.append(Spot(left + from_left, box[3] - 4, anchor, box, phone))
    return spots


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
