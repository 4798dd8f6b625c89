"""Our metrics: counted in the engine's process, left as a small file, exposed by the front end's `/metrics`.

The scheduler lives in the engine's process, `/metrics` in the front end's. vLLM carries no foreign statistics between
them, so the engine replaces one JSON file every half second while it has work, and the stat logger (an entry point that
vLLM loads in the front end) exposes it: as a collector in the ordinary registry, or, with several API servers, as
gauges of the multiprocess directory. Names and meanings: `FAMILIES`.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from slacktide.core.live import ARRIVAL, NUM_OUTPUT, SLO_TBT, SLO_TTFT, LiveTable
from slacktide.core.types import FloatArray, token_deadline

PREFIX = "slacktide:"

SECONDS_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
"""Step times from a small GPU's decode to a CPU's prefill."""
DECISION_BUCKETS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1, 1.0)
SLACK_BUCKETS = (-10.0, -2.0, -0.5, -0.1, -0.02, 0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""From a short decode step (20 ms) to a long queue (10 s) on either side of the deadline."""
_SLACK_BOUNDS = np.array(SLACK_BUCKETS)

FAMILIES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "steps": ("counter", ("batch",), "Steps by their batch: decode, prefill, mixed or empty"),
    "batch_switches": ("counter", (), "Steps whose batch was of another kind than the step before"),
    "mode": ("gauge", ("mode",), "The mode in force is 1: active, shadow, stock, or off (after failures)"),
    "mode_switches": ("counter", (), "Changes of the mode at run time"),
    "step_seconds": ("histogram", (), "Measured step times"),
    "predicted_step_seconds": ("histogram", (), "Step times the belief predicted for the same steps"),
    "prediction_error_seconds": ("counter", (), "Sum of |measured - predicted| over steps"),
    "decision_seconds": ("histogram", (), "Time our decision took: mirror, policy, steering"),
    "fallbacks": ("counter", ("reason",), "Steps that vLLM scheduled alone, by reason"),
    "policy_off": ("counter", (), "Times the policy was switched off after failures in a row"),
    "plan_deviations": ("counter", (), "Steps in which vLLM did not run exactly what was planned"),
    "rejected": ("counter", (), "Requests ended by a plan"),
    "relegated": ("counter", (), "Requests relegated by a plan"),
    "preempted": ("counter", (), "Requests that lost their KV"),
    "requests": ("counter", ("slo_class", "end"), "Requests that ended, by class and end reason"),
    "slo_attained": ("counter", ("slo_class",), "Requests that ended with all their targets met"),
    "slo_violations": ("counter", ("slo_class", "kind"), "Requests that missed a target, by kind: ttft, tbt, e2el"),
    "targets_invalid": ("counter", (), "Per-request targets that were unusable; the default stood in"),
    "targets_clamped": ("counter", (), "Per-request targets out of range, moved to its end"),
    "shadow_steps": ("counter", ("same",), "Shadow mode: steps our plan equals (yes) or differs from (no) vLLM's"),
    "shadow_tokens": ("counter", ("schedule", "on_time"), "Shadow mode: output tokens of a step, by schedule (ours, "
                      "stock) and whether the predicted step ends before they are due"),
    "shadow_attainment": ("gauge", ("schedule",), "Shadow mode: share of the newest requests that met their targets, "
                          "measured, and as replayed in the simulator under vLLM's schedule (stock) and ours"),
    "shadow_replay_requests": ("gauge", (), "Shadow mode: requests of the newest replay"),
    "shadow_replays": ("counter", ("result",), "Shadow mode: replays, by result: done, skipped (too little) or failed"),
    "slack_seconds": ("histogram", (), "Slack, a + ttft + k * tbt - now: time until the next token k of a live request "
                      "is due (below 0: it is late). Of all those with such a target, at the end of a step, sampled at "
                      "most ten times a second"),
    "num_running": ("gauge", (), "Running requests"),
    "num_waiting": ("gauge", (), "Waiting requests"),
    "predicted_ttft_seconds": ("gauge", (), "Predicted TTFT of a request that arrives now"),
    "belief_samples": ("gauge", (), "Measured steps behind the belief"),
    "belief_refits": ("counter", (), "Refits of the belief that were better than what it was before"),
    "belief_drifts": ("counter", (), "Sudden changes of step times, after which the belief forgets the past"),
    "belief_outliers": ("counter", (), "Steps too far off their prediction to learn from"),
}  # fmt: skip
"""name -> (type, labels, help)."""


class Metrics:
    """Counters, gauges and histograms of one engine. One thread writes; another may take a snapshot."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, tuple[str, ...]], float] = {}
        self._histograms = {
            name: [0.0] * (len(self.buckets(name)) + 2)
            for name, (kind, _, _) in FAMILIES.items()
            if kind == "histogram"
        }

    @staticmethod
    def buckets(name: str) -> tuple[float, ...]:
        """Upper bounds of a histogram's buckets, without infinity."""
        return {"decision_seconds": DECISION_BUCKETS, "slack_seconds": SLACK_BUCKETS}.get(name, SECONDS_BUCKETS)

    def add(self, name: str, *labels: str, by: float = 1.0) -> None:
        """Count."""
        key = (name, labels)
        self._values[key] = self._values.get(key, 0.0) + by

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge, or a counter kept elsewhere."""
        self._values[(name, labels)] = value

    def get(self, name: str, *labels: str) -> float:
        """A value; 0 when it was never touched."""
        return self._values.get((name, labels), 0.0)

    def observe(self, name: str, value: float) -> None:
        """One observation of a histogram: [count per bucket..., count beyond, sum]."""
        histogram = self._histograms[name]
        histogram[-1] += value
        for i, bound in enumerate(self.buckets(name)):
            if value <= bound:
                histogram[i] += 1
                return
        histogram[-2] += 1

    def observe_slack(self, table: LiveTable, now: float) -> None:
        """The slack of every live request, in one pass: some 10 us for 256 of them."""
        found = slack(table, now)
        bins = np.bincount(_SLACK_BOUNDS.searchsorted(found[np.isfinite(found)]), minlength=_SLACK_BOUNDS.size + 1)
        histogram = self._histograms["slack_seconds"]
        for i, count in enumerate(bins.tolist()):
            histogram[i] += count

    def snapshot(self) -> dict[str, Any]:
        """All values, as JSON can hold them."""
        return {
            "values": [[name, list(labels), value] for (name, labels), value in list(self._values.items())],
            "histograms": {name: list(counts) for name, counts in self._histograms.items()},
        }

    def write(self, path: Path) -> None:
        """Replace the file atomically. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(json.dumps(self.snapshot()), encoding="utf-8")
        partial.replace(path)


def slack(table: LiveTable, now: float) -> FloatArray:
    """Seconds from `now` until the next token of each live request is due, one a row; infinity where none is.

    It is the next token to come out: one in flight is not out yet. Below 0 the token is late.
    """
    ints, floats = table.ints[:, : table.n], table.floats[:, : table.n]
    due = token_deadline(floats[ARRIVAL], floats[SLO_TTFT], floats[SLO_TBT], ints[NUM_OUTPUT])
    return np.asarray(due - now)


def snapshot_path(directory: Path, engine: int) -> Path:
    """Where an engine leaves its snapshot."""
    return directory / f"metrics-{engine}.json"


def read_snapshots(directory: Path) -> dict[str, dict[str, Any]]:
    """Engine -> its newest snapshot; files that are not there or not ours are left out."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(directory.glob("metrics-*.json")):
        with contextlib.suppress(OSError, ValueError):
            data = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(data, dict) and isinstance(data.get("values"), list):
                found[path.stem.removeprefix("metrics-")] = data
    return found


def samples(name: str, data: dict[str, Any]) -> Iterator[tuple[str, dict[str, str], float]]:
    """(sample name, labels, value) of one family in a snapshot, as Prometheus writes them."""
    kind, label_names, _ = FAMILIES[name]
    if kind == "histogram":
        counts = data["histograms"].get(name)
        if counts:
            total = 0.0
            for bound, count in zip([*map(str, Metrics.buckets(name)), "+Inf"], counts[:-1], strict=True):
                total += count
                yield f"{PREFIX}{name}_bucket", {"le": bound}, total
            yield f"{PREFIX}{name}_count", {}, total
            if Metrics.buckets(name)[0] >= 0:  # else no counter, and OpenMetrics forbids it
                yield f"{PREFIX}{name}_sum", {}, counts[-1]
        return
    suffix = "_total" if kind == "counter" else ""
    for found, labels, value in data["values"]:
        if found == name and len(labels) == len(label_names):
            yield f"{PREFIX}{name}{suffix}", dict(zip(label_names, labels, strict=True)), value


class Collector:
    """Prometheus collector over the snapshots of a directory: reads the files when it is scraped."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def describe(self) -> Iterable[Any]:
        """Nothing: registering must not read files that do not exist yet."""
        return []

    def collect(self) -> Iterable[Any]:
        """The families, each sample with its engine."""
        from prometheus_client.core import Metric

        snapshots = read_snapshots(self._directory)
        for name, (kind, _, text) in FAMILIES.items():
            family = Metric(f"{PREFIX}{name}", text, kind)
            for engine, data in snapshots.items():
                for sample, labels, value in samples(name, data):
                    family.add_sample(sample, labels | {"engine": engine}, value)
            if family.samples:
                yield family


class Gauges:
    """The same as gauges, for Prometheus' multiprocess directory (several API servers): the newest value wins."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._gauges: dict[str, Any] = {}

    def update(self) -> None:
        """Copy the snapshots."""
        from prometheus_client import Gauge

        for engine, data in read_snapshots(self._directory).items():
            for name, (_, _, text) in FAMILIES.items():
                for sample, labels, value in samples(name, data):
                    every = labels | {"engine": engine}
                    if sample not in self._gauges:
                        self._gauges[sample] = Gauge(sample, text, list(every), multiprocess_mode="mostrecent")
                    self._gauges[sample].labels(**every).set(value)
