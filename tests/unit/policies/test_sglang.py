"""sglang on schedules worked out by hand. Blocks of 4 tokens, steps of 1 s."""

from __future__ import annotations

import pytest

from slacktide.core.policies.sglang import SgLang
from slacktide.sim.engine import EngineConfig, simulate

from .helpers import ONE_SECOND, Req, schedule, workload

MIX = [Req(10, 4), Req(6, 3), Req(30, 2, arrival=1.0), Req(4, 5, arrival=2.0)]


def test_prompt_chunks_first_and_alone():
    # t=1..3: C's chunks, and D cut into what C leaves. Only then does anybody decode.
    assert schedule(SgLang(), MIX, max_num_batched_tokens=16) == [
        {"A": 10, "B": 6},
        {"C": 16},
        {"C": 14, "D": 2},
        {"D": 2},
        {"A": 1, "B": 1, "C": 1, "D": 1},
        {"A": 1, "B": 1, "D": 1},
        {"A": 1, "D": 1},
        {"D": 1},
    ]


def test_mixed_chunks_take_the_decodes_along():
    assert schedule(SgLang(enable_mixed_chunk=True), MIX, max_num_batched_tokens=16) == [
        {"A": 10, "B": 6},
        {"A": 1, "B": 1, "C": 14},
        {"A": 1, "B": 1, "C": 14},
        {"A": 1, "C": 2, "D": 4},
        {"C": 1, "D": 1},
        {"D": 1},
        {"D": 1},
        {"D": 1},
    ]


def test_chunked_prefill_size():
    assert schedule(SgLang(chunked_prefill_size=8), [Req(12, 1), Req(6, 1)]) == [{"A": 8}, {"A": 4, "B": 4}, {"B": 2}]


def test_without_chunks_whole_prompts_up_to_max_prefill_tokens():
    # 12 + 12 reaches 20, so B waits; C is longer than 20, but first. The engine's 24 cut D.
    requests = [Req(12, 1), Req(12, 1), Req(22, 1), Req(30, 1)]
    policy = SgLang(chunked_prefill_size=None, max_prefill_tokens=20)
    assert schedule(policy, requests, max_num_batched_tokens=24) == [
        {"A": 12},
        {"B": 12},
        {"C": 22},
        {"D": 24},
        {"D": 6},
    ]


def test_output_limits_hold_admission_back():
    # 24 tokens of KV. A takes 8 + 6 + 1; with B's 15 more it would be 30. B waits until A has ended.
    assert schedule(SgLang(), [Req(8, 6), Req(8, 6)], num_blocks=6) == [
        {"A": 8},
        *[{"A": 1}] * 5,
        {"B": 8},
        *[{"B": 1}] * 5,
    ]


def test_a_full_batch_is_not_tried_again_before_one_ends():
    # 1200 tokens. B counts 4 + 488 + 1 = 493. t=1: A may produce 999 more: 1192 - 0.7 * 999 = 492.7 is too little.
    # t=4: A holds 3 blocks, the ratio has decayed: 1188 - 0.69699 * 996 = 493.8 would do, but the batch counts as full
    # until A ends with its 13th token.
    requests = [Req(8, 13, max_tokens=1000), Req(4, 1, arrival=1.0, max_tokens=488)]
    assert schedule(SgLang(), requests, num_blocks=300) == [{"A": 8}, *[{"A": 1}] * 12, {"B": 4}]


def test_room_for_running_requests_is_a_share_of_their_limits():
    # 40 tokens. t=1: A's 8 are computed and 7 may follow: 32 - 0.7 * 7 = 27.1 is less than B's 20 + 7 + 1. With the
    # share at nothing it fits.
    requests = [Req(8, 8), Req(20, 7, arrival=1.0)]
    assert schedule(SgLang(), requests, num_blocks=10)[1] == {"A": 1}
    assert schedule(SgLang(schedule_conservativeness=0.0), requests, num_blocks=10)[1] == {"B": 20}


# 24 tokens of KV, the future of running requests is ignored. t=1: B needs 6 + 8 + 1 = 15 of 16 free. t=6: A's token 13
# needs a block and none is free. Both have 5 outputs, A the longer prompt: A is retracted.
SHORT = [Req(8, 12), Req(6, 8, arrival=1.0)]


def test_retraction_takes_the_fewest_outputs_then_the_longest_prompt():
    # t=7: A's 13 + 7 + 1 tokens exceed what is free, so B ends first (t=8). t=9: A computes 13 tokens again.
    assert schedule(SgLang(schedule_conservativeness=0.0), SHORT, num_blocks=6) == [
        {"A": 8},
        {"B": 6},
        *[{"A": 1, "B": 1}] * 4,
        {"-A": 0, "B": 1},
        {"B": 1},
        {"B": 1},
        {"A": 13},
        *[{"A": 1}] * 6,
    ]


def test_a_retracted_request_goes_to_the_end_of_the_queue():
    # C, too long to fit beside A and B, waits since t=2; A is retracted at t=6, so C comes first once B has ended.
    requests = [*SHORT, Req(12, 2, arrival=2.0)]
    steps = schedule(SgLang(schedule_conservativeness=0.0), requests, num_blocks=6)
    assert steps[6:] == [{"-A": 0, "B": 1}, {"B": 1}, {"B": 1}, {"C": 12}, {"C": 1}, {"A": 13}, *[{"A": 1}] * 6]


def test_the_ratio_jumps_to_what_was_used():
    # Kept: B with 5 of 8 outputs: (5 + 20) / (8 + 1), at most 1. With conservativeness 0 the decay
    # per step is 0 too, so there it stays.
    policy = SgLang(schedule_conservativeness=0.0)
    ratios = {}
    load = workload(SHORT)
    config = EngineConfig(num_blocks=6, block_size=4)
    simulate(
        load, policy, ONE_SECOND, config, on_step=lambda view, plan: ratios.update({view.now: policy.new_token_ratio})
    )
    times = sorted(ratios)
    assert ratios[times[5]] == 0.0
    assert ratios[times[6]] == 1.0
    assert ratios[times[7]] == 1.0


def test_the_ratio_decays_with_every_decode_step_and_starts_over_when_idle():
    # 0.7 falls to 0.7 * 0.14 over 600 decode steps; A's 100 decode steps take a sixth of the way.
    policy, seen = SgLang(), []
    load = workload([Req(4, 101), Req(4, 1, arrival=1000.0)])
    config = EngineConfig(num_blocks=100, block_size=4)
    simulate(load, policy, ONE_SECOND, config, on_step=lambda view, plan: seen.append(policy.new_token_ratio))
    assert seen[0] == pytest.approx(0.7)
    assert seen[100] == pytest.approx(0.7 - 100 * 0.7 * 0.86 / 600)
    assert seen[101] == pytest.approx(0.7)


class Recorder:
    """Passes plans on, and notes the ratio at the start time of every step that it was asked for."""

    decode_runs = True

    def __init__(self):
        self.policy, self.ratios = SgLang(), {}

    def plan(self, view):
        plan = self.policy.plan(view)
        self.ratios[view.now] = self.policy.new_token_ratio
        return plan


def test_steps_that_the_simulator_runs_by_itself_count():
    load = workload([Req(4, 60), Req(4, 40, arrival=20.5), Req(4, 5, arrival=21.5)])
    config = EngineConfig(num_blocks=100, block_size=4)
    asked, skipped = Recorder(), Recorder()
    simulate(load, asked, ONE_SECOND, config, fast_forward=False)
    simulate(load, skipped, ONE_SECOND, config, fast_forward=True)
    assert len(skipped.ratios) < 10 < len(asked.ratios)
    assert skipped.ratios == {now: asked.ratios[now] for now in skipped.ratios}


def test_longest_output_first():
    # Output limits 2, 5, 3: B and C, then A.
    requests = [Req(4, 2), Req(4, 5), Req(4, 3)]
    assert schedule(SgLang(schedule_policy="lof"), requests, max_num_batched_tokens=8) == [
        {"B": 4, "C": 4},
        {"A": 4},
        {"A": 1, "B": 1, "C": 1},
        {"B": 1, "C": 1},
        {"B": 1},
        {"B": 1},
    ]


def test_longest_cached_prefix_first_unless_the_queue_is_long():
    # C finds 8 of its 9 tokens cached by A, B finds none.
    requests = [Req(9, 1), Req(9, 1, arrival=0.5), Req(9, 1, arrival=0.5)]
    ids = [[1, 2], [5, 6], [1, 2]]
    engine = {"max_num_batched_tokens": 9, "enable_prefix_caching": True}
    assert schedule(SgLang(schedule_policy="lpm"), requests, ids, **engine) == [{"A": 9}, {"C": 1, "B": 8}, {"B": 1}]
    assert schedule(SgLang(), requests, ids, **engine) == [{"A": 9}, {"B": 9}, {"C": 1}]
    # 129 waiting: first come, first served.
    crowd = [Req(9, 1)] + [Req(9, 1, arrival=0.5)] * 129
    ids = [[1, 2]] + [[100 + i, i] for i in range(128)] + [[1, 2]]
    steps = schedule(SgLang(schedule_policy="lpm"), crowd, ids, num_blocks=1000, **engine)
    assert steps[1] == {"B": 9}
    steps = schedule(SgLang(schedule_policy="lpm"), crowd[:-1], ids[:1] + ids[2:], num_blocks=1000, **engine)
    assert list(steps[1].values()) == [1, 8]


def test_an_empty_engine_admits_a_request_whatever_its_limit():
    assert schedule(SgLang(), [Req(8, 2, max_tokens=4000)], num_blocks=3) == [{"A": 8}, {"A": 1}]


def test_the_last_decode_takes_the_blocks_of_a_half_done_prompt():
    # 8 blocks, 4 tokens a step. t=3: A holds 3 blocks and has 2 more to come; B's 16 + 1 + 1 tokens fit the 5 * 4 - 1
    # that are free. t=3..6: A takes 1 block, B 3; t=7: A takes the last one, and B, at 12 tokens, is stuck. t=11: A
    # needs another, and B's are retracted.
    requests = [Req(12, 10), Req(16, 1, arrival=2.5)]
    policy = SgLang(schedule_conservativeness=0.0, chunked_prefill_size=4, enable_mixed_chunk=True)
    assert schedule(policy, requests, num_blocks=8) == [
        *[{"A": 4}] * 3,
        *[{"A": 1, "B": 3}] * 4,
        *[{"A": 1}] * 4,
        {"-B": 0, "A": 1},
        *[{"B": 4}] * 4,
    ]


def test_max_running_requests():
    assert schedule(SgLang(max_running_requests=1), [Req(4, 2), Req(4, 1)]) == [{"A": 4}, {"A": 1}, {"B": 4}]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("schedule_policy", "random"),
        ("chunked_prefill_size", 0),
        ("max_prefill_tokens", 0),
        ("schedule_conservativeness", -0.5),
        ("max_running_requests", 0),
    ],
)
def test_refuses(name, value):
    with pytest.raises(ValueError, match=f"^{name}=.*{value}.*: expected "):
        SgLang(**{name: value})
