"""Goodput of `tide` on a real CPU engine, paired with stock vLLM, its best token budget, sarathi-edf and sliding.

    python benchmarks/tide_engine/run.py MODEL [--rounds 3] [--seconds 60] [--minutes N] [--plan] [--report]

Needs vLLM, an idle machine, and the profile, capacities and targets that benchmarks/fidelity/real.py measured here. A
server for every arm stands all the time; each arm bisects its own rate, and the arms take turns run by run, so that
runs that are compared lie minutes apart. A round is another stretch of the trace, the same for all arms. Every run is
a line of results/runs.jsonl and is not done again; a run that others disturbed (fidelity/quiet.py) is repeated.
--report writes README.md's tables: measured goodput, ratios paired by round, and what the simulator said (no vLLM).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "fidelity"))  # behind: it has a run.py, too
from quiet import Watch  # noqa: E402
from real import MAX_MODEL_LEN, rows_of, trace  # noqa: E402
from real import RESULTS as MEASURED  # noqa: E402

from slacktide.search.goodput import bisect  # noqa: E402
from slacktide.workload.requests import Workload  # noqa: E402

RESULTS = HERE / "results"
SEATS = ["--max-num-seqs", "32"]
ENGINE = ["--enforce-eager", "--max-model-len", str(MAX_MODEL_LEN), *SEATS]
BUDGETS = (256, 128)
"""Static token budgets of stock vLLM beside its default: what an operator would try. 512 tokens already take 170 ms
here, twice the target between tokens."""
ARMS: dict[str, tuple[str, int | None]] = {
    "stock": ("", None),
    **{f"stock, {budget} tokens": ("", budget) for budget in BUDGETS},
    "sarathi-edf": ("sarathi-edf", None),
    "sliding": ("sliding", None),
    "tide": ("tide", None),
}
"""Arm -> (policy of the plug-in, "" for vLLM's own scheduler; token budget, None for vLLM's default)."""
LOADS = ("azure-conv", "long-mix")
TARGET = 0.95
"""Share in time. At 60 s a run has some hundred requests: 99 % would be one of them."""
RESOLUTION = 0.12
"""Where bisection ends: below that, one request more or less decides."""
STEP = 1.3
START = 0.6
"""First rate, in capacities."""
TRIES = 2
"""Runs at one rate until the machine stayed quiet."""
SETTLE = 12.0
"""Seconds that the last answers of a run take: for the plan alone."""
RUNS = 4
"""Runs that one search takes on average: for the plan alone."""


@dataclass(frozen=True)
class Place:
    """One search: load, round, arm."""

    load: str
    round: int
    arm: str

    @property
    def key(self) -> str:
        """Name in the results."""
        return f"{self.load}/{self.round}/{self.arm}"


def places(rounds: int) -> list[Place]:
    """All searches; those of one load and round take turns."""
    return [Place(load, r, arm) for r in range(rounds) for load in LOADS for arm in ARMS]


def workload(load: str, number: int, rate: float, seconds: float, goal: dict[str, float]) -> Workload:
    """The round's stretch of the trace at that rate: a higher rate brings the same requests, and more, faster."""
    whole = trace(load)
    first = (number * len(whole) // 7) % len(whole)  # rounds lie a seventh of the trace apart and do not meet
    rows = np.arange(first, min(first + max(round(rate * seconds), 5), len(whole)))
    work = whole.take(rows)
    work = work.with_arrivals(work.arrival_time - work.arrival_time[0]).scaled_to(rate)
    n = len(work)
    return replace(work, slo_ttft=np.full(n, goal["ttft"]), slo_tbt=np.full(n, goal["tbt"]), name=load)


def read_runs(out: Path) -> dict[str, list[dict[str, Any]]]:
    """Runs by search, in the order they were made."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows_of(out):
        found.setdefault(row["key"], []).append(row)
    return found


class Search:
    """The bisection of one place, replayed from the runs that are there."""

    def __init__(self, capacity: float, rows: list[dict[str, Any]]) -> None:
        self._path = bisect(START * capacity, 0.05 * capacity, RESOLUTION, step=STEP)
        self.rate: float | None = next(self._path)
        """Rate to run next; None when the search is over."""
        self.low, self.high = 0.0, math.inf
        self.tries = 0
        for row in rows:
            self.tell(row["attainment"], bool(row["disturbed"]))

    def tell(self, attainment: float, disturbed: bool) -> None:
        """Take a run's outcome."""
        self.tries += 1
        if self.rate is None or (disturbed and self.tries < TRIES):
            return
        self.tries = 0
        try:
            self.rate = self._path.send(attainment >= TARGET)
            if math.isinf(self.rate):  # "all at once" is no rate for a real server
                self.rate = self._path.send(False)
        except StopIteration as end:
            self.rate, self.low, self.high = None, end.value.low, end.value.high

    @property
    def goodput(self) -> float | None:
        """Middle of the bracket, requests/s; None while the search runs."""
        return None if self.rate is not None else math.sqrt(self.low * self.high) if self.low else 0.0


def measure(model: str, args: argparse.Namespace) -> None:
    """Run what is missing, load by load and round by round, arms in turn."""
    from slacktide.cli.validate import one_run, started
    from slacktide.loadgen.replay import Target

    told = json.loads((MEASURED / "load.json").read_text())
    began, given = time.monotonic(), SimpleNamespace(slo_mode="deadline", late_tolerance=0.0)
    args.out.mkdir(parents=True, exist_ok=True)
    for number in range(args.rounds):
        for load in LOADS:
            goal, capacity = told["targets"][load], told["capacity"][load]
            runs = read_runs(args.out)
            searches = {arm: Search(capacity, runs.get(Place(load, number, arm).key, [])) for arm in ARMS}
            if all(search.rate is None for search in searches.values()):
                continue
            slo = f"ttft:{goal['ttft'] * 1e3:.0f},tbt:{goal['tbt'] * 1e3:.0f}"
            with ExitStack() as stack:
                urls = {}
                for arm, (policy, budget) in ARMS.items():
                    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                    flags = [*ENGINE, *([] if budget is None else ["--max-num-batched-tokens", str(budget)])]
                    server = started([model, *flags], policy, slo if policy else None, None, folder)
                    urls[arm] = stack.enter_context(server)
                seed = 0
                while any(search.rate is not None for search in searches.values()):
                    for arm, search in searches.items():
                        if search.rate is None:
                            continue
                        if time.monotonic() - began + args.seconds + SETTLE > 60 * args.minutes:
                            print("out of time: the same command goes on here")
                            return
                        work = workload(load, number, search.rate, args.seconds, goal)
                        with Watch() as watch:
                            # Each run has prompts of its own, or a server would find them in its prefix cache.
                            summary, _ = one_run(work, Target(urls[arm]), None, seed, given)
                        seed += 1
                        row = {
                            "key": Place(load, number, arm).key, "rate": search.rate, "num_prompts": len(work),
                            "attainment": summary["attainment"], "disturbed": watch.result.disturbed(told["speed"]),
                            "p99_ttft_ms": summary["p99_ttft_ms"], "p99_itl_ms": summary["p99_itl_ms"],
                            "at": time.strftime("%Y-%m-%d %H:%M"),
                        }  # fmt: skip
                        with (args.out / "runs.jsonl").open("a") as file:
                            file.write(json.dumps(row) + "\n")
                        search.tell(row["attainment"], bool(row["disturbed"]))
                        print(
                            f"  {row['key']} at {row['rate']:.2f}: {row['attainment']:.3f} {row['disturbed']}",
                            flush=True,
                        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="directory or name of the model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="of traffic in a run (default: 60)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="for everything (default: until it is done)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    if args.report:
        from report import write_report

        write_report(args.out, args.rounds, args.seconds)
        return 0
    searches = len(places(args.rounds))
    minutes = searches * RUNS * (args.seconds + SETTLE) / 60
    print(f"{searches} searches in {args.rounds * len(LOADS)} turns: about {minutes:.0f} minutes in all")
    if args.plan:
        return 0
    if args.model is None:
        parser.error("expected a model")
    if not (MEASURED / "load.json").exists():
        parser.error("benchmarks/fidelity/real.py has not measured this machine yet: run it first")
    measure(args.model, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
