"""The summary of a hand-made run, key by key, and its JSON."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from slacktide.metrics.log import RunLog
from slacktide.metrics.slo import judge
from slacktide.metrics.summary import summarize

NAN = np.nan


def small_run(**changes: Any) -> RunLog:
    """Three requests on one engine. Steps: prefill A (0-1 s), A + prefill B (1-2 s), decode A, B (2-2.5 s), idle until
    3 s, prefill C (3-4 s). A: tokens 1, 2, 2.5 s. B: 2, 2.5 s. C arrives at 3 s, gets one token at 4 s. No A after."""
    columns: dict[str, Any] = {
        "arrival_time": [0.0, 0.5, 3.0],
        "num_prompt_tokens": [10, 20, 40],
        "num_output_tokens": [3, 2, 1],
        "slo_ttft": np.full(3, 1.0),
        "slo_tbt": np.full(3, 1.0),
        "tenant": [0, 0, 1],
        "tenants": ("acme", "zeta", "nobody"),
        "slo_class": [0, 1, 0],
        "slo_classes": ("chat", "batch"),
        "first_scheduled_time": [0.0, 1.0, 3.0],
        "end_time": [2.5, 2.5, 4.0],
        "end_reason": np.zeros(3, dtype=np.int8),
        "relegated": [False, True, False],
        "num_preemptions": [0, 2, 0],
        "recomputed_tokens": [0, 6, 0],
        "cached_tokens": [0, 16, 0],
        "scheduled_tokens": [12, 12, 40],
        "token_offsets": [0, 3, 5, 6],
        "token_step": [0, 1, 2, 1, 2, 3],
        "start": [0.0, 1.0, 2.0, 3.0],
        "duration": [1.0, 1.0, 0.5, 1.0],
        "num_prefills": [1, 1, 0, 1],
        "num_decodes": [0, 1, 2, 0],
        "num_running": [1, 2, 2, 1],
        "num_waiting": [0, 0, 0, 0],
        "sim_duration": 4.0,
        "decision_time": 0.002,
        "wall_time": 0.01,
        "notes": ("two rows left out",),
    }
    return RunLog(**(columns | changes))


def test_every_key() -> None:
    s = summarize(small_run())
    expected: dict[str, Any] = {
        "duration": 4.0,
        "num_requests": 3,
        "completed": 3,
        "failed": 0,
        "total_input_tokens": 70,
        "total_output_tokens": 6,
        "request_throughput": 0.75,
        "request_goodput": 0.5,
        "output_throughput": 1.5,
        "total_token_throughput": 19.0,
        "token_goodput": 1.0,
        "slo_mode": "deadline",
        "tolerated_late_share": 0.0,
        "attainment": 2 / 3,
        "token_attainment": 5 / 6,  # B's first token is late (2 > 1.5), its second is not (2.5)
        "excluded": 0,
        "violations": {"ttft": 1, "tbt": 0, "e2e": 0, "unserved": 0},
        "end_reasons": {"finished": 3, "rejected": 0, "expired": 0, "aborted": 0, "failed": 0, "cut_off": 0},
        "relegated": 1,
        "mean_ttft_ms": 3500 / 3,
        "median_ttft_ms": 1000.0,
        "p50_ttft_ms": 1000.0,
        "p90_ttft_ms": 1400.0,
        "p99_ttft_ms": 1490.0,
        "std_ttft_ms": float(np.std([1000, 1500, 1000])),
        "mean_tpot_ms": 625.0,  # 750 and 500; C has one token
        "median_tpot_ms": 625.0,
        "p50_tpot_ms": 625.0,
        "p90_tpot_ms": 725.0,
        "p99_tpot_ms": 747.5,
        "std_tpot_ms": 125.0,
        "mean_itl_ms": 2000 / 3,  # 1000 500 500
        "median_itl_ms": 500.0,
        "p50_itl_ms": 500.0,
        "p90_itl_ms": 900.0,
        "p99_itl_ms": 990.0,
        "std_itl_ms": float(np.std([1000, 500, 500])),
        "mean_e2el_ms": 5500 / 3,
        "median_e2el_ms": 2000.0,
        "p50_e2el_ms": 2000.0,
        "p90_e2el_ms": 2400.0,
        "p99_e2el_ms": 2490.0,
        "std_e2el_ms": float(np.std([2500, 2000, 1000])),
        "mean_queue_ms": 500 / 3,
        "median_queue_ms": 0.0,
        "p50_queue_ms": 0.0,
        "p90_queue_ms": 400.0,
        "p99_queue_ms": 490.0,
        "std_queue_ms": float(np.std([0, 500, 0])),
        "max_gap_ms": 1000.0,
        "num_steps": 4,
        "step_mode_share": {"decode": 0.25, "prefill": 0.5, "mixed": 0.25},
        "step_mode_time_share": {"decode": 0.5 / 3.5, "prefill": 2 / 3.5, "mixed": 1 / 3.5},
        "mean_step_ms": 875.0,
        "busy_share": 0.875,
        "num_preemptions": 2,
        "scheduled_tokens": 64,
        "recomputed_tokens": 6,
        "preemption_tax": 6 / 64,
        "cached_tokens": 16,
        "sim_duration": 4.0,
        "wall_time": 0.01,
        "decision_time": 0.002,
        "mean_decision_ms": 0.5,
        "mean_in_system": 5.5 / 4,
        "littles_law": 5.5 / 4,
        "mean_running": 5.0 / 4,
        "mean_waiting": 0.0,
        "notes": ["two rows left out"],
    }
    tables = {"classes", "tenants"}
    assert s.keys() == expected.keys() | tables
    for key, value in expected.items():
        assert s[key] == (pytest.approx(value, rel=1e-12) if isinstance(value, float) else value), key


def test_tables_per_class_and_tenant() -> None:
    s = summarize(small_run())
    assert list(s["tenants"]) == ["acme", "zeta"]  # a tenant without requests has no row
    acme = s["tenants"]["acme"]
    assert (acme["num_requests"], acme["attainment"], acme["request_goodput"]) == (2, 0.5, 0.25)
    assert (acme["mean_ttft_ms"], acme["max_gap_ms"], acme["num_preemptions"]) == (1250.0, 1000.0, 2)
    assert acme["violations"] == {"ttft": 1, "tbt": 0, "e2e": 0, "unserved": 0}
    assert s["classes"]["batch"]["attainment"] == 0.0
    assert s["classes"]["chat"]["mean_tpot_ms"] == 750.0
    assert s["tenants"]["zeta"]["mean_itl_ms"] is None


def test_one_class_needs_no_table() -> None:
    assert summarize(small_run(slo_class=[0, 0, 0], slo_classes=("default",)))["classes"] == {}


def test_a_class_without_targets_has_no_attainment() -> None:
    s = summarize(small_run(slo_ttft=[1, np.inf, 1.0], slo_tbt=[1, np.inf, 1.0]))
    assert s["classes"]["batch"]["attainment"] is None
    assert s["classes"]["batch"]["request_goodput"] is None
    assert s["attainment"] == 1.0


def test_failed_requests_stay_in_the_denominator_and_out_of_the_means() -> None:
    reason = np.array([0, 4, 0], dtype=np.int8)
    s = summarize(small_run(end_reason=reason))
    assert (s["completed"], s["failed"], s["attainment"]) == (2, 1, 2 / 3)
    assert s["mean_ttft_ms"] == 1000.0
    assert s["total_input_tokens"] == 50
    assert s["violations"]["unserved"] == 1


def test_cut_off_requests_are_neither_completed_nor_failed() -> None:
    s = summarize(small_run(end_reason=np.array([0, 0, 5], dtype=np.int8), end_time=[2.5, 2.5, NAN]))
    assert (s["completed"], s["failed"], s["excluded"], s["end_reasons"]["cut_off"]) == (2, 0, 1, 1)
    assert s["attainment"] == 1 / 2
    assert s["mean_in_system"] == 5.5 / 4  # open until the end of the run


def test_littles_law_holds_exactly() -> None:
    """L by the integral of N(t), brute force over a grid that holds every event, against lambda W."""
    log = small_run()
    step = 0.25
    middles = np.arange(0.0, 4.0, step) + step / 2
    brute = sum(int(((log.arrival_time < t) & (log.end_time > t)).sum()) for t in middles) * step / 4.0
    s = summarize(log)
    assert s["mean_in_system"] == brute
    assert s["littles_law"] == brute


def test_slowdown_and_ready_verdicts() -> None:
    log = small_run()
    s = summarize(log, isolated=np.array([2.5, 1.0, 1.0]), verdicts=judge(log))
    assert s["mean_slowdown"] == pytest.approx(4 / 3)
    assert s["p50_slowdown"] == 1.0


def test_json_has_null_where_nothing_is_defined() -> None:
    """No request finished, no step, no time: every number is missing, none is NaN, none is a made-up 0."""
    log = RunLog(
        arrival_time=np.zeros(1),
        num_prompt_tokens=np.ones(1, dtype=np.int64),
        num_output_tokens=np.ones(1, dtype=np.int64),
        end_time=np.zeros(1),
        end_reason=np.array([1], dtype=np.int8),
        token_offsets=np.zeros(2, dtype=np.int64),
        token_time=np.empty(0),
        sim_duration=0.0,
    )
    s = summarize(log)
    text = json.dumps(s, allow_nan=False)
    assert json.loads(text) == s
    for key in ("attainment", "request_goodput", "request_throughput", "mean_ttft_ms", "p99_itl_ms", "max_gap_ms"):
        assert s[key] is None, key
    for key in ("preemption_tax", "mean_step_ms", "busy_share", "mean_in_system", "littles_law", "decision_time"):
        assert s[key] is None, key
    assert (s["completed"], s["failed"]) == (0, 1)
