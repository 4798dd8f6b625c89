"""Damaged files, contradictory flags and odd places: one line and status 2 before any work, never a traceback."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slacktide.cli import options
from slacktide.cli.advise import read_steps
from slacktide.cli.doctor import checks
from slacktide.cli.main import main
from slacktide.core.shape import FIELD_NAMES
from slacktide.report.files import write_json
from slacktide.search import scenario as search_scenario

AFFINE = {"family": "affine", "alpha_p_ms": 4.5, "beta_p_ms": 0.038, "alpha_d_ms": 11.3, "beta_d_ms": 0.064}
PROFILE = {"name": "gpu/model", "num_gpu_blocks": 12000, "latency": AFFINE}
HUGE = 10**400
TRACE = "arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{i / 10},{100 + i},{5 + i % 3}\n" for i in range(12))
SHARED = "arrival_s,prompt_tokens,output_tokens,hash_ids\n0,64,4,1 2 3 4\n5,64,4,1 2 3 4\n"
"""Two equal prompts, far apart: the second finds the first one's blocks, if prefixes are cached."""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory with a trace and a profile, and we in it."""
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_text(TRACE)
    Path("p.json").write_text(json.dumps(PROFILE))
    return tmp_path


@pytest.fixture
def call(capsys, place):
    """Run a command; returns (status, standard output, standard error)."""

    def run(*arguments):
        return main([str(argument) for argument in arguments]), *capsys.readouterr()

    return run


@pytest.fixture
def simulate(call):
    def run(*more, verb="simulate", trace="t.csv", profile="p.json", policy="vllm-v1"):
        return call(verb, "--trace", trace, "--profile", profile, "--policy", policy, *more)

    return run


def refused(answer):
    """The one line of a refusal."""
    status, out, err = answer
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("slacktide")
    return err


# ---- profiles --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"num_gpu_blocks": HUGE}, "field num_gpu_blocks"),
        ({"num_gpu_blocks": 2**31}, "field num_gpu_blocks"),
        ({"block_size": 2**31}, "field block_size"),
        ({"frontend_ms": HUGE}, "field frontend_ms"),
        ({"frontend_ms": 1e300}, "at most 1e+09"),
        ({"max_model_len": "2048"}, "field max_model_len: found '2048'"),
        ({"max_model_len": 0}, "field max_model_len: found 0"),
        ({"enable_prefix_caching": 1}, "expected true or false"),
        ({"enable_prefix_caching": None}, "expected true or false"),
        ({"measured": {"decode": {"num_tokens": [HUGE, HUGE]}}}, "field measured.decode"),
        ({"errors": {"decode": {"median_percent": HUGE}}}, "median_percent"),
        ({"latency": AFFINE | {"beta_p_ms": HUGE}}, "field beta_p_ms"),
        ({"latency": AFFINE | {"beta_p_ms": 1e300}}, "field beta_p_ms"),
    ],
)
def test_fields_of_a_profile(simulate, changed, part):
    Path("p.json").write_text(json.dumps(PROFILE | changed))
    told = refused(simulate())
    assert part in told
    assert "p.json" in told


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"num_gpu_blocks": 1' + "0" * 5000 + "}", "not valid JSON"),
        ('{"num_gpu_blocks": 9, ' + json.dumps(PROFILE)[1:], "field num_gpu_blocks stands twice"),
        (json.dumps(PROFILE)[:-1] + ', "latency": {"family": "affine", "family": "tables"}}', "family stands twice"),
    ],
)
def test_files_that_are_no_profile(simulate, call, text, part):
    Path("p.json").write_text(text)
    assert part in refused(simulate())
    assert part in refused(call("profiles", "p.json"))


def test_a_profile_with_a_byte_order_mark(simulate):
    Path("p.json").write_text("\ufeff" + json.dumps(PROFILE), encoding="utf-8")
    assert simulate()[0] == 0


def test_the_longest_context_of_a_profile_holds(simulate):
    Path("p.json").write_text(json.dumps(PROFILE | {"max_model_len": 110}))
    assert "the engine holds 110" in refused(simulate())
    assert simulate("--max-model-len", 200)[0] == 0
    _, out, _ = simulate("--oversized", "drop", "--json")
    assert json.loads(out)["engine"]["max_model_len"] == 110


def test_prefix_caching_of_a_profile_holds(simulate):
    Path("s.csv").write_text(SHARED)

    def cached(*flags):
        status, out, err = simulate("--read", "hash_block_size=16", "--json", *flags, trace="s.csv")
        assert (status, err) == (0, "")
        return json.loads(out)["summary"]["cached_tokens"]

    assert cached() > 0
    Path("p.json").write_text(json.dumps(PROFILE | {"enable_prefix_caching": False}))
    assert cached() == 0
    assert cached("--enable-prefix-caching") > 0


# ---- measured steps --------------------------------------------------------------------------------------------------

ENGINE = {"num_gpu_blocks": 1000, "block_size": 16, "max_num_batched_tokens": 2048, "max_num_seqs": 64}
HEAD = {"format": 1, "facts": {"engine": ENGINE}}


def step(i, **more):
    """A decode step of 1 to 8 requests as a line."""
    n = 1 + i % 8
    shape = dict.fromkeys(FIELD_NAMES, 0) | {"num_tokens": n, "num_sequences": n, "num_decodes": n}
    return {"start": 10.0 + i / 100, "duration_s": 5e-3 + 2e-4 * n} | shape | more


def write_steps(lines, name="steps.jsonl"):
    Path(name).write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return name


@pytest.mark.parametrize(
    ("head", "part"),
    [
        ({"facts": "x"}, "field facts: found 'x'"),
        ({"facts": {"engine": []}}, "field facts.engine: found []"),
        ({"facts": {"engine": ENGINE, "hardware": 5}}, "field facts.hardware: found 5"),
        ({"facts": {"engine": ENGINE | {"block_size": "x"}}}, "field facts.engine.block_size: found 'x'"),
        ({"facts": {"engine": ENGINE | {"num_gpu_blocks": 2**40}}}, "field facts.engine.num_gpu_blocks"),
        ({"facts": {"engine": ENGINE | {"enable_prefix_caching": "x"}}}, "expected true or false"),
        ({"facts": {"engine": ENGINE | {"frontend_ms": "x"}}}, "field facts.engine.frontend_ms"),
    ],
)
def test_first_lines_of_measurements(call, head, part):
    write_steps([HEAD | head, *(step(i, point=i // 2) for i in range(40))])
    assert part in refused(call("fit", "steps.jsonl", "--family", "affine", "--name", "a/b"))


@pytest.mark.parametrize(
    ("line", "part"),
    [
        (step(0, duration_s=HUGE), "line 5: field duration_s"),
        (step(0, duration_s=1e308), "line 5: field duration_s"),
        (step(0, prefill_square=1e308), "line 5: field prefill_square"),
        (step(0, num_tokens=HUGE), "line 5: field num_tokens"),
        (step(0, turn_s="x"), "line 5: field turn_s: found 'x'"),
        (step(0, t="x"), "line 5: field t: found 'x'"),
        (step(0, reference=True, t="x"), "line 5: field t: found 'x'"),
        (step(0, reference=True, t=1.0, duration_s=0), "line 5: field duration_s: found 0"),
        ("[" * 100_000, "line 5: not valid JSON (nested too deeply)"),
        ('{"duration_s": 1, "duration_s": 2}', "line 5: field duration_s stands twice"),
    ],
)
def test_lines_of_measurements_are_found_by_their_number(call, line, part):
    warm = step(0, warmup=True)
    write_steps([HEAD, warm, "", warm, line, *(step(i, point=i // 2) for i in range(40))])
    assert part in refused(call("fit", "steps.jsonl", "--family", "affine", "--name", "a/b"))


def test_a_reference_step_without_a_time_tells_no_drift(call):
    write_steps([HEAD, step(0, reference=True, t=None), *(step(i, point=i // 2) for i in range(40))])
    assert call("fit", "steps.jsonl", "--family", "affine", "--name", "a/b")[0] == 0


def test_a_step_log_whose_start_is_no_number(call):
    write_steps([step(i) for i in range(30)] + [step(30, start="x"), *(step(i) for i in range(31, 60))])
    assert "line 31: field start: found 'x'" in refused(call("fit", "steps.jsonl", "--family", "affine"))


@pytest.mark.parametrize("value", [HUGE, float("inf"), -1])
def test_starts_of_a_benchmark_result(call, value):
    result = {"input_lens": [5], "output_lens": [2], "ttfts": [0.1], "itls": [[0.1]], "start_times": [value]}
    Path("b.json").write_text(json.dumps(result))
    assert "start_times[0]: expected a number from 0" in refused(call("report", "b.json"))


@pytest.mark.parametrize("value", [-1, HUGE, None, "x"])
def test_numbers_of_a_benchmark_result(call, value):
    n = 40
    result = {
        "input_lens": [64] * n, "output_lens": [6] * n, "ttfts": [0.02] * n, "itls": [[0.01] * 5] * n,
        "start_times": [0.3 * i for i in range(n)],
    }  # fmt: skip
    for name in ("input_lens", "ttfts", "start_times"):
        Path("b.json").write_text(json.dumps(result | {name: [*result[name][:3], value, *result[name][4:]]}))
        assert "request 3: expected numbers" in refused(call("fit", "b.json", "--max-num-batched-tokens", 2048))


CSV = "duration_ms,num_prefill_tokens,num_decodes\n" + "".join(
    f"{5 + i % 8},{i % 5 * 16},{1 + i % 8}\n" for i in range(60)
)


MEANS = ("--profile", "h100/llama-3-8b", "--mean-prompt", 100, "--mean-output", 5, "--max-concurrency", 4)


def advise(call, name):
    return call("advise", *MEANS, "--num-prompts", 20, "--step-log", name, "--json")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (CSV.replace("num_decodes", "num_decodes,num_decodes", 1).replace("\n", ",1\n")[:-3], "called 'num_decodes'"),
        (CSV.replace("\n", ",1\n").replace("num_decodes,1", "num_decodes,duration"), "both tell a step's time"),
        (CSV + "9" * 200_000 + ",1,1\n", "field larger than field limit"),
        (CSV + "5,1e300,1\n", "row 61: duration_ms=5"),
        (CSV.replace("duration_ms", "duration") + "1e5,1,1\n", "row 61: duration=100000"),
    ],
)
def test_step_logs_as_tables(call, text, part):
    Path("s.csv").write_text(text)
    assert part in refused(advise(call, "s.csv"))


def test_step_logs_as_spreadsheets_write_them(place):
    Path("s.csv").write_text("\ufeff" + CSV.replace("\n", "\r\n"), encoding="utf-8", newline="")
    assert len(read_steps(Path("s.csv")).seconds) == 60


def test_step_logs_in_parquet_with_columns_of_another_kind(call):
    columns = {"duration_ms": pa.array([5.0] * 30), "num_prefill_tokens": pa.array([0] * 30)}
    for column in (pa.array([{"a": 1}] * 30), pa.array([[1, 2]] * 30), pa.array(["x"] * 30)):
        pq.write_table(pa.table(columns | {"num_decodes": column}), "s.parquet")
        assert "num_decodes: expected numbers" in refused(advise(call, "s.parquet"))
    Path("d.parquet").mkdir()
    assert "d.parquet" in refused(advise(call, "d.parquet"))


# ---- results ---------------------------------------------------------------------------------------------------------


def test_a_directory_of_several_results_is_ambiguous(simulate, call):
    assert simulate("--out", "d")[0] == 0
    record = json.loads(Path("d/summary.json").read_text())
    Path("d/compare.json").write_text(json.dumps({"runs": [record | {"label": name} for name in ("fcfs", "orca")]}))
    for more in ([], ["--html", "x.html"]):
        assert "holds several results (summary.json, compare.json)" in refused(call("report", "d", *more))
    labels = [run["label"] for run in json.loads(call("report", "d/compare.json", "--json")[1])["runs"]]
    assert labels == ["fcfs", "orca"]
    status, out, _ = call("report", "d/summary.json", "--json", "--slo", "ttft:1")  # judged by the files beside it
    assert status == 0
    assert json.loads(out)["runs"][0]["summary"]["attainment"] == 0


def test_a_run_whose_summary_is_none(simulate, call):
    assert simulate("--out", "d")[0] == 0
    record = json.loads(Path("d/summary.json").read_text())
    Path("d/summary.json").write_text(json.dumps(record | {"summary": [1]}))
    assert "expected a record with a `summary`" in refused(call("report", "d"))


@pytest.mark.parametrize(
    "column", [pa.array(["x"] * 12), pa.array([{"a": 1}] * 12), pa.nulls(12), pa.array([1e300] * 12)]
)
@pytest.mark.parametrize("name", ["end_reason", "tenant", "token_step", "num_prompt_tokens", "num_delivered_tokens"])
def test_a_run_with_columns_of_another_kind(simulate, call, name, column):
    assert simulate("--out", "d")[0] == 0
    table = pq.read_table("d/requests.parquet")
    changed = table.set_column(table.column_names.index(name), name, column)
    pq.write_table(changed.replace_schema_metadata(table.schema.metadata), "d/requests.parquet")
    assert "requests.parquet" in refused(call("report", "d"))


@pytest.mark.parametrize(
    ("name", "value"), [("start_time", None), ("start_time", HUGE), ("num_blocks", "x"), ("notes", [1]), ("tenants", 5)]
)
def test_a_run_whose_own_notes_are_damaged(simulate, call, name, value):
    assert simulate("--out", "d")[0] == 0
    table = pq.read_table("d/requests.parquet")
    scalars = json.loads(table.schema.metadata[b"slacktide"]) | {name: value}
    pq.write_table(table.replace_schema_metadata({b"slacktide": json.dumps(scalars)}), "d/requests.parquet")
    assert f"requests.parquet: not a run of slacktide's, or damaged ({name}: expected" in refused(call("report", "d"))


@pytest.mark.parametrize("column", [pa.array([float("nan")] * 100), pa.array([[None, 1]] * 100), pa.array(["x"] * 100)])
@pytest.mark.parametrize("name", ["chunk_requests", "preempted", "predicted"])
@pytest.mark.filterwarnings("error")
def test_decisions_that_are_damaged(simulate, call, name, column):
    assert simulate("--out", "d", "--explain", 1)[0] == 0
    call()
    table = pq.read_table("d/decisions.parquet")
    if name == "predicted" and pa.types.is_floating(column.type):
        return  # a prediction may be missing
    changed = table.set_column(table.column_names.index(name), name, column.slice(0, len(table)))
    pq.write_table(changed.replace_schema_metadata(table.schema.metadata), "d/decisions.parquet")
    assert "decisions.parquet" in refused(call("report", "d", "--explain", 1))


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        ({"attainment": {}}, "attainment is '{}', expected a number"),
        ({"failed": HUGE}, "expected a number"),
        ({"decision_time": {}}, "decision_time is '{}'"),
        ({"step_mode_time_share": 5}, "step_mode_time_share is '5', expected an object"),
        ({"step_mode_time_share": {"decode": "x"}}, "step_mode_time_share: decode is 'x', expected a number"),
        ({"classes": {"a": 5}}, "classes: a is '5', expected an object"),
        ({"notes": [5]}, "notes: expected a list of texts"),
    ],
)
def test_figures_of_a_result(call, place, changed, part):
    Path("r.json").write_text(json.dumps({"label": "x", "summary": changed}))
    for more in ([], ["--json"], ["--html", "x.html"]):
        assert part in refused(call("report", "r.json", *more))


SEARCH = {
    "label": "x", "profile": "a/b", "rate": 5.0, "rate_low": 4.0, "rate_high": 6.0, "target": 0.99, "num_prompts": 9,
    "notes": [], "evaluations": [{"rate": 5.0, "attainment": 1.0, "stopped": False}],
}  # fmt: skip
CELL = {"label": "x", "varied": {"rate": 1}, "summary": {"attainment": 1.0}, "error": None, "notes": []}


@pytest.mark.parametrize(
    ("record", "part"),
    [
        (SEARCH | {"rate": HUGE}, "runs: 0: rate: expected a number"),
        (SEARCH | {"profile": None}, "runs[0]: profile: expected str"),
        (SEARCH | {"notes": 5}, "runs[0]: notes: expected a list of texts"),
        (SEARCH | {"evaluations": [{"rate": 5.0, "attainment": -1, "stopped": False}]}, "attainment: expected a share"),
        (CELL | {"summary": {"attainment": "x"}}, "runs[0]: attainment is 'x', expected a number"),
        (CELL | {"summary": {"num_requests": HUGE}}, "num_requests: expected a number"),
    ],
)
def test_searches_and_sweeps_that_are_damaged(call, place, record, part):
    Path("r.json").write_text(json.dumps({"runs": [record]}))
    assert part in refused(call("report", "r.json", "--html", "x.html"))


def test_a_label_is_a_text(call, place):
    Path("r.json").write_text(json.dumps({"label": [1], "summary": {}}))
    assert "label is '[1]', expected text" in refused(call("report", "r.json"))


def test_two_processes_do_not_mix_their_files(place):
    """Whoever renames its files into a directory waits for whoever does so already."""
    handle = os.open(place, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    other = threading.Thread(target=write_json, args=(place / "x.json", {"a": 1}))
    other.start()
    other.join(0.2)
    assert other.is_alive()
    assert not (place / "x.json").exists()
    os.close(handle)
    other.join(10)
    assert json.loads((place / "x.json").read_text()) == {"a": 1}


def test_a_result_is_replaced_whole_or_not_at_all(call, monkeypatch):
    assert call("policies", "--out", "d")[0] == 0
    before = Path("d/policies.json").read_bytes()

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    assert "d/policies.json: No space left on device" in refused(call("policies", "--out", "d"))
    assert Path("d/policies.json").read_bytes() == before
    assert [path.name for path in Path("d").iterdir()] == ["policies.json"]


# ---- views -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--window", "1:2"], "--window goes with --timeline"),
        (["--run", "vllm-v1"], "--run goes with --timeline or --explain"),
        (["--run", "nope", "--explain", "1"], "no such run; there are vllm-v1"),
        (["--html", "."], "expected a file, found a directory"),
        (["--html", "t.csv/x.html"], "cannot be written"),
        (["--timeline", "x", "--html", "./x"], "both name x"),
    ],
)
@pytest.mark.parametrize("verb", ["simulate", "compare"])
def test_views_are_checked_before_the_run(simulate, monkeypatch, flags, part, verb):
    def too_late(*_, **__):
        raise AssertionError("it ran")

    monkeypatch.setattr(search_scenario, "run_policy", too_late)
    assert part in refused(simulate(*flags, verb=verb))


def test_an_explanation_is_part_of_the_json(simulate, call):
    for verb in ("simulate", "compare"):
        status, out, err = simulate("--explain", 3, "--json", "--out", f"{verb}-out", verb=verb)
        assert (status, err) == (0, "")
        assert "request 3" in json.loads(out)["explanation"]
    assert "request 3" in json.loads(call("report", "simulate-out", "--explain", 3, "--json")[1])["explanation"]
    assert "from 0 to 11" in refused(call("report", "simulate-out", "--explain", 12, "--json"))
    assert "--out goes with the table" in refused(call("report", "simulate-out", "--explain", 3, "--out", "x"))


def test_a_step_log_as_a_timeline(call):
    lines = [step(i, num_running=1, num_waiting=0, num_free_blocks=9, prefill_tokens=0) for i in range(5)]
    write_steps(lines)
    status, out, _ = call("report", "steps.jsonl", "--timeline", "x.json", "--json")
    assert status == 0
    assert json.loads(out) == {"wrote": ["x.json"]}
    assert "--timeline alone" in refused(call("report", "steps.jsonl", "--timeline", "x.json", "--html", "y.html"))


@pytest.mark.parametrize("value", [HUGE, 1e300, -1, None, "x", [], {}, float("nan"), True])
def test_numbers_of_a_step_log(call, value):
    good = [step(i, num_running=1, num_waiting=0, num_free_blocks=9, prefill_tokens=0) for i in range(5)]
    for name in ("start", "duration_s", "prefill_tokens", "num_waiting"):
        write_steps([*good[:2], good[2] | {name: value}, *good[3:]])
        for more in (
            ["report", "steps.jsonl", "--timeline", "x.json"],
            ["advise", *MEANS, "--step-log", "steps.jsonl"],
        ):
            assert f"line 3: {name}: expected a number from 0" in refused(call(*more))


# ---- values and surroundings -----------------------------------------------------------------------------------------


def test_numbers_as_they_are_written():
    assert options.count("1.005k") == 1005
    with pytest.raises(options.Invalid, match=r"1000\.5"):
        options.count("1.0005k")
    for text in ("1e300", "0.1"):
        with pytest.raises(options.Invalid, match="tokens from 1 to 10,000,000"):
            options.tokens(text)
    assert options.seconds("1e9") == 1e9
    with pytest.raises(options.Invalid, match="at most"):
        options.seconds("1e300")


MINE = "from dataclasses import dataclass\n@dataclass\nclass Mine:\n"


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("def", "SyntaxError"),
        ("1 / 0\n", "ZeroDivisionError: division by zero, "),
        ("import absent\n", "No module named 'absent'"),
        (
            MINE + "    parts: list\n    def plan(self, view): ...\n",
            "Mine.parts: <class 'list'> has no form on a command line",
        ),
        (
            MINE + "    n: int = 1\n    def plan(self, view): ...\n",
            "parameter n='9999999999999999999999': expected a whole number",
        ),
    ],
)
def test_policies_of_ones_own_that_are_broken(simulate, monkeypatch, place, content, part, request):
    module = f"mine_{abs(hash(request.node.name))}"
    Path(f"{module}.py").write_text(content)
    monkeypatch.syspath_prepend(str(place))
    policy = f"{module}:Mine" + (":n=9999999999999999999999" if "n: int" in content else "")
    assert part in refused(simulate(policy=policy))


def test_none_leaves_a_setting_to_the_engine(simulate):
    status, out, _ = simulate("--max-num-seqs", 7, "--json", policy="eb:max_num_seqs=none")
    assert status == 0
    assert json.loads(out)["engine"]["max_num_seqs"] == 7


@pytest.mark.parametrize(
    "policy", ["sliding:window=2147483648", "sliding:margin=inf", "sola:margin=inf", "qoserve:alpha_low=1e308"]
)
def test_parameters_that_no_computer_can_hold(simulate, policy):
    assert "expected at most" in refused(simulate(policy=policy))


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--profile", "h100/llama-3-8b?skew=1e300"], "skew=1e300: expected a number of at least 0, at most 1000"),
        (["--profile", "h100/llama-3-8b?skew=0&skew=1"], "option skew is given twice"),
        (["--profile", "h100"], "did you mean h100/qwen3-8b"),
        (["--profile", "nothing"], "... ("),
        (["--trace", "synthetic:prompt=5,output=5,n=0", "--num-prompts", "3", "--rate", "1"], "n: found '0'"),
    ],
)
def test_names_of_profiles_and_traces(simulate, flags, part):
    told = refused(simulate(*flags))
    assert part in told
    assert len(told) < 900


@pytest.mark.parametrize("name", [":Mine", "..x:Mine", "a..b:Mine"])
def test_names_of_modules_that_are_none(simulate, name):
    assert "cannot import module" in refused(simulate(policy=name))


def test_standard_output_that_takes_nothing(place):
    done = subprocess.run(
        ["bash", "-c", 'exec "$@" 1</dev/null', "_", sys.executable, "-m", "slacktide", "policies", "--json"],
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.decode() == "slacktide: error: output: Bad file descriptor\n"


def test_a_directory_that_is_gone(place):
    gone = place / "gone"
    gone.mkdir()
    line = 'cd gone; rmdir ../gone; exec "$@"'
    command = ["simulate", "--trace", "azure-conv", "--num-prompts", "5", "--profile", "h100/llama-3-8b"]
    done = subprocess.run(
        ["bash", "-c", line, "_", sys.executable, "-m", "slacktide", *command, "--policy", "fcfs", "--out", "x"],
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1


def test_doctor_of_an_account_without_a_home(monkeypatch):
    def nobody():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    assert any(check.name == "numba cache" for check in checks())
