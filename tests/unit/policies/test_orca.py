"""orca on schedules worked out by hand. Blocks of 4 tokens, steps of 1 s."""

from __future__ import annotations

import pytest

from slacktide.core.policies.orca import Orca

from .helpers import Req, schedule


def test_whole_prompts_beside_decodes():
    # B's 10 tokens do not fit the 6 left at t=0; whole prompts wait for the next step.
    requests = [Req(10, 2), Req(10, 2)]
    assert schedule(Orca(), requests, max_num_batched_tokens=16) == [{"A": 10}, {"A": 1, "B": 10}, {"B": 1}]


def test_the_longest_output_is_set_aside():
    # Each reserves ceil((8 + 6 - 1) / 4) = 4 of 6 blocks, so they run one after the other and nobody is preempted.
    requests = [Req(8, 6), Req(8, 6)]
    assert schedule(Orca(), requests, num_blocks=6) == [{"A": 8}, *[{"A": 1}] * 5, {"B": 8}, *[{"B": 1}] * 5]


def test_the_limit_counts_not_the_true_output():
    # A will produce 2 tokens but may produce 14: ceil(21 / 4) = 6 blocks.
    requests = [Req(8, 2, max_tokens=14), Req(8, 1)]
    assert schedule(Orca(), requests, num_blocks=7) == [{"A": 8}, {"A": 1}, {"B": 8}]
    assert schedule(Orca(), requests, num_blocks=8) == [{"A": 8, "B": 8}, {"A": 1}]


def test_a_limit_beyond_the_cache_reserves_all_of_it():
    requests = [Req(8, 2, max_tokens=1000), Req(4, 1)]
    assert schedule(Orca(), requests, num_blocks=50) == [{"A": 8}, {"A": 1}, {"B": 4}]


def test_first_come_first_served_stops_at_the_first_that_does_not_fit():
    # A reserves 2 blocks of 6, B 5: C (1 block) waits behind B.
    requests = [Req(4, 3), Req(16, 2), Req(4, 1)]
    assert schedule(Orca(), requests, num_blocks=6) == [
        {"A": 4},
        {"A": 1},
        {"A": 1},
        {"B": 16, "C": 4},
        {"B": 1},
    ]


def test_a_prompt_beyond_the_budget_is_cut():
    # Beside A's decode 7 of 8 tokens are left. C fits whole once B is done.
    requests = [Req(4, 4), Req(20, 1, arrival=1.0), Req(2, 1, arrival=1.0)]
    assert schedule(Orca(), requests, max_num_batched_tokens=8) == [
        {"A": 4},
        {"A": 1, "B": 7},
        {"A": 1, "B": 7},
        {"A": 1, "B": 6},
        {"C": 2},
    ]


def test_batch_size():
    requests = [Req(10, 2), Req(10, 2)]
    assert schedule(Orca(max_batch_size=1), requests) == [{"A": 10}, {"A": 1}, {"B": 10}, {"B": 1}]


def test_async_scheduling_lets_a_step_go_that_lacks_a_block():
    # The request ends with its third token, but may produce 9 and then outgrow the cache of 2 blocks: the step after
    # its last token, decided before that is known, finds no third block and is left out.
    assert schedule(Orca(), [Req(6, 3, max_tokens=9)], num_blocks=2, pipeline_depth=2) == [
        {"A": 6},
        {"A": 1},
        {"A": 1},
        {},
    ]


def test_refuses():
    with pytest.raises(ValueError, match=r"^max_batch_size=0: expected at least 1"):
        Orca(max_batch_size=0)
