"""What the real runs say beyond their averages: the per-second counters, decode steps one by one, prefills one by one.

Everything is derived from `data/`; nothing here is fitted. Times in seconds unless a name says ms.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from replay import Options, Requests, Run, graph_size, latency, read_rows, simulated

from slacktide.core.latency import LatencyModel
from slacktide.core.latency_tables import TablesModel
from slacktide.core.types import BoolArray, FloatArray
from slacktide.metrics.log import RunLog

SAME = 1e-6
"""Two events this close are one: the data is rounded to 1e-5 s, and a step's requests share its time."""
MIN_SHORT = 0.010
"""A prefill counts as shortened by the prefix cache when this much too short: three times the usual scatter."""


def series(run: Run) -> dict[str, FloatArray]:
    """The engine's counters, one row a second of the logger's clock, which started before the first arrival."""
    rows = read_rows("timeseries.csv", run.gpu)
    return {name: np.array([float(row[name]) for row in rows]) for name in rows[0] if name not in ("gpu", "model")}


def clock_offset(counters: dict[str, FloatArray], real: Requests) -> float:
    """Logger's clock minus ours: where the prompts whose first token came in each second add up to the logged ones."""
    offsets = np.arange(0.0, 1.0, 0.001)
    edges = np.concatenate(([0.0], counters["t"]))

    def mismatch(offset: float) -> float:
        tokens, _ = np.histogram(real.first + offset, edges, weights=real.prompt)
        return float(np.abs(tokens - counters["prompt_throughput"]).sum())

    misses = np.array([mismatch(offset) for offset in offsets])
    return float(offsets[misses == misses.min()].mean())


def state_at(log: RunLog, times: FloatArray) -> dict[str, FloatArray]:
    """The replay's counters as the logger would have read them: those of the last step that ended before."""
    step = np.searchsorted(log.step_end, times, side="right") - 1
    known = step >= 0
    pick = np.maximum(step, 0)
    live = times < log.last_token_time.max()
    used = 100 * (1 - log.num_free_blocks / log.num_blocks)
    columns = {"running": log.num_running, "waiting": log.num_waiting, "kv_cache_pct": used}
    return {name: np.where(known & live, column[pick], 0).astype(float) for name, column in columns.items()}


def preemptions_seen(counters: dict[str, FloatArray], requests: Requests, offset: float) -> int:
    """Preemptions that the running count suggests at second resolution; misses those undone within the second.

    Requests near a tick's edge are miscounted: a run without preemptions shows some too.

    In each second: running changes by first admissions - ends + resumptions - preemptions; a shortfall is preemptions.
    """
    edges = np.concatenate(([0.0], counters["t"]))
    admitted, _ = np.histogram(requests.scheduled + offset, edges)
    ended, _ = np.histogram(requests.last + offset, edges)
    change = np.diff(np.concatenate(([0.0], counters["running"])))
    return int(np.maximum(admitted - ended - change, 0).sum())


def compare_series(run: Run, real: Requests, log: RunLog) -> dict[str, Any]:
    """Counters measured and simulated; means over all seconds."""
    counters, ours = series(run), simulated(real, log)
    offset = clock_offset(counters, real)
    state = state_at(log, counters["t"] - offset)
    full = counters["kv_cache_pct"] > 90
    result: dict[str, Any] = {
        "clock_offset": offset,
        "preemptions_seen_measured": preemptions_seen(counters, real, offset),
        "preemptions_seen_simulated": preemptions_seen({**counters, **state}, ours, offset),
    }
    for name in ("running", "waiting"):
        result[f"mean_{name}_measured"] = float(counters[name].mean())
        result[f"mean_{name}_simulated"] = float(state[name].mean())
        result[f"mean_abs_difference_{name}"] = float(np.abs(counters[name] - state[name]).mean())
    if full.any():
        result["mean_kv_pct_when_full_measured"] = float(counters["kv_cache_pct"][full].mean())
        result["mean_kv_pct_when_full_simulated"] = float(state["kv_cache_pct"][full].mean())
    return result


def decode_step_time(model: LatencyModel, contexts: FloatArray, *, padded: bool = False) -> float:
    """Model's time of a step of decodes; `padded`: dense layers at the size of the CUDA graph."""
    n = len(contexts)
    ones = np.ones(n, dtype=np.int64)
    time = float(model.step_time(ones, contexts.astype(np.int64), ones.astype(bool)))
    if padded:
        assert isinstance(model, TablesModel)
        time += float(model.dense[graph_size(n)] - model.dense[n])
    return time


def decode_steps(run: Run, real: Requests) -> list[dict[str, float]]:
    """The end of a run, where all requests only decode: real step times against the composed kernels without host.

    Counted backwards from the last token: between two ends the same requests ran a whole number of steps, the one that
    fits the model best after scaling by the stretch after it; `check_step_counts` and `check_tokens` test the counts.
    """
    model = latency(run, Options(host_overhead=0.0))
    start = max(float(real.first.max()), float(series(run)["t"][_last_waiting(run)]) + 1.0)
    ends = np.unique(real.last[real.last > start])
    todo = np.zeros(len(real.last))
    ratio, rows = 1.0, []
    for low, high in zip(ends[-2::-1], ends[:0:-1], strict=True):
        runs = real.last > low + SAME
        steps = 1
        for _ in range(3):  # the contexts depend a little on the number of steps
            contexts = (real.prompt + real.output - 1 - todo)[runs] - steps / 2
            time = decode_step_time(model, contexts, padded=True)
            steps = max(1, round((high - low) / (time * ratio)))
        if steps > 1:
            ratio = (high - low) / (steps * time)
        todo[runs] += steps
        rows.append({
            "from": float(low), "to": float(high), "steps": steps, "decodes": int(runs.sum()),
            "mean_context": float(contexts.mean()), "max_context": float(contexts.max()),
            "measured_ms": 1e3 * (high - low) / steps, "kernels_ms": 1e3 * time,
        })  # fmt: skip
    return rows[::-1]


def _last_waiting(run: Run) -> int:
    return int(np.flatnonzero(series(run)["waiting"] > 0)[-1])


def check_step_counts(rows: list[dict[str, float]], real: Requests) -> tuple[int, int]:
    """(pairs of ends whose true distance in steps is known, how many of them the rows get right).

    For runs without preemption: a request's last token comes output - 1 steps after its first, and requests that share
    a step tie their steps together.
    """
    base: dict[float, tuple[float, int]] = {}

    def find(x: float) -> tuple[float, int]:
        total = 0
        while base.setdefault(x, (x, 0))[0] != x:
            x, distance = base[x]
            total += distance
        return x, total

    for first, last, output in zip(real.first.tolist(), real.last.tolist(), real.output.tolist(), strict=True):
        (a, to_a), (b, to_b) = find(first), find(last)
        if a != b:
            base[b] = (a, to_a + output - 1 - to_b)
    times = [rows[0]["from"]] + [row["to"] for row in rows]
    steps = np.concatenate(([0], np.cumsum([row["steps"] for row in rows])))
    known = right = 0
    where = [find(time) for time in times]
    for i in range(len(times)):
        for j in range(i + 1, len(times)):
            if where[i][0] == where[j][0]:
                known += 1
                right += int(steps[j] - steps[i] == where[j][1] - where[i][1])
    return known, right


def check_tokens(run: Run, real: Requests, rows: list[dict[str, float]]) -> tuple[int, int]:
    """(tokens logged, tokens that the rows account for) over the whole seconds that the rows cover."""
    counters = series(run)
    offset = clock_offset(counters, real)
    inside = (counters["t"] - 1 >= rows[0]["from"] + offset) & (counters["t"] <= rows[-1]["to"] + offset)
    low, high = counters["t"][inside].min() - 1 - offset, counters["t"][inside].max() - offset
    tokens = 0
    for row in rows:
        ends = row["from"] + (row["to"] - row["from"]) / row["steps"] * np.arange(1, row["steps"] + 1)
        tokens += int(row["decodes"] * ((ends >= low) & (ends < high)).sum())
    return int(counters["gen_throughput"][inside].sum()), tokens


def decode_table(rows: list[dict[str, float]], edges: tuple[int, ...]) -> list[dict[str, float]]:
    """Step-weighted means of `decode_steps` by number of decodes."""
    table = []
    for low, high in pairwise(edges):
        inside = [row for row in rows if low < row["decodes"] <= high]
        if not inside:
            continue
        weights = [row["steps"] for row in inside]

        def mean(values: list[float], weights: list[float] = weights) -> float:
            return float(np.average(values, weights=weights))

        table.append({
            "decodes_from": low + 1, "decodes_to": high, "steps": int(sum(weights)),
            "measured_ms": mean([row["measured_ms"] for row in inside]),
            "kernels_ms": mean([row["kernels_ms"] for row in inside]),
            "longest_minus_mean_context": mean([row["max_context"] - row["mean_context"] for row in inside]),
        })  # fmt: skip
    return table


def lone_prefills(run: Run, real: Requests) -> dict[str, Any]:
    """Requests that were admitted alone, prefilled in one step, and got their first token alone.

    From admission to first token they take their own step plus what was still in flight: `lag` is that remainder in
    decode steps of the batch beside them. About 1: asynchronous scheduling; clearly less: part of it was cached.
    """
    model = latency(run, Options())
    lags, short = [], []
    for i, (prompt, scheduled, first) in enumerate(zip(real.prompt, real.scheduled, real.first, strict=True)):
        alone = (np.abs(real.first - first) < SAME).sum() == 1 and (
            np.abs(real.scheduled - scheduled) < SAME
        ).sum() == 1
        beside: BoolArray = (real.first < scheduled) & (real.last > scheduled)
        if not alone or prompt + beside.sum() > 2000 or prompt < 300 or not beside.any():
            continue
        share = (scheduled - real.first) / (real.last - real.first) * (real.output - 1)
        contexts = (real.prompt + share)[beside].astype(np.int64)
        decode = decode_step_time(model, contexts)
        tokens = np.concatenate(([prompt], np.ones(len(contexts), dtype=np.int64)))
        own = model.step_time(tokens, np.concatenate(([0], contexts)), tokens == 1)
        rest = first - scheduled - own
        lags.append(rest / decode)
        if rest < decode - MIN_SHORT:
            short.append((i, float(decode - rest)))
    return {
        "examined": len(lags),
        "median_lag_in_decode_steps": float(np.median(lags)),
        "shortened": len(short),
        "shortened_total": sum(seconds for _, seconds in short),
        "requests": [i for i, _ in short],
    }
