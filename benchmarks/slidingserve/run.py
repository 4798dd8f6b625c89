"""SlidingServe's evaluation again, in the simulator, with every arm tuned by the same search (tune.py).

    make bench NAME=slidingserve [ARGS="--only goodput,ladder --seeds 5"]

Resumable: every run stands in results/*.jsonl and is not run again; README.md's tables are written from these files
(`--only report` does nothing else). Seeds start at 1: seed 0 chose the parameters. Decision times: timing.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from arms import ARMS, OTHERS, OVERLOAD, WINDOWED, greedy_chunks, rungs, setting
from common import HERE, LLAMA, QWEN, Log, goodput, scenario
from datasets import DATASETS
from report import render
from tune import tune_all
from window import check_binding, check_windows

from slacktide.core.latency import LatencyModel
from slacktide.core.latency_extended import ExtendedFeatureModel
from slacktide.core.spec import parse_policies
from slacktide.metrics.slo import judge
from slacktide.search.scenario import Setup, build_policy, prepare
from slacktide.sim.engine import simulate

OTHER_DATA = ("arxiv-v1", "mixed-v1")


def cells(combinations: Iterable[tuple[str, str, str]], seeds: Iterable[int]) -> None:
    """Goodput of (policy, data, profile), seed by seed, so that an unfinished run has every cell."""
    log, combinations = Log("goodput"), list(dict.fromkeys(combinations))
    hints: dict[tuple[str, str, str], float | None] = {}
    for seed in seeds:
        for policy, data, profile in combinations:
            hint = hints.get((policy, data, profile))
            hints[policy, data, profile] = goodput(log, policy, data, profile, seed, hint)["rate"]


def tuned_cells(profiles: Iterable[str], datasets: Iterable[str]) -> list[tuple[str, str, str]]:
    """Every arm with its setting for the data and the GPU."""
    return [(setting(arm, d, p), d, p) for p in profiles for d in datasets for arm in ARMS if setting(arm, d, p)]


def outcome(setup: Setup, text: str, belief: LatencyModel | None = None) -> dict[str, Any]:
    """Attainment and what went wrong in one run of one policy."""
    (spec,) = parse_policies([text])
    policy = build_policy(spec, {})
    log = simulate(
        setup.workload, policy, setup.profile.latency, setup.config, belief=belief or setup.belief
    ).log  # fmt: skip
    verdict = judge(log)
    return {"attainment": verdict.attainment(), "violations": verdict.violations(), "steps": log.num_steps,
            "end": log.end_of_run}  # fmt: skip


def attainment(log: Log, label: str, texts: Iterable[str], data: str, profile: str, rate: float, seeds: Iterable[int],
               belief: Callable[[Setup], LatencyModel] | None = None) -> None:  # fmt: skip
    """Share of requests in time at one rate."""
    texts = list(texts)
    for seed in seeds:
        for text in texts:

            def work(text: str = text, seed: int = seed) -> dict[str, Any]:
                setup = prepare(scenario(data, profile, rate, seed))
                where = {"label": label, "policy": text, "data": data, "profile": profile, "rate": rate, "seed": seed}
                return where | outcome(setup, text, belief(setup) if belief is not None else None)

            log.get(f"{label}|{text}|{data}|{profile}|{rate:g}|{seed}", work)


def ladder(profiles: Iterable[str], seeds: Iterable[int]) -> None:
    """The ablation on mixed-v1, three GPUs: goodput of each rung, and attainment at overload."""
    seeds = list(seeds)
    for profile in profiles:
        if profile in OVERLOAD:
            texts = list(dict.fromkeys(rungs(profile).values()))
            attainment(Log("overload"), "overload", texts, "mixed-v1", profile, OVERLOAD[profile], seeds)
            cells([(text, "mixed-v1", profile) for text in texts], seeds)


def window_on_long_prompts(profiles: Iterable[str], seeds: Iterable[int]) -> None:
    """Goodput of the complete policies with greedy chunks on arxiv-v1: mixed loads' caps leave a window nothing."""
    cells([(greedy_chunks(arm, p), "arxiv-v1", p) for p in profiles for arm in WINDOWED], seeds)


def look_at_windows() -> None:
    """Is a window greedy where T_cur <= T_next, and what leaves it nothing to split?"""
    check_windows("sliding:guard=0")
    check_binding()


def transient(seeds: Iterable[int]) -> None:
    """Rates that switch every two minutes for twenty: violations over time, at the paper's 1.0 and 2.5 req/s."""
    log, low, high = Log("transient"), 1.0, 2.5
    for seed in seeds:
        for text in filter(None, [setting(arm, "mixed-v1", LLAMA) for arm in ARMS]):

            def work(text: str = text, seed: int = seed) -> dict[str, Any]:
                rng = np.random.default_rng(seed)
                times: list[float] = []
                for part in range(10):
                    rate = low if part % 2 == 0 else high
                    own = 120.0 * part + np.cumsum(rng.exponential(1 / rate, int(rate * 240) + 50))
                    times += own[own < 120.0 * (part + 1)].tolist()
                setup = prepare(scenario("mixed-v1", LLAMA, 1.0, seed))
                load = setup.workload.take(rng.integers(0, len(setup.workload), len(times)))
                load = load.with_arrivals(np.array(times))
                (spec,) = parse_policies([text])
                found = simulate(load, build_policy(spec, {}), setup.profile.latency, setup.config, belief=setup.belief)
                verdict = judge(found.log)
                bins = np.minimum((np.array(times) // 30).astype(int), 39)
                late = np.bincount(bins, weights=verdict.missed, minlength=40)
                late /= np.maximum(np.bincount(bins, minlength=40), 1)
                return {"policy": text, "seed": seed, "low": low, "high": high, "attainment": verdict.attainment(),
                        "late_by_half_minute": [round(float(x), 4) for x in late]}  # fmt: skip

            log.get(f"{text}|{seed}", work)


def curves(seeds: Iterable[int]) -> None:
    """Share of violations against the request rate."""
    for data, rates in (("mixed-v1", (1, 2, 3, 4, 5, 6)), ("arxiv-v1", (0.4, 0.7, 1.0, 1.3, 1.6, 2.0))):
        for rate in rates:
            texts = filter(None, [setting(arm, data, LLAMA) for arm in ARMS])
            attainment(Log("curves"), "curve", texts, data, LLAMA, rate, seeds)


def sensitivity(seeds: Iterable[int]) -> None:
    """Windows 1 to 4; predictor bias and noise; alpha and beta; at rates beyond every arm's goodput."""
    log = Log("sensitivity")
    for data, rate in (("mixed-v1", 4.0), ("arxiv-v1", 1.3)):
        own, other, plain = (setting(a, data, LLAMA) for a in ("sliding", "qoserve + guard", "greedy-dynamic + guard"))

        def vary(label: str, texts: Iterable[str], belief: Callable[[Setup], LatencyModel] | None = None,
                 data: str = data, rate: float = rate) -> None:  # fmt: skip
            attainment(log, label, texts, data, LLAMA, rate, seeds, belief)

        vary("window", [f"{own},window={w},chunker={c}" for w in (1, 2, 3, 4) for c in ("clamped", "dual")])
        vary("alpha", [with_value(own, "alpha", a) for a in (0.2, 0.5, 0.8, 1.0, 1.5)])
        vary("alpha", [with_value(other, "alpha", a) for a in (0.001, 0.003, 0.008, 0.03)])
        vary("beta", [f"{own},beta={b}" for b in (1.0, 1.5, 2, 4, 1e9)])
        texts = (plain, other, own)
        for bias in (-0.2, -0.1, 0.0, 0.1, 0.2):
            vary(f"bias {bias:+.0%}", texts, lambda s, b=bias: scaled(s.belief, b, 0.0))
        for noise in (0.05, 0.1, 0.2):
            vary(f"noise {noise:.0%}", texts, lambda s, n=noise: scaled(s.belief, 0.0, n))


def with_value(text: str, name: str, value: float) -> str:
    """The policy with that parameter set, whatever it had."""
    policy, _, given = text.partition(":")
    kept = [part for part in given.split(",") if not part.startswith(f"{name}=")]
    return f"{policy}:{','.join([*kept, f'{name}={value:g}'])}"


def scaled(belief: Any, bias: float, noise: float) -> LatencyModel:
    """The belief, all times (1 + bias) times as long, each weight off by a lognormal factor of that spread."""
    assert isinstance(belief, ExtendedFeatureModel)
    factors = np.exp(noise * np.random.default_rng(7).standard_normal(belief.weights.shape))
    return replace(belief, weights=belief.weights * (1 + bias) * factors)


def main() -> None:
    """Run what is asked for, then write the README's tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="tune,goodput,ladder,long,transient,window,curves,sensitivity")
    parser.add_argument("--seeds", type=int, default=5, help="held-out seeds of goodput, ladder and transient")
    parser.add_argument("--profiles", default=",".join((LLAMA, QWEN, *OTHERS)), help="of tune, goodput and ladder")
    given = parser.parse_args()
    profiles = given.profiles.split(",")
    seeds, few = range(1, given.seeds + 1), range(1, min(given.seeds, 2) + 1)
    paper, others = [p for p in profiles if p not in OTHERS], [p for p in profiles if p in OTHERS]

    def all_tuned() -> None:
        for profile in profiles:
            if profile != QWEN:
                tune_all(profile)

    work: dict[str, Callable[[], None]] = {
        "tune": all_tuned,
        "goodput": lambda: cells(tuned_cells(paper, DATASETS) + tuned_cells(others, OTHER_DATA), seeds),
        "ladder": lambda: ladder(profiles, seeds),
        "long": lambda: window_on_long_prompts(profiles, seeds),
        "transient": lambda: transient(seeds),
        "window": look_at_windows,
        "curves": lambda: curves(few),
        "sensitivity": lambda: sensitivity(few),
        "report": lambda: None,
    }
    for name in given.only.split(","):
        work[name]()
    render(HERE)


if __name__ == "__main__":
    main()
