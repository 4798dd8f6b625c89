"""Designed steps: which points are chosen, and how a run goes through them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slacktide.core import shape as s
from slacktide.core.latency_extended import KNOTS, extended_features
from slacktide.core.latency_families import scenes
from slacktide.errors import InputError
from slacktide.profiling.experiments import (
    Envelope,
    Point,
    candidates,
    choose,
    corners,
    design,
    fits,
    ladder,
    parse_key,
    rough_times,
)
from slacktide.profiling.experiments_run import run_design

SMALL = Envelope(512, 16, 2048, 20_000, 16)


@dataclass
class Sample:
    shape: np.ndarray
    duration: float
    turn: float | None


class FakeEngine:
    """A step takes 10 ms and 0.1 ms a token; every visit moves the clock on by a second."""

    def __init__(self, envelope=SMALL, name="fake", *, drift=0.0, break_after=None):
        self.envelope, self.name, self.now, self.visits = envelope, name, 0.0, []
        self.drift, self.break_after = drift, break_after

    def facts(self):
        return {"engine": {"model": self.name}, "versions": {}, "hardware": {"cpu": "none"}}

    def clock(self):
        return self.now

    def measure(self, point, samples):
        if self.break_after is not None and len(self.visits) >= self.break_after:
            raise KeyboardInterrupt
        self.visits.append((point, samples))
        self.now += 1.0
        duration = (0.01 + 1e-4 * point.shape[s.NUM_TOKENS]) * (1 + self.drift * self.now)
        return [Sample(point.shape, duration, duration + 0.002) for _ in range(samples)]


chunks = st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 4096)), max_size=4).map(tuple)
decodes = st.lists(st.integers(1, 4096), max_size=20).map(lambda found: tuple(sorted(found)))


@given(chunks, decodes)
def test_a_points_key_is_the_point(c, d):
    point = Point(c, d)
    if c or d:
        assert parse_key(point.key) == point


@pytest.mark.parametrize("text", ["", "x3@2", "p3", "d4", "p3@a", "p1@2;;"])
def test_a_bad_key_is_one_line(text):
    with pytest.raises(InputError, match="expected chunks and decodes"):
        parse_key(text)


def test_a_points_shape_is_that_of_its_rows():
    shape = parse_key("p256@128;d3x512+d1x4096").shape
    assert shape[s.NUM_TOKENS] == 260
    assert shape[s.PREFILL_CONTEXT] == 128
    assert shape[s.DECODE_CONTEXT] == 3 * 512 + 4096
    assert shape[s.DECODE_MAX_CONTEXT] == 4096


@given(st.integers(1, 500), st.integers(1, 100_000), st.floats(1.2, 8.0))
def test_a_ladder_rises_from_end_to_end(low, high, factor):
    found = ladder(low, high, factor)
    if high < low:
        assert found == []
        return
    assert (found[0], found[-1]) == (low, high)
    assert all(a < b for a, b in pairwise(found))
    assert all(b / a <= factor * 1.5 + 1 / a for a, b in pairwise(found))


@pytest.mark.parametrize(
    "envelope", [SMALL, Envelope(8192, 1024, 131_072, 400_000, 16), Envelope(64, 4, 128, 1024, 128)]
)
def test_the_engine_can_run_every_point_of_a_design(envelope):
    found = design(envelope)
    assert set(found) == {"decode", "prefill", "mixed"}
    for i, scene in enumerate(("decode", "prefill", "mixed")):
        assert found[scene]
        assert all(fits(point, envelope) for point in found[scene])
        assert (scenes(np.stack([point.shape for point in found[scene]])) == i).all()
        assert len({point.key for point in found[scene]}) == len(found[scene])


def test_the_design_reaches_the_ends_of_the_range_and_skewed_batches():
    found = design(SMALL)
    every = candidates(SMALL)
    for scene, points in found.items():
        tokens = [point.shape[s.NUM_TOKENS] for point in points]
        whole = [point.shape[s.NUM_TOKENS] for point in every[scene]]
        assert (min(tokens), max(tokens)) == (min(whole), max(whole))
    skewed = [p for points in found.values() for p in points if len(set(p.decodes)) > 1]
    assert skewed


@pytest.mark.parametrize("envelope", [SMALL, Envelope(192, 6, 512, 46_000, 128)])
def test_mixed_steps_fill_the_budget_and_all_seats(envelope):
    shapes = np.stack([point.shape for point in design(envelope)["mixed"]])
    assert shapes[:, s.NUM_TOKENS].max() == envelope.max_num_batched_tokens
    assert shapes[:, s.NUM_SEQUENCES].max() == envelope.max_num_seqs


def test_the_design_says_more_than_chance():
    points = candidates(SMALL)["mixed"]
    shapes = np.stack([point.shape for point in points])
    knots = np.array([k for k in KNOTS if k < SMALL.max_num_batched_tokens], dtype=float)
    times = rough_times(shapes)
    chosen = choose(points, knots, times, corners(points))
    x = extended_features(shapes, knots) / times[:, None]
    x = x[:, np.abs(x).max(axis=0) > 0]
    x = x / np.abs(x).max(axis=0)

    def information(rows):
        return np.linalg.slogdet(x[rows].T @ x[rows] + 1e-9 * np.eye(x.shape[1]))[1]

    ours = information([points.index(p) for p in chosen])
    rng = np.random.default_rng(0)
    others = [information(rng.choice(len(points), len(chosen), replace=False)) for _ in range(200)]
    assert ours > max(others)


def test_an_engine_without_room_is_refused():
    with pytest.raises(InputError, match="too small to measure"):
        design(Envelope(8, 1, 16, 16, 16))


def test_same_seed_same_design():
    assert design(SMALL, 3) == design(SMALL, 3)


# ---- the run ---------------------------------------------------------------------------------------------------------


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()][1:]


def test_a_run_visits_every_point_in_every_round_in_another_order(tmp_path):
    engine, path = FakeEngine(), tmp_path / "m.jsonl"
    outcome = run_design(engine, path, minutes=1000, rounds=2, clock=engine.clock)
    points = {p.key for found in design(SMALL, 0).values() for p in found}
    rows = [row for row in rows_of(path) if not row.get("warmup") and not row.get("reference")]
    orders = [list(dict.fromkeys(row["point"] for row in rows if row["round"] == number)) for number in (0, 1)]
    assert outcome.missing == 0
    assert outcome.rounds == 2
    assert len(orders[0]) == outcome.points
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]
    assert outcome.points >= 0.8 * len(points)  # another pilot, a slightly other design
    assert any(row.get("reference") for row in rows_of(path))
    assert rows_of(path)[0]["warmup"]


def test_a_run_ends_with_its_budget_and_goes_on_later(tmp_path):
    engine, path = FakeEngine(), tmp_path / "m.jsonl"
    first = run_design(engine, path, minutes=1, rounds=2, clock=engine.clock)
    warm = len({row["point"] for row in rows_of(path) if row.get("warmup")}) + 1
    assert engine.now <= 62 + warm
    before = len(rows_of(path))
    again = FakeEngine()
    second = run_design(again, path, minutes=1000, rounds=2, clock=again.clock)
    assert second.missing == 0
    assert second.samples > first.samples
    rows = [r for r in rows_of(path) if not r.get("warmup") and not r.get("reference")]
    visits = {(row["point"], row["round"]) for row in rows}
    assert len(rows) == 3 * len(visits)  # nothing was measured twice
    assert len(rows_of(path)) > before
    assert [row["t"] for row in rows_of(path)] == sorted(row["t"] for row in rows_of(path))


def test_a_run_that_was_killed_loses_at_most_a_line(tmp_path):
    engine, path = FakeEngine(break_after=30), tmp_path / "m.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run_design(engine, path, minutes=1000, rounds=1, clock=engine.clock)
    path.write_text(path.read_text()[:-20])
    kept = len(rows_of_whole(path))
    engine = FakeEngine()
    assert run_design(engine, path, minutes=1000, rounds=1, clock=engine.clock).missing == 0
    assert len(rows_of(path)) > kept


def rows_of_whole(path):
    return path.read_text().splitlines()[1:-1]


def test_another_engine_is_not_mixed_in(tmp_path):
    engine, path = FakeEngine(), tmp_path / "m.jsonl"
    run_design(engine, path, minutes=1, rounds=1, clock=engine.clock)
    other = FakeEngine(name="another")
    with pytest.raises(InputError, match=r"another engine \(engine: model differ\)"):
        run_design(other, path, minutes=1, rounds=1, clock=other.clock)


def test_a_file_of_something_else_is_left_alone(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"a": 1}\n')
    with pytest.raises(InputError, match="not a file of slacktide profile"):
        run_design(FakeEngine(), path, minutes=1)
    assert path.read_text() == '{"a": 1}\n'


def test_progress_never_falls_and_ends_at_one(tmp_path):
    engine, seen = FakeEngine(), []
    run_design(engine, tmp_path / "m.jsonl", minutes=1000, rounds=1, clock=engine.clock, progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
