"""The same comparison on a real engine: paired runs of vLLM on this machine's CPUs, saturated.

    .venv-vllm/bin/python benchmarks/exclusive_batching/real.py --model .venv-vllm/models/smollm2-135m --rounds 3
    .venv/bin/python benchmarks/exclusive_batching/report.py

One engine process per policy, all loaded at once and driven in turn, so that every ratio compares runs that lie seconds
apart; the order turns from round to round, which makes the machine's drift noise and not bias. A run keeps c requests
in flight until the last has arrived and is over when the last has finished; lengths are the paper's four loads divided
by 8, uniform +-50 %, the same for every policy of a round. results/real.json keeps every run: an interrupted benchmark
goes on where it stopped. Ratios to vLLM's own scheduler stand with Student's 95 % interval over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results" / "real.json"
STOCK = "stock"
POLICIES = (STOCK, "vllm-v0", "eb-adaptive:mixed_below=0", "eb-plus")
"""eb-adaptive by itself mixes below 64 requests: here it must not, or it would be vLLM's own schedule."""
LOADS = {"64/32": (64, 32), "16/128": (16, 128), "128/16": (128, 16), "64/64": (64, 64)}
CONCURRENCY = (8, 16, 32)
WAVES = 4  # requests of a run = WAVES * c: three quarters of it at full load
MAX_MODEL_LEN = 256  # holds the longest prompt and answer of the loads
NUM_BLOCKS = 72  # of 128 tokens: 32 requests of the longest load, with a little room


def worker(model: str, policy: str) -> None:
    """One engine; reads `{"c", "prompts", "outputs"}` a line, answers with seconds, and says what the engine did."""
    from vllm import LLM, SamplingParams

    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints on standard output
    own: dict[str, Any] = {}
    if policy != STOCK:
        state = tempfile.mkdtemp()
        own = {
            "scheduler_cls": "slacktide.vllm.SyncScheduler",
            "additional_config": {"slacktide": {"policy": policy, "state_dir": state, "max_decision_ms": 1000}},
        }
    llm = LLM(
        model=model, dtype="float32", enforce_eager=True, max_num_seqs=max(CONCURRENCY), max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=512, enable_prefix_caching=False, disable_log_stats=True,
        num_gpu_blocks_override=NUM_BLOCKS, **own,
    )  # fmt: skip
    engine, run = llm.llm_engine, 0
    scheduler = engine.engine_core.engine_core.scheduler

    def drive(c: int, prompts: list[int], outputs: list[int]) -> dict[str, float]:
        nonlocal run
        run += 1
        rng = np.random.default_rng(run)
        texts = [rng.integers(100, 40_000, size=n).tolist() for n in prompts]
        steps = mixed = sent = done = 0
        started = time.perf_counter()
        while done < len(texts):
            while sent < len(texts) and sent - done < c:
                given = SamplingParams(max_tokens=outputs[sent], ignore_eos=True, temperature=0.0, detokenize=False)
                engine.add_request(f"{run}-{sent}", {"prompt_token_ids": texts[sent]}, given)
                sent += 1
            prefilling = {r.request_id for r in scheduler.running if r.num_computed_tokens < r.num_prompt_tokens}
            waiting = bool(scheduler.waiting)
            before = {r.request_id: r.num_computed_tokens for r in scheduler.running}
            done += sum(o.finished for o in engine.step())
            steps += 1
            moved = [r for r in scheduler.running if r.num_computed_tokens > before.get(r.request_id, 0)]
            fresh = sum(r.request_id in prefilling or (waiting and r.request_id not in before) for r in moved)
            mixed += 0 < fresh < len(moved)
        return {"seconds": time.perf_counter() - started, "steps": steps, "mixed_steps": mixed}

    drive(8, [64] * 16, [32] * 16)  # compile, allocate, and let an adaptive policy see its first steps
    print("ready", file=answer, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(drive(asked["c"], asked["prompts"], asked["outputs"])), file=answer, flush=True)


class Engine:
    """A worker process."""

    def __init__(self, model: Path, policy: str) -> None:
        command = [sys.executable, __file__, "--model", str(model), "--worker", policy]
        environment = dict(
            os.environ, VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR"
        )
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        self.log = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the process
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=environment
        )
        self.policy = policy

    def answer(self) -> str:
        """The next line; what the engine said last, if it is gone."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            tail = self.log.read().decode(errors="replace")[-2000:]
            raise SystemExit(f"the engine with {self.policy} ended:\n{tail}")
        return line

    def run(self, c: int, prompts: list[int], outputs: list[int]) -> dict[str, float]:
        """One load."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"c": c, "prompts": prompts, "outputs": outputs}) + "\n")
        self.process.stdin.flush()
        found: dict[str, float] = json.loads(self.answer())
        return found

    def stop(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        self.log.close()


def lengths(load: tuple[int, int], n: int, seed: int) -> tuple[list[int], list[int]]:
    """Uniform +-50 %."""
    rng = np.random.default_rng(seed)
    prompts, outputs = (rng.integers(m // 2, m * 3 // 2 + 1, size=n).tolist() for m in load)
    return prompts, outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory of the model")
    parser.add_argument("--rounds", type=int, default=3, help="paired runs of every cell (default: %(default)s)")
    parser.add_argument("--load", action="append", choices=list(LOADS), help="prompt/output tokens (default: all)")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(str(args.model), args.worker)
    done = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    cells = [(seed, load, c) for seed in range(args.rounds) for load in args.load or LOADS for c in CONCURRENCY]
    key = "{policy} {load} c={c} seed={seed}".format
    if all(key(policy=p, load=load, c=c, seed=s) in done for s, load, c in cells for p in POLICIES):
        return None
    engines: list[Engine] = []
    try:
        for policy in POLICIES:
            engines.append(Engine(args.model, policy))
            engines[-1].answer()
        for turn, (seed, load, c) in enumerate(cells):
            prompts, outputs = lengths(LOADS[load], WAVES * c, seed)
            for i in range(len(engines)):
                engine = engines[(i + turn) % len(engines)]
                name = key(policy=engine.policy, load=load, c=c, seed=seed)
                if name not in done:
                    done[name] = engine.run(c, prompts, outputs)
                    RESULTS.write_text(json.dumps(done, indent=0, sort_keys=True) + "\n")
                    print(name, done[name], flush=True)
    finally:
        for engine in engines:
            engine.stop()
    return None


if __name__ == "__main__":
    main()
