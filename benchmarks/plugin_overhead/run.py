"""How much time does the plug-in add to `schedule()`? Headless: vLLM's real scheduler, no model.

Run: `make bench NAME=plugin_overhead`; it goes on in `.venv-vllm` (`make vllm-env`) when vLLM is not installed here.
Requests come and go so that about N run: prompts of 64 to 512 tokens, outputs of 100 to 300. Our scheduler and vLLM's
own take turns in one process, each with the same requests: what we add before and after vLLM's part of a step, what
whole calls of both take, what we add at the end of a step.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "conformance"))
HERE = Path(__file__).parent

MEDIAN_AT, TARGET_MEDIAN_MS = 256, 0.2
P99_AT, TARGET_P99_MS = 1000, 1.0
"""The bars: median at 256 running requests, 99th percentile at 1,000."""

WARM = 60
"""Steps until everybody runs and caches are warm."""

TURN = 50
"""Steps of one scheduler before the other's turn: short against drifts of the machine's speed."""

MARK = "<!-- table: written by run.py -->"

COLUMNS = {
    "added_median_ms": "added median",
    "added_p99_ms": "p99",
    "added_cpu_p99_ms": "CPU p99",
    "call_median_ms": "call median",
    "stock_median_ms": "vLLM median",
    "stock_p99_ms": "vLLM p99",
    "share_of_stock": "share",
    "end_of_step_median_ms": "end of step",
}


class Runner:
    """One scheduler under load, its calls timed. `policy` None: vLLM's own."""

    def __init__(self, policy: str | None, running: int, args: argparse.Namespace, directory: Path) -> None:
        import headless as h

        from slacktide.vllm import Scheduler, SyncScheduler

        is_async = not args.sync
        options = h.Options(
            max_num_batched_tokens=8192, max_num_seqs=running, num_blocks=running * 64, max_model_len=4096,
            is_async=is_async, prefix_caching=not args.no_prefix_caching,
            slacktide={"policy": policy or "vllm-v1", "slo": "ttft:2000,tbt:100"},
        )  # fmt: skip
        ours = Scheduler if is_async else SyncScheduler
        self.scheduler = h.build(directory, options, ours if policy else None)
        self.host = self.scheduler.slacktide if policy else None
        self.spans: dict[str, list[tuple[float, float]]] = {}
        for owner, names in ((self.host, ("before", "after", "done")), (self.scheduler, ("schedule",))):
            for name in names if owner is not None else ():
                self._time(owner, name)
        self._engine = h.Engine(self.scheduler, is_async=is_async)
        self._make: Callable[..., Any] = h.request
        self._running, self._hashed = running, not args.no_prefix_caching
        self._rng = np.random.default_rng(0)
        self._number = 0

    def _time(self, owner: Any, name: str) -> None:
        """Note seconds and CPU seconds of each call of a method."""
        method, spans = getattr(owner, name), self.spans.setdefault(name, [])

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            cpu, began = time.thread_time(), time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                spans.append((time.perf_counter() - began, time.thread_time() - cpu))

        setattr(owner, name, wrapper)

    def run(self, steps: int) -> None:
        """So many steps, with new requests for those that ended."""
        target = len(self.spans["schedule"]) + steps
        while len(self.spans["schedule"]) < target:
            while len(self.scheduler.requests) < self._running:
                prompt, output = int(self._rng.integers(64, 513)), int(self._rng.integers(100, 301))
                self._engine.add(self._make(self._number, prompt, output, arrival=time.time(), hashed=self._hashed))
                self._number += 1
            self._engine.step()
            self._engine.facts.clear()

    def milliseconds(self, name: str) -> Any:
        """float64[steps, 2]: time and CPU time of each call."""
        return np.array(self.spans[name][-self.steps :]) * 1e3

    @property
    def steps(self) -> int:
        """Steps that were measured."""
        return len(self.spans["schedule"]) - WARM

    def close(self) -> None:
        """Stop threads, take files away."""
        self.scheduler.shutdown()


def measure(policy: str, running: int, args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Times of steps with about `running` requests, milliseconds."""
    ours, stock = (Runner(name, running, args, directory) for name in (policy, None))
    both = [ours, stock]
    for one in both:
        one.run(WARM)
    gc.collect()
    gc.freeze()  # as vLLM's engine core does after its start: what lives through a run is not searched for garbage
    try:
        for turn in range(-(-args.steps // TURN)):
            for one in both if turn % 2 == 0 else both[::-1]:
                one.run(min(TURN, args.steps - turn * TURN))
    finally:
        gc.unfreeze()
    host: Any = ours.host
    added = ours.milliseconds("before") + ours.milliseconds("after")
    call, alone, done = ours.milliseconds("schedule"), stock.milliseconds("schedule"), ours.milliseconds("done")
    result: dict[str, Any] = {"policy": policy, "running": running, "async": not args.sync, "steps": len(added)}
    for name, values in (
        ("added", added), ("decide", ours.milliseconds("before")), ("call", call), ("stock", alone),
        ("end_of_step", done),
    ):  # fmt: skip
        for column, label in enumerate(("", "cpu_")):
            result[f"{name}_{label}median_ms"] = float(np.median(values[:, column]))
            result[f"{name}_{label}p99_ms"] = float(np.percentile(values[:, column], 99))
    result["share_of_stock"] = result["added_median_ms"] / result["stock_median_ms"]
    reasons = ("error", "mirror", "slow", "stalled")
    result["fallbacks"] = {why: int(host.metrics.get("fallbacks", why)) for why in reasons}
    for one in both:
        one.close()
    broken = result["fallbacks"]["error"] + result["fallbacks"]["mirror"]
    if broken:
        raise SystemExit(f"{policy}: {broken} steps of {len(added)} failed; nothing was measured")
    return result


def verdict(rows: list[dict[str, Any]], policy: str) -> tuple[str, str]:
    """Whether a policy meets the two bars: yes, no, or - where that number was not measured."""
    said = []
    for running, key, bar in (
        (MEDIAN_AT, "added_median_ms", TARGET_MEDIAN_MS),
        (P99_AT, "added_p99_ms", TARGET_P99_MS),
    ):
        found = [row[key] for row in rows if row["policy"] == policy and row["running"] == running]
        said.append(("yes" if found[0] <= bar else "no") if found else "-")
    return said[0], said[1]


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, a line for each policy: added time (and its share of vLLM's) at each size, and the bars."""
    sizes = sorted({row["running"] for row in rows})
    lines = [
        "| policy | " + " | ".join(f"{size}: median (share), p99" for size in sizes) + " | median bar | p99 bar |",
        "|---|" + "---|" * (len(sizes) + 2),
    ]
    for policy in dict.fromkeys(row["policy"] for row in rows):
        cells = [
            f"{row['added_median_ms']:.3f} ({row['share_of_stock']:.0%}), {row['added_p99_ms']:.2f}"
            for size in sizes
            for row in rows
            if row["policy"] == policy and row["running"] == size
        ]
        lines.append(f"| {policy} | {' | '.join(cells)} | {' | '.join(verdict(rows, policy))} |")
    stock = [np.median([row["stock_p99_ms"] for row in rows if row["running"] == size]) for size in sizes]
    own = ", ".join(f"{value:.2f} ms at {size}" for size, value in zip(sizes, stock, strict=True))
    lines += ["", f"vLLM's own 99th percentile in the same runs: {own}."]
    return "\n".join(lines)


def write(rows: list[dict[str, Any]], args: argparse.Namespace, complete: bool) -> None:
    """Results as JSON; after a complete run also the README's table."""
    import vllm

    args.out.mkdir(parents=True, exist_ok=True)
    about = {
        "vllm": vllm.__version__,
        "python": platform.python_version(),
        "machine": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "prefix_caching": not args.no_prefix_caching,
        "bars": {"median_ms": TARGET_MEDIAN_MS, "median_at": MEDIAN_AT, "p99_ms": TARGET_P99_MS, "p99_at": P99_AT},
        "met": {p: dict(zip(("median", "p99"), verdict(rows, p), strict=True)) for p in {r["policy"] for r in rows}},
    }
    (args.out / "overhead.json").write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    readme = HERE / "README.md"
    if complete and MARK in readme.read_text():
        head = readme.read_text().partition(MARK)[0]
        readme.write_text(f"{head}{MARK}\n\nMilliseconds added to a step, {len(rows)} runs.\n\n{table(rows)}\n")


def find_vllm() -> None:
    """Start anew with the environment that has vLLM, if this one has none."""
    if importlib.util.find_spec("vllm") is not None:
        return
    other = ROOT / ".venv-vllm" / "bin" / "python"
    if not other.exists() or Path(sys.prefix) == other.parents[1]:
        raise SystemExit("vLLM is not installed here and there is no .venv-vllm: make vllm-env")
    os.execv(other, [str(other), *sys.argv])


def main() -> None:
    find_vllm()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded; do not look
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", action="append", help="may be repeated; others keep their rows (default: all)")
    parser.add_argument("--running", type=int, nargs="+", default=[32, 256, 1000])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--sync", action="store_true", help="without async scheduling")
    parser.add_argument("--no-prefix-caching", action="store_true", help="vLLM's default is with it")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    import logging

    logging.disable(logging.WARNING)
    from slacktide.core.policy import names
    from slacktide.errors import InputError
    from slacktide.vllm.settings import Settings, policy_spec

    chosen = args.policy or []
    for name in [] if chosen else names():
        try:
            policy_spec(Settings(policy=name))
        except InputError:
            continue  # an oracle, or not steerable
        chosen.append(name)
    rows = []
    print("milliseconds a step")
    print(f"{'policy':<18}{'running':>8}" + "".join(f"{name:>13}" for name in COLUMNS.values()))
    with tempfile.TemporaryDirectory() as directory:
        for policy in chosen:
            for running in args.running:
                row = measure(policy, running, args, Path(directory))
                rows.append(row)
                print(f"{policy:<18}{running:>8}" + "".join(f"{row[key]:>13.3f}" for key in COLUMNS), flush=True)
            print(f"{policy}: median bar {verdict(rows, policy)[0]}, p99 bar {verdict(rows, policy)[1]}", flush=True)
    default = parser.parse_args([])
    complete = all(
        getattr(args, name) == getattr(default, name) for name in vars(args) if name not in ("out", "policy")
    )
    path = args.out / "overhead.json"
    if complete and args.policy and path.exists():  # the others' rows stay
        others = [row for row in json.loads(path.read_text())["rows"] if row["policy"] not in chosen]
        rows = sorted(rows + others, key=lambda row: (row["policy"], row["running"]))
    write(rows, args, complete)


if __name__ == "__main__":
    main()
