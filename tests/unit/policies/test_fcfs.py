"""fcfs on schedules worked out by hand. Blocks of 4 tokens, steps of 1 s."""

from __future__ import annotations

import pytest

from slacktide.core.live import ADMISSION_ORDER, NUM_BLOCKS, NUM_COMPUTED, NUM_OUTPUT, STATUS, LiveTable
from slacktide.core.policies.fcfs import Fcfs
from slacktide.core.policies.sarathi import Sarathi
from slacktide.core.policies.vllm_v1 import VllmV1
from slacktide.core.types import RUNNING, Limits, Request, StepView

from .helpers import ONE_SECOND, Req, schedule


def test_whole_prompts_in_order_of_arrival():
    # Budget 13: B (4) does not fit beside A's 10; C (12) waits for all but one decode, and D behind C although it fits.
    requests = [Req(10, 4), Req(4, 5), Req(12, 2, arrival=1.0), Req(2, 3, arrival=1.0)]
    assert schedule(Fcfs(), requests, max_num_batched_tokens=13) == [
        {"A": 10},
        {"A": 1, "B": 4},
        {"A": 1, "B": 1},
        {"A": 1, "B": 1},
        {"B": 1, "C": 12},
        {"B": 1, "C": 1, "D": 2},
        {"D": 1},
        {"D": 1},
    ]


def test_a_prompt_that_no_step_can_hold_is_cut():
    # A keeps decoding; B (20) gets what A leaves of 8, and C waits for all of its own.
    assert schedule(Fcfs(), [Req(3, 5), Req(20, 1, arrival=1.0), Req(4, 1, arrival=1.0)], max_num_batched_tokens=8) == [
        {"A": 3},
        {"A": 1, "B": 7},
        {"A": 1, "B": 7},
        {"A": 1, "B": 6},
        {"A": 1, "C": 4},
    ]


def test_order_of_arrival_under_one_budget_with_chunks():
    requests = [Req(10, 4), Req(6, 3), Req(30, 2, arrival=1.0), Req(4, 5, arrival=2.0)]
    assert schedule(Fcfs(chunked_prefill=True), requests, max_num_batched_tokens=16) == [
        {"A": 10, "B": 6},
        {"A": 1, "B": 1, "C": 14},
        {"A": 1, "B": 1, "C": 14},
        {"A": 1, "C": 2, "D": 4},
        {"C": 1, "D": 1},
        {"D": 1},
        {"D": 1},
        {"D": 1},
    ]


def test_the_youngest_is_preempted():
    # Two requests of 4 blocks in 6: at t=5 A's token 13 needs one more.
    assert schedule(Fcfs(), [Req(8, 6), Req(8, 6)], num_blocks=6) == [
        {"A": 8, "B": 8},
        *[{"A": 1, "B": 1}] * 4,
        {"-B": 0, "A": 1},
        {"B": 13},
    ]


def test_an_old_prompt_goes_before_a_young_decode():
    # The older request computes its prompt again (8 of 20 done) and was admitted after the younger one, which decodes.
    table = LiveTable()
    old, young = Request(0, 0.0, 20, 9), Request(1, 1.0, 4, 9)
    for row, (request, computed, output, rank) in enumerate([(old, 8, 0, 5), (young, 4, 1, 2)]):
        table.append(request)
        ints = table.ints[:, row]
        ints[STATUS], ints[NUM_COMPUTED], ints[NUM_BLOCKS] = RUNNING, computed, computed // 4
        ints[NUM_OUTPUT], ints[ADMISSION_ORDER] = output, rank
    view = StepView(9.0, table.live, Limits(8, 16, 4, 50, 53), ONE_SECOND)

    def given(policy):
        plan = policy.plan(view)
        return dict(zip(plan.rows.tolist(), plan.num_scheduled_tokens.tolist(), strict=True))

    assert given(Fcfs(chunked_prefill=True)) == {0: 8}
    assert given(VllmV1()) == {1: 1, 0: 7}
    assert given(Sarathi(chunk_size=6)) == {1: 1, 0: 5}


def test_own_budget():
    assert schedule(Fcfs(chunked_prefill=True, max_num_batched_tokens=5), [Req(8, 1), Req(3, 1)]) == [
        {"A": 5},
        {"A": 3, "B": 2},
        {"B": 1},
    ]
    assert not Fcfs(max_num_batched_tokens=5).decode_runs
    with pytest.raises(ValueError, match=r"^max_num_batched_tokens=0: expected at least 1"):
        Fcfs(max_num_batched_tokens=0)
