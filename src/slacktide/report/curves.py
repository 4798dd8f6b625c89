"""The curves of a report, from the runs' logs: distributions, and what happened over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from slacktide.core.types import BoolArray, FloatArray
from slacktide.metrics import slo
from slacktide.metrics.late import Lateness
from slacktide.metrics.log import RunLog
from slacktide.metrics.slo import Verdicts
from slacktide.metrics.stats import Distribution
from slacktide.report.charts import Chart, Mark, Series
from slacktide.report.intervals import student_half, wilson
from slacktide.report.source import Run

STRETCHES = 60
"""Stretches of time in charts over time: a bar of 8 units each."""

BATCHES = 20
"""Batches of consecutive arrivals behind the interval of one run's attainment: the usual compromise between enough
batches for Student's t and batches long enough to be nearly independent."""

SHARES = (0.5, 0.9, 0.99, 0.999)


def colour(run: int) -> str:
    """CSS class of a run's colour."""
    return f"c{run % 8}"


def attainment_interval(verdict: Verdicts, log: RunLog) -> tuple[float, float] | None:
    """95 % interval of a run's attainment, by batch means over consecutive arrivals; None for too few of them.

    Neighbours fail together, so the binomial interval would be too narrow (Law and Carson, 1979); but it is never less
    than Wilson's: where all are met, batches do not differ, and yet nobody knows that none will miss.
    """
    order = np.argsort(log.arrival_time, kind="stable")
    judged = order[verdict.judged[order]]
    if judged.size < 2 * BATCHES:
        return None
    half = student_half([float(verdict.met[rows].mean()) for rows in np.array_split(judged, BATCHES)])
    middle = float(verdict.met[judged].mean())
    low, high = wilson(middle, judged.size)
    return max(min(middle - half, low), 0.0), min(max(middle + half, high), 1.0)


def shared_target(logs: Sequence[RunLog], column: str) -> float | None:
    """The target in seconds where all requests of all runs have the same; None elsewhere."""
    found = {float(v) for log in logs for v in np.unique(getattr(log, column))}
    only = found.pop() if len(found) == 1 else math.inf
    return only if math.isfinite(only) else None


def latency_chart(
    key: str,
    title: str,
    distributions: Sequence[tuple[Distribution, int]],
    runs: Sequence[Run],
    target: float | None,
    note: str,
) -> Chart:
    """CDFs on a log axis, the shares by their nines. `distributions`: with how many numbers there should be."""
    series, rows = [], []
    for i, ((d, whole), run) in enumerate(zip(distributions, runs, strict=True)):
        values, share = d.cdf()
        share = np.minimum(share * d.size / max(whole, 1), 1.0 - 0.5 / max(whole, 1))
        keep = _by_rank(share)
        x = np.maximum(values[keep] * 1e3, 1e-3)  # a gap of 0 (two tokens of one step) has no place on a log axis
        series.append(Series(run.name, x, share[keep], colour(i), "step", i))
        cells = [_quantile(values, d.cdf()[1] * d.size / max(whole, 1), q) for q in SHARES]
        rows.append([run.name, *cells])
    marks = [] if target is None else [Mark(target * 1e3, f"SLO {target * 1e3:g} ms")]
    head = ["policy", *(f"{100 * q:g} % within, ms" for q in SHARES)]
    return Chart(
        key, title, "milliseconds", "% within", series, "log", "tail", marks, note, head, rows
    )  # fmt: skip


def _by_rank(share: FloatArray) -> Any:
    """Some 400 positions, even in shares and in nines: neither the body nor the tail loses its shape."""
    if share.size <= 400:
        return np.arange(share.size)
    at = np.concatenate([np.linspace(0, share[-1], 200), 1 - np.geomspace(1, max(1 - share[-1], 1e-6), 200)])
    return np.unique(np.clip(np.searchsorted(share, at), 0, share.size - 1))


def _quantile(values: FloatArray, share: FloatArray, q: float) -> str:
    at = int(np.searchsorted(share, q - 1e-12))
    return "-" if at >= values.size else f"{values[at] * 1e3:,.4g}"


def ttft_chart(runs: Sequence[Run], logs: Sequence[RunLog]) -> Chart:
    """First tokens of all arrivals."""
    found = [(Distribution.of(slo.ttft(log)), log.n) for log in logs]
    note = "Of all arrivals: a curve that ends below the top left requests without a first token."
    return latency_chart("ttft", "Time to first token", found, runs, shared_target(logs, "slo_ttft"), note)


def tbt_chart(runs: Sequence[Run], logs: Sequence[RunLog]) -> Chart:
    """Gaps between tokens of the finished requests."""
    found = [(d, d.size) for d in map(slo.gaps, logs)]
    note = "Every gap between two tokens. Above 99 % stand the stalls that readers notice."
    return latency_chart("tbt", "Time between tokens", found, runs, shared_target(logs, "slo_tbt"), note)


def slack_chart(runs: Sequence[Run], lates: Sequence[Lateness]) -> Chart | None:
    """Time left to the last token's deadline; None where no token has one."""
    columns = [late.slack[~np.isnan(late.slack)] for late in lates]
    everything = np.concatenate(columns) if columns else np.empty(0)
    if not everything.size:
        return None
    low, high = (float(v) for v in np.percentile(everything, (0.5, 99.5)))
    series, rows = [], []
    for i, (values, run) in enumerate(zip(columns, runs, strict=True)):
        if values.size:
            d = Distribution.of(np.clip(values, low, high))
            x, share = d.cdf()
            keep = np.unique(np.linspace(0, x.size - 1, 400).astype(int))
            series.append(Series(run.name, x[keep], share[keep], colour(i), "step", i))
            cells = [f"{v:,.3g}" for v in np.percentile(values, (1, 10, 50, 90))]
            rows.append([run.name, f"{100 * float((values < 0).mean()):.1f} %", *cells])
    return Chart(
        "slack", "Slack at completion", "seconds left at the last token (below 0: late)", "share of requests",
        series, marks=[Mark(0.0, "deadline")], percent=True,
        note="How much room the policy left. Far to the right is speed that nobody asked for.",
        head=["policy", "late", "1 %", "10 %", "median s", "90 %"], rows=rows,
        x_range=(min(low, -1e-3), max(high, 1e-3)),
    )  # fmt: skip


def edges_of(logs: Sequence[RunLog]) -> FloatArray:
    """Edges of equal stretches of time over all runs."""
    low, high = min(log.start_time for log in logs), max(log.end_of_run for log in logs)
    most = max(log.n for log in logs)
    return np.linspace(low, max(high, low + 1e-6), min(max(most // 10, 10), STRETCHES) + 1)


def violations_chart(runs: Sequence[Run], logs: Sequence[RunLog], verdicts: Sequence[Verdicts]) -> Chart:
    """Requests per second that missed, by arrival, before the load itself. One run: by kind."""
    edges = edges_of(logs)
    middle, width = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
    missed = any(verdict.missed.any() for verdict in verdicts)

    def rate(log: RunLog, rows: BoolArray) -> FloatArray:
        return np.asarray(np.histogram(log.arrival_time[rows], edges)[0] / width)

    load = rate(logs[0], np.ones(logs[0].n, dtype=bool))
    series = [Series("arrivals", middle, load, "load", "area", None, quiet=True)]
    rows = []
    kinds = (("ttft", "first token late", "c1"), ("tbt", "later tokens late", "c0"), ("e2e", "end late", "c3"),
             ("unserved", "not served", "c6"))  # fmt: skip
    if len(runs) == 1:
        for key, name, of in kinds:
            which = getattr(verdicts[0], key)
            rows.append([name, f"{int(which.sum()):,}"])
            if which.any():
                series.append(Series(name, middle, rate(logs[0], which), of, "line"))
        head = ["kind of miss (a request may have several)", "requests"]
    else:
        for i, (run, log, verdict) in enumerate(zip(runs, logs, verdicts, strict=True)):
            series.append(Series(run.name, middle, rate(log, verdict.missed), colour(i), "line", i))
            rows.append([run.name, *(f"{int(getattr(verdict, key).sum()):,}" for key, _, _ in kinds)])
        head = ["policy", *(name for _, name, _ in kinds)]
    return Chart(
        "violations", "Misses over time, and the load", "seconds (when the requests arrived)", "requests/s", series,
        note="Grey: all arrivals per second. " + ("Lines: those of them that missed their SLO." if missed
                                                  else "None of them missed its SLO."), head=head, rows=rows,
    )  # fmt: skip


def in_system_chart(runs: Sequence[Run], logs: Sequence[RunLog]) -> Chart:
    """Requests that arrived and have not ended, at the edges of equal stretches."""
    edges = edges_of(logs)
    series, rows = [], []
    for i, (run, log) in enumerate(zip(runs, logs, strict=True)):
        ends = np.sort(np.where(np.isnan(log.end_time), log.end_of_run, log.end_time))
        there = np.searchsorted(np.sort(log.arrival_time), edges, "right") - np.searchsorted(ends, edges, "right")
        series.append(Series(run.name, edges, there.astype(np.float64), colour(i), "line", i))
        rows.append([run.name, f"{there.max():,}", f"{there.mean():,.1f}"])
    return Chart(
        "system", "Requests in the system", "seconds", "requests", series,
        note="Waiting and running. A line that keeps rising is a server that does not keep up.",
        head=["policy", "most", "mean"], rows=rows,
    )  # fmt: skip


def step_charts(key: str, log: RunLog) -> list[Chart]:
    """What the engine did over time: tokens by phase, time by kind of step, KV blocks, queue. None without steps."""
    if not log.num_steps:
        return []
    edges = np.linspace(log.start_time, max(log.end_of_run, log.start_time + 1e-6), STRETCHES + 1)
    middle, width = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
    bins = np.clip(np.searchsorted(edges, log.start, "right") - 1, 0, STRETCHES - 1)
    moments = np.column_stack([log.start, log.step_end]).ravel()

    def total(amounts: Any) -> FloatArray:
        """What each stretch gets of an amount per step, spread evenly over the step's time."""
        done = np.cumsum(amounts, dtype=np.float64)
        return np.diff(np.interp(edges, moments, np.column_stack([done - amounts, done]).ravel()))

    prompt = total(log.num_prefill_tokens) / width
    decode = total(log.num_decodes) / width
    tokens = Chart(
        f"{key}-tokens", "Tokens computed", "seconds", "tokens/s",
        [Series("decode", middle, decode, "decode", "bars"),
         Series("prefill", middle, prompt + decode, "prefill", "bars", base=decode)],
        note="Prompt tokens on top of decode tokens.",
        head=["", "prompt tokens", "decode tokens"],
        rows=[["whole run", f"{int(log.num_prefill_tokens.sum()):,}", f"{int(log.num_decodes.sum()):,}"]],
    )  # fmt: skip
    kinds = {"decode": log.num_prefills == 0, "prefill": (log.num_decodes == 0) & (log.num_prefills > 0)}
    kinds["mixed"] = ~(kinds["decode"] | kinds["prefill"])
    below, series, rows = np.zeros(STRETCHES), [], []
    for name, of in kinds.items():
        part = total(np.where(of, log.duration, 0.0)) / width
        series.append(Series(name, middle, below + part, name, "bars", base=below))
        below = below + part
        steps = int(of.sum())
        mean = f"{1e3 * float(log.duration[of].mean()):.2f}" if steps else "-"
        rows.append(
            [name, f"{steps:,}", f"{100 * float(log.duration[of].sum() / max(log.sim_duration, 1e-12)):.1f} %", mean]
        )
    time = Chart(
        f"{key}-modes", "Where the engine's time went", "seconds", "share of time", series, percent=True,
        note="Kinds of step: decodes alone, prompts alone, or mixed. What is missing to 100 % is idle.",
        head=["kind of step", "steps", "of the run", "mean ms"], rows=rows,
    )  # fmt: skip
    return [tokens, time, *_pressure(key, log, bins, middle)]


def _pressure(key: str, log: RunLog, bins: Any, middle: FloatArray) -> list[Chart]:
    def most(values: FloatArray) -> FloatArray:
        found = np.full(STRETCHES, -np.inf)
        np.maximum.at(found, bins, values)
        return np.where(np.isinf(found), np.nan, found)

    charts = []
    if log.num_blocks:
        used = most(1.0 - log.num_free_blocks / log.num_blocks)
        lost = np.bincount(bins, weights=log.num_preempted, minlength=STRETCHES)
        series = [Series("KV blocks held", middle, used, "decode", "line")]
        if lost.any():
            where = np.flatnonzero(lost)
            series.append(Series("with preemptions", middle[where], used[where], "stall", "dots"))
        charts.append(Chart(
            f"{key}-kv", "KV blocks and preemptions", "seconds", "share of KV blocks", series, percent=True,
            note="The most blocks held in each stretch; dots where requests lost theirs.",
            head=["preemptions", "tokens computed again", "most blocks held"],
            rows=[[f"{int(log.num_preemptions.sum()):,}", f"{int(log.recomputed_tokens.sum()):,}",
                   f"{100 * float(np.nanmax(used)):.1f} %"]],
        ))  # fmt: skip
    running, waiting = (most(v.astype(np.float64)) for v in (log.num_running, log.num_waiting))
    charts.append(Chart(
        f"{key}-queue", "Running and waiting", "seconds", "requests",
        [Series("waiting", middle, waiting, "mixed", "line"), Series("running", middle, running, "decode", "line")],
        note="The most of each stretch.", head=["", "most", "mean over steps"],
        rows=[[name, f"{int(of.max(initial=0)):,}", f"{float(of.mean()):,.1f}"]
              for name, of in (("waiting", log.num_waiting), ("running", log.num_running))],
    ))  # fmt: skip
    return charts
