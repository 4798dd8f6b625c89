"""How much time does the plug-in add to `schedule()`? Headless: vLLM's real scheduler, no model.

Run with an interpreter that has vLLM: `.venv-vllm/bin/python benchmarks/plugin_overhead/run.py` (see `make vllm-env`).
Requests come and go so that about N run: prompts of 64 to 512 tokens, outputs of 100 to 300. Measured per step, in the
same run: vLLM's own schedule(), what we add before and after it, and what we add at the end of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "conformance"))
HERE = Path(__file__).parent

TARGET_MEDIAN_MS, TARGET_P99_MS = 0.2, 1.0
"""The bars: median at 256 running requests, 99th percentile at 1,000."""

COLUMNS = {
    "added_median_ms": "added median",
    "added_p99_ms": "p99",
    "stock_median_ms": "vLLM median",
    "share_of_stock": "share",
    "end_of_step_median_ms": "end of step",
}


def measure(policy: str, running: int, steps: int, is_async: bool, directory: Path) -> dict[str, Any]:
    """Times of `steps` steps with about `running` requests, milliseconds."""
    import headless as h

    from slacktide.vllm import Scheduler, SyncScheduler

    options = h.Options(
        max_num_batched_tokens=8192, max_num_seqs=running, num_blocks=running * 64, max_model_len=4096,
        is_async=is_async,
        slacktide={"policy": policy, "slo": "ttft:2000,tbt:100", "max_decision_ms": 60_000},
    )  # fmt: skip
    scheduler = h.build(directory, options, Scheduler if is_async else SyncScheduler)
    host = scheduler.slacktide
    spans: dict[str, list[float]] = {"before": [], "after": [], "restore": [], "done": [], "schedule": []}
    timed(host, "before", spans["before"])
    timed(host, "after", spans["after"])
    timed(host, "done", spans["done"])
    timed(scheduler, "schedule", spans["schedule"])
    engine = h.Engine(scheduler, is_async=is_async)
    rng = np.random.default_rng(0)
    number = 0
    warm = 60  # steps until everybody runs and caches are warm
    while len(spans["schedule"]) < warm + steps:
        while len(scheduler.requests) < running:
            prompt, output = int(rng.integers(64, 513)), int(rng.integers(100, 301))
            engine.add(h.request(number, prompt, output, arrival=time.time()))
            number += 1
        engine.step()
    before, after, whole, done = (np.array(spans[n][warm:]) * 1e3 for n in ("before", "after", "schedule", "done"))
    m = min(map(len, (before, after, whole)))
    added, stock = before[:m] + after[:m], whole[:m] - before[:m] - after[:m]
    assert host.metrics.get("fallbacks", "error") == host.metrics.get("fallbacks", "mirror") == 0
    result = {"policy": policy, "running": running, "async": is_async, "steps": m}
    for name, values in (("added", added), ("decide", before), ("stock", stock), ("end_of_step", done)):
        result |= {f"{name}_median_ms": float(np.median(values)), f"{name}_p99_ms": float(np.percentile(values, 99))}
    return result | {"share_of_stock": float(np.median(added) / np.median(stock))}


def timed(owner: Any, name: str, spans: list[float]) -> None:
    """Note how long each call of a method takes."""
    method = getattr(owner, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            spans.append(time.perf_counter() - began)

    setattr(owner, name, wrapper)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", action="append", help="a policy; may be repeated (default: all that serve)")
    parser.add_argument("--running", type=int, nargs="+", default=[32, 256, 1000])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--sync", action="store_true", help="without async scheduling")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    import logging

    logging.disable(logging.WARNING)
    from slacktide.core.policy import get, names
    from slacktide.errors import InputError
    from slacktide.vllm.settings import Settings, policy_spec

    chosen = args.policy or []
    for name in [] if chosen else names():
        try:
            policy_spec(Settings(policy=name))
        except InputError:
            continue  # an oracle, or not steerable
        assert get(name)
        chosen.append(name)
    rows = []
    print("milliseconds a step")
    print(f"{'policy':<24}{'running':>8}" + "".join(f"{name:>13}" for name in COLUMNS.values()))
    with tempfile.TemporaryDirectory() as directory:
        for policy in chosen:
            for running in args.running:
                row = measure(policy, running, args.steps, not args.sync, Path(directory))
                rows.append(row)
                print(f"{policy:<24}{running:>8}" + "".join(f"{row[key]:>13.3f}" for key in COLUMNS), flush=True)
    import vllm

    args.out.mkdir(parents=True, exist_ok=True)
    about = {
        "vllm": vllm.__version__,
        "python": platform.python_version(),
        "machine": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "targets": [TARGET_MEDIAN_MS, TARGET_P99_MS],
    }
    (args.out / "overhead.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
