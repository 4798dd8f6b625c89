"""Stand-ins for the paper's data: real prompt and output lengths, bent to its published means and 90th percentiles.

The packaged sharegpt and arxiv length tables (8k contexts) keep their shape and the relation of prompt and output; only
the scale is changed, x -> P90 (x / x90)^b with b chosen for the mean. Where no b gives the mean (ShareGPT's prompts: a
P90 of 1724 beside a mean of 357 needs most prompts to be very short), lengths beyond the P90 use the exponent TOP.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from slacktide.workload.load import load_trace

HERE = Path(__file__).parent
ROWS = 600
TOP = 0.25
TARGETS = {
    "sharegpt": ("sharegpt", (357, 1724), (89, 184)),
    "arxiv-v1": ("arxiv", (3253, 4382), (356, 542)),
    "arxiv-v2": ("arxiv", (6267, 7567), (423, 623)),
}  # fmt: skip
"""Name -> packaged table, (mean, P90) of prompts and of outputs: arXiv 2606.05933, table of data sets."""
MIXED = {"mixed-v1": ("arxiv-v1", 3), "mixed-v2": ("arxiv-v2", 5)}
"""Name -> second part, how many dialogue requests come to one of it."""
DATASETS = ("sharegpt", "arxiv-v1", "arxiv-v2", "mixed-v1", "mixed-v2")
SLO = "dialogue=ttft:5x,tbt:40;summarisation=ttft:10x,tbt:80"


def bent(values: np.ndarray, mean: float, p90: float) -> np.ndarray:
    """Lengths of the given mean and P90 (to a percent or so, after rounding), in the same order of size."""
    x = values / np.quantile(values, 0.9)

    def lengths(b: float, top: float) -> np.ndarray:
        return p90 * np.where(x > 1, x**top, x**b)

    for top in (None, TOP):
        low, high = 0.0, 30.0
        for _ in range(80):
            b = (low + high) / 2
            low, high = (b, high) if lengths(b, b if top is None else top).mean() > mean else (low, b)
        found = lengths(low, low if top is None else top)
        if abs(found.mean() / mean - 1) < 0.01:
            break
    return np.maximum(np.rint(found), 1).astype(np.int64)


def rows_of(name: str, count: int, rng: np.random.Generator) -> list[tuple[int, int, str]]:
    """(prompt, output, class) of `count` requests."""
    table, prompt, output = TARGETS[name]
    trace = load_trace(table)
    prompts, outputs = bent(trace.num_prompt_tokens, *prompt), bent(trace.num_output_tokens, *output)
    kind = "dialogue" if table == "sharegpt" else "summarisation"
    chosen = rng.choice(len(prompts), count, replace=False)
    return [(int(prompts[i]), int(outputs[i]), kind) for i in chosen]


def write(name: str, seed: int = 0) -> Path:
    """The data set as a CSV file; made once, the same each time.

    Seed 0 is committed beside this file. The others draw other rows of the same tables, into data/seed-N.
    """
    path = HERE / "data" / (f"{name}.csv" if seed == 0 else f"seed-{seed}/{name}.csv")
    if path.exists():
        return path
    rng = np.random.default_rng(DATASETS.index(name) if seed == 0 else [DATASETS.index(name), seed])
    if name in MIXED:
        other, ratio = MIXED[name]
        few = ROWS // (ratio + 1)
        rows = rows_of("sharegpt", ROWS - few, rng) + rows_of(other, few, rng)
        rows = [rows[i] for i in rng.permutation(ROWS)]
    else:
        rows = rows_of(name, ROWS, rng)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(("prompt_tokens", "output_tokens", "slo_class"))
        out.writerows(rows)
    return path


def slo_of(name: str) -> str:
    """The paper's targets for the classes that the data set has."""
    dialogue, summary = SLO.split(";")
    return {"sharegpt": dialogue}.get(name, summary if name in TARGETS else SLO)
