"""Metrics on random runs: against plain Python from the definitions, and laws every metric must obey."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slacktide.core.types import SLO, token_deadline
from slacktide.metrics import slo as m
from slacktide.metrics.log import ABORTED, CUT_OFF, FINISHED, REQUEST_COLUMNS, RunLog
from slacktide.metrics.stats import Distribution
from slacktide.metrics.summary import summarize

# Quarters of a second: sums are exact in float64, and ties with a deadline are common instead of never seen.
QUARTERS = st.integers(0, 12).map(lambda x: x / 4)
TARGETS = st.one_of(st.just(math.inf), st.integers(1, 12).map(lambda x: x / 4))
MODES = st.sampled_from(m.MODES)


@st.composite
def runs(draw: st.DrawFn, by_step: bool | None = None) -> RunLog:
    num_steps = draw(st.integers(1, 12))
    idle = [draw(QUARTERS) for _ in range(num_steps)]
    duration = np.array([draw(QUARTERS) for _ in range(num_steps)])
    start = np.cumsum(idle) + np.concatenate([[0.0], np.cumsum(duration)[:-1]])
    end = start + duration
    n = draw(st.integers(1, 6))
    tokens = [sorted(draw(st.lists(st.integers(0, num_steps - 1), max_size=8))) for _ in range(n)]
    arrival, ends, reason, wanted, leaves = [], [], [], [], []
    for mine in tokens:
        first = end[mine[0]] if mine else end[-1]
        arrival.append(first - min(draw(QUARTERS), first))
        why = draw(st.integers(0, 5)) if not mine else draw(st.sampled_from([0, 0, 0, 2, 3, 4, 5]))
        why = 1 if why == FINISHED and not mine else why
        reason.append(why)
        last = end[mine[-1]] if mine else arrival[-1]
        ends.append(math.nan if why == CUT_OFF else last + draw(QUARTERS))
        wanted.append(max(len(mine), 1) + (0 if why == FINISHED else draw(st.integers(0, 3))))
        leaves.append(draw(st.sampled_from([math.inf, ends[-1]])) if why == ABORTED else math.inf)
    duration_of_run = max(float(end[-1]), float(np.nanmax([*ends, 0.0])))
    steps = np.array([s for mine in tokens for s in mine], dtype=np.int32)
    kept = draw(st.booleans()) if by_step is None else by_step
    return RunLog(
        arrival_time=np.array(arrival),
        num_prompt_tokens=np.full(n, 10),
        num_output_tokens=np.array(wanted),
        slo_ttft=np.array([draw(TARGETS) for _ in range(n)]),
        slo_tbt=np.array([draw(TARGETS) for _ in range(n)]),
        slo_e2e=np.array([draw(TARGETS) for _ in range(n)]),
        end_time=np.array(ends),
        end_reason=np.array(reason, dtype=np.int8),
        abort_time=np.array(leaves),
        token_offsets=np.concatenate([[0], np.cumsum([len(mine) for mine in tokens])]).astype(np.int64),
        token_step=steps if kept else None,
        token_time=None if kept else end[steps],
        start=start,
        duration=duration,
        sim_duration=duration_of_run,
    )


def plain_verdict(log: RunLog, i: int, mode: str, share: float) -> bool | None:
    """True met, False missed, None not judged: the definitions, one request and one token at a time."""
    a, ttft, tbt, e2e = (float(c[i]) for c in (log.arrival_time, log.slo_ttft, log.slo_tbt, log.slo_e2e))
    times, reason = log.request_times(i).tolist(), int(log.end_reason[i])
    left = reason == ABORTED and log.abort_time[i] <= log.end_time[i]
    if reason not in (FINISHED, CUT_OFF) and not left:
        return False
    is_open = reason == CUT_OFF or left
    now = float(log.abort_time[i]) if left else log.end_of_run
    ok = True
    if times:
        ok = times[0] <= token_deadline(a, ttft, tbt, 0)
    elif is_open:
        ok = now <= token_deadline(a, ttft, tbt, 0)
    late = 0
    base, to_first = (times[0], 0.0) if times and math.isinf(ttft) else (a, ttft)
    for k in range(1, len(times)):
        due = times[k - 1] + tbt if mode == "gap" else token_deadline(base, to_first, tbt, k)
        late += times[k] > due
    if mode == "mean":
        if not is_open and len(times) > 1:
            ok = ok and (times[-1] - times[0]) / (len(times) - 1) <= tbt
    else:
        ok = ok and late <= share * max(len(times) - 1, 0) + 1e-9
        if is_open and times:
            due = times[-1] + tbt if mode == "gap" else token_deadline(base, to_first, tbt, len(times))
            ok = ok and now <= due
    ok = ok and (now if is_open else float(log.end_time[i])) - a <= e2e
    return None if ok and is_open else bool(ok)


# The kind TBT of a request whose first token is late never changes a verdict, so the twin may leave its shift out.
@settings(deadline=None, max_examples=300)
@given(runs(), MODES, st.sampled_from([0.0, 0.25, 0.5, 1.0]))
def test_verdicts_are_those_of_the_plain_twin(log: RunLog, mode: str, share: float) -> None:
    v = m.judge(log, mode, share)
    found = [None if not judged else bool(met) for judged, met in zip(v.judged, v.met, strict=True)]
    assert found == [plain_verdict(log, i, mode, share) for i in range(log.n)]
    assert not (v.met & v.missed).any()


@settings(deadline=None, max_examples=200)
@given(runs())
def test_gaps_and_tokens_are_those_of_the_plain_twin(log: RunLog) -> None:
    every = [np.diff(log.request_times(i)) for i in range(log.n)]
    rows = np.arange(log.n)
    found = m.gaps(log, rows)
    assert np.repeat(found.values, found.counts).tolist() == sorted(np.concatenate(every).tolist())
    v = m.judge(log)
    for i in range(log.n):
        a, ttft, tbt = float(log.arrival_time[i]), float(log.slo_ttft[i]), float(log.slo_tbt[i])
        times = log.request_times(i)
        base, to_first = (times[0], 0.0) if len(times) and math.isinf(ttft) else (a, ttft)
        in_time = sum(bool(t <= token_deadline(base, to_first, tbt, k)) for k, t in enumerate(times))
        assert v.tokens_in_time[i] == in_time
        widest = every[i].max() if len(every[i]) else math.nan
        np.testing.assert_equal(float(v.max_gap[i]), float(widest))


@settings(deadline=None, max_examples=100)
@given(runs(), MODES)
def test_bounds(log: RunLog, mode: str) -> None:
    s = summarize(log, mode=mode)
    for key in ("attainment", "token_attainment"):
        assert s[key] is None or 0 <= s[key] <= 1
    if s["request_goodput"] is not None:
        assert s["request_goodput"] <= s["request_throughput"]
        assert s["token_goodput"] <= s["output_throughput"]
    assert s["completed"] + s["failed"] + s["end_reasons"]["cut_off"] == s["num_requests"]
    if s["mean_in_system"] is not None:
        assert s["mean_in_system"] == pytest.approx(s["littles_law"], rel=1e-12, abs=1e-12)


@settings(deadline=None, max_examples=100)
@given(runs(), st.sampled_from(["gap", "mean", "deadline"]), TARGETS, TARGETS, TARGETS, QUARTERS)
def test_attainment_never_falls_when_a_target_is_loosened(
    log: RunLog, mode: str, ttft: float, tbt: float, e2e: float, more: float
) -> None:
    closed = dataclasses.replace(
        log,
        end_reason=np.where(log.end_reason == CUT_OFF, 4, log.end_reason).astype(np.int8),
        end_time=np.where(np.isnan(log.end_time), log.end_of_run, log.end_time),
        abort_time=np.full(log.n, math.inf),
    )
    tight = m.judge(m.with_slo(closed, SLO(ttft, tbt, e2e)), mode)
    loose = m.judge(m.with_slo(closed, SLO(ttft + more, tbt + more, e2e + more)), mode)
    assert not (tight.met & ~loose.met).any()


def permuted(log: RunLog, order: np.ndarray[Any, Any]) -> RunLog:
    columns = {name: getattr(log, name)[order] for name in REQUEST_COLUMNS}
    positions = np.concatenate(
        [np.empty(0, dtype=np.int64)] + [np.arange(log.token_offsets[i], log.token_offsets[i + 1]) for i in order]
    )
    tokens = {
        name: None if getattr(log, name) is None else getattr(log, name)[positions]
        for name in ("token_step", "token_time")
    }
    offsets = np.concatenate([[0], np.cumsum(log.num_entries[order])])
    delivered = log.num_delivered_tokens[order]
    return dataclasses.replace(log, **columns, **tokens, token_offsets=offsets, num_delivered_tokens=delivered)


@settings(deadline=None, max_examples=100)
@given(runs(), st.randoms(use_true_random=False))
def test_the_order_of_requests_does_not_matter(log: RunLog, random: Any) -> None:
    order = np.array(random.sample(range(log.n), log.n))
    original, shuffled = summarize(log), summarize(permuted(log, order))
    assert original.keys() == shuffled.keys()
    for key, value in original.items():
        assert shuffled[key] == (pytest.approx(value, rel=1e-12) if isinstance(value, float) else value), key


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(0, 4)), max_size=12), st.floats(0, 100))
def test_distribution_equals_numpy_on_the_repeated_values(pairs: list[tuple[float, int]], q: float) -> None:
    values, counts = np.array([v for v, _ in pairs]), np.array([c for _, c in pairs], dtype=np.int64)
    repeated = np.repeat(values, counts) if pairs else np.empty(0)
    d = Distribution.of(values, counts)
    assert d.size == repeated.size
    if repeated.size:
        assert d.percentile(q) == np.percentile(repeated, q)
        assert d.max() == repeated.max()
        assert d.mean() == pytest.approx(repeated.mean(), rel=1e-9, abs=1e-6)
        assert d.std() == pytest.approx(repeated.std(), rel=1e-9, abs=1e-6)
        x, share = d.cdf()
        assert [share[x <= v][-1] for v in repeated] == [pytest.approx((repeated <= v).mean()) for v in repeated]
