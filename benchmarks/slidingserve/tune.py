"""Parameters of every arm by the same search: equal grids, one tuning seed.

    python benchmarks/slidingserve/tune.py [PROFILE...]     results/tune.jsonl: every point; results/tuned.json: choices

Per arm eight points: four of what sets the size of its steps (chunk, token budget or guard), then four around the best
of them. Two choices are kept: for each data set of DATA the point with the highest goodput there, and one for all data
sets, by the geometric mean. The first is what the evaluation runs (arxiv-v2 and mixed-v2 use the choices of arxiv-v1
and mixed-v1; Qwen uses Llama's), the second is where the policies' defaults come from. GPUs other than two RTX 3090
are tuned on arxiv-v1 and mixed-v1.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
from common import FLOOR, LLAMA, RESULTS, TUNING_SEED, Log, goodput

DATA = ("sharegpt", "arxiv-v1", "mixed-v1")
RESOLUTION = 0.1
"""Coarser than the evaluation's 5 %: neighbouring settings differ by more, or it does not matter which is taken."""

Point = dict[str, Any]
CHUNKS: list[Point] = [{"max_chunk": n} for n in (1024, 512, 256, 128)]
GUARDS: list[Point] = [{"guard": g} for g in (0.2, 0.28, 0.35, 0.5)]
SAFER: Point = {"margin": 1.25}
WIDER: Point = {"max_chunk": 1.4}
SHORTER: Point = {"max_chunk": 256}
LATE: list[Point] = [{"margin": 1.0}, {"late_factor": 2.0}]
ALPHAS: list[Point] = [{"alpha": 0.003}, {"alpha": 0.03}]
OWN: list[Point] = [{"alpha": 0.8}, {"least_gain": 0.0}]
PAPER: list[Point] = [{"max_chunk": 0.7}, WIDER, {"alpha": 0.5}, {"alpha": 2.0}]
ARMS: dict[str, tuple[str, list[Point], list[Point]]] = {
    "sarathi-edf": ("sarathi-edf", [{"chunk_size": n} for n in (1024, 512, 256, 128)],
                    [{"chunk_size": f} for f in (0.7, 0.85, 1.2, 1.4)]),
    "greedy-dynamic": ("greedy-dynamic", CHUNKS, [SAFER, WIDER, *LATE]),
    "qoserve": ("qoserve", CHUNKS, [SAFER, WIDER, *ALPHAS]),
    "sliding, no guard": ("sliding:guard=0", CHUNKS, [SAFER, WIDER, *OWN]),
    "greedy-dynamic + guard": ("greedy-dynamic", GUARDS, [SAFER, SHORTER, *LATE]),
    "qoserve + guard": ("qoserve", GUARDS, [SAFER, SHORTER, *ALPHAS]),
    "sliding": ("sliding", GUARDS, [SAFER, SHORTER, *OWN]),
    "sola": ("sola", [{"guard": 0.0}, *GUARDS[1:]], [SAFER, SHORTER, {"tile": 16}, {"tile": 128}]),
    "paper": ("sliding:reading=paper", CHUNKS, PAPER),
    "paper, clamped": ("sliding:reading=paper,chunker=frozen", CHUNKS, PAPER),
}  # fmt: skip
"""Arm -> policy, the first four points, what the next four change. A share below 2 multiplies the first choice.

The guard is ours, so those that have it are arms of their own; SOLA's may be 0.
"""


def text_of(policy: str, point: Point) -> str:
    """The policy with these parameters, as the command line takes it."""
    given = ",".join(f"{name}={value:g}" for name, value in point.items())
    return f"{policy}{',' if ':' in policy else ':'}{given}"


def neighbours(best: Point, changes: list[Point]) -> list[Point]:
    """The points of the second stage."""
    found = []
    for change in changes:
        ((name, value),) = change.items()
        scaled = name in ("chunk_size", "max_chunk") and value < 2
        found.append(best | {name: max(int(best[name] * value) // 8 * 8, 16) if scaled else value})
    return found


def tune(arm: str, log: Log, profile: str, datasets: tuple[str, ...]) -> dict[str, str]:
    """Data set, or `all`, -> the arm's best setting of its eight."""
    policy, first, changes = ARMS[arm]
    hints: dict[str, float | None] = dict.fromkeys(datasets)

    def worth(point: Point) -> dict[str, float]:
        found = {}
        for data in datasets:
            row = goodput(log, text_of(policy, point), data, profile, TUNING_SEED, hints[data], resolution=RESOLUTION)
            hints[data] = row["rate"]
            found[data] = max(row["rate"] or FLOOR, FLOOR)
        return found | {"all": float(np.exp(np.mean(np.log(list(found.values())))))}

    tried = [(worth(point), point) for point in first]
    best = max(tried, key=lambda t: t[0]["all"])[1]  # of equals, the first
    tried += [(worth(point), point) for point in neighbours(best, changes)]
    return {data: text_of(policy, max(tried, key=lambda t: t[0][data])[1]) for data in (*datasets, "all")}


def tune_all(profile: str) -> None:
    """Every arm on one GPU; what stands in results/tune.jsonl is not run again."""
    log, path = Log("tune"), RESULTS / "tuned.json"
    datasets = DATA if profile == LLAMA else DATA[1:]
    for arm in ARMS:
        chosen = tune(arm, log, profile, datasets)
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        for data, text in chosen.items():
            found.setdefault(profile, {}).setdefault(data, {})[arm] = text
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Tune on the GPUs named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profiles", nargs="*", default=[LLAMA])
    for profile in parser.parse_args().profiles:
        tune_all(profile)


if __name__ == "__main__":
    main()
