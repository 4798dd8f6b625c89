"""Whatever a policy does to us, serving goes on: every request ends with exactly its tokens, no KV block leaks."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import Any

import numpy as np
import pytest

h = pytest.importorskip("headless", reason="vLLM is not installed here: make test-vllm runs these tests")

from scripted import Scripted, needs, plan  # noqa: E402

from slacktide.core.policies.vllm_v1 import VllmV1  # noqa: E402
from slacktide.core.types import Plan  # noqa: E402
from slacktide.vllm import Scheduler, SyncScheduler  # noqa: E402
from slacktide.vllm.guard import TooSlow  # noqa: E402

STEPS = int(os.environ.get("SLACKTIDE_FAULT_STEPS", "5000"))
"""Steps with random faults, in each of the two kinds of engine; a release is tested with 10,000 (see the docs)."""
BOUND_MS = 20.0

ints = lambda *values: np.array(values, dtype=np.int64)  # noqa: E731


def broken(kind: str, view: Any) -> Any:
    """What a defective policy does or returns."""
    n = view.live.index.size
    match kind:
        case "raises":
            raise RuntimeError("a defect")
        case "raises-oddly":
            raise KeyError(object())
        case "hangs":
            end = time.monotonic() + 60
            while time.monotonic() < end:
                pass
        case "nothing":
            return None
        case "text":
            return "schedule everything"
        case "unknown-row":
            return Plan(ints(n), ints(1))
        case "negative-row":
            return Plan(ints(-1), ints(1))
        case "negative-tokens":
            return Plan(ints(0), ints(-3))
        case "too-many-tokens":
            return Plan(ints(0), ints(100_000))
        case "over-budget":
            return Plan(np.arange(n), np.full(n, 10**6))
        case "twice":
            return Plan(ints(0, 0), ints(1, 1))
        case "lengths":
            return Plan(ints(0), ints(1, 1))
        case "floats":
            return Plan(np.array([0.5]), np.array([1.5]))
        case "victim-that-waits":
            waiting = np.flatnonzero(view.live.status != 1)[:1]
            return Plan(ints(), ints(), preempted=waiting if waiting.size else ints(n + 3))
        case "served-and-rejected":
            return Plan(ints(0), ints(1), rejected=ints(0))
        case "bad-cap":
            return dataclasses.replace(plan(view, needs(view)), token_cap="many")
        case "empty":
            return Plan(ints(), ints())
    raise AssertionError(kind)


KINDS = (
    "raises", "raises-oddly", "hangs", "nothing", "text", "unknown-row", "negative-row", "negative-tokens",
    "too-many-tokens", "over-budget", "twice", "lengths", "floats", "victim-that-waits", "served-and-rejected",
    "bad-cap", "empty",
)  # fmt: skip


def steered(directory: Any, script: Any, *, is_async: bool, **own: Any) -> tuple[Any, Scripted, Any]:
    settings = {"policy": "vllm-v1", "max_decision_ms": 10_000.0, "max_failures": 3, "off_steps": 20} | own
    options = h.Options(
        is_async=is_async, num_blocks=60, max_num_batched_tokens=128, prefix_caching=True, slacktide=settings
    )
    scheduler = h.build(directory, options, Scheduler if is_async else SyncScheduler)
    scheduler.slacktide.policy = policy = Scripted(script)
    scheduler.slacktide.settings = dataclasses.replace(scheduler.slacktide.settings)
    return h.Engine(scheduler, is_async=is_async), policy, options


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_faults_at_random_steps(is_async, directory, monkeypatch):
    """A fault in one step of four, also three and more in a row, which switches the policy off."""
    rng = np.random.default_rng(7)
    good = VllmV1()
    count = dict.fromkeys(KINDS, 0)

    def script(view, step):
        if rng.random() < 0.75:
            return good.plan(view)
        # a hang costs its whole bound, so there are fewer of them
        kind = KINDS[int(rng.integers(len(KINDS)))]
        if kind == "hangs" and rng.random() < 0.9:
            kind = "raises"
        count[kind] += 1
        return broken(kind, view)

    made, policy, options = steered(directory, script, is_async=is_async, max_decision_ms=BOUND_MS)
    host = made.scheduler.slacktide
    monkeypatch.setattr("slacktide.vllm.host.build_policy", lambda spec: policy)  # the fuse asks for a fresh one
    number = 0
    while len(made.facts) < STEPS:
        if len(made.scheduler.requests) < 12 and rng.random() < 0.5:
            prompt, output = int(rng.integers(1, 200)), int(rng.integers(1, 60))
            made.add(h.request(number, prompt, output, arrival=1000.0 + number, hashed=True))
            number += 1
        made.step()
    made.run()
    made.check_outputs()
    made.check_blocks(options)
    assert all(count[kind] > 0 for kind in KINDS), count
    assert host.metrics.get("fallbacks", "error") > STEPS // 10
    assert host.metrics.get("fallbacks", "slow") >= 1
    assert host.metrics.get("fallbacks", "off") >= 20
    assert host.metrics.get("fallbacks", "mirror") == 0
    assert host.metrics.get("policy_off") >= 1
    assert made.scheduler.max_num_scheduled_tokens == 128
    assert "_reserve_prefill_lookahead" not in vars(made.scheduler)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_policy_that_recovers_schedules_again(is_async, directory, monkeypatch):
    def script(view, step):
        if step < 3:
            raise RuntimeError("not yet")
        return plan(view, dict(list(needs(view).items())[:1]))  # one row at a time: vLLM alone would run all

    made, policy, options = steered(directory, script, is_async=is_async)
    monkeypatch.setattr("slacktide.vllm.host.build_policy", lambda spec: policy)
    for i in range(4):
        made.add(h.request(i, 20, 60, arrival=1000.0 + i, hashed=True))
    made.run()
    widths = [len(fact.tokens) for fact in made.facts]
    assert max(widths[:20]) == 4
    assert set(widths[30:]) <= {0, 1}
    assert made.scheduler.slacktide.metrics.get("policy_off") == 1
    made.check_outputs()
    made.check_blocks(options)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_policy_that_never_plans_does_not_stop_the_engine(is_async, directory):
    made, _, options = steered(directory, lambda view, step: broken("empty", view), is_async=is_async)
    made.add(h.request(0, 20, 3, arrival=1000.0, hashed=True))
    deadline = time.monotonic() + 60
    while made.scheduler.has_requests() or made.in_flight:
        made.step()
        assert time.monotonic() < deadline
    made.check_outputs()
    made.check_blocks(options)
    assert made.scheduler.slacktide.metrics.get("fallbacks", "stalled") >= 1


def test_a_policy_that_fails_to_observe_goes_on_scheduling(directory):
    class Deaf(Scripted):
        def observe(self, result):
            raise RuntimeError("deaf")

    made, _, options = steered(directory, None, is_async=False)
    made.scheduler.slacktide.policy = Deaf(lambda view, step: plan(view, needs(view)))
    made.add(h.request(0, 20, 10, arrival=1000.0, hashed=True))
    made.run()
    made.check_outputs()
    made.check_blocks(options)
    assert made.scheduler.slacktide.metrics.get("fallbacks", "observe") >= 3


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_broken_mirror_is_built_anew(is_async, directory):
    """Garbage in the mirror's rows breaks a step's books; the next step sees vLLM's state again."""
    made, _, options = steered(directory, lambda view, step: plan(view, needs(view)), is_async=is_async)
    host = made.scheduler.slacktide
    for i in range(5):
        made.add(h.request(i, 30 + i, 30, arrival=1000.0 + i, hashed=True))
    for step in range(300):
        if step in (3, 8):
            host.mirror.slot_of.clear()
        if not made.scheduler.has_requests() and not made.in_flight:
            break
        made.step()
    assert host.metrics.get("fallbacks", "mirror") >= 1
    made.check_outputs()
    made.check_blocks(options)
    assert len(host.mirror) == 0


def test_exceptions_of_vllm_itself_are_not_hidden(directory, monkeypatch):
    made, _, _ = steered(directory, lambda view, step: plan(view, needs(view)), is_async=False)
    made.add(h.request(0, 20, 10, arrival=1000.0, hashed=True))

    def fails(*args, **kwargs):
        raise MemoryError("vLLM's own")

    monkeypatch.setattr(made.scheduler.kv_cache_manager, "allocate_slots", fails)
    with pytest.raises(MemoryError):
        made.step()
    assert "_reserve_prefill_lookahead" not in vars(made.scheduler)
    assert made.scheduler.max_num_running_reqs == 8


def spin(limit: Any) -> None:
    with limit:
        while True:
            pass


def test_the_time_limit_raises_in_the_deciding_thread_and_never_later():
    from slacktide.vllm.guard import TimeLimit

    limit = TimeLimit(0.02)
    for _ in range(20):
        with pytest.raises(TooSlow):
            spin(limit)
        for _ in range(1000):
            with limit:
                pass
    limit.close()
