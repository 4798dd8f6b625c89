"""Profile a real CPU engine, fit, and validate the simulator on traffic the fit never saw.

    python benchmarks/fidelity/real.py MODEL [--seconds 90] [--repeats 3] [--minutes N] [--plan] [--report]

Needs vLLM (any backend; made for its CPU one and a model of some hundred million weights) and an idle machine. The run
is cut into pieces, the most telling first; what is done stands in results/real/ (profile.json, load.json, runs.jsonl: a
line for each trace, load, policy, repeat, try) and is not done again. --minutes ends the run before a piece that would
not fit; --plan prints the pieces and their times; --report makes the tables of what is there (no vLLM needed).
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from quiet import Watch

from slacktide.cli.validate import one_run, started
from slacktide.core.spec import parse_policies
from slacktide.loadgen.record import run_log
from slacktide.loadgen.replay import Limits, Target, replay
from slacktide.metrics.summary import summarize
from slacktide.profiling.profile_file import read_profile
from slacktide.profiling.profiles import Profile
from slacktide.profiling.validate import BARS, FIGURES
from slacktide.workload.load import load_workload
from slacktide.workload.requests import ClosedLoop, Workload

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "real"
LIMITS = ["--max-num-seqs", "32", "--max-num-batched-tokens", "512"]
ENGINE = ["--enforce-eager", "--max-model-len", "2048", *LIMITS]
"""A CPU decodes 32 sequences in some 60 ms and reads 512 prompt tokens in some 170 ms: the proportions of a GPU."""
MAX_MODEL_LEN = 2048
POLICIES, FEW = ("vllm-v1", "sliding", "sarathi-edf", "eb"), ("vllm-v1", "sliding")
LENGTHS = {"azure-conv": 0.25, "azure-code": 0.15, "long-mix": 0.25}
"""Factor on the traces' lengths, so that a CPU sees tens of requests a minute."""
LONG_EVERY, LONG_SCALE, LONGEST = 6, 0.4, 1700
"""long-mix: azure-conv with every 6th prompt replaced by an arXiv paper's, times 0.4, at most 1,700 tokens."""
TTFT_FACTOR, TBT_FACTOR = 5.0, 3.0
"""Targets in times of what a request alone gets, by the fitted profile: prefill of the 90th percentile of prompts, and
a decode step of 8 sequences. The fitted profile decides alone, so that nobody can tune them."""
START, SETTLE = 45.0, 12.0
"""Seconds that a server needs to start on a CPU, and that the last answers of a run take: for the plan alone."""
CAPACITY_SECONDS, CAPACITY_USERS, RAMP = 40.0, 48, 0.4
"""Of a closed loop that keeps more users waiting than there are seats; its first two fifths do not count."""
TRIES = 3
"""Runs of a piece until the machine stayed quiet (quiet.py, blind to the outcome); after so many the last counts."""


@dataclass(frozen=True)
class Piece:
    """One real run."""

    trace: str
    load: float
    policy: str
    repeat: int

    @property
    def key(self) -> str:
        """Name in the results."""
        return f"{self.trace} {self.load:g} {self.policy} #{self.repeat}"


def pieces(repeats: int) -> list[Piece]:
    """All runs, the most telling first: policies at 70 %, other traffic, heavier, lighter."""
    groups = [("azure-conv", 0.7, POLICIES), ("azure-code", 0.7, FEW), ("long-mix", 0.7, FEW)]
    groups += [("azure-conv", 0.9, POLICIES), ("azure-conv", 0.5, POLICIES)]
    # Repeats of one policy follow each other on one server; another start is 45 s.
    return [Piece(*where, policy, r) for *where, policies in groups for policy in policies for r in range(repeats)]


def trace(name: str) -> Workload:
    """The scaled trace, without rate and targets; only requests that fit the model."""
    scale = LENGTHS[name]
    work = load_workload("azure-conv" if name == "long-mix" else name, max_tokens="exact")
    prompt = np.maximum(np.rint(work.num_prompt_tokens * scale), 4).astype(np.int64)
    output = np.maximum(np.rint(work.num_output_tokens * scale), 2).astype(np.int64)
    if name == "long-mix":
        papers = load_workload("arxiv", rate=1.0, num_prompts=len(work) // LONG_EVERY, max_tokens="exact")
        long = np.clip(np.rint(papers.num_prompt_tokens * LONG_SCALE), 4, LONGEST).astype(np.int64)
        rows = np.arange(len(long)) * LONG_EVERY
        prompt[rows] = long
    work = replace(work, num_prompt_tokens=prompt, num_output_tokens=output, max_tokens=output, hash_ids=None)
    return work.take(prompt + output < MAX_MODEL_LEN)


def piece_workload(name: str, rate: float, seconds: float, ttft: float, tbt: float) -> Workload:
    """The first `seconds` of the trace at `rate`, with targets: the same requests for every policy and repeat."""
    work = trace(name).first(max(round(rate * seconds), 5))
    work = work.with_arrivals(work.arrival_time - work.arrival_time[0]).scaled_to(rate)
    n = len(work)
    return replace(work, slo_ttft=np.full(n, ttft), slo_tbt=np.full(n, tbt), name=name)


# ---- profile and capacity --------------------------------------------------------------------------------------------


def slacktide(*arguments: str) -> None:
    """Run a verb in a process of its own. Raises RuntimeError with its last line when it fails."""
    done = subprocess.run([sys.executable, "-m", "slacktide", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"slacktide {arguments[0]}: {(done.stderr or done.stdout).strip().splitlines()[-1]}")


def make_profile(model: str, minutes: float, out: Path) -> None:
    """Designed steps in process, then designed loads on a server (the host's share, the front end); both fitted."""
    designed, traffic = out / "design", out / "traffic"
    with Watch() as watch:
        slacktide("profile", model, *ENGINE, "--minutes", f"{minutes:g}", "--out", str(designed), "--quiet")
    (out / "quiet.json").write_text(json.dumps(asdict(watch.result), indent=1) + "\n")
    with tempfile.TemporaryDirectory() as folder, started([model, *ENGINE], "vllm-v1", None, None, Path(folder)) as url:
        slacktide(
            "profile", "--url", url, "--step-log", f"{folder}/steps.jsonl", "--minutes", f"{minutes / 2:g}", "--out",
            str(traffic), *LIMITS, "--quiet",
        )  # fmt: skip
    files = [str(designed / "measurements.jsonl"), str(traffic / "traffic.jsonl")]
    slacktide("fit", *files, "--out", str(out), "--name", "cpu/smollm2-135m")
    for report in out.rglob("profile-report.json"):
        report.unlink()  # names this machine's folders; the errors stand in the profile


def measure_load(model: str, out: Path, seconds: float) -> dict[str, Any]:
    """Capacity of the engine on each trace (vllm-v1, a closed loop that keeps it full), and the targets."""
    profile = read_profile(out / "profile.json")
    found: dict[str, Any] = {"capacity": {}, "targets": {}}
    found["speed"] = json.loads((out / "quiet.json").read_text())["speed"]
    with tempfile.TemporaryDirectory() as folder, started([model, *ENGINE], "vllm-v1", None, None, Path(folder)) as url:
        for seed, name in enumerate(LENGTHS):
            work = trace(name).first(2000)
            crowd = replace(work, closed=ClosedLoop(CAPACITY_USERS)).with_arrivals(np.zeros(len(work)))
            result = replay(crowd, Target(url), Limits(max_duration=seconds), num_warmups=1, seed=seed)
            log = run_log(crowd, result)
            warm = RAMP * log.sim_duration  # until then the first requests fill the batch
            ended = (log.end_time[log.finished] > warm).sum()
            found["capacity"][name] = float(ended / (log.sim_duration - warm))
            found["targets"][name] = targets(profile, work)
    (out / "load.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


def targets(profile: Profile, work: Workload) -> dict[str, float]:
    """SLO of a trace, seconds."""
    prompt = int(np.quantile(work.num_prompt_tokens, 0.9))
    prefill, done = 0.0, 0
    while done < prompt:
        chunk = min(profile.max_num_batched_tokens, prompt - done)
        prefill += profile.latency.step_time(np.array([chunk]), np.array([done]), np.array([False]))
        done += chunk
    context = int(work.num_prompt_tokens.mean())
    decode = profile.latency.step_time(np.ones(8, np.int64), np.full(8, context), np.ones(8, np.bool_))
    return {"ttft": round(TTFT_FACTOR * prefill, 3), "tbt": round(TBT_FACTOR * decode, 3)}


# ---- runs ------------------------------------------------------------------------------------------------------------


def rows_of(out: Path) -> Iterator[dict[str, Any]]:
    """Lines of a benchmark's runs.jsonl; one that was cut off is left out."""
    path = out / "runs.jsonl"
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def read_runs(out: Path) -> dict[str, dict[str, Any]]:
    """Runs by key: of several tries the undisturbed one, else the last."""
    return {row["key"]: row for row in rows_of(out)}


def settled(row: dict[str, Any] | None) -> bool:
    """Nothing is left to do for this piece."""
    return row is not None and (not row["disturbed"] or row["attempt"] >= TRIES)


def same_server(todo: list[Piece]) -> Iterator[list[Piece]]:
    """Consecutive pieces with the same trace, load and policy."""
    group: list[Piece] = []
    for piece in todo:
        if group and (piece.trace, piece.load, piece.policy) != (group[0].trace, group[0].load, group[0].policy):
            yield group
            group = []
        group.append(piece)
    if group:
        yield group


def cost(group: list[Piece], seconds: float) -> float:
    """Seconds that a group will take."""
    return START + len(group) * (seconds + SETTLE)


def measure(model: str, group: list[Piece], load: dict[str, Any], seconds: float, out: Path) -> None:
    """One server, its repeats; a line for each as soon as it is there."""
    first = group[0]
    rate = first.load * load["capacity"][first.trace]
    goal = load["targets"][first.trace]
    work = piece_workload(first.trace, rate, seconds, goal["ttft"], goal["tbt"])
    slo = f"ttft:{goal['ttft'] * 1e3:.0f},tbt:{goal['tbt'] * 1e3:.0f}"
    given = SimpleNamespace(slo_mode="deadline", late_tolerance=0.0)
    with (
        tempfile.TemporaryDirectory() as folder,
        started([model, *ENGINE], first.policy, slo, None, Path(folder)) as url,
    ):
        for piece in group:
            row = read_runs(out).get(piece.key)
            while not settled(row):
                attempt = 1 + (row["attempt"] if row else 0)
                seed = TRIES * piece.repeat + attempt  # prompts that this server has not seen
                with Watch() as watch:
                    summary, _ = one_run(work, Target(url), Path(folder) / "steps.jsonl", seed, given)
                around = watch.result
                kept = steps_file(out, piece.key, attempt)
                kept.parent.mkdir(exist_ok=True)
                kept.write_bytes(gzip.compress((Path(folder) / "steps.jsonl").read_bytes()))
                row = {
                    "key": piece.key, **asdict(piece), "rate": rate, "seconds": seconds, "num_prompts": len(work),
                    **goal, "attempt": attempt, "disturbed": around.disturbed(load["speed"]), "quiet": asdict(around),
                    "at": time.strftime("%Y-%m-%d %H:%M"), "summary": {name: summary.get(name) for name in FIGURES},
                }  # fmt: skip
                with (out / "runs.jsonl").open("a") as file:
                    file.write(json.dumps(row) + "\n")
                told = row["disturbed"] and f" (does not count: {row['disturbed']})"
                print(
                    f"  {piece.key}: attainment {summary['attainment']:.3f}, {summary['num_steps']} steps{told}",
                    flush=True,
                )


def steps_file(out: Path, key: str, attempt: int) -> Path:
    """The step log of a run's server up to its end, for a closer look (not committed)."""
    return out / "steps" / f"{key.replace(' ', '_').replace('#', '')}_{attempt}.jsonl.gz"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="directory or name of the model")
    parser.add_argument("--seconds", type=float, default=90.0, help="of traffic in a run (default: 90)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=math.inf, help="for everything (default: until it is done)")
    parser.add_argument("--profile-minutes", type=float, default=5.0)
    parser.add_argument("--capacity-seconds", type=float, default=CAPACITY_SECONDS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    if args.report:
        from real_report import write_report

        return write_report(args.out, args.repeats)
    done = read_runs(args.out)
    groups = list(same_server([piece for piece in pieces(args.repeats) if not settled(done.get(piece.key))]))
    ahead = 0.0 if (args.out / "profile.json").exists() else 60 * 1.5 * args.profile_minutes + 3 * START
    ahead += 0.0 if (args.out / "load.json").exists() else START + 3 * (args.capacity_seconds + SETTLE)
    whole = ahead + sum(cost(group, args.seconds) for group in groups)
    runs = sum(map(len, groups))
    print(f"{runs} runs on {len(groups)} servers to do: about {whole / 60:.0f} minutes, {ahead / 60:.0f} to profile")
    if args.plan:
        at = ahead
        for group in groups:
            at += cost(group, args.seconds)
            print(f"  until minute {at / 60:.0f}: {', '.join(piece.key for piece in group)}")
        return 0
    if args.model is None:
        parser.error("expected a model")
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    if not (args.out / "profile.json").exists():
        make_profile(args.model, args.profile_minutes, args.out)
    path = args.out / "load.json"
    load = json.loads(path.read_text()) if path.exists() else measure_load(args.model, args.out, args.capacity_seconds)
    print(f"capacity: {load['capacity']}, targets: {load['targets']}", flush=True)
    for group in groups:
        if time.monotonic() - began + cost(group, args.seconds) > 60 * args.minutes:
            print("out of time: the same command goes on here")
            break
        measure(args.model, group, load, args.seconds, args.out)
    return 0


def simulated_twin(row: dict[str, Any], profile: Profile) -> dict[str, Any]:
    """The summary that the simulator gives for a run's requests."""
    from slacktide.search.truth import steps_outside, twin

    work = piece_workload(row["trace"], row["rate"], row["seconds"], row["ttft"], row["tbt"])
    log = twin(work, profile, parse_policies([row["policy"]])[0])
    return summarize(log) | {"steps_outside": steps_outside(profile, log)}


__all__ = ["BARS", "Piece", "pieces", "read_runs", "simulated_twin"]

if __name__ == "__main__":
    sys.exit(main())
