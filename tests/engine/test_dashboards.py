"""The dashboard and the alert rules against what the installed vLLM really exposes, after some requests."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from slacktide.live.figures import view
from slacktide.live.scrape import fetch, metrics_url
from slacktide.loadgen.server import ServerProcess, cpu_environment, free_port

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm runs these tests")

HERE = Path(__file__).parent
ENGINE = [
    "--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager", "--dtype", "float32", "--max-num-seqs", "4",
    "--max-model-len", "512", "--served-model-name", "tiny",
]  # fmt: skip


def rules():
    """tests/unit/test_dashboards.py, which knows the queries and how to judge them."""
    spec = importlib.util.spec_from_file_location("dashboard_rules", HERE.parent / "unit/test_dashboards.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_query_has_what_it_asks_for_on_a_real_server(model, tmp_path):
    port = free_port()
    command = [sys.executable, "-m", "slacktide", "serve", str(model), "--policy", "sliding",
               "--slo", "ttft:60000,tbt:60000", *ENGINE, "--port", str(port)]  # fmt: skip
    environment = cpu_environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    url = f"http://127.0.0.1:{port}"
    with ServerProcess(command, url, tmp_path / "log", environment=environment, timeout=300):
        for prompt in ([5, 6, 7], list(range(10, 90))):
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "ignore_eos": True, "detokenize": False}
            request = urllib.request.Request(
                f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=120) as answer:
                assert answer.status == 200
        for _ in range(50):  # the engine writes its figures twice a second
            page = fetch(metrics_url(url), 0.0)
            if page.sum("slacktide:requests_total") == 2:
                break
            time.sleep(0.2)
    known = {name: {label for labels in values for label, _ in labels} for name, values in page.values.items()}
    of_vllm = {name: labels for name, labels in known.items() if name.startswith("vllm:")}
    judge = rules()
    # Ours appear with their first count; vLLM's are there from the start, so those must be on the page itself.
    found = {query: judge.complaints(query, judge.registered() | of_vllm) for query in judge.queries()}
    assert {query: wrong for query, wrong in found.items() if wrong} == {}
    for name in ("steps_total", "step_seconds_bucket", "predicted_step_seconds_sum", "decision_seconds_bucket", "mode",
                 "slack_seconds_bucket", "slack_seconds_count", "requests_total", "slo_attained_total",
                 "belief_samples", "predicted_ttft_seconds"):  # fmt: skip
        assert f"slacktide:{name}" in known
    assert page.sum("slacktide:slack_seconds_count") > 0
    assert "slacktide:slack_seconds_sum" not in known
    assert list(page.items("slacktide:slack_seconds_bucket", le=judge.LATE))
    figures = view(None, page)
    assert figures.slack_late == 0.0
    assert figures.slack[1] is not None
    assert figures.ours
    assert figures.classes[0].ended == 2
    assert figures.classes[0].attained == 1.0
    assert figures.kv_usage is not None
    assert figures.ttft[0] is not None
