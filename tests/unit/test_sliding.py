"""SlidingServe's parts: deadlines, orders, windows, batches, and what differs from the published algorithms."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from slacktide.core import chunker, live
from slacktide.core.chunker import Load
from slacktide.core.deadlines import Survey, speculative_deadline, survey, windows
from slacktide.core.kinds import DECODE, PREFILL
from slacktide.core.latency import AffineModel
from slacktide.core.latency_extended import ExtendedFeatureModel
from slacktide.core.latency_families import RooflineModel, SevenFeatureModel
from slacktide.core.live import LiveTable
from slacktide.core.outputs import OutputLengths, StepYield
from slacktide.core.pack import as_policy
from slacktide.core.policies.greedy_dynamic import GreedyDynamic
from slacktide.core.policies.qoserve import QoServe
from slacktide.core.policies.sliding import Sliding
from slacktide.core.policies.sola import Sola
from slacktide.core.priority import PrefillRate, by_class, classes, edf_feasible, paper_order, urgency
from slacktide.core.types import RUNNING, SLO, WAITING, Limits, Request, StepView
from slacktide.metrics.slo import judge
from slacktide.sim.engine import EngineConfig, simulate
from slacktide.workload.requests import Workload

MS = 1e-3
AFFINE = AffineModel(alpha_p=15 * MS, beta_p=0.096 * MS, alpha_d=15 * MS, beta_d=0.096 * MS)


def set_row(table: LiveTable, i: int, values: dict[int, int]) -> None:
    for field, value in values.items():
        table.ints[field, i] = value


def view(rows: list[dict], now: float = 0.0, latency=AFFINE, **limits: int) -> StepView:
    """Rows as dictionaries: prompt, and optionally computed, output, ttft, tbt, e2e, arrival, priority, first."""
    table, held, running = LiveTable(), 0, 0
    for i, row in enumerate(rows):
        computed = row.get("computed", 0)
        status = RUNNING if computed else WAITING
        blocks = -(-computed // 16)
        held += blocks
        table.append(
            Request(
                i, row.get("arrival", 0.0) + i * 1e-9, row["prompt"], row.get("max_tokens", 1000),
                SLO(*(row.get(name, math.inf) for name in ("ttft", "tbt", "e2e"))), row.get("priority", 0),
            )
        )  # fmt: skip
        set_row(
            table, i, {live.STATUS: status, live.NUM_COMPUTED: computed, live.NUM_OUTPUT: row.get("output", 0),
            live.NUM_BLOCKS: blocks, live.ADMISSION_ORDER: running if computed else -1,
            live.RELEGATED: row.get("relegated", 0)},
        )  # fmt: skip
        table.floats[live.FIRST_TOKEN, i] = row.get("first", row.get("arrival", 0.0) if row.get("output") else math.nan)
        running += bool(computed)
    given = {"max_num_batched_tokens": 2048, "max_num_seqs": 256, "num_blocks": 10_000} | limits
    free = given.pop("num_free_blocks", given["num_blocks"] - held)
    return StepView(now, table.live, Limits(block_size=16, num_free_blocks=free, **given), latency)


def decode(slack: float, tbt: float = 0.05, context: int = 100) -> dict:
    """A decode whose next token is due in `slack` seconds from time 0, on time so far."""
    return {"prompt": context, "computed": context, "output": 1, "ttft": slack - tbt + 10, "tbt": tbt, "arrival": -10.0}


# ---- deadlines -------------------------------------------------------------------------------------------------------


def test_slack_counts_tokens_from_the_first_deadline():
    rows = [
        {"prompt": 10, "ttft": 0.5, "tbt": 0.1, "arrival": 1.0},
        {"prompt": 10, "computed": 12, "output": 3, "ttft": 0.5, "tbt": 0.1, "arrival": 1.0, "first": 1.2},
    ]
    found = survey(view(rows, now=1.1))
    assert found.kind.tolist() == [PREFILL, DECODE]
    assert found.slack == pytest.approx([0.4, 0.7])
    assert (found.num_decodes, found.context, found.longest) == (1, 12.0, 12.0)


def test_a_late_first_token_rebases_the_later_ones():
    row = {"prompt": 10, "computed": 11, "output": 2, "ttft": 0.5, "tbt": 0.1, "first": 0.9}
    assert survey(view([row], now=1.0)).slack == pytest.approx([0.1])
    assert survey(view([row], now=1.0), rebase=False).slack == pytest.approx([-0.3])


def test_without_a_ttft_the_first_token_is_the_anchor():
    row = {"prompt": 10, "computed": 11, "output": 2, "tbt": 0.1, "first": 0.9}
    assert survey(view([row], now=1.0)).slack == pytest.approx([0.1])


def test_no_target_is_infinite_slack_and_binds_nobody():
    found = survey(view([{"prompt": 10, "computed": 11, "output": 2}, {"prompt": 5}], now=3.0))
    assert np.isinf(found.slack).all()
    bounds, late = windows(found, 0.01, 3)
    assert (late, bounds.tolist()) == (0, [math.inf] * 3)


def test_next_window_is_the_earliest_second_deadline():
    found = survey(view([decode(0.04, 0.05), decode(0.06, 0.02), decode(0.2, 0.1)]))
    bounds, _ = windows(found, 0.0, 2)
    assert bounds == pytest.approx([0.04, min(0.04 + 0.05, 0.06 + 0.02, 0.3)])


def test_late_decodes_bind_softly():
    found = survey(view([decode(-0.3, 0.05), decode(0.4, 0.05)]))
    assert windows(found, 0.015, 1)[0] == pytest.approx([0.05])
    assert windows(found, 0.015, 1, late_factor=3.0)[0] == pytest.approx([0.15])
    assert windows(found, 0.015, 1, late_factor=math.inf)[0] == pytest.approx([0.4])
    assert windows(found, 0.015, 1)[1] == 1


def test_end_to_end_target_becomes_a_pace():
    from slacktide.core.bounded import begin

    rows = [
        {"prompt": 10, "computed": 11, "output": 2, "e2e": 2.0, "first": 0.1, "max_tokens": 12},
        {"prompt": 10, "e2e": 2.0, "max_tokens": 12},
        {"prompt": 10, "e2e": 0.5, "max_tokens": 12},
    ]
    found = begin(view(rows, now=1.0), 1.0, None, expected_output=100).survey
    step = AFFINE.step_time(np.array([1]), np.array([11]), np.array([True]))
    assert found.slack[0] == found.pace[0] == pytest.approx(1.0 / 10)
    assert found.slack[1] == pytest.approx(1.0 - 11 * step)
    assert np.isinf(found.slack[2])  # it has passed: nothing to protect


def test_speculative_deadlines():
    assert speculative_deadline(1.0, 0.5, 0.1, 0, 3.0) == 1.5
    assert speculative_deadline(1.0, 0.5, 0.1, 7, 1.0, "step") == pytest.approx(2.2)
    assert speculative_deadline(1.0, 0.5, 0.1, 7, 3.0) == pytest.approx(2.2)  # what was promised does not change
    assert speculative_deadline(1.0, 0.5, 0.1, 7, 3.0, "step") == pytest.approx(1.7)  # the note's form tightens it
    assert speculative_deadline(0.0, 0.5, math.inf, 0, 2.0) == 0.5
    for rate, form in ((0.5, "token"), (math.nan, "token"), (2.0, "word")):
        with pytest.raises(ValueError, match="expected"):
            speculative_deadline(0.0, 0.5, 0.1, 1, rate, form)
    found = survey(view([decode(0.04, 0.05)]))
    assert windows(found, 0.0, 2, tokens_per_step=3.0)[0] == pytest.approx([0.04, 0.19])


# ---- orders ----------------------------------------------------------------------------------------------------------

# The note's worked example: remaining tokens, slack in seconds, at 5000 tokens per second.
REMAINING, SLACK = np.array([500, 800, 200, 1024, 300]), np.array([0.040, 0.120, 0.080, 0.200, 0.060])


def test_worked_example_of_the_note_in_the_right_order():
    assert urgency(REMAINING, SLACK, 5000.0) == pytest.approx([2.5, 1.3333, 0.5, 1.024, 1.0], rel=1e-3)
    order = paper_order(REMAINING, SLACK, 5000.0, np.zeros(5, dtype=bool), alpha=1.0)
    assert [f"r{i + 1}" for i in order] == ["r1", "r2", "r4", "r3", "r5"]  # the note prints r1, r2, r5, r4, r3


def test_sound_classes_put_hopeless_prompts_last():
    flags = np.zeros(5, dtype=bool)
    found = classes(REMAINING, SLACK, 5000.0, flags, flags, alpha=0.8, beta=1.5)
    assert [f"r{i + 1}" for i in by_class(found, REMAINING)] == ["r5", "r2", "r4", "r3", "r1"]
    late = classes(REMAINING, SLACK - 0.07, 5000.0, flags, flags, alpha=0.8, beta=9.0)
    assert late.tolist() == [3, 1, 1, 1, 3]
    # The paper does the contrary: r1 and r5 are late already and go before r2 and r4, which can still be saved.
    assert paper_order(REMAINING, SLACK - 0.07, 5000.0, flags, 1.0).tolist() == [2, 4, 0, 1, 3]


def test_protected_prompts_lead_and_relegated_ones_close():
    protected, relegated = np.array([False, True, False]), np.array([True, False, False])
    found = classes(np.array([1, 900, 50]), np.array([9.0, -1.0, 9.0]), 1e4, protected, relegated, alpha=0.8, beta=1.5)
    assert by_class(found, np.array([1, 900, 50])).tolist() == [1, 2, 0]


def test_pace_of_prefills_is_busy_time():
    rate = PrefillRate()
    assert rate.value(4000.0) == 4000.0
    for _ in range(2000):
        rate.planned(100, 3)
        rate.observe(0.05, 3)
        rate.planned(0, 7)  # a decode step takes no part
        rate.observe(0.5, 7)
    assert rate.value(4000.0) == pytest.approx(2000.0, rel=0.1)
    rate.planned(100, 3)
    before = rate.value(1.0)
    rate.observe(None, 3)
    rate.observe(0.05, 9)  # an outcome of another plan
    assert rate.value(1.0) == before


def test_edf_feasibility():
    assert edf_feasible(np.array([1.0, 2.0]), np.array([100, 100]), 100.0)
    assert not edf_feasible(np.array([1.0, 1.5]), np.array([100, 100]), 100.0)
    assert edf_feasible(np.array([-1.0, np.inf]), np.array([1000, 1000]), 100.0)  # late or in no hurry


def test_output_lengths_are_learnt_from_finished_requests():
    outputs = OutputLengths()
    for i in range(40):
        table = LiveTable()
        table.append(Request(i, 0.0, 5, 99))
        set_row(table, 0, {live.STATUS: RUNNING, live.NUM_OUTPUT: 6})
        outputs.watch(table.live)
        assert outputs.expected(3.0) == 3.0 or i >= 20
        outputs.observe(np.array([i, 1000]))
    assert outputs.expected(3.0) == pytest.approx(7.0)


def test_tokens_per_step_are_measured():
    policy = Sliding(tokens_per_step=0, guard=0)
    assert not policy.decode_runs
    for step in range(200):
        rows = [decode(0.2) | {"output": 1 + 3 * step, "computed": 100 + 3 * step}, {"prompt": 50, "ttft": 9.0}]
        policy.plan(view(rows))
    assert policy._yield.mean == pytest.approx(3.0, rel=1e-3)
    one = StepYield()
    assert one.watch(view([decode(0.2)]).live, np.array([0])) == 1.0


# ---- windows ---------------------------------------------------------------------------------------------------------


def load(remaining: list[int], computed: list[int] | None = None, decodes: int = 32, context: int = 500) -> Load:
    done = np.zeros(len(remaining), dtype=np.int64) if computed is None else np.array(computed)
    return Load(decodes, float(decodes * context), float(context), np.array(remaining), done)


def roofline() -> RooflineModel:
    return RooflineModel(8 * MS, 14 * MS, 0.096 * MS, 0.0, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("model", "now_ms", "next_ms", "literal", "greedy"),
    [(AFFINE, 40, 40, 525, 260), (AFFINE, 100, 50, 1252, 885), (roofline(), 30, 40, 566, 229)],
)
def test_algorithm_1_to_the_letter_breaks_the_bound_and_the_clamped_one_does_not(
    model, now_ms, next_ms, literal, greedy
):
    """Reference table of what Algorithm 1 as printed does on simple curves (32 decodes, B = 2048)."""
    state, bounds = load([100_000]), np.array([now_ms, now_ms + next_ms]) * MS
    chosen, most = chunker.split(model, state, bounds, 2048, "paper")
    assert most + 32 == pytest.approx(greedy, abs=1)
    assert chosen + 32 == pytest.approx(literal, abs=8)  # the three last candidates lie up to 30 apart
    assert chunker.load_time(model, state, chosen) > bounds[0]
    clamped, _ = chunker.split(model, state, bounds, 2048, "clamped")
    assert clamped == most
    assert chunker.load_time(model, state, clamped) <= bounds[0]


def quadratic(square: float) -> SevenFeatureModel:
    """T = 15 ms + 0.06 ms b + square * c^2 of the longest chunk's tokens: convex for one prompt."""
    weights = np.zeros((3, 8))
    weights[:, 0], weights[:, 4], weights[:, 6], weights[:, 2] = 15 * MS, 0.06 * MS, 0.06 * MS, square
    return SevenFeatureModel(weights)


def test_a_convex_time_and_much_slack_make_the_window_take_less_than_greedy():
    state, bounds = load([100_000]), np.array([100, 150]) * MS
    chosen, most = chunker.split(quadratic(2e-8), state, bounds, 2048, "clamped")
    assert 0 < chosen < 0.75 * most
    greedy, *others = (
        chunker.split(quadratic(2e-8), state, np.array([100, 150, 200, 250][:w]) * MS, 2048, "clamped")[0]
        for w in (1, 2, 3, 4)
    )
    assert greedy == most
    assert max(others) < 0.75 * most


def test_kinks_break_the_equality_of_window_and_greedy_and_the_policy_keeps_greedy_by_rule():
    """T_cur <= T_next makes greedy optimal for convex times alone: beyond a steep tile later tokens are cheap."""
    weights = np.zeros((3, 3 + 1 + 7))
    weights[:, 0], weights[:, 1:4] = 10 * MS, np.array([0.05, 0.5, 0.05]) * MS
    model, state = ExtendedFeatureModel(weights, np.array([0.0, 40.0, 80.0])), load([100_000], decodes=8)
    bounds = np.array([35, 80]) * MS
    greedy = chunker.split(model, state, bounds, 2048, "greedy")[0]
    assert chunker.split(model, state, bounds, 2048, "clamped") == (greedy, greedy)
    best, _ = chunker.split_reference(model, state, bounds, 2048)
    assert best <= 40 < greedy

    def end(first: int) -> float:
        after = chunker.advanced(state, first)
        return chunker.load_time(model, state, first) + chunker.load_time(model, after, total - first)

    total = greedy + chunker.prefill_within(
        model, chunker.advanced(state, greedy), bounds[1] - chunker.load_time(model, state, greedy), 2048
    )  # fmt: skip
    assert end(best) < 0.8 * end(greedy)


def test_nobody_waits_where_greedy_ends_the_whole_queue_in_the_window():
    chosen, most = chunker.split(quadratic(2e-8), load([1000]), np.array([100, 150]) * MS, 2048, "clamped")
    assert chosen == most


def test_the_gain_asked_for_keeps_greedy():
    state, bounds = load([100_000]), np.array([100, 150]) * MS
    assert (
        chunker.split(quadratic(2e-8), state, bounds, 2048, "clamped", gain=0.9)[0]
        == chunker.split(quadratic(2e-8), state, bounds, 2048, "greedy")[0]
    )


def test_advancing_turns_finished_prompts_into_decodes():
    after = chunker.advanced(load([10, 30], [5, 0], decodes=2, context=7), 25)
    assert after.num_decodes == 3
    assert after.context == 2 * 7 + 2 + 15
    assert (after.longest, after.remaining.tolist(), after.computed.tolist()) == (15.0, [0, 15], [15, 15])


# ---- whole decisions -------------------------------------------------------------------------------------------------


def test_no_batch_is_empty_when_all_prompts_are_hopeless():
    rows = [decode(0.2), *({"prompt": 4000, "ttft": 0.01, "tbt": 0.05, "arrival": -5.0} for _ in range(3))]
    plan = Sliding().plan(view(rows))
    assert plan.num_scheduled_tokens.sum() > 1
    # The published constructor runs the decode alone: all are at risk, none is feasible.
    trap = Sliding(reading="paper").plan(view(rows))
    assert trap.num_scheduled_tokens.tolist() == [1]
    assert trap.why is not None
    assert trap.why["path"] == "empty"
    # Even there an idle engine serves somebody.
    assert Sliding(reading="paper").plan(view(rows[1:])).num_scheduled_tokens.sum() > 0


def test_the_constructor_saves_the_prompt_that_the_full_batch_would_make_late():
    rows = [decode(0.2), {"prompt": 100, "ttft": 0.05}, {"prompt": 1500, "ttft": 5.0}, {"prompt": 50, "ttft": 9.0}]
    rows = [row | {"tbt": 0.1} for row in rows]
    plain = Sliding(constructor="off", chunker="greedy", guard=0, margin=1).plan(view(rows))
    assert plain.predicted_step_time is not None
    assert plain.predicted_step_time > 0.05
    saved = Sliding(chunker="greedy", guard=0, margin=1).plan(view(rows))
    assert saved.why is not None
    assert saved.why["path"] == "constructor"
    assert saved.predicted_step_time is not None
    assert saved.predicted_step_time <= 0.05
    given = dict(zip(saved.rows.tolist(), saved.num_scheduled_tokens.tolist(), strict=True))
    assert given[1] == 100
    assert given[3] == 50
    assert 0 < given[2] < 1500  # what time is left goes to the long one
    assert 2 not in Sliding(chunker="greedy", guard=0, margin=1, backfill=False).plan(view(rows)).rows


def test_the_batch_keeps_the_deadline_of_the_tightest_decode():
    """In the note's example the rebuilt batch takes 32 ms beside a decode that has 30."""
    model = AffineModel(alpha_p=6.6 * MS, beta_p=0.0252 * MS, alpha_d=6.6 * MS, beta_d=0.0252 * MS)
    prompts = [{"prompt": int(r), "ttft": float(s), "tbt": 0.05} for r, s in zip(REMAINING, SLACK, strict=True)]
    rows = [*(decode(0.030) for _ in range(8)), *prompts]
    plan = Sliding(guard=0, margin=1).plan(view(rows, latency=model))
    assert plan.predicted_step_time is not None
    assert plan.predicted_step_time <= 0.030


def test_a_prompt_without_blocks_is_no_candidate():
    rows = [decode(0.2, 0.1), {"prompt": 100, "ttft": 0.05, "tbt": 0.1}, {"prompt": 3000, "ttft": 5.0, "tbt": 0.1}]
    small = view(rows, num_blocks=14)  # 7 held by the decode, 7 for its 100 tokens: none for the next
    given = Sliding(guard=0).plan(small)
    assert 2 not in given.rows


def test_eviction_takes_blocks_only_from_a_request_that_has_missed():
    late = {"prompt": 640, "computed": 640, "output": 1, "ttft": 0.1, "tbt": 0.05, "arrival": -9.0, "first": -1.0}
    urgent = {"prompt": 320, "ttft": 0.2, "tbt": 0.05}
    state = view([late, urgent], num_blocks=45)
    assert Sliding(evict=True, guard=0).plan(state).preempted.tolist() == [0]
    assert Sliding(guard=0).plan(state).preempted.size == 0
    on_time = late | {"ttft": 9.2, "first": -0.5}
    assert Sliding(evict=True, guard=0).plan(view([on_time, urgent], num_blocks=45)).preempted.size == 0
    assert not Sliding(evict=True).steerable
    assert Sliding().steerable


def test_relegation_marks_hopeless_prompts_once():
    rows = [{"prompt": 5000, "ttft": 0.05, "tbt": 0.05}, {"prompt": 100, "ttft": 5.0, "tbt": 0.05}]
    assert Sliding(relegation=True).plan(view(rows)).relegated.tolist() == [0]
    assert Sliding().plan(view(rows)).relegated.size == 0
    marked = [rows[0] | {"relegated": 1}, rows[1]]
    assert Sliding(relegation=True).plan(view(marked)).relegated.size == 0
    assert Sliding(relegation=True).plan(view(marked)).rows.tolist()[0] == 1


def test_qoserve_relegates_the_least_important_first():
    rows = [{"prompt": 5000, "ttft": 0.05, "priority": p} for p in (0, 1)] + [{"prompt": 10, "ttft": 9.0}]
    assert QoServe().plan(view(rows)).relegated.tolist() == [1]
    assert QoServe(hints=False).plan(view(rows)).relegated.tolist() == [0, 1]
    assert QoServe(relegation=False).plan(view(rows)).relegated.size == 0


def test_an_overdue_prompt_gets_its_share_under_any_load():
    old = {"prompt": 6000, "ttft": 0.1, "tbt": 0.1, "arrival": -100.0}
    rows = [old, *({"prompt": 700, "ttft": 2.0, "tbt": 0.1} for _ in range(9))]
    plan = Sliding(ageing=60, ageing_tokens=16).plan(view(rows))
    assert dict(zip(plan.rows.tolist(), plan.num_scheduled_tokens.tolist(), strict=True))[0] == 16
    assert 0 not in Sliding(ageing=math.inf).plan(view(rows)).rows


@pytest.mark.parametrize("make", [Sliding, QoServe, GreedyDynamic, Sola])
def test_a_small_guard_keeps_steps_short_where_nobody_decodes(make):
    """A prompt alone: its step holds the share on top of the shortest step, not one chunk of any length."""
    rows = [{"prompt": 2000, "ttft": 0.1, "tbt": 0.1}]
    plan = make(guard=0.2, margin=1).plan(view(rows))
    assert plan.num_scheduled_tokens.tolist() == [pytest.approx(20 / 0.096, abs=65)]  # SOLA counts in tiles of 64
    assert make(guard=0, margin=1).plan(view(rows)).num_scheduled_tokens.tolist() == [2000]


@pytest.mark.parametrize("policy", [Sliding(), Sliding(reading="paper"), QoServe()])
def test_a_request_without_competition_is_on_time(policy):
    n = 20
    load = Workload(
        arrival_time=np.arange(n) * 30.0, num_prompt_tokens=np.full(n, 1500), num_output_tokens=np.full(n, 50),
        slo_ttft=np.full(n, 0.25), slo_tbt=np.full(n, 0.02),
    )  # fmt: skip
    log = simulate(load, as_policy(policy), AFFINE, EngineConfig(max_num_batched_tokens=2048)).log
    assert judge(log).met.all()


@pytest.mark.parametrize(
    "given",
    [{"window": 0}, {"margin": 0.5}, {"reading": "x"}, {"order": "x"}, {"chunker": "x"}, {"alpha": -1}],
)  # fmt: skip
def test_refuses_parameters_out_of_range(given):
    with pytest.raises(ValueError, match=next(iter(given))):
        Sliding(**given)


def test_learning_policies_have_state_of_their_own():
    first, second = Sliding(), Sliding()
    first._rate.planned(10, 1)
    first._rate.observe(0.1, 1)
    assert second._rate.seconds == 0
    assert replace(first, window=3)._rate.seconds == 0


def test_survey_is_a_plain_tuple():
    assert Survey._fields[:3] == ("kind", "slack", "pace")
