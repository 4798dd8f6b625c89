"""What a policy tells besides its plan, on vLLM's real scheduler: its forecast for the front end, what it learned, and
that it sees tenants."""

from __future__ import annotations

import json
import time
from typing import Any

import headless as h
import pytest

from slacktide.report.learned import last_learned, learned_rows
from slacktide.vllm import ledger as ledger_module
from slacktide.vllm.scheduler import Scheduler, SyncScheduler

BOTH = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


def engine(directory: Any, *, is_async: bool, **own: Any) -> Any:
    settings = {"policy": "tide", "slo": "ttft:60000,tbt:60000", "max_decision_ms": 10_000} | own
    options = h.Options(is_async=is_async, slacktide=settings)
    made = h.Engine(h.build(directory, options, Scheduler if is_async else SyncScheduler), is_async=is_async)
    made.options = options
    return made


@BOTH
def test_the_front_end_reads_the_policy_s_own_forecast(directory, tmp_path, monkeypatch, is_async):
    monkeypatch.setattr(ledger_module, "PUBLISH_EVERY", 0.0)
    monkeypatch.setattr("slacktide.vllm.estimate.MIN_INTERVAL", 0.0)
    made = engine(directory, is_async=is_async, estimate_dir=str(tmp_path))
    host = made.scheduler.slacktide
    for i in range(12):
        made.add(h.request(i, 100, 6, arrival=time.time()))
    found, forecasts = [], []
    while made.scheduler.has_requests():
        made.step()
        if (tmp_path / "estimate-0.json").exists():
            found.append(json.loads((tmp_path / "estimate-0.json").read_text())["predicted_ttft_s"])
        if host.ledger.forecast is not None:
            forecasts.append(host.ledger.forecast)
    made.check_outputs()
    assert len(set(found) & set(forecasts)) >= 5
    assert max(found) > min(found)  # falls as the queue drains
    host.close()


@BOTH
def test_the_step_log_says_what_was_learned_and_tenants_share(directory, tmp_path, monkeypatch, is_async):
    monkeypatch.setattr(ledger_module, "LEARNED_EVERY", 0.0)
    log = tmp_path / "steps.jsonl"
    made = engine(directory, is_async=is_async, step_log=str(log), policy="tide:tenant_weights=b:3")
    for i in range(12):
        made.add(h.request(i, 60, 6, arrival=time.time(), extra={"tenant": "ab"[i % 2]}))
    made.run()
    made.check_outputs()
    host = made.scheduler.slacktide
    assert host.metrics.get("fallbacks", "error") == 0
    host.close()
    learned = last_learned(log)
    assert learned is not None
    assert {name: share["weight"] for name, share in learned["tenants"].items()} == {"a": 1.0, "b": 3.0}
    assert sum(share["share"] for share in learned["tenants"].values()) == pytest.approx(1.0)
    assert sum(share["cost"] for share in learned["tenants"].values()) == 12 * (60 + 2 * 6)
    assert learned["ttft_targets"] == {"requests": 12, "quantiles": [60.0, 60.0, 60.0]}
    # No word of margins: steps of a fake model are too fast to be believed, and a new belief forgets the old one's.
    assert {"TTFT targets", "tenant a", "tenant b"} <= {name for name, _ in learned_rows(learned)}


def test_a_policy_that_fails_to_tell_costs_nothing(directory, tmp_path, monkeypatch):
    monkeypatch.setattr(ledger_module, "LEARNED_EVERY", 0.0)
    log = tmp_path / "steps.jsonl"
    made = engine(directory, is_async=False, step_log=str(log))
    monkeypatch.setattr(type(made.scheduler.slacktide.policy), "learned", lambda self: 1 / 0)
    made.add(h.request(0, 60, 6, arrival=time.time()))
    made.run()
    made.scheduler.slacktide.close()
    assert made.scheduler.slacktide.metrics.get("fallbacks", "error") == 0
    assert last_learned(log) is None


class _Slow:
    """What stands for the belief: every step is expected to take a second."""

    def predict(self, shape: Any) -> float:
        return 1.0


@BOTH
def test_a_step_in_flight_is_waited_for(directory, monkeypatch, is_async):
    made = engine(directory, is_async=is_async)
    host = made.scheduler.slacktide
    monkeypatch.setattr(type(host.ledger.belief), "predict", _Slow.predict)
    ahead, plan = [], type(host.policy).plan

    def look(self: Any, view: Any) -> Any:
        ahead.append(view.start - view.now)
        return plan(self, view)

    monkeypatch.setattr(type(host.policy), "plan", look)
    for i in range(4):
        made.add(h.request(i, 60, 8, arrival=time.time()))
    made.run()
    host.close()
    if is_async:
        assert 0.5 < max(ahead) <= 1.0
    else:
        assert max(ahead) == 0.0
