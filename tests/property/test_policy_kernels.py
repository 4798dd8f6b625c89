"""Compiled loops of single policies against the same said in numpy."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slacktide.core import bounded, live
from slacktide.core.budget import max_tokens
from slacktide.core.deadlines import survey_reference, windows
from slacktide.core.kernels_latency import extended_features_packed
from slacktide.core.kernels_orders import LAST, decodes_first, mlps, qoserve, sola, sola_bound
from slacktide.core.kinds import DECODE, PREFILL
from slacktide.core.kv import blocks_for
from slacktide.core.latency import AffineModel
from slacktide.core.latency_extended import KNOTS, ExtendedFeatureModel, extended_features
from slacktide.core.live import LiveTable
from slacktide.core.policies._exclusive import HOLD, Look, _first_token_at_risk, budget_within, look
from slacktide.core.policies._shared import (
    Phases,
    by_admission,
    new_blocks,
    phases,
    reserved_decodes,
    reserved_room,
    uncached_tokens,
)
from slacktide.core.policies._sliding import overdue, service_order
from slacktide.core.policies.sliding import Sliding
from slacktide.core.priority import HOPELESS, by_class, classes, edf_feasible, hybrid_key
from slacktide.core.shape import SHAPE_SIZE
from slacktide.core.types import PREEMPTED, RUNNING, SLO, WAITING, Limits, Request, StepView

MODEL = AffineModel(alpha_p=0.01, beta_p=0.0003, alpha_d=0.008, beta_d=0.0001, kappa=0.0001)
BLOCK = 4


@st.composite
def views(draw: st.DrawFn) -> StepView:
    """Up to 12 rows in every state that a host can show, all fields set that a policy may read."""
    n, table = draw(st.integers(1, 12)), LiveTable(2)
    admitted = draw(st.permutations(range(n)))
    asynchronous = draw(st.booleans())
    for row in range(n):
        status = draw(st.sampled_from([WAITING, RUNNING, RUNNING, RUNNING, PREEMPTED]))
        prompt, output = draw(st.integers(1, 60)), 0 if status == WAITING else draw(st.integers(0, 5))
        slo = SLO(*(draw(st.sampled_from([np.inf, 0.01, 0.3, 4.0])) for _ in range(3)))
        priority = draw(st.integers(-1, 1))
        table.append(Request(row, row / 8, prompt, output + draw(st.integers(1, 9)), slo, priority))
        known, in_flight, computed = prompt + output, 0, 0
        if status == RUNNING:
            in_flight = draw(st.integers(0, 1)) if asynchronous else 0
            computed = known if in_flight else draw(st.integers(min(prompt, known - 1) if output else 0, known - 1))
        cached = 0 if status == RUNNING else draw(st.integers(0, (known - 1) // BLOCK)) * BLOCK
        values = {
            live.STATUS: status, live.NUM_OUTPUT: output, live.NUM_IN_FLIGHT: in_flight, live.NUM_COMPUTED: computed,
            live.NUM_CACHED: cached, live.NUM_CACHED_FREE: draw(st.integers(0, cached // BLOCK)),
            live.NUM_BLOCKS: blocks_for(computed, BLOCK), live.RELEGATED: draw(st.sampled_from([0, 0, 1])),
            live.ADMISSION_ORDER: admitted[row] if status == RUNNING else -1,
        }  # fmt: skip
        for field, value in values.items():
            table.ints[field, row] = value
        if output:
            table.floats[live.FIRST_TOKEN, row] = row / 8 + draw(st.sampled_from([0.005, 0.2, 1.0]))
            table.floats[live.LAST_TOKEN, row] = row / 8 + draw(st.sampled_from([1.0, 1.3]))
    limits = Limits(
        draw(st.sampled_from([4, 32, 64])), draw(st.sampled_from([3, 64])), BLOCK, draw(st.integers(0, 60)), 200,
        max_model_len=draw(st.sampled_from([40, 2**31 - 1])),
    )  # fmt: skip
    return StepView(draw(st.sampled_from([1.5, 2.0, 7.25])), table.live, limits, MODEL)


def fillable(view: StepView, waiting: np.ndarray, running: int, reserve: int) -> int:
    rows, limits = view.live, view.limits
    heads = waiting[: max(limits.max_num_seqs - running, 0)]
    known = np.minimum(rows.num_prompt_tokens[heads] + rows.num_output_tokens[heads], limits.max_model_len)
    shared = rows.num_cached_tokens[heads] // BLOCK - rows.num_cached_free_blocks[heads]
    needed = np.cumsum(blocks_for(known, BLOCK) - shared)
    return int((needed <= limits.num_free_blocks - (reserve if running else 0)).sum())


@given(views(), st.integers(0, 30))
@settings(max_examples=300, deadline=None)
def test_what_exclusive_batching_sees(view, reserve):
    found, now, rows = look(view, reserve), phases(view), view.live
    assert found.decode.tolist() == now.decode.astype(int).tolist()
    assert found.waiting.tolist() == now.waiting.tolist()
    half_done = found.rows[1, : found.num_half_done]
    assert by_admission(view, half_done).tolist() == now.half_done.tolist()
    running = int(now.running.sum())
    assert (found.num_running, found.num_decodes, found.num_waiting) == (running, now.decodes.size, now.waiting.size)
    assert found.fillable == fillable(view, now.waiting, running, reserve)
    assert found.has_slo == bool(np.isfinite(rows.slo_tbt).any() or np.isfinite(rows.slo_ttft).any())
    contexts = rows.num_computed_tokens[now.decode]
    assert (found.streams, found.context, found.longest) == (contexts.size, contexts.sum(), contexts.max(initial=0))
    last = np.where(np.isnan(rows.last_token_time), view.now, rows.last_token_time)
    deadline = np.where(np.isfinite(rows.slo_ttft), rows.next_deadline, -np.inf)
    due = np.where(np.isfinite(rows.slo_tbt), np.maximum(deadline, last + rows.slo_tbt), np.inf)
    assert found.slack == due[now.decode].min(initial=np.inf) - view.now
    assert found.gap == rows.slo_tbt[now.decode].min(initial=np.inf)


def at_risk(view: StepView, now: Look) -> bool:
    rows, budget = view.live, view.limits.max_num_batched_tokens
    heads = now.waiting[: now.fillable]

    def prompt(tokens: float) -> float:
        return MODEL.step_time(np.array([max(int(tokens), 1)]), np.zeros(1, dtype=np.int64), np.zeros(1, dtype=bool))

    contexts = rows.num_computed_tokens[now.decode == 1]
    step = MODEL.step_time(np.ones_like(contexts), contexts, np.ones(contexts.size, dtype=bool))
    tokens = np.cumsum(np.maximum(uncached_tokens(view)[heads], 1)).astype(float)
    first, full, left = prompt(min(tokens[0], budget)), prompt(budget), tokens % budget
    share = np.clip((left - tokens[0]) / max(budget - tokens[0], 1.0), 0.0, 1.0)
    needed = (tokens // budget) * full + np.where(left > 0, first + share * (full - first), 0.0)
    slack = rows.arrival_time[heads] + rows.slo_ttft[heads] - view.now - needed / max(1.0 - step / now.gap, 0.1)
    patience = rows.arrival_time[heads] + HOLD * rows.slo_ttft[heads] - view.now
    return bool(((slack >= 0) & (np.minimum(slack, patience) < step)).any())


@given(views())
@settings(max_examples=300, deadline=None)
def test_a_first_token_is_at_risk(view):
    now = look(view)
    if now.fillable:
        assert _first_token_at_risk(view, now) == at_risk(view, now)


@given(views(), st.floats(0.0, 0.05))
@settings(max_examples=200, deadline=None)
def test_a_budget_for_rows_in_order(view, seconds):
    rows, order = view.live, np.argsort(view.live.max_tokens, kind="stable")
    decode = rows.is_decode[order]
    contexts, prompts = rows.num_computed_tokens[order[decode]], order[~decode]
    computed = np.where(rows.status == RUNNING, rows.num_computed_tokens, rows.num_cached_tokens)[prompts]
    expected = max_tokens(
        MODEL, seconds, num_decodes=contexts.size, decode_context=float(contexts.sum()),
        decode_max_context=float(contexts.max(initial=0)),
        prefill_remaining=rows.num_prompt_tokens[prompts] + rows.num_output_tokens[prompts] - computed,
        prefill_computed=computed, limit=view.limits.max_num_batched_tokens,
    )  # fmt: skip
    assert budget_within(view, order, seconds) == expected


@given(views(), st.booleans(), st.sampled_from([None, 1, 16]))
@settings(max_examples=200, deadline=None)
def test_a_step_begins_with_the_survey_and_the_times_of_its_least(view, rebase, max_chunk):
    step, found = bounded.begin(view, 1.1, max_chunk, rebase=rebase), survey_reference(view, rebase=rebase)
    assert step.survey.kind.tolist() == found.kind.tolist()
    assert step.survey.remaining.tolist() == found.remaining.tolist()
    assert (step.survey.num_decodes, step.survey.context) == (found.num_decodes, found.context)
    if not np.isfinite(view.live.slo_e2e).any():
        np.testing.assert_allclose(step.survey.slack, found.slack, rtol=1e-12)
    decodes, limit = np.flatnonzero(found.kind == DECODE), view.limits.max_num_batched_tokens
    assert step.limit == (limit if max_chunk is None else min(limit, max(max_chunk, decodes.size)))
    key = step.survey.slack if decodes.size > step.limit else view.live.admission_order
    assert step.decodes.tolist() == sorted(decodes.tolist(), key=lambda row: (key[row], row))
    assert step.prefills.tolist() == np.flatnonzero(found.kind == PREFILL).tolist()
    none = step.prefills[:0]
    assert step.least == step.seconds(step.load(none, none), 0)
    if step.prefills.size:
        one = step.load(step.prefills[:1], np.array([step.limit]))
        assert (step.smallest, step.full) == (step.seconds(one, 1), step.seconds(one, step.limit))


@given(views(), st.integers(-1, 80))
@settings(max_examples=200, deadline=None)
def test_a_plan_is_cut_from_its_end(view, prefill):
    step = bounded.begin(view, 1.1, None)
    whole = step.packed(step.prefills)
    rows, tokens = whole.rows.tolist(), whole.num_scheduled_tokens.tolist()
    first, queue, _ = step.queue(whole)
    assert first == sum(int(step.survey.kind[row] != PREFILL) for row in rows)
    left = tokens[first] if first == 0 and prefill <= 0 and queue.size else prefill
    expected = []
    for row, chunk in zip(rows[first:], tokens[first:], strict=True):
        if left > 0:
            expected.append((row, min(chunk, left)))
        left -= chunk
    plan = bounded.cut(step, whole, prefill, {})
    kept = list(zip(plan.rows.tolist(), plan.num_scheduled_tokens.tolist(), strict=True))
    assert kept == list(zip(rows[:first], tokens[:first], strict=True)) + expected
    assert plan.token_cap == sum(tokens for _, tokens in kept)
    chunks = np.array([chunk for _, chunk in expected], dtype=np.int64)
    queue = step.load(np.array([row for row, _ in expected], dtype=np.int64), chunks)
    assert plan.predicted_step_time is not None
    assert plan.predicted_step_time * 1.1 == step.seconds(queue, int(chunks.sum()))


def qoserve_reference(view, rows, slack, remaining, rho, one_step, *, relegation, hints, selective):
    table = view.live
    waiting = (table.status[rows] != RUNNING) & (table.relegated[rows] == 0)
    misses = waiting & (slack < remaining / rho) & (table.num_output_tokens[rows] == 0)
    if not relegation:
        misses = np.zeros_like(misses)
    if hints and misses.any():
        misses &= table.priority[rows] == table.priority[rows][waiting].max()
    out = misses | (table.relegated[rows] != 0)
    high = not edf_feasible(slack[~out], remaining[~out], rho)
    batch = np.isinf(table.slo_ttft[rows]) & np.isfinite(table.slo_e2e[rows])
    work = remaining + np.where(batch, np.maximum(20 - table.num_output_tokens[rows], 1), 0)
    slack = np.minimum(slack, LAST / 4)
    key, spare = hybrid_key(slack, work, 0.008 if high else 0.001), slack - remaining / rho
    if selective:
        key = np.where((table.status[rows] == RUNNING) & (spare >= 0) & (spare < one_step), -LAST, key)
    return rows[np.argsort(np.where(out, key + LAST, key), kind="stable")], rows[misses], high


FLAGS = st.fixed_dictionaries({name: st.booleans() for name in ("relegation", "hints", "selective")})


@given(views(), st.sampled_from([20.0, 100.0, 1000.0]), st.sampled_from([0.05, 1.0]), FLAGS)
@settings(max_examples=300, deadline=None)
def test_qoserve_orders_and_relegates(view, rho, one_step, flags):
    step = bounded.begin(view, 1.1, None)
    rows, found = step.prefills, step.survey
    order, relegated, high = qoserve(
        *view.live.columns,
        rows,
        found.slack,
        found.remaining,
        rho,
        0.008,
        0.001,
        20,
        one_step,
        flags["relegation"],
        flags["hints"],
        flags["selective"],
    )
    expected = qoserve_reference(view, rows, found.slack[rows], found.remaining[rows], rho, one_step, **flags)
    assert (order.tolist(), relegated.tolist(), high) == (expected[0].tolist(), expected[1].tolist(), expected[2])


@given(views(), st.sampled_from([20.0, 100.0, 1000.0]), st.sampled_from([0.5, 1.5]), st.sampled_from([0.0, 0.1]))
@settings(max_examples=300, deadline=None)
def test_mlps_orders_by_class_and_length(view, rho, alpha, least):
    step = bounded.begin(view, 1.1, None)
    rows, found, table = step.prefills, step.survey, view.live
    order, lost = mlps(table.columns[0], rows, found.slack, found.remaining, rho, alpha, 1.5, least)
    protected = (table.priority[rows] < 0) | (table.num_output_tokens[rows] > 0)
    kinds = classes(
        found.remaining[rows], found.slack[rows], rho, protected, table.relegated[rows] != 0, alpha=alpha, beta=1.5,
        least=least,
    )  # fmt: skip
    assert order.tolist() == rows[by_class(kinds, found.remaining[rows])].tolist()
    assert lost.tolist() == rows[kinds >= HOPELESS].tolist()


@given(views(), st.sampled_from([20.0, 100.0, 1000.0]), st.sampled_from([0.001, 0.5]))
@settings(max_examples=200, deadline=None)
def test_sola_serves_who_used_most_of_its_target(view, rho, least):
    step = bounded.begin(view, 1.1, None, rebase=False)
    rows, table = step.prefills, view.live
    order, must, worst = sola(table.columns[1], rows, step.survey.remaining, rho, view.now, least)
    target = table.slo_ttft[rows]
    predicted = view.now - table.arrival_time[rows] + step.survey.remaining[rows] / rho
    on_time = predicted <= target
    assert order.tolist() == rows[np.lexsort((-predicted / target, ~on_time))].tolist()
    assert must.tolist() == (on_time & (predicted + least > target)).tolist()
    assert worst == (predicted / target)[on_time].max(initial=0.0)


@given(views(), st.sampled_from([0.001, 0.2]), st.sampled_from([1, 20]))
@settings(max_examples=200, deadline=None)
def test_sola_bounds_a_step_by_mean_times(view, least, expected_output):
    rows, table = bounded.begin(view, 1.1, None).decodes, view.live
    bound, share = sola_bound(*table.columns, rows, view.now, expected_output, least)
    first, output = table.first_token_time[rows], (table.num_output_tokens + table.num_in_flight_tokens)[rows]
    elapsed = np.where(np.isnan(first), 0.0, view.now - first)
    left = np.clip(expected_output - output, 1.0, np.maximum(table.max_tokens[rows] - output, 1))
    most = table.slo_tbt[rows] * (output - 1 + left) - elapsed - (left - 1) * least
    savable = most >= least
    assert bound == most[savable].min(initial=np.inf)
    assert share == (elapsed / np.maximum(output - 1, 1) / table.slo_tbt[rows])[savable].max(initial=0.0)


@given(st.lists(st.integers(0, 20_000), min_size=SHAPE_SIZE, max_size=SHAPE_SIZE))
@settings(max_examples=100, deadline=None)
def test_the_features_of_one_step(numbers):
    shape, model = np.array(numbers, dtype=float), ExtendedFeatureModel(np.ones((3, 8 + len(KNOTS))), np.array(KNOTS))
    out = np.empty(8 + len(KNOTS))
    extended_features_packed(model.packed, shape, out)
    assert out.tolist() == extended_features(shape[None, :], model.knots)[0].tolist()


@given(views())
@settings(max_examples=200, deadline=None)
def test_decodes_by_admission_then_the_others_by_their_key(view):
    table, key = view.live, view.live.max_tokens.astype(float)
    order, decodes = decodes_first(table.columns[0], table.index.size, key)
    running = by_admission(view, np.flatnonzero(table.is_decode))
    others = np.flatnonzero(~table.is_decode)
    assert order.tolist() == running.tolist() + others[np.argsort(key[others], kind="stable")].tolist()
    assert decodes == running.size


def phases_reference(view: StepView) -> Phases:
    live = view.live
    running = live.status == RUNNING
    outputs, over = live.num_output_tokens + live.num_in_flight_tokens, None
    if live.num_in_flight_tokens.any():
        over = (live.num_in_flight_tokens > 0) & (outputs >= live.max_tokens)
        over |= live.num_computed_tokens >= view.limits.max_model_len - 1
    decode = (live.num_prompt_tokens + outputs - live.num_computed_tokens == 1) & (outputs > 0)
    decodes = by_admission(view, np.flatnonzero(decode if over is None else decode & ~over))
    half_done = by_admission(view, np.flatnonzero(running & ~decode))
    return Phases(running, decode, over, decodes, half_done, np.flatnonzero(~running))


def room_reference(view: StepView, waiting: np.ndarray) -> tuple[int, np.ndarray]:
    live, limits = view.live, view.limits
    length = np.minimum(live.num_prompt_tokens + live.max_tokens, limits.max_model_len)
    whole = np.minimum((length + (limits.block_size - 2)) // limits.block_size, limits.num_blocks)
    room = limits.num_free_blocks + int(live.num_blocks.sum()) - int(whole.sum()) + int(whole[waiting].sum())
    shared = live.num_cached_tokens[waiting] // limits.block_size - live.num_cached_free_blocks[waiting]
    return room, np.maximum(whole[waiting] - shared, 0)


@given(views())
@settings(max_examples=300, deadline=None)
def test_rows_by_phase_and_their_reservations(view):
    found, wanted = phases(view), phases_reference(view)
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours is None) == (theirs is None)
        assert theirs is None or ours.tolist() == theirs.tolist()
    room, costs = reserved_room(view, found)
    wanted_room, wanted_costs = room_reference(view, wanted.waiting)
    assert (room, costs.tolist()) == (wanted_room, wanted_costs.tolist())
    rows = wanted.decodes[: view.limits.max_num_batched_tokens]
    if wanted.over is not None:
        rows = rows[np.cumsum(new_blocks(view, rows)) <= view.limits.num_free_blocks]
    assert reserved_decodes(view, found).tolist() == rows.tolist()


@settings(max_examples=150, deadline=None)
@given(
    views(),
    st.sampled_from([0.0, 0.01, 1.0]),
    st.sampled_from(["greedy", "clamped", "frozen", "dual"]),
    st.integers(1, 3),
    st.sampled_from([0.02, np.inf]),
)
def test_sliding_decides_at_once_what_its_parts_say(view, ageing, mode, window, cap):
    policy = Sliding(chunker=mode, window=window, ageing=ageing)
    step = bounded.begin(view, policy.margin, None)
    if not step.prefills.size:
        return
    look = policy._look(step, 1.0)
    bounds, late = windows(step.survey, step.least, max(window, 2), late_factor=policy.late_factor)
    order, hopeless = service_order(step, "mlps", look.rho, step.least, policy.beta, policy.beta, relegation=False)
    assert look.bounds.tolist() == bounds.tolist()
    assert (look.late, look.order.tolist(), look.hopeless.tolist()) == (late, order.tolist(), hopeless.tolist())
    assert look.aged == overdue(step, ageing)

    first, rows, tokens = step.queue(step.packed(order))
    load = step.load(rows, tokens)
    greedy, full, at_risk, prefill = policy._fit(step, look, rows, tokens, first, cap)
    assert greedy == step.within(load, float(bounds[0]))
    assert full == step.seconds(load, max(greedy, 0))
    _, number = policy._construct(step, look, float(bounds[0]), full)
    assert at_risk == number
    if mode == "greedy" or window == 1:
        assert prefill == greedy
    elif at_risk or (rows.size and first + tokens.sum() >= step.limit):
        assert prefill == -2
    else:
        assert (prefill, greedy) == policy._split(step, order, rows, tokens, first, bounds, cap)
