"""The slack of live requests on a server: by the one definition of a deadline, counted as Prometheus wants it."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slacktide.core.live import NUM_IN_FLIGHT, NUM_OUTPUT, LiveTable
from slacktide.core.shape import SHAPE_SIZE
from slacktide.core.types import SLO, Request, token_deadline
from slacktide.vllm.metrics import SLACK_BUCKETS, Metrics, samples, slack
from slacktide.vllm.steplog import StepLine, step_json

targets = st.floats(0.001, 100.0) | st.just(math.inf)
rows = st.lists(st.tuples(st.floats(0, 50), targets, targets, st.integers(0, 500)), max_size=30)


def table_of(given_rows: list[tuple[float, float, float, int]]) -> LiveTable:
    table = LiveTable(4)
    for i, (arrival, ttft, tbt, output) in enumerate(sorted(given_rows)):
        row = table.append(Request(i, arrival, 10, 1000, SLO(ttft, tbt)))
        table.ints[NUM_OUTPUT, row] = output
        table.ints[NUM_IN_FLIGHT, row] = i % 2  # a token in flight is not out yet: it is the one that is due
    return table


def exposed(metrics: Metrics) -> dict[str, float]:
    return {labels.get("le", name): value for name, labels, value in samples("slack_seconds", metrics.snapshot())}


@given(rows, st.floats(0, 100))
def test_slack_is_the_time_to_the_next_tokens_deadline(
    found: list[tuple[float, float, float, int]], now: float
) -> None:
    expected = [float(token_deadline(a, ttft, tbt, k)) - now for a, ttft, tbt, k in sorted(found)]
    assert slack(table_of(found), now).tolist() == pytest.approx(expected)


@given(st.lists(rows, min_size=1, max_size=3), st.floats(0, 100))
def test_the_histogram_counts_every_request_that_has_a_target(looks: list[list], now: float) -> None:
    metrics, values = Metrics(), []
    for found in looks:
        table = table_of(found)
        metrics.observe_slack(table, now)
        values += [v for v in slack(table, now).tolist() if math.isfinite(v)]
    shown = exposed(metrics)
    for bound in SLACK_BUCKETS:
        assert shown[str(bound)] == sum(v <= bound for v in values)
    assert shown["+Inf"] == shown["slacktide:slack_seconds_count"] == len(values)


def test_the_step_log_tells_the_least_of_them_where_there_is_one() -> None:
    line = StepLine(1.0, 0.1, None, 0.0, "active", (0.0,) * SHAPE_SIZE, 1, 0, 9, 0, "", None)
    assert "slack_s" not in json.loads(step_json(line))
    assert json.loads(step_json(line._replace(slack=-0.25)))["slack_s"] == -0.25
    assert slack(LiveTable(4), 1.0).min(initial=math.inf) == math.inf  # nobody is there


def test_there_is_no_sum_of_values_below_zero() -> None:
    """It would fall, which a counter must not; OpenMetrics forbids it for buckets below 0."""
    assert "slacktide:slack_seconds_sum" not in exposed(Metrics())
    names = {name for name, _, _ in samples("step_seconds", Metrics().snapshot())}
    assert "slacktide:step_seconds_sum" in names
