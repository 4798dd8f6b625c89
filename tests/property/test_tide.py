"""What docs/background/tide.md promises of `tide`, on random situations and against brute force."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slacktide.core import tide as t
from slacktide.core.fair import Shares
from slacktide.core.kernels_tide_late import OVERDUE
from slacktide.core.kernels_tide_queue import LATE_PATIENCE
from slacktide.core.kernels_tide_supply import ROUNDING, accept
from slacktide.core.latency import AffineModel
from slacktide.core.live import NUM_INT_FIELDS, PRIORITY
from slacktide.core.pack import as_policy
from slacktide.core.policies.tide import Tide
from slacktide.core.spec import parse_policies
from slacktide.core.types import Plan, StepView
from slacktide.metrics.slo import judge
from slacktide.sim.engine import EngineConfig, RunResult, simulate
from slacktide.workload.requests import Workload

TRUTH = AffineModel(alpha_p=0.01, beta_p=0.0003, alpha_d=0.008, beta_d=0.0001, kappa=0.0001)
ONE_TENANT = Shares({}).of(())
ENGINE = EngineConfig(max_num_batched_tokens=512, max_num_seqs=32, num_blocks=400, block_size=16)


def traffic(n: int, rate: float, seed: int, ttft: float = 0.5, tbt: float = 0.05, **columns: Any) -> Workload:
    rng = np.random.default_rng(seed)
    output = rng.integers(2, 40, n)
    return Workload(
        arrival_time=np.cumsum(rng.exponential(1 / rate, n)),
        num_prompt_tokens=rng.integers(5, 300, n),
        num_output_tokens=output,
        max_tokens=np.full(n, 64),
        slo_ttft=np.full(n, ttft),
        slo_tbt=np.full(n, tbt),
        **columns,
    )


def simulated(policy: Any, load: Workload, config: EngineConfig = ENGINE, **options: Any) -> RunResult:
    return simulate(load, as_policy(policy), TRUTH, config, check=True, fast_forward=False, **options)


# ---- claim 1: by prediction, no prompt that is chosen makes a stream miss that a decode round would have saved


@given(st.integers(0, 10_000), st.sampled_from([5.0, 20.0, 60.0]), st.sampled_from([0.03, 0.05, 0.2]))
@settings(max_examples=25)
def test_a_chosen_prompt_makes_no_safe_stream_late(seed, rate, tbt):
    policy = Tide(late_share=0.0)  # the reserve of late work is allowed to; nothing else is
    broken: list[str] = []

    def look(view: StepView, plan: Plan) -> None:
        why, live = plan.why or {}, view.live
        if not why.get("prefill"):
            return
        slack = live.next_deadline - view.now
        decode = live.is_decode & (policy._store.ints[t.I_MISSED, : live.index.size] == 0)
        safe = np.flatnonzero(decode & (slack >= why["round"]))
        time = TRUTH.step_time(
            plan.num_scheduled_tokens, live.num_computed_tokens[plan.rows], live.is_decode[plan.rows]
        )
        run = set(plan.rows.tolist())
        for row in safe.tolist():
            after = slack[row] - time + (live.slo_tbt[row] if row in run else 0.0)
            if time > slack[row] + 1e-9 or after < min(why["round"], after + 1) - 1e-9:
                broken.append(f"{why['action']}: row {row} slack {slack[row]} step {time} round {why['round']}")

    simulated(policy, traffic(40, rate, seed, tbt=tbt), on_step=look)
    assert not broken, broken[:3]


# ---- claim 2: without decodes the accepted set is Moore and Hodgson's, as large as any that is on time


@given(st.lists(st.tuples(st.floats(0.1, 5.0), st.floats(0.05, 2.0)), min_size=1, max_size=9))
def test_accepts_as_many_prompts_as_any_set_that_is_on_time(jobs):
    jobs = sorted(jobs)
    n = len(jobs)
    ints, si = np.zeros((NUM_INT_FIELDS, n), dtype=np.int64), np.zeros((t.INT_SCRATCH, n), dtype=np.int64)
    sf = np.zeros((t.FLOAT_SCRATCH, 2 * n))
    sf[t.F_SLACK, :n], sf[t.F_SERVICE, :n] = zip(*jobs, strict=True)
    unlimited = np.full(2, np.inf)
    count, _ = accept(
        np.arange(n), np.empty(0, dtype=np.int64), 0.0, 1.0, True, unlimited, unlimited, ints, si, sf,
        ONE_TENANT,
    )  # fmt: skip

    def on_time(chosen: tuple[int, ...]) -> bool:
        return all(sum(jobs[k][1] for k in chosen if k <= j) <= jobs[j][0] + ROUNDING for j in chosen)

    best = max(size for size in range(n + 1) if any(on_time(c) for c in combinations(range(n), size)))
    accepted = tuple(np.flatnonzero(si[t.I_ROLE] == t.ACCEPTED).tolist())
    assert count == len(accepted) == best
    assert on_time(accepted)


def test_the_less_important_gives_way():
    n = 2
    ints, si = np.zeros((NUM_INT_FIELDS, n), dtype=np.int64), np.zeros((t.INT_SCRATCH, n), dtype=np.int64)
    sf = np.zeros((t.FLOAT_SCRATCH, 2 * n))
    sf[t.F_SLACK, :n], sf[t.F_SERVICE, :n] = 1.0, (0.9, 0.5)
    ints[PRIORITY] = (0, 5)  # the long one matters more
    unlimited = np.full(2, np.inf)
    accept(np.arange(n), np.empty(0, dtype=np.int64), 0.0, 1.0, True, unlimited, unlimited, ints, si, sf, ONE_TENANT)
    assert si[t.I_ROLE].tolist() == [t.ACCEPTED, t.DEMOTED]


# ---- claim 3: demotion undoes itself


def test_demotion_undoes_itself_when_room_appears():
    seen: list[tuple[int, int]] = []

    def look(view: StepView, plan: Plan) -> None:
        why = plan.why or {}
        if "accepted" in why:
            seen.append((why["on_time_prompts"], why["accepted"]))

    # Three prompts of which only two fit until 0.35 s; one client leaves at 0.05 s, and the demoted one comes back.
    load = Workload(
        arrival_time=np.array([0.0, 0.001, 0.002]),
        num_prompt_tokens=np.array([400, 380, 390]),
        num_output_tokens=np.array([1, 1, 1]),
        max_tokens=np.array([1, 1, 1]),
        slo_ttft=np.full(3, 0.4),
        slo_tbt=np.full(3, 1.0),
        abort_time=np.array([np.inf, 0.05, np.inf]),
    )
    config = EngineConfig(max_num_batched_tokens=64, max_num_seqs=8, num_blocks=400)
    simulated(Tide(), load, config, on_step=look)
    demoted = [prompts - accepted for prompts, accepted in seen]
    assert max(demoted) > 0
    assert demoted[-1] == 0


# ---- claim 4: late work keeps its share under any load, and nothing starves once the load stops


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_late_work_keeps_its_share_under_overload(share):
    policy = Tide(late_share=share)
    load = traffic(600, 60.0, 3)  # about three times what the engine carries
    log = simulated(policy, load).log
    busy_until = float(load.arrival_time[-1])
    late_first_tokens = [
        i for i in range(len(load)) if log.finished[i] and log.end_time[i] < busy_until and judge(log).missed[i]
    ]
    assert len(late_first_tokens) >= 3  # without a reserve hardly one ends before the load does
    assert log.finished.all()


@pytest.mark.parametrize("share", [0.02, 0.1])
def test_the_oldest_late_request_goes_on_within_the_bound(share):
    """Under three times the load, with KV for all: never longer without progress than OVERDUE steps at the knee cost,
    divided by the share, and two steps."""
    policy, longest, waits, state = Tide(late_share=share), 0.0, [0.0], {"oldest": -1, "since": 0.0, "last": 0.0}
    load = traffic(500, 60.0, 4)
    roomy = EngineConfig(max_num_batched_tokens=512, max_num_seqs=600, num_blocks=20_000, block_size=16)

    def look(view: StepView, plan: Plan) -> None:
        nonlocal longest
        longest = max(longest, view.now - state["last"])
        state["last"] = view.now
        roles = policy._store.ints[t.I_ROLE, : view.live.index.size]
        late = np.flatnonzero((roles == t.LATE_DECODE) | (roles == t.LATE_PREFILL))
        oldest = int(view.live.index[late[0]]) if late.size else -1
        if oldest != state["oldest"] or oldest < 0:
            state.update(oldest=oldest, since=view.now)
        if late.size and late[0] in plan.rows:
            waits.append(view.now - state["since"])
            state["since"] = view.now

    simulated(policy, load, roomy, on_step=look)
    bound = OVERDUE * policy._store.state[t.KNEE_TIME] / share + 2 * longest
    assert len(waits) > 50
    assert max(waits) <= bound
    assert max(waits) > 2 * longest  # it was not served all the time: there was something to bound


def test_a_late_prompt_that_others_always_leave_too_few_blocks_gets_them_in_the_end():
    """A long prompt that is late at once needs 32 of 40 blocks; short ones on time hold three quarters for 160 s."""
    n = 90
    load = Workload(
        arrival_time=np.concatenate(([0.5], 1.8 * np.arange(n - 1))),
        num_prompt_tokens=np.array([500] + [100] * (n - 1)),
        num_output_tokens=np.array([2] + [60] * (n - 1)),
        max_tokens=np.array([2] + [60] * (n - 1)),
        slo_ttft=np.array([0.01] + [5.0] * (n - 1)),
        slo_tbt=np.full(n, 1.0),
    )
    slow = AffineModel(alpha_p=0.1, beta_p=0.001, alpha_d=0.1, beta_d=0.001, kappa=0.0)
    config = EngineConfig(max_num_batched_tokens=512, max_num_seqs=32, num_blocks=40, block_size=16)
    ends = []
    for share in (0.02, 0.0):
        log = simulate(load, as_policy(Tide(late_share=share)), slow, config).log
        ends.append(float(log.end_time[np.argmax(log.num_prompt_tokens)]))
    assert ends[0] < LATE_PATIENCE + 40.0
    assert ends[1] > load.arrival_time[-1]  # without a share it starves as long as the others come


# ---- claim 6: a stream that is far ahead of its deadlines lends its KV


@pytest.mark.parametrize(("pace", "lending", "in_time"), [(1.0, True, True), (1.0, False, False), (0.012, True, False)])
def test_a_prompt_borrows_the_kv_of_a_stream_with_time_to_spare(pace, lending, in_time):
    """Two long streams leave 12 of 64 blocks, a prompt that needs 19 has half a second; others came and went."""
    n = 11
    load = Workload(
        arrival_time=np.array([0.0, 0.0, *(0.1 + 0.05 * np.arange(n - 3)), 2.6]),
        num_prompt_tokens=np.array([100, 100] + [20] * (n - 3) + [300]),
        num_output_tokens=np.array([700, 700] + [2] * (n - 3) + [2]),
        max_tokens=np.array([700, 700] + [2] * (n - 3) + [2]),
        slo_ttft=np.full(n, 0.5),
        slo_tbt=np.full(n, pace),
    )
    config = EngineConfig(max_num_batched_tokens=512, max_num_seqs=32, num_blocks=64, block_size=16)
    victims: list[int] = []

    def look(view: StepView, plan: Plan) -> None:
        if 2.6 <= view.now <= 3.1:
            victims.extend(view.live.index[row] for row in plan.preempted)

    log = simulated(Tide(lending=lending), load, config, on_step=look).log
    verdict = judge(log)
    assert (not verdict.missed[-1]) == in_time
    assert victims == ([1] if in_time else [])
    if in_time:
        assert not verdict.missed.any()


# ---- claim 5: who has no target loses nothing to exclusive or mixed batching


@pytest.mark.parametrize(("prompt", "output"), [(256, 128), (64, 256)])
def test_without_targets_it_is_as_fast_as_the_better_of_exclusive_and_mixed(prompt, output):
    n = 120
    load = Workload(
        arrival_time=np.zeros(n),
        num_prompt_tokens=np.full(n, prompt),
        num_output_tokens=np.random.default_rng(0).integers(output // 2, 3 * output // 2, n),
        max_tokens=np.full(n, 2 * output),
        slo_ttft=np.full(n, np.inf),
        slo_tbt=np.full(n, np.inf),
    )
    config = EngineConfig(max_num_batched_tokens=2048, max_num_seqs=32, num_blocks=4000)
    ends = {text: simulated(parse_policies([text])[0].build(), load, config).log.end_of_run
            for text in ("tide", "vllm-v1", "eb-plus")}  # fmt: skip
    assert ends["tide"] <= 1.02 * min(ends["vllm-v1"], ends["eb-plus"])


# ---- claim 6: what it learns is what steps take


def test_margins_follow_the_truth_where_the_belief_is_off():
    policy = Tide()
    off = AffineModel(alpha_p=0.02, beta_p=0.0006, alpha_d=0.016, beta_d=0.0002, kappa=0.0002)
    load = traffic(60, 8.0, 1)
    simulate(load, as_policy(policy), TRUTH, ENGINE, belief=off)
    learned = policy._margins.learned
    assert learned[0, 0, t.SCENE_ALONE] == pytest.approx(0.5, abs=0.02)
    assert learned[0, 1, t.SCENE_ALONE] == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("factor", [0.7, 1.4])
def test_a_belief_that_is_off_everywhere_costs_little(factor):
    off = AffineModel(
        alpha_p=0.01 * factor, beta_p=0.0003 * factor, alpha_d=0.008 * factor, beta_d=0.0001 * factor,
        kappa=0.0001 * factor,
    )  # fmt: skip
    load = traffic(300, 12.0, 5)
    true = judge(simulate(load, as_policy(Tide()), TRUTH, ENGINE).log).attainment()
    biased = judge(simulate(load, as_policy(Tide()), TRUTH, ENGINE, belief=off).log).attainment()
    assert biased >= true - 0.03
