"""The promise of benchmarks/fidelity: replays of real vLLM runs stay inside their bars."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "fidelity"


def load_replay() -> ModuleType:
    """benchmarks/ is no package: load its module under a name of its own."""
    spec = importlib.util.spec_from_file_location("fidelity_replay", FOLDER / "replay.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


replay = load_replay()
RUNS = list(replay.RUNS.values())


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.gpu)
def test_replay_stays_inside_its_bars(run):
    real = replay.measured(run)
    error = replay.errors(real, replay.replay(run, real))
    assert replay.broken_bars(run, error) == []


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.gpu)
def test_bars_notice_a_step_time_that_is_wrong(run):
    real = replay.measured(run)
    slow = replay.replay(run, real, replay.Options(host_overhead=5e-3))
    broken = replay.broken_bars(run, replay.errors(real, slow))
    assert len(broken) == len(run.bars)


def test_bars_are_the_promised_ones():
    five = {"mean_ttft", "p99_ttft", "mean_tpot", "p99_tpot", "makespan"}
    assert replay.RUNS["rtx-pro-6000"].bars == dict.fromkeys(five, 0.03)
    assert replay.RUNS["rtx-4090"].bars == {"mean_ttft": 0.10, "mean_tpot": 0.10}
    assert replay.Options().host_overhead == 1e-3


def test_data_is_whole():
    for run, last in zip(RUNS, (65.9, 183.6), strict=True):
        real = replay.measured(run)
        assert (len(real.arrival), real.prompt.sum(), real.output.sum()) == (300, 257_239, 195_753)
        assert real.last.max() == pytest.approx(last, abs=0.1)
        assert (np.diff(real.arrival) >= 0).all()
        for earlier, later in ((real.arrival, real.scheduled), (real.scheduled, real.first), (real.first, real.last)):
            assert (later >= earlier).all()


def test_kv_blocks_bind_where_they_should():
    pro, small = (replay.describe(replay.replay(run, replay.measured(run))) for run in RUNS)
    assert pro["min_free_blocks"] > 0.5 * pro["num_blocks"]
    assert pro["preemptions"] == 0
    assert small["num_blocks"] == 2587  # num_gpu_blocks 2588, one of them vLLM's own
    assert small["min_free_blocks"] == 0
    assert small["preemptions"] > 100


def test_the_replay_is_deterministic():
    run = replay.RUNS["rtx-4090"]
    real = replay.measured(run)
    first, second = replay.replay(run, real), replay.replay(run, real)
    assert first.last_token_time.tobytes() == second.last_token_time.tobytes()
