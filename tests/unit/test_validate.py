"""Measured against simulated: the table, its bars, the ranking, and what every simulated result says of its worth."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from slacktide.cli import validate
from slacktide.cli.main import main
from slacktide.core.spec import parse_policies
from slacktide.errors import InputError
from slacktide.metrics.summary import summarize
from slacktide.profiling.profile_file import read_profile
from slacktide.profiling.validate import BARS, compare, in_words, parse_bars, ranking_kept, verdict
from slacktide.search.truth import steps_outside, twin, waiting_share
from slacktide.workload.requests import Workload

PROFILE = {
    "name": "toy",
    "label": "fitted",
    "num_gpu_blocks": 1001,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 16,
    "frontend_ms": 8.0,
    "latency": {"family": "affine", "alpha_p_ms": 20, "beta_p_ms": 0.1, "alpha_d_ms": 20, "beta_d_ms": 1},
    "errors": {"decode": {"median_percent": 1.25}, "mixed": {"median_percent": 4.0}},
    "measured": {
        "decode": {
            "num_tokens": [1, 16], "num_prefills": [0, 0], "prefill_tokens": [0, 0], "prefill_context": [0, 0],
            "num_decodes": [1, 16], "decode_context": [1, 8000],
        },
        "prefill": {
            "num_tokens": [1, 512], "num_prefills": [1, 16], "prefill_tokens": [1, 512], "prefill_context": [0, 4000],
            "num_decodes": [0, 0], "decode_context": [0, 0],
        },
    },
}  # fmt: skip


@pytest.fixture
def profile_path(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(PROFILE))
    return path


def work(n=60, rate=5.0, seed=0):
    rng = np.random.default_rng(seed)
    return Workload(
        arrival_time=np.cumsum(rng.exponential(1 / rate, n)),
        num_prompt_tokens=rng.integers(20, 300, n),
        num_output_tokens=rng.integers(3, 30, n),
        slo_ttft=np.full(n, 1.0),
        slo_tbt=np.full(n, 0.1),
    )


def spec(text="vllm-v1"):
    return parse_policies([text])[0]


# ---- the table -------------------------------------------------------------------------------------------------------


def runs(**figures):
    return [{name: values[i] for name, values in figures.items()} for i in range(len(next(iter(figures.values()))))]


def test_errors_are_judged_by_bar_or_spread():
    measured = runs(request_throughput=[1.0, 1.0], p50_ttft_ms=[100.0, 140.0], attainment=[0.9, 0.9])
    simulated = {"request_throughput": 1.04, "p50_ttft_ms": 150.0, "attainment": 0.86}
    rows = {row.figure: row for row in compare(measured, simulated, BARS)}
    assert rows["request_throughput"].met
    assert rows["request_throughput"].error == pytest.approx(0.04)
    assert rows["p50_ttft_ms"].met  # 25 % off, but the real runs differ by 40 ms
    assert rows["attainment"].met is False
    assert rows["attainment"].error == pytest.approx(-0.04)
    assert rows["num_steps"].met is None
    assert not verdict(list(rows.values()))
    assert verdict([row for row in rows.values() if row.figure != "attainment"])


def test_nothing_to_judge_is_not_a_success():
    assert not verdict(compare([{}], {}, BARS))
    with pytest.raises(ValueError, match="at least one measured run"):
        compare([], {}, BARS)


def test_words_name_figures_and_errors():
    rows = compare(
        runs(request_throughput=[1.0], attainment=[0.9]), {"request_throughput": 1.02, "attainment": 0.88}, BARS
    )
    said = in_words(rows, "trace at 2 requests/s, vllm-v1", 1)
    assert said == "trace at 2 requests/s, vllm-v1, 1 real run: requests/s +2.0 %, attainment -2.0 points"


def test_bars_from_the_command_line():
    assert parse_bars([])["mean_tpot_ms"] == 0.05
    changed = parse_bars(["p50_ttft_ms=0.5", "attainment=none"])
    assert changed["p50_ttft_ms"] == 0.5
    assert "attainment" not in changed
    for text, message in (
        ("p50=1", "unknown figure"),
        ("p50_ttft_ms", "expected FIGURE"),
        ("p50_ttft_ms=-1", "FIGURE"),
    ):
        with pytest.raises(InputError, match=message):
            parse_bars([text])


def test_a_ranking_is_wrong_only_where_reality_is_sure():
    measured = {"a": [0.9, 0.92], "b": [0.8, 0.81], "c": [0.795, 0.805]}
    assert ranking_kept(measured, {"a": 0.9, "b": 0.7, "c": 0.75}) == (True, [])
    assert ranking_kept(measured, {"a": 0.6, "b": 0.7, "c": 0.5}) == (False, [("a", "b")])


# ---- the twin --------------------------------------------------------------------------------------------------------


def test_the_front_end_is_in_latencies_and_in_no_step(profile_path):
    profile = read_profile(profile_path)
    near = read_profile(_changed(profile_path, frontend_ms=0.0))
    far, here = twin(work(rate=0.5), profile, spec()), twin(work(rate=0.5), near, spec())
    assert far.arrival_time == pytest.approx(work(rate=0.5).arrival_time)
    waited = far.first_token_time - far.arrival_time - (here.first_token_time - here.arrival_time)
    assert np.median(waited) == pytest.approx(0.008)
    assert far.num_steps == here.num_steps


def _changed(path, **fields):
    other = path.with_name("other.json")
    other.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return other


def test_steps_outside_are_those_that_nobody_measured(profile_path):
    profile = read_profile(profile_path)
    log = twin(work(), profile, spec())
    mixed = (log.num_prefills > 0) & (log.num_decodes > 0)
    assert steps_outside(profile, log) == pytest.approx(mixed.mean())  # no mixed step was measured
    free = read_profile(_changed(profile_path, measured={}))
    assert steps_outside(free, log) == 1.0


def test_an_overlapped_engine_is_simulated_as_one(profile_path):
    from slacktide.search.scenario import Scenario, prepare

    path = str(_changed(profile_path, pipeline_depth=2))
    scenario = Scenario("azure-conv", path, num_prompts=20)
    assert prepare(scenario).config.pipeline_depth == 2
    assert prepare(scenario, {"pipeline_depth": 1}).config.pipeline_depth == 1


def test_waiting_grows_with_the_load(profile_path):
    profile = read_profile(profile_path)
    low = waiting_share(twin(work(rate=0.5), profile, spec()))
    high = waiting_share(twin(work(300, rate=60.0), profile, spec()))
    assert low < 0.1
    assert high > 0.5


# ---- the verb --------------------------------------------------------------------------------------------------------


def args(path, **more):
    given = {
        "profile": str(path), "slo": "ttft:1000,tbt:100", "slo_mode": "deadline", "late_tolerance": 0.0, "seed": 0,
    }  # fmt: skip
    return SimpleNamespace(**(given | more))


def test_a_prophecy_of_itself_is_perfect(profile_path):
    profile = read_profile(profile_path)
    log = twin(work(), profile, spec())
    found = validate.judge_runs(args(profile_path), work(), profile, spec(), [(summarize(log), log)] * 2, dict(BARS))
    assert found["value"]["ok"]
    assert all(row.error == 0 for row in found["rows"] if row.error is not None)
    slower = read_profile(_changed(profile_path, latency=PROFILE["latency"] | {"alpha_p_ms": 60, "alpha_d_ms": 60}))
    found = validate.judge_runs(args(profile_path), work(), slower, spec(), [(summarize(log), log)] * 2, dict(BARS))
    assert not found["value"]["ok"]


def test_the_verb_end_to_end_on_a_server_that_is_the_simulator(profile_path, tmp_path, capsys, monkeypatch):
    profile = read_profile(profile_path)

    seeds = []

    def one_run(requests, target, step_log, seed, given, advance=None):
        seeds.append(seed)
        log = twin(requests, profile, spec())
        return summarize(log) | {"num_steps": log.num_steps, "num_preemptions": 0}, log

    monkeypatch.setattr(validate, "one_run", one_run)
    monkeypatch.setattr(validate, "PAUSE", 0.0)
    monkeypatch.setattr(validate, "_check_engine", lambda target, profile: [])
    monkeypatch.setattr("slacktide.cli.bench.fitting", lambda args, workload, target: workload)
    command = [
        "validate", "--url", "http://127.0.0.1:1", "--profile", str(profile_path), "--trace", "azure-conv",
        "--num-prompts", "40", "--rate", "4", "--length-scale", "0.1", "--policy", "vllm-v1", "--slo",
        "ttft:1000,tbt:100", "--repeats", "2", "--out", str(tmp_path / "out"), "--update-profile",
    ]  # fmt: skip
    assert main(command) == 0
    assert seeds == [0, 1]  # the second run's prompts are not in the server's prefix cache
    said = " ".join(capsys.readouterr().out.split())
    assert "within the bars" in said
    assert "profile: toy [fitted]; step times off by decode 1.2 %, mixed 4.0 %; not validated" in said
    assert (tmp_path / "out" / "validation.json").exists()
    assert (tmp_path / "out" / "validation.png").stat().st_size > 10_000
    noted = read_profile(profile_path)
    assert "azure-conv" in noted.validation
    assert "+0.0 %" in noted.validation
    run = ["simulate", "--trace", "azure-conv", "--num-prompts", "30", "--profile", str(profile_path)]
    assert main([*run, "--policy", "vllm-v1", "--rate", "60"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "simulated against measured: azure-conv" in said
    assert "near saturation" in said
    monkeypatch.setattr(
        validate, "one_run", lambda *a, **k: (one_run(*a)[0] | {"p50_ttft_ms": 1.0, "request_throughput": 99.0}, None)
    )
    assert main(command[:-3]) == 1


def test_prompts_that_the_server_has_seen_before_are_no_run(profile_path):
    log = twin(work(), read_profile(profile_path), spec())
    whole = int(work().num_prompt_tokens.sum())
    validate._check_computed(work(), log, [{"prefill_tokens": whole - 100}, {"prefill_tokens": 100}])
    with pytest.raises(InputError, match=r"seen these prompts before\. Use another --seed"):
        validate._check_computed(work(), log, [{"prefill_tokens": whole // 2}, {}])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--policy", "vllm-v1"], "expected either MODEL"),
        (["--url", "http://x", "--policy", "vllm-v1,eb"], "found 2 policies"),
        (["--url", "http://x", "--policy", "vllm-v1", "--bar", "x=1"], "unknown figure"),
    ],
)
def test_bad_input_is_one_line(profile_path, capsys, change, message):
    assert main(["validate", "--profile", str(profile_path), "--trace", "azure-conv", *change]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_packaged_profiles_cannot_be_updated(capsys):
    command = ["validate", "--url", "http://x", "--profile", "h100/llama-3-8b", "--trace", "azure-conv"]
    assert main([*command, "--policy", "vllm-v1", "--update-profile"]) == 2
    assert "is packaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("frontend_ms", -1, "field frontend_ms: found -1"),
        ("pipeline_depth", 3, "field pipeline_depth: found 3, expected a whole number from 1 to 2"),
        ("measured", {"decoding": {}}, "unknown scene 'decoding'"),
        ("measured", {"decode": {"num_tokens": [2, 1]}}, "expected .least, most."),
        ("measured", {"decode": {"num_tokens": [1, 2]}}, "found no "),
        ("errors", {"decode": {"median_percent": "x"}}, "errors.decode.median_percent: found 'x'"),
        ("validation", {"text": 3}, "field validation: field text: found 3"),
        ("latency", {"family": "extended-feature", "knots": 3}, "field knots: found 3"),
        ("latency", {"family": "tables", "base": "nothing"}, "field dense: found nothing, expected a factor above 0"),
        ("latency", {"family": "roofline"}, "field fixed_ms: found nothing"),
    ],
)
def test_a_bad_field_of_a_profile_is_named(profile_path, field, value, message):
    with pytest.raises(InputError, match=message):
        read_profile(_changed(profile_path, **{field: value}))


def test_goodput_tells_what_share_of_its_steps_nobody_measured(profile_path, capsys):
    line = ["goodput", "--profile", str(profile_path), "--trace", "azure-conv", "--num-prompts", "30", "--seeds", "1"]
    line += ["--policy", "vllm-v1", "--slo", "ttft:2000,tbt:200", "--resolution", "0.2", "--jobs", "1"]
    assert main([*line, "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)["runs"]
    shares = [run["steps_outside"] for run in record["evaluations"]]
    assert 0 < record["steps_outside"] <= max(shares) <= 1
    assert any("beyond what the profile was measured on" in note for note in record["notes"])
    assert main(line) == 0
    assert "beyond what the profile was measured on" in capsys.readouterr().out
