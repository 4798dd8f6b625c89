"""The compiled packer equals its readable twin on any table, and both keep to the budgets."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slacktide.core.latency import AffineModel
from slacktide.core.live import (
    ADMISSION_ORDER,
    NUM_BLOCKS,
    NUM_CACHED,
    NUM_CACHED_FREE,
    NUM_COMPUTED,
    NUM_IN_FLIGHT,
    NUM_OUTPUT,
    NUM_SHARED,
    STATUS,
    LiveTable,
)
from slacktide.core.pack import pack, pack_reference
from slacktide.core.types import PREEMPTED, RUNNING, WAITING, Limits, Plan, Request, StepView

LATENCY = AffineModel(alpha_p=1.0, beta_p=1.0, alpha_d=1.0, beta_d=1.0)


@st.composite
def views(draw: st.DrawFn) -> StepView:
    """Any state that the simulator could be in: running rows hold blocks for what they computed."""
    bs = draw(st.sampled_from([1, 4, 16]))
    n = draw(st.integers(1, 12))
    table = LiveTable(2)
    order = draw(st.permutations(range(n)))
    held = 0
    for row in range(n):
        status = draw(st.sampled_from([WAITING, RUNNING, RUNNING, PREEMPTED]))
        prompt, output = draw(st.integers(1, 40)), 0 if status == WAITING else draw(st.integers(0, 9))
        table.append(Request(row, float(row // 3), prompt, output + draw(st.integers(1, 5)), priority=row % 3))
        ints, known = table.ints[:, row], prompt + output
        ints[STATUS], ints[NUM_OUTPUT] = status, output
        if status == RUNNING:
            ints[NUM_IN_FLIGHT] = draw(st.integers(0, 1))
            least = min(prompt, known - 1) if output else 0
            ints[NUM_COMPUTED] = known if ints[NUM_IN_FLIGHT] else draw(st.integers(least, known - 1))
            ints[NUM_BLOCKS] = -(-ints[NUM_COMPUTED] // bs)
            ints[NUM_SHARED] = draw(st.integers(0, int(ints[NUM_BLOCKS])))
            ints[ADMISSION_ORDER] = order[row]
            held += int(ints[NUM_BLOCKS])
        else:
            hits = draw(st.integers(0, (known - 1) // bs))
            ints[NUM_CACHED], ints[NUM_CACHED_FREE] = hits * bs, draw(st.integers(0, hits))
    free = draw(st.integers(0, 30))
    limits = Limits(
        max_num_batched_tokens=draw(st.integers(1, 80)),
        max_num_seqs=draw(st.integers(1, 14)),
        block_size=bs,
        num_free_blocks=free,
        num_blocks=held + free,
        watermark_blocks=draw(st.integers(0, 4)),
        max_model_len=draw(st.sampled_from([30, 60, 2**31 - 1])),
    )
    return StepView(5.0, table.live, limits, LATENCY)


@st.composite
def cases(draw: st.DrawFn) -> tuple[StepView, dict[str, Any]]:
    view = draw(views())
    n = view.live.index.size
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        rows = draw(st.permutations(range(n)))[: draw(st.integers(0, n))]
        options["order"] = np.array(rows, dtype=np.int64)
    if draw(st.booleans()):
        options["chunk_cap"] = np.array(draw(st.lists(st.integers(0, 12), min_size=n, max_size=n)), dtype=np.int64)
    if draw(st.booleans()):
        keys = draw(st.lists(st.sampled_from([-1.0, 0.0, 0.5, np.inf]), min_size=n, max_size=n))
        options["victim_key"] = np.array(keys)
    if draw(st.booleans()):
        options["token_budget"] = draw(st.integers(0, view.limits.max_num_batched_tokens))
    if draw(st.booleans()):
        options["watermark_blocks"] = draw(st.integers(0, 5))
    options["long_prefill_threshold"] = draw(st.sampled_from([0, 0, 3, 10]))
    options["chunked_prefill"] = draw(st.booleans())
    options["reserve_full_isl"] = draw(st.booleans())
    options["admit"] = draw(st.sampled_from([True, True, False]))
    options["list_rules"] = draw(st.sampled_from([None, True, False]))
    return view, options


def as_lists(plan: Plan) -> tuple[list[int], list[int], list[int]]:
    return plan.rows.tolist(), plan.num_scheduled_tokens.tolist(), plan.preempted.tolist()


@given(cases())
@settings(max_examples=600)
def test_compiled_packer_equals_the_readable_one(case):
    view, options = case
    assert as_lists(pack(view, **options)) == as_lists(pack_reference(view, **options))


@given(cases())
@settings(max_examples=300)
def test_a_plan_keeps_to_tokens_seats_and_blocks(case):
    view, options = case
    live, limits = view.live, view.limits
    plan = pack(view, **options)
    rows, tokens, preempted = as_lists(plan)
    assert len(set(rows)) == len(rows)
    assert not set(rows) & set(preempted)
    assert all(live.status[row] == RUNNING for row in preempted)
    assert all(0 < t <= live.num_tokens_needed[row] for row, t in zip(rows, tokens, strict=True))
    assert sum(tokens) <= options.get("token_budget", limits.max_num_batched_tokens)
    admitted = [row for row in rows if live.status[row] != RUNNING]
    assert not (admitted and preempted)
    running = int((live.status == RUNNING).sum()) - len(preempted)
    assert not admitted or running + len(admitted) <= limits.max_num_seqs
    free = limits.num_free_blocks + int((live.num_blocks - live.num_shared_blocks)[preempted].sum())
    for row, t in zip(rows, tokens, strict=True):
        start = int(live.num_computed_tokens[row] + live.num_cached_tokens[row])
        shared = int(live.num_cached_tokens[row]) // limits.block_size - int(live.num_cached_free_blocks[row])
        free -= -(-(start + t) // limits.block_size) - int(live.num_blocks[row]) - shared
    assert free >= 0
    if "order" in options:
        wanted = options["order"].tolist()
        assert rows == [row for row in wanted if row in rows]
    if "chunk_cap" in options:
        assert all(t <= options["chunk_cap"][row] for row, t in zip(rows, tokens, strict=True))
