"""Every definition on a timeline made by hand. Times are multiples of 1/4 s, so that float64 is exact.

step   0         1          2           3          4          5          6
span   0-0.5     0.5-1      1-1.25      2-2.25     2.25-3.25  3.25-3.5   3.5-4
runs   A prefill A, B       A decode    A decode   D prefill  D, F       D decode

A arrives 0    wants 4: 0.5 1.0 1.25 2.25          B arrives 0.25 wants 1: 1.0
C arrives 1    wants 5, rejected at 1              D arrives 2    wants 3: 3.25 3.5 4.0
E arrives 2.5  wants 2, expired at 4               F arrives 3    wants 9: 3.5, aborted by us at 3.75
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from slacktide.core.types import SLO
from slacktide.errors import InputError
from slacktide.metrics import log as log_module
from slacktide.metrics import slo as m
from slacktide.metrics.log import ABORTED, CUT_OFF, EXPIRED, FAILED, FINISHED, REJECTED, RunLog
from slacktide.metrics.stats import Distribution

NAN, INF = np.nan, np.inf
A, B, C, D, E, F = range(6)


def timeline(**changes: Any) -> RunLog:
    columns: dict[str, Any] = {
        "arrival_time": [0.0, 0.25, 1.0, 2.0, 2.5, 3.0],
        "num_prompt_tokens": [100, 50, 10, 200, 20, 30],
        "num_output_tokens": [4, 1, 5, 3, 2, 9],
        "slo_ttft": np.full(6, 0.75),
        "slo_tbt": np.full(6, 0.5),
        "tenant": [0, 1, 0, 1, 0, 0],
        "tenants": ("acme", "zeta"),
        "first_scheduled_time": [0.0, 0.5, NAN, 2.25, NAN, 3.25],
        "end_time": [2.25, 1.0, 1.0, 4.0, 4.0, 3.75],
        "end_reason": np.array([FINISHED, FINISHED, REJECTED, FINISHED, EXPIRED, ABORTED], dtype=np.int8),
        "num_preemptions": [0, 0, 0, 1, 0, 0],
        "recomputed_tokens": [0, 0, 0, 25, 0, 0],
        "scheduled_tokens": [103, 50, 0, 227, 0, 20],
        "token_offsets": [0, 4, 5, 5, 8, 8, 9],
        "token_step": np.array([0, 1, 2, 3, 1, 4, 5, 6, 5], dtype=np.int32),
        "start": [0.0, 0.5, 1.0, 2.0, 2.25, 3.25, 3.5],
        "duration": [0.5, 0.5, 0.25, 0.25, 1.0, 0.25, 0.5],
        "num_tokens": [100, 51, 1, 1, 200, 46, 1],
        "num_prefills": [1, 1, 0, 0, 1, 2, 0],
        "num_decodes": [0, 1, 1, 1, 0, 0, 1],
        "num_running": [1, 2, 1, 1, 1, 2, 1],
        "num_waiting": [0, 0, 0, 1, 0, 1, 1],
        "sim_duration": 4.0,
    }
    return RunLog(**(columns | changes))


def same_tokens_by_time(log: RunLog) -> RunLog:
    times = np.concatenate([log.request_times(i) for i in range(log.n)])
    return dataclasses.replace(log, token_step=None, token_time=times)


@pytest.fixture(params=["by step", "by time"])
def log(request: pytest.FixtureRequest) -> RunLog:
    return timeline() if request.param == "by step" else same_tokens_by_time(timeline())


def test_token_times(log: RunLog) -> None:
    assert log.request_times(A).tolist() == [0.5, 1.0, 1.25, 2.25]
    assert log.request_times(D).tolist() == [3.25, 3.5, 4.0]
    assert log.request_times(C).tolist() == []
    assert log.num_entries.tolist() == [4, 1, 0, 3, 0, 1]
    np.testing.assert_array_equal(log.last_token_time, [2.25, 1.0, NAN, 4.0, NAN, 3.5])


def test_latencies_of_each_request(log: RunLog) -> None:
    np.testing.assert_array_equal(m.ttft(log), [0.5, 0.75, NAN, 1.25, NAN, 0.5])
    np.testing.assert_array_equal(m.tpot(log), [1.75 / 3, NAN, NAN, 0.375, NAN, NAN])
    np.testing.assert_array_equal(m.e2el(log), [2.25, 0.75, 0.0, 2.0, 1.5, 0.75])
    np.testing.assert_array_equal(m.queue_time(log), [0.0, 0.25, NAN, 0.25, NAN, 0.25])


def test_slowdown_is_e2el_over_the_time_alone() -> None:
    log = timeline()
    alone = np.array([1.5, 0.75, 1.0, 1.0, 1.0, 1.0])
    assert m.slowdown(log, alone).tolist() == [1.5, 1.0, 0.0, 2.0, 1.5, 0.75]
    by_length = m.slowdown(log, lambda prompt, output: prompt / 100.0 + output / 4.0)
    assert by_length[A] == 2.25 / 2.0
    with pytest.raises(ValueError, match="6 positive seconds"):
        m.slowdown(log, np.zeros(6))


def test_gaps_are_those_of_finished_requests_unless_told(log: RunLog) -> None:
    found = m.gaps(log)
    assert np.repeat(found.values, found.counts).tolist() == [0.25, 0.25, 0.5, 0.5, 1.0]
    only_d = m.gaps(log, np.array([C, D, F]))
    assert np.repeat(only_d.values, only_d.counts).tolist() == [0.25, 0.5]
    assert m.gaps(log, np.array([B, C])).size == 0


def test_deadline_mode_credits_early_tokens(log: RunLog) -> None:
    """A's deadlines are 0.75 1.25 1.75 2.25: the last token comes at its deadline, after a gap of twice the TBT."""
    v = m.judge(log)
    assert v.met.tolist() == [True, True, False, False, False, False]
    assert v.ttft.tolist() == [False, False, False, True, False, False]
    assert v.unserved.tolist() == [False, False, True, False, True, True]
    assert v.violations() == {"ttft": 1, "tbt": 0, "e2e": 0, "unserved": 3}
    assert v.attainment() == 2 / 6  # the denominator is arrivals
    np.testing.assert_array_equal(v.max_gap, [1.0, NAN, NAN, 0.5, NAN, NAN])


def test_gap_mode(log: RunLog) -> None:
    v = m.judge(log, "gap")
    assert v.tbt.tolist() == [True, False, False, False, False, False]
    assert v.met.tolist() == [False, True, False, False, False, False]


def test_tolerated_share_counts_later_tokens(log: RunLog) -> None:
    """One of A's three gaps is too wide: a third may be, less may not."""
    assert m.judge(log, "gap", 1 / 3).met[A]
    assert not m.judge(log, "gap", 0.33).met[A]


def test_mean_mode_is_vllm_bench_goodput(log: RunLog) -> None:
    v = m.judge(log, "mean")
    assert v.tbt.tolist() == [True, False, False, False, False, False]  # TPOT 0.583 s; B has one token: TPOT 0
    assert not m.judge(m.with_slo(log, SLO(0.75, 1.75 / 3)), "mean").tbt.any()


def test_late_first_token_is_not_blamed_on_the_stream(log: RunLog) -> None:
    """D's first token is 0.5 s late, its stream keeps pace; with a TBT of 0.25 s its last token is late by itself."""
    assert not m.judge(log).tbt[D]
    v = m.judge(m.with_slo(log, SLO(0.75, 0.25)))
    assert v.ttft[D]
    assert v.tbt[D]


def test_tbt_alone_counts_from_the_first_token(log: RunLog) -> None:
    """Without a TTFT target every deadline would be infinite and any stall would pass."""
    v = m.judge(m.with_slo(log, SLO(tbt=0.5)))
    assert v.tbt.tolist() == [True, False, False, False, False, False]  # A: 2.25 > 0.5 + 3 * 0.5
    assert v.ttft.sum() == 0
    assert v.attainment() == 2 / 6


def test_end_to_end_target(log: RunLog) -> None:
    v = m.judge(m.with_slo(log, SLO(e2e=2.0)))
    assert v.e2e.tolist() == [True, False, False, False, False, False]
    assert v.met.tolist() == [False, True, False, True, False, False]


def test_token_attainment_counts_every_wanted_token(log: RunLog) -> None:
    """In time: A 4, B 1, F 1; D's deadlines are 2.75 3.25 3.75, its tokens come at 3.25 3.5 4.0. Wanted: 24."""
    v = m.judge(log)
    assert v.tokens_in_time.tolist() == [4, 1, 0, 0, 0, 1]
    assert v.token_attainment() == 6 / 24


def test_without_any_slo_nothing_is_judged(log: RunLog) -> None:
    v = m.judge(m.with_slo(log, SLO()))
    assert v.attainment() is None
    assert v.token_attainment() is None
    assert v.met.sum() == 3  # served is all they asked for


def test_cut_off_requests() -> None:
    """Three open at the end, 4 s: E's first token is overdue since 3.25 s; F had one token at 3.5 s, its next is due
    at 4.25 s; C has no target."""
    reasons = np.array([FINISHED, FINISHED, CUT_OFF, FINISHED, CUT_OFF, CUT_OFF], dtype=np.int8)
    log = timeline(
        end_reason=reasons,
        end_time=[2.25, 1.0, NAN, 4.0, NAN, NAN],
        slo_ttft=[0.75, 0.75, INF, 0.75, 0.75, 0.75],
        slo_tbt=[0.5, 0.5, INF, 0.5, 0.5, 0.5],
    )
    v = m.judge(log)
    assert v.judged.tolist() == [True, True, False, True, True, False]
    assert v.ttft.tolist() == [False, False, False, True, True, False]
    assert v.attainment() == 2 / 4
    assert not v.unserved.any()
    late = m.judge(dataclasses.replace(log, sim_duration=4.5))
    assert late.tbt[F]
    assert late.judged[F]
    assert not m.judge(log, "gap").judged[F]  # 3.5 + 0.5: not over yet
    assert m.judge(dataclasses.replace(log, sim_duration=4.25), "gap").tbt[F]
    assert m.judge(m.with_slo(log, SLO(e2e=2.5)), "mean").e2e.tolist() == [False, False, True, False, False, False]


def test_a_client_that_leaves_is_judged_by_what_was_due() -> None:
    """F leaves by itself at 3.75 s, its next token due at 4.25 s: no verdict. Aborted before it would leave: ours."""
    assert not m.judge(timeline(abort_time=[INF] * 5 + [3.75])).judged[F]
    assert m.judge(timeline(abort_time=[INF] * 5 + [3.8])).unserved[F]
    slow = timeline(abort_time=[INF] * 5 + [3.75], slo_tbt=np.full(6, 0.125), slo_ttft=np.full(6, 0.5))
    assert m.judge(slow).tbt[F]  # due at 3.625 s


@pytest.mark.parametrize(
    ("mode", "share", "message"), [("dedline", 0, "did you mean deadline"), ("gap", 1.5, "0 to 1")]
)
def test_bad_settings(mode: str, share: float, message: str) -> None:
    with pytest.raises(InputError, match=message):
        m.judge(timeline(), mode, share)


def test_blocks_do_not_change_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    log = timeline()
    whole = m.judge(log)
    monkeypatch.setattr(log_module, "TOKEN_BLOCK", 2)
    blocks = list(log.token_blocks())
    assert [(a, b) for a, b, _, _ in blocks] == [(0, 1), (1, 3), (3, 4), (4, 6)]  # A and D are larger than a block
    cut = m.judge(log)
    for field in dataclasses.fields(m.Verdicts):
        np.testing.assert_array_equal(getattr(cut, field.name), getattr(whole, field.name))


def test_columns_are_read_only_and_the_callers_stay_writable() -> None:
    arrivals = np.array([0.0, 0.25, 1.0, 2.0, 2.5, 3.0])
    log = timeline(arrival_time=arrivals)
    with pytest.raises(ValueError, match="read-only"):
        log.arrival_time[0] = 1.0
    arrivals[0] = 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tenant": [0, 1]}, "tenant: expected length 6"),
        ({"num_prompt_tokens": [1.5] * 6}, "num_prompt_tokens: expected dtype i8"),
        ({"arrival_time": [0.0, 0.25, 1.0, 2.0, 2.5, NAN]}, "arrival_time: expected finite"),
        ({"arrival_time": [0.75, 0.25, 1.0, 2.0, 2.5, 3.0]}, "before its request arrives, found row 0"),
        ({"end_time": [2.0, 1.0, 1.0, 4.0, 4.0, 3.75]}, "not before the last token, found row 0"),
        ({"end_time": [2.25, 1.0, 1.0, 4.0, NAN, 3.75]}, "NaN for cut_off rows, and only there, found row 4"),
        ({"end_reason": np.array([0, 0, 1, 0, 2, 7], dtype=np.int8)}, "end_reason: expected 0..5"),
        ({"token_offsets": [0, 4, 5, 4, 8, 8, 9]}, "token_offsets: expected 0 and rising"),
        ({"token_step": np.array([0, 1, 2, 3, 1, 4, 5, 7, 5])}, "indices of 7 steps"),
        ({"token_step": np.array([0, 2, 1, 3, 1, 4, 5, 6, 5])}, "token times: expected rising"),
        ({"token_step": None}, "exactly one"),
        ({"token_step": None, "token_time": np.full(9, NAN)}, "token times"),
        ({"token_time": np.zeros(9)}, "exactly one"),
        ({"duration": [0.5, 0.5, 0.25, 0.25, -1.0, 0.25, 0.5]}, "step ends that rise"),
        ({"shape": np.zeros((3, 12), dtype=np.float32)}, "shape: expected 7 rows"),
        ({"sim_duration": -1.0}, "sim_duration"),
        ({"tenants": ("acme",)}, "tenant: expected codes below 1, found 2"),
    ],
)
def test_a_log_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        timeline(**changes)


def test_an_empty_log_and_one_without_tokens() -> None:
    nothing = RunLog(
        arrival_time=np.empty(0),
        num_prompt_tokens=np.empty(0, dtype=np.int64),
        num_output_tokens=np.empty(0, dtype=np.int64),
        end_time=np.empty(0),
        end_reason=np.empty(0, dtype=np.int8),
        token_offsets=np.zeros(1, dtype=np.int64),
        token_step=np.empty(0, dtype=np.int32),
        sim_duration=0.0,
    )
    assert nothing.num_steps == 0
    assert m.judge(nothing).attainment() is None
    assert m.gaps(nothing).size == 0
    all_failed = timeline(
        token_offsets=np.zeros(7, dtype=np.int64),
        token_step=np.empty(0, dtype=np.int32),
        end_reason=np.full(6, FAILED, dtype=np.int8),
    )
    assert m.judge(all_failed).attainment() == 0.0


def test_chunks_of_several_tokens() -> None:
    """A server that sent A's four tokens in two chunks, at 0.5 and 1.5 s: TPOT by tokens, gaps by chunks."""
    log = RunLog(
        arrival_time=np.zeros(1),
        num_prompt_tokens=np.array([10]),
        num_output_tokens=np.array([4]),
        end_time=np.array([1.5]),
        end_reason=np.zeros(1, dtype=np.int8),
        token_offsets=np.array([0, 2]),
        token_time=np.array([0.5, 1.5]),
        num_delivered_tokens=np.array([4]),
        slo_ttft=np.array([1.0]),
        slo_tbt=np.array([0.25]),
        sim_duration=1.5,
    )
    assert m.tpot(log).tolist() == [1.0 / 3]
    assert m.gaps(log).values.tolist() == [1.0]
    assert m.judge(log).token_attainment() == 1 / 2  # the second chunk was due at 1.25 s


def test_distribution_of_nothing() -> None:
    d = Distribution.of(np.array([NAN]))
    assert (d.size, d.mean(), d.std(), d.max(), d.percentile(50)) == (0, None, None, None, None)
