"""Every definition of a latency metric and of "in time", once.

Symbols, for one request: a = arrival, n = output tokens delivered, t_0 .. t_{n-1} = when each came (on a server that
sends several tokens per chunk: when each chunk came), e = end. T = length of the run. All in seconds.

    TTFT      t_0 - a                       gaps (ITL, TBT)   t_k - t_{k-1},  k >= 1
    TPOT      (t_{n-1} - t_0) / (n - 1)     max gap           max over k of the gaps
    E2EL      e - a                         queue time        first scheduled - a
    slowdown  E2EL / isolated service time  deadline(k)       a + ttft + k tbt   (core.types.token_deadline)

A request's SLO is judged in one of three modes; the first token must come by a + ttft and the end by a + e2e in all:

    deadline  t_k <= deadline(k) for k >= 1 (the default; SlidingServe eq. 1). Tokens early are credit for later ones.
              Without a ttft the first token itself is the anchor: t_k <= t_0 + k tbt.
    gap       t_k - t_{k-1} <= tbt for k >= 1
    mean      TPOT <= tbt, with TPOT = 0 for a one-token output: what `vllm bench serve --goodput` counts
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from slacktide.core.types import SLO, BoolArray, FloatArray, IntArray, token_deadline
from slacktide.errors import InputError, unknown_name
from slacktide.metrics.log import ABORTED, CUT_OFF, FINISHED, RunLog
from slacktide.metrics.stats import Distribution

MODES = ("deadline", "gap", "mean")
KINDS = ("ttft", "tbt", "e2e", "unserved")
"""Kinds of violation. A request may have several; it is missed when it has one."""

TIME_TOLERANCE = 1e-9
"""Seconds. A sum of times in float64 rounds by less than this for clocks up to weeks; being late means by more."""


def ttft(log: RunLog) -> FloatArray:
    """TTFT = t_0 - a, float64[n] seconds; NaN without a token."""
    return np.asarray(log.first_token_time - log.arrival_time)


def tpot(log: RunLog) -> FloatArray:
    """TPOT = (t_{n-1} - t_0) / (n - 1), float64[n] seconds; NaN for n < 2: one token has no time per next token.

    t_{n-1} is the last token; vllm bench uses the end of the response, which on a real server is the same.
    """
    more = log.num_delivered_tokens > 1
    span = log.last_token_time - log.first_token_time
    return np.where(more, span / np.where(more, log.num_delivered_tokens - 1, 1), np.nan)


def e2el(log: RunLog) -> FloatArray:
    """E2EL = e - a, float64[n] seconds; NaN while open."""
    return np.asarray(log.end_time - log.arrival_time)


def queue_time(log: RunLog) -> FloatArray:
    """First scheduled - a, float64[n] seconds; NaN when never scheduled or not known."""
    return np.asarray(log.first_scheduled_time - log.arrival_time)


def slowdown(log: RunLog, isolated: FloatArray | Callable[[IntArray, IntArray], FloatArray]) -> FloatArray:
    """E2EL over the time the request takes alone on an idle engine, float64[n]; 1 is perfect, NaN while open.

    `isolated`: float64[n] seconds, or a function of (num_prompt_tokens, num_output_tokens) that gives it.
    Raises ValueError for times that are not positive.
    """
    alone = isolated(log.num_prompt_tokens, log.num_output_tokens) if callable(isolated) else isolated
    if np.shape(alone) != (log.n,) or not (np.asarray(alone) > 0).all():
        raise ValueError(f"isolated service times: expected {log.n} positive seconds, found {alone}")
    return np.asarray(e2el(log) / alone)


def gaps(log: RunLog, rows: IntArray | None = None) -> Distribution:
    """All gaps t_k - t_{k-1} of the requests `rows` (indices; None: of the finished ones), in seconds."""
    chosen = np.flatnonzero(log.finished) if rows is None else rows
    chosen = chosen[log.num_entries[chosen] > 1]
    return _gaps_by_step(log, chosen) if log.token_step is not None else _gaps_by_time(log, chosen)


def _gap_positions(log: RunLog, rows: IntArray) -> IntArray:
    """Positions of the tokens k >= 1 of the rows: each ends one gap."""
    counts = log.num_entries[rows] - 1
    ends = np.cumsum(counts)
    first = np.repeat(log.token_offsets[rows] + 1 - (ends - counts), counts)
    return np.asarray(first + np.arange(ends[-1] if len(ends) else 0))


def _row_blocks(log: RunLog, rows: IntArray) -> list[IntArray]:
    """The rows cut so that each part has about a million tokens (or is one request)."""
    parts = np.cumsum(log.num_entries[rows]) // (1 << 20)
    return np.split(rows, np.flatnonzero(np.diff(parts)) + 1)


def _gaps_by_time(log: RunLog, rows: IntArray) -> Distribution:
    found = [np.empty(0)]
    for part in _row_blocks(log, rows):
        ends = _gap_positions(log, part)
        found.append(log.times_at(ends) - log.times_at(ends - 1))
    return Distribution.of(np.concatenate(found))


def _gaps_by_step(log: RunLog, rows: IntArray) -> Distribution:
    """Count gaps by the pair of steps they lie between: few pairs, many gaps."""
    assert log.token_step is not None
    m = log.num_steps
    neighbours = np.zeros(m, dtype=np.int64)  # gaps between step s - 1 and step s
    pairs: list[tuple[IntArray, IntArray]] = []
    for part in _row_blocks(log, rows):
        positions = _gap_positions(log, part)
        after, before = log.token_step[positions], log.token_step[positions - 1]
        next_step = after - before == 1
        neighbours += np.bincount(after[next_step], minlength=m)
        far = ~next_step
        pairs.append(np.unique(before[far].astype(np.int64) * m + after[far], return_counts=True))
    keys = np.concatenate([k for k, _ in pairs]) if pairs else np.empty(0, dtype=np.int64)
    counts = np.concatenate([c for _, c in pairs]) if pairs else np.empty(0, dtype=np.int64)
    used = np.flatnonzero(neighbours)
    before = np.concatenate([used - 1, keys // max(m, 1)])
    after = np.concatenate([used, keys % max(m, 1)])
    return Distribution.of(log.step_end[after] - log.step_end[before], np.concatenate([neighbours[used], counts]))


def with_slo(log: RunLog, slo: SLO) -> RunLog:
    """The same run, every request judged by `slo`."""
    return replace(
        log,
        slo_ttft=np.full(log.n, slo.ttft),
        slo_tbt=np.full(log.n, slo.tbt),
        slo_e2e=np.full(log.n, slo.e2e),
    )


@dataclass(frozen=True, eq=False)
class Verdicts:
    """Who met the SLO and who not, and why. bool[n] each, and counts of tokens int64[n]."""

    ttft: BoolArray
    """First token late."""
    tbt: BoolArray
    """Later tokens late (beyond the tolerated share). In mode `deadline` a late first token moves their deadlines by
    its delay, so that this names streams that fell behind by themselves; such a request is missed either way."""
    e2e: BoolArray
    unserved: BoolArray
    """Rejected, expired, failed, or aborted by us."""
    judged: BoolArray
    """False: cut off (or left by its client) before any deadline passed, so nobody can tell. Excluded and counted."""
    has_slo: BoolArray
    """Has a target at all. A request without one is met when it is served."""
    tokens_in_time: IntArray
    """Tokens delivered by their deadline."""
    tokens_wanted: IntArray
    """Tokens it should have got (a chunk of several counts once); at least 1: a failed one's length may be unknown."""
    max_gap: FloatArray
    """Largest gap, float64[n] seconds; NaN below two tokens."""

    @cached_property
    def missed(self) -> BoolArray:
        """bool[n]: has a violation."""
        return np.asarray(self.ttft | self.tbt | self.e2e | self.unserved)

    @cached_property
    def met(self) -> BoolArray:
        """bool[n]: judged, and in time in every respect."""
        return np.asarray(self.judged & ~self.missed)

    def attainment(self, rows: IntArray | slice = slice(None)) -> float | None:
        """Requests that met their SLO / arrivals (those excluded left out); None where no SLO can be judged."""
        judged = int(self.judged[rows].sum())
        return float(self.met[rows].sum() / judged) if judged and self.has_slo[rows].any() else None

    def token_attainment(self, rows: IntArray | slice = slice(None)) -> float | None:
        """Tokens delivered by their deadline / tokens wanted by the judged requests; None without an SLO."""
        judged = self.judged[rows]
        wanted = int(self.tokens_wanted[rows][judged].sum())
        return float(self.tokens_in_time[rows][judged].sum() / wanted) if wanted and self.has_slo[rows].any() else None

    def violations(self, rows: IntArray | slice = slice(None)) -> dict[str, int]:
        """Requests with each kind of violation, by kind."""
        return {kind: int(getattr(self, kind)[rows].sum()) for kind in KINDS}


def judge(log: RunLog, mode: str = "deadline", tolerated_late_share: float = 0.0) -> Verdicts:
    """Judge every request against its SLO.

    `mode`: see the top of this file. `tolerated_late_share`: share of the n - 1 later tokens that may be late, 0 .. 1
    (not in mode `mean`). Raises InputError for an unknown mode or a share outside 0 .. 1.

    A request that never finished is missed ("unserved"), except that one cut off by the end of a real run, or left by
    its own client, is judged by the deadlines that had passed by then, the next token's included; the tolerated share
    does not excuse the token it still waits for. If none had passed it is not judged.
    """
    if mode not in MODES:
        raise unknown_name("SLO mode", mode, MODES)
    if not 0 <= tolerated_late_share <= 1:
        raise InputError(f"tolerated share of late tokens: expected 0 to 1, found {tolerated_late_share}")
    left = (log.end_reason == ABORTED) & (log.abort_time <= log.end_time + TIME_TOLERANCE)
    is_open = left | (log.end_reason == CUT_OFF)
    now = np.where(left, log.abort_time, log.end_of_run)
    anchor, to_first = deadline_anchor(log)
    none_yet = is_open & (log.num_entries == 0)
    first_seen = np.where(none_yet, now, log.first_token_time)
    first_due = token_deadline(log.arrival_time, log.slo_ttft, log.slo_tbt, 0)
    late_ttft = first_seen > first_due + TIME_TOLERANCE
    delay = np.where(late_ttft, first_seen - np.where(late_ttft, first_due, 0.0), 0.0)
    in_time, late, max_gap = _walk_tokens(log, anchor, to_first, delay, gap_mode=mode == "gap")

    # Rounded down with care: 0.1 of 30 tokens is 3, though 0.1 * 30 = 3.0000000000000004 and 0.29 * 100 = 28.99...
    allowed = np.floor(tolerated_late_share * np.maximum(log.num_entries - 1, 0) + 1e-9)
    if mode == "mean":
        late_tbt = log.finished & (np.nan_to_num(tpot(log), nan=0.0) > log.slo_tbt + TIME_TOLERANCE)
    else:
        late_tbt = late > allowed
        next_due = (
            log.last_token_time + log.slo_tbt
            if mode == "gap"
            else token_deadline(anchor, to_first, log.slo_tbt, log.num_delivered_tokens) + delay
        )
        late_tbt |= is_open & ~none_yet & (now > next_due + TIME_TOLERANCE)
    ended = np.where(is_open, now, log.end_time)
    late_e2e = (log.finished | is_open) & (ended - log.arrival_time > log.slo_e2e + TIME_TOLERANCE)
    violated = late_ttft | late_tbt | late_e2e
    return Verdicts(
        ttft=late_ttft,
        tbt=late_tbt,
        e2e=late_e2e,
        unserved=np.asarray((log.end_reason != FINISHED) & ~is_open),
        judged=np.asarray(~is_open | violated),
        has_slo=np.isfinite(log.slo_ttft) | np.isfinite(log.slo_tbt) | np.isfinite(log.slo_e2e),
        tokens_in_time=in_time,
        tokens_wanted=np.maximum(log.num_entries + np.maximum(log.num_output_tokens - log.num_delivered_tokens, 0), 1),
        max_gap=max_gap,
    )


def deadline_anchor(log: RunLog) -> tuple[FloatArray, FloatArray]:
    """(a, ttft) for token deadlines; (t_0, 0) where only a tbt is set, else its deadlines would all be infinite."""
    from_first = np.isinf(log.slo_ttft) & np.isfinite(log.slo_tbt) & (log.num_entries > 0)
    return np.where(from_first, log.first_token_time, log.arrival_time), np.where(from_first, 0.0, log.slo_ttft)


def _walk_tokens(
    log: RunLog, anchor: FloatArray, to_first: FloatArray, delay: FloatArray, *, gap_mode: bool
) -> tuple[IntArray, IntArray, FloatArray]:
    """One pass over all tokens: per request those in time, later tokens late (or gaps too wide), and the max gap."""
    in_time, late = np.zeros(log.n, dtype=np.int64), np.zeros(log.n, dtype=np.int64)
    max_gap = np.full(log.n, np.nan)
    for a, b, low, high in log.token_blocks():
        rows = a + np.flatnonzero(log.num_entries[a:b])
        counts = log.num_entries[rows]
        starts = log.token_offsets[rows] - low
        times = log.times(low, high)

        def spread(column: FloatArray, rows: IntArray = rows, counts: IntArray = counts) -> FloatArray | float:
            same = bool((column[rows] == column[rows[0]]).all())
            return float(column[rows[0]]) if same else np.repeat(column[rows], counts)

        k = np.arange(high - low) - np.repeat(starts, counts)
        due = token_deadline(spread(anchor), spread(to_first), spread(log.slo_tbt), k)
        is_late = times > due + TIME_TOLERANCE
        in_time[rows] = counts - np.add.reduceat(is_late, starts, dtype=np.int64)
        gap = np.diff(times, prepend=times[0])
        gap[starts] = 0.0  # the first token ends no gap
        max_gap[rows] = np.where(counts > 1, np.maximum.reduceat(gap, starts), np.nan)
        if gap_mode:
            is_late = gap > np.asarray(spread(log.slo_tbt)) + TIME_TOLERANCE
        elif delay[rows].any():
            is_late = times > due + spread(delay) + TIME_TOLERANCE
        is_late[starts] = False
        late[rows] = np.add.reduceat(is_late, starts, dtype=np.int64)
    return in_time, late, max_gap
