"""Exclusive against mixed batching in the simulator: reproduces the measurements of arXiv 2606.00516.

    python benchmarks/exclusive_batching/run.py figure1 grid affine shifts theta models interference
    python benchmarks/exclusive_batching/run.py report

Every finished cell is kept in results/PART.json, so that an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from slacktide.core.latency import AffineModel
from slacktide.core.pack import as_policy
from slacktide.core.spec import parse_policies
from slacktide.search.scenario import Scenario, Setup, prepare
from slacktide.sim.engine import simulate

HERE = Path(__file__).parent
RESULTS = HERE / "results"
RTX, H200 = "rtx-pro-6000/qwen3-8b", "h200/qwen3-8b"
LOADS = ((128, 1024), (512, 512), (1024, 128), (512, 256))
CONCURRENCY = (32, 256, 512, 1024, 2048)
POLICIES = ("vllm-v0", "vllm-v1", "eb-adaptive", "eb-plus")
BUDGETS = (4096, 8192, 16384)
PROMPTS = 4000  # a run, as the paper's
MS, US = 1e-3, 1e-6
# The authors' calibrations (May); kappa from the knees they report, (beta_d - beta_p) / 0.2 and / 0.8.
CALIBRATION = {
    RTX: AffineModel(4.691 * MS, 50.08 * US, 10.376 * MS, 103.88 * US, kappa=2.69e-4),
    H200: AffineModel(1.279 * MS, 24.85 * US, 8.921 * MS, 45.86 * US, kappa=2.63e-5),
}


class Cells:
    """Finished cells of a part, by a key that names what ran."""

    def __init__(self, part: str) -> None:
        self.path = RESULTS / f"{part}.json"
        self.data: dict[str, Any] = json.loads(self.path.read_text()) if self.path.exists() else {}

    def get(self, key: str, make: Callable[[], Any]) -> Any:
        """The kept value of a cell, or a new one, kept at once."""
        if key not in self.data:
            self.data[key] = make()
            text = json.dumps(dict(sorted(self.data.items())), indent=0, sort_keys=True) + "\n"
            partial = self.path.with_suffix(".partial")
            partial.write_text(text)
            partial.replace(self.path)
            print(self.path.stem, key, self.data[key], flush=True)
        return self.data[key]


def trace(prompt: int, output: int) -> str:
    """Lengths as the authors draw them: uniform, +-50 %."""
    return f"synthetic:prompt=uniform:{prompt // 2}:{prompt * 3 // 2},output=uniform:{output // 2}:{output * 3 // 2}"


def setup_of(profile: str, load: tuple[int, int], n: int, model: AffineModel | None = None, **engine: Any) -> Setup:
    """All requests at once; prefix caching off; `model` replaces the tables as truth and as belief."""
    text, _, factor = profile.partition("?interference=")
    settings = {"max_num_seqs": 2048, "enable_prefix_caching": False} | engine
    scenario = Scenario(
        trace=trace(*load), profile=text, rate=float("inf"), num_prompts=n, engine=settings,
        interference=float(factor) if factor else None,
    )  # fmt: skip
    setup = prepare(scenario)
    return setup if model is None else replace(setup, profile=replace(setup.profile, latency=model), belief=model)


def measure(setup: Setup, policy: Any, concurrency: int | None) -> dict[str, float]:
    """Requests per second and what explains them."""
    log = simulate(
        setup.workload, policy, setup.profile.latency, setup.config, belief=setup.belief, max_concurrency=concurrency
    ).log
    tokens = float(log.num_tokens.sum())
    return {
        "rps": round(log.n / log.sim_duration, 4),
        "preemptions": int(log.num_preemptions.sum()),
        "recomputed_share": round(float(log.recomputed_tokens.sum()) / tokens, 5),
        "running": round(float(np.average(log.num_running, weights=log.duration)), 1),
        "mixed_steps": round(float(((log.num_prefill_tokens > 0) & (log.num_decodes > 0)).mean()), 4),
    }


def build(text: str) -> Any:
    """A fresh policy."""
    (spec,) = parse_policies([text])
    return as_policy(spec.build())


def best(cells: Cells, key: str, runs: Iterator[tuple[str, Callable[[], dict[str, float]]]]) -> dict[str, Any]:
    """The best of several settings of one policy; every setting is a cell of its own."""
    found = [(name, cells.get(f"{key} {name}", make)) for name, make in runs]
    name, value = max(found, key=lambda each: each[1]["rps"])
    return value | {"setting": name}


def seats(concurrency: int) -> tuple[int, ...]:
    """Slots worth trying: fewer than the concurrency keep a KV-bound engine from preempting."""
    return tuple(n for n in (512, 2048) if n <= concurrency) or (2048,)


def grid() -> None:
    """Kernel tables as truth, a fitted belief; each policy at its own best budget and slots."""
    _grid("grid", {RTX: None, H200: None}, BUDGETS)


def affine() -> None:
    """The authors' affine calibrations as truth and belief."""
    _grid("affine", dict(CALIBRATION), BUDGETS)


def interference() -> None:
    """H200 with the factor of mixed attention at 1 (none) and 1.3, instead of the assumed 1.6."""
    _grid(
        "interference",
        {f"{H200}?interference={f}": None for f in (1.0, 1.3)},
        BUDGETS,
        policies=("vllm-v1", "eb-adaptive"),
    )


def models() -> None:
    """Larger models on two GPUs."""
    profiles = {"2x-rtx-pro-6000/qwen3-32b": None, "2x-h200/llama-3-70b": None}
    _grid("models", profiles, BUDGETS, policies=("vllm-v1", "eb-adaptive", "eb-plus"))


def _grid(part: str, profiles: dict[str, Any], budgets: tuple[int, ...], policies: tuple[str, ...] = POLICIES) -> None:
    cells = Cells(part)
    fixed = {"grid": ("eb-theta0", "eb:theta=0.8"), "affine": ("eb-theta0",)}.get(part, ())  # 0.8: the authors' runs
    for load in LOADS:
        for profile, model in profiles.items():
            for c in CONCURRENCY:
                for policy in (*policies, *fixed):
                    key = f"{profile} {load[0]}/{load[1]} c={c} {policy}"

                    def runs(
                        profile: str = profile, load: Any = load, c: int = c, policy: str = policy, model: Any = model
                    ) -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
                        for budget in budgets:
                            for n in seats(c):

                                def make(budget: int = budget, n: int = n) -> dict[str, float]:
                                    setup = setup_of(
                                        profile, load, min(PROMPTS, 60 * c), model,
                                        max_num_batched_tokens=budget, max_num_seqs=n,
                                    )  # fmt: skip
                                    return measure(setup, build(_text(policy, setup, load, min(c, n))), c)

                                yield f"B={budget} N={n}", make

                    best(cells, key, runs())


def _text(policy: str, setup: Setup, load: tuple[int, int], n: int) -> str:
    """eb at the theta_0 of eq. (3) for this truth and load; other names as they are."""
    if policy != "eb-theta0":
        return policy
    from slacktide.core.exclusive import Load, optimal_threshold
    from slacktide.core.exclusive_hazard import costs_of

    mean = Load(*load)
    costs = costs_of(setup.profile.latency, mean, n, setup.config.max_num_batched_tokens)
    return f"eb:theta={min(optimal_threshold(costs, mean), 0.95):.4f}"


def shifts() -> None:
    """One policy object through a change of lengths, and through a change of concurrency, as one server would be."""
    cells = Cells("shifts")
    lengths = [((1024, 128), 1024), ((512, 512), 1024), ((128, 1024), 1024)]
    crowd = [((512, 256), c) for c in (32, 512, 1024, 256, 2048)]
    for profile in (RTX, H200):
        for name, stages in (("lengths", lengths), ("concurrency", crowd)):
            for policy in ("vllm-v1", "eb-adaptive", "eb-plus", "eb-plus:form=paper", "eb-adaptive:form=paper"):

                def make(profile: str = profile, stages: Any = stages, policy: str = policy) -> dict[str, Any]:
                    instance, rates, total = build(policy), [], 0.0
                    for load, c in stages:
                        n = min(PROMPTS, 60 * c)
                        setup = setup_of(profile, load, n)
                        rate = measure(setup, instance, c)["rps"]
                        rates.append(rate)
                        total += n / rate
                    return {"rps": rates, "seconds": round(total, 2)}

                cells.get(f"{profile} {name} {policy}", make)


def theta() -> None:
    """Throughput over theta, slots 2,048: the authors' form without a KV guard and ours; KV limited and ample."""
    cells = Cells("theta")
    for load in ((512, 256), (128, 1024), (512, 512)):
        for kv in ("limited", "ample"):
            for form in ("form=paper,kv_guard=0", "form=paper,kv_guard=0.2", "form=sound,kv_guard=0.05"):
                for value in (0.01, 0.02, 0.04, 0.07, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9):

                    def make(load: Any = load, kv: str = kv, form: str = form, value: float = value) -> Any:
                        more = {} if kv == "limited" else {"num_gpu_blocks_override": 400_000}
                        setup = setup_of(RTX, load, 4000, **more)
                        return measure(setup, build(f"eb:theta={value},{form}"), 2048)

                    cells.get(f"{load[0]}/{load[1]} {kv} {form} theta={value}", make)


def figure1() -> None:
    """Time and marginal cost of a step of 1,024 tokens over its decode share; prompts 512, decodes at context 512."""
    from slacktide.core.exclusive import Load
    from slacktide.core.exclusive_hazard import step_shapes
    from slacktide.profiling.profiles import load_profile

    cells = Cells("figure1")
    shares = np.round(np.arange(0, 1.0001, 0.05), 2)
    for name in ("h200/llama-3-8b", "rtx-pro-6000/llama-3-8b", H200, RTX):

        def make(name: str = name) -> Any:
            model = load_profile(name).latency

            def time(n: float) -> np.ndarray:
                shapes = step_shapes(model, Load(512, 1), (1 - shares) * n / 512, shares * n, 768.0)
                return model.step_times(shapes)

            return {
                "share": shares.tolist(),
                "ms": np.round(time(1024) * 1e3, 4).tolist(),
                "us_per_token": np.round((time(1280) - time(768)) / 512 * 1e6, 3).tolist(),
            }

        cells.get(name, make)


PARTS = {f.__name__: f for f in (figure1, grid, affine, shifts, theta, models, interference)}


def main() -> None:
    wanted = sys.argv[1:] or [*PARTS, "report"]
    if unknown := set(wanted) - {*PARTS, "report"}:
        raise SystemExit(f"no part {', '.join(sorted(unknown))}; expected some of {', '.join([*PARTS, 'report'])}")
    RESULTS.mkdir(exist_ok=True)
    for part in wanted:
        if part == "report":
            subprocess.run([sys.executable, str(HERE / "report.py")], check=True)
        else:
            PARTS[part]()


if __name__ == "__main__":
    main()
