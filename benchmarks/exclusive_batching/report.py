"""Fills the tables of README.md from results/, and prints what misses its goal."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student

HERE = Path(__file__).parent
RTX, H200 = "rtx-pro-6000/qwen3-8b", "h200/qwen3-8b"
LOADS = ("128/1024", "512/512", "1024/128", "512/256")
CONCURRENCY = (32, 256, 512, 1024, 2048)

# Requests per second, maximal concurrency 2,048, from the authors' repository (figure data, and logs of 512/256).
PUBLISHED = {
    (RTX, "128/1024"): {"vllm-v0": 5.58, "vllm-v1": 5.36, "eb": 6.04},
    (RTX, "512/512"): {"vllm-v0": 8.37, "vllm-v1": 7.72, "eb": 9.21},
    (RTX, "1024/128"): {"vllm-v0": 14.10, "vllm-v1": 10.36, "eb": 14.70},
    (H200, "128/1024"): {"vllm-v0": 15.63, "vllm-v1": 13.85, "eb": 13.58},
    (H200, "512/512"): {"vllm-v0": 20.83, "vllm-v1": 20.26, "eb": 20.41},
    (H200, "1024/128"): {"vllm-v0": 28.32, "vllm-v1": 28.55, "eb": 28.72},
}
PUBLISHED_512_256 = {  # c -> (v1, EB, EB+); the RTX PRO 6000 in req/s, the H200 in total tok/s
    RTX: {32: (6.31, 4.97, 6.32), 256: (14.23, 15.90, 15.53), 512: (12.06, 16.55, 17.27), 1024: (12.66, 16.64, 16.52),
          2048: (12.64, 17.06, 17.46)},
    H200: {32: (11584, 8609, 11586), 512: (27464, 27207, 27460), 2048: (26368, 27198, 27043)},
}  # fmt: skip


def cells(part: str) -> dict[str, Any]:
    path = HERE / "results" / f"{part}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def best(data: dict[str, Any], key: str) -> dict[str, Any] | None:
    """The best setting of a policy in a cell."""
    found = [v for k, v in data.items() if k.startswith(key + " ")]
    return max(found, key=lambda v: v["rps"]) if found else None


def percent(new: float, old: float) -> str:
    return f"{100 * (new / old - 1):+.1f} %"


def grid_table(part: str, policies: tuple[str, ...], profiles: tuple[str, ...]) -> str:
    """Throughput of every policy and eb-plus against the better of vllm-v1 and eb-adaptive."""
    data = cells(part)
    names = [p for p in policies if any(f" {p} B=" in k for k in data)]
    lines = [
        f"| profile | load | c | {' | '.join(names)} | eb-adaptive / vllm-v1 | eb-plus / better |",
        f"|---|---|---{'|---' * len(names)}|---|---|",
    ]
    for profile in profiles:
        for load in LOADS:
            for c in CONCURRENCY:
                row = {p: best(data, f"{profile} {load} c={c} {p}") for p in names}
                if any(v is None for v in row.values()):
                    continue
                rate = {p: v["rps"] for p, v in row.items() if v is not None}
                better = max(rate["vllm-v1"], rate["eb-adaptive"])
                plus = percent(rate["eb-plus"], better) if "eb-plus" in rate else ""
                figures = " | ".join(f"{rate[p]:.2f}" for p in names)
                gain = percent(rate["eb-adaptive"], rate["vllm-v1"])
                lines.append(f"| {profile} | {load} | {c:,} | {figures} | {gain} | {plus} |")
    return "\n".join(lines)


def published_table() -> str:
    """Ratios EB / v1 beside the published ones, with the differences in points."""
    grid, affine, inter = cells("grid"), cells("affine"), cells("interference")
    lines = [
        "| profile | load | c | published EB / v1 | tables | apart | theta 0.8 | authors' affine | interference 1.0 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]

    def ratio(data: dict[str, Any], profile: str, load: str, c: int, policy: str = "eb-adaptive") -> float | None:
        eb, v1 = (best(data, f"{profile} {load} c={c} {p}") for p in (policy, "vllm-v1"))
        return None if eb is None or v1 is None else eb["rps"] / v1["rps"] - 1

    def text(value: float | None) -> str:
        return "" if value is None else f"{100 * value:+.1f} %"

    targets = [(p, load, 2048, v["eb"] / v["vllm-v1"] - 1) for (p, load), v in PUBLISHED.items()]
    targets += [(p, "512/256", c, v[1] / v[0] - 1) for p, rows in PUBLISHED_512_256.items() for c, v in rows.items()]
    for profile, load, c, theirs in targets:
        ours = ratio(grid, profile, load, c)
        calm = ratio(inter, f"{H200}?interference=1.0", load, c) if profile == H200 else None
        apart = "" if ours is None else f"{100 * (ours - theirs):+.1f}"
        fixed = text(ratio(grid, profile, load, c, "eb:theta=0.8"))
        other = text(ratio(affine, profile, load, c))
        figures = (text(theirs), text(ours), apart, fixed, other, text(calm))
        lines.append(f"| {profile} | {load} | {c:,} | {' | '.join(figures)} |")
    return "\n".join(lines)


def shifts_table() -> str:
    data = cells("shifts")
    lines = ["| profile | shift | policy | req/s of the stages | total seconds |", "|---|---|---|---|---|"]
    for key, value in data.items():
        profile, shift, policy = key.split(" ", 2)
        rates = ", ".join(f"{r:.2f}" for r in value["rps"])
        lines.append(f"| {profile} | {shift} | {policy} | {rates} | {value['seconds']:.1f} |")
    return "\n".join(lines)


def theta_table() -> str:
    data = cells("theta")
    found: dict[str, dict[float, dict[str, Any]]] = {}
    for key, value in data.items():
        case, _, theta = key.rpartition(" theta=")
        found.setdefault(case, {})[float(theta)] = value
    lines = [
        "| load, KV, form | best theta | req/s | at 0.04 | at 0.7 | recomputed at 0.04 | at 0.7 |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, rows in found.items():
        top = max(rows, key=lambda t: rows[t]["rps"])
        rate = rows[top]["rps"]
        low, high = rows.get(0.04), rows.get(0.7)
        if low is None or high is None:
            continue
        lines.append(
            f"| {case} | {top:g} | {rate:.2f} | {percent(low['rps'], rate)} | {percent(high['rps'], rate)} | "
            f"{100 * low['recomputed_share']:.1f} % | {100 * high['recomputed_share']:.1f} % |"
        )
    return "\n".join(lines)


def knees_table() -> str:
    """Where the marginal cost of a mixed step exceeds that of a pure decode step, and twice that of a prompt step."""
    lines = [
        "| profile | us/token at r = 0 | 0.25 | 0.5 | 0.75 | 1 | dearer than decode from r | steepest rise near r |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, value in cells("figure1").items():
        r, cost = np.array(value["share"]), np.array(value["us_per_token"])
        above = r[:-1][cost[:-1] > cost[-1]]
        knee = f"{above[0]:g}" if above.size else "nowhere"
        steep = r[int(np.argmax(np.diff(cost)))]
        at = [f"{cost[int(np.argmin(np.abs(r - x)))]:.1f}" for x in (0, 0.25, 0.5, 0.75, 1)]
        lines.append(f"| {name} | {' | '.join(at)} | {knee} | {steep:g} |")
    return "\n".join(lines)


def real_table() -> str:
    """Throughput against vLLM's own scheduler on a real engine: geometric mean and Student's 95 % interval."""
    data = cells("real")
    runs: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}  # (load, c) -> policy -> round -> run
    for key, value in data.items():
        policy, load, c, seed = key.split(" ")
        runs.setdefault((load, c.removeprefix("c=")), {}).setdefault(policy, {})[seed] = value
    lines = [
        "| load | c | policy | rounds | requests/s against vLLM's own | 95 % interval | mixed steps |",
        "|---|---|---|---|---|---|---|",
    ]
    for (load, c), found in sorted(runs.items(), key=lambda each: (each[0][0], int(each[0][1]))):
        stock = found.get("stock", {})
        for policy, rounds in found.items():
            both = sorted(set(rounds) & set(stock))
            if not both:
                continue
            mixed = np.mean([rounds[s]["mixed_steps"] / rounds[s]["steps"] for s in both])
            gains = np.array([np.log(stock[s]["seconds"] / rounds[s]["seconds"]) for s in both])
            interval = ""
            if len(both) > 1 and policy != "stock":
                half = float(student.ppf(0.975, len(both) - 1) * gains.std(ddof=1) / np.sqrt(len(both)))
                interval = f"{np.exp(gains.mean() - half):.3f} to {np.exp(gains.mean() + half):.3f}"
            ratio = f"{np.exp(gains.mean()):.3f}"
            lines.append(f"| {load} | {c} | {policy} | {len(both)} | {ratio} | {interval} | {100 * mixed:.0f} % |")
    return "\n".join(lines)


def misses() -> list[str]:
    """Cells in which eb-plus is more than 1 % below the better of vllm-v1 and eb-adaptive."""
    found = []
    for part in ("grid", "affine", "models"):
        data = cells(part)
        for key in sorted({k.rsplit(" ", 3)[0] for k in data}):
            rows = {p: best(data, f"{key} {p}") for p in ("vllm-v1", "eb-adaptive", "eb-plus")}
            if any(v is None for v in rows.values()):
                continue
            rate = {p: v["rps"] for p, v in rows.items() if v is not None}
            share = rate["eb-plus"] / max(rate["vllm-v1"], rate["eb-adaptive"])
            if share < 0.99:
                found.append(f"{part}: {key}: {100 * (share - 1):+.1f} %")
    return found


def main() -> None:
    everyone = ("vllm-v0", "vllm-v1", "eb-theta0", "eb:theta=0.8", "eb-adaptive", "eb-plus")
    tables = {
        "figure1": knees_table(),
        "published": published_table(),
        "grid": grid_table("grid", everyone, (RTX, H200)),
        "affine": grid_table("affine", everyone, (RTX, H200)),
        "models": grid_table("models", everyone, ("2x-rtx-pro-6000/qwen3-32b", "2x-h200/llama-3-70b")),
        "shifts": shifts_table(),
        "theta": theta_table(),
        "real": real_table(),
        "misses": "\n".join(f"- {line}" for line in misses()) or "None.",
    }
    path = HERE / "README.md"
    text = path.read_text()
    for name, table in tables.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        text = re.sub(pattern, lambda m, table=table: m[1] + table + "\n" + m[2], text, flags=re.DOTALL)
    path.write_text(text)
    print("\n".join(misses()) or "eb-plus is within 1 % everywhere")


if __name__ == "__main__":
    main()
