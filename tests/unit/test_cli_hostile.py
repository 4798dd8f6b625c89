"""The command line under bad flags, bad surroundings and extreme loads: one line and status 2, or the right numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slacktide.cli import scenario as cli_scenario
from slacktide.cli.main import main
from slacktide.core.policy import names
from slacktide.search import scenario as search_scenario

PROFILE = "h100/llama-3-8b"
COMMAND = [sys.executable, "-m", "slacktide"]


def table(n=12, prompt=lambda i: 100 + 10 * i, output=lambda i: 5 + i % 3, gap=0.1, abort=None):
    """A trace of ours as CSV text."""
    head = "arrival_s,prompt_tokens,output_tokens,slo_class" + ("" if abort is None else ",abort_s")
    rows = [
        f"{i * gap:.9f},{prompt(i)},{output(i)},{'ab'[i % 2]}" + ("" if abort is None else f",{i * gap + abort(i):.9f}")
        for i in range(n)
    ]
    return "\n".join([head, *rows, ""])


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(table())
    return path


@pytest.fixture
def run(capsys, trace):
    """Run a verb on the trace; returns (status, standard output, standard error)."""

    def call(*arguments, verb="simulate", policy="vllm-v1"):
        given = [verb, "--trace", str(trace), "--profile", PROFILE, "--policy", policy, *map(str, arguments)]
        return main(given), *capsys.readouterr()

    return call


def refused(answer):
    """The one line of a refusal."""
    status, out, err = answer
    assert status == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("slacktide")
    return err


# ---- flags -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--slo", "ttft:0"], "expected more than 0"),
        (["--slo", "ttft:-1"], "expected more than 0"),
        (["--slo", "ttft:nan"], "expected milliseconds"),
        (["--slo", "ttft:1e300"], "at most 1e+09 ms"),
        (["--slo", "ttft:2m"], "a unit (2s)"),
        (["--slo", "ttfd:5"], "did you mean ttft"),
        (["--slo", "tbt:5x"], "only ttft"),
        (["--slo", "chats"], "did you mean chat"),
        (["--slo", "c=ttft:5"], "unknown SLO class 'c': known: a, b"),
        (["--slo", ""], "SLO is empty"),
        (["--rate", "0"], "expected a number above 0"),
        (["--rate", "-1"], "expected a number above 0"),
        (["--rate", "nan"], "expected a number"),
        (["--rate", "1e300"], "at most 1e+09"),
        (["--num-prompts", "13"], "has only 12 requests, 13 are wanted"),
        (["--max-num-seqs", "0"], "at least 1"),
        (["--block-size", "0"], "at least 1"),
        (["--pipeline-depth", "3"], "expected 1 or 2"),
        (["--watermark", "1"], "below 1"),
        (["--interference", "1e300"], "from 1 to 1000"),
        (["--num-gpu-blocks-override", "100000000000000"], "at most 50,000,000 KV blocks"),
        (["--num-gpu-blocks-override", "10"], "request 4 (in order of arrival) can never fit"),
        (["--max-model-len", "1", "--oversized", "drop"], "can never fit"),
        (["--max-tokens", "0"], "expected 1 to"),
        (["--arrival", "poison"], "did you mean poisson"),
        (["--arrival", "closed:concurrency=0"], "from 1 to 1,000,000"),
        (["--arrival", "closed:concurrency=2", "--rate", "5"], "leave --rate out"),
        (["--arrival", "closed:concurrency=2", "--burstiness", "5"], "--burstiness goes with gamma"),
        (["--profile", "h100/llama-3-8"], "did you mean h100/llama-3-8b"),
        (["--trace", "azure-con"], "did you mean azure-conv"),
        (["--policy", "vlm-v1"], "--policy names 2 policies"),
        (["--out", ""], "write . for the current directory"),
        (["--max-num-seq", "3"], "did you mean --max-num-seqs"),
    ],
)
def test_flags_out_of_range_or_misspelt(run, arguments, part):
    if arguments[0] == "--policy":  # two --policy are two policies
        assert "did you mean vllm-v1" in refused(run(*arguments))
        return
    assert part in refused(run(*arguments))


@pytest.mark.parametrize(
    ("policy", "part"),
    [
        ("", "an empty item"),
        ("vllm", "did you mean vllm-v1"),
        ("vllm-v1,", "an empty item"),
        ("vllm-v1:max_num_batched_token=5", "did you mean max_num_batched_tokens"),
        ("vllm-v1:watermark=2", "expected a share"),
        ("vllm-v1:victim=x", "expected tail or priority"),
        ("vllm-v1:max_num_seqs=0", "at least 1"),
        ("sarathi:chunk_size=0", "expected at least 1"),
        ("sarathi:chunk_size=nan", "expected a whole number"),
        ("os:path", "expected a class with a method"),
        ("no.such:Policy", "cannot import module"),
    ],
)
def test_policies_out_of_range_or_misspelt(run, policy, part):
    assert part in refused(run(policy=policy))


@pytest.mark.parametrize(
    ("vary", "part"),
    [
        ("", "expected NAME="),
        ("rate=", "expected NAME="),
        ("rate=0", "above 0"),
        ("rate=1,1", "given twice"),
        ("rate=5:1:1", "that rises"),
        ("rate=1:1e9:1e-9", "more than 10,000 values"),
        ("rate=1..8*1", "a factor above 1"),
        ("fcfs.watermark=0", "it must be one of --policy"),
        ("sead=1", "did you mean seed"),
        ("slo=ttft:0", "all 1 runs failed"),
        ("profile=nope", "unknown profile"),
    ],
)
def test_nonsense_to_vary(run, vary, part):
    assert part in refused(run("--vary", vary, "--jobs", 1, verb="sweep"))


def test_burstiness_alone_means_gamma(run):
    answers = [run("--burstiness", "0.5", "--json"), run("--arrival", "gamma:burstiness=0.5", "--json")]
    first, second = (json.loads(out) for _, out, _ in answers)
    assert first["summary"]["mean_ttft_ms"] == second["summary"]["mean_ttft_ms"]
    assert first["arrival"] == second["arrival"] == "gamma:burstiness=0.5"
    assert run("--vary", "burstiness=0.5,2", "--jobs", 1, verb="sweep")[0] == 0


@pytest.mark.parametrize("size", [7, 100_000])
def test_hash_blocks_that_kv_blocks_do_not_divide(run, size):
    arguments = ["--trace", "mooncake-conversation", "--num-prompts", 20, "--block-size", size]
    told = refused(run(*arguments))
    assert "512 tokens" in told
    assert f"KV blocks of {size} do not divide" in told
    assert run(*arguments, "--no-enable-prefix-caching")[0] == 0
    assert run("--block-size", size)[0] == 0  # a trace without hash ids has no such bounds


@pytest.mark.parametrize("oversized", ["drop", "reject"])
def test_prompts_that_never_fit_are_counted(run, oversized):
    arguments = ["--num-gpu-blocks-override", 10, "--oversized", oversized, "--slo", "ttft:9999", "--json"]
    record = json.loads(run(*arguments)[1])
    summary = record["summary"]
    if oversized == "drop":
        assert (record["num_prompts"], summary["attainment"]) == (4, 1.0)
        assert any("8 of 12 requests can never fit" in note for note in record["notes"])
    else:
        assert (record["num_prompts"], summary["attainment"]) == (12, pytest.approx(4 / 12))
        assert summary["end_reasons"]["rejected"] == 8


# ---- results ---------------------------------------------------------------------------------------------------------


def test_json_is_all_there_is_on_standard_output(run, trace, tmp_path):
    trace.write_text(table().replace("0.000000000,", "0.95,", 1))  # out of order: a note
    for verb in ("simulate", "compare"):
        status, out, err = run("--json", "--out", tmp_path / verb, verb=verb)
        assert (status, err) == (0, "")
        record = json.loads(out)
        assert "earlier than a row before" in (record if verb == "simulate" else record["runs"][0])["notes"][0]


def test_save_detailed_reaches_json_as_well(run, tmp_path):
    status, out, _ = run("--json", "--save-detailed", verb="compare", policy="vllm-v1,fcfs")
    assert status == 0
    for record in json.loads(out)["runs"]:
        assert record["output_lens"] == [5 + i % 3 for i in range(12)]
    assert "ttfts" not in json.loads(run("--json")[1])


def test_labels_of_any_length_and_twice(run, tmp_path):
    long = "vllm-v1:max_num_batched_tokens=8192,long_prefill_token_threshold=0,prefill_schedule_interval=1,watermark=0"
    long += ",scheduler_reserve_full_isl=true,scheduling_policy=fcfs,victim=tail,max_num_seqs=256,max_model_len=100000"
    twice = f"{long},block_size=16", f"{long},block_size=32"
    status, out, _ = run("--out", tmp_path, "--json", verb="compare", policy=",".join([*twice, "fcfs,fcfs"]))
    assert status == 0
    found = [json.loads(path.read_text())["label"] for path in tmp_path.glob("*/summary.json")]
    assert sorted(found) == sorted(record["label"] for record in json.loads(out)["runs"])
    assert all(len(path.name) < 200 for path in tmp_path.iterdir())


def test_directories_never_share_a_name():
    labels = ["a:b=1", "a_b=1", "A_B=1", "x" * 300, "x" * 301]
    found = cli_scenario.directories(labels)
    assert len({name.casefold() for name in found}) == len(labels)
    assert found[0] == "a_b=1"


def test_a_refused_comparison_leaves_the_older_one_alone(run, trace, tmp_path):
    out = tmp_path / "out"
    assert run("--out", out, verb="compare")[0] == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    refused(run("--out", out, "--rate", "1e-300", verb="compare"))
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_an_interrupted_comparison_does_not_look_complete(run, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert run("--out", out, verb="compare", policy="fcfs,vllm-v1")[0] == 0
    once = search_scenario.run_policy

    def interrupted(setup, spec, **more):
        if spec.name == "vllm-v1":
            raise KeyboardInterrupt
        return once(setup, spec, **more)

    monkeypatch.setattr(search_scenario, "run_policy", interrupted)
    status, printed, _ = run("--out", out, "--json", verb="compare", policy="fcfs,vllm-v1")
    assert (status, printed) == (130, "")
    assert not (out / "compare.json").exists()


def test_report_judges_anew_by_mode_and_tolerance(run, capsys, tmp_path):
    assert run("--out", tmp_path / "run", "--slo", "ttft:1000,tbt:7.1", "--slo-mode", "deadline")[0] == 0

    def met(*arguments):
        assert main(["report", str(tmp_path / "run"), "--json", *arguments]) == 0
        summary = json.loads(capsys.readouterr().out)["runs"][0]["summary"]
        return summary["slo_mode"], summary["tolerated_late_share"], summary["attainment"]

    assert met() == ("deadline", 0.0, 1.0)
    mode, share, attainment = met("--slo-mode", "gap")
    assert (mode, share) == ("gap", 0.0)
    assert attainment < 1.0  # steps with a prompt are longer; a deadline forgives what went fast before
    assert met("--late-tolerance", "0.5")[1] == 0.5


def test_report_of_results_that_do_not_belong_together(run, capsys, tmp_path):
    import pyarrow.parquet as pq

    assert run("--out", tmp_path / "run")[0] == 0
    requests = tmp_path / "run" / "requests.parquet"
    pq.write_table(pq.read_table(requests).slice(0, 3), requests)
    assert main(["report", str(tmp_path / "run")]) == 2
    assert "3 requests, summary.json has 12; the files are of two runs" in capsys.readouterr().err
    assert main(["report", ""]) == 2
    assert "expected a path" in capsys.readouterr().err


def test_out_whose_name_looks_like_a_remote_store(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("--out", "s3:bucket")[0] == 0
    assert sorted(path.name for path in (tmp_path / "s3:bucket").iterdir()) == [
        "requests.parquet", "steps.parquet", "summary.json",
    ]  # fmt: skip
    assert main(["report", "s3:bucket"]) == 0


# ---- surroundings ----------------------------------------------------------------------------------------------------


def shell(arguments, redirect="", env=None, python=()):
    """Run the command in a process of its own; `redirect` is shell syntax."""
    return subprocess.run(
        ["bash", "-c", f'exec "$@" {redirect}', "_", sys.executable, *python, "-m", "slacktide", *arguments],
        capture_output=True, check=False, env=os.environ | (env or {}),
    )  # fmt: skip


def test_closed_streams():
    assert shell(["policies"], ">&-").returncode == 0
    done = shell(["profiles", "absent"], "2>&-")
    assert (done.returncode, done.stdout) == (2, b"")  # what should go to standard error goes nowhere else


def test_a_full_disk_behind_standard_output():
    done = shell(["policies", "--json"], "> /dev/full")
    assert done.returncode == 2
    assert done.stderr.decode() == "slacktide: error: output: No space left on device\n"


def test_standard_output_without_unicode(tmp_path):
    ascii_only = {"PYTHONIOENCODING": "ascii"}
    for verb in ("policies", "traces"):
        done = shell([verb], env=ascii_only)
        assert done.returncode == 0, done.stderr
        assert done.stdout.isascii()
    result = tmp_path / "ü.json"
    result.write_text(json.dumps({"label": "ü", "summary": {"attainment": 0.5}}), encoding="utf-8")
    done = shell(["report", str(result), "--json"], env=ascii_only)
    assert json.loads(done.stdout)["runs"][0]["label"] == "ü"


def test_a_name_that_is_not_utf8(capsys):
    assert main(["report", "a\udce9.json"]) == 2
    assert "argument a\\udce9.json: not UTF-8; rename" in capsys.readouterr().err


def test_kernels_without_a_place_for_their_machine_code(monkeypatch):
    import numba

    from slacktide.core import kernels

    compile_ = numba.njit

    def nowhere_to_write(**options):
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return compile_(**options)

    monkeypatch.setattr(numba, "njit", nowhere_to_write)
    twice = kernels.compiled(lambda x: 2 * x)
    assert twice(21) == 42
    assert twice.py_func(21) == 42


def test_worker_processes_that_cannot_start(run, monkeypatch):
    from slacktide.search import pool

    def broken(*_):
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(pool, "_submit", broken)
    told = refused(run("--vary", "rate=1,2", "--jobs", 2, verb="sweep"))
    assert "use fewer processes (--jobs)" in told


def test_optimised_python_from_another_directory(trace, tmp_path):
    code = "import sys; from slacktide.cli.main import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["simulate", "--trace", str(trace), "--profile", PROFILE, "--policy", "vllm-v1", "--json"]
    done = subprocess.run(
        [sys.executable, "-O", "-c", code, *arguments], capture_output=True, check=False, cwd=Path(tmp_path.root)
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["summary"]["completed"] == 12


# ---- extreme loads ---------------------------------------------------------------------------------------------------

LOADS = {
    "one": (table(1), []),
    "one token each": (table(30, lambda _: 1, lambda _: 1, 0.001), []),
    "all at once": (table(40, lambda i: 1 + 37 * i % 800, lambda i: 1 + 7 * i % 60, 0.0), []),
    "a million a second": (table(60, gap=1e-6), []),
    "one in a million seconds": (table(4, gap=1e6), []),
    "prompts of one token": (table(30, lambda _: 1, lambda i: 1 + i, 0.01), []),
    "outputs of one token": (table(30, lambda i: 1 + 31 * i, lambda _: 1, 0.01), []),
    "100,000 tokens": (table(2, lambda _: 100_000), []),
    "memory for one": (table(8, lambda _: 160, lambda _: 17, 0.01), ["--num-gpu-blocks-override", "12"]),
    "memory for few": (
        table(20, lambda i: 1 + 29 * i % 100, lambda i: 1 + 13 * i % 60, 0.01), ["--num-gpu-blocks-override", "13"],
    ),
    "one token a step": (table(5, lambda i: 3 + i, lambda i: 1 + i, 0.01), ["--max-num-batched-tokens", "1"]),
    "one seat": (table(8, gap=0.01), ["--max-num-seqs", "1"]),
    "blocks of one token": (table(10, gap=0.001), ["--block-size", "1", "--num-gpu-blocks-override", "260"]),
    "more users than requests": (table(), ["--arrival", "closed:concurrency=100,think=0"]),
    "few users": (table(), ["--arrival", "closed:concurrency=3,think=0", "--max-concurrency", "2"]),
    "gone on arrival": (table(10, abort=lambda _: 0.0), []),
    "impatient": (
        table(20, lambda i: 1 + 97 * i, lambda i: 1 + 11 * i, 0.01, abort=lambda i: (1e-9, 0.005, 0.1, 5.0)[i % 4]),
        ["--num-gpu-blocks-override", "300"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", LOADS)
@pytest.mark.parametrize("depth", [1, 2])
def test_extreme_loads_under_every_policy(run, trace, kind, depth):
    content, arguments = LOADS[kind]
    trace.write_text(content)
    aborts = "abort_s" in content
    status, out, err = run(
        *arguments, "--pipeline-depth", depth, "--slo", "ttft:200,tbt:30", "--json", "--save-detailed",
        verb="compare", policy="all",
    )  # fmt: skip
    assert (status, err) == (0, "")
    records = json.loads(out)["runs"]
    assert {record["policy"] for record in records} <= set(names())
    wanted = [int(row.split(",")[2]) for row in content.splitlines()[1:]]
    for record in records:
        n, s = record["num_prompts"], record["summary"]
        tokens = record["output_lens"]
        ends = {reason: count for reason, count in s["end_reasons"].items() if count}
        assert sum(ends.values()) == n
        assert set(ends) <= ({"finished", "aborted"} if aborts else {"finished"})
        if not aborts:
            assert sorted(tokens) == sorted(wanted)
            needed = sum(record["input_lens"]) + sum(tokens) - n
            # Depth 2 decides a step before the one before it ends: a request may be given one token after its last.
            beyond = n if depth == 2 else 0
            assert needed <= s["scheduled_tokens"] <= needed + s["recomputed_tokens"] + beyond
        assert sum(len(gaps) + 1 for gaps, count in zip(record["itls"], tokens, strict=True) if count) == sum(tokens)
        assert min((gap for gaps in record["itls"] for gap in gaps), default=0.0) >= 0
        judged = n - s["excluded"]
        assert (s["attainment"] is None) == (judged == 0)
        if judged:
            assert s["attainment"] * judged == pytest.approx(round(s["attainment"] * judged))
        if s["duration"]:
            assert s["request_throughput"] == pytest.approx(s["completed"] / s["duration"])
            assert s["output_throughput"] * s["duration"] == pytest.approx(s["total_output_tokens"])
        assert s["mean_in_system"] == pytest.approx(s["littles_law"], rel=1e-9, abs=1e-9)
        if kind == "one token a step":
            assert s["scheduled_tokens"] <= s["num_steps"]
