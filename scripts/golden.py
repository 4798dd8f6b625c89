"""Golden table: integers of every policy on one committed trace at eight loads.

`golden.py` compares with tests/golden/policies.json and exits 1 on a difference; `--update` writes it anew. Whoever
updates it says in CHANGELOG.md why the numbers changed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from slacktide.core import policy as policies
from slacktide.core.latency import AffineModel
from slacktide.core.pack import as_policy
from slacktide.core.spec import parse_policies
from slacktide.metrics.slo import judge
from slacktide.sim.engine import EngineConfig, simulate
from slacktide.workload.load import load_workload

GOLDEN = Path(__file__).parents[1] / "tests" / "golden" / "policies.json"
COLUMNS = (
    "steps", "decode_steps", "prefill_steps", "mixed_steps", "tokens", "preemptions", "recomputed", "finished", "met",
)  # fmt: skip
LOADS = (1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 14.0, 20.0)  # requests/s: from idle to twice what the model can carry
# Sums and products alone: exponentials of the composed tables may differ in the last bit between processors.
# Published calibration of Qwen3-8B on an RTX PRO 6000 (weifang231/eb-vllm, rounded); kappa makes mixing cost something.
MODEL = AffineModel(alpha_p=0.0047, beta_p=5.0e-5, alpha_d=0.0104, beta_d=1.04e-4, alpha_mb=0.0104, kappa=1e-4)
# 1,500 blocks: small enough that every overloaded policy has to preempt or to hold back.
ENGINE = EngineConfig(max_num_batched_tokens=2048, max_num_seqs=128, num_blocks=1500, enable_prefix_caching=True)


def row(name: str, load: float) -> list[int]:
    """The integers of one run, in the order of COLUMNS: 300 requests of azure-conv."""
    workload = load_workload("azure-conv", num_prompts=300, rate=load, slo="ttft:1000,tbt:50")
    log = simulate(workload, as_policy(parse_policies([name])[0].build()), MODEL, ENGINE).log
    decode, prefill = log.num_prefills == 0, log.num_decodes == 0
    return [
        log.num_steps, int(decode.sum()), int(prefill.sum()), int((~decode & ~prefill).sum()),
        int(log.num_tokens.sum()), int(log.num_preemptions.sum()), int(log.recomputed_tokens.sum()),
        int(log.finished.sum()), int(judge(log).met.sum()),
    ]  # fmt: skip


def table(names: list[str]) -> dict[str, dict[str, list[int]]]:
    """Policy -> load -> integers."""
    return {name: {f"{load:g}": row(name, load) for load in LOADS} for name in names}


def main() -> int:
    """Compare or update."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--update", action="store_true")
    args = parser.parse_args()
    new = table(policies.names())
    old = json.loads(GOLDEN.read_text())["policies"] if GOLDEN.exists() else {}
    differences = 0
    for name in sorted(new.keys() | old.keys()):
        for load in new.get(name, old.get(name, {})):
            before, after = old.get(name, {}).get(load), new.get(name, {}).get(load)
            if before != after:
                differences += 1
                print(f"{name} at {load} requests/s: {before} -> {after}")
    print(f"{differences} of {sum(map(len, new.values()))} rows differ ({', '.join(COLUMNS)})")
    if args.update:
        lines = [f'  "{name}": {{\n' + ",\n".join(f'   "{k}": {json.dumps(v)}' for k, v in rows.items()) + "\n  }"
                 for name, rows in new.items()]  # fmt: skip
        GOLDEN.write_text(
            f'{{\n "columns": {json.dumps(COLUMNS)},\n "policies": {{\n' + ",\n".join(lines) + "\n }\n}\n"
        )
        return 0
    return int(differences > 0)


if __name__ == "__main__":
    np.seterr(all="raise")
    sys.exit(main())
