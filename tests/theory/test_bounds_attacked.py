"""The bound attacked where its proof has joints: steps that share memory, kinked tables, tiny cases tried in full."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slacktide.core import shape as s
from slacktide.core.latency import AffineModel, LatencyModel
from slacktide.core.latency_tables import Grid, TablesModel
from slacktide.errors import InputError
from slacktide.profiling.profiles import load_profile
from slacktide.search.bounds import Bound, bound_of_scenario, capacity_bound
from slacktide.search.demand import demand_of, most_open, most_open_for_ever
from slacktide.search.scenario import Scenario, Setup, prepare
from slacktide.search.step_prices import Domain, Prices, step_points
from slacktide.sim.engine import EngineConfig
from slacktide.workload.requests import Workload

MODEL = AffineModel(alpha_p=0.004, beta_p=5e-5, alpha_d=0.008, beta_d=1e-4, alpha_mb=0.008, kappa=2e-5)
FREE = {"most_decodes": 1e9, "most_context": 1e9, "longest_prefill": math.inf, "longest_decode": math.inf}


def tables(**changes: Any) -> TablesModel:
    """A small model; decode attention bends at contexts of 100 and 1,000."""
    n, x = np.array([1.0, 8.0, 64.0]), np.array([1.0, 100.0, 1000.0, 4000.0])
    base: dict[str, Any] = {
        "dense": 0.004 + 1e-5 * np.arange(513.0),
        "per_sequence": 1e-5 * np.arange(66.0),
        "decode": Grid((n, x), 1e-7 * n[:, None] * np.array([1.0, 20.0, 800.0, 4000.0])),
        "potential_values": 1e-8 * (100.0 * np.arange(60.0)) ** 2,
        "potential_step": 100.0,
    }
    return TablesModel(**(base | changes))


def engine(workload: Workload, model: LatencyModel = MODEL, **config: Any) -> Setup:
    profile = replace(load_profile("l4/llama-3-8b"), latency=model)
    given = {"max_num_batched_tokens": 512, "max_num_seqs": 64, "num_blocks": 2000} | config
    return Setup(Scenario("none", "none"), workload, profile, EngineConfig(**given), model)


def requests(n: int = 60, prompt: int = 300, output: int = 20, rate: float = 5.0, **more: Any) -> Workload:
    targets = {"slo_ttft": np.full(n, 1.0), "slo_tbt": np.full(n, 0.1)} | more
    return Workload(np.arange(n) / rate, np.full(n, prompt), np.full(n, output), **targets)


def worth(at: Prices, latency: LatencyModel, chunks: list[tuple[int, int]], contexts: list[int]) -> float:
    """Price of a step of these (tokens, cached) chunks and decodes over its time."""
    tokens = np.array([c for c, _ in chunks] + [1] * len(contexts))
    cached = np.array([u for _, u in chunks] + contexts)
    shape = s.batch_shape(tokens, cached, np.repeat([False, True], [len(chunks), len(contexts)]), latency.potential)
    pairs = shape[s.PREFILL_WORK] - 0.5 * shape[s.PREFILL_SQUARE]
    attention = shape[s.PREFILL_POTENTIAL] if latency.potential(np.array([1e4]))[0] > 0 else pairs
    price = (
        at.p * shape[s.PREFILL_TOKENS] + at.w * attention + at.d * shape[s.NUM_DECODES]
        + at.e * shape[s.DECODE_CONTEXT]
    )  # fmt: skip
    return float(price / latency.step_times(shape[None])[0])


# ---- prices


@pytest.mark.parametrize("model", [MODEL, tables()])
def test_rows_that_share_a_prefix_may_hold_more_context_than_the_memory(model):
    """KV for 1,008 tokens, prompts of 820 of which 800 are the same: 10 decode at once, their contexts sum to 8,200."""
    n = 40
    ids = np.concatenate([[*range(50), 100 + i, 200 + i] for i in range(n)])
    load = Workload(
        np.arange(n) * 0.2, np.full(n, 832 - 12), np.full(n, 30), slo_ttft=np.full(n, 1.0), slo_tbt=np.full(n, 0.05),
        hash_ids=(ids, np.arange(n + 1) * 52), hash_block_size=16,
    )  # fmt: skip
    setup = engine(load, model, num_blocks=63, enable_prefix_caching=True)
    at = Bound(load, setup, "deadline", 0.99, 0.0).points.prices((1e-6, 1.0, 820.0), **FREE)
    assert worth(at, model, [], [820] * 10) <= 1


def test_tables_of_different_nodes_may_bend_anywhere():
    """Beside a chunk decodes cost nothing up to a context of 500, which is no node of the decode table."""
    chunk, cached, n = np.array([1.0, 512.0]), np.array([0.0, 4000.0]), np.array([1.0, 64.0])
    beside = 1e-7 * n[:, None] * np.array([0.0, 0.0, 50.0, 4000.0])
    model = tables(
        dense=1e-4 + 1e-7 * np.arange(513.0),
        decode=Grid((n, np.array([1.0, 4000.0])), 1e-7 * n[:, None] * np.array([1.0, 4000.0])),
        prefill=Grid((chunk, cached), np.array([[1e-5, 2e-3], [2e-3, 4e-3]])),
        increment=Grid((chunk, cached, n, np.array([1.0, 500.0, 560.0, 4000.0])), np.tile(beside, (2, 2, 1, 1))),
        potential_values=None,
    )
    points = step_points(model, Domain(512, 64, 4000, 100_000))
    at = points.prices((1e-6, 1e-6, 1.0), **FREE)
    for context in (300, 400, 500, 520, 900):
        assert worth(at, model, [(1, 0)], [context] * 64) <= 1


def test_with_skew_a_table_that_falls_is_taken_at_its_lowest():
    n, x = np.array([1.0, 64.0]), np.array([1.0, 1000.0, 4000.0])
    model = tables(decode=Grid((n, x), 1e-6 * n[:, None] * np.array([1000.0, 1000.0, 10.0])), skew=1.0)
    points = step_points(model, Domain(512, 64, 4000, 100_000))
    at = points.prices((1e-6, 1.0, 1e-6), **FREE)
    assert worth(at, model, [], [100] * 63 + [4000]) <= 1


def test_a_potential_of_nothing_prices_nothing():
    model = tables(potential_values=np.zeros(60))
    load = requests()
    found = capacity_bound(load, engine(load, model))
    assert found["bound"] is None or found["bound"] > 1


def test_a_step_as_long_as_the_target_still_counts():
    """420 decodes take 50 ms; in floating point a hair more than the target of 50 ms, which the judge forgives."""
    model = AffineModel(alpha_p=0.008, beta_p=1e-4, alpha_d=0.008, beta_d=1e-4)
    points = step_points(model, Domain(420, 420, 100, 100_000))
    longest = float(points.least[points.prefill == 0].max())
    at = points.prices((1e-6, 1.0, 1e-6), **(FREE | {"longest_decode": longest - 5e-10}))
    all_of_them = points.prices((1e-6, 1.0, 1e-6), **FREE)
    assert at.d == pytest.approx(all_of_them.d)


def test_a_prompt_again_in_a_long_step_stands_for_a_decode():
    """Steps with prompts are longer than the TTFT target; after a preemption such a step gives the next token."""
    model = AffineModel(alpha_p=0.001, beta_p=1e-3, alpha_d=0.05, beta_d=0.0)
    points = step_points(model, Domain(64, 32, 100, 5000))
    at = points.prices((1.0, 1.0, 1e-9), **(FREE | {"most_decodes": 1.0, "longest_prefill": 0.02}))
    long = [(20, 0)]  # 21 ms: one request computed again, in place of a decode of 50 ms
    assert at.d <= model.step_time(np.array([20]), np.array([0]), np.array([False])) * 1.001
    assert worth(at, model, long, []) <= 1


def test_one_token_a_step_has_prices_too():
    for model in (MODEL, tables()):
        at = step_points(model, Domain(1, 64, 100, 5000)).prices((1.0, 1.0, 1.0), **FREE)
        assert worth(at, model, [(1, 50)], []) <= 1
        assert worth(at, model, [], [50]) <= 1


# ---- the whole bound


def test_nobody_who_must_be_served_has_no_bound():
    load = requests(abort_time=np.arange(60) / 5.0 + 100.0)
    assert capacity_bound(load, engine(load))["bound"] is None


def test_for_ever_more_requests_are_open_than_in_a_short_run():
    load = requests(n=10, rate=10.0, output=101)  # each is open for 11 s, the run's arrivals last 0.9 s
    demand = demand_of(load, engine(load), "deadline", 0.0)
    assert most_open(demand, 1.0)[0] == 10
    seats, context = most_open_for_ever(demand, 1.0)
    assert seats == 111  # arrivals of 11 s, both ends counted
    assert context == pytest.approx(111 * 400.0)
    assert most_open_for_ever(demand, 0.001) == most_open(demand, 0.001)


def test_for_ever_the_share_that_may_miss_is_met_exactly():
    """49 equal requests at 99 %: in one run none may miss, in many rounds one in a hundred."""
    load = requests(n=49)
    bound = Bound(load, engine(load), "deadline", 0.99, 0.0)
    all_of_them = Bound(load, engine(load), "deadline", 1.0, 0.0)
    prices = bound.prices(math.inf, for_ever=True)
    assert bound.may_miss == 0
    assert bound.sustained(prices) == pytest.approx(all_of_them.sustained(prices) / 0.99)


def test_the_bound_is_a_rate_as_one_asks_for_it():
    """Fifty Poisson arrivals at `--rate 1` come at another mean rate than one a second."""
    scenario = Scenario("azure-conv", "l4/llama-3-8b", slo="ttft:500,tbt:100", arrival="poisson", num_prompts=50,
                        seed=3)  # fmt: skip
    at_one = prepare(replace(scenario, rate=1.0))
    assert abs(at_one.workload.rate - 1) > 0.05
    factor = capacity_bound(at_one.workload, at_one)["bound"] / at_one.workload.rate
    assert bound_of_scenario(scenario)["bound"] == pytest.approx(factor)
    with pytest.raises(InputError, match="only stretches, not --arrival onoff"):
        bound_of_scenario(replace(scenario, arrival="onoff:on=10,off=20,ratio=4"))


# ---- against every schedule of tiny cases


def schedules(model: LatencyModel, budget: int, load: Workload, chosen: tuple[int, ...]) -> bool:
    """Whether some schedule serves all of `chosen` in time (mode deadline). Chunks: all that is left, or half of it."""
    times, prompt, output = load.arrival_time, load.num_prompt_tokens, load.num_output_tokens
    due = lambda i, k: times[i] + load.slo_ttft[i] + k * load.slo_tbt[i] + 1e-9  # noqa: E731
    seen: set[tuple[Any, ...]] = set()

    def options(i: int, left: int, k: int) -> Iterator[int]:
        yield 0
        if k == 0:
            yield from {left, -(-left // 2)}
        else:
            yield 1

    def go(now: float, state: tuple[tuple[int, int], ...]) -> bool:
        """`state`: per chosen request (prompt tokens left, output tokens)."""
        live = [j for j, i in enumerate(chosen) if state[j][1] < output[i]]
        if not live:
            return True
        if (round(now, 9), state) in seen or any(now > due(chosen[j], state[j][1]) for j in live):
            return False
        seen.add((round(now, 9), state))
        here = [j for j in live if times[chosen[j]] <= now]
        for taken in product(*(options(chosen[j], *state[j]) for j in here)):
            rows = [(j, c) for j, c in zip(here, taken, strict=True) if c]
            if not rows or sum(c for _, c in rows) > budget:
                continue
            phases = np.array([state[j][1] > 0 for j, _ in rows])
            contexts = np.array([prompt[chosen[j]] - state[j][0] + max(state[j][1] - 1, 0) for j, _ in rows])
            end = now + model.step_time(np.array([c for _, c in rows]), contexts, phases)
            after = list(state)
            for (j, c), decode in zip(rows, phases, strict=True):
                left, k = state[j]
                after[j] = (left, k + 1) if decode else (left - c, k + (left == c))
                if after[j][1] > k and end > due(chosen[j], k):
                    break
            else:
                if go(end, tuple(after)):
                    return True
        later = [times[chosen[j]] for j in live if times[chosen[j]] > now]
        return bool(later) and go(min(later), state)

    return go(float(times[chosen[0]]), tuple((int(prompt[i]), 0) for i in chosen))


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.3, 1.0]), st.integers(20, 200), st.integers(1, 2)), min_size=3, max_size=3
    ),
    st.sampled_from([0.02, 0.04, 0.08]), st.sampled_from([0.009, 0.012, 0.03]), st.sampled_from([1.0, 0.7]),
    st.sampled_from([MODEL, tables()]),
)  # fmt: skip
@settings(max_examples=15, deadline=None)
def test_no_schedule_of_a_tiny_case_passes_the_bound(rows, ttft, tbt, target, model):
    gaps, prompts, outputs = (np.array(column) for column in zip(*rows, strict=True))
    n, times = len(rows), np.cumsum(gaps) - gaps[0]
    if times[-1] == 0:
        return
    load = Workload(times, prompts, outputs, slo_ttft=np.full(n, ttft), slo_tbt=np.full(n, tbt))
    setup = engine(load, model, max_num_batched_tokens=128)
    found = capacity_bound(load, setup, target=target)
    if found["bound"] is None:
        return
    beyond = load.scaled_to(max(found["bound"], 1e-6) * 1.001)
    served = [c for c in combinations(range(n), n - found["may_miss"]) if schedules(model, 128, beyond, c)]
    assert not served
