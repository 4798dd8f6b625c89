"""The dominance benchmark measures what it says: cells that cover every level, slices apart, searches, digests."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from slacktide.core.policy import names
from slacktide.core.spec import parse_policies
from slacktide.workload.requests import Workload

FOLDER = Path(__file__).parents[2] / "benchmarks" / "dominance"
MODULES = ("cells", "policies", "pieces", "report", "run")


@pytest.fixture(scope="module")
def bench() -> Iterator[dict[str, ModuleType]]:
    """benchmarks/ is no package: its modules import one another from their own folder."""
    before = {name: sys.modules.pop(name, None) for name in MODULES}
    sys.path.insert(0, str(FOLDER))
    try:
        yield {name: importlib.import_module(name) for name in MODULES}
    finally:
        sys.path.remove(str(FOLDER))
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def test_the_fraction_covers_every_level_and_most_pairs(bench):
    cells = bench["cells"]
    chosen = cells.fraction()
    assert len(chosen) == len(set(chosen)) == 36
    levels = (set(cells.PROFILES), set(cells.LOADS), set(cells.SLO_FORMS))
    assert len(cells.half()) == 18
    for part, (name, wanted) in itertools.product(
        (chosen, cells.half()), zip(("profile", "load", "form"), levels, strict=True)
    ):
        assert {getattr(c, name) for c in part} == wanted
    pairs = {(c.load, c.form) for c in chosen}
    assert pairs == set(itertools.product(levels[1], levels[2]))
    assert {(c.profile, c.form) for c in chosen} == set(itertools.product(levels[0], levels[2]))
    assert all(
        sum(c.load == load for c in chosen) == len({c.profile for c in chosen if c.load == load}) for load in levels[1]
    )
    assert len(set(cells.full())) == 8 * 9 * 4
    assert cells.full()[:36] == chosen


def test_seeds_share_no_request_and_rates_are_one_a_second(bench):
    cells = bench["cells"]
    cell = cells.Cell("rtx-4090", "code-poisson", "tight")
    tasks = [cells.task(cell, seed) for seed in range(cells.SEEDS)]
    for of in tasks:
        assert len(of.workload) == cells.requests_of(cell) == 500
        assert of.workload.rate == pytest.approx(1.0)
    means = [float(of.workload.num_prompt_tokens.mean()) for of in tasks]
    assert len(set(means)) == len(means)
    again = cells.task(cell, 1).workload
    assert np.array_equal(again.arrival_time, tasks[1].workload.arrival_time)
    whole = Workload(np.arange(400.0), np.arange(1, 401), np.ones(400, dtype=np.int64))  # rows that can be told apart
    for in_order in (False, True):
        parts = [cells._slice(whole, seed, 100, in_order).num_prompt_tokens.tolist() for seed in range(4)]
        assert sorted(itertools.chain.from_iterable(parts)) == list(range(1, 401))


def test_a_biased_belief_changes_one_scene(bench):
    cells = bench["cells"]
    base = cells.task(cells.Cell("rtx-4090", "code-poisson", "tight"), 1).setup.belief
    off = cells.off_by(base, "prefill", 1.3)
    assert np.allclose(off.weights[1], 1.3 * base.weights[1])
    assert np.array_equal(off.weights[[0, 2]], base.weights[[0, 2]])


@pytest.mark.parametrize("limit", [-40, -3, 0, 5, 17, 300])
@pytest.mark.parametrize("start", [-20, 0, 16])
@pytest.mark.parametrize("leap", [1, 3, 16])
def test_the_search_finds_the_highest_step_from_anywhere(bench, limit, start, leap):
    asked = []

    def meets(step: int) -> bool:
        asked.append(step)
        return step <= limit

    assert bench["pieces"].highest(meets, start, leap, -30) == (limit if limit >= -30 else None)
    assert len(asked) < 25


def test_steps_and_rates_are_inverse(bench):
    pieces = bench["pieces"]
    assert [pieces.step_of(pieces.rate_of(k)) for k in range(-200, 200)] == list(range(-200, 200))


def test_every_variant_is_a_policy(bench):
    policies, pieces = bench["policies"], bench["pieces"]
    for family, texts in policies.FAMILIES.items():
        assert len(set(texts)) == len(texts) >= 2
        for text in texts:
            spec = pieces.spec_of(text)
            spec.build()
            assert spec.name == family or (family, spec.name) == ("eb-plus", "eb-adaptive")
    if policies.TIDE in names():
        parse_policies([policies.variants(policies.TIDE, "gap")[0]])[0].build()


def test_keys_change_with_what_decides(bench):
    cells, pieces = bench["cells"], bench["pieces"]
    cell = cells.Cell("rtx-4090", "conv", "tight")
    piece = pieces.Piece("goodput", cell, "sliding", (("start", 5),))
    assert piece.key == pieces.Piece("goodput", cell, "sliding").key  # where a search begins decides nothing
    others = [
        pieces.Piece("goodput", cells.Cell("rtx-4090", "conv", "loose"), "sliding"),
        pieces.Piece("goodput", cell, "qoserve"),
        pieces.Piece("overload", cell, "sliding", (("rate", 3.0), ("variant", "sliding"))),
        pieces.Piece("overload", cell, "sliding", (("rate", 4.0), ("variant", "sliding"))),
        pieces.Piece("bound", cell, "bound"),
    ]
    assert len({piece.key, *(p.key for p in others)}) == 1 + len(others)
    sources = bench["policies"].version  # rivals' rows stay; what is claimed of tide and the bound is measured anew
    assert len({sources("tide"), sources("bound"), sources("sliding")}) == 3
    assert sources("sliding") == ""


def test_ratios_are_paired(bench):
    report = bench["report"]
    middle, low, high = report.ratio([2.0, 4.0, 8.0], [1.0, 2.0, 4.0])
    assert (middle, low, high) == pytest.approx((2.0, 2.0, 2.0))  # seeds differ, their ratio does not
    middle, low, high = report.ratio([2.0, 2.0, 2.0], [1.0, 2.0, 4.0])
    assert middle == pytest.approx(1.0)
    assert low < 1 < high
    assert report.ratio([0.0, 1.0], [1.0, 1.0]) is None


def fake_row(piece) -> dict:
    """What a piece might find: `tide` 10 % ahead, but 10 % behind on one load."""
    ahead = 0.9 if piece.cell.load == "bwb" else 1.1
    rate = 4.0 * (ahead if piece.family == "tide" else 1.0 - 0.01 * len(piece.family))
    row = {"kind": piece.kind, "cell": piece.cell.name, "profile": piece.cell.profile, "load": piece.cell.load,
           "family": piece.family, "version": "x", "variant": piece.family}  # fmt: skip
    by_kind = {
        "goodput": {"rates": [rate, rate * 2, rate]},
        "biased": {"rates": [rate]},
        "throughput": {"rate": rate},
        "overload": {"attainment": [rate / 5, rate / 6]},
        "bound": {"bound": [6.0, 12.0, 6.0], "sustained": [8.0] * 3},
    }
    return row | by_kind[piece.kind]


def test_phases_follow_one_another_and_resume(bench, tmp_path, monkeypatch):
    run, cells, asked = bench["run"], bench["cells"].fraction(), []

    def measured(piece):
        asked.append(piece)
        return fake_row(piece)

    monkeypatch.setattr(run, "run", measured)
    monkeypatch.setattr(run, "RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()
    (tmp_path / "README.md").write_text("<!-- results -->\n<!-- /results -->\n")
    run.measure("baselines", cells, 1, 10)
    assert len(asked) == 10
    run.measure("baselines", cells, 1, None)
    rivals = len(bench["policies"].FAMILIES)
    kinds = [piece.kind for piece in asked]
    assert kinds.count("goodput") == rivals * (36 + 9)
    assert kinds.count("overload") == rivals * 18
    assert kinds.count("throughput") == 2 * 12
    assert kinds.count("biased") == 3 * 24
    assert len({piece.key for piece in asked}) == len(asked)
    before = len(asked)
    run.measure("baselines", cells, 1, None)
    assert len(asked) == before
    run.measure("tide", cells, 1, None)
    run.measure("bounds", cells, 1, None)
    overloads = [piece for piece in asked if piece.kind == "overload" and piece.family == "tide"]
    assert {dict(piece.given)["rate"] for piece in overloads} == {4.0 * (1 - 0.01 * len("sola"))}
    assert all(dict(p.given)["variant"] == ("tide:slo_mode=gap" if p.cell.form == "gap" else "tide") for p in overloads)
    bench["report"].render(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "36 of 36 for all baselines, 36 with `tide`" in text
    assert "| h100-1.15 bwb tight | sola | 0.938 (0.94-0.94) | yes | not looked into yet |" in text
    assert "lowest 0.938" in text
    assert "earlier version" in text  # no source has the digest x
    for missing in ("Not measured yet", "nan"):
        assert missing not in text


def test_unfinished_cells_are_shown(bench, tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "README.md").write_text("head\n<!-- results -->\nobsolete\n<!-- /results -->\ntail\n")
    bench["report"].render(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("head\n")
    assert text.endswith("tail\n")
    assert "Cells measured: 0 of 36" in text
    assert "obsolete" not in text
    assert "| h100-1.3 | mixed | tight | - |" in text


def test_a_grid_that_has_grown_gives_the_answer_of_the_whole(bench, monkeypatch):
    pieces, policies = bench["pieces"], bench["policies"]
    cell = bench["cells"].Cell("rtx-4090", "code-poisson", "tight")
    best = {"a": 40, "b": 55, "c": 50, "d": 70}  # highest step of each variant, on every slice
    asked = []

    def attained(of, text, rate, mode, *, stop):
        asked.append(text)
        return float(rate <= pieces.rate_of(best[text]) * 1.001)

    monkeypatch.setattr(pieces, "attainment", attained)
    monkeypatch.setattr(pieces, "task", lambda cell, seed: type("Of", (), {"one_by_one": 1.0}))
    rows = {}
    for grid in (("a", "b"), ("a", "b", "c"), ("a", "b", "c", "d")):
        monkeypatch.setitem(policies.FAMILIES, "sola", grid)
        rows[grid] = pieces.goodput(pieces.Piece("goodput", cell, "sola"))
        assert rows[grid]["grid"] == len(grid)
    whole = rows["a", "b", "c", "d"]
    assert whole["variant"] == "d"
    for front in (("a", "b"), ("a", "b", "c")):
        asked.clear()
        piece = pieces.Piece("goodput", cell, "sola", (("earlier", {**rows[front], "grid": len(front)}),))
        assert piece.key == pieces.Piece("goodput", cell, "sola").key
        grown = pieces.goodput(piece)
        assert {k: grown[k] for k in ("variant", "tuned_rate", "rates")} == {
            k: whole[k] for k in ("variant", "tuned_rate", "rates")
        }
        assert not set(front) & set(asked)
    monkeypatch.setitem(policies.FAMILIES, "sola", ("a", "b", "c"))
    kept = pieces.goodput(pieces.Piece("goodput", cell, "sola", (("earlier", {**rows["a", "b"], "grid": 2}),)))
    assert (kept["variant"], kept["rates"], kept["grid"]) == ("b", rows["a", "b"]["rates"], 3)
