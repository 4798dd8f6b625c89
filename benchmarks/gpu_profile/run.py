"""Profiles an 8B-shaped model on whatever GPU is here, with torch alone: pure and mixed steps, one command.

    python benchmarks/gpu_profile/run.py [--model llama-3-8b] [--minutes 6] [--out benchmarks/gpu_profile/results]

Needs torch and numpy; scipy and numba too for the fit, without them it measures and says how to fit elsewhere. The
files are named after the GPU: NAME.jsonl (every sample), NAME.json (the profile), NAME-composed.json (the same steps by
the packaged profile of that GPU, where there is one). `--tiny` runs a toy on the CPU, to see that it works.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "src"))  # a bare machine has the repository, not the package

import numpy as np  # noqa: E402

from slacktide.core.latency_families import SCENES, scenes  # noqa: E402
from slacktide.profiling.experiments_run import run_design  # noqa: E402
from slacktide.profiling.torch_stack import TorchStack, tiny  # noqa: E402

GPU_WORDS = {
    "H200": "h200", "H100 PCIe": "h100-pcie", "H100": "h100", "A100": "a100", "B200": "b200", "L40S": "l40s",
    "RTX PRO 6000": "rtx-pro-6000", "4090": "rtx-4090", "3090": "rtx-3090", "5090": "rtx-5090",
}  # fmt: skip
"""A word in the driver's name of a GPU -> our name of it."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--minutes", type=float, default=6.0, help="measuring time; all in all under 8 (default: 6)")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--layers", type=int, help="run N layers, count one for the others")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    began = time.perf_counter()
    stack = tiny() if args.tiny else TorchStack.named(args.model, layers=args.layers)
    facts = stack.facts()
    where = facts["hardware"].get("gpu") or facts["hardware"]["cpu"]
    print(f"{where}: {facts['engine']['model']}, {facts['engine']['num_gpu_blocks']:,} KV blocks", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    name = "tiny" if args.tiny else gpu_name(where)
    path = args.out / f"{name}-{facts['engine']['model'].lower()}.jsonl"
    shown = -1

    def progress(share: float) -> None:
        nonlocal shown
        if int(10 * share) > shown:
            shown = int(10 * share)
            print(f"  {10 * shown} % after {time.perf_counter() - began:.0f} s", flush=True)

    outcome = run_design(stack, path, minutes=args.minutes, rounds=args.rounds, progress=progress)
    stack.close()
    print(f"{outcome.points} points, {outcome.rounds} whole rounds, {outcome.samples} samples: {path}")
    for note in outcome.notes:
        print(f"note: {note}")
    try:
        import numba  # noqa: F401
        import scipy  # noqa: F401
    except ImportError:
        print(f"no scipy or numba here: fit it elsewhere with  slacktide fit {path} --out DIR")
        return 0
    from slacktide.errors import InputError

    try:
        write_profile(path, f"{name}/{facts['engine']['model']}", None if args.tiny else f"{name}/{args.model}")
    except InputError as error:
        print(f"no profile: {error}")
        return 1
    print(f"{time.perf_counter() - began:.0f} s in all")
    return 0


def gpu_name(text: str) -> str:
    """Our name of a GPU, or the driver's in lower case."""
    found = [ours for word, ours in GPU_WORDS.items() if word in text]
    return found[0] if found else "-".join(text.lower().split())


def write_profile(path: Path, name: str, composed: str | None) -> dict[str, Any]:
    """Fit, write NAME.json, and compare with the composed profile of the same name where there is one."""
    from slacktide.cli.output import to_json
    from slacktide.profiling.calibrate import calibrate, profile_fields
    from slacktide.profiling.measurements import read_steps

    steps = read_steps(path)
    fitted = calibrate(steps)
    fields = profile_fields(steps, fitted, name.lower(), {})
    path.with_suffix(".json").write_text(to_json(fields), encoding="utf-8")
    for scene, error in fields["errors"].items():
        print(f"  {scene}: median error {error['median_percent']:.1f} %, 90 % within {error['p90_percent']:.1f} %")
    if composed is not None:
        compare(steps, composed, path.with_name(path.stem + "-composed.json"))
    return fields


def compare(steps: Any, composed: str, path: Path) -> None:
    """Measured steps against the packaged profile's tables, without its host overhead: per scene the median ratio."""
    from slacktide.errors import InputError
    from slacktide.profiling.profiles import load_profile

    try:
        model = load_profile(composed, host_overhead=0.0, host_per_sequence=0.0).latency
    except InputError as error:
        print(f"no composed profile to compare with: {error}")
        return
    ratio = steps.times / model.step_times(steps.shapes)
    found = {
        scene: {"steps": int(rows.sum()), "measured_over_composed": np.quantile(ratio[rows], (0.1, 0.5, 0.9)).tolist()}
        for i, scene in enumerate(SCENES)
        if (rows := scenes(steps.shapes) == i).any()
    }
    path.write_text(json.dumps({"composed": composed, "quantiles": [0.1, 0.5, 0.9], **found}, indent=2) + "\n", "utf-8")
    for scene, values in found.items():
        low, middle, high = values["measured_over_composed"]
        print(f"  {scene}: measured / composed {middle:.2f} (10 to 90 %: {low:.2f} to {high:.2f})")


if __name__ == "__main__":
    sys.exit(main())
