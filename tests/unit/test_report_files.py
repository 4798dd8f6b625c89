"""Result files: the same run back, the same bytes, whole or not at all; results of any kind as records."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slacktide.core.types import SLO
from slacktide.errors import InputError
from slacktide.metrics.log import CUT_OFF, REJECTED, RunLog
from slacktide.metrics.summary import summarize
from slacktide.report import files
from slacktide.report.files import Record, dump, read_run, run_record, write_json, write_run
from slacktide.report.load import load_results, load_runs

INF, NAN = math.inf, math.nan


def a_run(**changes: Any) -> RunLog:
    """Four requests: two finish, one is rejected, one is cut off after a token."""
    columns: dict[str, Any] = {
        "arrival_time": [0.0, 0.5, 1.0, 1.5],
        "num_prompt_tokens": [10, 20, 30, 40],
        "num_output_tokens": [3, 1, 5, 9],
        "slo_ttft": [1.0, INF, 1.0, 1.0],
        "slo_tbt": [0.5, 0.5, INF, 4.0],
        "tenant": [1, 0, 1, 1],
        "tenants": ("zeta", "acme"),
        "first_scheduled_time": [0.0, 0.5, NAN, 1.5],
        "end_time": [2.0, 1.5, 1.0, NAN],
        "end_reason": np.array([0, 0, REJECTED, CUT_OFF], dtype=np.int8),
        "abort_time": [INF, INF, INF, 9.0],
        "relegated": [False, True, False, False],
        "num_preemptions": [1, 0, 0, 0],
        "recomputed_tokens": [4, 0, 0, 0],
        "scheduled_tokens": [16, 20, 0, 40],
        "token_offsets": [0, 3, 4, 4, 5],
        "token_step": [0, 1, 2, 1, 2],
        "start": [0.0, 1.0, 1.5],
        "duration": [1.0, 0.5, 0.5],
        "num_prefills": [1, 1, 1],
        "num_decodes": [0, 1, 1],
        "num_blocks": 100,
        "block_size": 16,
        "sim_duration": 2.0,
        "wall_time": 0.25,
        "decision_time": 0.125,
        "notes": ("one row left out",),
    }
    return RunLog(**(columns | changes))


def a_record(log: RunLog, **changes: Any) -> Record:
    return run_record(log, policy="vllm-v1", profile="h100/llama-3-8b", profile_label="measured", seed=7, **changes)


def assert_same(a: RunLog, b: RunLog) -> None:
    for field in dataclasses.fields(RunLog):
        np.testing.assert_array_equal(getattr(a, field.name), getattr(b, field.name), err_msg=field.name)


@pytest.mark.parametrize("kind", ["steps", "times", "shapes", "unnamed"])
def test_a_run_comes_back_as_it_was(tmp_path: Path, kind: str) -> None:
    log = a_run()
    if kind == "times":
        times = np.concatenate([log.request_times(i) for i in range(log.n)])
        log = a_run(token_step=None, token_time=times)
    elif kind == "shapes":
        log = a_run(shape=np.arange(36, dtype=np.float32).reshape(3, 12))
    elif kind == "unnamed":
        log = a_run(tenant=[0] * 4, tenants=())
    record = a_record(log)
    write_run(tmp_path, record, log)
    read, back = read_run(tmp_path)
    assert read == record
    assert_same(log, back)
    assert summarize(back) == record["summary"]


def test_columns_a_user_reads(tmp_path: Path) -> None:
    log = a_run()
    write_run(tmp_path, a_record(log), log)
    rows = pq.read_table(tmp_path / "requests.parquet").to_pylist()
    assert [row["end_reason"] for row in rows] == ["finished", "finished", "rejected", "cut_off"]
    assert [row["tenant"] for row in rows] == ["acme", "zeta", "acme", "acme"]
    assert [row["ttft"] for row in rows] == [1.0, 1.0, None, 0.5]
    assert [row["tpot"] for row in rows] == [0.5, None, None, None]
    assert [row["slo_met"] for row in rows] == [True, True, False, None]
    assert [row["slo_ttft"] for row in rows] == [1.0, None, 1.0, 1.0]
    assert [row["token_step"] for row in rows] == [[0, 1, 2], [1], [], [2]]


def test_same_run_same_bytes_and_nothing_else_in_the_directory(tmp_path: Path) -> None:
    log = a_run()
    for name in ("one", "two"):
        write_run(tmp_path / name, a_record(log), log, save_detailed=True)
    slower = a_run(wall_time=99.0)
    write_run(tmp_path / "two", a_record(slower), slower, save_detailed=True)
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == ["requests.parquet", "steps.parquet", "summary.json"]
    for name in names[:2]:  # the wall clock stands in summary.json alone
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_detailed_arrays_are_vllm_benchs(tmp_path: Path) -> None:
    log = a_run()
    write_run(tmp_path, a_record(log), log, save_detailed=True)
    data = json.loads((tmp_path / "summary.json").read_text())
    assert data["start_times"] == [0.0, 0.5, 1.0, 1.5]
    assert data["ttfts"] == [1.0, 1.0, 0.0, 0.5]
    assert data["itls"] == [[0.5, 0.5], [], [], []]
    assert data["errors"] == ["", "", "rejected", "cut_off"]
    assert (data["input_lens"], data["output_lens"]) == ([10, 20, 30, 40], [3, 1, 0, 1])
    assert (data["preemptions"], data["recomputed_tokens"], data["scheduled_tokens"]) == (
        [1, 0, 0, 0], [4, 0, 0, 0], [16, 20, 0, 40],
    )  # fmt: skip
    alone = tmp_path / "alone.json"
    alone.write_text(json.dumps(data))
    ((record, back),) = load_runs(alone)
    assert back is not None
    assert "itls" not in record
    assert summarize(back)["mean_ttft_ms"] == data["summary"]["mean_ttft_ms"]
    assert back.end_reason.tolist() == log.end_reason.tolist()
    for key in ("num_preemptions", "recomputed_tokens", "scheduled_tokens", "preemption_tax"):
        assert summarize(back)[key] == data["summary"][key]


def test_a_write_that_breaks_leaves_nothing_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full at the second file: an older complete run stays as it was, no temporary file is left."""
    log = a_run()
    write_run(tmp_path, a_record(log), log)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(path: Path, log: RunLog) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "_write_steps", full)
    with pytest.raises(InputError, match=r"cannot write .*steps\.parquet: No space left on device"):
        write_run(tmp_path, a_record(log, note="newer"), log)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_stop_between_the_renames_leaves_no_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = a_run()
    write_run(tmp_path, a_record(log), log)
    rename = Path.replace

    def stop_at_steps(self: Path, target: Path) -> Path:
        if target.name == "steps.parquet":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "replace", stop_at_steps)
    with pytest.raises(KeyboardInterrupt):
        write_run(tmp_path, a_record(log), log)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["requests.parquet", "steps.parquet"]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    log, blocked = a_run(), tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(InputError, match=r"cannot write .*file/run.*: Not a directory"):
        write_run(blocked / "run", a_record(log), log)
    with pytest.raises(InputError, match=r"cannot write .*file/x\.json: .*/file is a file; name another"):
        write_json(blocked / "x.json", {})


def test_json_is_strict_and_readable() -> None:
    assert dump({"a": [1, 2.5], "b": {"c": None}, "d": [{"e": "é"}], "f": {}}) == (
        '{\n  "a": [1, 2.5],\n  "b": {\n    "c": null\n  },\n'
        '  "d": [\n    {\n      "e": "é"\n    }\n  ],\n  "f": {}\n}\n'
    )
    with pytest.raises(ValueError, match="not JSON compliant"):
        dump({"a": NAN})


def test_a_comparison_finds_the_runs_beside_it(tmp_path: Path) -> None:
    log = a_run()
    records = [a_record(log, label="b"), a_record(log, label="a"), a_record(log, label="gone")]
    for record in records[:2]:
        write_run(tmp_path / record["label"], record, log)
    assert [record["label"] for record in load_results(tmp_path)] == ["a", "b"]
    write_json(tmp_path / "compare.json", {"runs": records})
    found = load_runs(tmp_path)
    assert [(record["label"], run is not None) for record, run in found] == [("b", True), ("a", True), ("gone", False)]
    assert load_results(tmp_path / "compare.json") == records


def test_judging_anew(tmp_path: Path) -> None:
    log = a_run()
    write_run(tmp_path, a_record(log), log)
    (record,) = load_results(tmp_path, SLO(ttft=0.75))
    assert record["summary"]["attainment"] == 0.0
    assert record["summary"]["violations"] == {"ttft": 2, "tbt": 0, "e2e": 0, "unserved": 1}
    assert record["summary"]["excluded"] == 1
    (gap,) = load_results(tmp_path, SLO(tbt=0.25), mode="gap", tolerated_late_share=1.0)
    assert (gap["summary"]["slo_mode"], gap["summary"]["attainment"]) == ("gap", 2 / 3)
    (tmp_path / "requests.parquet").unlink()
    assert load_results(tmp_path) == [a_record(log)]  # the record alone is still a result
    with pytest.raises(InputError, match=r"run 'vllm-v1' has no per-request figures .*--save-detailed"):
        load_results(tmp_path, SLO(ttft=0.75))


BENCH: dict[str, Any] = {
    "backend": "vllm", "request_rate": 2.0, "duration": 4.0, "completed": 2, "mean_ttft_ms": 300.0, "p99_tpot_ms": NAN,
}  # fmt: skip


def test_vllm_bench_results(tmp_path: Path) -> None:
    arrays = {"input_lens": [5, 5], "output_lens": [2, 0], "ttfts": [0.25, 0], "itls": [[0.5], []], "errors": ["", ""]}
    (tmp_path / "plain.json").write_text(json.dumps(BENCH))
    (tmp_path / "rich.json").write_text(json.dumps(BENCH | arrays))
    plain, rich = load_results(tmp_path)
    assert (plain["label"], plain["summary"]["mean_ttft_ms"], plain["summary"]["p99_tpot_ms"]) == ("plain", 300.0, None)
    assert "no per-request arrays" in plain["summary"]["notes"][0]
    assert rich["parameters"] == {"backend": "vllm", "request_rate": 2.0}
    assert (rich["summary"]["completed"], rich["summary"]["failed_empty"]) == (1, 1)
    (judged,) = load_results(tmp_path / "rich.json", SLO(0.5, 0.5))
    assert (judged["summary"]["attainment"], judged["summary"]["completed_in_file"]) == (0.5, 2)
    (tmp_path / "rich.json").write_text(json.dumps(BENCH | arrays | {"ttfts": [None, 0]}))
    with pytest.raises(InputError, match=r"rich\.json: ttfts\[0\]"):
        load_results(tmp_path / "rich.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "no known kind of result"),
        ({"runs": []}, "`runs` is empty"),
        ({"runs": [{"policy": "x"}]}, r"runs\[0\]: expected a record with a `summary`"),
        ({"summary": None}, "expected a record with a `summary`"),
    ],
)
def test_what_is_no_result(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=message):
        load_results(path)


def test_a_record_without_a_label_gets_one(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"summary": {}, "policy": "tide"}))
    assert load_results(path)[0]["label"] == "tide"


def test_missing_and_damaged_places(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file or directory"):
        load_results(tmp_path / "nothing")
    with pytest.raises(InputError, match="no result in this directory"):
        load_results(tmp_path)
    log = a_run()
    write_run(tmp_path, a_record(log), log)
    (tmp_path / "steps.parquet").write_bytes(b"no parquet")
    with pytest.raises(InputError, match=r"steps\.parquet: cannot read this Parquet file"):
        read_run(tmp_path)
    (tmp_path / "steps.parquet").unlink()
    with pytest.raises(InputError, match=r"steps\.parquet: no such file; a run's directory holds"):
        read_run(tmp_path)
    write_run(tmp_path, a_record(log), log)
    pq.write_table(pa.table({"a": [1]}), tmp_path / "requests.parquet")
    with pytest.raises(InputError, match="not a run of slacktide's"):
        read_run(tmp_path)
