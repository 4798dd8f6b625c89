"""A small overloaded run with preemptions, recorded and not; a checker of the trace event format."""

from __future__ import annotations

import json
import math
from functools import lru_cache
from typing import Any

import numpy as np

from slacktide.core.latency import AffineModel
from slacktide.core.policy import get
from slacktide.metrics.decisions import Decisions
from slacktide.metrics.log import RunLog
from slacktide.report.files import Record, run_record
from slacktide.sim.decisions import Recorder
from slacktide.sim.engine import EngineConfig, simulate
from slacktide.workload.requests import Workload

# 10 ms + 0.1 ms per prefill token; 5 ms + 0.1 ms per decode; mixed 10 ms + 0.1 ms per token.
MODEL = AffineModel(alpha_p=0.010, beta_p=0.0001, alpha_d=0.005, beta_d=0.0001, alpha_mb=0.010, kappa=0.0)


@lru_cache(maxsize=8)
def overloaded(policy: str = "vllm-v1", n: int = 60, depth: int = 1) -> tuple[Record, RunLog, Decisions]:
    """Two classes and two tenants; the KV cache holds a fraction of what arrives; one request is refused."""
    rng = np.random.default_rng(7)
    arrivals = np.sort(rng.uniform(0, 1.0, n))
    prompts = rng.integers(10, 200, n)
    prompts[5] = 5000  # never fits
    load = Workload(
        arrivals,
        prompts,
        rng.integers(2, 40, n),
        slo_ttft=np.full(n, 0.2),
        slo_tbt=np.full(n, 0.02),
        tenant=np.arange(n) % 2,
        tenants=("blue", "green"),
        slo_class=np.arange(n) % 2,
        slo_classes=("chat", "batch"),
    )
    recorder = Recorder(get(policy)())
    config = EngineConfig(
        num_blocks=60, block_size=16, max_num_batched_tokens=256, max_num_seqs=32, pipeline_depth=depth
    )
    log = simulate(load, recorder, MODEL, config).log
    record = run_record(log, policy=policy, profile="test", profile_label="prior", seed=0, trace="made up", rate=60.0,
                        slo="ttft:200,tbt:20", notes=["made for a test"], engine={"num_blocks": 60},
                        command="slacktide simulate --policy x")  # fmt: skip
    return record, log, recorder.decisions()


ARGS = {"process_name": ("name", str), "thread_name": ("name", str), "process_labels": ("labels", str),
        "process_sort_index": ("sort_index", int), "thread_sort_index": ("sort_index", int)}  # fmt: skip
"""Metadata events and their one argument."""

RESERVED_COLOURS = {"good", "bad", "terrible", "thread_state_running", "thread_state_runnable", "thread_state_sleeping",
                    "thread_state_iowait", "generic_work", "black", "grey", "white", "yellow", "olive"}  # fmt: skip
"""Of the names that chrome://tracing knows, those that a trace here might use."""


def nanoseconds(value: Any) -> int:
    """A time of the format (microseconds, whole nanoseconds) as viewers store it; AssertionError for anything else."""
    assert type(value) in (int, float), value
    assert math.isfinite(value), value
    assert abs(value * 1e3 - round(value * 1e3)) < 1e-2, f"{value} us is no whole number of nanoseconds"
    return round(value * 1e3)


def check_trace(trace: dict[str, Any]) -> None:
    """AssertionError unless `trace` keeps to the trace event format ("Trace Event Format", Google, 2016), JSON object.

    Phases X, B, E, i, C, M, s, t, f; nothing of what is allowed but drawn badly: spans out of order or overlapping in
    part, tracks without a name, counters whose series change.
    """
    json.loads(json.dumps(trace, allow_nan=False))
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    assert isinstance(trace["otherData"], dict)
    open_spans: dict[tuple[int, int], list[tuple[str, float]]] = {}  # per track: name and end (B: unknown yet)
    newest: dict[tuple[Any, ...], int] = {}
    told: dict[tuple[int, int, str], Any] = {}
    series: dict[tuple[int, str], set[str]] = {}
    flows: dict[Any, str] = {}
    for event in trace["traceEvents"]:
        phase, pid, tid = event["ph"], event["pid"], event["tid"]
        assert phase in ("X", "B", "E", "i", "C", "M", "s", "t", "f"), event
        assert type(pid) is int, event
        assert type(tid) is int, event
        assert isinstance(event.get("args", {}), dict), event
        assert phase == "E" or (isinstance(event["name"], str) and event["name"]), event
        assert event.get("cname", "good") in RESERVED_COLOURS, event
        assert ("dur" in event) == (phase == "X"), event
        now = nanoseconds(event["ts"])
        if phase == "M":
            key, kind = ARGS[event["name"]]
            assert set(event["args"]) == {key}, event
            assert type(event["args"][key]) is kind, event
            assert told.setdefault((pid, tid, event["name"]), event) is event, f"said twice: {event}"
            continue
        assert (pid, 0, "process_name") in told, f"no name of its process before {event}"
        assert now >= 0, event
        track = (pid, event["name"]) if phase == "C" else (pid, tid, phase in ("s", "t", "f"))
        assert now >= newest.get(track, 0), f"out of order: {event}"
        newest[track] = now
        if phase == "C":
            assert event["args"], event
            assert all(type(v) in (int, float) and math.isfinite(v) for v in event["args"].values()), event
            assert series.setdefault((pid, event["name"]), set(event["args"])) == set(event["args"]), event
            continue
        assert (pid, tid, "thread_name") in told, f"no name of its thread before {event}"
        stack = open_spans.setdefault((pid, tid), [])
        while stack and stack[-1][1] <= now and phase != "E":
            stack.pop()
        if phase == "X":
            end = now + nanoseconds(event["dur"])
            assert nanoseconds(event["dur"]) >= 0, event
            assert not stack or end <= stack[-1][1], f"overlaps in part: {event}"
            stack.append((event["name"], end))
        elif phase == "B":
            stack.append((event["name"], math.inf))
        elif phase == "E":
            while stack and stack[-1][1] <= now:
                stack.pop()
            assert stack, f"ends nothing: {event}"
            name, end = stack.pop()
            assert end == math.inf, f"ends inside another span: {event}"
            assert event.get("name", name) == name, event
        elif phase == "i":
            assert event["s"] in ("g", "p", "t"), event
        else:
            before = flows.get(event["id"])
            assert (before is None) == (phase == "s"), f"a flow begins with s, once: {event}"
            assert before != "f", f"a flow goes on after its end: {event}"
            assert event.get("bp", "e") == "e", event
            assert stack, f"a flow binds to a span: {event}"
            flows[event["id"]] = phase
    assert all(end != math.inf for stack in open_spans.values() for _, end in stack), "B without E"
    assert set(flows.values()) <= {"f"}, "a flow without an end"
