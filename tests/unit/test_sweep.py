"""Sweeps: how values are written, the order of the grid, failing cells, resuming, and the files."""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from slacktide.cli import options
from slacktide.cli.main import main
from slacktide.cli.vary import LOAD, parse_vary
from slacktide.core.spec import PolicySpec, parse_policies
from slacktide.errors import InputError
from slacktide.search import sweep
from slacktide.search.pool import Store
from slacktide.search.scenario import Scenario, prepare, run_policy
from slacktide.search.sweep import Axis, Cell, flat, grid, run_grid

LATENCY = {"family": "affine", "alpha_p_ms": 5, "beta_p_ms": 0.05, "alpha_d_ms": 8, "beta_d_ms": 0.1}


@pytest.fixture
def scenario(tmp_path: Path) -> Scenario:
    path = tmp_path / "engine.json"
    fields = {"num_gpu_blocks": 2001, "max_num_batched_tokens": 2048, "max_num_seqs": 16, "latency": LATENCY}
    path.write_text(json.dumps(fields))
    return Scenario("synthetic:prompt=200,output=30", str(path), slo="ttft:300,tbt:40", num_prompts=60, rate=10.0)


def policies(text: str) -> list[PolicySpec]:
    return parse_policies([text], {name: flag.read for name, flag in options.ENGINE_FLAGS.items()})


def axes(*texts: str, policy: str = "vllm-v1,fcfs") -> list[Axis]:
    return parse_vary(texts, policies(policy))


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if "wall_time" not in k and "decision" not in k}
    return [without_times(v) for v in value] if isinstance(value, list) else value


# ---- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "kind", "values"), [
    ("rate=2,4,inf", "load", (2.0, 4.0, math.inf)),
    ("rate=2:20:6", "load", (2.0, 8.0, 14.0, 20.0)),
    ("rate=0.1:0.35:0.1", "load", (0.1, 0.2, 0.3)),
    ("rate=0.1:0.3:0.1", "load", (0.1, 0.2, 0.3)),
    ("request-rate=3", "load", (3.0,)),
    ("max-num-seqs=1..64*4", "engine", (1, 4, 16, 64)),
    ("max_num_seqs=8,16:32:8", "engine", (8, 16, 24, 32)),
    ("max_num_batched_tokens=1k,8K", "engine", (1000, 8192)),
    ("gpu_memory_utilization=0.5..0.9*1.2", "engine", (0.5, 0.6, 0.72, 0.864)),
    ("enable_prefix_caching=true,off", "engine", (True, False)),
    ("long_prefill_token_threshold=0,512", "engine", (0, 512)),
    ("late_tolerance=0,0.05", "load", (0.0, 0.05)),
    ("seed=0:2:1", "load", (0, 1, 2)),
    ("max_tokens=exact,512", "load", ("exact", "512")),
    ("slo=ttft:500,tbt:50|ttft:1000,tbt:50", "load", ("ttft:500,tbt:50", "ttft:1000,tbt:50")),
    ("slo=ttft:500,tbt:50", "load", ("ttft:500,tbt:50",)),
    ("arrival=poisson,onoff:on=10,off=20,ratio=4,gamma:burstiness=0.5", "load",
     ("poisson", "onoff:on=10,off=20,ratio=4", "gamma:burstiness=0.5")),
    ("trace=azure-conv,synthetic:prompt=512,output=64,azure-code", "load",
     ("azure-conv", "synthetic:prompt=512,output=64", "azure-code")),
    ("trace=a.csv|b.csv", "load", ("a.csv", "b.csv")),
    ("profile=h100/llama-3-8b,2x-rtx-3090/llama-3-8b", "load", ("h100/llama-3-8b", "2x-rtx-3090/llama-3-8b")),
    ("victim=tail,none", "policy", ("tail", None)),
    ("vllm-v1.prefill_schedule_interval=1..4*2", "policy", (1, 2, 4)),
    ("fcfs.max_num_seqs=4,8", "policy", (4, 8)),
])  # fmt: skip
def test_values(text: str, kind: str, values: tuple[Any, ...]) -> None:
    (axis,) = axes(text)
    assert axis.kind == kind
    assert axis.values == values
    assert [type(value) for value in axis.values] == [type(value) for value in values]


@pytest.mark.parametrize(("text", "expected"), [
    ("rate", "expected NAME=V1"),
    ("=3", "expected NAME=V1"),
    ("rate=", "expected NAME=V1"),
    ("rate=2,,3", "expected a number"),
    ("rate=fast", "expected a number"),
    ("rate=-1", "above 0"),
    ("max_num_seqs=1.5", "whole number"),
    ("max_num_seqs=1:2:0.3", "whole number"),
    ("rate=5:1:1", "rises"),
    ("rate=1..8*1", "factor above 1"),
    ("rate=1:inf:1", "finite"),
    ("rate=1:9:0", "above 0"),
    ("rate=1:1000000:1", "more than 10,000"),
    ("enable_prefix_caching=true:false:1", "finite"),
    ("slo_mode=worst", "deadline or gap"),
    ("victim=head", "tail or priority"),
    ("max_num_seq=3", "did you mean max_num_seqs"),
    ("victims=tail", "did you mean victim"),
    ("fsfs.max_num_seqs=4", "did you mean fcfs"),
    ("fcfs.victimm=4", "unknown name in --vary 'victimm'"),
    ("fcfs.rate=4", "unknown name in --vary 'rate'"),
])  # fmt: skip
def test_values_that_are_refused(text: str, expected: str) -> None:
    with pytest.raises(InputError, match=expected) as failure:
        axes(text)
    assert "\n" not in str(failure.value)


def test_an_axis_given_twice() -> None:
    with pytest.raises(InputError, match="rate is given twice"):
        axes("rate=1", "request_rate=2")


def test_every_varied_load_setting_is_one_of_the_scenario() -> None:
    assert set(LOAD) == {*Scenario.__dataclass_fields__} - {"engine", "rotate", "read"}


# ---- the grid -------------------------------------------------------------------------------------------------------


def test_order_and_labels(scenario: Scenario) -> None:
    specs = policies("vllm-v1,fcfs")
    cells = grid(scenario, specs, axes("rate=2.5,5", "victim=tail,none", "max_num_seqs=4"))
    assert [(c.scenario.rate, c.base, c.varied["victim"]) for c in cells] == [
        (2.5, "vllm-v1", "tail"), (2.5, "vllm-v1", None), (2.5, "fcfs", None),
        (5.0, "vllm-v1", "tail"), (5.0, "vllm-v1", None), (5.0, "fcfs", None),
    ]  # fmt: skip
    assert list(cells[0].varied) == ["rate", "victim", "max_num_seqs"]
    assert cells[0].spec.label == "vllm-v1 rate=2.5 max_num_seqs=4 victim=tail"
    assert cells[0].spec.parameters == {"victim": "tail"}
    assert cells[2].spec.parameters == {}
    assert all(cell.scenario.engine == {"max_num_seqs": 4} for cell in cells)
    assert len({cell.spec.label for cell in cells}) == len(cells)


def test_a_parameter_of_one_policy_alone(scenario: Scenario) -> None:
    specs = policies("vllm-v1,fcfs")
    cells = grid(scenario, specs, axes("fcfs.max_num_seqs=4,8"))
    assert [cell.spec.engine for cell in cells] == [{}, {"max_num_seqs": 4}, {"max_num_seqs": 8}]
    engines = [run_cell_engine(cell) for cell in cells]
    assert engines == [16, 4, 8]


def run_cell_engine(cell: Cell) -> int:
    return prepare(cell.scenario, cell.spec.engine).config.max_num_seqs


@pytest.mark.parametrize(("policy", "text", "expected"), [
    ("vllm-v1", "rate=4,4.0", "given twice"),
    ("vllm-v1:max_num_seqs=4", "max_num_seqs=4,8", "sets max_num_seqs itself"),
    ("vllm-v1:victim=tail", "victim=tail,none", "sets victim itself"),
    ("vllm-v1", "seed=0:9999:1", "a grid of 1,000,000 runs"),
])  # fmt: skip
def test_grids_that_are_refused(scenario: Scenario, policy: str, text: str, expected: str) -> None:
    more = ["num_prompts=1:100:1"] if "seed" in text else []
    with pytest.raises(InputError, match=expected):
        grid(scenario, policies(policy), axes(text, *more, policy=policy))


def test_a_cell_is_the_run_that_simulate_would_do(scenario: Scenario) -> None:
    specs = policies("vllm-v1")
    records = run_grid(grid(scenario, specs, axes("rate=5,50", "max_num_seqs=2,8")))
    for record, (rate, seqs) in zip(records, [(5, 2), (5, 8), (50, 2), (50, 8)], strict=True):
        own = Scenario(scenario.trace, scenario.profile, slo=scenario.slo, num_prompts=60, rate=rate,
                       engine={"max_num_seqs": seqs})  # fmt: skip
        expected, _ = run_policy(prepare(own), specs[0])
        assert without_times(record["summary"]) == without_times(expected["summary"])
        assert record["varied"] == {"rate": rate, "max_num_seqs": seqs}
    assert len({record["summary"]["p99_ttft_ms"] for record in records}) == 4


def test_jobs_change_nothing(scenario: Scenario) -> None:
    cells, done = grid(scenario, policies("vllm-v1,fcfs"), axes("rate=5,50", "num_gpu_blocks_override=5,100")), []
    alone, together = run_grid(cells), run_grid(cells, jobs=2, on_done=done.append)
    assert without_times(alone) == without_times(together)
    assert [record["label"] for record in alone] == [cell.spec.label for cell in cells]
    assert sum(done) == 8
    assert [record["error"] is None for record in alone] == [False, False, True, True] * 2


def test_resuming(scenario: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells that ended well are not run again, whatever the grid calls them; failed ones are tried anew."""
    specs, ran = policies("vllm-v1"), []
    original = sweep.run_cell

    def counted(cell: Cell) -> dict[str, Any]:
        ran.append(cell.spec.label)
        return original(cell)

    monkeypatch.setattr(sweep, "run_cell", counted)
    cells = grid(scenario, specs, axes("num_gpu_blocks_override=5,100", "rate=5,inf"))
    with Store(tmp_path / "cells.jsonl") as store:
        first = run_grid(cells, store=store)
    assert len(ran) == 4
    with Store(tmp_path / "cells.jsonl") as store:
        assert without_times(run_grid(cells, store=store)) == without_times(first)
    assert ran[4:] == [cell.spec.label for cell in cells[:2]]
    ran.clear()
    other = grid(Scenario(**{name: getattr(scenario, name) for name in Scenario.__dataclass_fields__ if name != "rate"},
                          rate=5.0), specs, axes("num_gpu_blocks_override=100"))  # fmt: skip
    with Store(tmp_path / "cells.jsonl") as store:
        (again,) = run_grid(other, store=store)
    assert ran == []
    assert again["label"] == "vllm-v1 num_gpu_blocks_override=100"
    assert again["varied"] == {"num_gpu_blocks_override": 100}


def test_flat_columns(scenario: Scenario) -> None:
    cells = grid(scenario, policies("vllm-v1"), axes("rate=5,50", "num_gpu_blocks_override=5,100"))
    columns = flat(run_grid(cells))
    assert list(columns)[:4] == ["label", "policy", "rate", "num_gpu_blocks_override"]
    assert columns["rate"] == [5, 5, 50, 50]
    assert columns["attainment"][0] is None
    assert 0 <= columns["attainment"][3] <= 1
    assert columns["error"][1] is None
    assert "can never fit" in columns["error"][0]


# ---- the verb -------------------------------------------------------------------------------------------------------


def arguments(scenario: Scenario, *more: str) -> list[str]:
    return ["sweep", "--trace", scenario.trace, "--profile", scenario.profile, "--slo", "ttft:300,tbt:40",
            "--num-prompts", "50", "--rate", "10", "--policy", "vllm-v1,fcfs", "--jobs", "1", *more]  # fmt: skip


def test_the_verb_and_its_files(scenario: Scenario, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    command = arguments(scenario, "--vary", "rate=5,inf", "--vary", "victim=tail,none", "--out", str(out))
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "TTFT p99" in text
    assert "failed" not in text
    assert main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads((out / "sweep.json").read_text())
    assert len(document["runs"]) == 6
    assert document["runs"][3]["varied"] == {"rate": "inf", "victim": "tail"}
    table = pq.read_table(out / "sweep.parquet").to_pydict()
    with (out / "sweep.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(table) == list(rows[0])
    assert table["rate"] == [5, 5, 5, math.inf, math.inf, math.inf]
    assert table["victim"] == ["tail", None, None] * 2
    for key in ("attainment", "p99_ttft_ms", "num_steps"):
        summaries = [run["summary"][key] for run in document["runs"]]
        assert table[key] == summaries
        assert [float(row[key]) for row in rows] == summaries
    assert main(["report", str(out / "sweep.json")]) == 0


def test_exit_status_when_cells_fail(scenario: Scenario, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(scenario, "--vary", "num_gpu_blocks_override=5,100")) == 1
    text = capsys.readouterr().out
    assert "failed: vllm-v1 num_gpu_blocks_override=5 and 1 more: " in text
    assert main(arguments(scenario, "--vary", "num_gpu_blocks_override=4,5", "--out", str(tmp_path / "out"))) == 2
    error = capsys.readouterr().err
    assert "all 4 runs failed" in error
    assert error.count("\n") == 1
    assert len(json.loads((tmp_path / "out" / "sweep.json").read_text())["runs"]) == 4


@pytest.mark.parametrize("more", [["--vary", "rats=3"], ["--vary", "rate=x"], []])
def test_the_verb_refuses(scenario: Scenario, more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(scenario, *more)) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_packaged_trace_and_profiles(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sweep", "--trace", "azure-conv", "--num-prompts", "100", "--profile", "h100/llama-3-8b", "--slo",
               "ttft:500", "--policy", "vllm-v1", "--jobs", "1"]  # fmt: skip
    command += ["--vary", "profile=h100/llama-3-8b,a100/llama-3-70b"]
    assert main([*command, "--json"]) == 1  # 70 billion parameters do not fit one A100
    good, bad = json.loads(capsys.readouterr().out)["runs"]
    assert good["error"] is None
    assert good["summary"]["attainment"] > 0.9
    assert bad["summary"] == {}


def test_ctrl_c_ends_all_processes_and_keeps_what_is_done(scenario: Scenario, tmp_path: Path) -> None:
    cells = tmp_path / "out" / "sweep.jsonl"
    command = [sys.executable, "-m", "slacktide", *arguments(scenario, "--vary", "seed=0:2000:1"), "--jobs", "2"]
    process = subprocess.Popen([*command, "--out", str(cells.parent)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        while process.poll() is None and not (cells.exists() and cells.stat().st_size):
            time.sleep(0.05)
        assert process.poll() is None
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        workers = [int(pid) for pid in children.read_text().split()] if children.exists() else []
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (130, b"", b"")
    for worker in workers:
        for _ in range(200):
            if not alive(worker):
                break
            time.sleep(0.05)
        assert not alive(worker)
    with Store(cells) as store:
        assert store.notes == []
    assert all(json.loads(line)["error"] is None for line in cells.read_text().splitlines())


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"
