"""The same comparison on a real engine: paired runs of `slacktide serve` under `vllm bench serve`, saturated.

    python benchmarks/exclusive_batching/real.py MODEL [ROUNDS] [vllm serve flags ...]

For every round and concurrency (8, 16, 32) each policy gets a fresh server and the same 256 requests (128 to 256 prompt
tokens, 64 to 128 output tokens, seed = round). Results: results/real.json; printed: ratios to vllm-v1 with Student's
95 % interval over the rounds. Needs vLLM; runs on its CPU backend too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np
from scipy.stats import t

RESULTS = Path(__file__).parent / "results" / "real.json"
POLICIES = ("vllm-v1", "eb:k=1", "eb-adaptive:mixed_below=0", "eb-plus")
CONCURRENCY, PORT, PATIENCE = (8, 16, 32), 8321, 900  # seconds for a server to load a small model on a CPU


def serve(model: str, policy: str, flags: list[str]) -> subprocess.Popen[bytes]:
    """A server that answers."""
    command = [sys.executable, "-m", "slacktide", "serve", model, "--policy", policy, "--port", str(PORT), *flags]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5)
            return server
        except OSError:
            time.sleep(2)
    stop(server)
    raise RuntimeError(f"no server for {policy}: {' '.join(command)}")


def stop(server: subprocess.Popen[bytes]) -> None:
    """End the server and what it started."""
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=60)


def throughput(model: str, concurrency: int, seed: int) -> float:
    """Requests per second of one load."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "vllm", "bench", "serve", "--model", model, "--port", str(PORT), "--dataset-name", "random",
            "--random-input-len", "192", "--random-output-len", "96", "--random-range-ratio", "0.33",
            "--num-prompts", "256", "--request-rate", "inf", "--max-concurrency", str(concurrency), "--ignore-eos",
            "--seed", str(seed), "--save-result", "--result-dir", folder, "--result-filename", "r.json",
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return float(json.loads((Path(folder) / "r.json").read_text())["request_throughput"])


def main() -> None:
    model, rounds, flags = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 5, sys.argv[3:]
    done = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for seed in range(rounds):
        for policy in POLICIES if seed % 2 == 0 else POLICIES[::-1]:  # turns drift of the machine into noise
            missing = [c for c in CONCURRENCY if f"{policy} c={c} seed={seed}" not in done]
            if not missing:
                continue
            server = serve(model, policy, flags)
            try:
                throughput(model, 8, 1000)  # warm up
                for c in missing:
                    done[f"{policy} c={c} seed={seed}"] = throughput(model, c, seed)
                    RESULTS.write_text(json.dumps(done, indent=0, sort_keys=True) + "\n")
            finally:
                stop(server)
    for c in CONCURRENCY:
        base = np.array([done[f"vllm-v1 c={c} seed={s}"] for s in range(rounds)])
        for policy in POLICIES[1:]:
            ratio = np.log([done[f"{policy} c={c} seed={s}"] for s in range(rounds)] / base)
            half = float(t.ppf(0.975, rounds - 1) * ratio.std(ddof=1) / np.sqrt(rounds)) if rounds > 1 else np.inf
            low, high = np.exp(ratio.mean() - half), np.exp(ratio.mean() + half)
            print(f"c={c} {policy}: {np.exp(ratio.mean()):.3f} of vllm-v1 ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
