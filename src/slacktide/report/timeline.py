"""A run as a Chrome trace, which https://ui.perfetto.dev and chrome://tracing open.

Format: the trace event format's JSON object ("Trace Event Format", Google, 2016): complete events (ph X) with ts and
dur in microseconds, counters (C), instants (i) and metadata (M). Process 1 is the engine: its steps, named by mode,
which is what Perfetto colours by, and counters. Process 2 holds one thread per request.

Long runs are cut to a window of time: a viewer holds some 100 MB of JSON, and nobody looks at more.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from slacktide.core.types import FloatArray, IntArray, token_deadline
from slacktide.errors import InputError
from slacktide.metrics.decisions import Decisions
from slacktide.metrics.log import END_REASONS, FINISHED, RunLog
from slacktide.metrics.slo import deadline_anchor
from slacktide.report.files import write_files

Event = dict[str, Any]

MAX_STEPS = 20_000
"""Steps of a timeline without a window: some 15 MB of events, minutes of a busy engine."""

MAX_REQUESTS = 2_000
"""Requests of a timeline, at most: more threads than that make a viewer slow, and their spans outweigh the steps."""

ENGINE, REQUESTS = 1, 2
"""Process numbers."""

COLOURS = {"decode": "good", "prefill": "thread_state_runnable", "mixed": "bad"}
"""Reserved colour names of chrome://tracing, green, blue-ish and red-ish; Perfetto colours by the event's name."""


def timeline(
    log: RunLog, label: str, decisions: Decisions | None = None, window: tuple[float, float] | None = None
) -> tuple[dict[str, Any], str]:
    """The trace object of a run, and one line that says what it shows.

    window: seconds on the run's clock to show; None: from the start, up to MAX_STEPS steps and MAX_REQUESTS arrivals.
    Requests that live in it, at most MAX_REQUESTS, the first to arrive. Raises InputError for an empty window, or one
    that shows nothing.
    """
    low, high = _window(log, window)
    steps = np.flatnonzero((log.step_end > low) & (log.start < high))
    ends = np.where(np.isnan(log.end_time), log.end_of_run, log.end_time)
    inside = np.flatnonzero((log.arrival_time < high) & (ends >= low))
    if not steps.size and not inside.size:
        raise InputError(
            f"--window {low:g}:{high:g}: nothing happens then; the run lasts from {log.start_time:g} to "
            f"{log.end_of_run:g} s"
        )
    order = np.argsort(log.arrival_time[inside], kind="stable")
    shown = np.sort(inside[order[:MAX_REQUESTS]])
    events: list[Event] = [name_event(ENGINE, "process_name", f"engine: {label}"), _sort(ENGINE, 0)]
    if steps.size:
        events.append(name_event(ENGINE, "thread_name", "steps", 1))
        events += _step_events(log, steps, decisions) + _counters(log, steps)
    events += [name_event(REQUESTS, "process_name", "requests"), _sort(REQUESTS, 1)]
    for request in shown.tolist():
        events += _request_events(log, request, decisions, low, high)
    told = f"{steps.size:,} of {log.num_steps:,} steps and {shown.size:,} of {log.n:,} requests, {low:g} to {high:g} s"
    if steps.size < log.num_steps or shown.size < log.n:
        told += " (choose another stretch with --window FROM:TO)"
    return trace_object(events, {"run": label, "shows": told}), told


def write_timeline(path: str | os.PathLike[str], trace: dict[str, Any]) -> None:
    """Write the trace object, whole or not at all. Raises InputError naming the path."""
    target = Path(path)
    text = json.dumps(trace, separators=(",", ":"), allow_nan=False)
    write_files(target.parent, {target.name: lambda temporary: temporary.write_text(text, encoding="utf-8")})


def _window(log: RunLog, window: tuple[float, float] | None) -> tuple[float, float]:
    if window is not None:
        if not window[0] < window[1]:
            raise InputError(f"--window {window[0]:g}:{window[1]:g}: expected FROM before TO, in seconds")
        return window
    ends = [log.end_of_run + 1e-6]  # what ends last is inside
    if log.num_steps > MAX_STEPS:
        ends.append(float(log.start[MAX_STEPS]))
    if log.n > MAX_REQUESTS:
        ends.append(max(float(np.sort(log.arrival_time)[MAX_REQUESTS]), log.start_time + 1e-6))
    return log.start_time, min(ends)


def trace_object(events: list[Event], about: dict[str, Any]) -> dict[str, Any]:
    """The file's JSON object."""
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def microseconds(seconds: float) -> float:
    """The format's unit, to the nanosecond."""
    return round(seconds * 1e9) / 1e3


def span(process: int, thread: int, name: str, start: float, end: float, args: Event, colour: str = "") -> Event:
    """A complete event, from and to in seconds.

    Its length is that between the rounded ends: one nanosecond of overlap, and Perfetto draws the next span below.
    """
    first, last = round(start * 1e9), round(end * 1e9)
    event: Event = {"name": name, "ph": "X", "pid": process, "tid": thread, "ts": first / 1e3,
                    "dur": max(last - first, 0) / 1e3, "args": args}  # fmt: skip
    return event | {"cname": colour} if colour else event


def name_event(process: int, kind: str, name: str, thread: int = 0) -> Event:
    """Metadata: the name of a process or thread."""
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "ts": 0, "args": {"name": name}}


def _sort(process: int, index: int) -> Event:
    return {"name": "process_sort_index", "ph": "M", "pid": process, "tid": 0, "ts": 0, "args": {"sort_index": index}}


def counter(name: str, ts: float, values: Mapping[str, float]) -> Event:
    """A counter of the engine."""
    return {"name": name, "ph": "C", "pid": ENGINE, "tid": 0, "ts": ts, "args": dict(values)}


def mode_of(log: RunLog, step: int) -> str:
    """decode, prefill or mixed."""
    if not log.num_prefills[step]:
        return "decode"
    return "mixed" if log.num_decodes[step] else "prefill"


def _step_events(log: RunLog, steps: IntArray, decisions: Decisions | None) -> list[Event]:
    events, busy = [], -math.inf
    for step in steps.tolist():
        args: Event = {
            "step": step,
            "prefill_tokens": int(log.num_prefill_tokens[step]),
            "prompts": int(log.num_prefills[step]),
            "decodes": int(log.num_decodes[step]),
        }
        if log.num_preempted[step]:
            args["preempted"] = int(log.num_preempted[step])
        if decisions is not None:
            if math.isfinite(decisions.predicted[step]):
                args["predicted_ms"] = round(float(decisions.predicted[step]) * 1e3, 3)
            if decisions.why(step):
                args["why"] = decisions.why(step)
        mode = mode_of(log, step)
        start, end = max(float(log.start[step]), busy), float(log.step_end[step])
        busy = end
        events.append(span(ENGINE, 1, mode, start, end, args, COLOURS[mode]))
    return events


def _counters(log: RunLog, steps: IntArray) -> list[Event]:
    """KV blocks, queue, and the slack of the tightest token that each step delivered."""
    slack = step_slack(log)
    events = []
    for step in steps.tolist():
        ts = microseconds(float(log.start[step]))
        free = int(log.num_free_blocks[step])
        events.append(counter("KV blocks", ts, {"used": log.num_blocks - free, "free": free}))
        queue = {"waiting": int(log.num_waiting[step]), "running": int(log.num_running[step])}
        events.append(counter("queue", ts, queue))
        if math.isfinite(slack[step]):
            events.append(counter("slack of the tightest token, ms", ts, {"slack": round(float(slack[step]) * 1e3, 3)}))
    return events


def step_slack(log: RunLog) -> FloatArray:
    """float64[m] seconds: least of (deadline - time) over the tokens that a step delivered; infinity where none has."""
    slack = np.full(log.num_steps, np.inf)
    anchor, to_first = deadline_anchor(log)
    if log.token_step is None:
        return slack
    for a, b, low, high in log.token_blocks():
        counts = log.num_entries[a:b]
        k = np.arange(high - low) - np.repeat(log.token_offsets[a:b] - low, counts)
        first, later, each = (np.repeat(column[a:b], counts) for column in (anchor, to_first, log.slo_tbt))
        np.minimum.at(slack, log.token_step[low:high], token_deadline(first, later, each, k) - log.times(low, high))
    return slack


def _request_events(log: RunLog, request: int, decisions: Decisions | None, low: float, high: float) -> list[Event]:
    """The thread of a request: queue, prompt chunks, stretches of decoding, and the waits between them."""
    thread = request + 1
    events = [name_event(REQUESTS, "thread_name", f"request {request}", thread)]
    for name, start, end, args in spans(log, request, decisions):
        if end >= low and start < high:
            events.append(span(REQUESTS, thread, name, start, end, args))
    end, reason = float(log.end_time[request]), int(log.end_reason[request])
    if reason != FINISHED and low <= end < high:
        events.append({"name": END_REASONS[reason], "ph": "i", "s": "t", "pid": REQUESTS, "tid": thread,
                       "ts": microseconds(end), "args": {}})  # fmt: skip
    return events


def spans(
    log: RunLog, request: int, decisions: Decisions | None = None
) -> list[tuple[str, float, float, dict[str, Any]]]:
    """(name, start, end, details) of a request's life in order, without overlap. Names: queue, prefill, stall,
    preempted, decode; for a client's log first token and decode. Seconds on the run's clock."""
    arrival, end = float(log.arrival_time[request]), float(log.end_time[request])
    end = log.end_of_run if math.isnan(end) else end
    facts = {"prompt_tokens": int(log.num_prompt_tokens[request]), "output_tokens": int(log.num_output_tokens[request])}
    if log.token_step is None:
        return _client_spans(log, request, arrival, end, facts)
    found: list[tuple[str, float, float, dict[str, Any]]] = []
    cursor, waiting = arrival, "queue"

    def wait(until: float) -> None:
        nonlocal cursor
        if until > cursor:
            found.append((waiting, cursor, until, facts if waiting == "queue" else {}))
            cursor = until

    tokens = log.token_step[log.token_offsets[request] : log.token_offsets[request + 1]].astype(np.int64)
    number = {step: k for k, step in enumerate(tokens.tolist())}
    chunks: dict[int, int] = {}
    losses: list[int] = []
    first = float(log.first_scheduled_time[request])
    if decisions is not None:
        steps, sizes = decisions.chunks_of(request)
        chunks = dict(zip(steps.tolist(), sizes.tolist(), strict=True))
        losses = decisions.preemptions_of(request).tolist()
    elif not math.isnan(first):  # one span for all the prompt's work
        wait(first)
        upto = float(log.step_end[tokens[0]]) if tokens.size else end
        found.append(("prefill", cursor, upto, {}))
        cursor, waiting = upto, "stall"
        number.pop(int(tokens[0]) if tokens.size else -1, None)
    run: list[int] = []

    def close() -> None:
        nonlocal cursor
        if run:
            start, stop = max(float(log.start[run[0]]), cursor), float(log.step_end[run[-1]])
            details = {"first_token": number[run[0]], "tokens": len(run), "steps": f"{run[0]} to {run[-1]}"}
            found.append(("decode", start, stop, details))
            cursor = stop
            run.clear()

    for step in sorted({*number, *chunks}):
        while losses and losses[0] <= step:
            close()
            wait(float(log.start[losses.pop(0)]))
            waiting = "preempted"
        if step in chunks or (run and step != run[-1] + 1):
            close()
        if not run:
            wait(float(log.start[step]))
        if step in chunks:
            details: dict[str, Any] = {"tokens": chunks[step], "step": step}
            if decisions is not None and decisions.why(step):
                details["why"] = decisions.why(step)
            found.append(("prefill", max(float(log.start[step]), cursor), float(log.step_end[step]), details))
            cursor = float(log.step_end[step])
        else:
            run.append(step)
        waiting = "stall"
    close()
    if losses:
        if losses[0] < log.num_steps:
            wait(float(log.start[losses[0]]))
        waiting = "preempted"
    wait(end)
    return found


def _client_spans(
    log: RunLog, request: int, arrival: float, end: float, facts: dict[str, Any]
) -> list[tuple[str, float, float, dict[str, Any]]]:
    times = log.request_times(request)
    if not times.size:
        return [("first token", arrival, end, facts)]
    first, last = float(times[0]), float(times[-1])
    return [("first token", arrival, first, facts), ("decode", first, last, {"tokens": int(times.size) - 1})]
