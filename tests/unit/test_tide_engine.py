"""The paired goodput runs on a real engine, without one: the search, its repeats, tables of half-finished results."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[2] / "benchmarks"
GOAL = {"ttft": 2.0, "tbt": 0.1}
PROFILE = {
    "name": "toy", "label": "fitted", "num_gpu_blocks": 364, "block_size": 128, "max_num_batched_tokens": 512,
    "max_num_seqs": 32, "gpu": "cpu", "model": "toy",
    "latency": {"family": "affine", "alpha_p_ms": 10, "beta_p_ms": 0.3, "alpha_d_ms": 10, "beta_d_ms": 0.5},
}  # fmt: skip


@pytest.fixture
def modules(monkeypatch, tmp_path):
    names = ("run", "report", "real", "quiet")
    monkeypatch.syspath_prepend(str(HERE / "tide_engine"))
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    import report
    import run

    measured = tmp_path / "measured"
    measured.mkdir()
    (measured / "profile.json").write_text(json.dumps(PROFILE))
    told = {"capacity": dict.fromkeys(run.LOADS, 3.0), "targets": dict.fromkeys(run.LOADS, GOAL), "speed": 1.0}
    (measured / "load.json").write_text(json.dumps(told))
    monkeypatch.setattr(run, "MEASURED", measured)
    monkeypatch.setattr(report, "MEASURED", measured)
    yield run, report
    for name in names:
        sys.modules.pop(name, None)


def answered(run, capacity, limit, disturb=()):
    """A search whose target is met up to `limit`; the runs numbered in `disturb` are disturbed and tell nonsense."""
    search, rows = run.Search(capacity, []), []
    while search.rate is not None:
        bad = len(rows) in disturb
        attainment = 0.0 if bad else float(search.rate <= limit)
        rows.append({"rate": search.rate, "attainment": attainment, "disturbed": "others" if bad else ""})
        search.tell(attainment, bad)
        assert len(rows) < 40
    return search, rows


@pytest.mark.parametrize("limit", [0.3, 1.0, 2.9, 7.0])
def test_the_search_ends_around_the_limit_and_is_replayed_from_its_runs(modules, limit):
    run, _ = modules
    search, rows = answered(run, 3.0, limit)
    assert search.low <= limit < search.high <= search.low * (1 + run.RESOLUTION)
    half = run.Search(3.0, rows[: len(rows) // 2])
    assert half.rate == pytest.approx(rows[len(rows) // 2]["rate"])
    assert half.goodput is None
    assert run.Search(3.0, rows).goodput == pytest.approx(math.sqrt(search.low * search.high))


def test_a_disturbed_run_is_repeated_once_and_does_not_decide(modules):
    run, _ = modules
    search, rows = answered(run, 3.0, 2.0, disturb=(0, 3))
    assert rows[0]["rate"] == rows[1]["rate"]
    assert search.low <= 2.0 < search.high
    stuck = run.Search(3.0, [{"attainment": 1.0, "disturbed": "others"}] * run.TRIES)
    assert stuck.rate > run.START * 3.0  # after so many tries the last counts


def test_all_places_once_and_rounds_share_no_request(modules):
    run, _ = modules
    found = run.places(3)
    assert len({place.key for place in found}) == len(found) == 3 * len(run.LOADS) * len(run.ARMS)
    for load in run.LOADS:
        one, two = (run.workload(load, number, 3.0, 60.0, GOAL) for number in (0, 1))
        assert len(one) == len(two) == 180
        assert one.rate == pytest.approx(3.0, rel=0.1)
        assert one.num_prompt_tokens.tolist() != two.num_prompt_tokens.tolist()
        faster = run.workload(load, 0, 4.0, 60.0, GOAL)
        assert faster.num_prompt_tokens[:180].tolist() == one.num_prompt_tokens.tolist()


def test_half_finished_results_are_shown_as_such(modules, tmp_path):
    run, report = modules
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- results -->\nfrom before\n<!-- /results -->\nz\n")
    out = tmp_path / "results"
    report.write_report(out, 2, 60.0, readme)
    assert "Not run yet" in readme.read_text()
    out.mkdir()
    lines = []
    for arm, limit in (("tide", 2.5), ("stock", 1.25)):
        for number in (0, 1):
            place = run.Place("azure-conv", number, arm)
            lines += [{"key": place.key, **row} for row in answered(run, 3.0, limit)[1]]
    (out / "runs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"key": "cut')
    report.write_report(out, 2, 60.0, readme)
    said = readme.read_text()
    assert "from before" not in said
    assert said.endswith("<!-- /results -->\nz\n")
    row = next(line for line in said.splitlines() if line.startswith("| azure-conv | stock |"))
    assert float(row.split("|")[6].split("(")[0]) == pytest.approx(2.0, rel=0.13)
    assert float(row.split("|")[5]) > 0  # the simulator was asked
    assert "| long-mix | tide | -, - | - | - |" in said
