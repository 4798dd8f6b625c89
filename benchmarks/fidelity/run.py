"""How far is the simulator from real vLLM? Replays two published runs; writes results, tables and figure.

make bench NAME=fidelity; writes results/fidelity.json, results/fidelity.png and the tables of README.md. Exit status 1
when a promised bar is broken.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import analysis
import numpy as np
from replay import RUNS, Options, Requests, Run, broken_bars, describe, errors, measured, metrics, replay, simulated

from slacktide.metrics.log import RunLog

HERE = Path(__file__).parent
UNITS = {"makespan": "s", "output_throughput": "tokens/s"}
"""All other metrics are shown in ms."""
HEADLINE = ("mean_ttft", "p99_ttft", "mean_tpot", "p99_tpot", "makespan")
DECODE_EDGES = (0, 8, 16, 24, 32, 40, 48, 56, 64, 72, 96, 128)
"""Multiples of 8, where vLLM's CUDA graphs for decode batches change."""
HYPOTHESES: dict[str, dict[str, Any]] = {
    "as recorded (base)": {},
    "host overhead 0 ms": {"host_overhead": 0.0},
    "host overhead 0.5 ms": {"host_overhead": 0.5e-3},
    "host overhead 0.75 ms": {"host_overhead": 0.75e-3},
    "host overhead 1.25 ms": {"host_overhead": 1.25e-3},
    "host overhead 1.5 ms": {"host_overhead": 1.5e-3},
    "host overhead 1 ms + 5 us a sequence": {"host_per_sequence": 5e-6},
    "synchronous scheduling (depth 1)": {"pipeline_depth": 1},
    "prefix caching off": {"enable_prefix_caching": False},
    "no full-prompt check at admission": {"reserve_full_isl": False},
    "no full-prompt check, caching off": {"reserve_full_isl": False, "enable_prefix_caching": False},
    "one KV block more (2588 usable)": {"extra_blocks": 1},
    "1 % watermark": {"watermark": 0.01},
    "skew 0.02": {"skew": 0.02},
    "skew 0.05": {"skew": 0.05},
    "dense layers at CUDA-graph sizes": {"graph_sizes": True},
    "CUDA-graph sizes, host overhead 0.75 ms": {"graph_sizes": True, "host_overhead": 0.75e-3},
    "decode attention beside prefills x 1.0 (additive)": {"interference": 1.0},
    "decode attention beside prefills x 1.6": {"interference": 1.6},
    "decode attention beside prefills x 2.2": {"interference": 2.2},
}  # fmt: skip


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=HERE, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def stamp() -> dict[str, Any]:
    """What the numbers were made with."""
    packages = ("slacktide", "numpy", "numba")
    changed = bool(git("status", "--porcelain", "--", "../../src", "."))
    return {
        "commit": git("rev-parse", "HEAD") + (" + local changes" if changed else ""),
        "versions": {name: version(name) for name in packages} | {"python": platform.python_version()},
        "machine": f"{platform.machine()}, results do not depend on it",
    }


def study(run: Run, real: Requests) -> tuple[dict[str, Any], RunLog]:
    """Everything that is reported about one run, and the replay itself."""
    log = replay(run, real)
    ours, error = simulated(real, log), errors(real, log)
    rows = analysis.decode_steps(run, real)
    known, right = analysis.check_step_counts(rows, real)
    logged, counted = analysis.check_tokens(run, real, rows)
    hypotheses = {}
    for name, given in HYPOTHESES.items():
        other = replay(run, real, Options(**given))
        seen = analysis.compare_series(run, real, other)["preemptions_seen_simulated"]
        hypotheses[name] = errors(real, other) | describe(other) | {"preemptions_seen": seen}
    result = {
        "options": asdict(Options()),
        "measured": metrics(real),
        "simulated": metrics(ours),
        "errors": error,
        "bars": run.bars,
        "broken": broken_bars(run, error),
        "replay": describe(log),
        "series": analysis.compare_series(run, real, log),
        "decode": {
            "table": analysis.decode_table(rows, DECODE_EDGES),
            "tokens_logged": logged,
            "tokens_counted": counted,
            # The distances between ends are known only where no request was preempted in between.
            "known_distances": known if run.num_gpu_blocks is None else None,
            "right_distances": right if run.num_gpu_blocks is None else None,
        },
        "lone_prefills": analysis.lone_prefills(run, real) if run.num_gpu_blocks is None else None,
        "hypotheses": hypotheses,
    }
    return result, log


def shown(name: str, value: float) -> str:
    unit = UNITS.get(name, "ms")
    return f"{value * 1e3:,.1f} ms" if unit == "ms" else f"{value:,.1f} {unit}"


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines] + [""]


def accuracy_table(results: dict[str, Any]) -> list[str]:
    lines = []
    for run in results["runs"].values():
        rows = []
        for name, value in run["measured"].items():
            bar = run["bars"].get(name)
            bound = "" if bar is None else f"{bar:.0%} {'kept' if abs(run['errors'][name]) <= bar else 'BROKEN'}"
            label = name.replace("_", " ").replace("ttft", "TTFT").replace("tpot", "TPOT").replace("e2el", "E2EL")
            rows.append([
                label, shown(name, value), shown(name, run["simulated"][name]), f"{run['errors'][name]:+.1%}", bound,
            ])  # fmt: skip
        lines += [f"**{run['gpu']}**", "", *table(["metric", "vLLM 0.19.0", "simulated", "error", "bar"], rows)]
    return lines


def visible_table(results: dict[str, Any]) -> list[str]:
    runs = list(results["runs"].values())
    rows = [
        ["usable KV blocks"] + [f"{run['replay']['num_blocks']:,}" for run in runs],
        ["fewest free KV blocks in the replay"] + [f"{run['replay']['min_free_blocks']:,}" for run in runs],
        ["preemptions in the replay"] + [f"{run['replay']['preemptions']}" for run in runs],
        ["tokens lost to them / found again in the cache"]
        + [f"{run['replay']['recomputed_tokens']:,} / {run['replay']['cached_tokens']:,}" for run in runs],
        ["preemptions suggested by 1 s counters, measured / simulated"]
        + [f"{r['series']['preemptions_seen_measured']} / {r['series']['preemptions_seen_simulated']}" for r in runs],
    ]
    for name in ("running", "waiting"):
        keys = [f"mean_{name}_measured", f"mean_{name}_simulated", f"mean_abs_difference_{name}"]
        cells = [" / ".join(f"{run['series'][key]:.1f}" for key in keys) for run in runs]
        rows.append([f"{name}: mean measured / simulated / mean absolute difference", *cells])
    cells = []
    for run in runs:
        if "mean_kv_pct_when_full_measured" in run["series"]:
            keys = ["mean_kv_pct_when_full_measured", "mean_kv_pct_when_full_simulated"]
            cells.append(" / ".join(f"{run['series'][key]:.1f} %" for key in keys))
        else:
            cells.append("not logged")
    rows.append(["KV use while above 90 %, measured / simulated", *cells])
    return table(["", *(run["gpu"] for run in runs)], rows)


def hypothesis_table(results: dict[str, Any]) -> list[str]:
    lines = []
    for run in results["runs"].values():
        rows = []
        for name, other in run["hypotheses"].items():
            rows.append(
                [
                    name,
                    *(f"{other[key]:+.1%}" for key in HEADLINE),
                    f"{other['preemptions']} / {other['preemptions_seen']}",
                ]
            )
        header = [
            "replay",
            "mean TTFT",
            "p99 TTFT",
            "mean TPOT",
            "p99 TPOT",
            "makespan",
            "preemptions, all / in 1 s counters",
        ]
        lines += [f"**{run['gpu']}**", "", *table(header, rows)]
    return lines


def decode_tables(results: dict[str, Any]) -> list[str]:
    rows = []
    for run in results["runs"].values():
        for row in run["decode"]["table"]:
            rest = row["measured_ms"] - row["kernels_ms"]
            rows.append([
                run["gpu"], f"{row['decodes_from']} to {row['decodes_to']}", str(row["steps"]),
                f"{row['measured_ms']:.2f}", f"{row['kernels_ms']:.2f}", f"{rest:+.2f}",
                f"{row['longest_minus_mean_context']:,.0f}",
            ])  # fmt: skip
    header = ["GPU", "decodes", "steps", "measured ms", "kernels alone ms", "rest ms", "longest - mean context"]
    lines = table(header, rows)
    for run in results["runs"].values():
        decode = run["decode"]
        text = f"{run['gpu']}: these steps account for {decode['tokens_counted']:,} tokens where vLLM's counters show "
        text += f"{decode['tokens_logged']:,}"
        if decode["known_distances"] is not None:
            text += f"; {decode['right_distances']} of {decode['known_distances']} checkable step counts are exact"
        lines += [text + ".", ""]
    lone = results["runs"]["rtx-pro-6000"]["lone_prefills"]
    lines += [
        f"RTX-PRO-6000: of {lone['examined']} prompts admitted and prefilled alone, the median got its first token "
        f"{lone['median_lag_in_decode_steps']:.2f} decode steps later than its own step takes; {lone['shortened']} "
        f"were shortened by the prefix cache, by {lone['shortened_total']:.2f} s in all.",
        "",
    ]  # fmt: skip
    return lines


def write_tables(results: dict[str, Any]) -> None:
    """Put each table between its markers in README.md."""
    path = HERE / "README.md"
    text = path.read_text()
    parts = {
        "accuracy": accuracy_table,
        "visible": visible_table,
        "hypotheses": hypothesis_table,
        "decode": decode_tables,
    }
    for name, make in parts.items():
        head, begin, rest = text.partition(f"<!-- {name} -->\n")
        _, end, tail = rest.partition(f"<!-- /{name} -->")
        if not begin or not end:
            raise SystemExit(f"README.md: expected markers <!-- {name} --> and <!-- /{name} -->")
        text = head + begin + "\n".join(make(results)).rstrip() + "\n" + end + tail
    path.write_text(text)


def draw(pairs: dict[str, tuple[Run, Requests, RunLog]]) -> None:
    """CDFs of TTFT and TPOT, and running and waiting over time; one row of panels a run."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(pairs), 4, figsize=(16, 3.6 * len(pairs)), constrained_layout=True)
    for panels, (run, real, log) in zip(axes, pairs.values(), strict=True):
        ours = simulated(real, log)
        for requests, label, style in ((real, "vLLM 0.19.0", "k-"), (ours, "simulated", "C1--")):
            share = np.arange(1, len(real.arrival) + 1) / len(real.arrival)
            tpot = (requests.last - requests.first) / np.maximum(requests.output - 1, 1)
            panels[0].plot(np.sort(requests.first - requests.arrival), share, style, label=label)
            panels[1].plot(np.sort(tpot) * 1e3, share, style, label=label)
        counters = analysis.series(run)
        times = counters["t"] - analysis.clock_offset(counters, real)
        state = analysis.state_at(log, times)
        for panel, name in zip(panels[2:], ("running", "waiting"), strict=True):
            panel.plot(times, counters[name], "k-", label="vLLM 0.19.0")
            panel.plot(times, state[name], "C1--", label="simulated")
            panel.set(xlabel="time (s)", ylabel=f"{name} requests", title=f"{run.gpu}: {name}")
        panels[0].set(xlabel="TTFT (s)", ylabel="share of requests", title=f"{run.gpu}: TTFT")
        panels[1].set(xlabel="TPOT (ms)", ylabel="share of requests", title=f"{run.gpu}: TPOT")
        for panel in panels:
            panel.legend(fontsize=8)
            panel.grid(alpha=0.3)
    figure.savefig(HERE / "results" / "fidelity.png", dpi=80, metadata={"Software": None})
    plt.close(figure)


def main() -> int:
    results: dict[str, Any] = stamp() | {"runs": {}}
    pairs = {}
    for name, run in RUNS.items():
        real = measured(run)
        result, log = study(run, real)
        results["runs"][name] = {"gpu": run.gpu, "profile": run.profile} | result
        pairs[name] = (run, real, log)
        print(f"{run.gpu}: " + ", ".join(f"{key} {result['errors'][key]:+.1%}" for key in HEADLINE))
    path = HERE / "results" / "fidelity.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    write_tables(results)
    draw(pairs)
    broken = [line for run in results["runs"].values() for line in run["broken"]]
    print("\n".join(broken) if broken else "all bars kept")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
