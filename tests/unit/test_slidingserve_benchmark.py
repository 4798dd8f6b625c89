"""The evaluation of SlidingServe: equal grids, held-out data, ratios on the same seeds."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from slacktide.core.spec import parse_policies

FOLDER = Path(__file__).parents[2] / "benchmarks" / "slidingserve"
MODULES = ("common", "datasets", "stats", "tune", "claims", "arms", "timing")


@pytest.fixture(scope="module")
def parts() -> dict[str, ModuleType]:
    """The scripts' modules; their short names are forgotten afterwards."""
    sys.path.insert(0, str(FOLDER))
    try:
        return {name: importlib.import_module(name) for name in MODULES}
    finally:
        sys.path.remove(str(FOLDER))
        for name in (*MODULES, "report", "figures"):  # what they import
            sys.modules.pop(name, None)


def row(policy: str, seed: int, rate: float) -> dict:
    return {"policy": policy, "data": "d", "profile": "p", "seed": seed, "rate": rate, "rate_high": rate * 1.05}


def test_every_arm_gets_as_many_points_and_each_is_a_policy(parts):
    tune = parts["tune"]
    assert set(tune.ARMS) == set(parts["arms"].ARMS)
    for policy, first, changes in tune.ARMS.values():
        points = first + [p for best in first for p in tune.neighbours(best, changes)]
        assert (len(first), len(changes)) == (4, 4)
        for point in points:
            (spec,) = parse_policies([tune.text_of(policy, point)])
            spec.build()


def test_shares_scale_the_best_chunk_and_other_changes_stand(parts):
    found = parts["tune"].neighbours({"max_chunk": 128}, [{"max_chunk": 1.4}, {"max_chunk": 512}, {"margin": 1.25}])
    assert found == [{"max_chunk": 176}, {"max_chunk": 512}, {"max_chunk": 128, "margin": 1.25}]


def test_ratios_pair_seeds(parts):
    rows = [row("a", seed, 2.0 * rate) for seed, rate in enumerate((1.0, 4.0, 9.0))]
    rows += [row("b", seed, rate) for seed, rate in enumerate((1.0, 4.0, 9.0, 0.01))]  # the last has no partner
    ratio, low, high = parts["stats"].Cells(rows).ratio("a", "b", "d", "p")
    assert ratio == pytest.approx(2.0)
    assert (low, high) == (pytest.approx(2.0 / 1.05), pytest.approx(2.0 * 1.05))  # what the searches left open
    assert parts["stats"].Cells([row("a", 1, 3.0), row("b", 1, 2.0)]).ratio("a", "b", "d", "p") == (
        pytest.approx(1.5), 0.0, math.inf,
    )  # fmt: skip
    assert parts["stats"].Cells([row("a", 1, 3.0), row("b", 2, 2.0)]).ratio("a", "b", "d", "p") is None


def test_a_claim_counts_only_what_its_interval_carries(parts):
    rows = [row("a", seed, rate) for seed, rate in enumerate((2.0, 2.1, 1.9))]
    rows += [row("b", seed, 1.0) for seed in range(3)] + [row("c", seed, r) for seed, r in enumerate((0.5, 5.0, 2.0))]
    cells = parts["stats"].Cells(rows)
    assert parts["claims"].counted(cells, [("a", "b", "d", "p")])[0] == "holds"
    assert parts["claims"].counted(cells, [("b", "a", "d", "p")])[0] == "does not hold"
    assert parts["claims"].counted(cells, [("c", "a", "d", "p")])[0] == "not shown"
    assert parts["claims"].counted(cells, [("a", "x", "d", "p")])[0] == "not run"


def test_cells_of_one_kind_are_no_more_than_one(parts):
    """Two alike cells in favour and one against: as three of their own they would carry less doubt than there is."""
    over = parts["claims"].over_groups
    middle, low, high = over([[1.2, 1.3], [1.0]])
    assert middle == pytest.approx(math.sqrt(math.sqrt(1.2 * 1.3)))
    assert low < 1 < high
    assert over([[1.2, 1.3]]) == (pytest.approx(math.sqrt(1.2 * 1.3)), 0.0, math.inf)
    rows = [row(p, seed, r) | {"data": data} for data in ("arxiv-v1", "arxiv-v2") for seed in range(3)
            for p, r in (("a", 1.1 + 0.5 * (seed == 0)), ("b", 1.0 + 0.5 * (seed == 1)))]  # fmt: skip
    cells = parts["stats"].Cells(rows)
    verdict, evidence = parts["claims"].counted(cells, [("a", "b", d, "p") for d in ("arxiv-v1", "arxiv-v2")])
    assert verdict == "not shown"  # one kind tells no interval
    assert "of 2 cells" in evidence


def test_data_have_the_papers_lengths_and_seeds_differ(parts, tmp_path, monkeypatch):
    data = parts["datasets"]
    monkeypatch.setattr(data, "HERE", tmp_path)
    first, second = (np.loadtxt(data.write("arxiv-v1", s), delimiter=",", skiprows=1, usecols=(0, 1)) for s in (1, 2))
    assert first.shape == second.shape == (data.ROWS, 2)
    assert not np.array_equal(first, second)
    assert first[:, 0].mean() == pytest.approx(3253, rel=0.05)
    assert np.quantile(first[:, 0], 0.9) == pytest.approx(4382, rel=0.05)
    again = np.loadtxt(data.write("arxiv-v1", 1), delimiter=",", skiprows=1, usecols=(0, 1))
    assert np.array_equal(first, again)


def test_every_claim_of_the_page_was_run_and_has_a_reason():
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    table = page.split("<!-- claims -->")[1].split("<!-- /claims -->")[0].strip().splitlines()[2:]
    assert len(table) > 20
    for line in table:
        _, verdict, evidence, why = line.strip("| ").split(" | ")
        assert verdict.strip("*") != "not run"
        assert evidence
        assert why


def test_the_policy_without_its_window_is_the_same_but_for_the_chunker(parts):
    arms = parts["arms"]
    for arm in arms.WINDOWED:
        whole = arms.setting(arm, "arxiv-v1", arms.H100)
        assert arms.greedy_chunks(arm, arms.H100) == f"{whole},chunker=greedy"
        parse_policies([arms.greedy_chunks(arm, arms.H100)])


def test_every_part_that_is_timed_is_called(parts):
    """A part that was renamed, or that no decision asks any more, would be missing from the page."""
    timing, spent = parts["timing"], {}
    with timing.wrapped(spent):
        pass
    assert set(spent) == set(timing.PARTS)
    rows = timing.decisions("sliding", timing.RATE, 60)
    used = {name for row in rows for name in row["parts"]}
    assert {"survey (deadlines)", "bounds and order (MLPS)", "packing", "predictor and chunker, one call"} <= used
