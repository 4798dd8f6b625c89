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
