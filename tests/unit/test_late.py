"""Parts of a latency add up to it, whatever happened; decisions are recorded without changing a run."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slacktide.core.latency import AffineModel
from slacktide.core.policies.vllm_v1 import VllmV1
from slacktide.core.policy import get
from slacktide.core.types import SLO
from slacktide.errors import InputError
from slacktide.metrics import late as reasons
from slacktide.metrics.decisions import Decisions
from slacktide.metrics.late import CLIENT_PARTS, PARTS, lateness, overrun, parts_of, why_late, worst_requests
from slacktide.metrics.log import FINISHED, RunLog
from slacktide.metrics.slo import judge, with_slo
from slacktide.report.decisions_file import read_decisions
from slacktide.report.files import DECISIONS, read_run, run_record, write_run
from slacktide.sim.decisions import Recorder, reason_text
from slacktide.sim.engine import EngineConfig, simulate
from slacktide.workload.requests import Workload

# 10 ms + 1 ms per prefill token; 5 ms + 1 ms per decode; mixed 10 ms + 1 ms per token.
MODEL = AffineModel(alpha_p=0.010, beta_p=0.001, alpha_d=0.005, beta_d=0.001, alpha_mb=0.010, kappa=0.0)


def recorded(load: Workload, policy: Any = None, **config: Any) -> tuple[RunLog, Decisions]:
    recorder = Recorder(policy or VllmV1())
    log = simulate(load, recorder, MODEL, EngineConfig(**config)).log
    return log, recorder.decisions()


def small(**columns: Any) -> Workload:
    return Workload(**{"arrival_time": np.array([0.0, 0.0]), "num_prompt_tokens": np.array([4, 4]),
                       "num_output_tokens": np.array([3, 3])} | columns)  # fmt: skip


@st.composite
def runs(draw: st.DrawFn) -> tuple[Workload, dict[str, Any], str]:
    n = draw(st.integers(1, 10))
    arrivals = np.sort(np.array(draw(st.lists(st.floats(0, 1), min_size=n, max_size=n))))
    patience = np.array(draw(st.lists(st.sampled_from([math.inf, math.inf, 0.05, 0.3]), min_size=n, max_size=n)))
    load = Workload(
        arrivals,
        np.array(draw(st.lists(st.integers(1, 40), min_size=n, max_size=n))),
        np.array(draw(st.lists(st.integers(1, 30), min_size=n, max_size=n))),
        slo_ttft=np.full(n, 0.1),
        slo_tbt=np.full(n, 0.02),
        abort_time=arrivals + patience,
    )
    config = {
        "num_blocks": draw(st.integers(9, 24)),
        "block_size": 8,
        "max_num_seqs": draw(st.integers(1, 8)),
        "max_num_batched_tokens": draw(st.sampled_from([8, 24, 64])),
        "pipeline_depth": draw(st.sampled_from([1, 2])),
        "enable_prefix_caching": draw(st.booleans()),
    }
    return load, config, draw(st.sampled_from(["vllm-v1", "sliding", "eb-plus", "sarathi-edf"]))


@given(runs())
@settings(max_examples=60)
def test_parts_add_up_to_the_latency_and_recording_changes_nothing(case: tuple[Workload, dict[str, Any], str]) -> None:
    load, config, name = case
    plain = simulate(load, get(name)(), MODEL, EngineConfig(**config)).log
    log, decisions = recorded(load, get(name)(), **config)
    for field in dataclasses.fields(RunLog):
        if field.name not in ("wall_time", "decision_time"):
            np.testing.assert_array_equal(getattr(log, field.name), getattr(plain, field.name), err_msg=field.name)
    assert decisions.num_steps == log.num_steps
    assert len(decisions.preempted_request) == log.num_preemptions.sum() == int(log.num_preempted.sum()) or (
        config["pipeline_depth"] == 2 or len(decisions.preempted_request) == log.num_preemptions.sum()
    )
    tokens = np.bincount(decisions.chunk_step, decisions.chunk_tokens, minlength=log.num_steps)
    np.testing.assert_array_equal(tokens, log.num_prefill_tokens)
    for request in range(log.n):
        for known in (decisions, None):
            parts = parts_of(log, request, known)
            assert parts.total == pytest.approx(log.end_time[request] - log.arrival_time[request], abs=1e-9)
            assert min(parts.seconds.values()) >= 0
        assert why_late(log, request, decisions)


def test_the_parts_of_two_requests_by_hand() -> None:
    """Budget 4: request 0 prefills 0 to 14 ms, then 1 beside its decodes: 3, then 1 token."""
    log, decisions = recorded(small(), max_num_batched_tokens=4, num_blocks=64)
    first, second = (parts_of(log, request, decisions) for request in range(2))
    assert first.exact
    assert first.seconds == pytest.approx(
        {"queue": 0, "prefill": 0.014, "stall": 0, "preemption": 0, "decode": 0, "mixed": 0.014 + 0.012}
    )
    assert second.seconds == pytest.approx(
        {"queue": 0.014, "prefill": 0.026, "stall": 0, "preemption": 0, "decode": 0.012, "mixed": 0}
    )
    assert second.main() == "prefill"
    upto = parts_of(log, 1, decisions, until=0.02)
    assert upto.seconds["queue"] == pytest.approx(0.014)
    assert upto.total == pytest.approx(0.02)


def test_a_preemption_lasts_until_the_next_token() -> None:
    load = small(num_prompt_tokens=np.array([8, 8]), num_output_tokens=np.array([10, 10]))
    log, decisions = recorded(load, num_blocks=4, block_size=8)
    assert log.num_preemptions.tolist() == [0, 1]
    parts = parts_of(log, 1, decisions)
    (lost,) = decisions.preemptions_of(1)
    after = next(t for t in log.request_times(1) if t > log.start[lost])
    assert parts.seconds["preemption"] == pytest.approx(after - log.start[lost])
    assert parts_of(log, 0, decisions).seconds["preemption"] == 0
    guessed = parts_of(log, 1)
    assert not guessed.exact
    assert guessed.seconds["preemption"] > 0
    assert "preemption" in why_late(with_slo(log, SLO(0.04, 0.006)), 1, decisions)
    assert "decode took" in why_late(with_slo(log, SLO(0.001, 0.0001)), 1, decisions)


def test_lateness_by_hand() -> None:
    log = client([0.5, 0.6, 1.2], [0.7])
    late = lateness(with_slo(log, SLO(0.5, 0.2)))
    # deadlines 0.5, 0.7, 0.9 and, with arrival 0, 0.5
    np.testing.assert_allclose(late.late, [0.3, 0.2], atol=1e-12)
    assert late.token.tolist() == [2, 0]
    np.testing.assert_allclose(late.slack, [-0.3, -0.2], atol=1e-12)
    none = lateness(log)
    assert np.isnan(none.late).all()
    assert none.token.tolist() == [-1, -1]


def client(*times: list[float], **changes: Any) -> RunLog:
    """A run of a client, all arrivals at 0."""
    n = len(times)
    columns: dict[str, Any] = {
        "arrival_time": np.zeros(n),
        "num_prompt_tokens": np.full(n, 5),
        "num_output_tokens": np.array([len(t) for t in times]),
        "end_time": np.array([t[-1] if t else 0.4 for t in times]),
        "end_reason": np.array([FINISHED if t else 1 for t in times], dtype=np.int8),
        "token_offsets": np.cumsum([0, *map(len, times)]),
        "token_time": np.array([x for t in times for x in t]),
        "sim_duration": 5.0,
    }
    return RunLog(**(columns | changes))


def test_a_clients_parts() -> None:
    log = client([0.5, 0.6, 0.7, 1.7], [])
    parts = parts_of(log, 0)
    assert tuple(parts.seconds) == CLIENT_PARTS
    assert parts.seconds == pytest.approx({"first token": 0.5, "tokens": 0.3, "stall": 0.9, "closing": 0})
    assert parts_of(log, 1).seconds["first token"] == pytest.approx(0.4)


@given(st.lists(st.lists(st.floats(0.01, 9), min_size=1, max_size=6).map(sorted), min_size=1, max_size=5))
def test_a_clients_parts_add_up(times: list[list[float]]) -> None:
    log = client(*times, sim_duration=10.0)
    for request in range(log.n):
        assert parts_of(log, request).total == pytest.approx(log.end_time[request])


@pytest.mark.parametrize("mode", ["deadline", "gap", "mean"])
def test_overrun_agrees_with_the_verdict(mode: str) -> None:
    rng = np.random.default_rng(1)
    log = with_slo(client(*(sorted(rng.uniform(0.1, 2, rng.integers(1, 6)).tolist()) for _ in range(200)), []),
                   SLO(0.8, 0.4, 1.9))  # fmt: skip
    over = overrun(log, mode)
    np.testing.assert_array_equal(over > 1e-9, judge(log, mode).missed)
    assert over[-1] == np.inf


def test_the_worst_come_first() -> None:
    log = with_slo(client([0.1], [0.9], [0.7], []), SLO(0.5, 1.0))
    assert worst_requests(log, judge(log), 10).tolist() == [3, 1, 2]
    assert worst_requests(log, judge(log), 1).tolist() == [3]
    assert why_late(log, 3).startswith("rejected")
    assert why_late(log, 1) == "400 ms late: first token took 900 ms of 900 ms up to the first token"
    bare = client([0.1], [0.9])
    assert worst_requests(bare, judge(bare), 10).tolist() == [1, 0]


def test_in_mode_gap_the_widest_gap_is_told() -> None:
    log = with_slo(client([0.1, 0.2, 0.9, 1.0]), SLO(0.5, 0.3))
    assert why_late(log, 0, mode="gap") == "a gap of 700 ms before token 2: stall took 600 ms of 700 ms"
    assert why_late(with_slo(log, SLO(0.5, 9.0)), 0, mode="gap").startswith("done")
    assert why_late(with_slo(client([3.0, 3.2]), SLO(0.5, 0.3)), 0, mode="gap").startswith("2.50 s late")
    load = small(num_prompt_tokens=np.array([8, 8]), num_output_tokens=np.array([10, 10]))
    run, decisions = recorded(load, num_blocks=4, block_size=8)
    told = why_late(with_slo(run, SLO(1.0, 0.01)), 1, decisions, mode="gap")
    assert told.startswith("a gap of ")
    assert "preemption took" in told


def test_decisions_come_back_from_the_file(tmp_path: Path) -> None:
    load = small(num_prompt_tokens=np.array([8, 8]), num_output_tokens=np.array([10, 10]))
    log, decisions = recorded(load, get("sliding")(), num_blocks=4, block_size=8)
    assert any(decisions.reasons)
    record = run_record(log, policy="sliding")
    write_run(tmp_path, record, log, decisions=decisions)
    found = read_decisions(tmp_path)
    assert found is not None
    for field in dataclasses.fields(Decisions):
        np.testing.assert_array_equal(getattr(found, field.name), getattr(decisions, field.name), err_msg=field.name)
    write_run(tmp_path, record, log)
    assert read_decisions(tmp_path) is None  # those of another run
    assert read_run(tmp_path)[1].n == 2


def test_damaged_decisions_are_one_line(tmp_path: Path) -> None:
    (tmp_path / DECISIONS).write_bytes(b"no parquet")
    with pytest.raises(InputError, match=r"decisions\.parquet"):
        read_decisions(tmp_path)


def test_decisions_of_wrong_lengths_are_refused() -> None:
    none = np.empty(0, dtype=np.int64)
    with pytest.raises(ValueError, match="expected 2 steps"):
        Decisions(2, none, none, none, none, none, np.zeros(1), none, ())


def test_reasons_are_plain_json() -> None:
    text = reason_text({"a": np.float64(0.1234567891), "b": np.array([1, 2]), "c": math.inf, "d": True, "e": None})
    assert text == '{"a": 0.123457, "b": [1, 2], "c": "inf", "d": true, "e": null}'
    assert reason_text(None) == reason_text({}) == ""


def test_times_are_readable() -> None:
    assert [reasons.seconds_text(s) for s in (0.0123, 4.2, 73.21, 1234.0)] == ["12.3 ms", "4.20 s", "73.2 s", "1,234 s"]
    assert len(PARTS) == 6
