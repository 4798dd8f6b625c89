"""Plans that the plug-in must carry out to the letter, on vLLM's real scheduler, with and without async scheduling."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

h = pytest.importorskip("headless", reason="vLLM is not installed here: make test-vllm runs these tests")

from scripted import Script, Scripted, needs, plan, running  # noqa: E402

from slacktide.errors import InputError  # noqa: E402
from slacktide.vllm import Scheduler, SyncScheduler  # noqa: E402

BOTH = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
FCFS_AND_PRIORITY = pytest.mark.parametrize("policy", ["fcfs", "priority"])


def engine(directory: Any, script: Script, *, is_async: bool, **options: Any) -> tuple[Any, Scripted]:
    """A steered scheduler in its loop, and the policy that steers it."""
    o = h.Options(is_async=is_async, slacktide={"policy": "vllm-v1", "max_decision_ms": 10_000}, **options)
    scheduler = h.build(directory, o, Scheduler if is_async else SyncScheduler)
    scheduler.slacktide.policy = policy = Scripted(script)
    made = h.Engine(scheduler, is_async=is_async)
    made.options = o
    return made, policy


def number(request_id: str) -> int:
    return int(request_id[1:])


def facts(made: Any) -> list[dict[int, int]]:
    return [{number(i): n for i, n in fact.tokens.items()} for fact in made.facts]


def finish(made: Any, policy: Scripted, *, but: tuple[str, ...] = ()) -> None:
    """Run to the end; every step must have been the plan, every request must have its tokens, no block may leak."""
    made.run()
    planned = [p for p in policy.planned if p is not None]
    assert [f for f in facts(made) if f] == [p for p in planned if p]
    assert made.scheduler.slacktide.metrics.get("plan_deviations") == 0
    assert made.scheduler.slacktide.metrics.get("fallbacks", "error") == 0
    made.check_outputs(but=but)
    made.check_blocks(made.options)


@BOTH
def test_decode_only_steps_while_prompts_wait(directory, is_async):
    def script(view, step):
        want = needs(view)
        decodes = {i: 1 for i in want if i in running(view) and want[i] == 1}
        return plan(view, decodes if decodes and step % 3 else want)

    made, policy = engine(directory, script, is_async=is_async, max_num_batched_tokens=2048)
    for i in range(4):
        made.add(h.request(i, 60 + i, 12, arrival=1000.0 + i))
    made.step()
    for i in range(4, 8):
        made.add(h.request(i, 50 + i, 12, arrival=1000.0 + i))
    finish(made, policy)
    decode_only = [f for f in facts(made) if f and set(f.values()) == {1} and 4 not in f]
    assert decode_only


@BOTH
def test_prefill_only_steps_while_decodes_run(directory, is_async):
    def script(view, step):
        want = needs(view)
        prompts = {i: n for i, n in want.items() if n > 1}
        return plan(view, prompts if prompts and step % 2 else want)

    made, policy = engine(directory, script, is_async=is_async, max_num_batched_tokens=2048)
    for i in range(6):
        made.add(h.request(i, 40 + i, 15, arrival=1000.0 + i))
        made.step()
    finish(made, policy)
    assert any(f and 0 not in f and max(f.values()) > 1 for f in facts(made)[1:])


@BOTH
def test_single_decodes_are_left_out_and_keep_their_seats(directory, is_async):
    def script(view, step):
        return plan(view, {i: n for i, n in needs(view).items() if n > 1 or (i + step) % 3})

    made, policy = engine(directory, script, is_async=is_async, max_num_batched_tokens=2048)
    for i in range(6):
        made.add(h.request(i, 30 + i, 20, arrival=1000.0 + i))
    finish(made, policy)
    assert sum(step.preempted != () for step in made.facts) == 0


@BOTH
@FCFS_AND_PRIORITY
def test_chunks_are_exact(directory, is_async, policy):
    rng = np.random.default_rng(5)

    def script(view, step):
        return plan(view, {i: int(rng.integers(1, min(n, 29) + 1)) for i, n in needs(view).items()})

    made, scripted = engine(directory, script, is_async=is_async, policy=policy)
    for i in range(8):
        made.add(h.request(i, 100 + 7 * i, 9, arrival=1000.0 + i, priority=i % 3))
    finish(made, scripted)
    assert len({n for f in facts(made) for n in f.values()}) > 15


@BOTH
def test_a_token_cap_bounds_the_step(directory, is_async):
    def script(view, step):
        return plan(view, needs(view), token_cap=33)

    made, _ = engine(directory, script, is_async=is_async, max_num_batched_tokens=2048)
    for i in range(5):
        made.add(h.request(i, 90, 5, arrival=1000.0 + i))
    made.run()
    assert max(sum(f.values()) for f in facts(made)) == 33
    assert made.scheduler.max_num_scheduled_tokens == 2048
    made.check_outputs()
    made.check_blocks(made.options)


@BOTH
@FCFS_AND_PRIORITY
def test_admission_follows_the_plan_in_number_and_order(directory, is_async, policy):
    """Latest first, two at a time: against the order of both of vLLM's queues."""

    def script(view, step):
        want, runs = needs(view), running(view)
        room = max(0, 2 - len(runs))
        waiting = sorted((i for i in want if i not in runs), reverse=True)[:room]
        return plan(view, {i: n for i, n in want.items() if i in runs} | {i: want[i] for i in waiting})

    made, scripted = engine(directory, script, is_async=is_async, policy=policy, max_num_batched_tokens=2048)
    for i in range(7):
        made.add(h.request(i, 20 + i, 4 + i, arrival=1000.0 + i, priority=i % 2))
    finish(made, scripted)
    assert list(facts(made)[0]) == [6, 5]
    assert max(len(f) for f in facts(made)) == 2
    first = list(dict.fromkeys(i for f in facts(made) for i in f))
    assert first == [6, 5, 4, 3, 2, 1, 0]


@BOTH
@FCFS_AND_PRIORITY
def test_what_a_plan_leaves_waiting_keeps_its_place(directory, is_async, policy):
    """After steps that admitted from the tail, vLLM alone admits the rest in its own order."""

    def script(view, step):
        return plan(view, {5: needs(view)[5]})

    made, _ = engine(directory, script, is_async=is_async, policy=policy, max_num_seqs=2, max_num_batched_tokens=2048)
    for i in range(6):
        made.add(h.request(i, 20, 2, arrival=1000.0 + i))
    made.step()
    made.scheduler.slacktide.set_mode("stock")
    made.run()
    first = list(dict.fromkeys(i for f in facts(made) for i in f))
    assert first == [5, 0, 1, 2, 3, 4]


@BOTH
@FCFS_AND_PRIORITY
def test_victims_are_those_of_the_plan(directory, is_async, policy):
    """Blocks are plenty, so nobody would be preempted: the plan preempts request 1, then 3 and 0 together."""
    asked: dict[int, list[int]] = {4: [1], 9: [3, 0]}

    def script(view, step):
        want, victims = needs(view), asked.get(step, [])
        return plan(view, {i: n for i, n in want.items() if i not in victims}, preempted=victims)

    made, scripted = engine(directory, script, is_async=is_async, policy=policy, max_num_batched_tokens=2048)
    for i in range(5):
        made.add(h.request(i, 33 + i, 25, arrival=1000.0 + i))
    finish(made, scripted)
    assert [[number(i) for i in fact.preempted] for fact in made.facts if fact.preempted] == [[1], [0, 3]]
    assert [sorted(r.preempted.tolist()) for r in scripted.results if r.preempted.size] == [[1], [0, 3]]


@BOTH
def test_a_plan_that_needs_a_victim_s_blocks_gets_them(directory, is_async):
    """Not even vLLM's tail: the oldest gives way, and a waiting request takes its place in the same step."""

    def script(view, step):
        want, runs = needs(view), running(view)
        if 2 in want and 2 not in runs and 0 in runs and step > 3:
            return plan(view, {1: want[1], 2: want[2]} if 1 in want else {2: want[2]}, preempted=[0])
        return plan(view, {i: n for i, n in want.items() if i in runs or (i == 2) == (2 in runs) or len(runs) < 2})

    made, _ = engine(directory, script, is_async=is_async, num_blocks=12, max_num_batched_tokens=2048)
    for i in range(3):
        made.add(h.request(i, 80, 8, arrival=1000.0 + i))
    for _ in range(12):
        made.step()
    assert any(0 not in f and 2 in f for f in facts(made))
    made.scheduler.slacktide.set_mode("stock")
    made.run()
    made.check_outputs()
    made.check_blocks(made.options)


@BOTH
def test_rejected_requests_end_with_an_error(directory, is_async):
    """One that waits, one that runs, and the last one of all."""

    def script(view, step):
        gone = {0: [2], 3: [0], 8: [1]}.get(step, [])
        return plan(view, {i: n for i, n in needs(view).items() if i not in gone}, rejected=gone)

    made, _ = engine(directory, script, is_async=is_async, max_num_batched_tokens=2048)
    for i in range(3):
        made.add(h.request(i, 30, 40, arrival=1000.0 + i))
    made.run()
    assert {i: str(end) for i, end in made.ends.items()} == dict.fromkeys(("r00000", "r00001", "r00002"), "error")
    assert made.out["r00002"] == []
    made.check_blocks(made.options)
    metrics = made.scheduler.slacktide.metrics
    assert metrics.get("rejected") == 3
    assert metrics.get("requests", "default", "rejected") == 3


@BOTH
def test_relegated_rows_are_marked_for_good(directory, is_async):
    def script(view, step):
        return plan(view, needs(view), relegated=[1] if step == 2 else [])

    made, policy = engine(directory, script, is_async=is_async, max_num_batched_tokens=2048)
    for i in range(3):
        made.add(h.request(i, 30, 10, arrival=1000.0 + i))
    finish(made, policy)
    marks = [dict(zip(index.tolist(), flags.tolist(), strict=True)).get(1) for _, flags, index in policy.views]
    assert marks[:3] == [0, 0, 0]
    assert set(marks[3:]) <= {1, None}
    assert marks[3] == 1
    assert made.scheduler.slacktide.metrics.get("relegated") == 1


@BOTH
def test_the_running_list_is_as_before_after_a_step_in_another_order(directory, is_async):
    orders: list[list[str]] = []

    def script(view, step):
        return plan(view, dict(sorted(needs(view).items(), reverse=step % 2 == 1)))

    made, policy = engine(directory, script, is_async=is_async, max_num_batched_tokens=2048)
    for i in range(5):
        made.add(h.request(i, 20, 12, arrival=1000.0 + i))
    for _ in range(8):
        made.step()
        orders.append([r.request_id for r in made.scheduler.running])
    assert all(order == sorted(order) for order in orders)
    assert any(list(f) == sorted(f, reverse=True) and len(f) == 5 for f in facts(made))
    finish(made, policy)


@BOTH
def test_the_mirror_is_vllm_s_state(directory, is_async):
    """After every step of a crowded run: each row's numbers are those of vLLM's request."""
    checked = 0

    def script(view, step):
        nonlocal checked
        live, mirror = view.live, made.scheduler.slacktide.mirror
        for row, index in enumerate(live.index.tolist()):
            found = mirror.objects[mirror.slot_of_row[np.flatnonzero(mirror.table.ints[0, : len(mirror)] == index)[0]]]
            runs = found.status.name == "RUNNING"
            assert (live.status[row] == 1) == runs
            assert live.num_computed_tokens[row] == found.num_computed_tokens
            assert live.num_output_tokens[row] == found.num_output_tokens
            assert live.num_in_flight_tokens[row] == found.num_output_placeholders
            assert live.num_preemptions[row] == found.num_preemptions
            manager = made.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
            assert live.num_blocks[row] == (len(manager.req_to_blocks[found.request_id]) if runs else 0)
            checked += 1
        later = np.diff(live.arrival_time)
        assert np.all((later > 0) | ((later == 0) & (np.diff(live.index) > 0)))
        return stock(view)

    from slacktide.core.policies.vllm_v1 import VllmV1

    stock = VllmV1().plan
    made, _ = engine(directory, script, is_async=is_async, num_blocks=30, max_num_batched_tokens=64)
    rng = np.random.default_rng(1)
    for i in range(30):  # arrival times out of order, by up to a second
        made.add(
            h.request(i, int(rng.integers(1, 150)), int(rng.integers(1, 40)), arrival=1000 + i + rng.uniform(-1, 1))
        )
        made.step()
    made.run()
    assert made.scheduler.slacktide.metrics.get("fallbacks", "error") == 0
    assert checked > 500
    made.check_outputs()


@pytest.mark.parametrize("is_async", [False, True])
def test_the_class_for_the_other_kind_of_engine_refuses(directory, is_async):
    wrong, right = (
        (SyncScheduler, "slacktide.vllm.Scheduler") if is_async else (Scheduler, "slacktide.vllm.SyncScheduler")
    )
    with pytest.raises(InputError, match=rf"async scheduling is .*{right}"):
        h.build(directory, h.Options(is_async=is_async), wrong)


def test_bad_settings_stop_the_engine_at_start(directory):
    for given, message in (
        ({"polcy": "fcfs"}, "did you mean policy"),
        ({"policy": "nonsense"}, "unknown policy"),
        ({"slo": "ttft:-5"}, "expected more than 0"),
        ({"mode": "off"}, "slacktide.mode"),
    ):
        with pytest.raises(InputError, match=message):
            h.build(directory, h.Options(slacktide=given), SyncScheduler)


def test_every_registered_policy_serves_or_refuses(directory):
    """Each policy of the package drives vLLM's scheduler to the end, or says at start that it cannot."""
    from slacktide.core.policy import get, names

    served = 0
    for name in names():
        if getattr(get(name), "oracle", False):
            continue
        options = h.Options(
            num_blocks=60, slacktide={"policy": name, "slo": "ttft:500,tbt:50", "max_decision_ms": 10_000}
        )
        for is_async in (False, True):
            o = dataclasses.replace(options, is_async=is_async)
            try:
                scheduler = h.build(directory, o, Scheduler if is_async else SyncScheduler)
            except InputError as error:
                assert "steer" in str(error)  # noqa: PT017 (the other policies must not raise at all)
                continue
            made = h.Engine(scheduler, is_async=is_async)
            for i in range(12):
                made.add(h.request(i, 20 + 9 * i, 3 + 2 * i, arrival=1000.0 + i))
                made.step()
            made.run()
            rejected = [i for i, end in made.ends.items() if str(end) == "error"]
            made.check_outputs(but=rejected)
            made.check_blocks(o)
            assert scheduler.slacktide.metrics.get("fallbacks", "error") == 0, name
            assert scheduler.slacktide.metrics.get("fallbacks", "mirror") == 0, name
            served += 1
    assert served >= 10
