"""tide: its steps on hand-made situations, and what its derivation promises (docs/background/tide.md)."""

from __future__ import annotations

import numpy as np
import pytest

from slacktide.core.policies.tide import Tide
from slacktide.core.spec import parse_policies
from slacktide.metrics.slo import judge
from slacktide.sim.engine import EngineConfig, simulate

from .helpers import ONE_SECOND, Req, run, schedule, workload


def test_serves_a_prompt_whole_and_then_decodes():
    steps = schedule(Tide(), [Req(prompt=8, output=3, ttft=50.0, tbt=50.0)])
    assert steps == [{"A": 8}, {"A": 1}, {"A": 1}]


def test_prompts_go_by_deadline():
    requests = [Req(prompt=60, output=1, ttft=900.0), Req(prompt=60, output=1, ttft=30.0, arrival=0.0)]
    steps = schedule(Tide(), requests, max_num_batched_tokens=60)
    assert list(steps[0]) == ["B"]


@pytest.mark.parametrize(("urgency", "ttft", "beside"), [(4.0, 4.0, False), (4.0, 40.0, True), (0.0, 4.0, True)])
def test_a_prompt_with_little_time_to_spare_runs_alone(urgency, ttft, beside):
    requests = [Req(prompt=8, output=20, ttft=60.0, tbt=50.0), Req(prompt=8, output=1, ttft=ttft, arrival=5.0)]
    step = next(step for step in schedule(Tide(urgency=urgency), requests) if "B" in step)
    assert ("A" in step) == beside


def test_everybody_is_served_when_all_are_late():
    requests = [Req(prompt=50, output=3, ttft=0.5, tbt=0.5) for _ in range(6)]
    assert run(Tide(), requests).log.finished.all()


def test_explains_every_decision():
    reasons = []
    load = workload([Req(prompt=8, output=4, ttft=50.0, tbt=50.0, arrival=float(i)) for i in range(3)])
    config = EngineConfig(block_size=4, num_blocks=100, max_num_batched_tokens=100)
    simulate(load, Tide(), ONE_SECOND, config, on_step=lambda view, plan: reasons.append(plan.why))
    assert {"action", "options", "bound_by", "source"} <= set(reasons[0])
    assert {why["action"] for why in reasons} <= {"decode", "prefill", "mixed", "blocking"}


@pytest.mark.parametrize("text", ["tide:supply=0", "tide:late_share=1", "tide:slo_mode=mean", "tide:max_gap=0"])
def test_refuses_values_out_of_range(text):
    with pytest.raises(Exception, match=text.split(":")[1].split("=")[0]):
        parse_policies([text])


def test_on_time_requests_are_all_met_at_low_load():
    requests = [Req(prompt=20, output=4, ttft=8.0, tbt=8.0, arrival=20.0 * i) for i in range(5)]
    assert np.all(judge(run(Tide(), requests).log).met)


def test_sheds_what_cannot_be_on_time_only_when_asked_to():
    requests = [Req(prompt=50, output=2, ttft=2.5, tbt=50.0) for _ in range(8)]
    kept = run(Tide(), requests, max_num_batched_tokens=50).log
    shed = run(Tide(reject="shed"), requests, max_num_batched_tokens=50).log
    assert kept.finished.all()
    assert 0 < shed.finished.sum() < len(requests)
    assert judge(shed).met.sum() >= judge(kept).met.sum()


def test_a_prompt_that_is_cached_counts_by_what_is_left_of_it():
    steps = schedule(
        Tide(),
        [Req(prompt=17, output=2, ttft=90.0, tbt=90.0), Req(prompt=17, output=2, ttft=90.0, tbt=90.0, arrival=5.0)],
        hash_ids=[[1, 2, 3, 4], [1, 2, 3, 4]],
        enable_prefix_caching=True,
    )
    assert next(step for step in steps if "B" in step)["B"] == 1


def test_async_scheduling_serves_the_same_requests():
    requests = [Req(prompt=20, output=5, ttft=30.0, tbt=10.0, arrival=float(i)) for i in range(6)]
    log = run(Tide(), requests, pipeline_depth=2).log
    assert log.finished.all()
    assert judge(log).met.all()


def test_a_gap_bound_makes_decodes_run_even_when_deadlines_are_far():
    # One stream with ample slack and a stream of long prompts: without a bound the prompts run alone.
    requests = [Req(prompt=4, output=30, ttft=900.0, tbt=90.0)] + [
        Req(prompt=300, output=1, ttft=900.0, arrival=1.0 + 3.0 * i) for i in range(6)
    ]
    bound = judge(run(Tide(max_gap=4.0), requests).log).max_gap[0]
    assert bound <= 4.0


# ---- early rejection: the forecast of a first token


def forecasts(requests, policy=None, **engine):
    """(time, predicted TTFT, retry after) of every step, and the log."""
    seen = []
    load = workload(requests)
    config = EngineConfig(**({"block_size": 4, "num_blocks": 4000, "max_num_batched_tokens": 50} | engine))
    look = lambda view, plan: seen.append((view.now, plan.why["predicted_ttft"], plan.why["retry_after"]))  # noqa: E731
    return seen, simulate(load, policy or Tide(), ONE_SECOND, config, on_step=look).log


def test_forecasts_the_first_token_of_who_arrives_now():
    """Ten prompts of a step each come at once: the last one's TTFT was forecast when it came, and the queue drains."""
    requests = [Req(prompt=50, output=1, ttft=900.0, tbt=900.0) for _ in range(10)]
    seen, log = forecasts(requests)
    real = float(log.first_token_time.max())
    assert seen[0][1] == pytest.approx(real, rel=0.25)  # margins, and one more prompt of mean length
    values = [ttft for _, ttft, _ in seen]
    assert values == sorted(values, reverse=True)
    assert all(wait == 0.0 for _, _, wait in seen)


def test_says_when_to_come_back_where_the_target_cannot_be_met():
    requests = [Req(prompt=50, output=1, ttft=5.5, tbt=900.0) for _ in range(10)]
    seen, _ = forecasts(requests)
    _, ttft, wait = seen[0]
    assert wait == pytest.approx(ttft - 5.5)
    assert wait > 4


def test_without_a_seat_the_forecast_waits_for_one():
    requests = [Req(prompt=4, output=6, ttft=900.0, tbt=900.0) for _ in range(24)]
    few, _ = forecasts(requests, max_num_seqs=2)
    many, _ = forecasts(requests, max_num_seqs=64)
    assert max(ttft for _, ttft, _ in few) > 3 * max(ttft for _, ttft, _ in many)


@pytest.mark.parametrize("mode", ["shed", "demote"])
def test_rejection_says_how_many_are_hopeless(mode):
    told = []
    load = workload([Req(prompt=50, output=2, ttft=2.5, tbt=50.0) for _ in range(8)])
    config = EngineConfig(block_size=4, num_blocks=400, max_num_batched_tokens=50)
    look = lambda view, plan: told.append((plan.why["hopeless"], plan.rejected.size + plan.relegated.size))  # noqa: E731
    simulate(load, Tide(reject=mode), ONE_SECOND, config, on_step=look)
    assert sum(count for count, _ in told) > 0
    assert all(count == marked for count, marked in told)
