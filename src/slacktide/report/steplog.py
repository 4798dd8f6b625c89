"""A step log of the plug-in, one JSON object a line, as a timeline of the engine."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from slacktide.errors import InputError
from slacktide.report.timeline import (
    COLOURS,
    ENGINE,
    MAX_STEPS,
    Event,
    counter,
    microseconds,
    name_event,
    span,
    trace_object,
)


def step_log_timeline(
    lines: list[dict[str, Any]], label: str, window: tuple[float, float] | None = None
) -> tuple[dict[str, Any], str]:
    """The trace object of a step log, at most its first MAX_STEPS steps (of the window), and what it shows.

    It knows no requests. Times, the window's too, count from the first step, in seconds. Raises InputError for a window
    without steps.
    """
    low, high = (-math.inf, math.inf) if window is None else window
    first = float(lines[0]["start"])
    inside = [each for each in zip(lines, _ran(lines), strict=True) if low <= each[0]["start"] - first < high]
    if not inside:
        raise InputError(
            f"--window {low:g}:{high:g}: no step then; the log lasts {lines[-1]['start'] - lines[0]['start']:g} s"
        )
    shown = inside[:MAX_STEPS]
    events: list[Event] = [
        name_event(ENGINE, "process_name", f"engine: {label}"),
        name_event(ENGINE, "thread_name", "steps", 1),
    ]
    for line, (start, end) in shown:
        ts = microseconds(start)
        prompt, decodes = int(line.get("prefill_tokens", 0)), int(line.get("num_decodes", 0))
        mode = "mixed" if prompt and decodes else "prefill" if prompt else "decode"
        known = ("mode", "predicted_s", "decision_s", "num_running", "num_waiting", "num_preempted", "fallback")
        args = {"prefill_tokens": prompt, "decodes": decodes} | {name: line[name] for name in known if name in line}
        events.append(span(ENGINE, 1, mode, start, end, args, COLOURS[mode]))
        events.append(counter("queue", ts, {"waiting": int(line["num_waiting"]), "running": int(line["num_running"])}))
        events.append(counter("free KV blocks", ts, {"free": int(line["num_free_blocks"])}))
        if isinstance(line.get("slack_s"), (int, float)) and math.isfinite(line["slack_s"]):
            late = {"slack": round(1e3 * line["slack_s"], 3)}
            events.append(counter("least slack of live requests, ms", microseconds(end), late))
    told = f"{len(shown):,} of {len(lines):,} steps of a real engine"
    if len(shown) < len(lines):
        told += " (choose another stretch with --window FROM:TO)"
    return trace_object(events, {"run": label, "shows": told}), told


def _ran(lines: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """When each step ran, in seconds from the first one's start, without overlap.

    A step is scheduled while its predecessor still runs, and its logged duration counts from that one's end
    (slacktide.vllm.ledger).
    """
    found, busy = [], 0.0
    for line in lines:
        start = max(float(line["start"]) - float(lines[0]["start"]), busy)
        busy = start + float(line["duration_s"])
        found.append((start, busy))
    return found


def read_step_log(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a plug-in's step log. Raises InputError naming the line."""
    lines: list[dict[str, Any]] = []
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot read this step log ({error})") from error
    rows = text.split("\n")
    for number, row in enumerate(rows, 1):
        if not row.strip():
            continue
        try:
            line = json.loads(row)
        except (ValueError, RecursionError) as error:
            if number == len(rows):
                break  # the engine was writing it
            raise InputError(f"{path}, line {number}: expected a JSON object, found {row[:40]!r}") from error
        _check(line, f"{path}, line {number}")
        lines.append(line)
    if not lines:
        raise InputError(f"{path}: no step in this log")
    return lines


NEEDED = ("start", "duration_s", "num_running", "num_waiting", "num_free_blocks")
MAX_NUMBER = 1e12
"""Of any field: beyond every count, and beyond Unix time in seconds by far (milliseconds would pass for it)."""


def _check(line: Any, where: str) -> None:
    """Raise InputError unless `line` is a step: what is needed is there, and every number is one."""
    if not isinstance(line, dict) or (absent := [name for name in NEEDED if name not in line]):
        lacks = f" (no {absent[0]!r})" if isinstance(line, dict) else f", found {str(line)[:40]!r}"
        raise InputError(f"{where}: expected a step with {', '.join(NEEDED)}{lacks}")
    for name, value in line.items():
        counted = name in NEEDED or name in ("prefill_tokens", "num_decodes")
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        least = 0 if counted else -MAX_NUMBER
        if (counted and not number) or (number and not least <= value <= MAX_NUMBER):
            raise InputError(f"{where}: {name}: expected a number from 0, found {str(value)[:40]}")
