"""`slacktide profile` on a real engine: every designed step is run as designed, in this process and over HTTP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm runs these tests")

from slacktide.cli import profile_server
from slacktide.cli.main import main
from slacktide.loadgen.server import cpu_environment
from slacktide.profiling.experiments import parse_key
from slacktide.profiling.measurements import read_steps
from slacktide.profiling.profile_file import read_profile
from slacktide.profiling.torch_stack import tiny

from .test_server import serve

FLAGS = [
    "--load-format", "dummy", "--enforce-eager", "--dtype", "float32", "--max-num-seqs", "4", "--max-model-len", "512",
    "--max-num-batched-tokens", "64", "--num-gpu-blocks-override", "40", "--block-size", "32",
]  # fmt: skip


@pytest.fixture(scope="module")
def measured(model, tmp_path_factory):
    """DIRECTORY of a profile made in a process of its own: vLLM builds one engine in a process."""
    out = tmp_path_factory.mktemp("profile")
    command = [sys.executable, "-m", "slacktide", "profile", str(model), *FLAGS, "--minutes", "0.25", "--out", str(out)]
    environment = os.environ | cpu_environment() | {"VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=420, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return out, done.stdout


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "measurements.jsonl").read_text().splitlines()]


def test_the_engine_ran_exactly_the_designed_steps(measured):
    out, _ = measured
    head, *rows = lines(out)
    assert {row["point"][0] for row in rows} == {"p", "d"}
    assert any(";" in row["point"] for row in rows)
    for row in rows:
        designed = parse_key(row["point"])
        assert row["num_tokens"] == designed.shape[0]
        assert (row["num_prefills"], row["num_decodes"]) == (len(designed.chunks), len(designed.decodes))
        assert row["prefill_context"] == sum(u for _, u in designed.chunks)
        grown = row["decode_context"] - sum(designed.decodes)  # a decode's context grows by its own samples
        assert 0 <= grown <= 2 * len(designed.decodes)
        assert 0 < row["duration_s"] <= row["turn_s"]
    engine = head["facts"]["engine"]
    assert (engine["num_gpu_blocks"], engine["block_size"], engine["max_num_seqs"]) == (40, 32, 4)
    assert engine["async_scheduling"] is False
    assert head["facts"]["versions"]["torch"]


def test_the_profile_is_one_and_tells_its_error(measured):
    out, said = measured
    profile = read_profile(out / "profile.json")
    assert (profile.label, profile.num_blocks, profile.block_size, profile.pipeline_depth) == ("fitted", 39, 32, 1)
    assert profile.region is not None
    assert set(profile.region.boxes) == {"decode", "prefill", "mixed"}
    assert "KV cache: 40 blocks of 32 tokens" in said
    steps = read_steps(out / "measurements.jsonl")
    assert steps.host.known
    assert steps.host.per_step + steps.host.per_sequence > 0


def test_a_server_is_measured_from_outside_and_by_its_step_log(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(profile_server, "LEAST_SECONDS", 1.5)
    log = tmp_path / "steps.jsonl"
    own = json.dumps({"slacktide": {"step_log": str(log)}})
    flags = ["--max-num-batched-tokens", "128", "--max-num-seqs", "4", "--vocab-size", "500", "--quiet"]
    with serve(model, tmp_path / "log", "--policy", "vllm-v1", "--additional-config", own) as server:
        run = ["profile", "--url", server.url, *flags, "--minutes", "0.1"]
        assert main([*run, "--out", str(tmp_path / "inside"), "--step-log", str(log), "--family", "affine"]) == 0
        assert main([*run, "--out", str(tmp_path / "outside"), "--family", "affine", "--json"]) == 0
    said = capsys.readouterr().out
    inside, outside = (read_profile(tmp_path / name / "profile.json") for name in ("inside", "outside"))
    assert inside.num_blocks == outside.num_blocks > 100  # told by the server
    assert inside.frontend > 0
    assert "token times that clients saw" in said
    head = json.loads((tmp_path / "inside" / "traffic.jsonl").read_text().splitlines()[0])
    assert head["facts"]["engine"]["max_model_len"] == 512


def test_the_torch_stack_runs_every_kind_of_step():
    stack = tiny()
    for key in ("d1x17", "d4x65+d2x257", "p128@0", "p32@64", "p16@0+p16@0;d4x33", "p16@256;d1x17"):
        point = parse_key(key)
        samples = stack.measure(point, 2)
        assert len(samples) == 2
        assert all(sample.duration > 0 and (sample.shape == point.shape).all() for sample in samples)
    stack.close()


def test_attention_of_the_torch_stack_is_causal_attention():
    import torch

    stack = tiny()
    torch.manual_seed(0)
    heads, kv, d = stack.model.heads, stack.model.kv_heads, stack.model.head_dim
    for c, u in ((5, 0), (4, 7), (1, 9)):
        q = torch.randn(2, heads, c, d, dtype=torch.float32)
        cache = torch.randn(2, kv, 2, c + u, d, dtype=torch.float32)
        found = stack._attention(q, cache, u)
        for head in range(heads):
            keys, values = (cache[i, head * kv // heads] for i in (0, 1))
            scores = q[:, head] @ keys.transpose(-1, -2) / d**0.5
            hidden = torch.arange(c + u)[None, :] > torch.arange(c)[:, None] + u
            weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
            assert torch.allclose(found[:, head], weights @ values, atol=1e-5)
    stack.close()
