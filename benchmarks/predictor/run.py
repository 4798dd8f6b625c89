"""How well do the predictors know the profiles? Errors per scene, transfer between GPUs, a small network, time a call.

make bench NAME=predictor [ARGS="--only errors,transfer,network,time"]; writes results/*.json and README.md's tables.
A part whose file exists is read, not run again; delete the file to run it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from slacktide import __version__
from slacktide.profiling.belief import fit_belief, sample_shapes
from slacktide.profiling.fit import fit, scene_errors
from slacktide.profiling.kernel_tables import gpus, models
from slacktide.profiling.mlp import fit_mlp
from slacktide.profiling.profiles import GPU_NAMES, list_profiles, load_profile, parse_name
from slacktide.profiling.transfer import TransferModel

HERE = Path(__file__).parent
SCENES = ("decode", "prefill", "mixed")
SHOWN = (
    "rtx-pro-6000/qwen3-8b", "rtx-pro-6000/llama-3-8b", "rtx-4090/llama-3-8b", "2x-rtx-3090/llama-3-8b",
    "2x-rtx-3090/qwen2.5-7b", "a100/llama-3-8b", "h100/llama-3-8b", "h200/llama-3-8b", "l40s/llama-3-8b",
    "4x-h100/llama-3-70b",
)  # fmt: skip
TRANSFER = ("rtx-pro-6000", "rtx-4090", "2x-rtx-3090", "a100", "h100", "h200", "l40s")
NETWORK = ("rtx-pro-6000/qwen3-8b", "rtx-4090/llama-3-8b", "2x-rtx-3090/llama-3-8b", "h100/llama-3-8b")


def errors() -> list[dict[str, Any]]:
    """MAE, RMSE, R2, median and P90 per scene on steps held out, for every profile and both feature sets."""
    found = []
    for info in list_profiles():
        profile = load_profile(info.name)
        held = sample_shapes(profile, seed=1000)
        times = profile.latency.step_times(held)
        for features in ("paper", "extended"):
            model = fit_belief(profile, features=features)
            for scene, error in scene_errors(model, held, times).items():
                found.append({
                    "profile": info.name, "label": info.label, "features": features, "scene": scene,
                    "steps": error.steps, "mae_ms": error.mae * 1e3, "rmse_ms": error.rmse * 1e3, "r2": error.r2,
                    "median": error.median, "p90": error.p90,
                })  # fmt: skip
    return found


def transfer() -> list[dict[str, Any]]:
    """Normalised features fitted on one GPU predict another (llama-3-8b): median error per scene."""
    models_of, data = {}, {}
    for gpu in TRANSFER:
        profile = load_profile(f"{gpu}/llama-3-8b")
        key, model, n, _ = parse_name(profile.name)
        sheet = gpus()[GPU_NAMES[key]], models()[model], n
        train, held = sample_shapes(profile, 0), sample_shapes(profile, 1)
        models_of[gpu] = TransferModel.fit(train, profile.latency.step_times(train), *sheet)
        data[gpu] = held, profile.latency.step_times(held), sheet
    found = []
    for source, model in models_of.items():
        for target, (held, times, sheet) in data.items():
            relative = np.abs(model.step_times(held, *sheet) / times - 1)
            rows = np.arange(len(held)) * 3 // len(held)
            found.append({
                "from": source, "to": target, "median": float(np.median(relative)),
                **{name: float(np.median(relative[rows == i])) for i, name in enumerate(SCENES)},
            })  # fmt: skip
    return found


def network() -> list[dict[str, Any]]:
    """The small network beside the linear predictors, same steps to fit on, same steps held out."""
    found = []
    for name in NETWORK:
        profile = load_profile(name)
        train, held = sample_shapes(profile, 0), sample_shapes(profile, 1000)
        y, times = profile.latency.step_times(train), profile.latency.step_times(held)
        arms: dict[str, Any] = {f: fit(train, y, features=f) for f in ("paper", "extended")}
        began = time.perf_counter()
        arms["network"] = fit_mlp(train, y)
        seconds = time.perf_counter() - began
        for arm, model in arms.items():
            relative = np.abs(model.step_times(held) / times - 1)
            rows = np.arange(len(held)) * 3 // len(held)
            found.append({
                "profile": name, "arm": arm, "weights": getattr(model, "num_weights", None) or model.weights.size,
                "fit_seconds": seconds if arm == "network" else None,
                **{scene: float(np.median(relative[rows == i])) for i, scene in enumerate(SCENES)},
                "p90_mixed": float(np.quantile(relative[rows == 2], 0.9)),
            })  # fmt: skip
    return found


def timing() -> list[dict[str, Any]]:
    """Microseconds per evaluation: 64 candidate budgets in one call, and one at a time; median of 200 calls."""
    profile = load_profile("h100/llama-3-8b")
    train = sample_shapes(profile, 0)
    y = profile.latency.step_times(train)
    batch = np.ascontiguousarray(train[-64:])
    found = []
    arms: dict[str, Any] = {f: fit(train, y, features=f) for f in ("paper", "extended")}
    for arm, model in {**arms, "network": fit_mlp(train, y, epochs=5)}.items():
        one = np.ascontiguousarray(batch[:1])
        found.append({"arm": arm, "us_of_64": _microseconds(lambda m=model: m.step_times(batch)) / 64,
                      "us_alone": _microseconds(lambda m=model, o=one: m.step_times(o))})  # fmt: skip
    return found


def _microseconds(call: Callable[[], Any]) -> float:
    call()
    samples = []
    for _ in range(200):
        began = time.perf_counter()
        call()
        samples.append(time.perf_counter() - began)
    return 1e6 * statistics.median(samples)


def percent(x: float) -> str:
    return f"{100 * x:.1f}"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "| " + " | ".join("---" for _ in head) + " |"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def report(parts: dict[str, Any]) -> str:
    text = []
    if "errors" in parts:
        rows = {(r["profile"], r["features"], r["scene"]): r for r in parts["errors"]}
        head = ["profile", "features"] + [f"{s} {w}" for s in SCENES for w in ("MAE ms", "RMSE ms", "R2", "median %")]
        body = []
        for name in SHOWN:
            for f in ("paper", "extended"):
                cells = [name, f]
                for s in SCENES:
                    r = rows[name, f, s]
                    cells += [f"{r['mae_ms']:.2f}", f"{r['rmse_ms']:.2f}", f"{r['r2']:.4f}", percent(r["median"])]
                body.append(cells)
        text.append("## Errors on steps held out\n\n" + table(head, body))
        for label in ("composed", "estimate", "prior"):
            for f in ("paper", "extended"):
                own = [
                    r for r in parts["errors"] if r["label"] == label and r["features"] == f and r["scene"] == "mixed"
                ]
                medians = [r["median"] for r in own]
                text.append(
                    f"- {label} profiles ({len(own)}), features `{f}`, mixed batches: median error from "
                    f"{percent(min(medians))} to {percent(max(medians))} %, R2 from {min(r['r2'] for r in own):.4f}."
                )
        text.append("\nAll profiles: `results/errors.json`.")
    if "transfer" in parts:
        cell = {(r["from"], r["to"]): r["median"] for r in parts["transfer"]}
        body = [[f"from {a}", *(percent(cell[a, b]) for b in TRANSFER)] for a in TRANSFER]
        text.append("## Normalised features, fitted on one GPU (rows), predicting another (columns): median error %\n\n"
                    + table(["llama-3-8b", *TRANSFER], body))  # fmt: skip
    if "network" in parts:
        body = [[r["profile"], r["arm"], str(r["weights"]), *(percent(r[s]) for s in SCENES), percent(r["p90_mixed"])]
                for r in parts["network"]]  # fmt: skip
        text.append("## A small network beside them: median error %\n\n"
                    + table(["profile", "predictor", "weights", *SCENES, "mixed P90"], body))  # fmt: skip
    if "time" in parts:
        body = [[r["arm"], f"{r['us_of_64']:.2f}", f"{r['us_alone']:.1f}"] for r in parts["time"]]
        text.append("## Microseconds per evaluation (from Python; rough, on a shared machine)\n\n"
                    + table(["predictor", "one of 64 budgets", "alone"], body))  # fmt: skip
    return "\n\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="errors,transfer,network,time", help="parts to run, comma-separated")
    chosen = parser.parse_args().only.split(",")
    work = {"errors": errors, "transfer": transfer, "network": network, "time": timing}
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    parts = {}
    for name, run in work.items():
        path = results / f"{name}.json"
        if name in chosen and not path.exists():
            path.write_text(json.dumps({"version": __version__, "rows": run()}, indent=1) + "\n", encoding="utf-8")
        if path.exists():
            parts[name] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    readme = HERE / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, rest = text.split("<!-- results -->")
    after = rest.split("<!-- /results -->")[1]
    readme.write_text(f"{before}<!-- results -->\n{report(parts)}\n<!-- /results -->{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
