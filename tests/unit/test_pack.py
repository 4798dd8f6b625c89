"""The packer's rules one by one, on tables of a few rows. Blocks of 4 tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest

from slacktide.core.latency import AffineModel
from slacktide.core.live import (
    ADMISSION_ORDER,
    MAX_TOKENS,
    NUM_BLOCKS,
    NUM_CACHED,
    NUM_CACHED_FREE,
    NUM_COMPUTED,
    NUM_IN_FLIGHT,
    NUM_OUTPUT,
    STATUS,
    LiveTable,
)
from slacktide.core.pack import Packed, as_policy, pack, pack_reference
from slacktide.core.policies.fcfs import Fcfs
from slacktide.core.types import RUNNING, Limits, Request, StepView

LATENCY = AffineModel(alpha_p=1.0, beta_p=1.0, alpha_d=1.0, beta_d=1.0)


class Rows:
    """A table built row by row."""

    def __init__(self) -> None:
        self.table = LiveTable()

    def waiting(self, prompt: int, cached: int = 0, cached_free: int = 0) -> Rows:
        row = self.table.append(Request(self.table.n, float(self.table.n), prompt, 50))
        self.table.ints[NUM_CACHED, row], self.table.ints[NUM_CACHED_FREE, row] = cached, cached_free
        return self

    def running(self, prompt: int, computed: int, output: int = 0, rank: int | None = None) -> Rows:
        row = self.table.append(Request(self.table.n, float(self.table.n), prompt, 50))
        ints = self.table.ints[:, row]
        ints[STATUS], ints[NUM_COMPUTED], ints[NUM_OUTPUT] = RUNNING, computed, output
        ints[NUM_BLOCKS], ints[ADMISSION_ORDER] = -(-computed // 4), row if rank is None else rank
        return self

    def view(self, free: int = 50, tokens: int = 100, seats: int = 50, watermark: int = 0) -> StepView:
        held = int(self.table.live.num_blocks.sum())
        return StepView(9.0, self.table.live, Limits(tokens, seats, 4, free, held + free, watermark), LATENCY)


def packed(view: StepView, **options) -> dict[int, int]:
    """Row -> tokens in service order; a preempted row has 0. Both twins must agree."""
    order = options.pop("order", None)
    order = None if order is None else np.array(order, dtype=np.int64)
    plan, twin = pack(view, order, **options), pack_reference(view, order, **options)
    assert plan.rows.tolist() == twin.rows.tolist()
    assert plan.num_scheduled_tokens.tolist() == twin.num_scheduled_tokens.tolist()
    assert plan.preempted.tolist() == twin.preempted.tolist()
    given = dict(zip(plan.rows.tolist(), plan.num_scheduled_tokens.tolist(), strict=True))
    return dict.fromkeys(plan.preempted.tolist(), 0) | given


def test_list_order_is_running_by_admission_then_waiting_by_arrival():
    view = Rows().running(4, 4, 1, rank=7).waiting(6).running(4, 4, 1, rank=3).waiting(5).view()
    assert list(packed(view).items()) == [(2, 1), (0, 1), (1, 6), (3, 5)]


def test_a_given_order_is_followed_and_rows_left_out_get_nothing():
    view = Rows().running(4, 4, 1).waiting(6).waiting(5).view(tokens=8)
    assert list(packed(view, order=[2, 0]).items()) == [(2, 5), (0, 1)]
    assert list(packed(view, order=[1, 2, 0]).items()) == [(1, 6), (2, 2)]
    assert packed(view, order=[]) == {}


def test_budget_caps_and_threshold():
    view = Rows().running(30, 8).waiting(20).waiting(3).view(tokens=40)
    assert packed(view, token_budget=25) == {0: 22, 1: 3}
    assert packed(view, long_prefill_threshold=10) == {0: 10, 1: 10, 2: 3}
    assert packed(view, chunk_cap=np.array([5, 0, 9])) == {0: 5, 2: 3}


def test_without_chunking_a_prompt_that_does_not_fit_whole_ends_admission():
    view = Rows().running(8, 4).waiting(9).waiting(2).view(tokens=12)
    assert packed(view) == {0: 4, 1: 8}
    assert packed(view, chunked_prefill=False) == {0: 4}
    assert packed(view, chunked_prefill=False, order=[0, 2, 1]) == {0: 4, 2: 2}


def test_admission_ends_at_the_first_that_lacks_blocks():
    view = Rows().waiting(8).waiting(40).waiting(4).view(free=5)
    assert packed(view) == {0: 8}
    assert packed(view, order=[0, 2, 1]) == {0: 8, 2: 4}


def test_a_prompt_needs_blocks_for_all_of_it_unless_told_otherwise():
    view = Rows().waiting(40).view(free=5, tokens=12)
    assert packed(view) == {}
    assert packed(view, reserve_full_isl=False) == {0: 12}


def test_the_watermark_counts_only_while_something_runs():
    assert packed(Rows().waiting(8).waiting(4).view(free=5, watermark=4)) == {0: 8}
    assert packed(Rows().waiting(8).waiting(4).view(free=7, watermark=4)) == {0: 8, 1: 4}
    assert packed(Rows().waiting(8).waiting(4).view(free=7), watermark_blocks=5) == {0: 8}


def test_seats():
    assert packed(Rows().running(4, 4, 1).waiting(4).waiting(4).view(seats=2)) == {0: 1, 1: 4}


def test_cached_blocks_cost_no_tokens_and_blocks_only_if_nobody_holds_them():
    # 12 tokens: 8 cached in two blocks, of which one lies unheld in the free list. New: one block, plus that one.
    assert packed(Rows().waiting(12, cached=8, cached_free=1).view(free=2)) == {0: 4}
    assert packed(Rows().waiting(12, cached=8, cached_free=1).view(free=1)) == {}
    assert packed(Rows().waiting(12, cached=8, cached_free=0).view(free=1)) == {0: 4}


def test_a_shortage_preempts_the_latest_admitted_and_admits_nobody():
    # Row 0 needs a block, none is free. Row 2 was admitted last; the waiting row would fit its blocks, but must wait.
    view = Rows().running(4, 4, 1, rank=0).running(8, 9, 2, rank=5).running(4, 5, 2, rank=9).waiting(2).view(free=0)
    assert packed(view) == {2: 0, 0: 1, 1: 1}


def test_a_victim_gives_back_what_it_had_in_this_step():
    # Row 0 takes the last free block; row 1 needs one too, and row 0 has the largest key: its tokens and both of its
    # blocks come back.
    view = Rows().running(4, 4, 1).running(8, 8, 1).running(4, 6, 3).view(free=1, tokens=2)
    assert packed(view, victim_key=np.array([2.0, 1.0, 0.0])) == {0: 0, 1: 1, 2: 1}


def test_ties_of_the_victim_key_go_to_the_latest_arrival():
    view = Rows().running(4, 5, 2).running(4, 5, 2).running(4, 4, 1).view(free=0)
    assert packed(view, order=[2, 0, 1], victim_key=np.zeros(3)) == {2: 0, 0: 1, 1: 1}


def test_being_the_victim_ends_a_step_only_under_list_rules():
    view = Rows().running(4, 4, 1, rank=9).running(4, 5, 2, rank=1).view(free=0)
    assert packed(view, order=[0, 1], list_rules=True) == {0: 0}
    assert packed(view, order=[0, 1], list_rules=False) == {0: 0, 1: 1}


def test_a_given_order_keeps_back_what_half_done_prompts_need():
    # Row 0 has 8 of 20 tokens: 3 of the 5 free blocks are kept for it, so a prompt of 9 (3 blocks) before it waits.
    view = Rows().running(20, 8).waiting(9).view(free=5, tokens=9)
    assert packed(view, order=[1, 0]) == {0: 9}
    assert packed(view, order=[1, 0], list_rules=True) == {1: 9}
    assert packed(view, order=[1, 0], reserve_full_isl=False) == {1: 9}


def test_a_row_that_the_step_in_flight_ends_gets_nothing():
    rows = Rows().running(4, 6, 2)
    rows.table.ints[NUM_IN_FLIGHT, 0] = 1
    assert packed(rows.view()) == {0: 1}
    rows.table.ints[MAX_TOKENS, 0] = 3
    assert packed(rows.view()) == {}


def test_max_model_len_ends_a_row():
    view = Rows().running(4, 7, 4).view()
    assert packed(view) == {0: 1}
    assert packed(view._replace(limits=view.limits._replace(max_model_len=8))) == {}


class ShortestFirst:
    name = "shortest-first"
    decode_runs = True

    def score(self, view):
        return view.live.num_prompt_tokens.astype(np.float64)

    def admit(self, view):
        return view.live.num_prompt_tokens < 30

    def observe(self, result):
        self.seen = result


def test_a_score_policy_is_lifted_to_plans():
    policy = as_policy(ShortestFirst())
    plan = policy.plan(Rows().waiting(9).waiting(3).waiting(40).running(40, 40, 1).view())
    assert plan.rows.tolist() == [1, 0, 3]  # the long one is not let in, the running one is kept
    assert policy.name == "shortest-first"
    assert policy.decode_runs
    policy.observe("outcome")
    assert policy.policy.seen == "outcome"


def test_a_time_limit_becomes_a_token_budget():
    class Limited(ShortestFirst):
        def time_limit(self, view):
            return 8.5

    # A step of n tokens takes 1 + n s: 7 fit 8.5 s, and the order alone says who gets them.
    rows = Rows().waiting(9).running(40, 40, 1)
    plan = Packed(Limited()).plan(rows.view())
    assert dict(zip(plan.rows.tolist(), plan.num_scheduled_tokens.tolist(), strict=True)) == {0: 7}

    class Hurried(ShortestFirst):
        def time_limit(self, view):
            return 0.001

    # A limit that nothing meets still leaves as many tokens as there are decodes.
    assert Packed(Hurried()).plan(rows.view()).num_scheduled_tokens.sum() == 1


def test_a_policy_that_plans_is_left_as_it_is():
    policy = Fcfs()
    assert as_policy(policy) is policy


@pytest.mark.parametrize("key", [math.inf, -math.inf])
def test_infinite_victim_keys(key):
    view = Rows().running(4, 4, 1).running(4, 5, 2).view(free=0)
    assert packed(view, victim_key=np.array([key, 0.0])) == ({0: 0} if key > 0 else {1: 0, 0: 1})
