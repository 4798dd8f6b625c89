"""Intervals of attainment, and the bands that show them over the rate."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slacktide.report.html_parts import figure
from slacktide.report.intervals import share_interval, student_half, wilson
from slacktide.report.searches import goodput_chart, sweep_chart
from slacktide.report.source import Run


def test_wilson_by_hand() -> None:
    assert wilson(0.0, 10) == (0.0, pytest.approx(0.2775, abs=1e-4))
    assert wilson(0.8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(0.5, 0) == (0.0, 1.0)


@given(st.integers(1, 10_000), st.floats(0, 1))
def test_wilson_holds_its_share_and_narrows(n: int, part: float) -> None:
    share = round(part * n) / n
    low, high = wilson(share, n)
    assert 0 <= low <= share <= high <= 1
    wider = wilson(share, max(n // 4, 1))
    assert high - low <= wider[1] - wider[0] + 1e-12


def test_student_over_seeds_by_hand() -> None:
    # t(0.975, 2) = 4.3027; the sample's deviation of .90, .92, .94 is .02
    assert student_half([0.90, 0.92, 0.94]) == pytest.approx(4.3027 * 0.02 / math.sqrt(3), rel=1e-4)
    assert math.isnan(student_half([0.9]))
    assert share_interval([0.90, 0.92, 0.94], 10_000) == pytest.approx((0.8703, 0.9697), abs=1e-4)
    assert share_interval([0.90, 0.92, 0.94], 0) == pytest.approx((0.8703, 0.9697), abs=1e-4)
    assert share_interval([0.5, 1.0, 1.0], 10)[1] == 1.0
    assert share_interval([1.0, 1.0, 1.0], 100) == wilson(1.0, 100)  # seeds that agree are no certainty
    assert share_interval([0.8], 10) == wilson(0.8, 10)


def searched(*evaluations: tuple[float, int, float, bool]) -> Run:
    """A search's record: (rate, seed, attainment, stopped)."""
    found = [{"rate": r, "seed": s, "attainment": a, "stopped": stopped} for r, s, a, stopped in evaluations]
    return Run({"policy": "a", "label": "a", "oracle": False, "num_prompts": 1000, "target": 0.99, "rate": 4.0,
                "rate_low": 3.9, "rate_high": 4.2, "confidence": 0.95, "evaluations": found})  # fmt: skip


def test_a_rates_interval_is_over_its_seeds_or_of_its_only_one() -> None:
    run = searched((3.0, 0, 0.998, False), (4.0, 0, 0.990, False), (4.0, 1, 0.994, False), (4.0, 2, 0.992, False),
                   (4.4, 1, 0.9905, False), (4.4, 2, 0.985, True), (8.0, 0, 0.9, True))  # fmt: skip
    chart = goodput_chart([run])
    line = chart.series[0]
    # 4.4: a seed was stopped, so nobody knows the mean there.
    assert line.x.tolist() == [3.0, 4.0]
    assert line.y == pytest.approx([0.998, 0.992])
    assert line.band is not None
    low, high = line.band
    assert (low[0], high[0]) == pytest.approx(wilson(0.998, 1000))
    half = 4.3027 * 0.002 / math.sqrt(3)
    assert (low[1], high[1]) == pytest.approx((wilson(0.992, 1000)[0], 0.992 + half), abs=1e-6)
    assert [row[1:] for row in chart.rows] == [
        ["3.00", "99.8", "99.3 to 99.9", "1"],
        ["4.00", "99.2", "98.4 to 99.7", "3"],
        ["4.40", "at most 98.8", "stopped early", "2"],
        ["8.00", "at most 90.0", "stopped early", "1"],
    ]


def test_the_table_says_in_words_what_the_chart_draws() -> None:
    text = figure(goodput_chart([searched((3.0, 0, 0.998, False))]))
    assert '<th scope="col">95 % interval</th>' in text
    assert "<td>99.3 to 99.9</td>" in text
    assert "Wilson" in text


shares = st.floats(0, 1)


@given(
    st.lists(st.tuples(st.sampled_from([1.0, 2.0, 3.0, 4.0]), st.integers(0, 2), shares, st.booleans()), max_size=12)
)
def test_the_band_holds_the_line_and_falls(evaluations: list[tuple[float, int, float, bool]]) -> None:
    line = goodput_chart([searched(*evaluations)]).series[0]
    assert line.band is not None
    low, high = line.band
    assert (low <= line.y + 1e-12).all()
    assert (line.y <= high + 1e-12).all()
    for values in (low, line.y, high):
        assert (np.diff(values) <= 1e-12).all()


def swept(summary: Any, rate: float, seed: int = 0) -> Run:
    return Run({"policy": "a", "policy_label": "a", "varied": {"rate": rate, "seed": seed}, "summary": summary})


def test_a_sweep_has_bands_with_one_seed_and_with_several() -> None:
    runs = [swept({"attainment": 0.9, "num_requests": 110, "excluded": 10, "p99_ttft_ms": 7.0}, r) for r in (1, 2)]
    chart = sweep_chart(runs, "attainment", "met", "share")
    assert chart is not None
    assert chart.series[0].band is not None
    assert chart.series[0].band[0] == pytest.approx([wilson(0.9, 100)[0]] * 2)
    assert chart.rows[0] == ["a", "1", "90.0", "82.6 to 94.5", "1"]
    latency = sweep_chart(runs, "p99_ttft_ms", "TTFT", "ms")
    assert latency is not None
    assert latency.series[0].band is None
    assert latency.rows[0] == ["a", "1", "7.00", "-", "1"]
    runs += [swept({"attainment": 0.8, "p99_ttft_ms": 9.0}, r, 1) for r in (1, 2)]
    latency = sweep_chart(runs, "p99_ttft_ms", "TTFT", "ms")
    assert latency is not None
    assert latency.series[0].band is not None
    assert latency.series[0].band[0] == pytest.approx([0.0, 0.0])  # 8 +- 12.7 ms: no time is below 0


@pytest.mark.parametrize("bad", ["many", None, -3, float("nan"), [1], True])
def test_a_sweep_whose_counts_are_damaged_has_no_wrong_band(bad: Any) -> None:
    chart = sweep_chart([swept({"attainment": 0.9, "num_requests": bad}, r) for r in (1, 2)], "attainment", "m", "s")
    assert chart is not None
    assert chart.series[0].band is None
    assert sweep_chart([swept({"attainment": bad}, r) for r in (1, 2)], "attainment", "m", "s") is not None
