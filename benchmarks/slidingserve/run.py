"""SlidingServe's evaluation again, in the simulator: goodput, ablation, transient overload, windows, errors, time.

make bench NAME=slidingserve [ARGS="--only goodput,ladder --seeds 3"]; resumable: every run stands in results/*.jsonl
and is not run again; the tables of README.md are written from these files. Reduced grids are the default (see README).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from datasets import DATASETS, slo_of, write
from report import render

from slacktide.core.latency import LatencyModel
from slacktide.core.latency_extended import ExtendedFeatureModel
from slacktide.core.spec import parse_policies
from slacktide.metrics.slo import judge
from slacktide.search.goodput import find_goodput
from slacktide.search.pool import Store
from slacktide.search.scenario import Scenario, Setup, build_policy, prepare
from slacktide.sim.engine import simulate

HERE = Path(__file__).parent
RESULTS = HERE / "results"
LLAMA, QWEN = "2x-rtx-3090/llama-3-8b", "2x-rtx-3090/qwen2.5-7b"
OTHERS = ("a100/llama-3-8b", "h100/llama-3-8b", "4x-h100/llama-3-70b")
ARMS = (
    "sarathi-edf", "greedy-dynamic", "qoserve", "sola", "sliding:reading=paper", "sliding:guard=0", "sliding",
    "greedy-dynamic:guard=0.35", "qoserve:guard=0.35",
)  # fmt: skip
LADDER = (
    "sarathi-edf", "greedy-dynamic", "sliding:order=edf,constructor=off,guard=0", "sliding:constructor=off,guard=0",
    "sliding:chunker=greedy,constructor=off,guard=0", "sliding:guard=0", "sliding", "sliding:chunker=dual",
    "sliding:relegation=true", "sliding:chunker=greedy", "sliding:reading=paper,chunker=frozen",
)  # fmt: skip


def scenario(data: str, profile: str, rate: float, seed: int = 0, arrival: str = "poisson") -> Scenario:
    trace = str(write(data).relative_to(Path.cwd())) if write(data).is_relative_to(Path.cwd()) else str(write(data))
    return Scenario(
        trace=trace, profile=profile, slo=slo_of(data), rate=rate, arrival=arrival, seed=seed, oversized="drop"
    )


class Log:
    """A file of JSON lines by key; what is there is not run again."""

    def __init__(self, name: str) -> None:
        self.path = RESULTS / f"{name}.jsonl"
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        self.rows = {row["key"]: row for row in map(json.loads, lines)}

    def get(self, key: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if key not in self.rows:
            self.rows[key] = {"key": key} | work()
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(self.rows[key]) + "\n")
            print(key, flush=True)
        return self.rows[key]


def run(setup: Setup, text: str, belief: LatencyModel | None = None) -> dict[str, Any]:
    """Attainment and what went wrong in one run of one policy."""
    (spec,) = parse_policies([text])
    result = simulate(
        setup.workload, build_policy(spec, {}), setup.profile.latency, setup.config, belief=belief or setup.belief
    )
    verdict = judge(result.log)
    times = result.decision_times * 1e6
    return {
        "attainment": verdict.attainment(), "violations": verdict.violations(), "steps": result.log.num_steps,
        "end": result.log.end_of_run, "median_us": float(np.median(times)), "p99_us": float(np.quantile(times, 0.99)),
    }  # fmt: skip


def averaged(log: Log, label: str, texts: Iterable[str], data: str, profile: str, rate: float, seeds: int,
             belief: Callable[[Setup], LatencyModel] | None = None) -> None:  # fmt: skip
    for text in texts:
        for seed in range(seeds):

            def work(text: str = text, seed: int = seed) -> dict[str, Any]:
                setup = prepare(scenario(data, profile, rate, seed))
                own = belief(setup) if belief is not None else None
                return {
                    "label": label,
                    "policy": text,
                    "data": data,
                    "profile": profile,
                    "rate": rate,
                    "seed": seed,
                } | run(setup, text, own)

            log.get(f"{label}|{text}|{data}|{profile}|{rate:g}|{seed}", work)


@lru_cache(maxsize=1)
def searches() -> Store:
    """Every run of every search; open once, for it locks its file."""
    return Store(RESULTS / "searches.jsonl")


def goodput(profiles: Iterable[str], datasets: Iterable[str], arms: Iterable[str], seeds: int, name: str) -> None:
    """Highest rate with at least 99 % in time, per policy."""
    log, store = Log(name), searches()
    for profile in profiles:
        for data in datasets:
            for text in arms:

                def work(text: str = text, data: str = data, profile: str = profile) -> dict[str, Any]:
                    (found,) = find_goodput(
                        scenario(data, profile, 2.0), parse_policies([text]), seeds=seeds, resolution=0.05, store=store
                    )
                    keep = ("rate", "rate_low", "rate_high")
                    return {"policy": text, "data": data, "profile": profile, "seeds": seeds} | {
                        k: found.get(k) for k in keep
                    }

                log.get(f"{text}|{data}|{profile}|{seeds}", work)


def ladder(seeds: int) -> None:
    """The ablation on mixed-v1, Qwen: goodput of each rung, and attainment at 4 requests/s."""
    goodput([QWEN], ["mixed-v1"], LADDER, seeds, "ladder")
    averaged(Log("overload"), "overload", LADDER, "mixed-v1", QWEN, 4.0, seeds)


def transient(seeds: int) -> None:
    """Rates that switch every two minutes for twenty: violations over time, at the paper's 1.0 and 2.5 req/s."""
    log, low, high = Log("transient"), 1.0, 2.5
    for text in ARMS:
        for seed in range(seeds):

            def work(text: str = text, seed: int = seed) -> dict[str, Any]:
                rng = np.random.default_rng(seed)
                times: list[float] = []
                for part in range(10):
                    rate = low if part % 2 == 0 else high
                    gaps = rng.exponential(1 / rate, int(rate * 240) + 50)
                    own = 120.0 * part + np.cumsum(gaps)
                    times += own[own < 120.0 * (part + 1)].tolist()
                setup = prepare(scenario("mixed-v1", LLAMA, 1.0))
                rows = rng.integers(0, len(setup.workload), len(times))
                load = setup.workload.take(rows).with_arrivals(np.array(times))
                (spec,) = parse_policies([text])
                found = simulate(load, build_policy(spec, {}), setup.profile.latency, setup.config, belief=setup.belief)
                verdict = judge(found.log)
                bins = np.minimum((np.array(times) // 30).astype(int), 39)
                late = np.bincount(bins, weights=verdict.missed, minlength=40) / np.maximum(
                    np.bincount(bins, minlength=40), 1
                )
                return {"policy": text, "seed": seed, "low": low, "high": high, "attainment": verdict.attainment(),
                        "late_by_half_minute": [round(float(x), 4) for x in late]}  # fmt: skip

            log.get(f"{text}|{seed}", work)


def curves(seeds: int) -> None:
    """Share of violations against the request rate."""
    for data, rates in (("mixed-v1", (1, 2, 3, 4, 5, 6)), ("arxiv-v1", (0.4, 0.7, 1.0, 1.3, 1.6, 2.0))):
        for rate in rates:
            averaged(Log("curves"), "curve", ARMS, data, LLAMA, rate, seeds)


def windows_and_errors(seeds: int) -> None:
    """Windows 1 to 4; predictor bias and noise; alpha and beta, at rates beyond greedy's goodput."""
    log = Log("sensitivity")
    points = (("mixed-v1", 4.0), ("arxiv-v1", 1.3))
    for data, rate in points:
        texts = [f"sliding:window={w},chunker={c}" for w in (1, 2, 3, 4) for c in ("clamped", "dual")]
        averaged(log, "window", texts, data, LLAMA, rate, seeds)
        averaged(
            log,
            "alpha",
            [f"sliding:alpha={a}" for a in (0.2, 0.5, 0.8, 1.0, 1.5)]
            + [f"qoserve:guard=0.35,alpha={a}" for a in (0.001, 0.003, 0.008, 0.03)],
            data,
            LLAMA,
            rate,
            seeds,
        )
        averaged(log, "beta", [f"sliding:beta={b}" for b in (1.0, 1.5, 2, 4, 1e9)], data, LLAMA, rate, seeds)
        arms = ("greedy-dynamic:guard=0.35", "qoserve:guard=0.35", "sliding")
        for bias in (-0.2, -0.1, 0.0, 0.1, 0.2):
            averaged(
                log, f"bias {bias:+.0%}", arms, data, LLAMA, rate, seeds, lambda s, b=bias: scaled(s.belief, b, 0.0)
            )
        for noise in (0.05, 0.1, 0.2):
            averaged(
                log, f"noise {noise:.0%}", arms, data, LLAMA, rate, seeds, lambda s, n=noise: scaled(s.belief, 0.0, n)
            )


def scaled(belief: Any, bias: float, noise: float) -> LatencyModel:
    """The belief, all times (1 + bias) times as long, each weight off by a lognormal factor of that spread."""
    assert isinstance(belief, ExtendedFeatureModel)
    factors = np.exp(noise * np.random.default_rng(7).standard_normal(belief.weights.shape))
    return replace(belief, weights=belief.weights * (1 + bias) * factors)


def timing() -> None:
    """Decision time at 50, 200 and 1000 live requests, sustained overload, per part (rough: a shared machine)."""
    from slacktide.core.live import (
        ADMISSION_ORDER,
        FIRST_TOKEN,
        NUM_BLOCKS,
        NUM_COMPUTED,
        NUM_OUTPUT,
        STATUS,
        LiveTable,
    )
    from slacktide.core.types import RUNNING, SLO, Limits, Request, StepView

    log = Log("timing")
    setup = prepare(scenario("mixed-v1", LLAMA, 4.0))
    parts = {
        "decodes and order (greedy, no constructor)": "sliding:chunker=greedy,constructor=off,guard=0",
        "+ window": "sliding:constructor=off,guard=0",
        "+ constructor": "sliding:guard=0",
        "all": "sliding",
        "dual": "sliding:chunker=dual",
        "paper": "sliding:reading=paper",
        "qoserve": "qoserve",
        "greedy-dynamic": "greedy-dynamic",
    }
    for live in (50, 200, 1000):
        rng = np.random.default_rng(live)
        table = LiveTable()
        for i in range(live):
            running = i < live // 2
            prompt = int(rng.integers(20, 3000))
            slo = SLO(float(rng.uniform(0.05, 2.0)) + (5.0 if running else 0.0), 0.06)
            table.append(Request(i, i * 1e-3, prompt, 400, slo))
            if running:
                for field, value in ((STATUS, RUNNING), (NUM_COMPUTED, prompt), (NUM_OUTPUT, 1),
                                     (NUM_BLOCKS, -(-prompt // 16)), (ADMISSION_ORDER, i)):  # fmt: skip
                    table.ints[field, i] = value
                table.floats[FIRST_TOKEN, i] = i * 1e-3 + 0.01
        limits = Limits(2048, 2048, 16, 400_000, 500_000)
        view = StepView(live * 1e-3 + 0.02, table.live, limits, setup.belief)
        for part, text in parts.items():

            def work(text: str = text, part: str = part, live: int = live, view: Any = view) -> dict[str, Any]:
                (spec,) = parse_policies([text])
                policy = spec.build()
                paths: dict[str, int] = {}
                samples = []
                for _ in range(300):
                    began = time.perf_counter()
                    plan = policy.plan(view)
                    samples.append(time.perf_counter() - began)
                    path = (plan.why or {}).get("path", "decode")
                    paths[path] = paths.get(path, 0) + 1
                return {"part": part, "policy": text, "live": live, "paths": paths,
                        "median_us": 1e6 * statistics.median(samples), "p90_us": 1e6 * float(np.quantile(samples, 0.9)),
                        "step_ms": 1e3 * float(plan.predicted_step_time or 0.0)}  # fmt: skip

            log.get(f"{part}|{live}", work)
    averaged(log, "overload", ("sliding", "sliding:guard=0", "qoserve"), "mixed-v1", LLAMA, 12.0, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="goodput,ladder,transient,sensitivity,timing,qwen,others,curves")
    parser.add_argument("--seeds", type=int, default=2)
    given = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    work = {
        "goodput": lambda: goodput([LLAMA], DATASETS, ARMS, given.seeds, "goodput"),
        "ladder": lambda: ladder(given.seeds),
        "transient": lambda: transient(given.seeds),
        "sensitivity": lambda: windows_and_errors(given.seeds),
        "timing": timing,
        "qwen": lambda: goodput([QWEN], DATASETS, ARMS, given.seeds, "goodput"),
        "others": lambda: goodput(OTHERS, ("arxiv-v1", "mixed-v1"), ARMS, given.seeds, "goodput"),
        "curves": lambda: curves(given.seeds),
    }
    for name in given.only.split(","):
        if name != "report":
            work[name]()
    render(HERE)


if __name__ == "__main__":
    main()
