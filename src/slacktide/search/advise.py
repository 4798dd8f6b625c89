"""Exclusive or mixed batching for a GPU, a model and a load: closed forms, checked by simulation.

Step costs are lines: through the profile's step times around each concurrency, or fitted to a user's step log. The
closed forms of `core.exclusive` then tell theta, k, slots and the concurrency where the modes cross. What each mode
delivers (throughput, TTFT, TBT, attainment) is simulated. How sure the closed forms are: with a step log by a bootstrap
over its steps; with a profile by how far they are from the simulation, twice that (at least 1 point) either way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from slacktide.core.exclusive import (
    Costs,
    Load,
    crossover,
    exclusive_lead,
    exclusive_throughput,
    mixed_throughput,
    optimal_threshold,
    slots_to_free,
)
from slacktide.core.exclusive_hazard import costs_of, fit_costs
from slacktide.core.exclusive_memory import mean_age, mean_residual_age, memory_safe_slots
from slacktide.core.latency import AffineModel, LatencyModel
from slacktide.core.pack import as_policy
from slacktide.core.spec import parse_policies
from slacktide.core.types import FloatArray
from slacktide.metrics.log import RunLog
from slacktide.metrics.summary import summarize
from slacktide.search.scenario import Scenario, Setup, prepare
from slacktide.search.truth import profile_facts
from slacktide.sim.engine import simulate

MODES = {"mixed": "vllm-v1", "exclusive": "eb-adaptive:mixed_below=0"}
"""The policy that stands for each mode."""
RESAMPLES = 100
"""Bootstrap samples: the 95 % interval of a quantity then moves by some tenths of its width between seeds."""
BLOCK = 50
"""Steps of a bootstrap block: neighbours are alike, so single steps would look too certain."""
NEAR_TIE = 0.01
"""Below this difference of throughput, or of attainment, the modes are called equal and mixed is advised: it needs
nothing but stock vLLM."""
STOCK_BUDGETS = (2048, 4096, 8192, 16384)
KEYS = (
    "request_throughput", "total_token_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_itl_ms",
    "attainment", "num_preemptions", "mean_running",
)  # fmt: skip


CostsAt = Callable[[float], Costs]
"""Step costs around a number of running requests."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Measured steps: float64[m] prompt tokens, decodes, seconds."""

    prompt: FloatArray
    decodes: FloatArray
    seconds: FloatArray
    source: str

    def take(self, rows: Any) -> Steps:
        """Some of the steps."""
        return Steps(self.prompt[rows], self.decodes[rows], self.seconds[rows], self.source)


def steps_of(log: RunLog) -> Steps:
    """The steps of a run."""
    prompt = log.num_prefill_tokens.astype(np.float64)
    return Steps(prompt, log.num_decodes.astype(np.float64), np.asarray(log.duration, dtype=np.float64), "a run")


def advise(
    scenario: Scenario, *, steps: Steps | None = None, on_done: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """The whole advice as plain values (fields: see the CLI's documentation). Raises InputError.

    `steps`: a step log of the user's engine; its fitted costs then replace the profile's step times everywhere.
    """
    tick = on_done or (lambda _: None)
    setup = prepare(scenario)
    load = Load(float(setup.workload.num_prompt_tokens.mean()), float(setup.workload.num_output_tokens.mean()))
    budget = setup.config.max_num_batched_tokens
    held = _held(setup, load)
    profile_model = setup.profile.latency

    def from_profile(n: float) -> Costs:
        return costs_of(profile_model, load, min(n, held), budget)

    costs_at: CostsAt = from_profile
    taken: set[str] = set()
    if steps is not None:
        limit = min(scenario.max_concurrency or setup.config.max_num_seqs, setup.config.max_num_seqs)
        fitted, taken = fit_costs(steps.prompt, steps.decodes, steps.seconds, from_profile(limit))
        model = _affine(fitted, steps.source)
        setup = replace(setup, profile=replace(setup.profile, latency=model), belief=model)

        def measured(_: float) -> Costs:
            return fitted

        costs_at = measured

    runs = {}
    for mode, text in MODES.items():
        runs[mode] = _run(setup, text)
        tick(1)
    concurrency = _concurrency(scenario, setup, runs["mixed"][1])
    at = min(concurrency, held)
    costs = costs_at(at)
    result = _theory(setup, costs, load, concurrency)
    rates = [summary["request_throughput"] for summary, _ in runs.values()]
    result |= _certainty(costs_at, load, at, budget, rates[1] / rates[0] - 1, steps, scenario.seed)
    table = steps or _joined([steps_of(log) for _, log in runs.values()])
    result["fit_error"] = _fit_error(table, costs)
    outcome = {mode: {key: summary.get(key) for key in KEYS} for mode, (summary, _) in runs.items()}
    by = "attainment" if scenario.slo and (scenario.max_concurrency or scenario.rate) else "throughput"
    recommendation, decided_by = _choose(outcome, by)
    return {
        "recommendation": recommendation,
        "decided_by": decided_by,
        **result,
        "load": {"prompt": load.prompt, "output": load.output, "requests": len(setup.workload)},
        **profile_facts(setup.profile),
        "trace": setup.workload.name,
        "simulated": outcome,
        "costs": asdict(costs),
        "costs_source": f"{setup.profile.name}, around {at:.0f} requests" if steps is None else steps.source,
        "costs_not_measured": sorted(taken),
        "stock_vllm": _stock(scenario, setup, by, tick),
        "curves": _curves(setup, costs_at, load, concurrency),
        "notes": list(setup.workload.notes),
    }


STOCK_RUNS = len(STOCK_BUDGETS) * 2
"""Most runs of the search for stock settings, for progress bars; MODES come on top."""


def _affine(costs: Costs, source: str) -> AffineModel:
    return AffineModel(**asdict(costs), sources={"label": "fitted", "latency": source})


def _joined(parts: list[Steps]) -> Steps:
    columns = [np.concatenate([getattr(p, name) for p in parts]) for name in ("prompt", "decodes", "seconds")]
    return Steps(columns[0], columns[1], columns[2], parts[0].source)


def _run(setup: Setup, text: str) -> tuple[dict[str, Any], RunLog]:
    (spec,) = parse_policies([text])
    model: LatencyModel = setup.profile.latency
    scenario = setup.scenario
    log = simulate(
        setup.workload, as_policy(spec.build()), model, setup.config, belief=setup.belief,
        max_concurrency=scenario.max_concurrency,
    ).log  # fmt: skip
    return summarize(log, mode=scenario.slo_mode, tolerated_late_share=scenario.late_tolerance), log


def _held(setup: Setup, load: Load) -> float:
    """Requests that the KV cache holds on average, each half through its output."""
    return setup.config.num_blocks * setup.config.block_size / (load.prompt + load.output / 2)


def _concurrency(scenario: Scenario, setup: Setup, log: RunLog) -> int:
    """Requests in the system: what was asked for, or the mean over the busy time of the mixed run."""
    if scenario.max_concurrency is not None:
        return min(scenario.max_concurrency, len(setup.workload))
    waiting = np.average(log.num_running + log.num_waiting, weights=log.duration)
    return max(round(float(waiting)), 1)


def _theory(setup: Setup, costs: Costs, load: Load, concurrency: int) -> dict[str, Any]:
    """theta, k, slots and the crossover from the closed forms."""
    config = setup.config
    theta = optimal_threshold(costs, load)
    output = setup.workload.num_output_tokens
    safe = memory_safe_slots(
        float(config.num_blocks * config.block_size),
        load,
        theta,
        prompt_variance=float(np.var(setup.workload.num_prompt_tokens)),
        age=mean_residual_age(output) * mean_age(theta, 1.0) if theta > 0 else None,
    )
    slots = min(concurrency, safe, config.max_num_seqs)
    return {
        "concurrency": concurrency,
        "theta0": theta,
        "k": slots_to_free(theta, slots, budget=config.max_num_batched_tokens, mean_prompt=load.prompt),
        "n_safe": safe,
        "slots": slots,
        "token_budget": config.max_num_batched_tokens,
    }


def _cross(costs_at: CostsAt, load: Load, budget: int, shift: float = 0.0) -> int | None:
    """The concurrency from which exclusive wins (lead + shift > 0); 0: always; None: not up to MOST."""
    n = np.unique(np.round(np.geomspace(2, MOST, 120))).astype(np.int64)
    wins = np.array([_lead(costs_at, load, float(each), budget) + shift > 0 for each in n])
    if wins.all():
        return 0
    if not wins[-1]:
        return None
    last = int(np.flatnonzero(~wins)[-1])
    low, high = int(n[last]), int(n[last + 1])
    while high - low > 1:
        middle = (low + high) // 2
        if _lead(costs_at, load, middle, budget) + shift > 0:
            high = middle
        else:
            low = middle
    return high


MOST = 8192
"""Requests up to which a crossover is looked for."""


def _lead(costs_at: CostsAt, load: Load, n: float, budget: int) -> float:
    n = max(n, 2.0)
    return float(exclusive_lead(n, costs_at(n), load, budget=budget))


def _certainty(
    costs_at: CostsAt, load: Load, n: float, budget: int, simulated: float, steps: Steps | None, seed: int
) -> dict[str, Any]:
    """Lead of exclusive at n and the crossover, with 95 % intervals, and the chance that exclusive is better."""
    lead = _lead(costs_at, load, n, budget)
    if steps is None:
        error = max(abs(lead - simulated), 0.01)
        low, high = lead - 2 * error, lead + 2 * error
        crossings = [_cross(costs_at, load, budget, shift) for shift in (2 * error, -2 * error)]
        chance = NormalDist().cdf(lead / error)
    else:
        fallback = costs_at(n)
        rng = np.random.default_rng(seed)
        length = min(BLOCK, steps.seconds.size)
        leads, found = [], []
        for _ in range(RESAMPLES):
            starts = rng.integers(0, steps.seconds.size - length + 1, max(steps.seconds.size // length, 1))
            sample = steps.take((starts[:, None] + np.arange(length)).ravel())
            costs, _ = fit_costs(sample.prompt, sample.decodes, sample.seconds, fallback)
            leads.append(float(exclusive_lead(max(n, 2.0), costs, load, budget=budget)))
            found.append(crossover(costs, load, budget=budget, most=MOST))
        low, high = (float(x) for x in np.percentile(leads, (2.5, 97.5)))
        ends = np.sort(found)[[int(0.025 * RESAMPLES), int(0.975 * RESAMPLES) - 1]]
        crossings = [None if math.isinf(x) else int(x) for x in ends]
        chance = float(np.mean(np.array(leads) > 0))
    return {
        "n_cross": _cross(costs_at, load, budget),
        "n_cross_interval": crossings,
        "lead": lead,
        "lead_interval": [low, high],
        "lead_simulated": simulated,
        "chance_exclusive": chance,
    }


def _fit_error(steps: Steps, costs: Costs) -> float:
    """Median relative error of the affine costs on the steps."""
    model = _affine(costs, "")
    from slacktide.core import shape as s

    shapes = np.zeros((steps.seconds.size, s.SHAPE_SIZE))
    shapes[:, s.NUM_TOKENS] = steps.prompt + steps.decodes
    shapes[:, s.PREFILL_TOKENS], shapes[:, s.NUM_DECODES] = steps.prompt, steps.decodes
    return float(np.median(np.abs(model.reference(shapes) / steps.seconds - 1)))


def _choose(outcome: dict[str, dict[str, Any]], by: str) -> tuple[str, str]:
    """The better mode, and by what; attainment first where it decides, throughput otherwise and where it is equal."""
    mixed, exclusive = outcome["mixed"], outcome["exclusive"]
    if by == "attainment":
        gain = (exclusive["attainment"] or 0.0) - (mixed["attainment"] or 0.0)
        if abs(gain) > NEAR_TIE:
            return "exclusive" if gain > 0 else "mixed", by
    gain = exclusive["request_throughput"] / mixed["request_throughput"] - 1
    return "exclusive" if gain > NEAR_TIE else "mixed", "throughput"


def _stock(scenario: Scenario, setup: Setup, by: str, tick: Callable[[int], None]) -> dict[str, Any]:
    """The best stock settings among STOCK_BUDGETS and two numbers of seats, with what they give."""
    held = int(_held(setup, Load(float(setup.workload.num_prompt_tokens.mean()),
                                 float(setup.workload.num_output_tokens.mean()))))  # fmt: skip
    most = setup.config.max_num_seqs
    best: dict[str, Any] | None = None
    for budget in STOCK_BUDGETS:
        for seats in sorted({max(min(held, most), 1), most}):
            config = replace(setup.config, max_num_batched_tokens=budget, max_num_seqs=seats)
            summary, _ = _run(replace(setup, config=config), MODES["mixed"])
            tick(1)
            rank = round(summary.get("attainment") or 0.0, 3) if by == "attainment" else 0.0
            score = (rank, summary["request_throughput"])
            if best is None or score > best["score"]:
                best = {"score": score, "max_num_batched_tokens": budget, "max_num_seqs": seats}
                best |= {key: summary.get(key) for key in KEYS}
    assert best is not None
    best.pop("score")
    flags = f"--max-num-batched-tokens {best['max_num_batched_tokens']} --max-num-seqs {best['max_num_seqs']}"
    if scenario.engine.get("watermark"):
        flags += f" --watermark {scenario.engine['watermark']:g}"
    return {"command": f"vllm serve MODEL {flags}", **best}


def _curves(setup: Setup, costs_at: CostsAt, load: Load, concurrency: int) -> dict[str, list[float]]:
    """Throughput over theta at the concurrency, and of both modes over concurrency (closed forms)."""
    budget = setup.config.max_num_batched_tokens
    held = _held(setup, load)
    at = max(min(concurrency, held), 2.0)
    theta = np.geomspace(1 / max(at, 4.0), 0.95, 60)
    counts = np.unique(np.round(np.geomspace(4, max(2 * concurrency, 1024), 40)))
    both: dict[str, list[float]] = {"exclusive": [], "mixed": []}
    for n in np.minimum(counts, held).tolist():
        costs = costs_at(n)
        mixed = float(mixed_throughput(n, costs, load, budget=budget))
        both["mixed"].append(mixed)
        both["exclusive"].append(mixed * (1 + _lead(costs_at, load, n, budget)))
    costs = costs_at(at)
    return {
        "theta": theta.tolist(),
        "exclusive_over_theta": exclusive_throughput(theta, at, costs, load, budget=budget).tolist(),
        "mixed_at_concurrency": [float(mixed_throughput(at, costs, load, budget=budget))],
        "concurrency": counts.tolist(),
        **both,
    }
