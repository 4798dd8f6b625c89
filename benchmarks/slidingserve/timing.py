"""Decision time per part at 50, 200 and 1,000 live requests and at sustained overload. For an idle machine.

    python benchmarks/slidingserve/timing.py            results/timing.jsonl anew, and the README's table

The states are those of simulated runs: mixed-v1 at overload, its decisions grouped by how many requests are live. Each
decision is timed once, as in service; parts by wrapping the functions that do them, which adds about 0.5 us each. Two
clocks: the wall's, and the thread's own processor time, which a busy machine does not stretch by whole time slices.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
from common import HERE, LLAMA, RESULTS, scenario
from report import render

from slacktide.core import bounded, chunker
from slacktide.core.policies import greedy_dynamic, qoserve, sliding
from slacktide.core.policy import observe
from slacktide.core.spec import parse_policies
from slacktide.core.types import Plan, StepResult, StepView
from slacktide.search.scenario import build_policy, prepare
from slacktide.sim.engine import simulate

BARS = {"median at 200 live, constructor at work": 0.3e-3, "share of the step time": 0.05}
"""Seconds; share: what the policies are held to."""
GROUPS = {50: (40, 60), 200: (160, 240), 1000: (800, 1200)}
"""Name -> live requests from and to."""
POLICIES = ("sliding", "sliding:guard=0", "sliding:chunker=dual", "sliding:reading=paper", "qoserve", "greedy-dynamic")
RATE, REQUESTS = 12.0, 2400
"""Requests/s, four times what any policy can serve of mixed-v1 on LLAMA's profile, and how many: the queue grows
through all groups."""
SUSTAINED_RATE = 6.0
"""Requests/s, twice the goodput: hopeless requests pile up while new ones come."""

PARTS: dict[str, list[tuple[Any, str]]] = {
    "survey (deadlines)": [(m, "begin") for m in (sliding, qoserve, greedy_dynamic)],
    "bounds and order (MLPS)": [(sliding.Sliding, "_look")],
    "packing": [(bounded.Step, "packed")],
    "predictor, one step": [(bounded, "load_time")],
    "predictor, budget": [(bounded, "prefill_within")],
    "predictor and chunker, one call": [(sliding.Sliding, "_fit")],
    "chunker, asked again": [(chunker, "split")],
    "constructor": [(sliding, "construct"), (sliding, "construct_paper")],
}
"""Part -> (module or class, function). The constructor's own questions to the predictor count in both."""


class Timed:
    """A policy whose decisions are timed, part by part."""

    def __init__(self, policy: Any, spent: dict[str, list[float]]) -> None:
        self.policy, self.spent = policy, spent
        self.rows: list[dict[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        if name == "decode_runs":
            return False  # every decision is asked for
        return getattr(self.policy, name)

    def plan(self, view: StepView) -> Plan:
        """One decision, timed."""
        for part in self.spent.values():
            part[0] = part[1] = 0.0
        cpu, wall = time.thread_time(), time.perf_counter()
        plan: Plan = self.policy.plan(view)
        wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
        self.rows.append(
            {"live": int(view.live.index.size), "path": (plan.why or {}).get("path", "decode"), "wall": wall,
             "cpu": cpu, "step": plan.predicted_step_time or 0.0,
             "parts": {name: (part[0], part[1]) for name, part in self.spent.items() if part[1]}}
        )  # fmt: skip
        return plan

    def observe(self, result: StepResult) -> None:
        """Hand on."""
        observe(self.policy, result)


@contextmanager
def wrapped(spent: dict[str, list[float]]) -> Iterator[None]:
    """The functions of PARTS with a watch each: spent[part] = [seconds, calls]."""

    def watch(function: Callable[..., Any], part: list[float]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                part[0] += time.perf_counter() - began
                part[1] += 1

        return timed

    with ExitStack() as stack:
        for name, places in PARTS.items():
            part = spent.setdefault(name, [0.0, 0.0])
            for owner, attribute in places:
                stack.enter_context(
                    mock.patch.object(owner, attribute, watch(getattr(owner, attribute), part))
                )  # fmt: skip
        yield


def decisions(text: str, rate: float, requests: int) -> list[dict[str, Any]]:
    """Every decision of one run, its parts timed; the run ends with the last arrival."""
    setup = prepare(replace(scenario("mixed-v1", LLAMA, rate, 1), num_prompts=requests))
    (spec,) = parse_policies([text])
    spent: dict[str, list[float]] = {}
    rows: list[dict[str, Any]] = []
    gc.disable()  # the records kept here would make the collector stop decisions that owe it nothing
    for load in (setup.workload.take(np.arange(60)), setup.workload):  # a short run first: it loads compiled code
        gc.collect()
        with wrapped(spent):
            policy = Timed(build_policy(spec, {}), spent)
            end = float(load.arrival_time[-1])
            simulate(
                load, policy, setup.profile.latency, setup.config, belief=setup.belief,
                stop=lambda log, end=end: log.end_of_run >= end,
            )  # fmt: skip
            rows = policy.rows
    gc.enable()
    return rows


def quantiles(values: list[float]) -> dict[str, float]:
    """Median and 99th percentile, microseconds."""
    median, p99 = np.quantile(values, (0.5, 0.99)) * 1e6
    return {"median_us": round(float(median), 1), "p99_us": round(float(p99), 1)}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What one group of decisions took."""
    parts: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for name, value in row["parts"].items():
            parts.setdefault(name, []).append(value)
    shares = [row["cpu"] / row["step"] for row in rows if row["step"] > 0]
    return {
        "decisions": len(rows),
        "paths": {path: sum(row["path"] == path for row in rows) for path in sorted({row["path"] for row in rows})},
        "wall": quantiles([row["wall"] for row in rows]),
        "cpu": quantiles([row["cpu"] for row in rows]),
        "worst_us": round(1e6 * max(row["cpu"] for row in rows), 1),
        "step_ms": round(1e3 * float(np.median([row["step"] for row in rows])), 2),
        "share_of_step": float(np.sum([row["cpu"] for row in rows]) / max(np.sum([row["step"] for row in rows]), 1e-9)),
        "share_p99": float(np.quantile(shares, 0.99)) if shares else None,
        "parts": {
            name: quantiles([v[0] for v in values]) | {"calls": round(float(np.mean([v[1] for v in values])), 1),
                                                       "in": round(len(values) / len(rows), 3)}
            for name, values in parts.items()
        },
    }  # fmt: skip


def main() -> None:
    """Time all policies and write the file anew; times of two machines never mix."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="fewer for a trial")
    given = parser.parse_args()
    lines = []
    for text in POLICIES:
        rows = decisions(text, RATE, given.requests)
        for group, (low, high) in GROUPS.items():
            chosen = [row for row in rows if low <= row["live"] <= high and row["path"] != "decode"]
            if chosen:
                lines.append({"policy": text, "group": str(group)} | summary(chosen))
            built = [row for row in chosen if row["path"] == "constructor"]
            if built:
                lines.append({"policy": text, "group": f"{group}, constructor"} | summary(built))
        rows = decisions(text, SUSTAINED_RATE, given.requests)
        half = [row for row in rows[len(rows) // 2 :] if row["path"] != "decode"]
        lines.append({"policy": text, "group": "sustained overload"} | summary(half))
        print(text, flush=True)
    # More threads waiting for a processor than there are processors: wall times tell of the neighbours.
    busy = os.getloadavg()[0] / (os.cpu_count() or 1)
    text = "".join(json.dumps(line | {"machine_load": round(busy, 2)}) + "\n" for line in lines)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "timing.jsonl").write_text(text, encoding="utf-8")
    render(HERE)


if __name__ == "__main__":
    main()
