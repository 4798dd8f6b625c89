"""Writes the tables and the verdicts of README.md, and the figure, from results/*.jsonl."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from arms import ARMS, rungs, setting, tuned_for
from claims import PAPER, claims
from common import LLAMA, RESULTS
from stats import Cells, mean_text, ratio_text

Rows = list[dict[str, Any]]
OURS, UNGUARDED = "sliding", "sliding, no guard"
PAIRS = (
    (UNGUARDED, "sarathi-edf"), (UNGUARDED, "greedy-dynamic"), (UNGUARDED, "qoserve"), (OURS, "sarathi-edf"),
    (OURS, "greedy-dynamic + guard"), (OURS, "qoserve + guard"), ("paper, clamped", "sarathi-edf"),
    ("paper, clamped", "qoserve"),
)  # fmt: skip
"""Arms held against each other on the same seeds: like with like, guard with guard."""


def load(name: str) -> Rows:
    """The rows of one file of results."""
    path = RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def tuning(rows: Rows) -> list[str]:
    """What the search chose, and how much it mattered."""
    from tune import ARMS as GRIDS
    from tune import text_of

    text = []
    for profile in dict.fromkeys(row["profile"] for row in rows):
        rates = {(row["policy"], row["data"]): row["rate"] or 0.0 for row in rows if row["profile"] == profile}
        datasets, tuned = list(dict.fromkeys(data for _, data in rates)), tuned_for(profile)
        body = []
        for arm in ARMS:
            policy, first, _ = GRIDS[arm]
            cells = []
            for data in [*datasets, "all"]:
                chosen = tuned.get(data, {}).get(arm)
                tried = [rates[text_of(policy, p), data] for p in first if (text_of(policy, p), data) in rates]
                if chosen is None:
                    cells.append("")
                elif data == "all":
                    cells.append(f"`{chosen.partition(':')[2]}`")
                else:
                    cells.append(f"{rates[chosen, data]:.2f} `{chosen.partition(':')[2]}` (from {min(tried):.2f})")
            body.append([arm, *cells])
        head = ["arm", *(f"{data}: best req/s, setting (worst of the first four)" for data in datasets), "one for all"]
        text.append(f"### Settings chosen on the tuning seed, {profile}\n\n" + table(head, body))
    return text


def goodput(found: Cells) -> list[str]:
    """Goodput per profile, data set and arm; ratios on the same seeds; the paper's numbers."""
    text = []
    for profile in found.profiles():
        datasets = [d for d in found.datasets(profile) if found.rows(setting("sarathi-edf", d, profile), d, profile)]
        body = [[arm, *(mean_text(found.rows(setting(arm, d, profile), d, profile)) for d in datasets)] for arm in ARMS]
        body += [
            [f"**{over} over {arm}**",
             *(ratio_text(found, setting(over, d, profile), setting(arm, d, profile), d, profile) for d in datasets)]
            for over, arm in PAIRS
        ]  # fmt: skip
        published = PAPER.get(profile, {})
        for i, name in enumerate(("Sarathi-EDF", "QoServe", "SlidingServe") if published else ()):
            body.append([f"paper: {name}", *(f"{published[d][i]:.2f}" for d in datasets)])
        for i, name in enumerate(("Sarathi-EDF", "QoServe") if published else ()):
            gains = [100 * (published[d][2] / published[d][i] - 1) for d in datasets]
            body.append([f"paper: SlidingServe over {name}", *(f"{g:+.0f} %" for g in gains)])
        seeds = found.seeds(profile)
        title = f"### Goodput, req/s: {profile} (held-out seeds: {seeds}; 95 % intervals; ratios on the same seeds)"
        text.append(f"{title}\n\n" + table(["arm", *datasets], body))
    return text


def ablation(found: Cells, heavy: Rows) -> list[str]:
    """The ladder per GPU: goodput and attainment at overload."""
    text = []
    met = means(heavy, "profile", "policy")
    for profile in dict.fromkeys(row["profile"] for row in heavy):
        rate = next(row["rate"] for row in heavy if row["profile"] == profile)
        body = []
        for rung, policy in rungs(profile).items():
            own = found.rows(policy, "mixed-v1", profile)
            late = f"{100 * met[profile, policy]:.1f}" if (profile, policy) in met else ""
            body.append([rung, f"`{policy}`", mean_text(own), late])
        head = ["rung", "policy", "goodput req/s", f"in time at {rate:g} req/s, %"]
        text.append(f"### Ablation, mixed-v1, {profile}\n\n" + table(head, body))
    return text


def means(rows: Rows, *keys: str) -> dict[tuple[Any, ...], float]:
    """Mean attainment by those columns."""
    groups = defaultdict(list)
    for row in rows:
        groups[tuple(row[k] for k in keys)].append(row["attainment"])
    return {key: float(np.mean(values)) for key, values in groups.items()}


def shares(rows: Rows) -> list[str]:
    """Late requests against the rate."""
    text, found = [], means(rows, "data", "policy", "rate")
    for data in dict.fromkeys(row["data"] for row in rows):
        rates = sorted({r for d, _, r in found if d == data})
        body = []
        for arm in ARMS:
            keys = [(data, setting(arm, data, LLAMA), r) for r in rates]
            body.append([arm, *(f"{100 * (1 - found[key]):.1f}" if key in found else "" for key in keys)])
        text.append(f"### Late requests in % against the rate, {data}, {LLAMA}\n\n"
                    + table(["arm", *(f"{r:g} req/s" for r in rates)], body))  # fmt: skip
    return text


def transient(rows: Rows) -> list[str]:
    """Late requests under rates that switch, and the figure."""
    from figures import transient_figure

    found, names = means(rows, "policy"), {setting(arm, "mixed-v1", LLAMA): arm for arm in ARMS}
    body = [[names[p], f"{100 * (1 - a):.1f}"] for (p,), a in found.items() if p in names]
    low, high = rows[0]["low"], rows[0]["high"]
    transient_figure([row for row in rows if row["policy"] in names], names, RESULTS / "transient.png")
    return [
        f"### Transient overload, {low:.2f} and {high:.2f} req/s every 2 minutes, mixed-v1\n\n"
        + table(["arm", "late requests, %"], body),
        "![late requests over time](results/transient.png)",
    ]


def sensitivity(rows: Rows) -> list[str]:
    """Windows, alpha, beta, errors of the predictor."""
    found = means(rows, "label", "policy", "data")
    points = {row["data"]: row["rate"] for row in rows}
    body = [
        [label, f"`{p}`", *(f"{100 * found[label, p, d]:.1f}" if (label, p, d) in found else "" for d in points)]
        for label, p in dict.fromkeys((row["label"], row["policy"]) for row in rows)
    ]
    return ["### Windows, alpha, beta, errors of the predictor: requests in time, %\n\n"
            + table(["varied", "policy", *(f"{d}, {r:g} req/s" for d, r in points.items())], body)]  # fmt: skip


def window(rows: Rows) -> list[str]:
    """The clamped window where T_cur <= T_next, and where it is longer."""
    body = []
    for row in rows:
        for name, words in (("short", "T_cur <= T_next"), ("long", "T_cur > T_next")):
            body.append(
                [f"{row['data']}, {row['rate']:g} req/s", words, f"{row[name]}", f"{row[f'{name}_searched']}",
                 f"{row[f'{name}_3_percent']}", f"{100 * row[f'{name}_mean']:.1f}",
                 f"{100 * row[f'{name}_mean_true']:.1f}", f"{row[f'{name}_split']}"]
            )  # fmt: skip
    head = ["load", "case", "decisions", "searched", "of these: another split saves 3 %",
            "mean saving believed, %", "in truth, %", "decisions that the policy splits"]  # fmt: skip
    return [f"### Is the window greedy where T_cur <= T_next? {LLAMA}, `{rows[0]['policy']}`\n\n" + table(head, body)]


def binding(rows: Rows) -> list[str]:
    """What windows meet near goodput."""
    body = [
        [f"{row['data']}, {row['profile']}, {row['rate']:g} req/s", f"`{row['policy']}`", f"{row['decisions']}",
         *(f"{100 * row[name] / row['decisions']:.1f}" for name in ("capped", "whole", "short", "split"))]
        for row in rows
    ]  # fmt: skip
    head = ["load", "policy", "decisions on a window", "at the cap, %", "whole queue fits, %", "T_cur <= T_next, %",
            "split, %"]  # fmt: skip
    return ["### What leaves a window nothing to split, near goodput\n\n" + table(head, body)]


def timing(rows: Rows) -> list[str]:
    """Decision times and the bars they are held to."""
    body = []
    for row in rows:
        paths = max(row["paths"], key=row["paths"].get)
        body.append(
            [f"`{row['policy']}`", row["group"], f"{row['decisions']} ({paths})", f"{row['cpu']['median_us']:.0f}",
             f"{row['cpu']['p99_us']:.0f}", f"{row['wall']['p99_us']:.0f}", f"{row['step_ms']:.0f}",
             f"{100 * row['share_of_step']:.2f}", f"{100 * (row['share_p99'] or 0):.2f}"]
        )  # fmt: skip
    head = ["policy", "live requests", "decisions (mostly)", "median us", "P99 us", "P99 us by the wall", "step ms",
            "share of step %", "P99 of shares %"]  # fmt: skip
    parts = [
        [f"`{row['policy']}`", row["group"], name, f"{part['median_us']:.0f}", f"{part['p99_us']:.0f}",
         f"{part['calls']:g}"]
        for row in rows if row["policy"] == "sliding" for name, part in row["parts"].items()
    ]  # fmt: skip
    load = max(row["machine_load"] for row in rows)
    busy = "" if load < 0.6 else f" **Measured on a busy machine ({load:.1f} runnable threads a core): provisional.**"
    title = f"### Decision times. Bars: 0.3 ms in the median at 200 live with the constructor, 5 % of a step.{busy}"
    return [
        f"{title}\n\n" + table(head, body),
        table(["policy", "live", "part", "median us", "P99 us", "calls"], parts),
    ]


def render(here: Path) -> None:
    """README.md's parts between its marks, from what results there are."""
    names = ("tune", "goodput", "overload", "transient", "window", "binding", "curves", "sensitivity", "timing")
    rows = {name: load(name) for name in names}
    found, text = Cells(rows["goodput"]), tuning(rows["tune"])
    text += goodput(found) + ablation(found, rows["overload"])
    parts = {
        "transient": transient,
        "curves": shares,
        "window": window,
        "binding": binding,
        "sensitivity": sensitivity,
        "timing": timing,
    }
    for name, part in parts.items():
        text += part(rows[name]) if rows[name] else []
    readme = here / "README.md"
    whole = between(readme.read_text(encoding="utf-8"), "results", "\n\n".join(text))
    readme.write_text(between(whole, "claims", claims(found, rows)), encoding="utf-8")


def between(whole: str, mark: str, text: str) -> str:
    """The document with `text` between the two marks."""
    before, rest = whole.split(f"<!-- {mark} -->")
    after = rest.split(f"<!-- /{mark} -->")[1]
    return f"{before}<!-- {mark} -->\n{text}\n<!-- /{mark} -->{after}"
