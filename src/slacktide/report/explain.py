"""The life of one request, step by step, as text: what it waited for, what ran, and why the policy said so."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from slacktide.core.types import FloatArray, token_deadline
from slacktide.errors import InputError
from slacktide.metrics.decisions import Decisions
from slacktide.metrics.late import lateness, parts_of, seconds_text, why_late
from slacktide.metrics.log import END_REASONS, RunLog
from slacktide.metrics.slo import TIME_TOLERANCE, deadline_anchor
from slacktide.report.timeline import mode_of, spans

MAX_LINES = 80
"""Lines of a life, at most: two screens. Longer ones are cut in the middle, where they repeat themselves."""

WHY_WIDTH = 160
"""Characters of a policy's reason."""


def explain(log: RunLog, request: int, label: str, decisions: Decisions | None = None) -> str:
    """The text. Raises InputError for a request that the run does not have."""
    if not 0 <= request < log.n:
        raise InputError(f"--explain {request}: expected a request from 0 to {log.n - 1}, in the order of arrival")
    lines = _head(log, request, label)
    body = [
        line for span in _grouped(spans(log, request, decisions)) for line in _span_lines(log, request, decisions, span)
    ]
    if len(body) > MAX_LINES:
        half = MAX_LINES // 2
        body = [*body[:half], f"  ... {len(body) - 2 * half} lines left out ...", *body[-half:]]
    return "\n".join([*lines, "", *body, "", *_foot(log, request, decisions)]) + "\n"


_Span = tuple[str, float, float, dict[str, Any]]


def _grouped(found: list[_Span]) -> list[_Span]:
    """Of more than three prompt chunks in a row the middle ones become one span, "chunks"."""
    out: list[_Span] = []
    at = 0
    while at < len(found):
        last = at
        while last < len(found) and found[last][0] == "prefill" and "step" in found[last][3]:
            last += 1
        run, at = found[at:last], max(last, at + 1)
        if len(run) > 3:
            middle = run[1:-1]
            details = {"tokens": sum(span[3]["tokens"] for span in middle), "count": len(middle)}
            details["steps"] = f"{middle[0][3]['step']} to {middle[-1][3]['step']}"
            out += [run[0], ("chunks", middle[0][1], middle[-1][2], details), run[-1]]
        else:
            out += run or [found[at - 1]]
    return out


def _head(log: RunLog, request: int, label: str) -> list[str]:
    targets = [
        f"{name} {1e3 * float(value):g} ms"
        for name, value in (
            ("ttft", log.slo_ttft[request]),
            ("tbt", log.slo_tbt[request]),
            ("e2el", log.slo_e2e[request]),
        )
        if math.isfinite(value)
    ]
    prompt, wanted = int(log.num_prompt_tokens[request]), int(log.num_output_tokens[request])
    names = [
        f"{kind} {of[int(code)]}"
        for kind, of, code in (
            ("class", log.slo_classes, log.slo_class[request]),
            ("tenant", log.tenants, log.tenant[request]),
        )
        if len(of) > 1
    ]
    cached = int(log.cached_tokens[request])
    return [
        f"request {request} of {log.n:,} under {label}",
        f"  {prompt:,} prompt tokens{f' ({cached:,} cached)' if cached else ''}, {wanted:,} output tokens"
        + "".join(f", {name}" for name in names),
        f"  target: {', '.join(targets) or 'none'}",
        "  times in seconds after its arrival "
        f"(at {float(log.arrival_time[request]):.3f} s); slack: time left to the token's deadline",
    ]


def _foot(log: RunLog, request: int, decisions: Decisions | None) -> list[str]:
    late = lateness(log)
    parts = parts_of(log, request, decisions)
    end = float(log.end_time[request])
    took = parts.total
    lines = [f"{END_REASONS[int(log.end_reason[request])]}{'' if math.isnan(end) else f' after {seconds_text(took)}'}"]
    shares = [f"{name} {seconds_text(value)}" for name, value in parts.seconds.items() if value > TIME_TOLERANCE]
    lines.append(f"  {' + '.join(shares) or 'no time at all'} = {seconds_text(took)}")
    if not parts.exact:
        lines.append("  preemption time is estimated: this run's decisions were not recorded")
    if late.token[request] >= 0:
        worst, token = float(late.late[request]), int(late.token[request])
        if worst > TIME_TOLERANCE:
            lines.append(f"  {why_late(log, request, decisions, late)}")
        else:
            lines.append(f"  every token in time; tightest: token {token}, {seconds_text(-worst)} before its deadline")
    return lines


def _span_lines(log: RunLog, request: int, decisions: Decisions | None, span: _Span) -> list[str]:
    name, start, end, details = span
    arrival = float(log.arrival_time[request])
    head = f"  {start - arrival:9.3f} {end - start:8.3f} s  "
    if name in ("queue", "stall", "preempted"):
        words = {"queue": "waits in the queue", "stall": "admitted, not served", "preempted": "preempted, waits"}[name]
        return [f"{head}{words}{_meanwhile(log, decisions, start, end)}"]
    if name == "chunks":
        return [f"{head}{details['count']:,} more chunks, {details['tokens']:,} tokens in steps {details['steps']}"]
    if name == "prefill" and "step" in details:
        step = details["step"]
        lines = [f"{head}prefill, {details['tokens']:,} tokens in step {step} ({_beside(log, step)})"]
        emitted = _emitted(log, request, step)
        if emitted is not None:
            lines[0] += f"; token {emitted[0]}, slack {_slack(emitted[1])}"
        return lines + _why_lines(decisions, step)
    if name == "prefill":
        slack = _token_slack(log, request)
        return [f"{head}prefill up to the first token{f', slack {_slack(float(slack[0]))}' if slack.size else ''}"]
    if name == "decode" and "first_token" in details:
        return _decode_lines(log, request, decisions, head, details)
    return [f"{head}{name}" + (f", {details['tokens']:,} tokens" if "tokens" in details else "")]


def _decode_lines(
    log: RunLog, request: int, decisions: Decisions | None, head: str, details: dict[str, Any]
) -> list[str]:
    first, count = details["first_token"], details["tokens"]
    assert log.token_step is not None
    low = int(log.token_offsets[request]) + first
    steps = log.token_step[low : low + count]
    slack = _token_slack(log, request)[first : first + count]
    mixed = int((log.num_prefills[steps] > 0).sum())
    longest = int(np.argmax(log.duration[steps]))
    lines = [
        f"{head}decode, tokens {first} to {first + count - 1} in steps {details['steps']}, {mixed:,} of them mixed; "
        f"slack {_slack(float(slack[0]))} to {_slack(float(slack[-1]))}"
    ]
    if count > 1:
        step = int(steps[longest])
        lines.append(
            f"{'':23}longest: {1e3 * float(log.duration[step]):.1f} ms, step {step}, {mode_of(log, step)} "
            f"({_beside(log, step)})"
        )
        lines += _why_lines(decisions, step)
    if np.isfinite(slack).any() and float(slack.min()) < -TIME_TOLERANCE:
        worst = int(np.argmin(slack))
        lines.append(f"{'':23}late: {int((slack < -TIME_TOLERANCE).sum()):,} tokens, worst token {first + worst} by "
                     f"{seconds_text(-float(slack[worst]))}")  # fmt: skip
    return lines


def _why_lines(decisions: Decisions | None, step: int) -> list[str]:
    text = "" if decisions is None else decisions.why(step)
    if not text:
        return []
    return [f"{'':23}why: {text if len(text) <= WHY_WIDTH else text[: WHY_WIDTH - 3] + '...'}"]


def _beside(log: RunLog, step: int) -> str:
    prompt, decodes = int(log.num_prefill_tokens[step]), int(log.num_decodes[step])
    return f"{prompt:,} prompt tokens and {decodes:,} decodes in it"


def _meanwhile(log: RunLog, decisions: Decisions | None, start: float, end: float) -> str:
    """What the engine did in a stretch of time that the request spent waiting."""
    steps = np.flatnonzero((log.step_end > start + TIME_TOLERANCE) & (log.start < end - TIME_TOLERANCE))
    if not steps.size:
        return ": the engine was idle" if log.num_steps else ""
    prompt, decodes = int(log.num_prefill_tokens[steps].sum()), int(log.num_decodes[steps].sum())
    text = (
        f" through {steps.size:,} steps ({prompt:,} prompt tokens, {decodes:,} decodes); up to "
        f"{int(log.num_waiting[steps].max()):,} waiting, {int(log.num_running[steps].max()):,} running"
    )
    if log.num_blocks:
        text += f", {100 * float(1 - log.num_free_blocks[steps].min() / log.num_blocks):.0f} % of KV blocks held"
    last = "" if decisions is None else decisions.why(int(steps[-1]))
    return text + (f"\n{'':23}why, last of them: {last[:WHY_WIDTH]}" if last else "")


def _emitted(log: RunLog, request: int, step: int) -> tuple[int, float] | None:
    """(token number, its slack) of the token that a step gave the request."""
    assert log.token_step is not None
    mine = log.token_step[log.token_offsets[request] : log.token_offsets[request + 1]]
    found = np.flatnonzero(mine == step)
    return None if not found.size else (int(found[0]), float(_token_slack(log, request)[found[0]]))


def _token_slack(log: RunLog, request: int) -> FloatArray:
    """Deadline minus time of every token of a request, seconds; infinity without a deadline."""
    anchor, to_first = deadline_anchor(log)
    times = log.request_times(request)
    due = token_deadline(anchor[request], to_first[request], log.slo_tbt[request], np.arange(times.size))
    return np.asarray(due - times)


def _slack(value: float) -> str:
    return f"{value:+.3f} s" if math.isfinite(value) else "none"
