"""How fast is the simulator? Steps per second, whole traces, memory, and beside sched-sim 0.2.1 on the same requests.

make bench NAME=speed [ARGS="--repeat 3"]; writes results/speed.json and the tables of README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from slacktide.core import policy as policies
from slacktide.core.spec import parse_policies
from slacktide.profiling.profiles import load_profile
from slacktide.search.scenario import Scenario, prepare, run_policy
from slacktide.sim.engine import EngineConfig, simulate
from slacktide.workload.requests import ClosedLoop, Workload

HERE = Path(__file__).parent
RIVAL = "sched-sim==0.2.1"
PROFILE = "h100/llama-3-8b"
AZURE_RATE = 14.0  # requests/s: near what PROFILE can carry, so queues form and batches are large


def fixed_live(live: int, requests: int, seed: int = 0) -> Workload:
    """A closed loop keeps `live` requests in the system; prompts 1..600 and outputs 1..400 tokens, uniform."""
    rng = np.random.default_rng(seed)
    prompt, output = rng.integers(1, 601, requests), rng.integers(1, 401, requests)
    return Workload(np.zeros(requests), prompt, output, closed=ClosedLoop(live))


def vllm_v1() -> Any:
    return parse_policies(["vllm-v1"])[0].build()


def steps_per_second(live: int, requests: int, repeat: int) -> dict[str, Any]:
    """vllm-v1 on the tables truth, with and without the compiled stretches of plain decoding."""
    latency, load = load_profile(PROFILE).latency, fixed_live(live, requests)
    result: dict[str, Any] = {"live": live, "requests": requests}
    for caching in (False, True):
        config = EngineConfig(max_num_seqs=256, num_blocks=30_000, enable_prefix_caching=caching)
        for forward in (True, False):
            simulate(fixed_live(live, 100), vllm_v1(), latency, config, fast_forward=forward)  # compile
            rates = []
            for _ in range(repeat):
                began = time.perf_counter()
                log = simulate(load, vllm_v1(), latency, config, fast_forward=forward).log
                rates.append(log.num_steps / (time.perf_counter() - began))
            name = f"{'with' if caching else 'without'}_prefix_caching_{'fast_forward' if forward else 'step_by_step'}"
            result[name] = statistics.median(rates)
            result["mean_live"] = float(log.num_running.mean())
    return result


def azure_conv() -> list[dict[str, Any]]:
    """All 16,495 requests of azure-conv under every policy."""
    found = []
    for name in policies.names():
        spec = parse_policies([name])[0]
        setup = prepare(Scenario(trace="azure-conv", profile=PROFILE, slo="ttft:1000,tbt:50", rate=AZURE_RATE))
        record, log = run_policy(setup, spec)
        found.append({
            "policy": name, "requests": len(setup.workload), "steps": log.num_steps, "seconds": log.wall_time,
            "steps_per_second": log.num_steps / (log.wall_time or 1.0),
            "median_decision_us": record["summary"].get("p50_decision_us"),
        })  # fmt: skip
    return found


def million(requests: int) -> dict[str, Any]:
    """Peak memory of a process that simulates a million requests (512 + 128 tokens each, 40 requests/s)."""
    code = (
        "import json, resource, sys, time\n"
        "from slacktide.core.spec import parse_policies\n"
        "from slacktide.search.scenario import Scenario, prepare, run_policy\n"
        f"s = Scenario(trace='synthetic:prompt=512,output=128', num_prompts={requests}, profile={PROFILE!r},"
        " rate=40.0, arrival='poisson', slo='ttft:1000,tbt:50')\n"
        "record, log = run_policy(prepare(s), parse_policies(['vllm-v1'])[0])\n"
        "peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20\n"
        "json.dump({'requests': log.n, 'steps': log.num_steps, 'tokens': int(log.token_offsets[-1]),"
        " 'simulation_s': log.wall_time, 'attainment': record['summary']['attainment'], 'peak_gib': peak},"
        " sys.stdout)\n"
    )
    return json.loads(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


RIVAL_CODE = """
import json, sys, time
from sched_sim.core.event_engine import Simulator
from sched_sim.core.request import Request
from sched_sim.hardware.presets import get_hardware_profile
from sched_sim.schedulers.factory import create_scheduler
rows, budget = json.load(open(sys.argv[1]))
# Its H100 preset serves a 70B model in 102 KV blocks and would thrash: give it the model that we simulate.
hardware = get_hardware_profile("h100").model_copy(update=dict(model_name="Llama-3-8B", parameter_count_billions=8.03,
    num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8))
requests = [Request(request_id=f"r{i}", arrived_at=a, prompt_tokens=p, output_tokens=o)
            for i, (a, p, o) in enumerate(rows)]
simulator = Simulator(hardware, create_scheduler("chunked", hardware, token_budget=budget))
simulator.submit_workload(requests)
began = time.perf_counter()
simulator.run(max_duration_s=rows[-1][0] + 600.0)
seconds = time.perf_counter() - began
sizes = simulator.iteration_batch_sizes
finished = sum(r.completed_at is not None for r in requests)
json.dump({"steps": len(sizes), "seconds": seconds, "steps_per_second": len(sizes) / seconds,
           "mean_batch": sum(sizes) / len(sizes), "finished": finished}, sys.stdout)
"""


def rival_python(directory: Path) -> Path:
    """An environment of its own with the rival in it."""
    python = directory / "bin" / "python"
    if not python.exists():
        venv.create(directory, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", RIVAL], check=True)
    return python


def beside_rival(rate: float, requests: int, repeat: int, python: Path) -> dict[str, Any]:
    """The same Poisson arrivals and lengths, chunked prefill, budget 2,048, H100; runs alternate."""
    rng = np.random.default_rng(1)
    arrival = np.cumsum(rng.exponential(1 / rate, requests))
    prompt, output = rng.integers(1, 601, requests), rng.integers(1, 401, requests)
    load = Workload(arrival, prompt, output)
    latency = load_profile(PROFILE).latency
    config = EngineConfig(max_num_batched_tokens=2048, max_num_seqs=256, num_blocks=30_000)
    simulate(load.first(50), vllm_v1(), latency, config)
    rival: list[dict[str, Any]] = []
    ours: dict[str, list[float]] = {"fast_forward": [], "step_by_step": []}
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        rows.write_text(json.dumps([list(zip(arrival.tolist(), prompt.tolist(), output.tolist(), strict=True)), 2048]))
        for _ in range(repeat):
            done = subprocess.run([python, "-c", RIVAL_CODE, rows], check=True, capture_output=True, text=True)
            rival.append(json.loads(done.stdout))
            for name, rates in ours.items():
                began = time.perf_counter()
                log = simulate(load, vllm_v1(), latency, config, fast_forward=name == "fast_forward").log
                rates.append(log.num_steps / (time.perf_counter() - began))
    theirs = statistics.median(r["steps_per_second"] for r in rival)
    return {
        "rate": rate, "requests": requests, "our_mean_batch": float((log.num_decodes + log.num_prefills).mean()),
        "their_mean_batch": rival[0]["mean_batch"], "their_finished": rival[0]["finished"],
        "their_steps": rival[0]["steps"], "our_steps": log.num_steps, "their_steps_per_second": theirs,
        **{f"our_{name}": statistics.median(rates) for name, rates in ours.items()},
        **{f"ratio_{name}": statistics.median(rates) / theirs for name, rates in ours.items()},
    }  # fmt: skip


def tables(results: dict[str, Any]) -> str:
    head = (
        "live requests",
        "fast-forward",
        "step by step",
        "fast-forward, prefix caching",
        "step by step, prefix caching",
    )
    lines = [f"| {' | '.join(head)} |", "|---|---|---|---|---|"]
    for row in results["steps"]:
        rates = [row[f"{c}_prefix_caching_{f}"] for c in ("without", "with") for f in ("fast_forward", "step_by_step")]
        lines.append(f"| {row['live']} | " + " | ".join(f"{rate:,.0f}" for rate in rates) + " |")
    lines += ["", "| policy | azure-conv, s | steps | steps/s | median decision, µs |", "|---|---|---|---|---|"]
    for row in results["azure_conv"]:
        decision = row["median_decision_us"]
        lines.append(f"| {row['policy']} | {row['seconds']:.1f} | {row['steps']:,} | {row['steps_per_second']:,.0f} | "
                     f"{'-' if decision is None else f'{decision:.1f}'} |")  # fmt: skip
    big = results["million"]
    lines += ["", f"{big['requests']:,} requests, {big['tokens']:,} tokens, {big['steps']:,} steps: "
              f"{big['simulation_s']:.0f} s, peak memory {big['peak_gib']:.2f} GiB."]  # fmt: skip
    if results.get("rival"):
        head = (
            "requests/s",
            "mean batch, ours / theirs",
            "sched-sim steps/s",
            "ours, step by step",
            "ours, fast-forward",
        )
        lines += ["", f"| {' | '.join(head)} |", "|---|---|---|---|---|"]
        for row in results["rival"]:
            cells = [f"{row[f'our_{n}']:,.0f} ({row[f'ratio_{n}']:.1f}x)" for n in ("step_by_step", "fast_forward")]
            batches = f"{row['our_mean_batch']:.0f} / {row['their_mean_batch']:.0f}"
            lines.append(
                f"| {row['rate']:g} | {batches} | {row['their_steps_per_second']:,.0f} | {' | '.join(cells)} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--no-rival", action="store_true", help="leave the comparison with sched-sim out")
    parser.add_argument("--million", type=int, default=1_000_000, help="requests of the memory run")
    args = parser.parse_args()
    results: dict[str, Any] = {
        "commit": subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=HERE, check=True
        ).stdout.strip(),
        "versions": {name: version(name) for name in ("slacktide", "numpy", "numba")}
        | {"python": platform.python_version()},
        "machine": {"cpus": os.cpu_count(), "architecture": platform.machine()},
        "steps": [steps_per_second(20, 4000, args.repeat), steps_per_second(250, 6000, args.repeat)],
        "azure_conv": azure_conv(),
        "million": million(args.million),
    }
    if not args.no_rival:
        with tempfile.TemporaryDirectory() as folder:
            python = rival_python(Path(folder) / "venv")
            results["rival"] = [beside_rival(rate, 4000, args.repeat, python) for rate in (10.0, 30.0, 45.0)]
    results["peak_gib_of_this_process"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "speed.json").write_text(json.dumps(results, indent=1) + "\n")
    readme = HERE / "README.md"
    begin, end = "<!-- results -->", "<!-- /results -->"
    head, _, rest = readme.read_text().partition(begin)
    readme.write_text(f"{head}{begin}\n\n{tables(results)}\n\n{end}{rest.partition(end)[2]}")
    print(tables(results))


if __name__ == "__main__":
    main()
