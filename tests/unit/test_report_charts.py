"""Axes, places of names, and charts as well-formed SVG whatever the data."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slacktide.report.axes import linear_ticks, log_ticks, nines, short
from slacktide.report.charts import HEIGHT, MAX_POINTS, WIDTH, Chart, Mark, Series, draw
from slacktide.report.labels import PHONE, place
from slacktide.report.searches import falling


@given(st.floats(-1e6, 1e6), st.floats(1e-2, 1e9))
def test_linear_ticks_are_few_and_inside(low: float, width: float) -> None:
    high = low + width
    ticks = linear_ticks(low, high)
    assert 1 <= len(ticks) <= 8
    assert all(low - width * 1e-6 <= tick <= high + width * 1e-6 for tick in ticks)


@given(st.floats(1e-3, 1e5), st.floats(1.5, 1e6))
def test_log_ticks_are_few_and_inside(low: float, ratio: float) -> None:
    ticks = log_ticks(low, low * ratio)
    assert 1 <= len(ticks) <= 9
    assert all(low * (1 - 1e-9) <= tick <= low * ratio * (1 + 1e-9) for tick in ticks)


def test_numbers_of_axes_are_short() -> None:
    assert [short(v) for v in (0.0, 0.25, 20.0, 5000.0, 2.5e6, 3e9)] == ["0", "0.25", "20", "5k", "2.5M", "3G"]


def test_nines() -> None:
    np.testing.assert_allclose(nines(np.array([0.0, 0.9, 0.99, 0.999, 1.0])), [0, 1, 2, 3, 4])


def curve(level: float) -> tuple[np.ndarray, np.ndarray]:
    return np.linspace(60, 540, 50), np.full(50, level)


@given(st.lists(st.floats(30, 250), min_size=2, max_size=6), st.integers(1, 30))
def test_names_lie_in_the_room_and_apart(levels: list[float], length: int) -> None:
    spots = place([curve(level) for level in levels], [length] * len(levels), (60, 20, 540, 254))
    found = [spot for spot in spots if spot is not None]
    for spot in found:
        width = length * 7.4 * (PHONE if spot.phone else 1)
        left = spot.x - {"start": 0, "middle": width / 2, "end": width}[spot.anchor]
        assert 60 <= left <= 540 - width + 1e-6
        assert spot.box[0] == pytest.approx(left)
        assert 20 <= spot.y <= 254
    for i, spot in enumerate(found):
        a, height = spot.box, spot.box[3] - spot.box[1]
        for other in found[i + 1 :]:
            b = other.box
            assert abs(a[3] - b[3]) >= min(height, b[3] - b[1]) - 1e-6 or a[2] <= b[0] or b[2] <= a[0]


def parsed(chart: Chart) -> tuple[ET.Element, dict]:
    text = draw(chart)
    svg, script = text.split("</svg>")
    data = re.search(r">(.*)</script>", script)
    assert data is not None
    return ET.fromstring(svg + "</svg>"), json.loads(data[1])


values = st.floats(-1e6, 1e6) | st.just(float("nan"))


@given(st.lists(values, max_size=12), st.sampled_from(["line", "step", "area", "dots", "bars"]),
       st.sampled_from(["linear", "log"]), st.sampled_from(["linear", "tail"]))  # fmt: skip
def test_any_data_give_a_well_formed_drawing(ys: list[float], kind: str, x_scale: str, y_scale: str) -> None:
    x = np.arange(1, len(ys) + 1, dtype=float)
    y = np.array(ys, dtype=float)
    if y_scale == "tail":
        y = np.abs(y) / 1e6
    series = [Series('a <b> & "c"', x, y, "c0", kind, 0), Series("other", x, y, "c1", "line", 1)]
    svg, data = parsed(Chart("id", "T <i>", "x", "y", series, x_scale, y_scale, [Mark(2.0, "SLO <2>")]))
    assert svg.get("viewBox") == f"0 0 {WIDTH} {HEIGHT}"
    assert "nan" not in draw(Chart("id", "T", "x", "y", series, x_scale, y_scale)).split("<script")[0]
    assert data["s"][0]["name"] == 'a <b> & "c"'


def test_lines_are_thinned_but_keep_their_ends_and_jumps() -> None:
    x = np.linspace(0, 1, 100_000)
    svg, data = parsed(Chart("id", "T", "x", "y", [Series("a", x, np.where(x < 0.5, 0.0, 1.0), "c0", "step", 0)]))
    assert len(data["s"][0]["x"]) <= 2 * MAX_POINTS
    assert data["s"][0]["x"][0] == 0
    assert data["s"][0]["x"][-1] == 1
    jump = data["s"][0]["x"][data["s"][0]["y"].index(1.0)]
    assert jump == pytest.approx(0.5, abs=0.01)
    line = next(each for each in svg.iter() if each.tag == "polyline")
    assert len(line.get("points", "").split()) <= 4 * MAX_POINTS


def test_the_falling_curve() -> None:
    points = np.array([[1, 0.9], [2, 1.0], [3, 0.5], [4, 0.7], [5, 0.1]])
    np.testing.assert_allclose(falling(points)[:, 1], [0.95, 0.95, 0.6, 0.6, 0.1])
    assert falling(np.empty((0, 2))).shape == (0, 2)
