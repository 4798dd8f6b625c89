"""Writes the tables of README.md, and the figures, from results/*.jsonl."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

PAPER = {
    "2x-rtx-3090/qwen2.5-7b": {
        "sharegpt": (2.80, 3.20, 3.50), "arxiv-v1": (0.60, 0.85, 1.00), "arxiv-v2": (0.35, 0.50, 0.65),
        "mixed-v1": (1.50, 1.70, 1.95), "mixed-v2": (1.30, 1.50, 1.70),
    },
    "2x-rtx-3090/llama-3-8b": {
        "sharegpt": (2.30, 3.00, 3.30), "arxiv-v1": (0.45, 0.80, 0.95), "arxiv-v2": (0.25, 0.40, 0.50),
        "mixed-v1": (1.25, 1.55, 1.85), "mixed-v2": (1.10, 1.35, 1.55),
    },
}  # fmt: skip
"""Goodput in req/s of Sarathi-EDF, QoServe, SlidingServe: arXiv 2606.05933, figure 4."""


def load(results: Path, name: str) -> list[dict[str, Any]]:
    path = results / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def rate(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if row["rate"] is None:
        return "any"
    return f"{row['rate']:.2f} ({row['rate_low']:.2f}-{row['rate_high']:.2f})"


def goodput(rows: list[dict[str, Any]]) -> list[str]:
    text = []
    for profile in dict.fromkeys(row["profile"] for row in rows):
        own = {(row["data"], row["policy"]): row for row in rows if row["profile"] == profile}
        datasets, policies = list(dict.fromkeys(d for d, _ in own)), list(dict.fromkeys(p for _, p in own))
        body = [[f"`{p}`", *(rate(own.get((d, p))) for d in datasets)] for p in policies]
        ratios = []
        for name, over in (("greedy-dynamic", "sliding:guard=0"), ("qoserve", "sliding:guard=0"),
                           ("sarathi-edf", "sliding"), ("qoserve:guard=0.35", "sliding"),
                           ("greedy-dynamic:guard=0.35", "sliding")):  # fmt: skip
            cells = []
            for d in datasets:
                a, b = own.get((d, over)), own.get((d, name))
                cells.append(
                    f"{100 * (a['rate'] / b['rate'] - 1):+.0f} %" if a and b and a["rate"] and b["rate"] else ""
                )
            ratios.append([f"`{over}` over `{name}`", *cells])
        published = []
        for i, name in enumerate(("Sarathi-EDF", "QoServe", "SlidingServe")):
            if profile in PAPER:
                published.append([f"paper: {name}", *(f"{PAPER[profile][d][i]:.2f}" for d in datasets)])
        if profile in PAPER:
            for i, name in ((0, "Sarathi-EDF"), (1, "QoServe")):
                gains = [100 * (PAPER[profile][d][2] / PAPER[profile][d][i] - 1) for d in datasets]
                published.append([f"paper: SlidingServe over {name}", *(f"{g:+.0f} %" for g in gains)])
        text.append(f"### Goodput, req/s: {profile}\n\n" + table(["policy", *datasets], body + ratios + published))
    return text


def mean_by(rows: list[dict[str, Any]], *keys: str) -> dict[tuple[Any, ...], float]:
    groups = defaultdict(list)
    for row in rows:
        groups[tuple(row[k] for k in keys)].append(row["attainment"])
    return {key: float(np.mean(values)) for key, values in groups.items()}


def render(here: Path) -> None:
    results, text = here / "results", list[str]()
    text += goodput(load(results, "goodput"))
    rungs, heavy = load(results, "ladder"), mean_by(load(results, "overload"), "policy")
    if rungs:
        body = [[f"`{r['policy']}`", rate(r), f"{100 * heavy[r['policy'],]:.1f}" if (r["policy"],) in heavy else ""]
                for r in rungs]  # fmt: skip
        text.append("### Ablation, mixed-v1, 2x-rtx-3090/qwen2.5-7b\n\n"
                    + table(["arm", "goodput req/s", "in time at overload, %"], body))  # fmt: skip
    steps = load(results, "transient")
    if steps:
        found = mean_by(steps, "policy")
        body = [[f"`{p}`", f"{100 * (1 - a):.1f}"] for (p,), a in found.items()]
        low, high = steps[0]["low"], steps[0]["high"]
        text.append(f"### Transient overload, {low:.2f} and {high:.2f} req/s every 2 minutes, mixed-v1\n\n"
                    + table(["policy", "late requests, %"], body))  # fmt: skip
        text.append("![late requests over time](results/transient.png)")
        transient_figure(steps, results / "transient.png")
    curve = load(results, "curves")
    if curve:
        found = mean_by(curve, "data", "policy", "rate")
        for data in dict.fromkeys(row["data"] for row in curve):
            rates = sorted({r for d, _, r in found if d == data})
            policies = list(dict.fromkeys(row["policy"] for row in curve))
            late = {key: f"{100 * (1 - value):.1f}" for key, value in found.items()}
            body = [[f"`{p}`", *(late.get((data, p, r), "") for r in rates)] for p in policies]
            text.append(f"### Late requests in % against the rate, {data}, 2x-rtx-3090/llama-3-8b\n\n"
                        + table(["policy", *(f"{r:g} req/s" for r in rates)], body))  # fmt: skip
    sensitive = load(results, "sensitivity")
    if sensitive:
        found = mean_by(sensitive, "label", "policy", "data")
        datasets = list(dict.fromkeys(row["data"] for row in sensitive))
        keys = list(dict.fromkeys((row["label"], row["policy"]) for row in sensitive))
        met = {key: f"{100 * value:.1f}" for key, value in found.items()}
        body = [[label, f"`{p}`", *(met.get((label, p, d), "") for d in datasets)] for label, p in keys]
        points = {row["data"]: row["rate"] for row in sensitive}
        text.append("### Windows, alpha, beta, errors of the predictor: requests in time, %\n\n"
                    + table(["varied", "policy", *(f"{d}, {points[d]:g} req/s" for d in datasets)], body))  # fmt: skip
    times = [row for row in load(results, "timing") if "part" in row]
    if times:
        by = {(row["part"], row["live"]): row for row in times}
        lives = sorted({row["live"] for row in times})
        body = []
        for part in dict.fromkeys(row["part"] for row in times):
            cells = []
            for n in lives:
                row = by.get((part, n))
                path = max(row["paths"], key=row["paths"].get) if row else ""
                cells.append(f"{row['median_us']:.0f} us, {path}, step {row['step_ms']:.0f} ms" if row else "")
            body.append([part, *cells])
        text.append("### Median time of a decision (rough: a shared machine)\n\n"
                    + table(["part", *(f"{n} live" for n in lives)], body))  # fmt: skip
        runs = [row for row in load(results, "timing") if "part" not in row]
        text += [f"- sustained overload ({r['rate']:g} req/s), `{r['policy']}`: median {r['median_us']:.0f} us, "
                 f"P99 {r['p99_us']:.0f} us, mean step {1e3 * r['end'] / r['steps']:.0f} ms" for r in runs]  # fmt: skip
    readme = here / "README.md"
    whole = readme.read_text(encoding="utf-8")
    before, rest = whole.split("<!-- results -->")
    after = rest.split("<!-- /results -->")[1]
    readme.write_text(
        f"{before}<!-- results -->\n" + "\n\n".join(text) + f"\n<!-- /results -->{after}", encoding="utf-8"
    )


def transient_figure(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    fig, axis = plt.subplots(figsize=(9, 4))
    minutes = np.arange(40) / 2 + 0.25
    for policy in dict.fromkeys(row["policy"] for row in rows):
        late = np.mean([row["late_by_half_minute"] for row in rows if row["policy"] == policy], axis=0)
        axis.plot(minutes, 100 * late, label=policy, linewidth=1.2)
    for part in range(1, 10, 2):
        axis.axvspan(2 * part, 2 * part + 2, color="0.9", zorder=0)
    axis.set(xlabel="arrival, minutes (grey: high rate)", ylabel="late requests, %", xlim=(0, 20), ylim=(0, 100))
    axis.legend(fontsize=7, ncols=2, loc="upper center")
    fig.tight_layout()
    fig.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(fig)
