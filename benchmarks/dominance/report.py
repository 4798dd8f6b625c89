"""Writes the tables of README.md from results/*.jsonl; cells that are not measured yet are shown as such."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from cells import Cell, biased, fraction, load_of, varying
from policies import BIASED, FAMILIES, THROUGHPUT, TIDE, version

from slacktide.core.latency_families import SCENES

Row = dict[str, Any]
MARKS = ("<!-- results -->", "<!-- /results -->")
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""t(0.975, n - 1) for n seeds."""
NOT_YET = "-"


class Results:
    """Rows of all files, of those for one piece the newest; `stale`: whose rows are in part of another version."""

    def __init__(self, folder: Path) -> None:
        self.rows: dict[tuple[str, str, str], Row] = {}
        for side in ("baselines", "bounds", TIDE):
            path = folder / f"{side}.jsonl"
            for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else ():
                if line.endswith("\n"):
                    row = json.loads(line)
                    self.rows[row["kind"], row["cell"], row["family"]] = row
        self.stale = [
            family for family in (TIDE, "bound")
            if any(row["family"] == family and row["version"] != version(family) for row in self.rows.values())
        ]  # fmt: skip
        self.short = sum(
            row.get("grid", 0) < len(FAMILIES[row["family"]])
            for row in self.rows.values() if row["kind"] == "goodput" and row["family"] in FAMILIES
        )  # fmt: skip
        """Rows of rivals that were tuned on a shorter grid than today's."""
        causes = folder / "causes.json"
        self.causes: dict[str, str] = json.loads(causes.read_text(encoding="utf-8")) if causes.exists() else {}

    def get(self, kind: str, cell: Cell, family: str) -> Row | None:
        """The row of a piece, or None."""
        return self.rows.get((kind, cell.name, family))

    def rates(self, cell: Cell, family: str, kind: str = "goodput") -> list[float] | None:
        """Goodput per test seed."""
        row = self.get(kind, cell, family)
        return None if row is None else row["rates"]

    def best(self, cell: Cell) -> tuple[str, list[float]] | None:
        """The rival with the highest mean goodput, once all are measured."""
        found = {family: self.rates(cell, family) for family in FAMILIES}
        if any(rates is None for rates in found.values()):
            return None
        name = max(found, key=lambda family: sum(found[family] or ()))
        return name, found[name] or []

    def chosen(self, cell: Cell) -> tuple[str, list[float]] | None:
        """The rival that did best on the tuning slice, once all are measured: the one that a user would have taken."""
        tuned = {family: row.get("tuned_rate") for family in FAMILIES if (row := self.get("goodput", cell, family))}
        if len(tuned) < len(FAMILIES):
            return None
        name = max(tuned, key=lambda family: tuned[family] or 0.0)
        return name, self.rates(cell, name) or []


def mean(values: Iterable[float]) -> float:
    """Arithmetic mean."""
    return float(np.mean(list(values)))


def ratio(ours: list[float], theirs: list[float]) -> tuple[float, float, float] | None:
    """Geometric mean over the seeds of ours / theirs, with its 95 % interval (Student, paired); None with a zero."""
    if min([*ours, *theirs]) <= 0:
        return None
    logs = np.log(np.array(ours) / np.array(theirs))
    half = STUDENT.get(len(logs), 1.96) * float(logs.std(ddof=1)) / math.sqrt(len(logs)) if len(logs) > 1 else 0.0
    middle = float(logs.mean())
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table and an empty line."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def number(value: float | None) -> str:
    """A rate."""
    return NOT_YET if value is None else f"{value:.2f}"


def geomean(values: Iterable[float]) -> float:
    """Geometric mean."""
    return math.exp(mean(math.log(v) for v in values))


# ---- parts -----------------------------------------------------------------------------------------------------------


def goodput(results: Results, cells: list[Cell], *, bounds: bool) -> list[str]:
    """One line per cell."""
    rows = []
    for cell in cells:
        best, ours = results.best(cell), results.rates(cell, TIDE)
        line = [cell.profile, cell.load, cell.form]
        for family in FAMILIES:
            rates = results.rates(cell, family)
            text = NOT_YET if rates is None else number(mean(rates))
            line.append(f"**{text}**" if best is not None and best[0] == family else text)
        line.append(NOT_YET if ours is None else number(mean(ours)))
        found = ratio(ours, best[1]) if ours is not None and best is not None else None
        line.append(NOT_YET if found is None else f"{found[0]:.3f} ({found[1]:.2f}-{found[2]:.2f})")
        if bounds:
            limit = results.get("bound", cell, "bound")
            top = ours if ours is not None else best[1] if best is not None else None
            line += [share(top, None if limit is None else limit[name]) for name in ("bound", "sustained")]
        rows.append(line)
    head = ["GPU", "load", "SLO", *FAMILIES, TIDE, "tide / best"]
    return table(head + (["of bound", "of sustained"] if bounds else []), rows)


def share(rates: list[float] | None, limits: list[float | None] | None) -> str:
    """Mean rate over mean limit."""
    if rates is None or limits is None or any(not limit for limit in limits):
        return NOT_YET
    return f"{mean(rates) / mean(x for x in limits if x):.2f}"


def summary(results: Results, cells: list[Cell]) -> list[str]:
    """Geometric means, worst cells, and cells that miss."""
    done = [c for c in cells if results.best(c) is not None]
    both = [c for c in done if results.rates(c, TIDE) is not None]
    lines = [f"Cells measured: {len(done)} of {len(cells)} for all baselines, {len(both)} with `tide`."]
    lines += [f"Some rows of `{family}` were measured with an earlier version of it." for family in results.stale]
    if results.short:
        lines.append(f"{results.short} rows of baselines were tuned on the front of their grid only.")
    per_cell = {
        c: found for c in both if (found := ratio(results.rates(c, TIDE) or [], (results.best(c) or ("", []))[1]))
    }
    zero = [c for c in both if c not in per_cell]
    if zero:
        text = "; ".join(f"{c.name}: tide {goodputs(results, c, TIDE)}, best {goodputs(results, c)}" for c in zero)
        lines.append(f"Left out of the means, a goodput of 0 on some seed: {text}.")
    if not per_cell:
        return [*lines, ""]
    values = {c: found[0] for c, found in per_cell.items()}
    worst = sorted(values, key=lambda c: values[c])[:3]
    lines += [
        f"`tide` over the best baseline of each cell: geometric mean {geomean(values.values()):.3f}, lowest "
        + ", ".join(f"{values[c]:.3f} ({c.name})" for c in worst) + ".",
        _over_the_chosen(results, both),
        "",
    ]  # fmt: skip
    rows = []
    for family in FAMILIES:
        own = [f[0] for c in both if (f := ratio(results.rates(c, TIDE) or [], results.rates(c, family) or []))]
        nothing = sum(mean(results.rates(c, family) or [0.0]) == 0 for c in both)
        wins = sum((results.best(c) or ("",))[0] == family for c in both)
        rows.append([family, f"{geomean(own):.3f}" if own else NOT_YET, f"{min(own):.3f}" if own else NOT_YET,
                     str(len(own)), str(nothing), str(wins)])  # fmt: skip
    head = [
        "baseline",
        "tide / baseline, geometric mean",
        "lowest",
        "cells",
        "cells where it serves nothing",
        "cells where it is the best",
    ]
    lines += [*table(head, rows), *missed(results, per_cell)]
    return lines


def _over_the_chosen(results: Results, cells: list[Cell]) -> str:
    """`tide` against the rival that did best on each cell's tuning slice: no choice in hindsight."""
    found = {c: ratio(results.rates(c, TIDE) or [], (results.chosen(c) or ("", []))[1]) for c in cells}
    values = {c: f[0] for c, f in found.items() if f is not None}
    if not values:
        return "Those that did best on the tuning slices serve nothing on a test slice of any cell."
    worst = min(values, key=lambda c: values[c])
    return (
        f"Over the one that did best on the cell's tuning slice, which is what can be known beforehand: geometric mean "
        f"{geomean(values.values()):.3f}, lowest {values[worst]:.3f} ({worst.name}), {len(values)} cells."
    )


def goodputs(results: Results, cell: Cell, family: str | None = None) -> str:
    """A policy's rates on the seeds of a cell, or the best rival's."""
    rates = results.rates(cell, family) if family else (results.best(cell) or ("", []))[1]
    return "/".join(number(r) for r in rates or [])


def missed(results: Results, per_cell: dict[Cell, tuple[float, float, float]]) -> list[str]:
    """Cells where `tide` is not ahead, with what is known of the cause."""
    behind = {c: found for c, found in per_cell.items() if found[0] < 1}
    if not behind:
        return ["No measured cell has `tide` below the best baseline.", ""]
    rows = [
        [c.name, (results.best(c) or ("",))[0], f"{low:.3f} ({a:.2f}-{b:.2f})", "yes" if b < 1 else "no",
         results.causes.get(c.name, "not looked into yet")]
        for c, (low, a, b) in sorted(behind.items(), key=lambda item: item[1][0])
    ]  # fmt: skip
    return [
        "Cells below the best baseline:",
        "",
        *table(["cell", "best", "tide / best", "beyond its interval", "cause"], rows),
    ]


def overload(results: Results, cells: list[Cell]) -> list[str]:
    """Mean attainment per family; `tide` against the best of each cell."""
    families = [*FAMILIES, TIDE]
    found: list[tuple[Cell, dict[str, list[float]]]] = []
    for cell in cells:
        own = {f: row["attainment"] for f in families if (row := results.get("overload", cell, f)) is not None}
        if all(f in own for f in FAMILIES):
            found.append((cell, own))
    if not found:
        return ["Not measured yet.", ""]
    rows = [[f, *(f"{100 * mean(own[f][k] for _, own in found if f in own):.1f}" if any(f in own for _, own in found)
                  else NOT_YET for k in (0, 1))] for f in families]  # fmt: skip
    lines = [f"Mean share of requests in time, %, over {len(found)} cells:", ""]
    lines += table(["policy", "at 1.5 times the best baseline's goodput", "at 2 times"], rows)
    both = [(c, own) for c, own in found if TIDE in own]
    if both:
        gains = [[100 * (own[TIDE][k] - max(own[f][k] for f in FAMILIES)) for _, own in both] for k in (0, 1)]
        low = [int(np.argmin(g)) for g in gains]
        lines += [
            "`tide` against the best baseline of each cell, points: "
            + "; ".join(f"{x} times: mean {mean(g):+.1f}, lowest {min(g):+.1f} ({both[i][0].name})"
                        for x, g, i in zip(("1.5", "2"), gains, low, strict=True)) + f" ({len(both)} cells).",
            "",
        ]  # fmt: skip
    return lines


def throughput(results: Results) -> list[str]:
    """Requests per second without an SLO."""
    cells: dict[str, Row] = {}
    for (kind, name, _), row in results.rows.items():
        if kind == "throughput":
            cells.setdefault(name, row)
    rows = []
    for name, row in cells.items():
        own = {f: results.rows.get(("throughput", name, f)) for f in (*THROUGHPUT, TIDE)}
        line = [row["profile"], row["load"], *(number(r["rate"]) if r else NOT_YET for r in own.values())]
        rivals = [r["rate"] for f, r in own.items() if r and f != TIDE]
        ours = own[TIDE]
        line.append(f"{ours['rate'] / max(rivals):.3f}" if ours and len(rivals) == len(THROUGHPUT) else NOT_YET)
        rows.append(line)
    if not rows:
        return ["Not measured yet.", ""]
    return table(["GPU", "prompt/output tokens", *THROUGHPUT, TIDE, "tide / better"], rows)


def bias(results: Results) -> list[str]:
    """Goodput with a wrong belief, as a share of the policy's own with 0.9 to 1.1 in that scene."""
    rows = []
    for cell in dict.fromkeys((c.profile, c.load, c.form) for c in biased()):
        for scene in SCENES:
            for family in (*BIASED, TIDE):
                line = [" ".join(cell), scene, family]
                for factor in (0.7, 0.9, 1.1, 1.3):
                    rates = results.rates(Cell(*cell, (scene, factor)), family, "biased")
                    line.append(NOT_YET if rates is None else number(mean(rates)))
                if set(line[3:]) != {NOT_YET}:
                    rows.append(line)
    if not rows:
        return ["Not measured yet.", ""]
    return table(["cell", "scene", "policy", "x0.7", "x0.9", "x1.1", "x1.3"], rows)


def render(here: Path) -> None:
    """Write the tables between the marks of README.md."""
    results, cells = Results(here / "results"), fraction()
    targets = sorted(
        {
            f"{c.load} {c.form}: {c.slo}"
            for c in cells
            if load_of(c) and c.profile not in ("rtx-4090", "l40s", "2x-rtx-3090")
        }
    )
    lines = [
        "## Summary", "", *summary(results, cells),
        "## Goodput", "",
        "Requests/s at 99 % in time, mean of the test seeds; the best baseline in bold. `tide / best`: geometric mean",
        "of the seeds' ratios with a paired 95 % interval. `of bound`, `of sustained`: what `tide` (before it is",
        "measured, the best baseline) reaches of the limits that no policy can pass.", "",
        *goodput(results, cells, bounds=True),
        "## Overload", "", *overload(results, cells),
        "## Throughput without SLO", "", *throughput(results),
        "## Time-varying loads", "", *goodput(results, varying(), bounds=True),
        "## A belief that is off", "", "Goodput on one test seed; the belief's times of one scene are multiplied.", "",
        *bias(results),
        "## Targets", "", *(f"- {t}" for t in targets), "",
    ]  # fmt: skip
    readme = here / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else "\n".join(["# Dominance table", "", *MARKS, ""])
    head, rest = text.split(MARKS[0])
    tail = rest.split(MARKS[1])[1]
    readme.write_text(head + MARKS[0] + "\n" + "\n".join(lines) + MARKS[1] + tail, encoding="utf-8")
