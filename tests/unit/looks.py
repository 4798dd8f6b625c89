"""A small overloaded run with preemptions, recorded and not; a checker of the trace event format."""

from __future__ import annotations

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


def check_trace(trace: dict[str, Any]) -> None:
    """AssertionError unless `trace` keeps to the trace event format's JSON object as the page's viewers need it."""
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    last_end: dict[tuple[int, int], float] = {}
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert event["name"]
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        assert isinstance(event["args"], dict)
        ts = event["ts"]
        assert isinstance(ts, (int, float))
        assert math.isfinite(ts)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            track = event["pid"], event["tid"]
            # Spans of one thread must nest; ours follow one another (to the nanosecond that ts is rounded to).
            assert ts >= last_end.get(track, -math.inf) - 0.002, (event, last_end[track])
            last_end[track] = ts + event["dur"]
        elif event["ph"] == "C":
            assert event["args"]
            assert all(isinstance(v, (int, float)) and math.isfinite(v) for v in event["args"].values())
        elif event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "process_sort_index", "thread_sort_index")
        else:
            assert event["ph"] == "i"
            assert event["s"] in ("g", "p", "t")
