"""Traces keep to the format, hold everything that happened, and stay bounded."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slacktide.cli.main import main
from slacktide.errors import InputError
from slacktide.metrics.slo import judge
from slacktide.report import timeline as module
from slacktide.report.files import write_run
from slacktide.report.steplog import read_step_log, step_log_timeline
from slacktide.report.timeline import spans, step_slack, timeline, write_timeline

from .looks import check_trace, overloaded


def events(trace: dict[str, Any], phase: str, process: int) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase and event["pid"] == process]


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize(("policy", "depth"), [("vllm-v1", 1), ("sliding", 1), ("vllm-v1", 2)])
def test_a_trace_holds_the_run(policy: str, depth: int, recorded: bool) -> None:
    _, log, decisions = overloaded(policy, depth=depth)
    assert log.num_preemptions.sum() > 0
    trace, told = timeline(log, policy, decisions if recorded else None)
    json.dumps(trace, allow_nan=False)
    check_trace(trace)
    assert told.startswith(f"{log.num_steps:,} of {log.num_steps:,} steps and 60 of 60 requests")
    steps = events(trace, "X", 1)
    assert len(steps) == log.num_steps
    assert {event["name"] for event in steps} == {"decode", "prefill", "mixed"}
    modes = log.num_prefills == 0
    assert sum(event["name"] == "decode" for event in steps) == modes.sum()
    assert [event["args"]["prefill_tokens"] for event in steps] == log.num_prefill_tokens.tolist()
    assert {event["name"] for event in events(trace, "C", 1)} >= {"KV blocks", "queue"}
    threads = [event for event in events(trace, "M", 2) if event["name"] == "thread_name"]
    assert len(threads) == log.n
    assert [event["name"] for event in events(trace, "i", 2)] == ["rejected"]
    if recorded:
        chunks = [event for event in events(trace, "X", 2) if event["name"] == "prefill"]
        assert sum(event["args"]["tokens"] for event in chunks) == decisions.chunk_tokens.sum()
        preempted = [event for event in events(trace, "X", 2) if event["name"] == "preempted"]
        assert preempted
    if policy == "sliding" and recorded:
        assert any("why" in event["args"] for event in steps)


PROCESS = {"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "ts": 0, "args": {"name": "p"}}
THREAD = {"name": "thread_name", "ph": "M", "pid": 1, "tid": 1, "ts": 0, "args": {"name": "t"}}


def made(*events: dict[str, Any], names: bool = True) -> dict[str, Any]:
    whole = [{"name": "a", "pid": 1, "tid": 1, "ts": 0, "args": {}} | event for event in events]
    return {"traceEvents": ([PROCESS, THREAD] if names else []) + whole, "displayTimeUnit": "ms", "otherData": {}}


def test_what_the_checker_of_traces_lets_pass() -> None:
    check_trace(made({"ph": "X", "dur": 9}, {"ph": "X", "dur": 4.001}, {"ph": "X", "ts": 4.001, "dur": 4.999}))
    check_trace(
        made({"ph": "B"}, {"ph": "B", "name": "b", "ts": 1}, {"ph": "E", "name": "b", "ts": 2}, {"ph": "E", "ts": 3})
    )
    check_trace(made({"ph": "C", "args": {"x": 1}}, {"ph": "C", "ts": 1, "args": {"x": 2.5}}))
    check_trace(made({"ph": "X", "dur": 9}, {"ph": "s", "id": 7}, {"ph": "f", "id": 7, "ts": 3, "bp": "e"}))


@pytest.mark.parametrize(
    "trace",
    [
        made({"ph": "Z"}),
        made({"ph": "X"}),  # no length
        made({"ph": "X", "dur": -1}),
        made({"ph": "X", "dur": "3"}),
        made({"ph": "X", "dur": 1, "ts": float("nan")}),
        made({"ph": "X", "dur": 1, "ts": 0.0004}),  # below a nanosecond
        made({"ph": "X", "dur": 1, "pid": "1"}),
        made({"ph": "X", "dur": 1, "name": ""}),
        made({"ph": "X", "dur": 1, "cname": "pink"}),
        made({"ph": "X", "dur": 1, "ts": 5}, {"ph": "X", "dur": 1, "ts": 3}),  # out of order
        made({"ph": "X", "dur": 5}, {"ph": "X", "dur": 5, "ts": 4.999}),  # overlap by a nanosecond
        made({"ph": "X", "dur": 1}, names=False),
        made({"ph": "X", "dur": 1, "tid": 2}),  # a thread without a name
        made(THREAD),  # said twice
        made({"ph": "M", "name": "thread_name", "tid": 2, "args": {}}),
        made({"ph": "B"}),  # no end
        made({"ph": "E"}),  # no begin
        made({"ph": "B"}, {"ph": "E", "name": "b", "ts": 1}),
        made({"ph": "B"}, {"ph": "X", "ts": 1, "dur": 5}, {"ph": "E", "ts": 3}),
        made({"ph": "C"}),  # no value
        made({"ph": "C", "args": {"x": "many"}}),
        made({"ph": "C", "args": {"x": 1}}, {"ph": "C", "ts": 1, "args": {"y": 1}}),
        made({"ph": "C", "ts": 2, "args": {"x": 1}}, {"ph": "C", "ts": 1, "args": {"x": 1}}),
        made({"ph": "i", "s": "x"}),
        made({"ph": "X", "dur": 9}, {"ph": "s", "id": 7}),  # no end
        made({"ph": "X", "dur": 9}, {"ph": "f", "id": 7}),  # no begin
        made({"ph": "s", "id": 7}, {"ph": "f", "id": 7, "ts": 1}),  # no span to bind to
    ],
)  # fmt: skip
def test_what_the_checker_of_traces_finds(trace: dict[str, Any]) -> None:
    with pytest.raises((AssertionError, KeyError, ValueError)):
        check_trace(trace)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("recorded", [True, False])
def test_spans_cover_a_life_without_overlap(recorded: bool, depth: int) -> None:
    _, log, decisions = overloaded(depth=depth)
    for request in range(log.n):
        found = spans(log, request, decisions if recorded else None)
        if not found:
            assert log.end_time[request] == log.arrival_time[request]
            continue
        assert found[0][1] == log.arrival_time[request]
        assert found[-1][2] == pytest.approx(log.end_time[request], abs=1e-12)
        for before, after in pairwise(found):
            assert after[1] == pytest.approx(before[2], abs=1e-12)
        tokens = sum(details["tokens"] for name, _, _, details in found if name == "decode")
        if log.finished[request] and not log.num_preemptions[request]:
            assert tokens == log.num_output_tokens[request] - 1


def test_slack_of_steps_is_that_of_their_tightest_token() -> None:
    _, log, _ = overloaded()
    slack = step_slack(log)
    late = judge(log)
    assert np.isfinite(slack).any()
    assert (slack.min() < 0) == bool((late.ttft | late.tbt).any())
    # by hand for one step
    assert log.token_step is not None
    step = int(log.token_step[-1])
    found = []
    for i in range(log.n):
        mine = log.token_step[log.token_offsets[i] : log.token_offsets[i + 1]]
        due = log.arrival_time[i] + log.slo_ttft[i] + np.flatnonzero(mine == step) * log.slo_tbt[i]
        found += (due - log.step_end[step]).tolist()
    assert slack[step] == pytest.approx(min(found))


def test_long_runs_are_cut_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    _, log, decisions = overloaded()
    monkeypatch.setattr(module, "MAX_STEPS", 10)
    monkeypatch.setattr(module, "MAX_REQUESTS", 7)
    trace, told = timeline(log, "x", decisions)
    assert len(events(trace, "X", 1)) == 10
    assert f"10 of {log.num_steps:,} steps and" in told
    assert "--window" in told
    assert trace["otherData"]["shows"] == told
    monkeypatch.setattr(module, "MAX_STEPS", 10_000)
    trace, told = timeline(log, "x", decisions)
    assert "7 of 60 requests" in told
    check_trace(trace)


def test_a_window_shows_what_overlaps_it() -> None:
    _, log, decisions = overloaded()
    trace, _ = timeline(log, "x", decisions, (0.5, 0.6))
    check_trace(trace)
    inside = (log.step_end > 0.5) & (log.start < 0.6)
    assert len(events(trace, "X", 1)) == inside.sum()
    threads = [event for event in events(trace, "M", 2) if event["name"] == "thread_name"]
    assert len(threads) == ((log.arrival_time < 0.6) & (log.end_time >= 0.5)).sum()
    with pytest.raises(InputError, match="nothing happens then"):
        timeline(log, "x", decisions, (1e6, 2e6))
    with pytest.raises(InputError, match="FROM before TO"):
        timeline(log, "x", decisions, (2.0, 1.0))


def test_a_clients_run_has_requests_alone() -> None:
    _, log, _ = overloaded()
    times = np.concatenate([log.request_times(i) for i in range(log.n)])
    none = {name: np.empty(0, dtype=np.int32) for name in ("num_tokens", "num_prefill_tokens", "num_prefills",
            "num_decodes", "num_running", "num_waiting", "num_free_blocks", "num_preempted")}  # fmt: skip
    seen = dataclasses.replace(log, token_step=None, token_time=times, start=np.empty(0), duration=np.empty(0), **none)
    trace, told = timeline(seen, "bench")
    check_trace(trace)
    assert "0 of 0 steps and 60 of 60 requests" in told
    assert {event["name"] for event in events(trace, "X", 2)} == {"first token", "decode"}


LINE = {"start": 1000.5, "duration_s": 0.02, "predicted_s": 0.019, "decision_s": 1e-4, "num_running": 3,
        "num_waiting": 1, "num_free_blocks": 90, "num_preempted": 0, "prefill_tokens": 9, "num_decodes": 3}  # fmt: skip


def step_log(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def test_a_real_engines_step_log(tmp_path: Path) -> None:
    log = step_log(tmp_path / "steps.jsonl", LINE, LINE | {"start": 1000.6, "prefill_tokens": 0})
    trace, told = step_log_timeline(read_step_log(log), "steps")
    check_trace(trace)
    assert [event["name"] for event in events(trace, "X", 1)] == ["mixed", "decode"]
    assert events(trace, "X", 1)[1]["ts"] == pytest.approx(1e5)
    assert told == "2 of 2 steps of a real engine"
    assert {event["name"] for event in events(trace, "C", 1)} == {"queue", "free KV blocks"}
    slack = [LINE | {"start": 1000.5 + i / 10, "slack_s": value} for i, value in enumerate((0.25, -1.5, None, "x"))]
    trace, _ = step_log_timeline(read_step_log(step_log(tmp_path / "slack.jsonl", *slack)), "steps")
    check_trace(trace)
    found = [event for event in events(trace, "C", 1) if event["name"].startswith("least slack")]
    assert [event["args"]["slack"] for event in found] == [250.0, -1500.0]
    assert found[0]["ts"] == pytest.approx(2e4)  # at the step's end
    assert "1 of 2 steps" in step_log_timeline(read_step_log(log), "steps", (0.05, 9.0))[1]
    with pytest.raises(InputError, match="no step then"):
        step_log_timeline(read_step_log(log), "steps", (5.0, 9.0))


@given(
    st.lists(st.tuples(st.floats(0, 0.05), st.floats(0, 0.1)), min_size=1, max_size=30),
    st.sampled_from([0.0, 1000.5, 1.8e9]),
)
def test_steps_scheduled_ahead_do_not_overlap(steps: list[tuple[float, float]], epoch: float) -> None:
    """With async scheduling a step is scheduled while the one before still runs; the log counts from that one's end."""
    lines, start, busy = [], epoch, epoch
    for gap, duration in steps:
        start += gap
        lines.append(LINE | {"start": start, "duration_s": duration})
        busy = max(busy, start) + duration
    trace, _ = step_log_timeline(lines, "steps")
    check_trace(trace)
    last = events(trace, "X", 1)[-1]
    assert (last["ts"] + last["dur"]) / 1e6 == pytest.approx(busy - lines[0]["start"], abs=1e-4)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{broken", json.dumps(LINE)], "line 1"),
        ([{"start": 1}], "duration_s"),
        ([[1, 2]], "line 1"),
        ([LINE | {"duration_s": -1}], "duration_s"),
        ([LINE | {"num_running": "many"}], "num_running"),
        ([], "no step"),
    ],
)
def test_a_bad_step_log_is_one_line(tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_step_log(step_log(tmp_path / "steps.jsonl", *lines))


def test_a_step_log_may_end_in_the_middle_of_a_line(tmp_path: Path) -> None:
    log = step_log(tmp_path / "steps.jsonl", LINE)
    log.write_text(log.read_text() + '{"start": 10')
    assert len(read_step_log(log)) == 1


def test_the_command_line_writes_timelines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record, log, decisions = overloaded()
    write_run(tmp_path / "run", record, log, decisions=decisions)
    file = tmp_path / "t.json"
    assert main(["report", str(tmp_path / "run"), "--timeline", str(file)]) == 0
    assert "60 of 60 requests" in capsys.readouterr().out
    check_trace(json.loads(file.read_text()))
    steps = step_log(tmp_path / "steps.jsonl", LINE)
    assert main(["report", str(steps), "--timeline", str(file)]) == 0
    check_trace(json.loads(file.read_text()))
    capsys.readouterr()
    for arguments, message in [
        ([str(tmp_path / "run"), "--window", "1:2"], "--window goes with --timeline"),
        ([str(tmp_path / "run"), "--timeline", str(file), "--window", "2:1"], "expected FROM:TO"),
        ([str(tmp_path / "run"), "--timeline", str(file), "--run", "nobody"], "no such run"),
        ([str(tmp_path / "run"), "--timeline", str(tmp_path / "run" / "summary.json" / "t")], "cannot be written"),
        ([str(steps), "--html", str(file)], "steps.jsonl"),
    ]:
        assert main(["report", *arguments]) == 2
        captured = capsys.readouterr()
        assert captured.err.count("\n") == 1
        assert message in captured.err


def test_timelines_are_written_whole(tmp_path: Path) -> None:
    _, log, _ = overloaded()
    write_timeline(tmp_path / "a" / "t.json", timeline(log, "x")[0])
    assert json.loads((tmp_path / "a" / "t.json").read_text())["otherData"]["run"] == "x"
