"""The simulator on timelines small enough to work out by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from slacktide.core.latency import AffineModel
from slacktide.core.policies.vllm_v1 import VllmV1
from slacktide.core.types import Plan, StepResult, StepView
from slacktide.errors import InputError
from slacktide.metrics.log import ABORTED, FINISHED, REJECTED, RunLog
from slacktide.sim.engine import EngineConfig, PlanError, never_fits, simulate
from slacktide.workload.requests import ClosedLoop, Workload

# 10 ms + 1 ms per prefill token; 5 ms + 1 ms per decode; mixed 10 ms + 1 ms per token.
MODEL = AffineModel(alpha_p=0.010, beta_p=0.001, alpha_d=0.005, beta_d=0.001, alpha_mb=0.010, kappa=0.0)


def workload(arrival: list[float], prompt: list[int], output: list[int], **columns: Any) -> Workload:
    return Workload(np.array(arrival, dtype=float), np.array(prompt), np.array(output), **columns)


def token_times(log: RunLog, request: int) -> list[float]:
    steps = log.token_step[log.token_offsets[request] : log.token_offsets[request + 1]]
    return [float(log.start[s] + log.duration[s]) for s in steps]


def run(load: Workload, policy: Any = None, **settings: Any) -> RunLog:
    options = {k: settings.pop(k) for k in ("fast_forward", "on_step", "max_concurrency") if k in settings}
    return simulate(load, policy or VllmV1(), MODEL, EngineConfig(**settings), check=True, **options).log


def test_one_request_alone() -> None:
    """20 prompt tokens: 30 ms; then two decode steps of 6 ms."""
    log = run(workload([1.0], [20], [3]))
    assert token_times(log, 0) == pytest.approx([1.030, 1.036, 1.042])
    assert log.end_time[0] == pytest.approx(1.042)
    assert log.first_scheduled_time[0] == 1.0
    assert log.scheduled_tokens[0] == 22  # the last token is never computed


def test_arrival_during_a_step_joins_the_next() -> None:
    """B (10 tokens) arrives while A's 30 ms prefill runs: next step is mixed, 10 + 11 ms."""
    log = run(workload([0.0, 0.01], [20, 10], [2, 1]))
    assert token_times(log, 0) == pytest.approx([0.030, 0.051])
    assert token_times(log, 1) == pytest.approx([0.051])
    assert log.num_decodes.tolist() == [0, 1]
    assert log.num_prefill_tokens.tolist() == [20, 10]


def test_chunked_prefill_under_the_budget() -> None:
    log = run(workload([0.0], [20], [1]), max_num_batched_tokens=8)
    assert log.num_tokens.tolist() == [8, 8, 4]
    assert token_times(log, 0) == pytest.approx([0.018 + 0.018 + 0.014])


def test_idle_time_is_skipped() -> None:
    log = run(workload([0.0, 100.0], [10, 10], [1, 1]))
    assert log.start.tolist() == [0.0, 100.0]


def test_async_scheduling_decides_one_step_ahead() -> None:
    """Depth 2: the second step is decided when the first starts, so B, arriving at 1 ms, waits for the third."""
    load = workload([0.0, 0.001], [20, 10], [3, 1], max_tokens=np.array([3, 1]))
    log = run(load, pipeline_depth=2)
    # Step 0 prefill A (30 ms), step 1 decode A (6 ms, decided at 0), step 2 decided at 30 ms: decode A + prefill B.
    assert log.num_tokens.tolist() == [20, 1, 11]
    assert token_times(log, 0) == pytest.approx([0.030, 0.036, 0.057])
    assert token_times(log, 1) == pytest.approx([0.057])


def test_async_scheduling_wastes_a_step_on_a_request_that_just_ended() -> None:
    """A ends at its first token, which nobody knows when step 1 is decided; max_tokens known to be reached is."""
    unknown = run(workload([0.0], [20], [1], max_tokens=np.array([5])), pipeline_depth=2)
    assert unknown.num_tokens.tolist() == [20, 1]
    assert unknown.end_time[0] == pytest.approx(0.030)
    known = run(workload([0.0], [20], [1], max_tokens=np.array([1])), pipeline_depth=2)
    assert known.num_tokens.tolist() == [20]


def test_preemption_by_recompute() -> None:
    """4 blocks of 4 tokens; two prompts of 7 (2 blocks each) grow: the later one loses all and starts over."""
    log = run(workload([0.0, 0.0], [7, 7], [4, 4]), num_blocks=4, block_size=4)
    # Step 0 prefills both (computed 7), step 1 computes token 8 of both, step 2 needs a 3rd block for each.
    assert log.num_preempted.tolist()[:3] == [0, 0, 1]
    assert log.num_preemptions.tolist() == [0, 1]
    assert log.recomputed_tokens.tolist() == [0, 8]
    assert log.end_reason.tolist() == [FINISHED, FINISHED]
    assert (np.diff(log.token_offsets) == 4).all()
    # B had 2 outputs; recomputing 7 + 2 tokens yields its third, then one decode: 8 + 9 + 1 tokens in all.
    assert log.scheduled_tokens.tolist() == [10, 18]


def hashes(*rows: list[int]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    return np.array([x for row in rows for x in row]), np.cumsum([0, *[len(row) for row in rows]])


def test_prefix_hits_skip_prefill() -> None:
    """Same first 8 of 12 tokens: the second request computes only the last 4."""
    load = workload([0.0, 1.0], [12, 12], [1, 1], hash_ids=hashes([1, 2, 3], [1, 2, 4]), hash_block_size=4)
    log = run(load, enable_prefix_caching=True, block_size=4)
    assert log.num_tokens.tolist() == [12, 4]
    assert log.cached_tokens.tolist() == [0, 8]
    assert run(load, block_size=4).num_tokens.tolist() == [12, 12]


def test_equal_ids_after_different_ones_are_no_prefix() -> None:
    load = workload([0.0, 1.0], [12, 12], [1, 1], hash_ids=hashes([1, 2, 3], [9, 2, 3]), hash_block_size=4)
    assert run(load, enable_prefix_caching=True, block_size=4).num_tokens.tolist() == [12, 12]


def test_a_wholly_cached_prompt_computes_its_last_block() -> None:
    """At least one token must be computed, and hits are whole blocks: 12 = 8 cached + 4."""
    load = workload([0.0, 1.0], [12, 12], [1, 1], hash_ids=hashes([1, 2, 3], [1, 2, 3]), hash_block_size=4)
    assert run(load, enable_prefix_caching=True, block_size=4).num_tokens.tolist() == [12, 4]


def test_oldest_cached_blocks_are_evicted_first() -> None:
    """Pool of 4: A (2 blocks) then B (2 blocks) fill it; C takes 2 and evicts A's, so A' misses and B' would hit."""
    ids = hashes([1, 2], [3, 4], [5, 6], [3, 4], [1, 2])
    load = workload([0, 1, 2, 3, 4], [8] * 5, [1] * 5, hash_ids=ids, hash_block_size=4)
    log = run(load, enable_prefix_caching=True, block_size=4, num_blocks=4)
    assert log.cached_tokens.tolist() == [0, 0, 0, 4, 0]


def test_blocks_without_content_are_used_first() -> None:
    """A leaves two cached blocks, B half a block without content; C needs three of four, and A's head survives."""
    ids = hashes([1, 2], [], [3, 4, 5], [1, 9])
    load = workload([0, 1, 2, 3], [8, 3, 12, 9], [1] * 4, hash_ids=ids, hash_block_size=4)
    log = run(load, enable_prefix_caching=True, block_size=4, num_blocks=4)
    assert log.cached_tokens.tolist() == [0, 0, 0, 4]


def test_an_equal_block_takes_the_place_of_an_evicted_one() -> None:
    """B computes the last block of A's prompt itself, so it is cached twice; C evicts A's, and D finds B's."""
    ids = hashes([1, 2], [1, 2], [3, 4, 5], [1, 2, 6])
    load = workload([0, 1, 2, 3], [8, 8, 12, 12], [1] * 4, hash_ids=ids, hash_block_size=4)
    log = run(load, enable_prefix_caching=True, block_size=4, num_blocks=5)
    # Freed: 2 of A, then 2 of B and the shared 1. C takes two empty blocks and A's 2; D needs B's 2.
    assert log.cached_tokens.tolist() == [0, 4, 0, 8]


def test_recomputed_tokens_are_those_computed_twice() -> None:
    """What the cache kept of a preempted request is not computed again."""
    load = workload([0.0, 0.0], [7, 7], [3, 6])
    log = run(load, num_blocks=4, block_size=4, enable_prefix_caching=True)
    assert (log.num_preemptions.tolist(), log.cached_tokens.tolist()) == ([0, 1], [0, 4])
    assert log.recomputed_tokens.tolist() == [0, 4]  # 8 computed before, 4 of them found
    assert log.scheduled_tokens.tolist() == [9, 12 + 4]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_policy_is_told_whom_a_step_preempted(depth: int) -> None:
    """By request number, whatever the pipeline depth."""
    told: list[int] = []

    class Listening(Scripted):
        def observe(self, result: StepResult) -> None:
            told.extend(result.preempted.tolist())

    load = workload([0.0, 1.0, 1.0], [1, 7, 7], [1, 4, 4])
    log = run(load, Listening(), num_blocks=4, block_size=4, pipeline_depth=depth)
    assert told == [2]
    assert log.num_preemptions.tolist() == [0, 0, 1]


def test_a_preempted_request_finds_its_own_blocks() -> None:
    load = workload([0.0, 0.0], [7, 7], [6, 2])
    plain = run(load, num_blocks=4, block_size=4)
    cached = run(load, num_blocks=4, block_size=4, enable_prefix_caching=True)
    assert plain.num_preemptions.tolist() == cached.num_preemptions.tolist() == [0, 0]
    tight = run(workload([0.0, 0.0], [7, 7], [3, 6]), num_blocks=4, block_size=4, enable_prefix_caching=True)
    assert tight.num_preemptions.tolist() == [0, 1]
    assert tight.cached_tokens.tolist() == [0, 4]  # its head block survived; A took the others


def test_aborts_free_blocks_and_keep_their_tokens() -> None:
    load = workload([0.0, 0.0], [20, 20], [50, 2], abort_time=np.array([0.1, np.inf]))
    log = run(load)
    assert log.end_reason.tolist() == [ABORTED, FINISHED]
    delivered = int(log.token_offsets[1])
    assert 0 < delivered < 50
    assert token_times(log, 0)[-1] <= log.end_time[0]
    assert 0.1 <= log.end_time[0] < 0.12


@pytest.mark.parametrize("fast_forward", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_who_leaves_during_a_step_gets_none_of_its_tokens(depth: int, fast_forward: bool) -> None:
    """vLLM handles aborts before a step's outputs: A leaves during the step that would have ended it."""
    load = workload([0.0, 0.0], [20, 20], [1, 3], abort_time=np.array([0.02, 0.057]), max_tokens=np.array([1, 3]))
    log = run(load, pipeline_depth=depth, fast_forward=fast_forward, max_num_batched_tokens=40)
    assert log.end_reason.tolist() == [ABORTED, ABORTED]
    assert np.diff(log.token_offsets).tolist() == [0, 2]  # prefill of both until 50 ms, a decode until 56 ms
    assert log.end_time.tolist() == [0.02, 0.057]


@pytest.mark.parametrize("fast_forward", [False, True])
def test_a_refused_request_delays_nobody(fast_forward: bool) -> None:
    """B can never fit; C arrives right after it, while A decodes, and joins the very next step."""
    load = workload([0.0, 0.031, 0.032], [20, 40, 4], [9, 1, 1])
    log = run(load, num_blocks=8, block_size=4, fast_forward=fast_forward)
    assert log.end_reason.tolist() == [FINISHED, REJECTED, FINISHED]
    assert log.end_time[1] == 0.031
    assert log.first_scheduled_time[2] == pytest.approx(0.036)


def test_room_at_the_client_is_used_at_once() -> None:
    """A gives up while B runs: C, waiting for one of two seats, is in the step that begins next."""
    load = workload([0.0, 0.0, 0.0], [20, 20, 4], [9, 3, 1], abort_time=np.array([0.055, np.inf, np.inf]))
    log = run(load, max_concurrency=2, max_num_batched_tokens=40)
    assert log.num_tokens.tolist()[:3] == [40, 2, 5]  # until 50 ms, until 57 ms, then B and C


def test_what_never_fits_is_refused() -> None:
    load = workload([0.0, 0.0, 0.0], [100, 17, 16], [1, 1, 2])
    settings = {"num_blocks": 4, "block_size": 4}
    assert never_fits(load, EngineConfig(**settings)).tolist() == [0, 1, 2]
    assert run(load, **settings).end_reason.tolist() == [REJECTED] * 3
    just = workload([0.0], [16], [1])  # 16 computed tokens: the last output needs no slot
    assert never_fits(just, EngineConfig(**settings)).size == 0
    assert run(just, **settings).end_reason.tolist() == [FINISHED]
    assert never_fits(just, EngineConfig(max_model_len=16)).tolist() == [0]


def test_closed_loop_sends_after_thinking() -> None:
    load = workload([0.0] * 3, [20] * 3, [1] * 3, closed=ClosedLoop(concurrency=1, think_time=0.5))
    log = run(load)
    assert log.arrival_time == pytest.approx([0.0, 0.53, 1.06])
    assert log.end_time == pytest.approx([0.03, 0.56, 1.09])


def test_max_concurrency_waits_at_the_client_and_counts() -> None:
    log = run(workload([0.0, 0.0], [20, 20], [1, 1]), max_concurrency=1)
    assert log.arrival_time.tolist() == [0.0, 0.0]
    assert log.end_time == pytest.approx([0.030, 0.060])
    assert log.num_waiting.tolist() == [0, 0]


def test_fast_forward_stops_for_arrivals_and_aborts() -> None:
    load = workload([0.0, 0.2, 0.2], [20, 20, 4], [80, 5, 90], abort_time=np.array([np.inf, np.inf, 0.5]))
    fast, slow = run(load), run(load, fast_forward=False)
    for field in dataclasses.fields(fast):
        a, b = getattr(fast, field.name), getattr(slow, field.name)
        if isinstance(a, np.ndarray):
            assert np.array_equal(a, b, equal_nan=a.dtype.kind == "f"), field.name


class Scripted:
    """Plays fixed plans, then vllm-v1."""

    def __init__(self, *plans: Plan) -> None:
        self.plans, self.rest = list(plans), VllmV1()

    def plan(self, view: StepView) -> Plan:
        return self.plans.pop(0) if self.plans else self.rest.plan(view)


def rows(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, dtype=np.int64)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan(rows(5), rows(1)), "does not exist"),
        (Plan(rows(-1), rows(1)), "does not exist"),
        (Plan(rows(0, 0), rows(1, 1)), "twice"),
        (Plan(rows(0), rows(0)), "no token, or more than it needs"),
        (Plan(rows(0), rows(21)), "no token, or more than it needs"),
        (Plan(rows(0, 1), rows(20, 20)), "max_num_batched_tokens"),
        (Plan(rows(0, 1, 2), rows(1, 1, 1)), "max_num_seqs"),
        (Plan(rows(0), rows(20)), "lacks KV blocks"),
        (Plan(rows(), rows(), preempted=rows(0)), "does not run"),
    ],
)
def test_impossible_plans_are_errors(plan: Plan, message: str) -> None:
    blocks = 4 if "KV" in message else 100
    load = workload([0.0] * 3, [20] * 3, [1] * 3) if blocks > 4 else workload([0.0], [20], [1])
    config = EngineConfig(max_num_batched_tokens=30, max_num_seqs=2, num_blocks=blocks + 4, block_size=4)
    if "KV" in message:
        load = workload([0.0, 0.0], [20, 20], [1, 1])
        plan = Plan(rows(0, 1), rows(20, 20))
        config = EngineConfig(num_blocks=8, block_size=4)
    with pytest.raises(PlanError, match=message):
        simulate(load, Scripted(plan), MODEL, config)


def test_a_policy_that_never_schedules_is_named() -> None:
    class Idle:
        name = "idle"

        def plan(self, view: StepView) -> Plan:
            return Plan(rows(), rows())

    with pytest.raises(PlanError, match="policy idle schedules nothing, with 1 requests live"):
        simulate(workload([0.0], [20], [1]), Idle(), MODEL, EngineConfig())


def test_rejection_and_relegation_by_the_policy() -> None:
    log = run(
        workload([0.0] * 3, [20] * 3, [1] * 3),
        Scripted(Plan(rows(2), rows(20), rejected=rows(0), relegated=rows(1))),
    )
    assert log.end_reason.tolist() == [REJECTED, FINISHED, FINISHED]
    assert log.relegated.tolist() == [False, True, False]
    assert log.end_time == pytest.approx([0.0, 0.060, 0.030])


@pytest.mark.parametrize(
    "settings",
    [{"max_num_seqs": 0}, {"num_blocks": 0}, {"block_size": 0}, {"watermark": 1.0}, {"watermark": -0.1},
     {"pipeline_depth": 3}, {"max_num_batched_tokens": 0}],
)  # fmt: skip
def test_engine_settings_are_checked(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(settings))):
        EngineConfig(**settings)


def test_stop_sees_the_log_so_far_and_ends_the_run() -> None:
    """Arrivals over 8 s; the first look is after 1 s, when only the requests of the first second have ended."""
    load = workload([float(i) for i in range(9)], [20] * 9, [2] * 9)
    seen: list[RunLog] = []

    def second_look(log: RunLog) -> bool:
        seen.append(log)
        return len(seen) == 2

    result = simulate(load, VllmV1(), MODEL, EngineConfig(), stop=second_look)
    assert result.stopped
    assert [int(log.finished.sum()) for log in seen] == [1, 2]
    assert int(result.log.finished.sum()) == 2
    assert np.isnan(result.log.end_time).sum() == 7
    assert not simulate(load, VllmV1(), MODEL, EngineConfig(), stop=lambda log: False).stopped


def test_a_policy_that_thrashes_for_ever_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It preempts the request again before the prompt is done, step after step."""

    class Thrash:
        name = "thrash"

        def plan(self, view: StepView) -> Plan:
            running = np.flatnonzero(view.live.is_running)
            return Plan(rows(0), rows(5), preempted=running)

    monkeypatch.setattr("slacktide.sim.engine._PATIENCE", 100)
    with pytest.raises(PlanError, match="policy thrash delivered no token in 100 steps, with 1 requests live"):
        simulate(workload([0.0], [20], [1]), Thrash(), MODEL, EngineConfig())


@pytest.mark.parametrize(
    ("columns", "options", "sent"),
    [
        ({"closed": ClosedLoop(concurrency=1, think_time=0.5)}, {}, [0.0, 0.53, 1.06]),
        ({}, {"max_concurrency": 1}, [0.0, 0.03, 0.06]),
    ],
)
def test_a_policy_sees_when_a_request_was_sent(
    columns: dict[str, Any], options: dict[str, Any], sent: list[float]
) -> None:
    """In a closed loop, and behind a client limit, that is not the workload arrival time; deadlines start there."""
    seen: dict[int, float] = {}

    def note(view: StepView, _: Plan) -> None:
        seen.update(zip(view.live.index.tolist(), view.live.arrival_time.tolist(), strict=True))

    run(workload([0.0] * 3, [20] * 3, [1] * 3, **columns), on_step=note, **options)
    assert [seen[i] for i in range(3)] == pytest.approx(sent)
