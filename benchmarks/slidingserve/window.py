"""What windows find to do: is the clamped one greedy when T_cur <= T_next, and what else leaves it nothing?

The first is counted over real decisions, by a search of its own.

The policy's search returns greedy's step there without looking. Here every first step (in steps of STRIDE tokens) is
tried on the same queue and the same belief, prompts of several lengths and all, and its time for the same tokens is
held against greedy's.
"""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import numpy as np
from arms import H100, PRO, WINDOWED, setting
from common import LLAMA, QWEN, Log, scenario

from slacktide.core import chunker
from slacktide.core.chunker import Load, advanced, load_time, prefill_within
from slacktide.core.spec import parse_policies
from slacktide.search.scenario import build_policy, prepare
from slacktide.sim.engine import simulate

STRIDE = 8
SAMPLES = 300
"""Decisions per kind that are searched, evenly spread over the run."""
POINTS = (("sharegpt", 0.5), ("arxiv-v1", 1.2), ("mixed-v1", 1.2), ("mixed-v1", 4.0))
"""Data and requests/s: near and beyond the goodput without guard."""

NEAR = (("mixed-v1", QWEN, 2.9, 2.0), ("mixed-v1", H100, 15.0, 15.0), ("mixed-v1", PRO, 7.0, 6.5),
        ("arxiv-v1", LLAMA, 1.05, 1.1))  # fmt: skip
"""Data, GPU and about the goodput in requests/s, without guard and with it."""


def best_saving(belief: Any, truth: Any, load: Load, bounds: np.ndarray, limit: int) -> tuple[float, float] | None:
    """Largest share of greedy's time over two steps that another split of the same tokens saves by the belief, 0 if
    none does; and what that split saves in truth.

    None: greedy takes nothing or everything, so that there is nothing to split.
    """
    most = prefill_within(belief, load, float(bounds[0]), limit)
    queue = int(load.remaining.sum())
    if most <= 0 or most >= queue:
        return None
    total = most + prefill_within(belief, advanced(load, most), float(bounds[1]) - load_time(belief, load, most), limit)
    if total < most or total >= queue:
        return None

    def ends(model: Any, first: int) -> tuple[float, float]:
        own = load_time(model, load, first)
        return own, own + load_time(model, advanced(load, first), total - first)

    greedy = ends(belief, most)[1]
    best, chosen = greedy, most
    for first in range(most - STRIDE, 0 if load.num_decodes else STRIDE, -STRIDE):
        if advanced(load, first).num_decodes + total - first > limit:
            break
        own, end = ends(belief, first)
        if own <= bounds[0] and end <= bounds[1] and end < best:
            best, chosen = end, first
    return 1.0 - best / greedy, 1.0 - ends(truth, chosen)[1] / ends(truth, most)[1]


def decisions(text: str, data: str, rate: float) -> list[tuple[Any, Any, Load, np.ndarray, int, int, int]]:
    """(belief, truth, queue, bounds, limit, chosen, greedy's) of every decision that a window could change."""
    seen = []
    split = chunker.split

    def record(model: Any, load: Load, bounds: np.ndarray, limit: int, mode: Any, **options: Any) -> tuple[int, int]:
        chosen, most = split(model, load, bounds, limit, mode, **options)
        if np.isfinite(bounds[0]) and 0 < most < int(load.remaining.sum()):
            seen.append((model, setup.profile.latency, load, bounds.copy(), limit, chosen, most))
        return chosen, most

    setup = prepare(scenario(data, LLAMA, rate, 1))
    (spec,) = parse_policies([text])
    with mock.patch.object(chunker, "split", record):
        simulate(setup.workload, build_policy(spec, {}), setup.profile.latency, setup.config, belief=setup.belief)
    return seen


def check_windows(settings: str) -> None:
    """One row per point, into results/window.jsonl. `settings`: the tuned policy without guard."""
    log = Log("window")
    for data, rate in POINTS:

        def work(data: str = data, rate: float = rate) -> dict[str, Any]:
            seen = decisions(settings, data, rate)
            short = [case for case in seen if case[3][0] <= case[3][1] - case[3][0]]
            long = [case for case in seen if case[3][0] > case[3][1] - case[3][0]]
            found: dict[str, Any] = {"policy": settings, "data": data, "rate": rate, "decisions": len(seen),
                                     "short": len(short), "long": len(long), "stride": STRIDE}  # fmt: skip
            for name, cases in (("short", short), ("long", long)):
                chosen = [cases[i] for i in np.linspace(0, len(cases) - 1, min(SAMPLES, len(cases))).astype(int)]
                saved = [s for s in (best_saving(*case[:5]) for case in chosen) if s is not None]
                found |= {
                    f"{name}_searched": len(saved),
                    f"{name}_any": sum(s > 1e-6 for s, _ in saved),
                    f"{name}_3_percent": sum(s > 0.03 for s, _ in saved),
                    f"{name}_most": max((s for s, _ in saved), default=0.0),
                    f"{name}_mean": float(np.mean([s for s, _ in saved] or [0.0])),
                    f"{name}_mean_true": float(np.mean([t for _, t in saved] or [0.0])),
                    f"{name}_split": sum(case[5] < case[6] for case in cases),
                }
            return found

        log.get(f"{settings}|{data}|{rate:g}", work)


def check_binding() -> None:
    """What the complete policies' windows meet near goodput, one row per arm and load, into results/binding.jsonl."""
    log = Log("binding")
    for data, profile, *rates in NEAR:
        for arm, rate in zip(WINDOWED, rates, strict=True):
            text = setting(arm, data, profile)

            def work(data: str = data, profile: str = profile, rate: float = rate, text: str = text) -> dict[str, Any]:
                found = binding(text, data, profile, rate)
                return {"policy": text, "data": data, "profile": profile, "rate": rate} | found

            log.get(f"{text}|{data}|{profile}|{rate:g}", work)


def binding(text: str, data: str, profile: str, rate: float) -> dict[str, int]:
    """Decisions on a window, and how many of them are at the token limit, take the whole queue, have T_cur <= T_next,
    and are split."""
    split, counts = chunker.split, Counter(decisions=0, capped=0, whole=0, short=0, split=0)

    def record(model: Any, load: Load, bounds: np.ndarray, limit: int, mode: Any, **options: Any) -> tuple[int, int]:
        chosen, most = split(model, load, bounds, limit, mode, **options)
        whole = most >= int(load.remaining.sum())
        counts.update(
            decisions=1, whole=int(whole), capped=int(not whole and most + load.num_decodes >= limit),
            short=int(2 * bounds[0] <= bounds[1] and np.isfinite(bounds[0])), split=int(chosen < most),
        )  # fmt: skip
        return chosen, most

    setup = prepare(scenario(data, profile, rate, 1))
    (spec,) = parse_policies([text])
    with mock.patch.object(chunker, "split", record):
        simulate(setup.workload, build_policy(spec, {}), setup.profile.latency, setup.config, belief=setup.belief)
    return dict(counts)
