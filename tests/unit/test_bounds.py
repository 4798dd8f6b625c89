"""Prices that no step undercuts, and the bound's own arithmetic, worked out by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from slacktide.cli.main import main
from slacktide.core import shape as s
from slacktide.core.latency import AffineModel, LatencyModel
from slacktide.errors import InputError
from slacktide.profiling.profiles import load_profile
from slacktide.search.bounds import Bound, bound_of_scenario, capacity_bound
from slacktide.search.demand import demand_of, most_open
from slacktide.search.scenario import Scenario, Setup, prepare
from slacktide.search.step_prices import Domain, step_points
from slacktide.sim.engine import EngineConfig
from slacktide.workload.requests import Workload

MODEL = AffineModel(alpha_p=0.004, beta_p=5e-5, alpha_d=0.008, beta_d=1e-4, alpha_mb=0.008, kappa=2e-5)
PROFILES = ["rtx-pro-6000/llama-3-8b", "h100/llama-3-8b?interference=1.3", "2x-rtx-3090/llama-3-8b", "l4/llama-3-8b"]


def requests(n: int = 120, prompt: int = 300, output: int = 20, rate: float = 5.0, **more: object) -> Workload:
    times = np.arange(n) / rate
    targets = {"slo_ttft": np.full(n, 1.0), "slo_tbt": np.full(n, 0.1)} | more
    return Workload(times, np.full(n, prompt), np.full(n, output), **targets)  # type: ignore[arg-type]


def engine(workload: Workload, model: LatencyModel = MODEL, **config: int) -> Setup:
    profile = replace(load_profile("l4/llama-3-8b"), latency=model)
    settings = {"max_num_batched_tokens": 512, "max_num_seqs": 64, "num_blocks": 2000} | config
    return Setup(Scenario("none", "none"), workload, profile, EngineConfig(**settings), model)


def random_steps(domain: Domain, latency: LatencyModel, count: int) -> np.ndarray:
    """Shapes of steps that an engine of that size could run: several chunks at any place, decodes at any context."""
    rng = np.random.default_rng(3)
    rows = []
    while len(rows) < count:
        n = int(domain.max_seqs ** rng.random()) if rng.random() < 0.7 else 0
        chunks = rng.integers(0, 4) if n else rng.integers(1, 4)
        room = domain.max_tokens - n
        if room < 3:
            continue
        tokens = np.maximum(np.exp(rng.uniform(0, math.log(room / 3), chunks)), 1).astype(np.int64)
        cached = (rng.random(chunks) < 0.5) * rng.integers(0, domain.max_context, chunks)
        contexts = np.maximum(np.exp(rng.uniform(0, math.log(domain.max_context), n)), 1).astype(np.int64)
        if contexts.sum() > domain.kv_tokens:
            continue
        phases = np.repeat([False, True], [chunks, n])
        rows.append(s.batch_shape(np.concatenate([tokens, np.ones(n, dtype=np.int64)]),
                                  np.concatenate([cached, contexts]), phases, latency.potential))  # fmt: skip
    return np.array(rows)


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("work", [(900.0, 250.0, 2.5e5), (1.0, 1e-6, 1e-6), (1e-6, 1.0, 1e-6), (1.0, 300.0, 1e-6)])
def test_no_step_costs_less_than_its_work(name, work):
    profile = load_profile(name)
    domain = Domain(2048, 256, 8000, 200_000)
    points = step_points(profile.latency, domain)
    at = points.prices(work, most_decodes=1e9, most_context=1e9, longest_prefill=math.inf, longest_decode=math.inf)
    shapes = random_steps(domain, profile.latency, 3000)
    pairs = shapes[:, s.PREFILL_WORK] - 0.5 * shapes[:, s.PREFILL_SQUARE]
    has_potential = profile.latency.potential(np.array([1.0]))[0] > 0
    attention = shapes[:, s.PREFILL_POTENTIAL] if has_potential else pairs
    value = (
        at.p * shapes[:, s.PREFILL_TOKENS] + at.w * attention + at.d * shapes[:, s.NUM_DECODES]
        + at.e * shapes[:, s.DECODE_CONTEXT]
    )  # fmt: skip
    share = value / profile.latency.step_times(shapes)
    assert share.max() <= 1
    assert share.max() > 0.3  # prices that say something, though random steps seldom meet the binding ones
    assert at.p > 0
    assert at.d + at.e > 0


def test_prices_count_only_what_requests_in_time_can_be_part_of():
    points = step_points(MODEL, Domain(512, 64, 1000, 50_000))
    work = (300.0, 20.0, 6000.0)
    free = {"most_decodes": 1e9, "most_context": 1e9, "longest_prefill": math.inf, "longest_decode": math.inf}
    one = points.prices(work, **free)
    few = points.prices(work, **(free | {"most_decodes": 2.0, "most_context": 600.0}))
    assert 20 * few.d + 6000 * few.e > 20 * one.d + 6000 * one.e  # two share a step's fixed time, not 64
    # A step with a chunk takes at least 4 ms: within 3 ms none can be, so that prefills cost whatever one likes.
    none = points.prices(work, **(free | {"longest_prefill": 0.003}))
    assert none.p == 0  # no step type: no price (such requests are dropped by their own targets)


def test_affine_prices_come_close_to_the_marginal_costs():
    """A full prefill step of 512 tokens costs 5e-5 + 0.004 / 512 a token; the price is no more, and not far less."""
    points = step_points(MODEL, Domain(512, 64, 1000, 50_000))
    free = {"most_decodes": 1e9, "most_context": 1e9, "longest_prefill": math.inf, "longest_decode": math.inf}
    at = points.prices((1.0, 1e-9, 1e-9), **free)
    best = 5e-5 + 0.004 / 512
    assert 0.88 * best < at.p <= best


def test_most_open_counts_overlaps():
    demand = demand_of(requests(n=3, rate=1.0), engine(requests(n=3)), "deadline", 0.0)
    # Each is open for 1 + 19 * 0.1 = 2.9 s, arrivals 1 s apart: three at once; twelve times as slow: one.
    assert most_open(demand, 1.0) == (3.0, 3 * 319.0)
    assert most_open(demand, 1 / 12)[0] == 1.0


def test_requests_alone_too_slow_give_zero():
    load = requests(slo_ttft=np.full(120, 0.010))  # 300 tokens take 19 ms
    found = capacity_bound(load, engine(load))
    assert found["bound"] == 0.0


def test_a_burst_bounds_below_what_is_sustained():
    """Pairs of requests at one instant, each pair's prefills 38 ms beside a target of 30 ms: no rate helps."""
    times = np.repeat(np.arange(20.0), 2)
    load = Workload(times, np.full(40, 300), np.full(40, 2), slo_ttft=np.full(40, 0.030), slo_tbt=np.full(40, 1.0))
    found = capacity_bound(load, engine(load))
    assert found["bound"] < 1e-3
    assert found["sustained"] > 20


def test_more_may_miss_at_a_lower_target():
    load = requests()
    bounds = [capacity_bound(load, engine(load), target=target)["bound"] for target in (1.0, 0.95, 0.9)]
    assert bounds[0] <= bounds[1] <= bounds[2]
    assert bounds[0] < bounds[2]


def test_shared_prefixes_cost_nothing_but_the_last_token():
    n = 6
    offsets = np.arange(n + 1) * 2
    ids = np.array([7, 8, 7, 8, 7, 9, 1, 2, 3, 4, 5, 6])
    load = replace(requests(n=n, prompt=32), hash_ids=(ids, offsets), hash_block_size=16)
    on = Setup(Scenario("none", "none"), load, engine(load).profile, EngineConfig(enable_prefix_caching=True), MODEL)
    own = demand_of(load, on, "deadline", 0.0).prefill
    assert own.tolist() == [1, 1, 16, 32, 32, 32]
    off = Setup(Scenario("none", "none"), load, engine(load).profile, EngineConfig(enable_prefix_caching=False), MODEL)
    assert demand_of(load, off, "deadline", 0.0).prefill.tolist() == [32] * n


def test_who_may_leave_or_never_fits_costs_nothing():
    load = requests(n=3, abort_time=np.array([np.inf, 9.0, np.inf]))
    assert demand_of(load, engine(load), "deadline", 0.0).prefill.tolist() == [300, 0, 300]
    assert not demand_of(load, engine(load, num_blocks=2), "deadline", 0.0).prefill.any()


def test_what_cannot_be_bounded_is_said_in_one_line():
    load = requests(slo_ttft=np.full(120, np.inf))
    with pytest.raises(InputError, match="no request has a first-token or end-to-end target"):
        capacity_bound(load, engine(load))
    falling = replace(MODEL, kappa=-1e-6)
    with pytest.raises(InputError, match="step times that never fall"):
        capacity_bound(requests(), engine(requests(), falling))
    at_once = requests().with_arrivals(np.zeros(120))
    with pytest.raises(InputError, match="no rate to bound"):
        capacity_bound(at_once, engine(at_once))
    with pytest.raises(InputError, match="mode"):
        capacity_bound(requests(), engine(requests()), mode="tpot")
    with pytest.raises(InputError, match="--arrival closed"):
        bound_of_scenario(
            Scenario("azure-conv", "h100/llama-3-8b", slo="chat", arrival="closed:concurrency=3", num_prompts=50)
        )


def test_impossible_stays_impossible_at_higher_rates():
    load = requests()
    bound = Bound(load, engine(load), "deadline", 0.99, 0.0)
    prices = bound.prices(math.inf)
    verdicts = [bound.impossible(rate, prices) for rate in np.geomspace(0.2, 50, 30)]
    assert verdicts == sorted(verdicts)
    assert verdicts[-1]
    assert not verdicts[0]


def test_the_verb(capsys, tmp_path):
    arguments = ["bound", "--trace", "azure-conv", "--num-prompts", "200", "--profile", "h100/llama-3-8b"]
    assert main([*arguments, "--slo", "ttft:1000,tbt:50", "--json", "--out", str(tmp_path)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads((tmp_path / "bound.json").read_text())
    assert 0 < record["sustained"] < 1000
    assert record["may_miss"] == 2
    assert main([*arguments, "--slo", "ttft:1000,tbt:50"]) == 0
    assert "any policy, these requests" in capsys.readouterr().out
    assert main(arguments) == 2
    assert "no request has a first-token" in capsys.readouterr().err


def test_goodput_shows_the_share_of_the_bound(capsys):
    load = [
        "--trace",
        "azure-conv",
        "--num-prompts",
        "100",
        "--profile",
        "h100/llama-3-8b",
        "--slo",
        "ttft:1000,tbt:50",
    ]
    arguments = ["goodput", *load, "--seeds", "1", "--jobs", "1", "--policy", "fcfs", "--resolution", "0.2"]
    assert main([*arguments, "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)["runs"]
    assert 0 < record["rate"] <= record["bound"]
    same = Scenario("azure-conv", "h100/llama-3-8b", slo="ttft:1000,tbt:50", num_prompts=100)
    assert record["bound"] == pytest.approx(bound_of_scenario(same)["bound"])
    assert prepare(same).workload.rate > 0
    assert main(arguments) == 0
    assert "vs bound" in capsys.readouterr().out
