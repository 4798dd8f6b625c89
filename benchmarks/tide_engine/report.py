"""Tables of run.py's results for README.md: measured goodput, ratios paired by round, the simulator's word on each."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from run import ARMS, HERE, LOADS, MEASURED, TARGET, Place, Search, read_runs, workload
from scipy.special import stdtrit

from slacktide.core.spec import parse_policies
from slacktide.metrics.summary import summarize
from slacktide.profiling.profile_file import read_profile
from slacktide.profiling.profiles import Profile
from slacktide.search.truth import twin

BASELINES = tuple(arm for arm in ARMS if arm != "tide")
DEFAULT_BUDGET = 2048
"""vLLM 0.32's own max_num_batched_tokens for a server on a CPU."""


def write_report(out: Path, rounds: int, seconds: float, readme: Path | None = None) -> None:
    """README's part and results/report.json."""
    told = json.loads((MEASURED / "load.json").read_text()) if (MEASURED / "load.json").exists() else None
    profile = read_profile(MEASURED / "profile.json") if told else None
    runs = read_runs(out)
    found: dict[str, Any] = {}
    for load in LOADS:
        for arm in ARMS:
            measured, simulated = [], []
            for number in range(rounds):
                rows = runs.get(Place(load, number, arm).key)
                goodput = Search(told["capacity"][load], rows).goodput if told and rows else None
                measured.append(goodput)
                if goodput is not None:
                    simulated.append(predicted(profile, told, load, number, arm, seconds))
            found[f"{load}/{arm}"] = {"measured": measured, "simulated": simulated}
    lines = text(found)
    print("\n".join(lines))
    if out.exists():
        (out / "report.json").write_text(json.dumps(found, indent=1) + "\n")
    path = readme or HERE / "README.md"
    before, mark, rest = path.read_text().partition("<!-- results -->")
    if not mark:
        raise SystemExit(f"{path}: no <!-- results --> mark")
    _, end, after = rest.partition("<!-- /results -->")
    path.write_text("\n".join([before + mark, *lines, end + after]))


def predicted(
    profile: Profile | None, told: dict[str, Any] | None, load: str, number: int, arm: str, seconds: float
) -> float:
    """Goodput of the same search in the simulator."""
    assert profile is not None
    assert told is not None
    policy, budget = ARMS[arm]
    (spec,) = parse_policies([policy or "vllm-v1"])
    search = Search(told["capacity"][load], [])
    while search.rate is not None:
        work = workload(load, number, search.rate, seconds, told["targets"][load])
        log = twin(work, profile, spec, {"max_num_batched_tokens": budget or DEFAULT_BUDGET})
        search.tell(float(summarize(log)["attainment"]), False)
    return search.goodput or 0.0


def ratio(ours: list[float | None], other: list[float | None]) -> tuple[float, float, float] | None:
    """Geometric mean of the rounds' ratios with Student's 95 % interval; None without a common round that has one."""
    pairs = [(a, b) for a, b in zip(ours, other, strict=True) if a and b]
    if not pairs:
        return None
    logs = np.log([a / b for a, b in pairs])
    if logs.size == 1:
        return float(np.exp(logs[0])), 0.0, math.inf
    half = stdtrit(logs.size - 1, 0.975) * logs.std(ddof=1) / math.sqrt(logs.size)
    return tuple(float(np.exp(v)) for v in (logs.mean(), logs.mean() - half, logs.mean() + half))  # type: ignore[return-value]


def text(found: dict[str, Any]) -> list[str]:
    """Lines of Markdown."""
    if not any(value is not None for cell in found.values() for value in cell["measured"]):
        return ["Not run yet: `python benchmarks/tide_engine/run.py MODEL` on an idle machine, then `--report`."]
    lines = [
        f"Requests/s with {100 * TARGET:.0f} % in time, one figure a round; `simulated`: mean of the same searches in "
        "the simulator, on the profile that was fitted here.",
        "",
        "| load | arm | measured | mean | simulated | tide / arm |",
        "|---|---|---|---:|---:|---:|",
    ]
    for load in LOADS:
        ours = found[f"{load}/tide"]["measured"]
        for arm in ARMS:
            cell = found[f"{load}/{arm}"]
            values = [v for v in cell["measured"] if v is not None]
            each = ", ".join("-" if v is None else f"{v:.2f}" for v in cell["measured"])
            beside = ratio(ours, cell["measured"]) if arm != "tide" else None
            shown = "" if beside is None else f"{beside[0]:.2f}"
            if beside is not None and math.isfinite(beside[2]):  # one round has no interval
                shown += f" ({beside[1]:.2f}-{beside[2]:.2f})"
            mean = f"{np.mean(values):.2f}" if values else "-"
            simulated = f"{np.mean(cell['simulated']):.2f}" if cell["simulated"] else "-"
            lines.append(f"| {load} | {arm} | {each} | {mean} | {simulated} | {shown} |")
    return lines
