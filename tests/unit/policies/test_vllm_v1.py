"""vllm-v1 on schedules worked out by hand. Blocks of 4 tokens, steps of 1 s, so a step's number is its start."""

from __future__ import annotations

import pytest

from slacktide.core.policies.vllm_v1 import VllmV1

from .helpers import Req, run, schedule

# Each of these two needs ceil((8 + 6 - 1) / 4) = 4 blocks in the end; six blocks hold both for five tokens each.
TIGHT = [Req(8, 6), Req(8, 6, arrival=1.0)]
MIX = [Req(10, 4), Req(6, 3), Req(30, 2, arrival=1.0), Req(4, 5, arrival=2.0)]


def test_running_first_then_waiting_until_the_budget_is_spent():
    # t=0: A and B spend 16. t=1, 2: decodes first, C gets the other 14. t=3: B is done, C ends with 2, D fits.
    assert schedule(VllmV1(), MIX, max_num_batched_tokens=16) == [
        {"A": 10, "B": 6},
        {"A": 1, "B": 1, "C": 14},
        {"A": 1, "B": 1, "C": 14},
        {"A": 1, "C": 2, "D": 4},
        {"C": 1, "D": 1},
        {"D": 1},
        {"D": 1},
        {"D": 1},
    ]


def test_the_tail_is_preempted_and_computed_again():
    # t=5: A's token 13 needs a fourth block, none is free: B, the tail, loses its three. A ends. t=6: B computes its
    # 8 prompt and 4 output tokens again and gets its fifth.
    assert schedule(VllmV1(), TIGHT, num_blocks=6) == [
        {"A": 8},
        {"A": 1, "B": 8},
        {"A": 1, "B": 1},
        {"A": 1, "B": 1},
        {"A": 1, "B": 1},
        {"-B": 0, "A": 1},
        {"B": 12},
        {"B": 1},
    ]


def test_priority_preempts_the_least_urgent_even_if_it_is_the_one_asking():
    # t=5: A (priority 1) needs a block and is itself the victim, which ends the step; asked again, B runs alone.
    # A needs 4 blocks for 13 tokens: 3 are free until B ends at t=6.
    requests = [Req(8, 6, priority=1), Req(8, 6, arrival=1.0, priority=0)]
    assert schedule(VllmV1(scheduling_policy="priority"), requests, num_blocks=6) == [
        {"A": 8},
        {"A": 1, "B": 8},
        {"A": 1, "B": 1},
        {"A": 1, "B": 1},
        {"A": 1, "B": 1},
        {"-A": 0},
        {"B": 1},
        {"B": 1},
        {"A": 13},
    ]


def test_priority_orders_the_queue_but_not_the_running_list():
    # t=0: C (-1), then A, B (0) in order of arrival. t=1: D (-5) is first among the waiting; A keeps its place.
    requests = [Req(6, 2), Req(6, 1), Req(4, 1, priority=-1), Req(6, 1, arrival=1.0, priority=-5)]
    steps = schedule(VllmV1(scheduling_policy="priority"), requests, max_num_batched_tokens=10)
    assert [list(step.items()) for step in steps] == [
        [("C", 4), ("A", 6)],
        [("A", 1), ("D", 6), ("B", 3)],
        [("B", 3)],
    ]


# Five blocks: A (4 + 4 tokens, 2 blocks) and B (12 + 3 tokens, 4 blocks) both want a block at t=1; one is free.
PAIR = [Req(4, 4, ttft=900.0, tbt=1.0), Req(12, 3, ttft=1.0, tbt=1.0)]


@pytest.mark.parametrize("victim", ["least-computed", "most-slack"])
def test_another_victim_gives_back_what_it_was_given_in_the_step(victim):
    # A takes the free block first, then loses it to B: A has computed less (4 < 12), and is due later.
    assert schedule(VllmV1(victim=victim), PAIR, num_blocks=5) == [
        {"A": 4, "B": 12},
        {"-A": 0, "B": 1},
        {"B": 1},
        {"A": 5},
        {"A": 1},
        {"A": 1},
    ]


def test_the_tail_is_the_other_one():
    assert schedule(VllmV1(), PAIR, num_blocks=5) == [
        {"A": 4, "B": 12},
        {"-B": 0, "A": 1},
        {"A": 1},
        {"A": 1},
        {"B": 13},
        {"B": 1},
    ]


def test_watermark_holds_admission_back_while_something_runs():
    # int(0.8 * 8) = 6 blocks stay free: B (1 block) waits for A although 6 are free.
    assert schedule(VllmV1(watermark=0.8), [Req(4, 3), Req(4, 1)], num_blocks=7) == [
        {"A": 4},
        {"A": 1},
        {"A": 1},
        {"B": 4},
    ]


def test_threshold_caps_long_prompts_unless_alone():
    long_and_short = [Req(10, 1), Req(2, 1)]
    assert schedule(VllmV1(long_prefill_token_threshold=4), long_and_short) == [{"A": 4, "B": 2}, {"A": 6}]
    # Adaptive: 12 tokens for 2 requests raise the cap to 6.
    adaptive = VllmV1(long_prefill_token_threshold=4, long_prefill_token_threshold_adaptive=True)
    assert schedule(adaptive, long_and_short, max_num_batched_tokens=12) == [{"A": 6, "B": 2}, {"A": 4}]


def test_prefills_wait_for_their_beat():
    # Beats at steps 0 and 3; B arrives in between and waits, because A decodes.
    requests = [Req(4, 6), Req(4, 2, arrival=1.0)]
    assert schedule(VllmV1(prefill_schedule_interval=3), requests) == [
        {"A": 4},
        {"A": 1},
        {"A": 1},
        {"A": 1, "B": 4},
        {"A": 1, "B": 1},
        {"A": 1},
    ]


def test_the_beat_starts_anew_after_idling():
    # A ends at t=2. B comes to an idle engine at t=10, on a beat; C at t=11 waits for the next one at t=13.
    requests = [Req(4, 2), Req(4, 4, arrival=10.0), Req(4, 1, arrival=11.0)]
    assert schedule(VllmV1(prefill_schedule_interval=3), requests) == [
        {"A": 4},
        {"A": 1},
        {"B": 4},
        {"B": 1},
        {"B": 1},
        {"B": 1, "C": 4},
    ]


def test_a_queue_left_undrained_lifts_the_beat():
    # Step 0 leaves B waiting (budget 4): vLLM then prefills in every step until the queue is drained.
    requests = [Req(4, 4), Req(8, 1)]
    assert schedule(VllmV1(prefill_schedule_interval=4), requests, max_num_batched_tokens=4) == [
        {"A": 4},
        {"A": 1, "B": 3},
        {"A": 1},
        {"A": 1},
        {"B": 4},
        {"B": 1},
    ]


def test_a_cached_prompt_slips_in_between_beats():
    # B's prompt of 9 tokens is cached but for the last one; C's is not and waits for the beat at step 3.
    requests = [Req(9, 6), Req(9, 1, arrival=1.0), Req(9, 1, arrival=1.0)]
    ids = [[1, 2], [1, 2], [3, 4]]
    assert schedule(VllmV1(prefill_schedule_interval=3), requests, ids, enable_prefix_caching=True) == [
        {"A": 9},
        {"A": 1, "B": 1},
        {"A": 1},
        {"A": 1, "C": 9},
        {"A": 1},
        {"A": 1},
    ]


def test_without_full_reservation_a_prompt_may_outgrow_the_cache():
    # A: 2 blocks, B: 5 of 6. Reserving, B waits for A. Else it starts at t=1, and at t=3 lacks a block for its end:
    # it is the tail, so it is itself the victim.
    requests = [Req(4, 5), Req(20, 1, arrival=1.0)]
    engine = {"num_blocks": 6, "max_num_batched_tokens": 8}
    assert schedule(VllmV1(), requests, **engine) == [{"A": 4}, *[{"A": 1}] * 4, {"B": 8}, {"B": 8}, {"B": 4}]
    assert schedule(VllmV1(scheduler_reserve_full_isl=False), requests, **engine) == [
        {"A": 4},
        {"A": 1, "B": 7},
        {"A": 1, "B": 7},
        {"-B": 0, "A": 1},
        {"A": 1, "B": 7},
        {"B": 8},
        {"B": 5},
    ]


def test_a_budget_of_its_own():
    assert schedule(VllmV1(max_num_batched_tokens=5), [Req(8, 1), Req(3, 1)]) == [{"A": 5}, {"A": 3, "B": 2}, {"B": 1}]


def test_async_scheduling_stops_at_max_tokens_but_not_at_an_unknown_end():
    # Each step is decided while the one before runs: after two outputs known or on their way the third is the last.
    assert schedule(VllmV1(), [Req(4, 3)], pipeline_depth=2) == [{"A": 4}, {"A": 1}, {"A": 1}, {}]
    assert schedule(VllmV1(), [Req(4, 3, max_tokens=9)], pipeline_depth=2) == [{"A": 4}, *[{"A": 1}] * 3]


def test_seats():
    assert schedule(VllmV1(), [Req(4, 2), Req(4, 1)], max_num_seqs=1) == [{"A": 4}, {"A": 1}, {"B": 4}]


def test_preemptions_are_counted():
    log = run(VllmV1(), TIGHT, num_blocks=6).log
    assert log.num_preemptions.tolist() == [0, 1]
    assert log.recomputed_tokens.tolist() == [0, 11]


def test_steerable_means_vllms_own_victim():
    assert VllmV1().steerable
    assert VllmV1(scheduling_policy="priority", victim="priority").steerable
    assert not VllmV1(victim="priority").steerable
    assert not VllmV1(victim="most-slack").steerable


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_num_batched_tokens", 0),
        ("long_prefill_token_threshold", -1),
        ("prefill_schedule_interval", 0),
        ("watermark", 1.0),
        ("watermark", float("nan")),
        ("scheduling_policy", "edf"),
        ("victim", "oldest"),
    ],
)
def test_refuses(name, value):
    with pytest.raises(ValueError, match=f"^{name}=.*{value}.*: expected "):
        VllmV1(**{name: value})
