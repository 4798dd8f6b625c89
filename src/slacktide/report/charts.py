"""Small charts as SVG text: lines, steps, stacked areas, dots and bars, on linear, log and percentile axes.

Own code, because a report must work offline, on paper, in both themes and for a screen reader, and stay small:
matplotlib's SVG (300 kB a figure, text as outlines) does none of it, and plotly's script alone has 4.8 MB. Colours are
CSS classes, so that the page decides on the theme; the data stand beside the drawing for the page's script.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np

from slacktide.core.types import FloatArray
from slacktide.report.axes import Axis, linear_ticks, log_ticks, nines, short
from slacktide.report.labels import CHARACTER, LINE, PHONE, Box, place

WIDTH, HEIGHT = 560, 300
"""Units of a drawing: two stand side by side in a page of 1,180 pixels at their natural size."""

LEFT, RIGHT, TOP, BOTTOM = 64, 16, 26, 46
"""Margins: the left one holds "99.99" in the larger type of a phone, the upper one the name of a target."""

BAR, MOST_BARS = 7, 20
"""Height of an interval's bar, and how many find room above one another."""

MAX_POINTS = 240
"""Points of a line: one for every two units of the plot."""

DASHES = ("none", "8 3", "2.5 2.5", "10 3 2 3")
"""Of each four lines: dark enough to be read on white, eight colours are not all far apart."""

NAMED_LINES = 6
"""More lines than this are told apart by the list of runs alone: their names would cover them."""


@dataclass(frozen=True, slots=True)
class Series:
    """One thing drawn. `colour` is a CSS class of the page; `run` ties it to a run, whose switch shows and hides it."""

    name: str
    x: FloatArray
    y: FloatArray
    colour: str
    kind: str = "line"
    """line, step (value holds up to the next x), area (from `base`), dots, bars (from 0, or `base`)."""
    run: int | None = None
    base: FloatArray | None = None
    band: tuple[FloatArray, FloatArray] | None = None
    """Lower and upper end of an interval around y."""
    hollow: bool = False
    """Dots: bounds, not values."""
    quiet: bool = False
    """Drawn pale in the background, without a name of its own."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A line across the plot at x (or y) `value`; a bar at its foot (a stripe) from `low` to `high` where given."""

    value: float
    text: str
    axis: str = "x"
    low: float | None = None
    high: float | None = None
    colour: str = "ink"
    run: int | None = None


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing and what is told of it."""

    id: str
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    x_scale: str = "linear"
    """linear or log."""
    y_scale: str = "linear"
    """linear, or tail: shares 0..1 by their nines (50, 90, 99, 99.9 %)."""
    marks: Sequence[Mark] = ()
    note: str = ""
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    """The same in numbers, as a table."""
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    percent: bool = field(default=False)
    """The y axis counts shares."""


def draw(chart: Chart) -> str:
    """The chart as one `<svg>` element, and its data for the page's script."""
    x, y = _axes(chart)
    parts = [_grid(chart, x, y)]
    parts += [_mark(mark, x, y, stripe=True) for mark in chart.marks if mark.low is not None]
    for series in chart.series:
        parts.append(_shape(series, x, y))
    parts += [_mark(mark, x, y, stripe=False) for mark in chart.marks]
    parts += _names(chart, x, y)
    summary = f"{chart.title}: {chart.y_label} over {chart.x_label}. {chart.note}"
    data = _data(chart, x, y)
    return (
        f'<svg class="chart" id="{chart.id}" viewBox="0 0 {WIDTH} {HEIGHT}" tabindex="0" role="img" '
        f'aria-label="{escape(summary, quote=True)}">{"".join(parts)}<g class="cursor"></g></svg>'
        f'<script type="application/json" data-for="{chart.id}">{data}</script>'
    )


def _axes(chart: Chart) -> tuple[Axis, Axis]:
    xs = np.concatenate([s.x for s in chart.series if s.x.size] or [np.array([1.0])])
    xs = xs[np.isfinite(xs)]
    if chart.x_scale == "log":
        xs = xs[xs > 0]
    low, high = (float(xs.min()), float(xs.max())) if xs.size else (1.0, 2.0)
    if chart.x_range is not None:
        low, high = chart.x_range
    for mark in chart.marks:
        if mark.axis == "x" and math.isfinite(mark.value) and (chart.x_scale != "log" or mark.value > 0):
            low, high = min(low, mark.value), max(high, mark.value)
    if chart.x_scale == "log":
        low, high = low / 1.1, max(high * 1.1, low * 1.5)
    elif high <= low:
        low, high = low - 0.5, high + 0.5
    return (
        Axis(low, high, chart.x_scale, LEFT, WIDTH - LEFT - RIGHT),
        Axis(*_y_range(chart), chart.y_scale, HEIGHT - BOTTOM, -(HEIGHT - TOP - BOTTOM)),
    )


def _y_range(chart: Chart) -> tuple[float, float]:
    if chart.y_range is not None:
        return chart.y_range
    columns = [s.y for s in chart.series] + [end for s in chart.series if s.band for end in s.band]
    ys = np.concatenate([c for c in columns if c.size] or [np.array([1.0])])
    ys = ys[np.isfinite(ys)]
    top = float(ys.max()) if ys.size else 1.0
    if chart.y_scale == "tail":
        return 0.0, max(float(nines(top)), 2.2) * 1.02
    if chart.percent:
        return 0.0, 1.02
    low = min(float(ys.min()) if ys.size else 0.0, 0.0)
    return low, low + (top - low) * 1.06 if top > low else low + 1.0


def _grid(chart: Chart, x: Axis, y: Axis) -> str:
    x_ticks = log_ticks(x.low, x.high) if x.scale == "log" else linear_ticks(x.low, x.high)
    if y.scale == "tail":
        y_ticks = [share for share in (0.0, 0.5, 0.9, 0.99, 0.999, 0.9999) if nines(share) <= y.high + 1e-9]
        texts = [f"{100 * share:.6g}" for share in y_ticks]
    else:
        y_ticks = linear_ticks(y.low, y.high, 5)
        texts = [f"{100 * t:.4g}%" if chart.percent else short(t) for t in y_ticks]
    bottom, out = HEIGHT - BOTTOM, []
    for tick, text in zip(y_ticks, texts, strict=True):
        at = float(y.at(tick))
        out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        out.append(f'<text class="tick" x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{text}</text>')
    for i, tick in enumerate(x_ticks):
        at = float(x.at(tick))
        second = " second" if i % 2 else ""
        anchor = "start" if at < LEFT + 6 else "middle"  # clear of the y axis' own numbers
        out.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}"/>')
        out.append(
            f'<text class="tick{second}" x="{at:.1f}" y="{bottom + 18}" text-anchor="{anchor}">{short(tick)}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    out.append(f'<text class="axis" x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{escape(chart.x_label)}</text>')
    return "".join(out)


def thin(series: Series, x: Axis) -> tuple[FloatArray, FloatArray, FloatArray | None]:
    """At most MAX_POINTS points, evenly over the plot: of a line's stretch the last point of each column of units."""
    n = series.x.size
    if n <= MAX_POINTS or series.kind in ("dots", "bars"):
        return series.x, series.y, series.base
    column = np.floor((x.at(series.x) - x.start) / x.length * (MAX_POINTS // 2)).astype(np.int64)
    keep = np.zeros(n, dtype=bool)
    keep[0] = keep[-1] = True
    keep[np.flatnonzero(np.diff(column))] = True
    if series.kind == "step":  # both ends of a jump
        keep[np.flatnonzero(np.diff(column)) + 1] = True
    return series.x[keep], series.y[keep], None if series.base is None else series.base[keep]


def _shape(series: Series, x: Axis, y: Axis) -> str:
    """The drawing of one series."""
    of_run = "" if series.run is None else f" r{series.run}"
    # Each line is thinner than the one before, so that one that lies under it shows.
    is_line = series.kind in ("line", "step")
    width = f' style="{stroke(series.run)}"' if is_line and series.run is not None else ""
    name = f'class="{series.kind}{" quiet" if series.quiet else ""} {series.colour}{of_run}"{width}'
    xs, ys, base = thin(series, x)
    known = np.isfinite(xs) & np.isfinite(ys)
    xs, ys, base = xs[known], ys[known], None if base is None else base[known]
    if not xs.size:
        return ""
    px, py = x.at(xs), y.at(ys)
    if series.kind == "dots":
        hollow = " hollow" if series.hollow else ""
        dots = (f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5"/>' for a, b in zip(px, py, strict=True))
        return f'<g class="dots {series.colour}{of_run}{hollow}">{"".join(dots)}</g>'
    if series.kind == "bars":
        return _bars(name, px, py, y.at(np.zeros(xs.size) if base is None else base))
    out = ""
    if series.band is not None:
        low, high = (y.at(end[known]) for end in series.band)
        points = [*zip(px, high, strict=True), *reversed(list(zip(px, low, strict=True)))]
        out = f'<polygon class="band {series.colour}{of_run}" points="{_points(points)}"/>'
    corners = list(zip(px.tolist(), py.tolist(), strict=True))
    if series.kind == "step":
        corners = [
            point for i, (a, b) in enumerate(corners) for point in (([(a, corners[i - 1][1])] if i else []) + [(a, b)])
        ]
    if series.kind == "area":
        floor = y.at(np.zeros(xs.size) if base is None else base)
        corners += list(zip(px[::-1].tolist(), floor[::-1].tolist(), strict=True))
        return out + f'<polygon {name} points="{_points(corners)}"/>'
    return out + f'<polyline {name} points="{_points(corners)}"/>'


def stroke(run: int) -> str:
    """Width and dashes of a run's lines, as CSS."""
    dashes = f";stroke-dasharray:{DASHES[run // 4 % len(DASHES)]}" if run >= 4 else ""
    return f"stroke-width:{max(4.2 - 0.8 * run, 1.6):.1f}{dashes}"


def _bars(name: str, px: FloatArray, py: FloatArray, floor: FloatArray) -> str:
    width = max(float(np.min(np.diff(px))) * 0.8 if px.size > 1 else 12.0, 1.0)
    rects = (
        f'<rect x="{a - width / 2:.1f}" y="{min(b, c):.1f}" width="{width:.1f}" height="{abs(c - b):.1f}"/>'
        for a, b, c in zip(px, py, floor, strict=True)
        if abs(c - b) > 0
    )
    return f"<g {name}>{''.join(rects)}</g>"


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in points)


def _mark(mark: Mark, x: Axis, y: Axis, *, stripe: bool) -> str:
    axis = x if mark.axis == "x" else y
    of_run = "" if mark.run is None else f" r{mark.run}"
    if stripe:
        low, high = sorted(float(axis.at(v)) for v in (mark.low, mark.high) if v is not None)
        low, high = (
            max(low, min(axis.start, axis.start + axis.length)),
            min(high, max(axis.start, axis.start + axis.length)),
        )
        if mark.axis == "x":  # at the foot, above one another: stripes of full height would hide the bands
            foot = HEIGHT - BOTTOM - BAR - (BAR + 2) * ((mark.run or 0) % MOST_BARS)
            box = f'x="{low:.1f}" y="{foot}" width="{max(high - low, 1):.1f}" height="{BAR}"'
        else:
            box = f'x="{LEFT}" y="{low:.1f}" width="{WIDTH - LEFT - RIGHT}" height="{max(high - low, 1):.1f}"'
        return f'<rect class="stripe {mark.colour}{of_run}" {box}/>'
    if not math.isfinite(mark.value):
        return ""
    at, text = float(axis.at(mark.value)), escape(mark.text)
    if mark.axis == "x":
        side, anchor = (at - 4, "end") if at > WIDTH - 120 else (at, "middle")
        where = f'x="{side:.1f}" y="{TOP - 7}" text-anchor="{anchor}"'
        line = f'x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"'
    else:
        where = f'x="{WIDTH - RIGHT - 4}" y="{at - 4:.1f}" text-anchor="end"'
        line = f'x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"'
    label = f'<text class="marktext {mark.colour}{of_run}" {where}>{text}</text>' if text else ""
    return f'<line class="mark {mark.colour}{of_run}" {line}/>{label}'


def _written(mark: Mark, y: Axis) -> Box:
    """What the text of a mark across the plot covers; nothing for others, which stand above it."""
    if mark.axis == "x" or not mark.text or not math.isfinite(mark.value):
        return 0.0, 0.0, 0.0, 0.0
    at, right = float(y.at(mark.value)), WIDTH - RIGHT - 4
    return right - len(mark.text) * CHARACTER * PHONE, at - LINE * PHONE, right, at


def _names(chart: Chart, x: Axis, y: Axis) -> list[str]:
    """The lines' names beside them."""
    named = [s for s in chart.series if s.kind in ("line", "step") and not s.quiet and s.x.size]
    if len(chart.series) < 2 or not 1 <= len(named) <= NAMED_LINES:
        return []
    curves = []
    for series in named:
        xs, ys, _ = thin(series, x)
        known = np.isfinite(xs) & np.isfinite(ys)
        curves.append((x.at(xs[known]), y.at(ys[known])))
    room = (LEFT, TOP, WIDTH - RIGHT, HEIGHT - BOTTOM)
    spots = place(curves, [len(s.name) for s in named], room, [_written(mark, y) for mark in chart.marks])
    out = []
    for series, spot in zip(named, spots, strict=True):
        if spot is not None:
            of_run = "" if series.run is None else f" r{series.run}"
            size = "" if spot.phone else " second"
            where = f'x="{spot.x:.0f}" y="{spot.y:.0f}" text-anchor="{spot.anchor}"'
            out.append(f'<text class="name {series.colour}{of_run}{size}" {where}>{escape(series.name)}</text>')
    return out


def _data(chart: Chart, x: Axis, y: Axis) -> str:
    """What the page's script needs to read values off the drawing."""

    def few(values: FloatArray) -> list[float | None]:
        return [float(f"{v:.5g}") if math.isfinite(v) else None for v in values.tolist()]

    def axis(of: Axis) -> list[Any]:
        return [of.scale, of.low, of.high, of.start, of.length]

    series = []
    for s in chart.series:
        if s.quiet and s.kind != "area":
            continue
        xs, ys, base = thin(s, x)
        values = ys if base is None else ys - base
        found: dict[str, Any] = {"name": s.name, "run": s.run, "colour": s.colour, "x": few(xs), "y": few(values)}
        if s.band is not None and xs.size == s.x.size:
            found["band"] = [few(end) for end in s.band]
        series.append(found)
    data = {"x": axis(x), "y": axis(y), "xl": chart.x_label, "pct": chart.percent or y.scale == "tail", "s": series}
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
