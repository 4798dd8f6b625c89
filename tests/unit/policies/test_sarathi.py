"""sarathi, sarathi-edf and sarathi-srpf on schedules worked out by hand. Blocks of 4 tokens, steps of 1 s."""

from __future__ import annotations

import pytest

from slacktide.core.policies.sarathi import Sarathi
from slacktide.core.policies.sarathi_edf import SarathiEdf
from slacktide.core.policies.sarathi_srpf import SarathiSrpf

from .helpers import Req, schedule

ALL = [Sarathi, SarathiEdf, SarathiSrpf]
# First tokens due at 100, 51 and 91.
THREE = [Req(12, 2, ttft=100.0), Req(8, 2, arrival=1.0, ttft=50.0), Req(4, 2, arrival=1.0, ttft=90.0)]


@pytest.mark.parametrize("policy", ALL)
def test_decodes_take_their_share_of_the_chunk(policy):
    # chunk 8: beside A's decode B gets 7, 7, then its last 6.
    assert schedule(policy(chunk_size=8), [Req(3, 6), Req(20, 2, arrival=1.0)]) == [
        {"A": 3},
        {"A": 1, "B": 7},
        {"A": 1, "B": 7},
        {"A": 1, "B": 6},
        {"A": 1, "B": 1},
        {"A": 1},
    ]


def test_sarathi_serves_prompts_in_order_of_arrival():
    assert schedule(Sarathi(chunk_size=8), THREE) == [
        {"A": 8},
        {"A": 4, "B": 4},
        {"A": 1, "B": 4, "C": 3},
        {"B": 1, "C": 1},
        {"C": 1},
    ]


def test_edf_lets_an_urgent_prompt_overtake_a_started_one():
    # t=1: B (51) before A's rest (100). t=2: C (91) before A's rest.
    assert schedule(SarathiEdf(chunk_size=8), THREE) == [
        {"A": 8},
        {"B": 8},
        {"B": 1, "C": 4, "A": 3},
        {"C": 1, "A": 1},
        {"A": 1},
    ]


def test_edf_without_a_ttft_target_goes_by_the_end_to_end_one():
    # Due 30, 9 + 1 and never.
    requests = [Req(8, 1, ttft=30.0), Req(8, 1, e2e=9.0), Req(8, 1)]
    assert schedule(SarathiEdf(chunk_size=8), requests) == [{"B": 8}, {"A": 8}, {"C": 8}]


def test_srpf_takes_the_least_work_first():
    # t=1: 4 left of A, 4 of C, 8 of B; the tie goes to the older.
    assert schedule(SarathiSrpf(chunk_size=8), THREE) == [
        {"A": 8},
        {"A": 4, "C": 4},
        {"A": 1, "C": 1, "B": 6},
        {"B": 2},
        {"B": 1},
    ]


def test_srpf_counts_what_the_prefix_cache_saves():
    # B is longer than C, but 12 of its 13 tokens are cached once A has run.
    requests = [Req(13, 1), Req(13, 1, arrival=1.0), Req(8, 1, arrival=1.0)]
    ids = [[1, 2, 3], [1, 2, 3], [7, 8]]
    steps = schedule(SarathiSrpf(chunk_size=16), requests, ids, enable_prefix_caching=True)
    assert [list(step.items()) for step in steps] == [[("A", 13)], [("B", 1), ("C", 8)]]


@pytest.mark.parametrize("policy", ALL)
def test_the_newest_is_preempted(policy):
    # Two requests of 4 blocks in 6: at t=5 A's token 13 needs one more.
    assert schedule(policy(chunk_size=100), [Req(8, 6), Req(8, 6)], num_blocks=6) == [
        {"A": 8, "B": 8},
        *[{"A": 1, "B": 1}] * 4,
        {"-B": 0, "A": 1},
        {"B": 13},
    ]


@pytest.mark.parametrize("policy", [SarathiEdf, SarathiSrpf])
def test_overtaking_leaves_a_started_prompt_the_blocks_it_needs(policy):
    # 8 blocks. t=1: A holds 2 of its 6 blocks, so of the 6 free ones only 2 are to give away: B (3) waits, although
    # it would come first. A runs on; t=3: A is done.
    requests = [Req(24, 1, ttft=100.0), Req(10, 1, arrival=1.0, ttft=1.0)]
    assert schedule(policy(chunk_size=8), requests, num_blocks=8) == [{"A": 8}, {"A": 8}, {"A": 8}, {"B": 8}, {"B": 2}]


@pytest.mark.parametrize("policy", ALL)
def test_seats_and_watermark(policy):
    two = [Req(4, 2), Req(4, 1)]
    assert schedule(policy(max_num_seqs=1), two) == [{"A": 4}, {"A": 1}, {"B": 4}]
    # int(0.8 * 8) = 6 blocks stay free: B waits for A, with 6 free.
    assert schedule(policy(watermark=0.8), two, num_blocks=7) == [{"A": 4}, {"A": 1}, {"B": 4}]


@pytest.mark.parametrize("policy", ALL)
@pytest.mark.parametrize(("name", "value"), [("chunk_size", 0), ("max_num_seqs", 0), ("watermark", 1.0)])
def test_refuses(policy, name, value):
    with pytest.raises(ValueError, match=f"^{name}={value}: expected "):
        policy(**{name: value})
