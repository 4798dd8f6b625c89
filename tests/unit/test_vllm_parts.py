"""Parts of the plug-in that need no vLLM: belief, fuse, metrics, step log, capture, checks of plans."""

from __future__ import annotations

import itertools
import json
import math
import time
from types import SimpleNamespace

import numpy as np
import pytest

from slacktide.core import shape as s
from slacktide.core.latency import AffineModel
from slacktide.errors import InputError
from slacktide.vllm import metrics as m
from slacktide.vllm import outcome
from slacktide.vllm.belief import PRIOR_SAMPLES, OnlineBelief, prior_model, prior_samples
from slacktide.vllm.guard import Fuse
from slacktide.vllm.mirror import Mirror
from slacktide.vllm.settings import Settings
from slacktide.vllm.steplog import Capture, RotatingFile, Served, StepLine, StepLog, Writer, step_json
from slacktide.workload import load_workload


def steps(count: int, seed: int = 0):
    """Random steps of all scenes, in turn."""
    draws = [
        prior_samples(prior_model({}), np.random.default_rng(seed + i))[0]
        for i in range(-(-count // (3 * PRIOR_SAMPLES)))
    ]
    return np.concatenate(draws)[:count]


# ---- belief ----------------------------------------------------------------------------------------------------------


def feed(belief, truth, shapes):
    for shape, seconds in zip(shapes, truth.step_times(shapes), strict=True):
        assert belief.observe(shape, float(seconds)) is False


def error(belief, truth, seed=9000):
    test = steps(300, seed)
    return float(np.median(np.abs(belief.model.step_times(test) / truth.step_times(test) - 1)))


def test_the_first_belief_is_the_prior():
    prior = AffineModel(0.02, 2e-4, 0.015, 1e-4)
    belief = OnlineBelief({"alpha_p": 20, "beta_p": 0.2, "alpha_d": 15, "beta_d": 0.1})
    assert belief.model.sources["label"] == "prior"
    assert error(belief, prior, 50) < 0.1


def test_a_profile_is_a_prior():
    belief = OnlineBelief("h100/llama-3-8b")
    assert belief.model.sources["label"] == "fitted"
    assert 0.01 < belief.alone(2000, 8192) < 0.2  # some 20,000 to 100,000 tokens a second
    with pytest.raises(InputError, match="h100"):
        OnlineBelief("h100/llama-3-8x")


@pytest.mark.parametrize("scale", [0.02, 1.0, 30.0])
def test_measured_steps_take_over_and_the_model_follows_a_change(scale):
    """Also from a prior that is wrong by a factor that the refitter takes for outliers."""
    truth = AffineModel(scale * 0.008, scale * 2e-4, scale * 0.012, scale * 3e-5)
    belief = OnlineBelief(background=False)
    feed(belief, truth, steps(60, 100))
    assert error(belief, truth) < 0.6  # the first steps scale what was made up
    feed(belief, truth, steps(6000, 200))
    belief.refit()
    assert belief.model.sources["label"] == "fitted"
    assert error(belief, truth) < 0.06
    assert belief.num_samples == 6060
    slower = AffineModel(scale * 0.08, scale * 2e-3, scale * 0.12, scale * 3e-4)
    refits = belief.num_refits
    feed(belief, slower, steps(6000, 400))
    belief.refit()
    assert error(belief, slower) < 0.15
    assert belief.num_refits > refits
    assert belief.num_drifts + belief.anchors > 3


def test_a_hiccup_teaches_nothing():
    truth = AffineModel(0.008, 2e-4, 0.012, 3e-5)
    belief = OnlineBelief(background=False)
    feed(belief, truth, steps(600, 5))
    before, known = belief.model, belief.num_samples
    belief.observe(steps(1)[0], 5.0)
    assert belief.num_outliers >= 1
    assert belief.model is before
    for bad in (math.nan, -1.0, 0.0, math.inf):
        belief.observe(steps(1)[0], bad)
    assert belief.num_samples == known + 1


def test_a_prompt_alone_takes_its_chunks():
    belief = OnlineBelief()
    for tokens, budget in ((1, 8), (8, 8), (100, 32), (5000, 2048)):
        done, expected = 0, 0.0
        while done < tokens:
            chunk = min(budget, tokens - done)
            expected += belief.model.step_time(np.array([chunk]), np.array([done]), np.array([False]))
            done += chunk
        assert belief.alone(tokens, budget) == pytest.approx(expected, rel=1e-12)


def test_refits_run_in_a_thread_and_are_taken_over_by_observe():
    """No decision pays for one: the model changes only while a step is taken in, with its packed form built."""
    truth = AffineModel(0.02, 3e-4, 0.02, 1e-4)
    belief, models = OnlineBelief(), set()
    deadline = time.monotonic() + 60
    shapes = steps(600, 7)
    while belief.num_refits == 0 or belief.model.sources["label"] != "fitted":
        assert time.monotonic() < deadline
        feed(belief, truth, shapes)
        models.add(id(belief.model))
    assert "_packed" in vars(belief.model)


# ---- fuse ------------------------------------------------------------------------------------------------------------


def test_the_fuse_blows_after_failures_in_a_row_and_heals():
    fuse = Fuse(limit=3, rest=4)
    assert [fuse.bad(), fuse.bad()] == [False, False]
    fuse.good()
    assert [fuse.bad(), fuse.bad(), fuse.bad()] == [False, False, True]
    assert [fuse.step() for _ in range(6)] == [False] * 4 + [True] * 2
    assert fuse.blown == 1
    assert not fuse.resting


# ---- metrics ---------------------------------------------------------------------------------------------------------


def test_a_snapshot_comes_out_as_prometheus_writes_it(tmp_path):
    metrics = m.Metrics()
    metrics.add("slo_violations", "gold", "ttft")
    metrics.add("slo_violations", "gold", "ttft", by=2)
    metrics.set("num_running", 7)
    for value in (0.0015, 0.004, 99.0):
        metrics.observe("step_seconds", value)
    metrics.write(m.snapshot_path(tmp_path, 0))
    (tmp_path / "metrics-1.json").write_text("{")  # half written by somebody: left out
    found = m.read_snapshots(tmp_path)
    assert list(found) == ["0"]
    flat = {
        (n, tuple(sorted(labels.items()))): v for name in m.FAMILIES for n, labels, v in m.samples(name, found["0"])
    }
    assert flat[("slacktide:slo_violations_total", (("kind", "ttft"), ("slo_class", "gold")))] == 3
    assert flat[("slacktide:num_running", ())] == 7
    assert flat[("slacktide:step_seconds_bucket", (("le", "0.002"),))] == 1
    assert flat[("slacktide:step_seconds_bucket", (("le", "0.005"),))] == 2
    assert flat[("slacktide:step_seconds_bucket", (("le", "+Inf"),))] == 3
    assert flat[("slacktide:step_seconds_count", ())] == 3
    assert flat[("slacktide:step_seconds_sum", ())] == pytest.approx(99.0055)


def test_every_family_has_help_and_buckets_rise():
    for name, (kind, _, text) in m.FAMILIES.items():
        assert text[0].isupper()
        assert kind in ("counter", "gauge", "histogram")
        assert list(m.Metrics.buckets(name)) == sorted(set(m.Metrics.buckets(name)))


# ---- step log and capture --------------------------------------------------------------------------------------------


def line(**changes) -> StepLine:
    shape = np.zeros(s.SHAPE_SIZE)
    shape[s.NUM_TOKENS] = 5
    fields = {
        "start": 1.5, "duration": 0.02, "predicted": 0.03, "decision": 1e-4, "mode": "active",
        "shape": tuple(shape.tolist()), "num_running": 5, "num_waiting": 1,
        "num_free_blocks": 9, "num_preempted": 0, "fallback": "", "shadow": None,
    }  # fmt: skip
    return StepLine(**(fields | changes))


def test_a_line_of_the_step_log():
    data = json.loads(step_json(line(fallback="error")))
    assert (data["duration_s"], data["num_tokens"], data["fallback"], data["decode_context"]) == (0.02, 5, "error", 0)


def test_the_step_log_rotates(tmp_path):
    file = RotatingFile(tmp_path / "steps.jsonl", 100)
    for i in range(12):
        file.write(f"{i}" * 60 + "\n")
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"steps.jsonl.{i}" for i in (1, 2, 3, 4)]


def test_a_full_disk_does_not_reach_the_engine(tmp_path):
    writer = Writer()
    (tmp_path / "file").write_text("")
    log = StepLog(writer, str(tmp_path / "file" / "below-a-file.jsonl"), 1.0)
    log.add(line())
    writer.close()
    assert writer.failures == 1


def test_everybody_who_listens_hears_of_a_request_that_ended():
    """A capture and the window of the replays, side by side."""
    request = SimpleNamespace(
        request_id="a", arrival_time=1.0, num_prompt_tokens=20, max_tokens=8, num_output_tokens=0, num_preemptions=0,
        priority=0, sampling_params=None, block_hashes=[], status=SimpleNamespace(name="FINISHED_ABORTED"),
    )  # fmt: skip
    mirror, metrics = Mirror(Settings().targets(), 16, 0.0), m.Metrics()
    mirror.add(request, 1.0)
    heard: list[list[Served]] = [[], []]
    listeners = [SimpleNamespace(add=rows.append) for rows in heard]
    outcome.ended(mirror, metrics, listeners, "a", False, 2.5)
    outcome.ended(mirror, metrics, [], "a", False, 2.5)
    assert heard[0] == heard[1]
    assert [(row.arrival, row.num_prompt_tokens, row.abort) for row in heard[0]] == [(1.0, 20, 2.5)]
    assert metrics.get("requests", "default", "aborted") == 2


def test_a_capture_is_a_trace(tmp_path):
    writer = Writer()
    capture = Capture(writer, str(tmp_path / "trace.csv"), 16)
    a, b, c, d = (object() for _ in range(4))
    inf = math.inf
    capture.add(Served(2.0, 40, 7, 20, 0.5, 0.05, inf, 1, "gold", "me", None, (a, b)))
    capture.add(Served(1.0, 32, 3, 20, inf, inf, 9.0, 0, "", "", None, (a, c, d)))
    capture.add(Served(3.0, 5, 0, 20, inf, inf, inf, 0, "", "", 3.5, ()))  # ended before its first token
    capture.add(Served(4.0, 48, 2, 20, inf, inf, inf, 0, "", "", 4.5, (a, b, d)))
    writer.close()
    assert capture.num_empty == 1
    found = load_workload(str(tmp_path / "trace.csv"))
    assert (found.arrival_time - found.arrival_time[0]).tolist() == [0.0, 1.0, 3.0]
    assert found.num_prompt_tokens.tolist() == [32, 40, 48]
    assert found.num_output_tokens.tolist() == [3, 7, 2]
    assert found.slo_ttft.tolist() == [inf, 0.5, inf]
    assert found.priority.tolist() == [0, 1, 0]
    values, offsets = found.hash_ids
    lists = [values[i:j].tolist() for i, j in itertools.pairwise(offsets)]
    assert [len(one) for one in lists] == [2, 3, 3]
    assert lists[0][0] == lists[1][0] == lists[2][0]
    assert lists[1][1] == lists[2][1] != lists[0][1]
    assert lists[1][2] not in lists[2]
    assert np.isfinite(found.abort_time).tolist() == [False, False, True]


def test_a_capture_keeps_those_before_it(tmp_path):
    path = tmp_path / "trace.csv"
    for prompt in (1, 2, 3):
        writer = Writer()
        Capture(writer, str(path), 16).add(Served(0.0, prompt, 7, 20, 0.5, 0.05, 1.0, 0, "", "", None, ()))
        writer.close()
    found = [load_workload(str(tmp_path / name)).num_prompt_tokens[0] for name in ("trace.csv.1", "trace.csv.2")]
    assert [*found, load_workload(str(path)).num_prompt_tokens[0]] == [1, 2, 3]
