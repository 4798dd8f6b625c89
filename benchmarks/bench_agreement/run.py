"""Do `slacktide bench` and `vllm bench serve` report the same? Both replay one trace on one server, in turn.

make bench NAME=bench_agreement ARGS="--model DIR"; needs the vLLM environment. Writes results/bench_agreement.json and
the table of README.md. Exit status 1 when a metric differs by more than noise.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from slacktide.loadgen.server import ServerProcess, cpu_environment, free_port
from slacktide.workload.load import load_workload

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BLOCK = 16  # tokens per hash of a timed trace; vllm bench makes prompts from hashes alone
LENGTHS = 0.15  # of azure-conv's lengths: half a second for a request alone on two cores
METRICS = (
    "request_throughput", "output_throughput", "mean_ttft_ms", "median_ttft_ms", "mean_tpot_ms", "median_tpot_ms",
    "mean_itl_ms", "median_itl_ms", "mean_e2el_ms", "median_e2el_ms",
)  # fmt: skip
COUNTS = ("completed", "total_input_tokens", "total_output_tokens")
TOLERANCE = 0.05  # difference that always passes: two runs of one tool differ by as much on an idle machine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory made by scripts/make_smollm2.py")
    parser.add_argument("--vllm-python", type=Path, default=ROOT / ".venv-vllm/bin/python")
    parser.add_argument("--rounds", type=int, default=4, help="runs of each tool (default: %(default)s)")
    parser.add_argument("--num-prompts", type=int, default=60)
    parser.add_argument("--rate", type=float, default=1.5, help="requests/s (default: %(default)s: little queueing)")
    parser.add_argument("--no-write", action="store_true", help="leave results and README as they are")
    args = parser.parse_args()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        str(args.vllm_python), "-m", "slacktide", "serve", str(args.model), "--stock", "--port", str(port),
        "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "32", "--no-enable-prefix-caching",
    ]  # fmt: skip
    runs: dict[str, list[dict[str, Any]]] = {"slacktide bench": [], "vllm bench serve": []}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        trace = write_trace(folder / "trace.jsonl", args.num_prompts, args.rate)
        with ServerProcess(command, url, folder / "server.log", environment=cpu_environment()):
            for number in range(args.rounds):
                for tool, run in (("slacktide bench", ours), ("vllm bench serve", theirs)):
                    runs[tool].append(run(args, url, trace, folder))
                    print(f"round {number + 1}: {tool}: mean TTFT {runs[tool][-1]['mean_ttft_ms']:.1f} ms", flush=True)
    rows = [compared(name, runs) for name in METRICS]
    wrong = [
        f"{name}: {[run[name] for runs_ in runs.values() for run in runs_]}" for name in COUNTS if differs(name, runs)
    ]
    wrong += [
        f"{row['metric']}: {row['difference']:+.1%}, spread {row['spread']:.1%}" for row in rows if not row["agrees"]
    ]
    if not args.no_write:
        write(args, rows, runs)
    print(table(rows))
    for line in wrong:
        print(f"differs: {line}")
    return int(bool(wrong))


def write_trace(path: Path, n: int, rate: float) -> Path:
    """A slice of azure-conv in the format both tools read, with times in seconds and no shared prefixes."""
    work = load_workload("azure-conv", num_prompts=n, rate=rate, max_tokens="exact")
    prompt = np.maximum(np.rint(work.num_prompt_tokens * LENGTHS), 1).astype(int)
    output = np.maximum(np.rint(work.num_output_tokens * LENGTHS), 2).astype(int)
    used, lines = 0, []
    for time, tokens, wanted in zip(work.arrival_time.tolist(), prompt.tolist(), output.tolist(), strict=True):
        blocks = -(-tokens // BLOCK)
        ids = list(range(used, used + blocks))
        used += blocks
        row = {"timestamp": round(time, 3), "input_length": tokens, "output_length": wanted, "hash_ids": ids}
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def ours(_: argparse.Namespace, url: str, trace: Path, __: Path) -> dict[str, Any]:
    options = ["--json", "--quiet", "--num-warmups", "1", "--no-send-slo"]
    command = [sys.executable, "-m", "slacktide", "bench", "--url", url, "--trace", str(trace), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"slacktide bench failed: {done.stderr}")
    record: dict[str, Any] = json.loads(done.stdout)
    return {name: record[name] for name in (*METRICS, *COUNTS)}


def theirs(args: argparse.Namespace, url: str, trace: Path, folder: Path) -> dict[str, Any]:
    command = [
        str(args.vllm_python), "-m", "slacktide.vllm.serve", "bench", "serve", "--backend", "openai", "--base-url", url,
        "--endpoint", "/v1/completions", "--model", str(args.model), "--dataset-name", "timed_trace",
        "--dataset-path", str(trace), "--num-prompts", str(args.num_prompts), "--ignore-eos", "--temperature", "0",
        "--timed-trace-chunk-hash-size", str(BLOCK), "--percentile-metrics", "ttft,tpot,itl,e2el", "--disable-tqdm",
        "--save-result", "--result-dir", str(folder), "--result-filename", "theirs.json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"vllm bench failed: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    record = json.loads((folder / "theirs.json").read_text())
    return {name: record[name] for name in (*METRICS, *COUNTS)}


def differs(name: str, runs: dict[str, list[dict[str, Any]]]) -> bool:
    return len({run[name] for tool in runs.values() for run in tool}) > 1


def compared(name: str, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians of both tools, their relative difference, and the widest spread between runs of one tool."""
    a, b = ([run[name] for run in tool] for tool in runs.values())
    middle = float(np.median(b))
    difference = float(np.median(a)) / middle - 1
    spread = max(max(of) - min(of) for of in (a, b)) / middle
    agrees = abs(difference) <= max(TOLERANCE, spread)
    return {"metric": name, "slacktide": float(np.median(a)), "vllm": middle, "difference": difference,
            "spread": spread, "agrees": agrees}  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| metric (median of runs) | slacktide bench | vllm bench serve | difference | spread of one tool |"]
    lines.append("|---|---:|---:|---:|---:|")
    for row in rows:
        cells = f"{row['slacktide']:.2f} | {row['vllm']:.2f} | {row['difference']:+.1%} | {row['spread']:.1%}"
        lines.append(f"| `{row['metric']}` | {cells} |")
    return "\n".join(lines)


def write(args: argparse.Namespace, rows: list[dict[str, Any]], runs: dict[str, list[dict[str, Any]]]) -> None:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=HERE, capture_output=True, text=True, check=False).stdout.strip()

    asked = subprocess.run(
        [str(args.vllm_python), "-c", "from slacktide.vllm.serve import installed; print(*installed())"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    made = {
        "commit": git("rev-parse", "--short", "HEAD"),
        "changed": bool(git("status", "--porcelain", "--", "src", "benchmarks/bench_agreement/run.py")),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, torch threads: {cpu_environment()['OMP_NUM_THREADS']}",
        "vllm": asked.stdout.strip(),
        "aiohttp": version("aiohttp"),
        "num_prompts": args.num_prompts,
        "rate": args.rate,
        "rounds": args.rounds,
    }
    (HERE / "results").mkdir(exist_ok=True)
    document = {"made_with": made, "rows": rows, "runs": runs}
    (HERE / "results" / "bench_agreement.json").write_text(json.dumps(document, indent=1) + "\n")
    readme, begin, end = HERE / "README.md", "<!-- results -->", "<!-- /results -->"
    head, _, rest = readme.read_text().partition(begin)
    said = f"{made['vllm']}, {made['machine']}, commit {made['commit']}; {args.rounds} runs of each tool in turn."
    readme.write_text(f"{head}{begin}\n\n{said}\n\n{table(rows)}\n\n{end}{rest.partition(end)[2]}")


if __name__ == "__main__":
    sys.exit(main())
