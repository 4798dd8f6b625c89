"""vllm-v0 on schedules worked out by hand. Blocks of 4 tokens, steps of 1 s."""

from __future__ import annotations

import pytest

from slacktide.core.policies.vllm_v0 import VllmV0

from .helpers import Req, schedule


def test_prompts_first_and_never_beside_decodes():
    # t=1, 2: C (30) is longer than the budget, so it runs alone, cut; the 2 tokens left of t=2 are too few for D.
    # t=3: D. Only then does anybody decode.
    requests = [Req(10, 4), Req(6, 3), Req(30, 2, arrival=1.0), Req(4, 5, arrival=2.0)]
    assert schedule(VllmV0(), requests, max_num_batched_tokens=16) == [
        {"A": 10, "B": 6},
        {"C": 16},
        {"C": 14},
        {"D": 4},
        {"A": 1, "B": 1, "C": 1, "D": 1},
        {"A": 1, "B": 1, "D": 1},
        {"A": 1, "D": 1},
        {"D": 1},
    ]


def test_whole_prompts_only():
    # B's 10 tokens do not fit the 6 left at t=0; at t=1 they do, and A's decode waits.
    requests = [Req(10, 2), Req(10, 1)]
    assert schedule(VllmV0(), requests, max_num_batched_tokens=16) == [{"A": 10}, {"B": 10}, {"A": 1}]


def test_the_tail_is_preempted():
    # Two requests of 4 blocks in 6: at t=5 A's token 13 needs one more.
    requests = [Req(8, 6), Req(8, 6)]
    assert schedule(VllmV0(), requests, num_blocks=6) == [
        {"A": 8, "B": 8},
        *[{"A": 1, "B": 1}] * 4,
        {"-B": 0, "A": 1},
        {"B": 13},
    ]


def test_a_prompt_step_between_preemption_and_decode():
    # Blocks: A 2 + B 2 of 5. t=1: A takes the fifth; B's ninth token finds none and B, the tail, preempts itself.
    # t=2: B's 9 tokens need 3 blocks, 2 are free: A decodes on until it ends at t=3.
    requests = [Req(8, 4), Req(8, 2)]
    assert schedule(VllmV0(), requests, num_blocks=5) == [
        {"A": 8, "B": 8},
        {"-B": 0, "A": 1},
        {"A": 1},
        {"A": 1},
        {"B": 9},
    ]


def test_watermark():
    # int(0.3 * 10) = 3 blocks stay free. A leaves 7: B may take 4 of them, not 5.
    assert schedule(VllmV0(watermark=0.3), [Req(8, 2), Req(16, 1)], num_blocks=9)[0] == {"A": 8, "B": 16}
    assert schedule(VllmV0(watermark=0.3), [Req(8, 2), Req(20, 1)], num_blocks=9) == [{"A": 8}, {"A": 1}, {"B": 20}]


def test_delay_factor_holds_prompts_back():
    # The last prompt step took 1 s. B waits since 0.5: prompts are let in once it has waited more than 2 s, at t=3.
    requests = [Req(4, 5), Req(4, 2, arrival=0.5)]
    assert schedule(VllmV0(scheduler_delay_factor=2.0), requests) == [
        {"A": 4},
        {"A": 1},
        {"A": 1},
        {"B": 4},
        {"A": 1, "B": 1},
        {"A": 1},
    ]
    assert schedule(VllmV0(), requests)[1] == {"B": 4}


def test_own_budget_and_seats():
    requests = [Req(20, 1), Req(4, 2), Req(4, 1)]
    assert schedule(VllmV0(max_num_batched_tokens=8, max_num_seqs=1), requests) == [
        {"A": 8},
        {"A": 8},
        {"A": 4},
        {"B": 4},
        {"B": 1},
        {"C": 4},
    ]
    assert schedule(VllmV0(max_num_batched_tokens=8), requests)[2] == {"A": 4, "B": 4}


def test_the_delay_needs_every_step():
    assert VllmV0().decode_runs
    assert not VllmV0(scheduler_delay_factor=0.5).decode_runs


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_num_batched_tokens", 0), ("max_num_seqs", 0), ("watermark", -0.1), ("scheduler_delay_factor", -1.0)],
)
def test_refuses(name, value):
    with pytest.raises(ValueError, match=f"^{name}={value}: expected "):
        VllmV0(**{name: value})
