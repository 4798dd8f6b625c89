"""Why a request took as long as it did: its latency cut into parts that add up to it, and how late it was.

Symbols as in slo.py. A request is in exactly one state at any time between its arrival a and its end e:

    queue       not scheduled yet
    prefill     in a step that computes prompt tokens of it
    stall       admitted, but in no step
    preemption  from losing its KV blocks until its next token: the wait and the work done again
    decode      in a step that gives it a token beside other decodes alone
    mixed       in a step that gives it a token beside prompts of others, which make the step longer

so the six add up to e - a. Chunks and preemptions are known from the run's `Decisions`. Without them all from the first
schedule to the first token counts as prefill, and of a preempted request's waits the longest, one for each
preemption, count as preemption (`exact` is then False).

A log of a client knows no steps. Its parts are: first token (t_0 - a), tokens (gaps up to the request's median gap),
stall (what gaps exceed it by), closing (e - t_{n-1}).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from slacktide.core.types import FloatArray, IntArray, token_deadline
from slacktide.metrics.decisions import Decisions
from slacktide.metrics.log import END_REASONS, FINISHED, RunLog
from slacktide.metrics.slo import TIME_TOLERANCE, Verdicts, deadline_anchor, e2el, tpot, ttft

PARTS = ("queue", "prefill", "stall", "preemption", "decode", "mixed")
"""Parts of the latency of a request in an engine whose steps are known."""

CLIENT_PARTS = ("first token", "tokens", "stall", "closing")
"""Parts of the latency that a client saw."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds by part (`PARTS` or `CLIENT_PARTS`); their sum is the latency."""

    seconds: dict[str, float]
    exact: bool
    """False: chunks or preemptions had to be guessed."""

    @property
    def total(self) -> float:
        """The latency, seconds."""
        return math.fsum(self.seconds.values())

    def main(self, late: float = 0.0) -> str:
        """The part to blame for `late` seconds: the longest one but the work itself (decode, tokens), which is blamed
        only when the request would have been late without all the others too."""
        others = {name: value for name, value in self.seconds.items() if name not in ("decode", "tokens")}
        work = self.total - math.fsum(others.values())
        if math.fsum(others.values()) < late or (late <= 0 and work > max(others.values())):
            others = self.seconds
            return max(others, key=lambda name: (name in ("decode", "tokens"), others[name]))
        return max(others, key=lambda name: others[name])


@dataclass(frozen=True, eq=False)
class Lateness:
    """How late the tokens of each request were, against the deadlines a + ttft + k tbt. Seconds, float64[n]."""

    late: FloatArray
    """Largest of t_k minus its deadline; below 0: all were early. NaN without a token, or without a deadline."""
    token: IntArray
    """The k of it (the first of equals); -1 where NaN."""
    slack: FloatArray
    """Deadline of the last token minus its time: what was left at completion. NaN as above."""


def lateness(log: RunLog) -> Lateness:
    """One pass over all tokens."""
    late, slack = np.full(log.n, np.nan), np.full(log.n, np.nan)
    token = np.full(log.n, -1, dtype=np.int64)
    anchor, to_first = deadline_anchor(log)
    for a, b, low, high in log.token_blocks():
        rows = a + np.flatnonzero(log.num_entries[a:b])
        counts, starts = log.num_entries[rows], log.token_offsets[rows] - low
        k = np.arange(high - low) - np.repeat(starts, counts)
        due = token_deadline(
            np.repeat(anchor[rows], counts), np.repeat(to_first[rows], counts), np.repeat(log.slo_tbt[rows], counts), k
        )
        over = log.times(low, high) - due
        worst = np.maximum.reduceat(over, starts)
        first = np.minimum.reduceat(np.where(over == np.repeat(worst, counts), k, high), starts)
        known = np.isfinite(worst)
        late[rows[known]], token[rows[known]] = worst[known], first[known]
        ends = -over[starts + counts - 1]
        slack[rows] = np.where(np.isfinite(ends), ends, np.nan)
    return Lateness(late, token, slack)


def overrun(log: RunLog, mode: str = "deadline", late: Lateness | None = None) -> FloatArray:
    """Seconds by which each request exceeds its SLO, in its worst respect; float64[n], below 0: met, NaN: no SLO.

    Respects: first token, later tokens (as `mode` judges them), end. A request that was not served has infinity.
    """
    found = lateness(log) if late is None else late
    respects = [ttft(log) - log.slo_ttft, e2el(log) - log.slo_e2e]
    if mode == "deadline":
        respects.append(found.late)
    elif mode == "mean":
        respects.append(np.nan_to_num(tpot(log), nan=0.0) - log.slo_tbt)
    else:
        respects.append(widest_gap(log) - log.slo_tbt)
    worst = np.full(log.n, np.nan)
    for values in respects:
        worst = np.fmax(worst, np.where(np.isfinite(values), values, np.nan))
    return np.where(log.end_reason == FINISHED, worst, np.inf)


def widest_gap(log: RunLog) -> FloatArray:
    """float64[n] seconds; NaN below two tokens."""
    result = np.full(log.n, np.nan)
    for a, b, low, high in log.token_blocks():
        rows = a + np.flatnonzero(log.num_entries[a:b])
        starts = log.token_offsets[rows] - low
        gap = np.diff(log.times(low, high), prepend=0.0)
        gap[starts] = 0.0
        result[rows] = np.where(log.num_entries[rows] > 1, np.maximum.reduceat(gap, starts), np.nan)
    return result


def worst_requests(log: RunLog, verdicts: Verdicts, count: int, mode: str = "deadline") -> IntArray:
    """The requests furthest beyond their SLO, worst first; without any SLO those with the longest latency.

    Only missed ones, where there is an SLO. Those not served come first, the longest in the system before others.
    """
    latency = np.where(np.isnan(log.end_time), log.end_of_run, log.end_time) - log.arrival_time
    if not verdicts.has_slo.any():
        return np.argsort(-latency, kind="stable")[:count]
    rows = np.flatnonzero(verdicts.missed)
    over = np.nan_to_num(overrun(log, mode), nan=-np.inf)[rows]
    return np.asarray(rows[np.lexsort((-latency[rows], -over))][:count])


def parts_of(log: RunLog, request: int, decisions: Decisions | None = None, until: float = math.inf) -> Parts:
    """The parts of a request's latency, or of its time up to `until` (seconds on the run's clock)."""
    arrival = float(log.arrival_time[request])
    end = float(log.end_time[request])
    stop = max(min(end if not math.isnan(end) else log.end_of_run, until), arrival)
    if log.token_step is None:
        return _client_parts(log, request, arrival, stop)
    walk = _Walk(log, request, decisions, arrival, stop)
    if decisions is None:
        walk.guess()
    else:
        walk.follow()
    return Parts(walk.seconds, decisions is not None or not int(log.num_preemptions[request]))


def _client_parts(log: RunLog, request: int, arrival: float, stop: float) -> Parts:
    whole = log.request_times(request)
    times = np.minimum(whole, stop)
    if not times.size:
        return Parts(dict(zip(CLIENT_PARTS, (stop - arrival, 0.0, 0.0, 0.0), strict=True)), True)
    gaps = np.diff(times)
    typical = float(np.median(np.diff(whole))) if gaps.size else 0.0
    smooth = float(np.minimum(gaps, typical).sum())
    values = (float(times[0]) - arrival, smooth, float(gaps.sum()) - smooth, stop - float(times[-1]))
    return Parts(dict(zip(CLIENT_PARTS, values, strict=True)), True)


class _Walk:
    """Goes through a request's steps in order and books the time of each, and the time between them."""

    def __init__(self, log: RunLog, request: int, decisions: Decisions | None, arrival: float, stop: float) -> None:
        assert log.token_step is not None
        self.log, self.request, self.decisions, self.stop = log, request, decisions, stop
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.cursor = arrival
        low, high = int(log.token_offsets[request]), int(log.token_offsets[request + 1])
        self.tokens: IntArray = log.token_step[low:high].astype(np.int64)

    def book(self, until: float, part: str) -> None:
        """The time from the cursor up to `until` belongs to `part`."""
        until = min(until, self.stop)
        if until > self.cursor:
            self.seconds[part] += until - self.cursor
            self.cursor = until

    def kind(self, step: int) -> str:
        """decode or mixed."""
        return "mixed" if self.log.num_prefills[step] else "decode"

    def follow(self) -> None:
        """With decisions: every step and preemption is known."""
        assert self.decisions is not None
        chunks, _ = self.decisions.chunks_of(self.request)
        losses = self.decisions.preemptions_of(self.request)
        emits, prompts = set(self.tokens.tolist()), set(chunks.tolist())
        start, end, at, lost, waiting = self.log.start, self.log.step_end, 0, False, "queue"
        for step in sorted(emits | prompts):
            while at < losses.size and losses[at] <= step:  # the wait before a loss is no part of it
                self.book(float(start[losses[at]]), waiting)
                waiting, lost, at = "preemption", True, at + 1
            self.book(float(start[step]), waiting)
            self.book(float(end[step]), "preemption" if lost else "prefill" if step in prompts else self.kind(step))
            lost = lost and step not in emits
            waiting = "preemption" if lost else "stall"
        while at < losses.size:
            if losses[at] < self.log.num_steps:
                self.book(float(start[losses[at]]), waiting)
            waiting, at = "preemption", at + 1
        self.book(self.stop, waiting)

    def guess(self) -> None:
        """Without decisions."""
        start, end = self.log.start, self.log.step_end
        first = float(self.log.first_scheduled_time[self.request])
        self.book(self.stop if math.isnan(first) else first, "queue")
        if not self.tokens.size:
            self.book(self.stop, "prefill")
            return
        self.book(float(end[self.tokens[0]]), "prefill")
        waits = start[self.tokens[1:]] - end[self.tokens[:-1]]
        count = int(self.log.num_preemptions[self.request])
        longest = set((np.argsort(-waits, kind="stable")[:count] + 1).tolist()) if count else set()
        for k, step in enumerate(self.tokens.tolist()[1:], 1):
            is_wait = waits[k - 1] > TIME_TOLERANCE
            self.book(float(start[step]), "preemption" if k in longest and is_wait else "stall")
            self.book(float(end[step]), self.kind(step))
        self.book(self.stop, "preemption" if count else "stall")


def why_late(
    log: RunLog,
    request: int,
    decisions: Decisions | None = None,
    late: Lateness | None = None,
    mode: str = "deadline",
) -> str:
    """One line: what took longest up to the token that was latest; in mode `gap` what took longest in the widest gap;
    over the whole latency where no token was late. `mode` as in `slo.judge`."""
    reason = int(log.end_reason[request])
    if reason == FINISHED and mode == "gap":
        text = _widest(log, request, decisions)
        if text:
            return text
    found = lateness(log) if late is None else late
    token = int(found.token[request])
    over = float(found.late[request])
    if reason != FINISHED or token < 0 or not over > TIME_TOLERANCE:
        return _blame(parts_of(log, request, decisions), END_REASONS[reason] if reason != FINISHED else "done")
    when = float(log.times_at(np.array([log.token_offsets[request] + token]))[0])
    parts = parts_of(log, request, decisions, when)
    until = f" up to token {token}" if token else " up to the first token"
    return _blame(parts, f"{seconds_text(over)} late", until, over)


def _widest(log: RunLog, request: int, decisions: Decisions | None) -> str:
    """The reason by the widest gap; "" where that is within the SLO, or the first token was later still."""
    times = log.request_times(request)
    if times.size < 2:
        return ""
    gaps = np.diff(times)
    k = int(np.argmax(gaps)) + 1
    over = float(gaps[k - 1] - log.slo_tbt[request])
    first = float(times[0] - log.arrival_time[request] - log.slo_ttft[request])
    if over <= TIME_TOLERANCE or first > over:
        return ""
    before, after = (parts_of(log, request, decisions, float(times[i])) for i in (k - 1, k))
    inside = {name: max(value - before.seconds[name], 0.0) for name, value in after.seconds.items()}
    return _blame(
        Parts(inside, after.exact), f"a gap of {seconds_text(float(gaps[k - 1]))} before token {k}", late=over
    )


def _blame(parts: Parts, what: str, until: str = "", late: float = 0.0) -> str:
    if not parts.total:
        return f"{what} at once"
    main = parts.main(late)
    share = f"{seconds_text(parts.seconds[main])} of {seconds_text(parts.total)}"
    name = "mixed steps" if main == "mixed" else main
    return f"{what}: {name} took {share}{until}{'' if parts.exact else ' (estimated)'}"


def seconds_text(seconds: float) -> str:
    """A time for people: 350 ms, 4.21 s, 73 s."""
    if abs(seconds) < 1:
        return f"{seconds * 1e3:.3g} ms"
    return (
        f"{seconds:.2f} s" if abs(seconds) < 10 else f"{seconds:,.1f} s" if abs(seconds) < 100 else f"{seconds:,.0f} s"
    )
