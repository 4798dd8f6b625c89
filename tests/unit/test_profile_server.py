"""The part of `slacktide profile` that measures a server, with a simulated one in its place."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import numpy as np
import pytest

from slacktide.cli import profile_server
from slacktide.cli.main import main
from slacktide.core import shape as s
from slacktide.core.latency import AffineModel
from slacktide.core.pack import as_policy
from slacktide.core.policies.vllm_v1 import VllmV1
from slacktide.errors import InputError
from slacktide.loadgen import client
from slacktide.loadgen.client import Outcome
from slacktide.loadgen.replay import Replay, Target
from slacktide.profiling.profile_file import read_profile
from slacktide.sim.engine import EngineConfig, simulate
from slacktide.workload.requests import ClosedLoop, Workload

TRUTH = AffineModel(0.02, 1e-4, 0.02, 1e-3, 0.025)
FRONTEND, HOST = 0.006, 0.001
FACTS = {
    "kind": "server", "model": "toy", "max_model_len": 1024, "num_gpu_blocks": 501, "block_size": 16,
    "max_num_batched_tokens": 256, "max_num_seqs": 4,
}  # fmt: skip


class Simulated:
    """Answers a load as the simulator says; writes a step log when it has one."""

    def __init__(self, log=None):
        self.log, self.calls, self.ahead = log, 0, 0.0

    def __call__(self, target, load, seconds, seed):
        self.calls += 1
        n = min(len(load.prompt), 40)
        work = Workload(
            arrival_time=np.zeros(n), num_prompt_tokens=load.prompt[:n], num_output_tokens=load.output[:n],
            closed=ClosedLoop(load.concurrency),
        )  # fmt: skip
        config = EngineConfig(max_num_batched_tokens=256, max_num_seqs=4, num_blocks=500)
        found = simulate(work, as_policy(VllmV1()), TRUTH, config).log
        start = client.clock()
        outcomes = [
            Outcome(sent=start + float(a) - FRONTEND, token_times=[start + float(t) for t in found.request_times(i)])
            for i, a in enumerate(found.arrival_time)
        ]
        if self.log is not None:
            self._write(found, time.time() + self.ahead)
            # A simulated load takes no time: the next one must come after it all the same (the first is the warm-up).
            self.ahead += float(found.sim_duration) if self.calls > 1 else 0.0
        return Replay(outcomes + [Outcome() for _ in range(len(load.prompt) - n)])  # the rest was never due

    def _write(self, found, epoch):
        contexts = np.zeros(found.num_steps)
        with self.log.open("w") as file:
            for i in range(found.num_steps):
                shape = np.zeros(s.SHAPE_SIZE)
                shape[s.NUM_TOKENS] = found.num_tokens[i]
                shape[s.NUM_PREFILLS] = found.num_prefills[i]
                shape[s.PREFILL_TOKENS] = found.num_prefill_tokens[i]
                shape[s.NUM_DECODES] = found.num_decodes[i]
                shape[s.NUM_SEQUENCES] = found.num_prefills[i] + found.num_decodes[i]
                shape[s.DECODE_CONTEXT] = contexts[i]
                line = {"start": epoch + float(found.start[i]), "duration_s": float(found.duration[i]) - HOST}
                file.write(json.dumps(line | dict(zip(s.FIELD_NAMES, shape.tolist(), strict=True))) + "\n")


@pytest.fixture
def server(monkeypatch):
    def use(log=None):
        fake = Simulated(log)
        monkeypatch.setattr(profile_server, "_replay", fake)
        monkeypatch.setattr(profile_server, "server_facts", lambda target: dict(FACTS))
        monkeypatch.setattr(profile_server, "SETTLE", 0.0)
        return fake

    return use


def test_from_outside(server, tmp_path):
    server()
    assert main(["profile", "--url", "http://x", "--out", str(tmp_path), "--family", "affine", "--quiet"]) == 0
    profile = read_profile(tmp_path / "profile.json")
    decode = (np.ones(4, np.int64), np.full(4, 100), np.ones(4, bool))
    assert profile.latency.step_time(*decode) == pytest.approx(TRUTH.step_time(*decode), rel=0.02)
    assert (profile.num_blocks, profile.frontend) == (500, 0.0)


def test_by_the_step_log_with_host_and_front_end(server, tmp_path):
    fake = server(tmp_path / "steps.jsonl")
    command = ["profile", "--url", "http://x", "--out", str(tmp_path), "--family", "affine", "--quiet"]
    assert main([*command, "--step-log", str(tmp_path / "steps.jsonl")]) == 0
    profile = read_profile(tmp_path / "profile.json")
    decode = (np.ones(3, np.int64), np.full(3, 100), np.ones(3, bool))
    assert profile.latency.step_time(*decode) == pytest.approx(TRUTH.step_time(*decode), rel=0.01)
    assert profile.frontend == pytest.approx(FRONTEND, abs=3e-4)
    fields = json.loads((tmp_path / "profile.json").read_text())
    assert fields["host"]["per_step_ms"] + 2 * fields["host"]["per_sequence_ms"] == pytest.approx(1.0, abs=0.1)
    before = fake.calls
    assert main([*command, "--step-log", str(tmp_path / "steps.jsonl")]) == 0
    assert fake.calls == before + 1  # the warm-up alone: every load was done


def test_a_log_of_another_server_is_noticed(server, tmp_path, capsys):
    server()
    (tmp_path / "other.jsonl").write_text('{"start": 1.0, "duration_s": 1.0}\n')
    command = ["profile", "--url", "http://x", "--out", str(tmp_path), "--quiet", "--step-log"]
    assert main([*command, str(tmp_path / "other.jsonl")]) == 2
    assert "no new step in it during a load" in capsys.readouterr().err


def test_what_the_server_does_not_tell_is_asked_for(server, tmp_path, capsys, monkeypatch):
    server()
    monkeypatch.setattr(profile_server, "server_facts", lambda target: {"model": "toy", "max_model_len": 1024})
    assert main(["profile", "--url", "http://x", "--out", str(tmp_path), "--quiet"]) == 2
    assert "give --max-num-batched-tokens, --max-num-seqs" in capsys.readouterr().err


def test_another_servers_file_is_not_gone_on_with(tmp_path):
    args = SimpleNamespace(step_log=None)
    profile_server._write(tmp_path / "t.jsonl", args, {"model": "a"}, [], [{"load": 0, "duration_s": 1.0}])
    assert profile_server._resumed(tmp_path / "t.jsonl", {"model": "a"})["loads"] == {0}
    with pytest.raises(InputError, match=r"another engine \(model differ\)"):
        profile_server._resumed(tmp_path / "t.jsonl", {"model": "b"})


METRICS = 'x 1\nvllm:cache_config_info{block_size="128",enable_prefix_caching="True",num_gpu_blocks="364"} 1.0\n'


@pytest.mark.parametrize(("text", "expected"), [(METRICS, (364, 128)), ("nothing", (None, None))])
def test_blocks_are_read_from_the_servers_metrics(monkeypatch, text, expected):
    async def describe(session, target):
        return "dir/toy", 512

    class Opener:
        def open(self, url, timeout):
            import contextlib
            import io

            return contextlib.closing(io.BytesIO(text.encode()))

    monkeypatch.setattr("slacktide.loadgen.replay.describe", describe)
    monkeypatch.setattr("urllib.request.build_opener", lambda *a: Opener())
    found = profile_server.server_facts(Target("http://127.0.0.1:1"))
    assert (found["model"], found["max_model_len"]) == ("toy", 512)
    assert (found.get("num_gpu_blocks"), found.get("block_size")) == expected
