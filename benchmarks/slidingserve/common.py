"""What tuning and evaluation share: scenarios, files of results, which are not computed twice, one goodput's search."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import slo_of, write

from slacktide.core.spec import parse_policies
from slacktide.search.evaluate import Task, evaluate
from slacktide.search.goodput import LOWEST, TARGET, bisect
from slacktide.search.scenario import Scenario

HERE = Path(__file__).parent
RESULTS = HERE / "results"
LLAMA, QWEN = "2x-rtx-3090/llama-3-8b", "2x-rtx-3090/qwen2.5-7b"
TUNING_SEED = 0
"""Requests and arrivals of this seed choose parameters; the seeds from 1 on judge."""
FLOOR = 0.005
"""Requests/s that stand for a goodput of 0 in geometric means and ratios: half the lowest one found."""


def scenario(data: str, profile: str, rate: float, seed: int) -> Scenario:
    """Requests and arrivals are both the seed's own."""
    return Scenario(
        trace=str(write(data, seed)), profile=profile, slo=slo_of(data), rate=rate, arrival="poisson", seed=seed,
        oversized="drop",
    )  # fmt: skip


class Log:
    """A file of JSON lines by key; what is there is not run again."""

    def __init__(self, name: str) -> None:
        self.path = RESULTS / f"{name}.jsonl"
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        self.rows = {row["key"]: row for row in map(json.loads, lines)}

    def get(self, key: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The row of that key, worked out now if the file has none."""
        if key not in self.rows:
            self.rows[key] = {"key": key} | work()
            RESULTS.mkdir(exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(self.rows[key]) + "\n")
            print(
                self.path.stem,
                key,
                {k: v for k, v in self.rows[key].items() if k in ("rate", "attainment")},
                flush=True,
            )
        return self.rows[key]


def goodput(
    log: Log, text: str, data: str, profile: str, seed: int, hint: float | None, *, resolution: float = 0.05
) -> dict[str, Any]:
    """Highest rate with at least 99 % of the arrivals in time, for one policy, data set, profile and seed.

    `hint`: a rate near the answer (another seed's, or a neighbouring setting's); without one the search starts at 1
    request/s with steps of 2.
    """

    def work() -> dict[str, Any]:
        (spec,) = parse_policies([text])
        start = hint if hint is not None and hint > FLOOR else 1.0
        path = bisect(start, LOWEST, resolution, step=2.0 if hint is None or hint <= FLOOR else 1 + 2 * resolution)
        runs, rate = 0, next(path)
        try:
            while True:
                found = evaluate(Task(scenario(data, profile, rate, seed), spec, TARGET))
                runs += 1
                rate = path.send(found.attainment >= TARGET)
        except StopIteration as end:
            low, high = end.value.low, end.value.high
        return {
            "policy": text, "data": data, "profile": profile, "seed": seed, "resolution": resolution, "runs": runs,
            "rate": low if math.isfinite(low) else None, "rate_high": high if math.isfinite(high) else None,
        }  # fmt: skip

    return log.get(f"{text}|{data}|{profile}|{seed}", work)
