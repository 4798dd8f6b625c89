"""The goodput search: bisection, early stop, interval, special cases, resuming, and the verb."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slacktide.cli.main import main
from slacktide.core.latency import AffineModel
from slacktide.core.policies.vllm_v1 import VllmV1
from slacktide.core.spec import PolicySpec, parse_policies
from slacktide.errors import InputError
from slacktide.metrics.log import RunLog
from slacktide.metrics.slo import judge
from slacktide.search import goodput
from slacktide.search.evaluate import Evaluation, Task, certainly_missed, evaluate
from slacktide.search.goodput import Bracket, bisect, find_goodput
from slacktide.search.pool import Store, key_of, run_tasks
from slacktide.search.scenario import Scenario, prepare, run_policy
from slacktide.sim.engine import EngineConfig, simulate
from slacktide.workload.arrivals import Arrival, arrival_times
from slacktide.workload.requests import Workload

LATENCY = {"family": "affine", "alpha_p_ms": 5, "beta_p_ms": 0.05, "alpha_d_ms": 8, "beta_d_ms": 0.1}


def profile(folder: Path, **changes: Any) -> str:
    fields = {"num_gpu_blocks": 2001, "max_num_batched_tokens": 2048, "max_num_seqs": 16, "latency": LATENCY}
    path = folder / "engine.json"
    path.write_text(json.dumps(fields | changes))
    return str(path)


@pytest.fixture
def scenario(tmp_path: Path) -> Scenario:
    return Scenario("synthetic:prompt=200,output=30", profile(tmp_path), slo="ttft:300,tbt:40", num_prompts=200)


def policies(text: str = "vllm-v1") -> list[PolicySpec]:
    return parse_policies([text], {"max_num_seqs": int})


def without_times(value: Any) -> Any:
    """Records without what the wall clock decides."""
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if "wall_time" not in k and "decision" not in k}
    return [without_times(v) for v in value] if isinstance(value, list) else value


# ---- bisection ------------------------------------------------------------------------------------------------------


def answer(path: Any, met: Any) -> tuple[Bracket, list[float]]:
    asked = [next(path)]
    while True:
        try:
            asked.append(path.send(met(asked[-1])))
        except StopIteration as end:
            return end.value, asked


@given(
    limit=st.floats(0.002, 1e8), start=st.floats(0.01, 1e3), step=st.sampled_from([1.1, 2.0]),
    resolution=st.sampled_from([0.001, 0.02, 0.5]), probe=st.booleans(),
)  # fmt: skip
@settings(max_examples=200)
def test_bisection_brackets_the_limit(limit: float, start: float, step: float, resolution: float, probe: bool) -> None:
    lowest = start / 1024
    bracket, asked = answer(bisect(start, lowest, resolution, step=step, probe=probe), lambda rate: rate <= limit)
    if limit < lowest:
        assert bracket == Bracket(0.0, lowest)
    else:
        assert bracket.low <= limit < bracket.high <= bracket.low * (1 + resolution)
        assert bracket.low in asked
        assert bracket.high in asked
    assert len(asked) < 70


def test_everything_at_once_is_tried_before_a_rate_counts_as_unlimited() -> None:
    bracket, asked = answer(bisect(1.0, 0.001, 0.02), lambda rate: True)
    assert bracket.low == math.inf
    assert asked == [1, 2, 4, 8, math.inf]


def test_a_hint_needs_fewer_runs() -> None:
    _, cold = answer(bisect(1.0, 0.001, 0.02), lambda rate: rate <= 7.0)
    _, hinted = answer(bisect(7.2, 0.001, 0.02, step=1.1), lambda rate: rate <= 7.0)
    assert len(hinted) <= len(cold) - 3


def test_the_rate_of_a_single_server_is_that_of_lindleys_recursion(tmp_path: Path) -> None:
    """M/D/1 with 10 ms of service and 50 ms to the first token: waiting times in closed form, the rate scanned."""
    n, service, ttft = 2000, 0.010, 0.050
    engine = profile(tmp_path, max_num_seqs=1)
    scenario = Scenario("synthetic:prompt=100,output=1", engine, slo="ttft:50", num_prompts=n)
    record = find_goodput(scenario, policies(), seeds=1, resolution=0.002)[0]

    def attainment(rate: float) -> float:
        gaps = np.diff(arrival_times(Arrival("poisson", {}), n, rate, 0))
        wait, met = 0.0, 1
        for gap in gaps:
            wait = max(0.0, wait + service - gap)
            met += wait + service <= ttft
        return met / n

    scan = [rate for rate in 20 * 1.001 ** np.arange(1650) if attainment(rate) >= 0.99]
    assert scan[0] == 20
    assert len(scan) < 1650
    assert record["rate"] < scan[-1] * 1.001
    assert scan[-1] < record["rate_high"]
    assert record["rate_high"] / record["rate"] <= 1.002


# ---- verdicts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [
    {}, {"slo_mode": "gap"}, {"late_tolerance": 0.1}, {"slo": "ttft:300,e2el:900"}, {"slo": "tbt:12"},
    {"max_concurrency": 4}, {"arrival": "gamma:burstiness=0.3"}, {"engine": {"pipeline_depth": 2}},
    {"engine": {"num_gpu_blocks_override": 40}}, {"slo": "e2el:400", "slo_mode": "gap"},
], ids=str)  # fmt: skip
def test_early_stop_changes_no_verdict(scenario: Scenario, changes: dict[str, Any]) -> None:
    stopped = 0
    for spec in policies("vllm-v1,fcfs,sarathi-edf"):
        for rate in (10.0, 20.0, 30.0, 40.0, 80.0, math.inf):
            for target in (0.9, 0.99):
                asked = dataclasses.replace(scenario, rate=rate, **changes)
                early = evaluate(Task(asked, spec, target))
                whole = evaluate(Task(asked, spec, target, early_stop=False))
                assert (early.attainment >= target) == (whole.attainment >= target)
                assert early.attainment >= whole.attainment
                assert early.stopped or early.attainment == whole.attainment
                stopped += early.stopped
    assert stopped > 3


def test_a_target_that_is_just_met_does_not_stop(tmp_path: Path) -> None:
    """2 of 20 miss at once, 0.9 is wanted: 1 - 0.9 = 0.09999999999999998 must not make that too many."""
    rows = "".join(f"{i},10,2,{0.001 if i < 2 else 1e6}\n" for i in range(20))
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens,slo_ttft_ms\n" + rows)
    found = evaluate(Task(Scenario(str(trace), profile(tmp_path), rate=2.0), policies()[0], 0.9))
    assert (found.attainment, found.stopped) == (0.9, False)
    assert evaluate(Task(Scenario(str(trace), profile(tmp_path), rate=2.0), policies()[0], 0.91)).stopped


@given(seed=st.integers(0, 10_000), tolerated=st.sampled_from([0.0, 0.2]), mode=st.sampled_from(["deadline", "gap"]))
@settings(max_examples=40)
def test_what_is_certainly_missed_stays_missed(seed: int, tolerated: float, mode: str) -> None:
    """Over requests with any mix of targets, impatient clients and prompts that never fit."""
    rng = np.random.default_rng(seed)
    n = 60
    times = np.sort(rng.uniform(0, 1.5, n))

    def some(low: float, high: float) -> Any:
        return np.where(rng.random(n) < 0.6, rng.uniform(low, high, n), np.inf)

    load = Workload(
        times, rng.integers(1, 400, n), rng.integers(1, 30, n), slo_ttft=some(0.01, 0.5), slo_tbt=some(0.005, 0.03),
        slo_e2e=some(0.05, 1.0), abort_time=times + some(0.01, 1.0),
    )  # fmt: skip
    so_far: list[Any] = []

    def look(log: RunLog) -> bool:
        so_far.append(certainly_missed(log, mode, tolerated))
        return False

    config = EngineConfig(max_num_seqs=8, num_blocks=25, max_num_batched_tokens=256)
    model = AffineModel(0.005, 5e-5, 0.008, 1e-4)
    log = simulate(load, VllmV1(), model, config, stop=look).log
    final = judge(log, mode, tolerated).missed
    assert len(so_far) == 4
    for early in so_far:
        assert not (early & ~final).any()
    assert so_far[-1].sum() > 0


def test_an_evaluation_judges_as_a_whole_run_does(scenario: Scenario) -> None:
    for spec in policies("vllm-v1,vllm-v1:max_num_seqs=4"):
        asked = dataclasses.replace(scenario, rate=45.0)
        record, _ = run_policy(prepare(asked, spec.engine), spec)
        assert 0 < record["summary"]["attainment"] < 1
        assert evaluate(Task(asked, spec, 0.99, early_stop=False)).attainment == record["summary"]["attainment"]


# ---- interval and records -------------------------------------------------------------------------------------------


def test_interval_by_hand() -> None:
    """Lows 10, 11, 12: mean 11, sd 1, t(0.975, 2) = 4.302653; highs 0.2 above."""
    rate, low, high = goodput.interval([Bracket(10.0, 10.2), Bracket(11.0, 11.2), Bracket(12.0, 12.2)])
    half = 4.302653 / math.sqrt(3)
    assert rate == 11
    assert low == pytest.approx(11 - half, abs=1e-5)
    assert high == pytest.approx(11.2 + half, abs=1e-5)
    assert goodput.interval([Bracket(10.0, 10.2)]) == (10.0, 10.0, 10.2)
    assert goodput.interval([Bracket(0.0, 0.1)]) == (0.0, 0.0, 0.1)
    assert goodput.interval([Bracket(3.0, 3.1), Bracket(math.inf, math.inf)]) == (None, 3.0, None)
    assert goodput.interval([Bracket(0.1, 0.2), Bracket(9.0, 9.1)])[1] == 0


def test_records_of_several_policies(scenario: Scenario) -> None:
    records = find_goodput(scenario, policies("vllm-v1,vllm-v1:max_num_seqs=2"), jobs=1)
    both, narrow = records
    assert [record["label"] for record in records] == ["vllm-v1", "vllm-v1:max_num_seqs=2"]
    assert narrow["engine"]["max_num_seqs"] == 2
    assert narrow["rate"] < both["rate"]
    for record in records:
        assert record["rate_low"] <= record["rate"] < record["rate_high"]
        assert [seed["seed"] for seed in record["seeds"]] == [0, 1, 2]
        assert len({seed["rate"] for seed in record["seeds"]}) > 1  # other arrivals, other answers
        assert record["rate"] == pytest.approx(np.mean([seed["rate"] for seed in record["seeds"]]))
        assert record["notes"] == ["synthetic:prompt=200,output=30 has no arrival times: Poisson arrivals"]
        for seed in record["seeds"]:
            runs = [e for e in record["evaluations"] if e["seed"] == seed["seed"]]
            assert max(e["rate"] for e in runs if e["attainment"] >= 0.99) == seed["rate"]
            assert min(e["rate"] for e in runs if e["attainment"] < 0.99) == seed["rate_high"]
            assert seed["rate_high"] / seed["rate"] <= 1.02


def test_the_seed_moves_all_seeds(scenario: Scenario) -> None:
    first, second = (find_goodput(dataclasses.replace(scenario, seed=s), policies(), seeds=1)[0] for s in (0, 7))
    assert (first["seeds"][0]["seed"], second["seeds"][0]["seed"]) == (0, 7)
    assert first["rate"] != second["rate"]


def test_a_traces_own_times_are_replayed_from_other_points(tmp_path: Path) -> None:
    times = np.cumsum(np.random.default_rng(1).exponential(0.1, 150))
    rows = "".join(f"{t:.6f},200,30\n" for t in times)
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n" + rows)
    record = find_goodput(Scenario(str(trace), profile(tmp_path), slo="ttft:300,tbt:40"), policies(), seeds=4)[0]
    assert [seed["rotate"] for seed in record["seeds"]] == [0, 0.25, 0.5, 0.75]
    assert record["evaluations"][0]["rate"] == pytest.approx(149 / (times[-1] - times[0]), rel=1e-4)
    assert record["arrival"] == "trace"
    assert record["rate"] > 0


def test_rate_zero(scenario: Scenario) -> None:
    record = find_goodput(dataclasses.replace(scenario, slo="ttft:1"), policies())[0]
    assert (record["rate"], record["rate_low"]) == (0, 0)
    assert record["rate_high"] > 0
    assert len(record["seeds"]) == 1  # nobody needs the others
    assert "missed even at" in record["notes"][-1]


def test_not_limited_by_the_rate(scenario: Scenario) -> None:
    record = find_goodput(dataclasses.replace(scenario, slo="ttft:600000"), policies())[0]
    assert (record["rate"], record["rate_low"], record["rate_high"]) == (None, None, None)
    assert record["seeds"] == [{"seed": 0, "rotate": 0.0, "rate": None, "rate_high": None}]
    assert record["evaluations"][-1]["rate"] == math.inf
    assert "not limited by the rate" in record["notes"][-1]


def test_attainment_that_rises_again_is_noted(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(task: Task) -> Evaluation:
        rate = task.scenario.rate or 0.0
        return Evaluation(rate, 1.0 if rate <= 10 or 10.8 < rate < 11.25 else 0.5, False, 0.0)

    monkeypatch.setattr(goodput, "evaluate", fake)
    start = dataclasses.replace(scenario, rate=8.0)
    record = find_goodput(start, policies(), seeds=1)[0]
    assert record["rate"] == pytest.approx(10, rel=0.02)
    assert "does not fall steadily" in record["notes"][-1]
    monkeypatch.setattr(goodput, "evaluate", lambda task: Evaluation(r := task.scenario.rate, float(r <= 10), False, 0))
    assert "steadily" not in " ".join(find_goodput(start, policies(), seeds=1)[0]["notes"])


@pytest.mark.parametrize(("changes", "expected"), [
    ({"arrival": "closed:concurrency=4"}, "closed loop has no rate"),
    ({"arrival": "ramp:start=1,end=9"}, "ramp has its own rates"),
    ({"slo": None}, "--slo"),
    ({"num_prompts": 1}, "no rate to scale"),
    ({"profile": "h100/nothing"}, "unknown profile"),
    ({"engine": {"num_gpu_blocks_override": 5}}, "can never fit"),
])  # fmt: skip
def test_what_has_no_goodput(scenario: Scenario, changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        find_goodput(dataclasses.replace(scenario, **changes), policies())


@pytest.mark.parametrize("options", [{"target": 0.0}, {"target": 1.1}, {"seeds": 0}, {"resolution": 0.0}])
def test_options_out_of_range(scenario: Scenario, options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="expected"):
        find_goodput(scenario, policies(), **options)


# ---- processes and resuming -----------------------------------------------------------------------------------------


def test_jobs_change_nothing(scenario: Scenario) -> None:
    specs, done = policies("vllm-v1,fcfs"), []
    alone = find_goodput(scenario, specs, seeds=2)
    together = find_goodput(scenario, specs, seeds=2, jobs=2, on_done=done.append)
    assert without_times(alone) == without_times(together)
    assert sum(done) == 4


def test_resuming_runs_nothing_twice(scenario: Scenario, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, count = tmp_path / "evaluations.jsonl", 0
    original = evaluate

    def counted(task: Task) -> Evaluation:
        nonlocal count
        count += 1
        if count == 5:
            raise KeyboardInterrupt
        return original(task)

    monkeypatch.setattr(goodput, "evaluate", counted)
    with Store(path) as store, pytest.raises(KeyboardInterrupt):
        find_goodput(scenario, policies(), store=store)
    assert len(path.read_text().splitlines()) == 4
    with path.open("a") as file:
        file.write('{"key": "torn')
    with Store(path) as store:
        first = find_goodput(scenario, policies(), store=store)
        assert "line 5 was cut off" in store.notes[0]
    total = len(path.read_text().splitlines())
    assert total == len(first[0]["evaluations"]) == count - 1
    with Store(path) as store:
        assert find_goodput(scenario, policies(), store=store) == first
        assert store.notes == []
    assert count - 1 == total
    assert without_times(find_goodput(scenario, policies())) == without_times(first)


def test_a_spoilt_store_is_named(tmp_path: Path) -> None:
    path = tmp_path / "store.jsonl"
    for bad in ("nonsense", '{"no": "key"}', "[1]", "3"):
        path.write_text(f'{{"key": "a", "x": 1}}\n{bad}\n{{"key": "b"}}\n')
        with pytest.raises(InputError, match=r"store\.jsonl, line 2"):
            Store(path)


def test_two_runs_do_not_share_a_store(tmp_path: Path) -> None:
    with Store(tmp_path / "store.jsonl") as store:
        store.put("a", {"x": math.inf, "y": [math.nan, 1.5]})
        with pytest.raises(InputError, match="another run"):
            Store(tmp_path / "store.jsonl")
    with Store(tmp_path / "store.jsonl") as store:
        assert store.get("a") == {"x": "inf", "y": [None, 1.5]}
        assert store.get("b") is None


def test_a_store_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot write"):
        Store(tmp_path)


def test_keys_tell_runs_apart(scenario: Scenario, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,1,1\n")
    base, spec = dataclasses.replace(scenario, trace=str(trace), rate=2.0), policies()[0]
    keys = [key_of(base, spec, target=0.99), key_of(base, spec, target=0.9), key_of(base, policies("fcfs")[0])]
    keys.append(key_of(base, policies("vllm-v1:victim=tail")[0], target=0.99))
    keys.append(key_of(base, policies("vllm-v1:max_num_seqs=3")[0], target=0.99))
    changes: dict[str, Any] = {
        "rate": 2.1, "seed": 1, "rotate": 0.5, "slo": "ttft:1", "engine": {"max_num_seqs": 3}, "late_tolerance": 0.1,
    }  # fmt: skip
    keys += [key_of(dataclasses.replace(base, **{k: v}), spec, target=0.99) for k, v in changes.items()]
    other = tmp_path / "other"
    other.mkdir()
    (other / "trace.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,1,2\n")
    keys.append(key_of(dataclasses.replace(base, trace=str(other / "trace.csv")), spec, target=0.99))
    assert len(set(keys)) == len(keys)
    assert key_of(dataclasses.replace(base), spec, target=0.99) == keys[0]


def double(number: int) -> int:
    if number > 100:
        raise InputError("too large")
    return 2 * number


@pytest.mark.parametrize("jobs", [1, 2])
def test_tasks_may_lead_to_tasks(jobs: int) -> None:
    found: dict[str, int] = {}

    def then(key: str, result: int) -> list[tuple[str, int]]:
        found[key] = result
        return [(key + "+", result)] if result < 10 else []

    run_tasks(double, [("a", 1), ("b", 30), ("c", 4)], then, jobs)
    assert found == {"a": 2, "a+": 4, "a++": 8, "a+++": 16, "b": 60, "c": 8, "c+": 16}
    with pytest.raises(InputError, match="too large"):
        run_tasks(double, [("a", 101), ("b", 1)], then, jobs)


# ---- the verb -------------------------------------------------------------------------------------------------------


def arguments(scenario: Scenario, *more: str) -> list[str]:
    return ["goodput", "--trace", scenario.trace, "--num-prompts", "100", "--profile", scenario.profile, "--slo",
            "ttft:300,tbt:40", "--jobs", "1", "--seeds", "2", *more]  # fmt: skip


def test_the_verb(scenario: Scenario, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    command = arguments(scenario, "--policy", "vllm-v1,vllm-v1:max_num_seqs=1", "--out", str(out))
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "100 %" in text
    assert "vllm-v1:max_num_seqs=1" in text
    assert main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads((out / "goodput.json").read_text())
    assert {"rate", "rate_low", "rate_high", "label", "evaluations"} <= document["runs"][0].keys()
    lines = (out / "goodput-evaluations.jsonl").read_text().splitlines()
    assert len(lines) == sum(len(record["evaluations"]) for record in document["runs"])


def test_the_verb_says_unlimited_and_nothing_else(scenario: Scenario, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(scenario, "--policy", "vllm-v1", "--slo", "ttft:900000", "--json")) == 0
    record = json.loads(capsys.readouterr().out)["runs"][0]
    assert record["rate"] is None
    assert record["evaluations"][-1]["rate"] == "inf"
    assert main(arguments(scenario, "--policy", "vllm-v1", "--slo", "ttft:900000")) == 0
    assert "unlimited" in capsys.readouterr().out


@pytest.mark.parametrize("more", [["--arrival", "closed:concurrency=8"], ["--target", "0"], ["--rate", "3"]])
def test_the_verb_refuses(scenario: Scenario, more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(scenario, "--policy", "vllm-v1", *more)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "error" in error


def test_a_packaged_trace_and_profile() -> None:
    scenario = Scenario("azure-conv", "h100/llama-3-8b", slo="ttft:500,tbt:50", num_prompts=300)
    record = find_goodput(scenario, policies(), seeds=2)[0]
    assert record["profile_label"] == "composed"
    assert 5 < record["rate"] < 100
    assert record["rate_low"] <= record["rate"] <= record["rate_high"]
