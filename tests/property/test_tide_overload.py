"""What `tide` does where KV, seats or time are short: what docs/background/tide.md says of steps, KV and late work."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slacktide.core import tide as t
from slacktide.core.kernels_tide_kv import PEAKS, foresee_kv
from slacktide.core.kernels_tide_late import settle
from slacktide.core.kernels_tide_queue import slack_to_keep
from slacktide.core.kinds import DECODE
from slacktide.core.latency import AffineModel
from slacktide.core.live import NUM_INT_FIELDS, STATUS
from slacktide.core.pack import as_policy
from slacktide.core.policies.tide import Tide
from slacktide.core.types import RUNNING, WAITING, Plan, StepView
from slacktide.search.scenario import Scenario, prepare
from slacktide.sim.engine import EngineConfig, simulate
from slacktide.workload.requests import Workload


def test_without_targets_steps_at_the_kernels_tile_edges_are_found():
    """Measured RTX 4090 kernels: 256 tokens take 39 ms, 288 take 49 ms; the fitted belief says 44 and 46."""
    setup = prepare(
        Scenario(trace="synthetic:prompt=uniform:512:1536,output=uniform:64:192", profile="rtx-4090/llama-3-8b",
                 rate=math.inf, num_prompts=200, seed=1)
    )  # fmt: skip
    ends = [
        simulate(setup.workload, as_policy(Tide(sizes=sizes)), setup.profile.latency, setup.config, belief=setup.belief)
        .log.end_of_run
        for sizes in (24, 1)
    ]  # fmt: skip
    assert ends[0] < 0.97 * ends[1]


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 64), st.booleans()), min_size=1, max_size=12))
def test_the_kv_foreseen_is_what_streams_hold_when_each_makes_a_token_a_step(rows):
    n = len(rows)
    ints, si = np.zeros((NUM_INT_FIELDS, n), dtype=np.int64), np.zeros((t.INT_SCRATCH, n), dtype=np.int64)
    sf = np.zeros((t.FLOAT_SCRATCH, 2 * n))
    for row, (known, left, runs) in enumerate(rows):
        ints[STATUS, row] = RUNNING if runs else WAITING
        si[t.I_KIND, row], si[t.I_COMPUTED, row], si[t.I_REMAINING, row] = DECODE, known - 1, 1
        sf[t.F_GROWTH, row] = left
    peaks = np.zeros(PEAKS)
    stride = foresee_kv(ints, n, si, sf, peaks)
    assert stride * (PEAKS - 1) == max(left for _, left, _ in rows)
    for k, foreseen in enumerate(peaks):
        made = k * stride
        held = sum(known + made for known, left, runs in rows if runs and left >= made - 0.5 * stride)
        assert foreseen == pytest.approx(held)
    # Between two points nobody holds more than at the later one and half a stride: each is counted until it has ended.
    for made in range(int(peaks.size * stride)):
        held = sum(known + made for known, left, runs in rows if runs and left >= made)
        assert held <= peaks.max() + 0.5 * stride * sum(runs for *_, runs in rows) + 1e-9


def test_while_no_kv_has_come_back_nobody_lends_to_a_prompt_with_time():
    """Two streams without targets between tokens leave too few blocks; the prompt has a minute."""
    load = Workload(
        arrival_time=np.array([0.0, 0.0, 2.6]), num_prompt_tokens=np.array([100, 100, 300]),
        num_output_tokens=np.array([390, 390, 2]), max_tokens=np.array([390, 390, 2]), slo_ttft=np.full(3, 60.0),
        slo_tbt=np.full(3, np.inf),
    )  # fmt: skip
    truth = AffineModel(alpha_p=0.01, beta_p=0.0003, alpha_d=0.008, beta_d=0.0001, kappa=0.0001)
    config = EngineConfig(max_num_batched_tokens=512, max_num_seqs=32, num_blocks=64, block_size=16)
    log = simulate(load, as_policy(Tide(kv_gate="off")), truth, config, fast_forward=False).log
    assert log.finished.all()
    assert not log.num_preemptions.any()
    assert log.first_token_time[2] > 3.0  # it did wait for blocks


def test_a_late_stream_that_runs_is_owed_no_more_than_a_step():
    """Else its rounds, which cost next to nothing, would save up for the next prompt, which nobody on time survives."""
    state, why = t.fresh_state(), np.zeros(t.WHY_SIZE)
    state[t.KNEE], state[t.KNEE_TIME], state[t.CREDIT] = 512.0, 0.05, 0.3
    why[t.W_LATE_STREAMS] = why[t.W_LATE_DECODES] = why[t.W_STREAMS_TURN] = why[t.W_TURN_JOINED] = 1.0
    settle(0, True, 0.02, 0.02, state, why)
    assert state[t.CREDIT] == 0.05
    why[t.W_TURN_JOINED] = 0.0  # its turn, but others joined
    for _ in range(200):
        settle(0, True, 0.02, 0.02, state, why)
    assert state[t.CREDIT] > 0.1


def test_late_streams_join_no_round_that_costs_those_on_time_slack():
    policy, joined, wrong = Tide(late_share=0.0, late_every=1), 0, 0

    def look(view: StepView, plan: Plan) -> None:
        nonlocal joined, wrong
        why, n = policy._store.why, view.live.index.size
        on_time = policy._store.ints[t.I_ROLE, :n] == t.ON_TIME_DECODE
        if why[t.W_LATE_DECODES] > 0 and on_time.any():
            joined += 1
            wrong += why[t.W_EVERY_RAW] > policy._store.floats[t.F_PACE, :n][on_time].min()

    rng, n = np.random.default_rng(2), 300
    load = Workload(
        arrival_time=np.cumsum(rng.exponential(1 / 30.0, n)), num_prompt_tokens=rng.integers(5, 300, n),
        num_output_tokens=rng.integers(20, 80, n), max_tokens=np.full(n, 128), slo_ttft=np.full(n, 0.5),
        slo_tbt=np.full(n, 0.013),
    )  # fmt: skip
    truth = AffineModel(alpha_p=0.01, beta_p=0.0003, alpha_d=0.008, beta_d=0.0003, kappa=0.0001)
    config = EngineConfig(max_num_batched_tokens=512, max_num_seqs=64, num_blocks=4000, block_size=16)
    simulate(load, as_policy(policy), truth, config, on_step=look, fast_forward=False)
    assert joined > 20
    assert not wrong


def test_slack_is_kept_only_where_requests_miss_and_prompts_can_wait():
    prm, state, why = Tide()._parameters.copy(), t.fresh_state(), np.zeros(t.WHY_SIZE)
    why[t.W_SOURCE], why[t.W_LAXITY], why[t.W_ROUND] = 1.0, 1.0, 0.02
    why[t.W_CAP], why[t.W_MEAN_TIME] = 0.4, 0.1
    kept = []
    for miss_rate in (0.0, 0.05, 0.1, 0.5):
        state[t.MISS_RATE] = miss_rate
        kept.append(slack_to_keep(prm, state, why))
    assert kept == pytest.approx([0.0, 0.05, 0.1, 0.1])
    why[t.W_CAP] = 0.04
    assert slack_to_keep(prm, state, why) == pytest.approx(0.04)
    why[t.W_LAXITY] = 0.07  # less than four rounds: the prompt cannot wait
    assert slack_to_keep(prm, state, why) == 0.0
    why[t.W_LAXITY], prm[t.GAP_MODE] = 1.0, 1.0
    assert slack_to_keep(prm, state, why) == 0.0
