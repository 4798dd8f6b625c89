"""The plug-in in a real engine: same texts as stock vLLM, features that run on a CPU, shadow mode, logs and capture.

On a CPU vLLM has no async scheduling, so this is `SyncScheduler`; the headless tests run both.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here: make test-vllm runs these tests", allow_module_level=True)

HERE = Path(__file__).parent
NUM_PROMPTS = 14


@pytest.fixture(scope="session")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs a job of worker.py, once; returns (result, directory)."""
    done: dict[str, tuple[dict[str, Any], Path]] = {}

    def job(name: str) -> tuple[dict[str, Any], Path]:
        if name not in done:
            where = tmp_path_factory.mktemp(name)
            environment = os.environ | {
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
                "VLLM_LOGGING_LEVEL": "WARNING",
            }  # fmt: skip
            command = [sys.executable, str(HERE / "worker.py"), name, str(model), str(where)]
            found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-6000:]
            done[name] = json.loads((where / "result.json").read_text()), where
        return done[name]

    return job


def unharmed(result: dict[str, Any]) -> bool:
    """No failure of ours, and steps that were measured."""
    metrics = result["metrics"]
    bad = [name for name in metrics if name.startswith("fallbacks/")]
    return not bad and result["samples"] > 10


def test_texts_are_those_of_stock_vllm(run):
    stock, _ = run("stock")
    found, _ = run("policies")
    assert {"vllm-v1", "sliding", "eb-plus"} < set(found)
    for policy, ours in (found | {"eb": run("eb")[0]}).items():
        assert ours["texts"] == stock["texts"], policy
        assert ours["long"] == stock["long"], policy
        assert unharmed(ours), policy


def test_structured_output(run):
    """What a grammar allows and nothing else, and the same as under vLLM's own schedule."""
    found, _ = run("structured")
    assert found["active"] == found["stock"]
    for kind, text in zip(found["kinds"], found["active"], strict=True):
        match kind:
            case "regex":
                assert re.fullmatch("[0-9]{4}-[a-f]{2}", text)
            case "choice":
                assert text in ("yes", "no", "perhaps")
            case "json":
                value = json.loads(text)
                assert value.keys() == {"a", "b"}
                assert value["a"] in range(100)
                assert value["b"] in ("x", "y")
    assert unharmed(found)


def test_exclusive_steps(run):
    """Under eb no step of the real engine holds both prompts and decodes, and refills wait for k = 3 free seats."""
    _, where = run("eb")
    lines = [json.loads(line) for line in (where / "steps.jsonl").read_text().splitlines()]
    assert not [line for line in lines if line["num_prefills"] and line["num_decodes"]]
    assert sum(line["num_prefills"] > 0 for line in lines) > 4
    assert sum(line["num_decodes"] > 0 for line in lines) > 20


def test_features_that_run_on_a_cpu(run):
    """n > 1, logprobs, prefix caching (the second pass hits), per-request targets, priority order, shadow mode."""
    stock, _ = run("stock")
    ours, _ = run("features")
    assert ours["texts"] == ours["cached"] == ours["shadow"] == stock["texts"]
    assert ours["n"] == [2] * NUM_PROMPTS
    assert ours["logprobs"] == [12] * NUM_PROMPTS
    assert ours["invalid"] == ours["clamped"] == NUM_PROMPTS
    assert ours["metrics"]["requests/gold/finished"] == NUM_PROMPTS
    assert ours["mode"] == "shadow"
    assert sum(v for name, v in ours["metrics"].items() if name.startswith("shadow_steps/")) > 5
    assert unharmed(ours)


def test_the_step_log_and_the_capture(run):
    ours, where = run("features")
    lines = [json.loads(line) for line in (where / "steps.jsonl").read_text().splitlines()]
    assert all(line["duration_s"] > 0 and line["num_tokens"] > 0 for line in lines)
    assert {line["mode"] for line in lines} == {"active", "shadow"}
    assert any(line["decode_context"] > 0 for line in lines)
    assert len(lines) == sum(v for name, v in ours["metrics"].items() if name.startswith("steps/"))
    from slacktide.workload import load_workload

    captured = load_workload(str(where / "trace.csv"))
    served = sum(v for name, v in ours["metrics"].items() if name.startswith("requests/"))
    assert len(captured.arrival_time) == served
    assert captured.hash_ids is not None
    assert set(captured.num_output_tokens.tolist()) == {12}
    assert "gold" in captured.slo_classes


def test_ngram_speculation(run):
    """Rows of several tokens: no token is lost, none is another one."""
    stock, _ = run("stock-ngram")
    found, _ = run("ngram")
    for policy, ours in found.items():
        assert ours["long"] == stock["long"], policy
        assert unharmed(ours), policy
    assert len(found) == 2
