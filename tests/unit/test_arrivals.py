"""Arrival processes: their statistics, common random numbers, and the specifications."""

from __future__ import annotations

import math

import numpy as np
import pytest

from slacktide.errors import InputError
from slacktide.workload import arrival_times, parse_arrival

N = 40_000


def times(text: str, rate: float | None = 4.0, seed: int = 1, n: int = N):
    return arrival_times(parse_arrival(text), n, rate, seed)


def gap_cv(arrivals) -> float:
    gaps = np.diff(arrivals)
    return float(gaps.std() / gaps.mean())


@pytest.mark.parametrize(
    ("text", "cv"),
    [("poisson", 1.0), ("gamma:burstiness=1", 1.0), ("gamma:burstiness=0.25", 2.0), ("gamma:burstiness=4", 0.5)],
)
def test_renewal_processes_have_their_rate_and_spread(text, cv):
    arrivals = times(text)
    assert N / arrivals[-1] == pytest.approx(4.0, rel=0.04)
    assert gap_cv(arrivals) == pytest.approx(cv, rel=0.05)


def test_poisson_counts_have_equal_mean_and_variance():
    counts = np.bincount(times("poisson").astype(int))[:-1]
    assert counts.var() / counts.mean() == pytest.approx(1.0, rel=0.05)


def test_gamma_with_burstiness_one_is_poisson_itself():
    assert np.array_equal(times("gamma:burstiness=1", n=100), times("poisson", n=100))


def test_onoff_keeps_the_mean_rate_and_is_burstier_than_poisson():
    arrivals = times("onoff:on=10,off=20,ratio=8")
    assert N / arrivals[-1] == pytest.approx(4.0, rel=0.1)
    counts = np.bincount(arrivals.astype(int))[:-1]
    assert counts.var() / counts.mean() > 2


def test_onoff_phases_stand_in_seconds_and_have_the_ratio():
    arrivals = times("onoff:on=50,off=50,ratio=4", rate=20.0)
    counts = np.sort(np.bincount((arrivals / 5).astype(int))[:-1])
    high, low = np.median(counts[-len(counts) // 4 :]), np.median(counts[: len(counts) // 4])
    assert high / low == pytest.approx(4.0, rel=0.15)


def test_onoff_with_ratio_one_is_poisson():
    assert np.allclose(times("onoff:on=3,off=5,ratio=1", n=500), times("poisson", n=500))


@pytest.mark.parametrize("text", ["poisson", "gamma:burstiness=0.3"])
def test_a_rate_only_stretches_time(text):
    assert np.allclose(times(text, 2.0, n=1000), times(text, 10.0, n=1000) * 5)


def test_onoff_a_higher_rate_brings_every_arrival_forward():
    assert (times("onoff:on=10,off=20,ratio=4", 3.0, n=2000) < times("onoff:on=10,off=20,ratio=4", 2.0, n=2000)).all()


@pytest.mark.parametrize("text", ["poisson", "gamma:burstiness=0.3", "onoff:on=1,off=2,ratio=4"])
def test_fewer_requests_are_the_beginning_of_more(text):
    assert np.array_equal(times(text, n=3000)[:1000], times(text, n=1000))


def test_seeds_differ_and_repeat():
    assert np.array_equal(times("poisson", seed=3, n=50), times("poisson", seed=3, n=50))
    assert not np.array_equal(times("poisson", seed=3, n=50), times("poisson", seed=4, n=50))


@pytest.mark.parametrize(("shape", "middle"), [("linear", 5.5), ("exponential", math.sqrt(10))])
def test_ramp_follows_vllms_rates_by_request_number(shape, middle):
    arrivals = times(f"ramp:start=1,end=10,shape={shape}", rate=None)
    gaps = np.diff(arrivals)
    width = N // 50
    assert 1 / gaps[:width].mean() == pytest.approx(1.0, rel=0.2)
    assert 1 / gaps[-width:].mean() == pytest.approx(10.0, rel=0.2)
    assert 1 / gaps[N // 2 - width // 2 : N // 2 + width // 2].mean() == pytest.approx(middle, rel=0.2)


def test_ramp_ends_at_exactly_the_end_rate():
    unit = np.diff(times("poisson", 1.0, n=3), prepend=0)
    assert np.diff(times("ramp:start=1,end=9", rate=None, n=3), prepend=0) == pytest.approx(unit / [1, 5, 9])


def test_ramp_of_one_request_uses_the_first_rate():
    assert times("ramp:start=2,end=10", rate=None, n=1) == pytest.approx(times("poisson", rate=2.0, n=1))


def test_infinite_rate_is_all_at_once():
    assert times("poisson", math.inf, n=5).tolist() == [0] * 5


def test_closed_loop_has_no_times():
    arrival = parse_arrival("closed:concurrency=32,think=1.0")
    assert (arrival.closed.concurrency, arrival.closed.think_time) == (32, 1.0)
    assert arrival_times(arrival, 3, None, 0).tolist() == [0, 0, 0]


def test_every_process_is_increasing_and_starts_after_zero():
    for text in ("poisson", "gamma:burstiness=0.1", "onoff:on=1,off=9,ratio=50"):
        arrivals = times(text, n=2000)
        assert arrivals[0] > 0
        assert (np.diff(arrivals) >= 0).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("poison", "did you mean poisson"),
        ("poisson:rate=3", "unknown arrival poisson parameter"),
        ("gamma:burstines=1", "did you mean burstiness"),
        ("gamma:burstiness=0", "expected more than 0"),
        ("gamma:burstiness=nan", "expected a number"),
        ("gamma:burstiness=-1", "expected more than 0"),
        ("gamma:burstiness", "not of the form key=value"),
        ("onoff:on=10,off=20", "ratio= is missing"),
        ("onoff:on=10,off=20,ratio=1e300", "at most"),
        ("ramp:start=1", "end= is missing"),
        ("ramp:start=1,end=2,shape=cubic", "ramp shape"),
        ("closed", "concurrency= is missing"),
        ("closed:concurrency=0", "expected a whole number from 1"),
        ("closed:concurrency=2.5", "expected a whole number from 1"),
        ("closed:concurrency=2,think=-1", "think"),
        ("", "unknown arrival process"),
    ],
)
def test_bad_specifications(text, message):
    with pytest.raises(InputError, match=message):
        parse_arrival(text)


@pytest.mark.parametrize(
    ("text", "rate", "message"),
    [
        ("poisson", None, "--rate"),
        ("poisson", 0.0, "expected more than 0"),
        ("poisson", math.nan, "expected more than 0"),
        ("poisson", 1e-300, "the last of 10 arrivals"),
        ("closed:concurrency=2", 3.0, "leave --rate out"),
        ("ramp:start=1,end=2", 3.0, "leave --rate out"),
        ("onoff:on=1e-9,off=1e-9,ratio=2", 1e-3, "too short"),
    ],
)
def test_rates_that_do_not_fit(text, rate, message):
    with pytest.raises(InputError, match=message):
        times(text, rate, n=10)
