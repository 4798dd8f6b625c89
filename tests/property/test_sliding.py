"""Twins of the compiled helpers, and what every step of the SLO-aware policies keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slacktide.core import chunker, live
from slacktide.core.chunker import Load, load_time
from slacktide.core.deadlines import survey, survey_reference, windows, windows_reference
from slacktide.core.kinds import DECODE, PREFILL
from slacktide.core.latency import AffineModel, PackedModel
from slacktide.core.latency_families import RooflineModel, SevenFeatureModel
from slacktide.core.live import LiveTable
from slacktide.core.pack import as_policy
from slacktide.core.spec import parse_policies
from slacktide.core.types import PREEMPTED, RUNNING, SLO, WAITING, Limits, Plan, Request, StepView
from slacktide.metrics.log import FINISHED
from slacktide.sim.engine import EngineConfig, simulate
from slacktide.workload.requests import Workload

TRUTH = AffineModel(alpha_p=0.01, beta_p=0.0003, alpha_d=0.008, beta_d=0.0001, kappa=0.0001)


def convex(seed: int) -> PackedModel:
    """Affine, a roofline's knee, or a square of the longest chunk: one prompt's time is convex in its tokens."""
    rng = np.random.default_rng(seed)
    if seed % 3 == 0:
        alpha, beta_p, beta_d = rng.uniform(0.1, 2.0, 3) * [0.01, 1e-4, 1e-4]
        # One fixed cost: if a step with prompts cost more from the first token on, no time would be convex.
        return AffineModel(alpha, beta_p, alpha, beta_d)
    if seed % 3 == 1:
        return RooflineModel(rng.uniform(0, 5e-3), 0.014, rng.uniform(5e-5, 2e-4), 0, 0, 0, 1e-9, 1e-8)
    weights = np.zeros((3, 8))
    weights[:, [0, 4, 6, 2]] = rng.uniform(0.2, 2.0, 4) * [0.01, 1e-4, 1e-4, 2e-8]
    return SevenFeatureModel(weights, floor=1e-4)


@st.composite
def tables(draw: st.DrawFn) -> StepView:
    n = draw(st.integers(1, 12))
    table = LiveTable(2)
    for row in range(n):
        status = draw(st.sampled_from([WAITING, RUNNING, RUNNING, PREEMPTED]))
        prompt, output = draw(st.integers(1, 60)), 0 if status == WAITING else draw(st.integers(0, 5))
        slo = SLO(*(draw(st.sampled_from([np.inf, 0.01, 0.3, 4.0])) for _ in range(2)))
        table.append(Request(row, row / 8, prompt, output + draw(st.integers(1, 9)), slo))
        known, in_flight = prompt + output, 0
        computed = 0
        if status == RUNNING:
            in_flight = draw(st.integers(0, 1))
            computed = known if in_flight else draw(st.integers(min(prompt, known - 1) if output else 0, known - 1))
        values = {
            live.STATUS: status, live.NUM_OUTPUT: output, live.NUM_IN_FLIGHT: in_flight, live.NUM_COMPUTED: computed,
            live.NUM_CACHED: 0 if status == RUNNING else draw(st.integers(0, (known - 1) // 4)) * 4,
        }  # fmt: skip
        for field, value in values.items():
            table.ints[field, row] = value
        if output:
            table.floats[live.FIRST_TOKEN, row] = row / 8 + draw(st.sampled_from([0.005, 0.2, 1.0]))
    limits = Limits(64, 64, 4, 1000, 1000, max_model_len=draw(st.sampled_from([40, 2**31 - 1])))
    return StepView(draw(st.sampled_from([1.5, 2.0, 7.25])), table.live, limits, TRUTH)


@given(tables(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_compiled_survey_equals_the_readable_one(view, rebase):
    one, other = survey(view, rebase=rebase), survey_reference(view, rebase=rebase)
    for name, a, b in zip(one._fields, one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12, err_msg=name)


@given(tables(), st.integers(1, 4), st.sampled_from([0.0, 0.02, 0.4]), st.sampled_from([0.5, 1.0, np.inf]))
@settings(max_examples=200, deadline=None)
def test_compiled_windows_equal_the_readable_ones(view, count, least, late_factor):
    found = survey(view)
    options: dict[str, Any] = {"late_factor": late_factor, "tokens_per_step": 1.5}
    (a, late_a), (b, late_b) = (
        windows(found, least, count, **options),
        windows_reference(found, least, count, **options),
    )
    np.testing.assert_allclose(a, b, rtol=1e-12)
    assert late_a == late_b


@given(tables())
@settings(max_examples=100, deadline=None)
def test_two_windows_end_at_the_earliest_second_deadline(view):
    found = survey(view)
    rows = found.kind == DECODE
    bounds, _ = windows(found, -np.inf, 2)
    assert bounds[0] == found.slack[rows].min(initial=np.inf)
    assert bounds[1] == (found.slack + found.pace)[rows & np.isfinite(found.slack)].min(initial=np.inf)


@st.composite
def searches(draw: st.DrawFn) -> tuple[PackedModel, Load, np.ndarray, int]:
    n, decodes = draw(st.integers(1, 4)), draw(st.integers(0, 20))
    remaining = np.array(draw(st.lists(st.integers(1, 250), min_size=n, max_size=n)))
    computed = np.array(draw(st.lists(st.integers(0, 300), min_size=n, max_size=n)))
    steps = draw(st.lists(st.integers(1, 60), min_size=2, max_size=4))
    load = Load(decodes, float(decodes * 50), 90.0 if decodes else 0.0, remaining, computed)
    return convex(draw(st.integers(0, 30))), load, np.cumsum(steps) / 1000.0, draw(st.sampled_from([64, 150, 400]))


@given(searches(), st.sampled_from(["clamped", "frozen", "dual"]))
@settings(max_examples=150, deadline=None)
def test_window_search_keeps_its_bound_and_comes_close_to_an_exhaustive_one(case, mode):
    model, load, bounds, limit = case
    chosen, most = chunker.split(model, load, bounds, limit, mode)
    exact, greedy = chunker.split_reference(model, load, bounds, limit, frozen=mode == "frozen", dual=mode == "dual")
    assert most == greedy
    assert chosen <= most
    if most < 0:
        assert chosen == most
        return
    assert load.num_decodes + chosen <= limit
    if chosen > 0:
        assert load_time(model, load, chosen) <= bounds[0] + 1e-9
    # On a grid: not the same step, but never a worse one than greedy, and greedy where nothing beats it.
    assert (exact == most) <= (chosen == most)


@given(searches())
@settings(max_examples=150, deadline=None)
def test_clamped_window_equals_greedy_when_this_window_is_the_shorter_one(case):
    """One prompt and a convex time: with T_cur <= T_next the whole gain of the window is gone."""
    model, load, bounds, limit = case
    one = load._replace(remaining=load.remaining[:1] * 40, computed=load.computed[:1])
    bounds = np.array([bounds[0], bounds[0] + max(bounds[0], bounds[1] - bounds[0])])
    for mode in ("clamped", "frozen"):
        chosen, most = chunker.split(model, one, bounds, limit, mode)  # type: ignore[arg-type]
        assert chosen == most
    assert chunker.split_reference(model, one, bounds, limit)[0] >= most - 1


@given(searches())
@settings(max_examples=100, deadline=None)
def test_affine_times_leave_greedy_in_place(case):
    _, load, bounds, limit = case
    model = AffineModel(0.004, 1e-4, 0.004, 1e-4)
    one = load._replace(remaining=load.remaining[:1] * 40, computed=load.computed[:1])
    chosen, most = chunker.split(model, one, bounds, limit, "clamped")
    # A first step that leaves a later one without tokens of its own (the step of decodes alone) may tie.
    assert chosen == most or load_time(model, one, chosen) <= bounds[0] + 1e-9
    assert chunker.split(model, one, bounds, limit, "clamped", gain=1e-6)[0] == most


ARMS = [
    "greedy-dynamic",
    "greedy-dynamic:guard=0.5",
    "qoserve",
    "sola",
    "sliding",
    "sliding:chunker=dual,window=3,margin=1",
    "sliding:chunker=greedy,constructor=off,guard=0",
    "sliding:chunker=frozen,order=edf,endangered_only=true",
    "sliding:relegation=true,evict=true,ageing=0.2",
    "sliding:order=hybrid,output_statistics=true,window=4",
    "sliding:constructor=paper,order=paper",
    "sliding:reading=paper",
    "sliding:reading=paper,constructor=off",
]


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    n = draw(st.integers(3, 30))

    def column(values: st.SearchStrategy[Any]) -> np.ndarray:
        return np.array(draw(st.lists(values, min_size=n, max_size=n)))

    return Workload(
        arrival_time=np.cumsum(column(st.sampled_from([0.0, 0.0, 0.01, 0.05, 1.0]))),
        num_prompt_tokens=column(st.sampled_from([1, 5, 40, 200])),
        num_output_tokens=column(st.integers(1, 10)),
        slo_ttft=column(st.sampled_from([np.inf, 0.03, 0.2, 2.0])),
        slo_tbt=column(st.sampled_from([np.inf, 0.005, 0.03, 0.2])),
        slo_e2e=column(st.sampled_from([np.inf, np.inf, 0.5])),
        priority=column(st.sampled_from([0, 0, -1, 1])),
    )


@pytest.mark.parametrize("text", ARMS)
@given(load=workloads(), budget=st.sampled_from([16, 100, 512]), blocks=st.sampled_from([60, 300]))
@settings(max_examples=15, deadline=None)
def test_steps_keep_their_bound_and_everybody_finishes(text, load, budget, blocks):
    """No step is predicted beyond T_cur unless it decodes alone or nothing decodes; no batch is empty; all finish."""
    (spec,) = parse_policies([text])
    bounded = "paper" not in text

    def look(view: StepView, plan: Plan) -> None:
        assert plan.rows.size or plan.preempted.size
        if not bounded or plan.why is None or plan.preempted.size or plan.predicted_step_time is None:
            return
        kind = survey(view).kind[plan.rows]
        if (kind == PREFILL).any() and (kind == DECODE).any():
            assert plan.predicted_step_time <= plan.why["t_cur"] * (1 + 1e-9)
        assert plan.token_cap == plan.num_scheduled_tokens.sum()

    config = EngineConfig(max_num_batched_tokens=budget, num_blocks=blocks, block_size=4)
    log = simulate(load, as_policy(spec.build()), TRUTH, config, check=True, fast_forward=False, on_step=look).log
    assert (log.end_reason == FINISHED).all()


@given(st.integers(0, 500), st.sampled_from(["sliding", "qoserve", "greedy-dynamic", "sliding:reading=paper"]))
@settings(max_examples=25, deadline=None)
def test_decisions_depend_on_the_view_alone(seed, text):
    """Two fresh policies plan the same; the view is left as it was."""
    rng = np.random.default_rng(seed)
    table = LiveTable()
    for i in range(30):
        table.append(Request(i, i / 100, int(rng.integers(1, 900)), 50, SLO(float(rng.uniform(0.02, 2)), 0.05)))
    view = StepView(0.35, table.live, Limits(512, 64, 16, 400, 400), TRUTH)
    before = table.ints.copy()
    (spec,) = parse_policies([text])
    one, other = spec.build().plan(view), spec.build().plan(view)
    assert one.rows.tolist() == other.rows.tolist()
    assert one.num_scheduled_tokens.tolist() == other.num_scheduled_tokens.tolist()
    assert (table.ints == before).all()
