"""Schedulers on one real trace: one run near capacity, and the highest rate of each that meets the SLO.

make bench NAME=baselines [ARGS="--policies sliding,tide"]; writes results/baselines.json and the tables of README.md,
here and at the top. --policies measures these anew and leaves the rows of the others.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

from slacktide.core.spec import parse_policies
from slacktide.report.tables import markdown
from slacktide.search.goodput import find_goodput
from slacktide.search.scenario import Scenario, prepare, run_policy

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
POLICIES = (
    "fcfs,orca,vllm-v0,vllm-v1,sarathi,sarathi:chunk_size=2048,sarathi-edf,sarathi-srpf,sglang,trtllm,"
    "qoserve,sliding,tide"
)
SLO = "ttft:1000,tbt:50"  # a first token within a second, then faster than anyone reads
RATE = 14.0  # requests/s: the best of today's can just carry it within the SLO, the others cannot


def scenario(profile: str, rate: float | None) -> Scenario:
    return Scenario(trace="azure-conv", profile=profile, slo=SLO, rate=rate)


def compare(profile: str, policies: str) -> list[dict[str, Any]]:
    """Records of one run per policy, all 16,495 requests; wall-clock figures dropped (they are the machine's)."""
    setup = prepare(scenario(profile, RATE))
    records = []
    for spec in parse_policies([policies]):
        record, _ = run_policy(setup, spec)
        for name in [n for n in record["summary"] if "decision" in n or n == "wall_time"]:
            record["summary"][name] = None
        records.append(record)
    return records


def goodput(profile: str, policies: str) -> list[dict[str, Any]]:
    """Highest rate with 99 % attainment: three starting points of the trace, 95 % interval."""
    found = find_goodput(scenario(profile, None), parse_policies([policies]), jobs=os.cpu_count() or 1)
    return [{key: record[key] for key in ("label", "rate", "rate_low", "rate_high")} for record in found]


def merged(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of both, those measured now in place of their older ones, in the order of POLICIES."""
    found = {row["label"]: row for row in [*before, *now]}
    return [found[spec.label] for spec in parse_policies([POLICIES]) if spec.label in found]


def goodput_table(results: dict[str, Any]) -> str:
    profiles = list(results["goodput"])
    lines = [f"| policy | {' | '.join(profiles)} |", "|---|" + "---|" * len(profiles)]
    for i, first in enumerate(results["goodput"][profiles[0]]):
        rows = [results["goodput"][profile][i] for profile in profiles]
        best = [max(r["rate"] for r in results["goodput"][profile]) for profile in profiles]
        cells = [
            f"{'**' if r['rate'] == b else ''}{r['rate']:.2f}{'**' if r['rate'] == b else ''} "
            f"({r['rate_low']:.2f} to {r['rate_high']:.2f})"
            for r, b in zip(rows, best, strict=True)
        ]
        lines.append(f"| {first['label']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def fill(path: Path, name: str, text: str) -> None:
    """Replace what stands between `<!-- name -->` and `<!-- /name -->`."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    head, _, rest = path.read_text().partition(begin)
    if not rest:
        raise SystemExit(f"{path.name}: no {begin}")
    path.write_text(f"{head}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profiles", default="h100/llama-3-8b,rtx-pro-6000/llama-3-8b")
    parser.add_argument("--policies", default=POLICIES, help="these alone; rows of the others stay (default: all)")
    args = parser.parse_args()
    profiles, path = args.profiles.split(","), HERE / "results" / "baselines.json"
    before = json.loads(path.read_text()) if path.exists() else {"compare": [], "goodput": {}}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=HERE, check=True)
    results: dict[str, Any] = {
        "commit": commit.stdout.strip(),
        "versions": {n: version(n) for n in ("slacktide", "numpy", "numba")} | {"python": platform.python_version()},
        "slo": SLO,
        "compare": merged(before["compare"], compare(profiles[0], args.policies)),
        "goodput": {
            profile: merged(before["goodput"].get(profile, []), goodput(profile, args.policies)) for profile in profiles
        },
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    fill(HERE / "README.md", "compare", markdown(results["compare"]))
    fill(HERE / "README.md", "goodput", goodput_table(results))
    fill(ROOT / "README.md", "goodput", goodput_table(results))


if __name__ == "__main__":
    main()
