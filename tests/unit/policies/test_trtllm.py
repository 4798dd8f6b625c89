"""trtllm on schedules worked out by hand. Blocks of 4 tokens, steps of 1 s."""

from __future__ import annotations

import pytest

from slacktide.core.policies.trtllm import TrtLlm

from .helpers import Req, schedule

# Each needs ceil((8 + 6 - 1) / 4) = 4 blocks in the end, of 6.
TIGHT = [Req(8, 6), Req(8, 6)]


def test_chunks_are_whole_blocks_until_the_last():
    # t=1: 14 tokens are left beside two decodes, so C gets 12. t=3: C's last 6, then D whole.
    requests = [Req(10, 4), Req(6, 3), Req(30, 2, arrival=1.0), Req(4, 5, arrival=2.0)]
    assert schedule(TrtLlm(), requests, max_num_batched_tokens=16) == [
        {"A": 10, "B": 6},
        {"A": 1, "B": 1, "C": 12},
        {"A": 1, "B": 1, "C": 12},
        {"A": 1, "C": 6, "D": 4},
        {"C": 1, "D": 1},
        {"D": 1},
        {"D": 1},
        {"D": 1},
    ]


def test_a_short_prompt_takes_what_the_rounding_left():
    # B is cut to 4 of the 6 tokens left; C's 2 fit the rest.
    requests = [Req(10, 1), Req(10, 1), Req(2, 1)]
    assert schedule(TrtLlm(), requests, max_num_batched_tokens=16) == [{"A": 10, "B": 4, "C": 2}, {"B": 6}]


def test_guaranteed_no_evict_runs_them_one_after_the_other():
    assert schedule(TrtLlm(), TIGHT, num_blocks=6) == [{"A": 8}, *[{"A": 1}] * 5, {"B": 8}, *[{"B": 1}] * 5]


def test_max_utilization_pauses_the_last_started():
    policy = TrtLlm(capacity_scheduler_policy="max-utilization")
    assert schedule(policy, TIGHT, num_blocks=6) == [
        {"A": 8, "B": 8},
        *[{"A": 1, "B": 1}] * 4,
        {"-B": 0, "A": 1},
        {"B": 13},
    ]


def test_max_utilization_pauses_until_the_oldest_fit():
    # 5 blocks: A, B and C hold 1 each, 2 are free; at t=1 each wants one more. C is paused for B. t=2, 3: A and B
    # run on within their blocks, C's 5 tokens (2 blocks) find one free.
    requests = [Req(4, 4), Req(4, 4), Req(4, 2)]
    policy = TrtLlm(capacity_scheduler_policy="max-utilization")
    assert schedule(policy, requests, num_blocks=5) == [
        {"A": 4, "B": 4, "C": 4},
        {"-C": 0, "A": 1, "B": 1},
        {"A": 1, "B": 1},
        {"A": 1, "B": 1},
        {"C": 5},
    ]


def test_static_batch_admits_only_to_an_idle_engine():
    requests = [Req(4, 3), Req(4, 1), Req(4, 2, arrival=1.0)]
    policy = TrtLlm(capacity_scheduler_policy="static-batch")
    assert schedule(policy, requests) == [{"A": 4, "B": 4}, {"A": 1}, {"A": 1}, {"C": 4}, {"C": 1}]
    assert schedule(TrtLlm(), requests) == [{"A": 4, "B": 4}, {"A": 1, "C": 4}, {"A": 1, "C": 1}]


def test_equal_progress():
    # 16 tokens. t=0: one block each is 12, then one more for A. t=1: 4 + 4 + 2, then one more for A.
    requests = [Req(20, 1), Req(20, 1), Req(6, 1)]
    policy = TrtLlm(context_chunking_policy="equal-progress")
    assert schedule(policy, requests, max_num_batched_tokens=16) == [
        {"A": 8, "B": 4, "C": 4},
        {"A": 8, "B": 4, "C": 2},
        {"A": 4, "B": 12},
    ]


def test_without_chunking_prompts_run_whole():
    requests = [Req(6, 2), Req(6, 1)]
    assert schedule(TrtLlm(context_chunking_policy="off"), requests, max_num_batched_tokens=10) == [
        {"A": 6},
        {"A": 1, "B": 6},
    ]
    assert schedule(TrtLlm(), requests, max_num_batched_tokens=10) == [{"A": 6, "B": 4}, {"A": 1, "B": 2}]


def test_without_chunking_a_prompt_that_no_step_holds_is_cut():
    policy = TrtLlm(context_chunking_policy="off", max_num_tokens=10)
    assert schedule(policy, [Req(25, 1)]) == [{"A": 10}, {"A": 10}, {"A": 5}]


@pytest.mark.parametrize("chunking", ["fcfs", "equal-progress"])
def test_a_budget_below_one_block_still_serves(chunking):
    policy = TrtLlm(context_chunking_policy=chunking, max_num_tokens=3)
    assert schedule(policy, [Req(7, 2)]) == [{"A": 3}, {"A": 3}, {"A": 1}, {"A": 1}]


def test_batch_size():
    assert schedule(TrtLlm(max_batch_size=1), [Req(4, 2), Req(4, 1)]) == [{"A": 4}, {"A": 1}, {"B": 4}]


def test_flags():
    assert TrtLlm().steerable
    assert TrtLlm().decode_runs
    assert not TrtLlm(capacity_scheduler_policy="max-utilization").steerable
    assert not TrtLlm(max_num_tokens=100).decode_runs


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_num_tokens", 0),
        ("max_batch_size", 0),
        ("capacity_scheduler_policy", "evict"),
        ("context_chunking_policy", "edf"),
    ],
)
def test_refuses(name, value):
    with pytest.raises(ValueError, match=f"^{name}=.*{value}.*: expected "):
        TrtLlm(**{name: value})
