"""eb on schedules worked out by hand, and its guards. Blocks of 4 tokens, steps of 1 s."""

from __future__ import annotations

import numpy as np
import pytest

from slacktide.core.latency import AffineModel
from slacktide.core.policies._exclusive import Rule, look
from slacktide.core.policies.eb import Eb
from slacktide.core.policies.vllm_v0 import VllmV0
from slacktide.core.types import Plan, StepView
from slacktide.metrics.log import RunLog
from slacktide.sim.engine import EngineConfig, simulate
from slacktide.workload.requests import Workload

from .helpers import Req, schedule

MODEL = AffineModel(alpha_p=0.005, beta_p=5e-5, alpha_d=0.010, beta_d=1e-4, kappa=1.5e-4)


def saturated(n: int, prompt: int, output: int, seed: int = 0, **columns: object) -> Workload:
    rng = np.random.default_rng(seed)
    return Workload(
        np.zeros(n),
        rng.integers(prompt // 2, prompt * 3 // 2, n),
        rng.integers(output // 2, output * 3 // 2, n),
        **{name: np.full(n, value) for name, value in columns.items()},  # type: ignore[arg-type]
    )


def run(policy: object, load: Workload, config: EngineConfig, **options: object) -> RunLog:
    return simulate(load, policy, MODEL, config, check=True, **options).log  # type: ignore[arg-type]


def test_decodes_until_k_slots_are_free_and_refills_them_alone():
    requests = [Req(4, 2), Req(4, 3), Req(4, 4), Req(4, 5), Req(6, 2), Req(4, 2)]
    assert schedule(Eb(k=2), requests, max_num_seqs=4) == [
        {"A": 4, "B": 4, "C": 4, "D": 4},  # initial prefill, up to N = 4
        {"A": 1, "B": 1, "C": 1, "D": 1},  # A ends: one slot free, E waits
        {"B": 1, "C": 1, "D": 1},  # B ends: two free
        {"E": 6, "F": 4},
        {"C": 1, "D": 1, "E": 1, "F": 1},
        {"D": 1},
    ]


def test_one_free_slot_is_enough_for_k_1_and_none_is_for_k_n():
    requests = [Req(4, 2), Req(4, 3), Req(4, 4), Req(4, 2), Req(4, 2), Req(4, 2)]
    assert schedule(Eb(k=1), requests, max_num_seqs=3)[2] == {"D": 4}
    steps = schedule(Eb(k=3), requests, max_num_seqs=3)
    assert steps[1:] == [
        {"A": 1, "B": 1, "C": 1},
        {"B": 1, "C": 1},
        {"C": 1},
        {"D": 4, "E": 4, "F": 4},
        {"D": 1, "E": 1, "F": 1},
    ]


def test_a_refill_is_cut_by_the_token_budget_and_goes_on_without_decodes():
    requests = [Req(4, 6), Req(4, 2), Req(10, 2), Req(9, 2)]
    assert schedule(Eb(k=1), requests, max_num_seqs=3, max_num_batched_tokens=8)[:6] == [
        {"A": 4, "B": 4},
        {"C": 8},
        {"C": 2},
        {"A": 1, "B": 1, "C": 1},
        {"D": 8},
        {"D": 1},
    ]


def test_few_waiting_makes_it_continuous_batching():
    """One runs, one arrives: fillable (N - k) >= decodes k although 8 of 10 slots are wanted free."""
    requests = [Req(4, 4), Req(4, 2, arrival=1.5)]
    assert schedule(Eb(theta=0.3), requests, max_num_seqs=10) == [
        {"A": 4},
        {"A": 1},
        {"B": 4},
        {"A": 1, "B": 1},
        {"A": 1},
    ]
    assert Rule(10, 0.8, form="paper").ready(decodes=1, fillable=4)
    assert not Rule(10, 0.8, form="paper").ready(decodes=1, fillable=3)


def test_ready_counts_what_slots_and_memory_allow():
    sound = Rule(slots=2000, theta=0.1)
    assert sound.ready(decodes=540, fillable=60)
    assert not sound.ready(decodes=541, fillable=59)
    assert sound.ready(decodes=0, fillable=1)
    assert not sound.ready(decodes=0, fillable=0)
    assert Rule(2000, 0.1, enough=16).ready(decodes=540, fillable=16)  # a full prompt step
    assert not Rule(2000, 0.1, form="paper").ready(decodes=540, fillable=59)


def test_k_1_is_vllm_v0_at_saturation():
    load, config = saturated(600, 200, 60), EngineConfig(4096, 64, 4000, 16)
    ours = run(Eb(k=1, kv_guard=0.0), load, config)
    v0 = run(VllmV0(watermark=0.0), load, config)
    assert ours.sim_duration == pytest.approx(v0.sim_duration, rel=0.01)
    assert abs(ours.num_steps - v0.num_steps) <= 0.03 * v0.num_steps


def test_no_step_mixes_and_kv_never_runs_out_for_a_refill():
    load, config = saturated(400, 100, 60), EngineConfig(2048, 256, 400, 16)
    log = run(Eb(theta=0.05), load, config)
    assert (np.minimum(log.num_prefill_tokens, log.num_decodes) == 0).all()
    refill = log.num_prefill_tokens > 0
    running = log.num_running > log.num_prefills
    assert (log.num_free_blocks[refill & running] >= 0.05 * 400 - 1).all()


def test_a_running_stream_is_not_held_past_its_tbt_by_a_refill():
    """400 long prompts arrive at once; A's stream still gets its tokens on time."""
    rng = np.random.default_rng(0)
    n = 40
    load = Workload(
        np.concatenate([[0.0], np.full(n, 0.5)]),
        np.concatenate([[50], rng.integers(1500, 2500, n)]),
        np.concatenate([[300], np.full(n, 40)]),
        slo_ttft=np.concatenate([[1.0], np.full(n, np.inf)]),
        slo_tbt=np.concatenate([[0.1], np.full(n, np.inf)]),
    )
    config = EngineConfig(8192, 64, 8000, 16)
    stream = run(Eb(k=1), load, config).request_times(0)
    late = stream - (1.0 + 0.1 * np.arange(300))
    assert late.max() <= 0
    free = Workload(load.arrival_time, load.num_prompt_tokens, load.num_output_tokens)
    unguarded = run(Eb(k=1), free, config).request_times(0)
    assert np.diff(unguarded).max() > 1.0  # without a target the refill runs through


def test_a_first_token_is_not_held_back_by_waiting_for_slots():
    """Eight run for long, one slot of nine is free, theta asks for three: B starts in time for its TTFT."""
    n = 8
    arrival, prompt = np.append(np.zeros(n), 0.5), np.append(np.full(n, 100), 500)
    output = np.append(np.full(n, 400), 5)
    config = EngineConfig(4096, 9, 8000, 16)

    def first_token(ttft: float) -> float:
        targets = np.append(np.full(n, np.inf), ttft)
        log = run(Eb(theta=0.35), Workload(arrival, prompt, output, slo_ttft=targets), config)
        return float(log.request_times(n)[0] - 0.5)

    assert first_token(np.inf) > 3.0
    for ttft in (0.2, 0.5, 1.5):
        assert ttft / 2 - 0.05 < first_token(ttft) <= ttft  # it collects slots for half of its TTFT at most


def test_a_hopeless_target_does_not_stop_either_side():
    """TBT below one decode step: streams and prompts share steps, and all get served."""
    load = saturated(60, 400, 30, slo_ttft=0.001, slo_tbt=0.001)
    log = run(Eb(theta=0.2), load, EngineConfig(1024, 16, 4000, 16))
    assert (log.end_reason == 0).all()
    assert (np.minimum(log.num_prefill_tokens, log.num_decodes) > 0).any()


def test_slack_of_streams_that_are_late_or_have_no_deadline():
    seen: list[tuple[float, float]] = []

    class Spy(Eb):
        def plan(self, view: StepView) -> Plan:
            found = look(view)
            if found.streams:
                seen.append((found.slack, found.gap))
            return super().plan(view)

    model = AffineModel(alpha_p=1.0, beta_p=1e-9, alpha_d=1.0, beta_d=1e-9)
    config = EngineConfig(block_size=4, num_blocks=100)
    for ttft, expected in ((np.inf, 2.0), (3.0, 4.0), (0.5, 2.0)):
        seen.clear()
        load = Workload(np.zeros(1), np.array([4]), np.array([3]), slo_ttft=np.array([ttft]), slo_tbt=np.array([2.0]))
        simulate(load, Spy(k=1), model, config, check=True)
        # At t = 1 the first token is out: the second is due at its deadline (3 + 2) or one TBT after the first (1 + 2).
        assert seen[0] == pytest.approx((expected, 2.0), abs=1e-6)


def test_values_that_are_refused():
    for wrong in ({"k": 0}, {"theta": 1.0}, {"theta": -0.1}, {"max_num_seqs": 0}, {"kv_guard": 1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Eb(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="both given"):
        Eb(k=1, theta=0.1)
    with pytest.raises(ValueError, match="form"):
        Eb(form="other")  # type: ignore[arg-type]
