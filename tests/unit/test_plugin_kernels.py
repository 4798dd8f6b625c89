"""The plug-in's compiled loops against their readable twins: `check_plan`, and `batch_shape`."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slacktide.core.live import (
    ADMISSION_ORDER,
    NUM_BLOCKS,
    NUM_COMPUTED,
    NUM_OUTPUT,
    STATUS,
    LiveTable,
)
from slacktide.core.shape import batch_shape
from slacktide.core.types import RUNNING, SLO, Limits, Plan, Request
from slacktide.vllm.guard import Alarm, TimeLimit, TooSlow
from slacktide.vllm.kernels import NO_LIMIT, note_step
from slacktide.vllm.steering import FEW, PlanError, check_plan, chunks

LIMITS = Limits(64, 6, 16, 100, 200)


def table_of(states: list[int]) -> LiveTable:
    """0 waits, 1 prefills, 2 decodes; prompts of 20 tokens."""
    table = LiveTable(4)
    for i, state in enumerate(states):
        table.append(Request(i, float(i), 20, 10, SLO(1.0, 0.1)))
        if state:
            table.ints[STATUS, i], table.ints[ADMISSION_ORDER, i] = RUNNING, (i * 7) % len(states)
            table.ints[NUM_COMPUTED, i], table.ints[NUM_OUTPUT, i] = (8, 0) if state == 1 else (20, 1)
            table.ints[NUM_BLOCKS, i] = 1 if state == 1 else 2
    return table


def mirror_of(table: LiveTable) -> SimpleNamespace:
    slots = np.arange(table.n)[::-1].copy()  # any numbering will do
    return SimpleNamespace(
        slot_of_row=slots, ids=[f"r{slot}" for slot in range(table.n)], objects=[f"o{slot}" for slot in range(table.n)]
    )


def read(table: LiveTable, plan: Plan) -> object:
    return chunks(plan, table.live, LIMITS, None, mirror_of(table), speculative=False)


STATES = st.lists(st.integers(0, 2), min_size=1, max_size=9)
ROWS = st.lists(st.integers(-1, 9), max_size=4)


@given(STATES, st.lists(st.tuples(st.integers(-1, 9), st.integers(-1, 21)), max_size=9), ROWS, ROWS)
@settings(max_examples=400, deadline=None)
def test_a_plan_is_refused_exactly_when_the_readable_check_refuses_it(states, given_rows, preempted, rejected):
    table = table_of(states)
    if given_rows and max(given_rows)[0] % 2:  # half of the plans: no row twice, tokens that are needed
        needed = table.live.num_tokens_needed
        given_rows = [(r, min(max(t, 1), int(needed[r]))) for r, t in dict(given_rows).items() if 0 <= r < table.n]
        preempted, rejected = [], [r for r in {*rejected} if r not in dict(given_rows)]
    rows, tokens = (np.array([pair[i] for pair in given_rows], dtype=np.int64) for i in (0, 1))
    plan = Plan(rows, tokens, np.array(preempted, dtype=np.int64), np.array(rejected, dtype=np.int64))
    try:
        check_plan(plan, table.live, LIMITS)
    except PlanError:
        with pytest.raises(PlanError):
            read(table, plan)
        return
    found = read(table, plan)
    mirror = mirror_of(table)
    assert found.ids == [mirror.ids[mirror.slot_of_row[r]] for r, _ in given_rows]
    assert found.matches(dict(zip(found.ids, tokens.tolist(), strict=True)))
    waiting = [mirror.objects[mirror.slot_of_row[r]] for r, _ in given_rows if table.live.status[r] != RUNNING]
    assert found.admitted == waiting
    limits = found.limits
    for row in range(table.n):
        name, chunk = mirror.ids[mirror.slot_of_row[row]], dict(given_rows).get(row, 0)
        runs = table.live.status[row] == RUNNING
        gone = row in preempted or row in rejected
        if runs and not gone:  # vLLM takes what it needs where nothing is said
            assert min(limits.get(name, NO_LIMIT), table.live.num_tokens_needed[row]) == chunk
        elif chunk:
            assert limits[name] == chunk


def test_many_exceptions_name_the_served_rows_instead():
    table = table_of([2] * (FEW + 5))
    plan = Plan(np.array([3]), np.array([1]))
    found = chunks(plan, table.live, LIMITS._replace(max_num_seqs=99), None, mirror_of(table), speculative=False)
    assert found.limits is None
    assert dict(zip(found.ids, found.most, strict=True)) == {f"r{FEW + 1}": NO_LIMIT}


@pytest.mark.parametrize("dtype", [np.int32, np.uint8])
def test_other_whole_numbers_will_do(dtype):
    rows = np.array([0, 1], dtype=dtype)
    assert read(table_of([2, 2]), Plan(rows, np.ones(2, dtype=dtype))).tokens.tolist() == [1, 1]


@given(STATES, st.data())
@settings(max_examples=100, deadline=None)
def test_a_step_is_noted_as_the_readable_functions_say(states, data):
    table = table_of(states)
    rows = np.array(data.draw(st.permutations(range(table.n))), dtype=np.int64)
    tokens = np.array([data.draw(st.integers(1, int(table.live.num_tokens_needed[r]))) for r in rows], dtype=np.int64)
    contexts, decodes = table.live.num_computed_tokens[rows].copy(), table.live.is_decode[rows].copy()
    waited = [r for r in rows.tolist() if table.live.status[r] != RUNNING]
    stale, shape, numbers = np.zeros(table.n, dtype=bool), np.zeros(12), np.empty(table.n, dtype=np.int64)
    following = note_step(table.ints, rows, tokens, np.arange(table.n), 50, 16, stale, numbers, shape)
    assert shape.tolist() == batch_shape(tokens, contexts, decodes).tolist()
    assert table.live.num_computed_tokens[rows].tolist() == (contexts + tokens).tolist()
    assert table.live.admission_order[waited].tolist() == list(range(50, following))
    assert np.all(table.live.num_blocks * 16 >= table.live.num_computed_tokens)
    assert stale.all()
    assert numbers.tolist() == rows.tolist()


def spin(limit: TimeLimit) -> None:
    with limit:
        while True:
            pass


@pytest.mark.parametrize("polling", [False, True])
def test_a_decision_is_stopped_though_the_alarm_was_put_off_for_an_earlier_one(polling):
    limit = TimeLimit(0.2)
    if polling:  # a system without timerfd
        limit._alarm._descriptor = -1
    for _ in range(3):
        with limit:
            pass
        with pytest.raises(TooSlow):
            spin(limit)
    limit.close()


def test_a_closed_alarm_wakes_who_waits():
    alarm = Alarm(3600.0)
    alarm.put_off()
    alarm.close()
    assert not alarm.wait()  # at once, not in an hour
