"""The cells of the dominance table (GPU profile x load x SLO form), and what a cell simulates.

A cell's requests are cut from its load at fixed places, one slice per seed, so that the slice that baselines are tuned
on and those they are judged on share no request. Their arrival pattern has one request per second in the mean; a rate
only stretches it. Random numbers are common to all policies and rates.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from slacktide.core.latency import LatencyModel
from slacktide.core.latency_extended import ExtendedFeatureModel
from slacktide.core.latency_families import SCENES
from slacktide.core.types import FloatArray
from slacktide.search.scenario import Scenario, Setup, isolated_service, prepare
from slacktide.workload.requests import Workload

HERE = Path(__file__).parent
MIXED = HERE / "data" / "mixed.csv"
MIXED_ROWS = 6400
"""Four slices of 1,500 requests, and room for those that a small GPU can never hold."""

PROFILES: dict[str, tuple[str, float | None]] = {
    "rtx-pro-6000": ("rtx-pro-6000/llama-3-8b", None),
    "h100-1.0": ("h100/llama-3-8b", 1.0),
    "rtx-4090": ("rtx-4090/llama-3-8b", None),
    "a100": ("a100/llama-3-8b", None),
    "l40s": ("l40s/llama-3-8b", None),
    "2x-rtx-3090": ("2x-rtx-3090/llama-3-8b", None),
    "h100-1.3": ("h100/llama-3-8b", 1.3),
    "h100-1.15": ("h100/llama-3-8b", 1.15),
}
"""Name -> profile and the factor on decode attention in mixed steps (None: measured, or the profile's own 1.6). The
order gives `mooncake`, whose prompts have 12,000 tokens, the four GPUs whose memory holds several of them."""
SLOW = ("rtx-4090", "l40s", "2x-rtx-3090")
"""GPUs with half of the others' memory bandwidth or less: their fixed and gap targets are twice as long."""
SPEED = {"h100-1.0": 3, "h100-1.15": 3, "h100-1.3": 3, "rtx-pro-6000": 2, "a100": 2}
"""Times as many requests on faster GPUs, where outputs are long: a run should last several times a request's life."""


@dataclass(frozen=True, slots=True)
class Load:
    """Where requests come from and how they arrive. `times`: own, poisson, or a pattern of `_times`."""

    trace: str
    times: str
    requests: int
    """On a slow GPU."""
    ttft: float
    """The tight TTFT in ms; the loose one is twice as long."""
    tbt: float = 50.0
    proportional: str = "ttft:5x,tbt:40"
    scaled: bool = True
    """More requests on faster GPUs (`SPEED`)."""
    second: str | None = None
    """Trace of the second half of the requests, where the distribution shifts."""


LOADS: dict[str, Load] = {
    "conv": Load("azure-conv", "own", 500, 1000),
    "code": Load("azure-code", "own", 500, 1000, scaled=False),
    "conv-poisson": Load("azure-conv", "poisson", 500, 1000),
    "code-poisson": Load("azure-code", "poisson", 500, 1000, scaled=False),
    "sharegpt": Load("sharegpt", "poisson", 500, 2000),
    "arxiv": Load("arxiv", "poisson", 500, 2000, proportional="ttft:10x,tbt:80", scaled=False),
    "mixed": Load(str(MIXED), "poisson", 500, 1000,
                  proportional="dialogue=ttft:5x,tbt:40;summarisation=ttft:10x,tbt:80"),
    "bwb": Load("bwb", "poisson", 300, 1000),
    "mooncake": Load("mooncake-conversation", "own", 300, 30_000, 100.0, "ttft:10x,tbt:80"),
}  # fmt: skip
"""The nine loads of the table. Mooncake's 30 s are its authors': with 10 s more than 1 % of the prompts, of up to
120,000 tokens, are too long on some GPUs even alone. Proportional targets are SlidingServe's: 5 or 10 times the
prompt's isolated prefill."""
VARYING: dict[str, Load] = {
    "ramp": Load("azure-conv", "ramp", 500, 1000),
    "burst": Load("azure-conv", "burst", 500, 1000),
    "shift": Load("azure-conv", "poisson", 500, 1000, second="arxiv"),
}
"""Loads whose rate or lengths change on the way."""
SLO_FORMS = ("tight", "loose", "proportional", "gap")
TTFT_FLOOR = 0.1
"""Least proportional TTFT target in seconds: five times the prefill of 20 tokens is less than two decode steps."""
SEEDS = 4
TUNING, TEST = 0, (1, 2, 3)
"""Slice 0 chooses each baseline's parameters; the others judge."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell. `bias`: (scene, factor) by which the belief is off."""

    profile: str
    load: str
    form: str
    bias: tuple[str, float] | None = None

    @property
    def name(self) -> str:
        """As it stands in keys and tables."""
        off = "" if self.bias is None else f" {self.bias[0]} x{self.bias[1]:g}"
        return f"{self.profile} {self.load} {self.form}{off}"

    @property
    def mode(self) -> str:
        """How requests are judged."""
        return "gap" if self.form == "gap" else "deadline"

    @property
    def slo(self) -> str:
        """The target, in the words of `--slo`."""
        load = load_of(self)
        if self.form == "proportional":
            return load.proportional
        times = 2.0 if self.profile in SLOW else 1.0
        ttft = load.ttft * times * (1 if self.form == "tight" else 2)
        tbt = load.tbt * times * (1 if self.form == "tight" else 2)
        return f"ttft:{ttft:g},tbt:{tbt:g}"


def requests_of(cell: Cell) -> int:
    """Requests of a run."""
    load = load_of(cell)
    return load.requests * (SPEED.get(cell.profile, 1) if load.scaled else 1)


def load_of(cell: Cell) -> Load:
    """The cell's load."""
    return LOADS.get(cell.load) or VARYING[cell.load]


def fraction() -> list[Cell]:
    """36 of the 288 cells: every pair of load and SLO form once, the profiles cycling through them.

    Shifting the cycle by 3 from one form to the next gives every load four different profiles, and every profile each
    of the forms at least once.
    """
    names = list(PROFILES)
    return [
        Cell(names[(i + 3 * j) % len(names)], load, form)
        for i, load in enumerate(LOADS)
        for j, form in enumerate(SLO_FORMS)
    ]


def half() -> list[Cell]:
    """18 cells of the fraction, with every level of every factor: where overload is measured first."""
    forms = len(SLO_FORMS)
    return [cell for k, cell in enumerate(fraction()) if (k // forms + k % forms) % 4 < 2]


def full() -> list[Cell]:
    """All cells, those of the fraction first."""
    first = fraction()
    return first + [c for p in PROFILES for load in LOADS for f in SLO_FORMS if (c := Cell(p, load, f)) not in first]


def varying() -> list[Cell]:
    """Time-varying loads on three GPUs of different speed."""
    return [Cell(p, load, "tight") for p in ("rtx-pro-6000", "h100-1.15", "2x-rtx-3090") for load in VARYING]


def biased() -> list[Cell]:
    """A belief that is 10 or 30 % off in one scene, on two cells."""
    base = (("rtx-pro-6000", "conv-poisson", "tight"), ("h100-1.15", "mixed", "proportional"))
    return [Cell(*b, (scene, f)) for b in base for scene in SCENES for f in (0.7, 0.9, 1.1, 1.3)]


def write_mixed() -> None:
    """Dialogue and summarisation 3:1 with the published means and 90th percentiles (see slidingserve/datasets.py)."""
    sys.path.insert(0, str(HERE.parent / "slidingserve"))
    from datasets import rows_of

    rng = np.random.default_rng(5)
    few = MIXED_ROWS // 4
    rows = rows_of("sharegpt", MIXED_ROWS - few, rng) + rows_of("arxiv-v1", few, rng)
    with MIXED.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(("prompt_tokens", "output_tokens", "slo_class"))
        out.writerows(rows[i] for i in rng.permutation(MIXED_ROWS))


@lru_cache(maxsize=4)
def _whole(trace: str, timed: bool, profile: str, interference: float | None, slo: str) -> Setup:
    """Every request of the load on the cell's engine; those that can never fit are left out."""
    return prepare(
        Scenario(trace=trace, profile=profile, slo=slo, interference=interference, oversized="drop",
                 rate=None if timed else 1.0, arrival="trace" if timed else "poisson")
    )  # fmt: skip


@dataclass(frozen=True)
class Task:
    """A cell made real for one seed: the engine, and requests whose mean rate is 1 a second."""

    setup: Setup
    workload: Workload
    one_by_one: float
    """Rate of a server that takes one request after the other: a scale for searches."""


def task(cell: Cell, seed: int) -> Task:
    """The cell's engine and its slice of requests for `seed`, at one request per second."""
    load = load_of(cell)
    profile, factor = PROFILES[cell.profile]
    halves = [load.trace] if load.second is None else [load.trace, load.second]
    setup, parts = None, []
    for trace in halves:
        setup = _whole(trace, load.times == "own", profile, factor, cell.slo)
        parts.append(_slice(setup.workload, seed, requests_of(cell) // len(halves), load.times == "own"))
    assert setup is not None
    workload = parts[0]
    if len(parts) == 2:
        workload = _joined(*parts)
    if cell.form == "proportional":
        workload = replace(workload, slo_ttft=np.maximum(workload.slo_ttft, TTFT_FLOOR))
    workload = workload.with_arrivals(_times(workload, load.times, seed))
    service = isolated_service(setup.profile.latency, setup.config.max_num_batched_tokens)
    rate = 1.0 / float(service(workload.num_prompt_tokens, workload.num_output_tokens).mean())
    belief = setup.belief if cell.bias is None else off_by(setup.belief, *cell.bias)
    return Task(replace(setup, workload=workload, belief=belief), workload, rate)


def _slice(whole: Workload, seed: int, n: int, in_order: bool) -> Workload:
    """Requests of one seed: a stretch of the trace where its times count, else drawn from all of it."""
    place = len(whole) // SEEDS
    rows = np.arange(len(whole)) if in_order else np.random.default_rng(17).permutation(len(whole))
    chosen = whole.take(rows[seed * place : seed * place + min(n, place)])
    return chosen if in_order else _shuffled(chosen, seed)


def _shuffled(workload: Workload, seed: int) -> Workload:
    """In random order: `take` sorts by arrival, and a trace's lengths drift with time."""
    order = np.random.default_rng(100 + seed).permutation(len(workload))
    return workload.with_arrivals(order.astype(np.float64))


def _joined(first: Workload, second: Workload) -> Workload:
    from slacktide.workload.combine import concat

    return concat([first, second], gap=1.0)


def _times(workload: Workload, kind: str, seed: int) -> FloatArray:
    """Arrival times from 0 on, one request a second in the mean.

    ramp: the rate rises evenly from half to one and a half times the mean. burst: in turn 0.5 and 2 times the mean, for
    50 requests each.
    """
    n = len(workload)
    if kind == "own":
        own = workload.arrival_time - workload.arrival_time[0]
        return np.asarray(own * ((n - 1) / own[-1]))
    gaps = np.random.default_rng(1000 + seed).standard_exponential(n)
    if kind == "ramp":
        gaps = gaps / (0.5 + np.arange(n) / max(n - 1, 1))
    elif kind == "burst":
        gaps = gaps / np.where(np.arange(n) // 50 % 2 == 0, 0.5, 2.0)
    gaps[0] = 0.0
    times = np.cumsum(gaps)
    return np.asarray(times * ((n - 1) / times[-1]))


def off_by(belief: Any, scene: str, factor: float) -> LatencyModel:
    """The belief with the times of one scene `factor` times as long."""
    assert isinstance(belief, ExtendedFeatureModel)
    weights = belief.weights.copy()
    weights[SCENES.index(scene)] *= factor
    return replace(belief, weights=weights)


def settings(cell: Cell) -> Iterator[str]:
    """Everything of a cell that decides its figures, for keys."""
    yield cell.name
    if cell.load in LOADS or cell.load in VARYING:  # else lengths alone
        yield cell.slo
        yield f"{requests_of(cell)} requests"
        yield repr(load_of(cell)).replace(str(HERE), "")


if __name__ == "__main__":
    write_mixed()
