"""Every registered policy serves every workload to its end, within the engine's limits, the same way each time."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slacktide.core.latency import AffineModel
from slacktide.core.pack import as_policy
from slacktide.core.policy import names
from slacktide.core.spec import parse_policies
from slacktide.core.types import Plan, StepView
from slacktide.metrics.log import ABORTED, FINISHED, REJECTED, RunLog
from slacktide.sim.engine import EngineConfig, simulate
from slacktide.workload.requests import ClosedLoop, Workload

OTHER_SETTINGS = [
    "eb:k=1,kv_guard=0",
    "eb:theta=0.5,form=paper,kv_guard=0.3",
    "eb-adaptive:form=paper,update_every=1,window=2",
    "eb-adaptive:mixed_below=0,update_every=1,window=3",
    "eb-plus:form=paper,update_every=1,window=2",
    "eb-plus:update_every=1,window=2,explore_every=2,explore_within=9,margin=0",
    "fcfs:max_num_batched_tokens=9",
    "orca:max_batch_size=3",
    "sarathi:chunk_size=8,max_num_seqs=4,watermark=0.2",
    "sarathi-edf:chunk_size=5",
    "sarathi-srpf:chunk_size=2000",
    "sglang:schedule_policy=lpm,chunked_prefill_size=12",
    "sglang:schedule_policy=lof,enable_mixed_chunk=true,schedule_conservativeness=0",
    "sglang:chunked_prefill_size=none,max_prefill_tokens=20,schedule_conservativeness=0.1",
    "tide:backfill=true,late_share=0.3,sizes=4",
    "tide:slo_mode=gap,demotion=false,kv_gate=on,late_share=0,max_gap=0.05",
    "tide:reject=shed,sizes=3",
    "tide:reject=demote",
    "trtllm:capacity_scheduler_policy=max-utilization",
    "trtllm:capacity_scheduler_policy=max-utilization,context_chunking_policy=equal-progress,max_batch_size=4",
    "trtllm:capacity_scheduler_policy=static-batch,context_chunking_policy=equal-progress",
    "trtllm:context_chunking_policy=off,max_num_tokens=11",
    "vllm-v0:max_num_batched_tokens=10,scheduler_delay_factor=0.7",
    "vllm-v0:watermark=0.3,max_num_seqs=3",
    "vllm-v1:long_prefill_token_threshold=6,long_prefill_token_threshold_adaptive=true,watermark=0.1",
    "vllm-v1:scheduling_policy=priority",
    "vllm-v1:scheduling_policy=priority,victim=most-slack,scheduler_reserve_full_isl=false",
    "vllm-v1:prefill_schedule_interval=3,victim=least-computed",
    "vllm-v1:max_num_batched_tokens=7",
]
POLICIES = [*names(), *OTHER_SETTINGS]


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """3 to 25 requests with priorities, SLOs, impatient clients and shared prefixes of whole blocks of 8 tokens."""
    n = draw(st.integers(3, 25))

    def column(values: st.SearchStrategy[Any]) -> np.ndarray:
        return np.array(draw(st.lists(values, min_size=n, max_size=n)))

    prompt, output = column(st.integers(1, 60)), column(st.integers(1, 12))
    closed = draw(st.none() | st.none() | st.builds(ClosedLoop, st.integers(1, 6), st.sampled_from([0.0, 0.05])))
    arrival = np.cumsum(column(st.sampled_from([0.0, 0.0, 0.01, 0.03, 0.2, 3.0])))
    arrival = arrival if closed is None else np.zeros(n)
    patience = column(st.sampled_from([np.inf, np.inf, np.inf, 0.05, 0.4]))
    ids = [draw(st.lists(st.integers(0, 2), min_size=p // 8, max_size=p // 8)) for p in prompt.tolist()]
    return Workload(
        arrival_time=arrival,
        num_prompt_tokens=prompt,
        num_output_tokens=output,
        max_tokens=output + column(st.sampled_from([0, 0, 5, 1000])),
        slo_ttft=column(st.sampled_from([np.inf, 0.1, 0.5, 3.0])),
        slo_tbt=column(st.sampled_from([np.inf, 0.02, 0.2])),
        slo_e2e=column(st.sampled_from([np.inf, 2.0, 9.0])),
        priority=column(st.integers(-1, 2)),
        abort_time=arrival + patience,
        hash_ids=(
            np.array([i for each in ids for i in each], dtype=np.int64),
            np.concatenate([[0], np.cumsum([len(each) for each in ids])]),
        ),
        hash_block_size=8,
        closed=closed,
    )


@st.composite
def engines(draw: st.DrawFn, workload: Workload) -> EngineConfig:
    """KV from barely enough for the largest request to ample."""
    bs = draw(st.sampled_from([4, 8]))
    lifetime = -(-np.maximum(workload.num_prompt_tokens + workload.num_output_tokens - 1, 1) // bs)
    return EngineConfig(
        max_num_batched_tokens=draw(st.sampled_from([3, 16, 40, 200])),
        max_num_seqs=draw(st.sampled_from([1, 3, 8, 64])),
        num_blocks=int(lifetime.max()) + draw(st.sampled_from([0, 1, 3, 10, 60])),
        block_size=bs,
        watermark=draw(st.sampled_from([0.0, 0.0, 0.1])),
        enable_prefix_caching=draw(st.booleans()),
        pipeline_depth=draw(st.sampled_from([1, 1, 2])),
    )


@st.composite
def situations(draw: st.DrawFn) -> tuple[Workload, EngineConfig]:
    workload = draw(workloads())
    return workload, draw(engines(workload))


TRUTH = AffineModel(alpha_p=0.01, beta_p=0.0003, alpha_d=0.008, beta_d=0.0001, kappa=0.0001)


def run(text: str, workload: Workload, config: EngineConfig, **options: Any) -> RunLog:
    (spec,) = parse_policies([text])
    return simulate(workload, as_policy(spec.build()), TRUTH, config, check=True, **options).log


def assert_same(one: RunLog, other: RunLog) -> None:
    for field in fields(RunLog):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype, field.name
            np.testing.assert_array_equal(a, b, err_msg=field.name)
        elif field.name not in ("wall_time", "decision_time"):
            assert a == b, field.name


def check_run(log: RunLog, workload: Workload, config: EngineConfig, planned: int) -> None:
    n = len(workload)
    got = np.diff(log.token_offsets)
    impatient = np.isfinite(workload.abort_time)
    assert np.isin(log.end_reason, [FINISHED, ABORTED, REJECTED]).all()
    assert impatient[log.end_reason == ABORTED].all()
    finished = log.end_reason == FINISHED
    assert (got[finished] == workload.num_output_tokens[finished]).all()
    assert (got <= workload.num_output_tokens).all()
    assert (log.num_tokens <= config.max_num_batched_tokens).all()
    assert (log.num_running <= config.max_num_seqs).all()
    assert (np.diff(log.start) >= 0).all()
    assert (log.start[1:] >= log.start[:-1] + log.duration[:-1] - 1e-12).all()
    end = log.start + log.duration
    for i in range(n):
        times = end[log.token_step[log.token_offsets[i] : log.token_offsets[i + 1]]]
        assert (times > log.arrival_time[i]).all()
        assert (np.diff(times) > 0).all()
        if finished[i]:
            assert log.end_time[i] == times[-1]
    assert int(log.scheduled_tokens.sum()) == int(log.num_tokens.sum())
    if not config.enable_prefix_caching:
        assert int(log.num_tokens.sum()) == planned
        assert (log.cached_tokens == 0).all()
    # Every computed token was scheduled or cached; a finished request has all but its last token, and computes again
    # what a preemption lost and the cache did not keep. With async scheduling one step may run too many.
    useful = workload.num_prompt_tokens + workload.num_output_tokens - 1
    computed = log.scheduled_tokens - log.recomputed_tokens
    assert (computed <= useful + config.pipeline_depth - 1)[finished].all()
    assert (computed + log.cached_tokens >= useful)[finished].all()
    never_lost = finished & ((log.num_preemptions == 0) | (log.cached_tokens == 0))
    assert (computed + log.cached_tokens <= useful + config.pipeline_depth - 1)[never_lost].all()


@pytest.mark.parametrize("text", POLICIES)
@given(data=st.data())
@settings(max_examples=15)
def test_serves_everybody_within_the_limits(text, data):
    workload, config = data.draw(situations())
    planned = 0

    def count(view: StepView, plan: Plan) -> None:
        nonlocal planned
        planned += int(plan.num_scheduled_tokens.sum())

    log = run(text, workload, config, fast_forward=False, on_step=count)
    check_run(log, workload, config, planned)
    assert_same(log, run(text, workload, config, fast_forward=True))
    assert_same(log, run(text, workload, config, fast_forward=False))
