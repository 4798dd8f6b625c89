"""Every reported metric computed a second time in plain Python from token times, as docs/metrics.md defines it.

On simulated runs with refusals, aborts, preemptions and closed loops, in all modes of judging.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from slacktide.metrics.log import ABORTED, CUT_OFF, FINISHED, RunLog
from slacktide.metrics.summary import summarize

from .test_oracle import make_case, run_ours, workload_of

CLASSES = ("chat", "batch", "agent")
SOON = 1e-9


def random_log(seed: int) -> RunLog:
    """A simulated run whose requests have classes and targets; some seeds end like a real run, with open requests."""
    rng = random.Random(seed)
    case = make_case(seed, priority=False)
    load = workload_of(case)
    n = len(load)
    load = replace(
        load,
        slo_ttft=np.array([rng.choice([0.03, 0.1, 0.5, math.inf]) for _ in range(n)]),
        slo_tbt=np.array([rng.choice([0.006, 0.012, 0.03, math.inf]) for _ in range(n)]),
        slo_e2e=np.array([rng.choice([0.2, 2.0, math.inf, math.inf]) for _ in range(n)]),
        slo_class=np.array([rng.randrange(3) for _ in range(n)]),
        slo_classes=CLASSES,
    )
    log = run_ours(case, load)
    return cut(log, log.sim_duration * rng.uniform(0.3, 1.0)) if rng.random() < 0.4 else log


def cut(log: RunLog, end: float) -> RunLog:
    """What a client would know at `end`: later arrivals never happened, open requests are cut off."""
    keep = np.flatnonzero(log.arrival_time <= end)
    times = [[t for t in log.request_times(i).tolist() if t <= end] for i in keep]
    is_open = log.end_time[keep] > end
    columns = {
        name: getattr(log, name)[keep]
        for name in ("arrival_time", "num_prompt_tokens", "num_output_tokens", "slo_ttft", "slo_tbt", "slo_e2e",
                     "slo_class", "abort_time", "first_scheduled_time")
    }  # fmt: skip
    return RunLog(
        **columns,
        end_time=np.where(is_open, np.nan, log.end_time[keep]),
        end_reason=np.where(is_open, CUT_OFF, log.end_reason[keep]).astype(np.int8),
        token_offsets=np.cumsum([0, *map(len, times)]),
        token_time=np.array([t for row in times for t in row], dtype=float),
        sim_duration=end,
        slo_classes=CLASSES,
    )


class Plain:
    """One request, as a dozen lines of arithmetic."""

    def __init__(self, log: RunLog, i: int, mode: str, share: float) -> None:
        self.a, self.e = float(log.arrival_time[i]), float(log.end_time[i])
        self.ttft, self.tbt, self.e2e = (float(getattr(log, f"slo_{name}")[i]) for name in ("ttft", "tbt", "e2e"))
        self.t: list[float] = log.request_times(i).tolist()
        self.reason, self.label = int(log.end_reason[i]), int(log.slo_class[i])
        self.prompt, self.wanted = int(log.num_prompt_tokens[i]), int(log.num_output_tokens[i])
        self.queue = float(log.first_scheduled_time[i]) - self.a
        self.gaps = [after - before for before, after in itertools.pairwise(self.t)]
        self.tpot = (self.t[-1] - self.t[0]) / (len(self.t) - 1) if len(self.t) > 1 else None
        left = self.reason == ABORTED and float(log.abort_time[i]) <= self.e
        self.open = left or self.reason == CUT_OFF
        self.until = float(log.abort_time[i]) if left else log.start_time + log.sim_duration
        self.kinds = {kind for kind in ("ttft", "tbt", "e2e") if getattr(self, f"late_{kind}")(mode, share)}
        if self.reason != FINISHED and not self.open:
            self.kinds.add("unserved")
        self.judged = not self.open or bool(self.kinds)
        self.met = self.judged and not self.kinds
        self.has_slo = any(x < math.inf for x in (self.ttft, self.tbt, self.e2e))

    def due(self, k: int) -> float:
        """Deadline of token k; a stream without a ttft is anchored at its first token."""
        if k == 0:
            return self.a + self.ttft
        if math.isinf(self.ttft) and self.t:
            return self.t[0] + k * self.tbt
        return self.a + self.ttft + k * self.tbt

    def late_ttft(self, mode: str, share: float) -> bool:
        return (self.t[0] if self.t else self.until if self.open else -math.inf) > self.due(0) + SOON

    def late_tbt(self, mode: str, share: float) -> bool:
        if not self.t or math.isinf(self.tbt):
            return False
        moved = max(self.t[0] - self.due(0), 0.0) if self.late_ttft(mode, share) else 0.0
        if mode == "mean":
            return self.reason == FINISHED and (self.tpot or 0.0) > self.tbt + SOON
        if mode == "gap":
            late = sum(gap > self.tbt + SOON for gap in self.gaps)
            next_due = self.t[-1] + self.tbt
        else:
            late = sum(t > self.due(k) + moved + SOON for k, t in enumerate(self.t) if k > 0)
            next_due = self.due(len(self.t)) + moved
        return late > share * (len(self.t) - 1) + SOON or (self.open and self.until > next_due + SOON)

    def late_e2e(self, mode: str, share: float) -> bool:
        if self.reason != FINISHED and not self.open:
            return False
        return (self.until if self.open else self.e) - self.a > self.e2e + SOON


def percentile(values: list[float], q: float) -> float:
    """Linear between neighbours."""
    ordered = sorted(values)
    rank = q / 100 * (len(ordered) - 1)
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def check_distribution(summary: dict[str, Any], name: str, values: list[float]) -> None:
    expected: dict[str, float | None] = dict.fromkeys(("mean", "median", "std", "p50", "p90", "p99"))
    if values:
        mean = sum(values) / len(values)
        std = math.sqrt(sum((x - mean) ** 2 for x in values) / len(values))
        expected = {"mean": mean, "std": std, "median": percentile(values, 50)}
        expected |= {f"p{q}": percentile(values, q) for q in (50, 90, 99)}
    for key, value in expected.items():
        found = summary[f"{key}_{name}_ms"]
        assert found is None if value is None else found == pytest.approx(value * 1e3, rel=1e-9, abs=1e-6), (key, name)


def check_rows(part: dict[str, Any], rows: list[Plain], duration: float) -> None:
    """The keys that the whole run and each class share."""
    done = [r for r in rows if r.reason == FINISHED]
    check_distribution(part, "ttft", [r.t[0] - r.a for r in done])
    check_distribution(part, "tpot", [r.tpot for r in done if r.tpot is not None])
    check_distribution(part, "itl", [gap for r in done for gap in r.gaps])
    check_distribution(part, "e2el", [r.e - r.a for r in done])
    check_distribution(part, "queue", [r.queue for r in done])
    widest = max((gap for r in done for gap in r.gaps), default=None)
    assert part["max_gap_ms"] == (None if widest is None else pytest.approx(widest * 1e3))
    assert part["completed"] == len(done)
    assert part["failed"] == sum(r.reason not in (FINISHED, CUT_OFF) for r in rows)
    assert part["violations"] == {
        kind: sum(kind in r.kinds for r in rows) for kind in ("ttft", "tbt", "e2e", "unserved")
    }
    judged, met = sum(r.judged for r in rows), sum(r.met for r in rows)
    assert part["excluded"] == len(rows) - judged
    if any(r.has_slo for r in rows):
        assert part["request_goodput"] == pytest.approx(met / duration)
        assert part["attainment"] == (pytest.approx(met / judged) if judged else None)
    else:
        assert part["attainment"] is None


@pytest.mark.parametrize(
    ("mode", "share"), [("deadline", 0.0), ("gap", 0.0), ("mean", 0.0), ("deadline", 0.1), ("gap", 0.25)]
)
def test_summary_is_what_the_definitions_say(mode: str, share: float) -> None:
    seen = {"met": 0, "missed": 0, "excluded": 0, "tbt": 0, "e2e": 0}
    for seed in range(40):
        log = random_log(seed)
        summary = summarize(log, mode=mode, tolerated_late_share=share)
        rows = [Plain(log, i, mode, share) for i in range(log.n)]
        done = [r for r in rows if r.reason == FINISHED]
        duration = log.sim_duration
        check_rows(summary, rows, duration)
        for label, name in enumerate(CLASSES):
            of = [r for r in rows if r.label == label]
            assert (name in summary["classes"]) == bool(of)
            if of:
                check_rows(summary["classes"][name], of, duration)
        outputs = sum(len(r.t) for r in done)
        assert summary["request_throughput"] == pytest.approx(len(done) / duration)
        assert summary["output_throughput"] == pytest.approx(outputs / duration)
        assert summary["total_token_throughput"] == pytest.approx((outputs + sum(r.prompt for r in done)) / duration)
        assert summary["token_goodput"] == pytest.approx(sum(len(r.t) for r in rows if r.met) / duration)
        in_time = sum(t <= r.due(k) + SOON for r in rows if r.judged for k, t in enumerate(r.t))
        wanted = sum(max(r.wanted, 1) for r in rows if r.judged)
        assert summary["token_attainment"] == pytest.approx(in_time / wanted)
        seen["met"] += sum(r.met for r in rows)
        seen["missed"] += sum(bool(r.kinds) for r in rows)
        seen["excluded"] += sum(not r.judged for r in rows)
        for kind in ("tbt", "e2e"):
            seen[kind] += sum(kind in r.kinds for r in rows)
    assert min(seen.values()) > 5, seen


def test_engine_figures_are_sums_over_steps() -> None:
    for seed in range(20):
        log = run_ours(case := make_case(seed), workload_of(case))
        summary = summarize(log)
        busy = float(log.duration.sum())
        kinds = [
            "decode" if p == 0 else "mixed" if d else "prefill"
            for p, d in zip(log.num_prefills, log.num_decodes, strict=True)
        ]
        for kind in ("decode", "prefill", "mixed"):
            of = [float(t) for t, k in zip(log.duration, kinds, strict=True) if k == kind]
            assert summary["step_mode_share"][kind] == pytest.approx(len(of) / len(kinds))
            assert summary["step_mode_time_share"][kind] == pytest.approx(sum(of) / busy)
        assert summary["busy_share"] == pytest.approx(busy / log.sim_duration)
        assert summary["scheduled_tokens"] == int(log.num_tokens.sum())
        ends = log.end_time.tolist()
        in_system = sum(e - a for a, e in zip(log.arrival_time.tolist(), ends, strict=True)) / log.sim_duration
        assert summary["mean_in_system"] == pytest.approx(in_system)
        assert summary["littles_law"] == pytest.approx(in_system)
