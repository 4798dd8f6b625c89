"""Shadow mode's replays: the window of requests, and the simulator's answer. No vLLM needed."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

from slacktide.core.latency import AffineModel
from slacktide.vllm.belief import prior_samples
from slacktide.vllm.metrics import Metrics
from slacktide.vllm.replay import MIN_REQUESTS, Replays, Task, Window
from slacktide.vllm.steplog import Served


def served(arrival, *, output=5, slo_class="", ttft=0.5, prompt=40):
    return Served(arrival, prompt, output, 50, ttft, 0.05, math.inf, 0, slo_class, "", None, ())


def end(window, metrics, row, *, met):
    """As `outcome.ended` does it."""
    if met:
        metrics.add("slo_attained", row.slo_class or "default")
    window.add(row)


def test_the_window_knows_who_attained_and_what_is_complete():
    metrics = Metrics()
    window = Window(metrics, size=4)
    for arrival, met in ((3.0, True), (1.0, False), (2.0, True)):
        end(window, metrics, served(arrival, slo_class="gold" if met else ""), met=met)
    assert [(row.arrival, met) for row, met in window.between(-math.inf, math.inf)] == [
        (1.0, False),
        (2.0, True),
        (3.0, True),
    ]
    end(window, metrics, served(4.0, output=0), met=False)
    end(window, metrics, served(5.0), met=False)  # the first one, of 3.0, gives way: what came before is incomplete
    assert window.complete_from == 3.0
    assert [row.arrival for row, _ in window.between(-math.inf, math.inf)] == [5.0]
    assert window.between(-math.inf, 5.0) == []


@pytest.fixture
def replays(tmp_path):
    """A replay of 120 requests that arrive at once in 4 s, on an engine that makes a step in 10 to 60 ms."""
    metrics = Metrics()
    window = Window(metrics)
    shapes, times = prior_samples(AffineModel(0.01, 1e-4, 0.01, 5e-5), np.random.default_rng(0))
    profile = {"name": "shadow", "label": "measured", "source": "test", "num_gpu_blocks": 500, "block_size": 16,
               "max_num_batched_tokens": 512, "max_num_seqs": 16}  # fmt: skip
    task = Task(profile, ("vllm-v1", "sarathi-srpf"), ("--oversized", "drop"))
    made = Replays(
        metrics, window, task, tmp_path / "state", every=3600.0, shadow=lambda: True, now=lambda: 0.0,
        oldest_live=lambda: 100.0, steps=lambda: list(zip(shapes, times, strict=True)),
    )  # fmt: skip
    yield made, window, metrics
    made.close()


def test_too_little_is_no_forecast(replays):
    made, window, metrics = replays
    for i in range(MIN_REQUESTS - 1):
        end(window, metrics, served(1.0 + i), met=True)
    end(window, metrics, served(200.0), met=True)  # after the oldest request that still lives: incomplete
    assert made.once() == "skipped"


def test_the_replay_says_what_both_schedules_attain(replays, tmp_path):
    """Long prompts before short ones: the shortest first meets more targets."""
    made, window, metrics = replays
    rng = np.random.default_rng(1)
    for i in range(120):
        prompt = 4000 if i % 10 == 0 else int(rng.integers(10, 60))
        end(window, metrics, served(1.0 + i / 30, ttft=0.4, prompt=prompt), met=i % 4 == 0)
    assert made.once() == "done"
    assert metrics.get("shadow_attainment", "measured") == 0.25
    stock, ours = (metrics.get("shadow_attainment", name) for name in ("stock", "ours"))
    assert 0 < stock < ours <= 0.9
    assert metrics.get("shadow_replay_requests") == 120
    assert (tmp_path / "state" / "trace.csv").exists()
    made.close()
    assert not (tmp_path / "state").exists()


def test_a_replay_that_fails_says_why(replays, monkeypatch):
    made, window, metrics = replays
    for i in range(60):
        end(window, metrics, served(1.0 + i), met=True)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError):
        made.once()
    assert metrics.get("shadow_attainment", "ours") == 0.0
