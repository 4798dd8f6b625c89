"""A run in one dictionary, ready for JSON: vllm bench's keys and ours. Undefined values are None, never NaN.

Times in milliseconds where a key ends in `_ms`, else in seconds. Definitions in slo.py; docs/metrics.md lists the keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from slacktide.core.types import FloatArray, IntArray
from slacktide.metrics.log import CUT_OFF, END_REASONS, RunLog
from slacktide.metrics.slo import Verdicts, e2el, gaps, judge, queue_time, slowdown, tpot, ttft
from slacktide.metrics.stats import Distribution

PERCENTILES = (50.0, 90.0, 99.0)


def summarize(
    log: RunLog,
    *,
    mode: str = "deadline",
    tolerated_late_share: float = 0.0,
    isolated: FloatArray | Callable[[IntArray, IntArray], FloatArray] | None = None,
    verdicts: Verdicts | None = None,
) -> dict[str, Any]:
    """The whole run, judged by the SLOs in the log.

    `mode` and `tolerated_late_share` as in `slo.judge`; `verdicts` skips judging again; `isolated` (see
    `slo.slowdown`) adds slowdown. Raises InputError for a bad mode or share.
    """
    verdict = judge(log, mode, tolerated_late_share) if verdicts is None else verdicts
    duration, everyone = log.sim_duration, np.arange(log.n)
    good = verdict.met if verdict.has_slo.any() else None
    summary: dict[str, Any] = {"duration": duration, "num_requests": log.n}
    summary |= _counts(log, everyone)
    summary |= {
        "request_throughput": _rate(summary["completed"], duration),
        "request_goodput": None if good is None else _rate(int(good.sum()), duration),
        "output_throughput": _rate(summary["total_output_tokens"], duration),
        "total_token_throughput": _rate(summary["total_input_tokens"] + summary["total_output_tokens"], duration),
        "token_goodput": None if good is None else _rate(int(log.num_delivered_tokens[good].sum()), duration),
        "slo_mode": mode,
        "tolerated_late_share": tolerated_late_share,
        "attainment": verdict.attainment(),
        "token_attainment": verdict.token_attainment(),
        "excluded": int((~verdict.judged).sum()),
        "violations": verdict.violations(),
        "end_reasons": {name: int((log.end_reason == code).sum()) for code, name in enumerate(END_REASONS)},
        "relegated": int(log.relegated.sum()),
    }
    summary |= _latencies(log, everyone)
    if isolated is not None:
        served = np.where(log.finished, slowdown(log, isolated), np.nan)
        summary |= _describe("slowdown", Distribution.of(served), scale=1.0, unit="")
    summary |= _engine(log) | _occupancy(log)
    summary["classes"] = _table(log, verdict, log.slo_class, log.slo_classes)
    summary["tenants"] = _table(log, verdict, log.tenant, log.tenants)
    summary["notes"] = list(log.notes)
    return summary


def _rate(count: int, duration: float) -> float | None:
    return count / duration if duration > 0 else None


def _counts(log: RunLog, rows: IntArray) -> dict[str, int]:
    """vllm bench counts tokens of completed requests only. failed: ended without being served, for whatever reason."""
    done = rows[log.finished[rows]]
    is_open = int((log.end_reason[rows] == CUT_OFF).sum())
    return {
        "completed": len(done),
        "failed": len(rows) - len(done) - is_open,
        "total_input_tokens": int(log.num_prompt_tokens[done].sum()),
        "total_output_tokens": int(log.num_delivered_tokens[done].sum()),
    }


def _latencies(log: RunLog, rows: IntArray) -> dict[str, float | None]:
    """Over completed requests, as in vllm bench: zeros or cut-off times of failed ones would flatter the server."""
    done = rows[log.finished[rows]]
    gap = gaps(log, done)
    result = _describe("ttft", Distribution.of(ttft(log)[done]))
    result |= _describe("tpot", Distribution.of(tpot(log)[done]))
    result |= _describe("itl", gap)
    result |= _describe("e2el", Distribution.of(e2el(log)[done]))
    result |= _describe("queue", Distribution.of(queue_time(log)[done]))
    widest = gap.max()
    return result | {"max_gap_ms": None if widest is None else widest * 1e3}


def _describe(name: str, d: Distribution, scale: float = 1e3, unit: str = "_ms") -> dict[str, float | None]:
    numbers = {"mean": d.mean(), "median": d.percentile(50.0), "std": d.std()}
    numbers |= {f"p{q:g}": d.percentile(q) for q in PERCENTILES}
    return {f"{key}_{name}{unit}": None if value is None else value * scale for key, value in numbers.items()}


def _engine(log: RunLog) -> dict[str, Any]:
    """Steps, preemptions, and what the policy cost."""
    scheduled, steps = int(log.scheduled_tokens.sum()), log.num_steps
    busy = float(log.duration.sum())
    modes = {
        "decode": log.num_prefills == 0,
        "prefill": (log.num_decodes == 0) & (log.num_prefills > 0),
        "mixed": (log.num_decodes > 0) & (log.num_prefills > 0),
    }
    recomputed = int(log.recomputed_tokens.sum())
    seen = log.token_step is not None or scheduled > 0  # a client sees nothing of a server's scheduler: null, not 0
    return {
        "num_steps": steps if log.token_step is not None else None,
        "step_mode_share": {name: float(of.sum() / steps) if steps else None for name, of in modes.items()},
        "step_mode_time_share": {
            name: float(log.duration[of].sum() / busy) if busy > 0 else None for name, of in modes.items()
        },
        "mean_step_ms": busy / steps * 1e3 if steps else None,
        "busy_share": busy / log.sim_duration if steps and log.sim_duration > 0 else None,
        "num_preemptions": int(log.num_preemptions.sum()) if seen else None,
        "scheduled_tokens": scheduled if seen else None,
        "recomputed_tokens": recomputed if seen else None,
        "preemption_tax": recomputed / scheduled if scheduled else None,
        "cached_tokens": int(log.cached_tokens.sum()) if seen else None,
        "sim_duration": log.sim_duration,
        "wall_time": log.wall_time,
        "decision_time": log.decision_time,
        "mean_decision_ms": None if log.decision_time is None or not steps else log.decision_time / steps * 1e3,
    }


def _occupancy(log: RunLog) -> dict[str, float | None]:
    """Time averages over the run, T long.

    mean_in_system = (1/T) integral of N(t) dt, N = requests that arrived and have not ended; by Little's law that is
    L = lambda W, with lambda = arrivals / T and W = mean time in the system (up to the end of the run for open ones).
    mean_running and mean_waiting weigh what each step saw at its start by the step's length; an idle engine counts 0.
    """
    span = log.sim_duration
    if not span > 0 or not log.n:
        return {"mean_in_system": None, "littles_law": None, "mean_running": None, "mean_waiting": None}
    ends = np.where(np.isnan(log.end_time), log.end_of_run, log.end_time)
    when = np.concatenate([log.arrival_time, ends])
    change = np.concatenate([np.ones(log.n, dtype=np.int64), -np.ones(log.n, dtype=np.int64)])
    order = np.argsort(when, kind="stable")
    in_system = np.cumsum(change[order])[:-1]
    arrival_rate, time_in_system = log.n / span, float((ends - log.arrival_time).mean())
    steps = log.num_steps > 0
    return {
        "mean_in_system": float((in_system * np.diff(when[order])).sum() / span),
        "littles_law": arrival_rate * time_in_system,
        "mean_running": float((log.num_running * log.duration).sum() / span) if steps else None,
        "mean_waiting": float((log.num_waiting * log.duration).sum() / span) if steps else None,
    }


def _table(log: RunLog, verdict: Verdicts, codes: IntArray, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """One row per class or tenant that occurs; empty where there is only one, as its row would repeat the whole."""
    table: dict[str, dict[str, Any]] = {}
    if len(names) < 2:
        return table
    for code, name in enumerate(names):
        rows = np.flatnonzero(codes == code)
        if not len(rows):
            continue
        met = int(verdict.met[rows].sum()) if verdict.has_slo[rows].any() else None
        table[name] = {
            "num_requests": len(rows),
            **_counts(log, rows),
            "attainment": verdict.attainment(rows),
            "token_attainment": verdict.token_attainment(rows),
            "request_goodput": None if met is None else _rate(met, log.sim_duration),
            "violations": verdict.violations(rows),
            "num_preemptions": int(log.num_preemptions[rows].sum()),
            "excluded": int((~verdict.judged[rows]).sum()),
            **_latencies(log, rows),
        }
    return table
