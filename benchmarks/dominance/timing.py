"""Decision time of `tide` at 64, 256 and 1,000 live requests, and over a run at twice the load it can carry.

python benchmarks/dominance/timing.py [--policies LIST] [--rounds N] [--write]; for an idle machine. Prints a JSON line
per case; with --write it also stands in results/timing.jsonl.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from slacktide.core.live import (
    ADMISSION_ORDER,
    FIRST_TOKEN,
    LAST_TOKEN,
    NUM_BLOCKS,
    NUM_COMPUTED,
    NUM_OUTPUT,
    STATUS,
    LiveTable,
)
from slacktide.core.pack import as_policy
from slacktide.core.spec import parse_policies
from slacktide.core.types import RUNNING, SLO, Limits, Request, StepView
from slacktide.search.scenario import Scenario, build_policy, prepare
from slacktide.sim.engine import simulate

RESULTS = Path(__file__).parent / "results"
SCENARIO = Scenario(trace="azure-conv", profile="h100/llama-3-8b", slo="ttft:1000,tbt:50", num_prompts=1500, rate=40.0)
"""Twice what any policy carries on this profile."""


def snapshot(live: int, seed: int = 0) -> tuple[LiveTable, Limits, float]:
    """Half of the rows decode, the others wait: prompts of 20 to 3,000 tokens, targets from tight to loose."""
    rng = np.random.default_rng(seed)
    table = LiveTable()
    now = live * 1e-3 + 0.02
    for i in range(live):
        running = i < live // 2
        prompt = int(rng.integers(20, 3000))
        slo = SLO(float(rng.uniform(0.2, 2.0)) + (5.0 if running else 0.0), 0.06)
        table.append(Request(i, i * 1e-3, prompt, 400, slo))
        if running:
            values = {
                STATUS: RUNNING,
                NUM_COMPUTED: prompt,
                NUM_OUTPUT: 1,
                NUM_BLOCKS: -(-prompt // 16),
                ADMISSION_ORDER: i,
            }
            for field, value in values.items():
                table.ints[field, i] = value
            table.floats[FIRST_TOKEN, i] = table.floats[LAST_TOKEN, i] = i * 1e-3 + 0.01
    return table, Limits(8192, 2048, 16, 400_000, 500_000), now


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Median and 99th percentile in microseconds."""
    p50, p99 = np.quantile(np.array(seconds) * 1e6, (0.5, 0.99))
    return {"median_us": round(float(p50), 1), "p99_us": round(float(p99), 1), "decisions": len(seconds)}


def on_snapshot(text: str, live: int, rounds: int) -> dict[str, Any]:
    """The same decision many times over."""
    table, limits, now = snapshot(live)
    view = StepView(now, table.live, limits, prepare(SCENARIO).belief)
    policy = as_policy(parse_policies([text])[0].build())
    policy.plan(view)  # compiles
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        policy.plan(view)
        seconds.append(time.perf_counter() - began)
    return {"policy": text, "case": f"{live} live"} | quantiles(seconds)


def in_overload(text: str) -> dict[str, Any]:
    """All decisions of a run at twice the capacity."""
    setup = prepare(SCENARIO)
    policy = build_policy(parse_policies([text])[0], {})
    result = simulate(setup.workload, policy, setup.profile.latency, setup.config, belief=setup.belief)
    live = float(np.mean(result.log.num_running + result.log.num_waiting))
    return {"policy": text, "case": "overload 2x", "mean_live": round(live)} | quantiles(
        result.decision_times.tolist()[1:]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", default="tide,sliding,qoserve,greedy-dynamic")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    for text in given.policies.split(","):
        rows = [on_snapshot(text, live, given.rounds) for live in (64, 256, 1000)] + [in_overload(text)]
        for row in rows:
            print(json.dumps(row), flush=True)
            if given.write:
                RESULTS.mkdir(exist_ok=True)
                with (RESULTS / "timing.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
