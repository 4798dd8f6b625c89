"""Draw the figures of the documents into docs/assets: from the packaged profiles, and from results of benchmarks.

Usage: python scripts/docs_figures.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from slacktide.profiling.profiles import load_profile

ROOT = Path(__file__).parents[1]
ASSETS = ROOT / "docs" / "assets"
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#777777"  # Okabe and Ito
PROFILES = {"h100/llama-3-8b": BLUE, "rtx-pro-6000/llama-3-8b": ORANGE, "rtx-4090/llama-3-8b": GREEN}


def figure(width: float, height: float, panels: int) -> tuple[Any, list[Any]]:
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["svg.hashsalt"] = "slacktide"  # the same bytes for the same figure
    drawn = Figure(figsize=(width, height), layout="constrained")
    axes = list(np.atleast_1d(drawn.subplots(1, panels)))
    for axis in axes:
        axis.grid(visible=True, color="#E6E6E6", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    return drawn, axes


def save(drawn: Any, name: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(drawn)
    ASSETS.mkdir(exist_ok=True)
    drawn.savefig(ASSETS / name, metadata={"Date": None})
    print(f"wrote docs/assets/{name}")


def step_ms(name: str, tokens: int, decodes: int, context: int = 1024) -> float:
    """Milliseconds of a step: a prompt chunk of `tokens` (0: none) beside `decodes` at `context`."""
    chunks = [tokens] if tokens else []
    sizes = np.array([*chunks, *[1] * decodes])
    contexts = np.array([*[0] * len(chunks), *[context] * decodes])
    phases = np.array([*[False] * len(chunks), *[True] * decodes])
    return load_profile(name).latency.step_time(sizes, contexts, phases) * 1e3


def step_times() -> None:
    """What a step costs: by prompt tokens, by decodes, and what mixing adds."""
    drawn, (first, second, third) = figure(11, 3.4, 3)
    tokens, decodes = np.unique(np.geomspace(16, 4096, 40).astype(int)), np.arange(1, 257, 5)
    for name, colour in PROFILES.items():
        first.plot(tokens, [step_ms(name, int(n), 0) for n in tokens], color=colour, label=name)
        second.plot(decodes, [step_ms(name, 0, int(n)) for n in decodes], color=colour)
        beside = [64, 128, 256, 512, 1024, 2048]
        apart = [step_ms(name, n, 64) / (step_ms(name, n, 0) + step_ms(name, 0, 64)) for n in beside]
        third.plot(beside, apart, color=colour, marker="o", markersize=3)
    for axis, title, x, y in (
        (first, "Prompt tokens alone", "tokens of the chunk", "step, ms"),
        (second, "Decodes alone, context 1,024", "decodes", "step, ms"),
        (third, "64 decodes and a chunk: one mixed step\nover two steps", "tokens of the chunk", "ratio of times"),
    ):
        axis.set_title(title, fontsize=9.5, loc="left")
        axis.set_xlabel(x, fontsize=8.5, color=GREY)
        axis.set_ylabel(y, fontsize=8.5, color=GREY)
    first.set_xscale("log")
    third.set_xscale("log")
    third.axhline(1, color=GREY, linewidth=1)
    for axis in (first, second, third):
        axis.set_ylim(bottom=0)
    first.legend(fontsize=7.5, frameon=False)
    save(drawn, "step_times.svg")


def goodput() -> None:
    """Highest rates of the baselines on one trace, with intervals, from benchmarks/baselines."""
    data = json.loads((ROOT / "benchmarks/baselines/results/baselines.json").read_text())
    rows = data["goodput"]["h100/llama-3-8b"]
    rows.sort(key=lambda row: row["rate"])
    drawn, (axis,) = figure(7.2, 0.32 * len(rows) + 0.9, 1)
    for i, row in enumerate(rows):
        axis.barh(i, row["rate"], color=BLUE if i == len(rows) - 1 else "#9FC5E0", height=0.6)
        axis.plot([row["rate_low"], row["rate_high"]], [i, i], color="black", linewidth=1)
        axis.text(row["rate_high"] + 0.2, i, f"{row['rate']:.1f}", va="center", fontsize=8)
    axis.set_yticks(range(len(rows)), [row["label"] for row in rows], fontsize=8.5)
    axis.set_xlabel("requests per second with 99 % of all arrivals in time", fontsize=8.5, color=GREY)
    axis.set_title("azure-conv on h100/llama-3-8b, TTFT 1 s, TBT 50 ms (simulated)", fontsize=9.5, loc="left")
    save(drawn, "goodput.svg")


if __name__ == "__main__":
    step_times()
    goodput()
