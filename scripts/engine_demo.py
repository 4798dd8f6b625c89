"""The engine half of `make demo`: a real vLLM on this machine's CPUs, with its own scheduler and with ours.

It measures the machine first (one request alone, then a full batch), scales a slice of the real trace azure-conv to
it, and replays the same requests against a server with each scheduler, one after the other. Run by `make demo-engine`
with the interpreter of the vLLM environment.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from slacktide.loadgen.record import client_figures, run_log
from slacktide.loadgen.replay import Limits, Target, replay
from slacktide.loadgen.server import ServerProcess, cpu_environment, free_port
from slacktide.metrics.summary import summarize
from slacktide.report.files import run_record, write_run
from slacktide.report.tables import print_comparison
from slacktide.workload.load import load_workload
from slacktide.workload.requests import ClosedLoop, Workload

LENGTHS = 0.25  # of the trace's lengths: prompts of 290 and answers of 53 tokens on average, seconds for a CPU
BATCH = 16  # requests at once when capacity is measured; the server's --max-num-seqs is twice that
LOAD = 0.85  # of the measured capacity: a queue comes and goes, which is where schedulers differ
TTFT_FACTOR, TBT_FACTOR = 8.0, 3.0  # targets, in times of what a request alone gets (SlidingServe: 5 to 10 for TTFT)
MAX_MODEL_LEN = 2048
POLICY = "tide"


@dataclass(frozen=True)
class Measured:
    """What this machine can do: seconds to the first token and between tokens of a request alone; requests/s."""

    ttft: float
    tbt: float
    rate: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory of the model")
    parser.add_argument("--policy", action="append", help="ours, besides vLLM's own; may be repeated")
    parser.add_argument("--seconds", type=float, default=110.0, help="length of each replay (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("demo-results/engine"))
    args = parser.parse_args()
    schedulers = [("vLLM stock", ["--stock"])] + [(f"{p} on vLLM", ["--policy", p]) for p in args.policy or [POLICY]]
    print(f"{len(schedulers)} replays of {args.seconds:.0f} s; let the machine do nothing else meanwhile", flush=True)
    records: list[dict[str, Any]] = []
    work: Workload | None = None
    for label, flags in schedulers:
        started = time.monotonic()
        print(f"starting a server: {label}", flush=True)
        told = [] if work is None else ["--slo", slo_text(work)]
        with server(args, flags + told, label) as running:
            print(f"  up after {time.monotonic() - started:.0f} s", flush=True)
            if work is None:
                print("  measuring what this machine can do ...", flush=True)
                measured = measure(running.url)
                work = scaled(measured, args.seconds)
                print(told_about(measured, work), flush=True)
            print(f"  replaying for {args.seconds:.0f} s or somewhat longer ...", flush=True)
            records.append(run(running.url, work, label, args.out))
    print()
    print_comparison(records)
    print(f"results: {args.out} (servers' logs beside them)")
    return 0


def server(args: argparse.Namespace, flags: list[str], label: str) -> ServerProcess:
    port = free_port()
    command = [
        sys.executable, "-m", "slacktide", "serve", str(args.model), *flags, "--port", str(port), "--enforce-eager",
        "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(2 * BATCH), "--no-enable-prefix-caching",
    ]  # fmt: skip
    log = args.out / f"{label.replace(' ', '-')}.log"
    return ServerProcess(command, f"http://127.0.0.1:{port}", log, environment=cpu_environment())


def trace(n: int) -> Workload:
    """The first n requests of the trace that the model can hold, with their own pattern of arrivals."""
    work = load_workload("azure-conv", max_tokens="exact")
    prompt = np.maximum(np.rint(work.num_prompt_tokens * LENGTHS), 1).astype(np.int64)
    output = np.maximum(np.rint(work.num_output_tokens * LENGTHS), 1).astype(np.int64)
    work = replace(work, num_prompt_tokens=prompt, num_output_tokens=output, max_tokens=output)
    fits = work.take(prompt + output <= MAX_MODEL_LEN).first(n)
    return fits.with_arrivals(fits.arrival_time - fits.arrival_time[0])


def measure(url: str) -> Measured:
    """One request after another, then BATCH at once: what users get at best, and what the machine carries at most."""
    alone = replace(trace(4), closed=ClosedLoop(1)).with_arrivals(np.zeros(4))
    log = run_log(alone, replay(alone, Target(url), num_warmups=2))
    one = summarize(log)
    crowd = replace(trace(3 * BATCH), closed=ClosedLoop(BATCH)).with_arrivals(np.zeros(3 * BATCH))
    log = run_log(crowd, replay(crowd, Target(url), num_warmups=0))
    many = summarize(log)
    return Measured(one["median_ttft_ms"] / 1e3, one["median_itl_ms"] / 1e3, many["request_throughput"])


def scaled(measured: Measured, seconds: float) -> Workload:
    """A slice of the trace at LOAD of the capacity, with targets in proportion to what a request alone gets."""
    rate = LOAD * measured.rate
    work = trace(max(round(rate * seconds), 10)).scaled_to(rate)
    ttft, tbt = round_up(TTFT_FACTOR * measured.ttft), round_up(TBT_FACTOR * measured.tbt)
    return replace(work, slo_ttft=np.full(len(work), ttft), slo_tbt=np.full(len(work), tbt))


def round_up(seconds: float) -> float:
    """To two digits, in seconds: 1.234 -> 1.3."""
    unit = 10.0 ** (np.floor(np.log10(seconds)) - 1)
    return float(np.ceil(seconds / unit - 1e-9) * unit)


def slo_text(work: Workload) -> str:
    return f"ttft:{work.slo_ttft[0] * 1e3:.0f},tbt:{work.slo_tbt[0] * 1e3:.0f}"


def told_about(measured: Measured, work: Workload) -> str:
    return (
        f"  alone: TTFT {measured.ttft * 1e3:.0f} ms, TBT {measured.tbt * 1e3:.0f} ms; "
        f"{BATCH} at once: {measured.rate:.2f} requests/s\n"
        f"  to replay: {len(work)} requests of azure-conv (lengths times {LENGTHS:g}) at {work.rate:.2f} requests/s, "
        f"target {slo_text(work)}"
    )


def run(url: str, work: Workload, label: str, out: Path) -> dict[str, Any]:
    result = replay(work, Target(url), Limits(timeout=300.0), num_warmups=2)
    log = run_log(work, result)
    record = run_record(log, policy=label, seed=0, summary=summarize(log), client=client_figures(result))
    write_run(out / label.replace(" ", "-"), record, log, save_detailed=True)
    return record


if __name__ == "__main__":
    sys.exit(main())
