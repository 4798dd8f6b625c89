"""`slacktide serve` and `slacktide bench` on a real server: start, requests, admission, SIGTERM, and sudden death."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from slacktide.loadgen.record import run_log
from slacktide.loadgen.replay import Limits, Target, replay
from slacktide.loadgen.server import ServerProcess, cpu_environment, free_port
from slacktide.metrics.log import FAILED, FINISHED, REJECTED
from slacktide.metrics.summary import summarize
from slacktide.workload.requests import Workload

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm runs these tests")

ENGINE = [
    "--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager", "--dtype", "float32", "--max-num-seqs", "4",
    "--max-model-len", "512", "--max-num-batched-tokens", "128", "--served-model-name", "tiny",
]  # fmt: skip
OURS = ["--policy", "sarathi-edf", "--slo", "ttft:60000,tbt:60000", "--reject", "503", "--header", "x-tenant=tenant"]


def serve(model, log, *flags, timeout=300) -> ServerProcess:
    """`slacktide serve` on a free port, as a user would call it."""
    port = free_port()
    command = [sys.executable, "-m", "slacktide", "serve", str(model), *flags, *ENGINE, "--port", str(port)]
    # The tests' own engine settings must not reach the server; its temporary files are its own, to be counted.
    temporary = log.parent / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    environment = cpu_environment() | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO", "TMPDIR": str(temporary),
        "VLLM_RPC_BASE_PATH": tempfile.gettempdir(),  # sockets' paths must be short, and pytest's are not
        "VLLM_SERVER_DEV_MODE": "1",  # /pause, /sleep
    }  # fmt: skip
    return ServerProcess(command, f"http://127.0.0.1:{port}", log, environment=environment, timeout=timeout)


def workload(n, prompt, output, *, arrivals=None, **columns) -> Workload:
    return Workload(
        arrival_time=np.zeros(n) if arrivals is None else np.array(arrivals),
        num_prompt_tokens=np.full(n, prompt),
        num_output_tokens=np.full(n, output),
        **{name: np.full(n, value) for name, value in columns.items()},
    )


def run(server, work, **more):
    return run_log(work, result := replay(work, Target(server.url, vocabulary=512), **more)), result


def post(server, body, headers=None):
    """(status, headers, JSON) of a request that does not stream."""
    data = json.dumps({"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True} | body).encode()
    headers = {"content-type": "application/json"} | (headers or {})
    request = urllib.request.Request(server.url + "/v1/completions", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, dict(response.headers), json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, {k.lower(): v for k, v in error.headers.items()}, json.loads(error.read())


def command(server, path):
    """One of vLLM's commands for its operator."""
    with urllib.request.urlopen(urllib.request.Request(server.url + path, b""), timeout=60) as response:
        assert response.status == 200


def metric(server, name, label=""):
    """Sum of a metric's samples that carry a label."""
    with urllib.request.urlopen(server.url + "/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name) and label in line)


def processes(group: int) -> list[int]:
    """Processes that live in a process group."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(pgrp) == group and state != "Z":
            found.append(int(path.parent.name))
    return found


def files(server: ServerProcess) -> list[str]:
    """What engine and front end of a server have left for one another."""
    found = (server.log.parent / "tmp").glob("slacktide*/**/*")
    return sorted(path.name for path in found if path.is_file() and not path.name.startswith("."))


def engine_of(server: ServerProcess) -> int:
    """Process id of a server's engine."""
    return next(i for i in processes(server.pid) if b"EngineCore" in Path(f"/proc/{i}/cmdline").read_bytes())


def wait_for(done, seconds=60.0):
    """Fail unless `done()` becomes true."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    with serve(model, tmp_path_factory.mktemp("server") / "log", *OURS) as running:
        yield running


def test_what_was_chosen_is_printed_and_is_what_runs(server):
    log = server.log.read_text()
    assert "slacktide: scheduler: slacktide.vllm.SyncScheduler (synchronous: vLLM on CPUs)" in log
    assert "slacktide: policy: sarathi-edf" in log
    assert f"slacktide: listens on: {server.url.removeprefix('http://')}" in log


def test_every_request_gets_exactly_its_tokens_and_each_has_a_time(server):
    work = workload(12, 40, 9, arrivals=np.arange(12) * 0.05, slo_ttft=60.0, slo_tbt=60.0)
    log, result = run(server, work)
    assert log.end_reason.tolist() == [FINISHED] * 12
    assert log.num_delivered_tokens.tolist() == [9] * 12
    assert log.num_entries.tolist() == [9] * 12
    assert log.num_prompt_tokens.tolist() == [40] * 12
    assert not any(o.by_chunk for o in result.outcomes)
    assert summarize(log)["attainment"] == 1.0
    assert result.max_model_len == 512


def test_a_bad_target_is_400_and_good_ones_pass(server):
    status, _, answer = post(server, {"vllm_xargs": {"slo_ttft_ms": -1}})
    assert (status, answer["error"]["param"]) == (400, "vllm_xargs.slo_ttft_ms")
    status, _, answer = post(server, {}, {"x-llm-d-slo-tpot-ms": "soon"})
    assert (status, answer["error"]["param"]) == (400, "x-llm-d-slo-tpot-ms")
    good = {"x-llm-d-slo-ttft-ms": "90000", "x-tenant": "acme"}
    status, _, answer = post(server, {"vllm_xargs": {"slo_tbt_ms": 90000, "slo_class": "chat"}}, good)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 2)


def test_a_loaded_server_rejects_what_it_cannot_serve_in_time(server):
    """While four long requests run and more wait, one that wants its token at once is sent away, a patient one not."""
    load = threading.Thread(target=lambda: run(server, workload(16, 400, 100), num_warmups=0))
    load.start()
    answers = []
    while load.is_alive():
        answers.append(post(server, {"vllm_xargs": {"slo_ttft_ms": 0.001}}))
        if answers[-1][0] == 503:
            break
        time.sleep(0.05)
    load.join()
    status, headers, answer = answers[-1]
    assert status == 503
    assert 1 <= int(headers["retry-after"]) <= 60
    assert answer["error"]["code"] == 503
    assert post(server, {})[0] == 200  # the default target is a minute
    with urllib.request.urlopen(server.url + "/metrics", timeout=60) as response:
        assert "slacktide:admission_rejected_total" in response.read().decode()


def test_a_replay_counts_rejections(server):
    first = workload(8, 400, 100)
    load = threading.Thread(target=lambda: run(server, first, num_warmups=0))
    load.start()
    reasons = set()
    while load.is_alive() and REJECTED not in reasons:
        log, _ = run(server, workload(1, 5, 2, slo_ttft=1e-6), num_warmups=0)
        reasons |= set(log.end_reason.tolist())
    load.join()
    assert REJECTED in reasons


def test_a_client_that_leaves_frees_its_place(server):
    body = {"model": "tiny", "prompt": [5] * 20, "max_tokens": 480, "ignore_eos": True, "stream": True}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(server.url + "/v1/completions", json.dumps(body).encode(), headers)
    before = metric(server, "slacktide:requests_total", 'end="aborted"')
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.readline().startswith(b"data:")
    wait_for(lambda: metric(server, "slacktide:requests_total", 'end="aborted"') == before + 1)
    wait_for(lambda: metric(server, "slacktide:num_running") == 0)


def test_pausing_keeps_requests_and_resuming_serves_them(server):
    command(server, "/pause?mode=keep")
    answers = []
    one = threading.Thread(target=lambda: answers.append(post(server, {"max_tokens": 3})))
    one.start()
    time.sleep(1.0)
    assert not answers
    command(server, "/resume")
    one.join(60)
    assert [(status, answer["usage"]["completion_tokens"]) for status, _, answer in answers] == [(200, 3)]
    command(server, "/sleep?level=0")  # scheduling alone; the deeper levels free a GPU's memory
    command(server, "/wake_up")
    assert post(server, {})[0] == 200


def test_sigterm_shuts_down_cleanly(server):
    """Last of this module's tests on the shared server."""
    group, port = server.pid, int(server.url.rpartition(":")[2])
    assert len(processes(group)) > 1  # front end and engine
    assert files(server) == ["estimate-0.json", "metrics-0.json"]
    os.kill(group, signal.SIGTERM)
    wait_for(lambda: processes(group) == [])  # by themselves
    assert server.stop() == 0
    assert files(server) == []
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)


def test_a_server_that_is_killed_is_reported(model, tmp_path):
    with serve(model, tmp_path / "log", "--stock") as doomed:
        group = doomed.pid
        work = workload(30, 20, 20, arrivals=[*np.linspace(0, 6, 29), 600.0])
        threading.Timer(3.0, lambda: os.killpg(group, signal.SIGKILL)).start()
        log, result = run(doomed, work, limits=Limits(give_up=0.5), num_warmups=1)
    assert result.gone_since is not None
    reasons = log.end_reason.tolist()
    assert reasons[0] == FINISHED
    assert reasons[-1] == FAILED
    assert set(reasons) == {FINISHED, FAILED}
    assert any("could not be reached" in note for note in log.notes)
    assert doomed.returncode == -signal.SIGKILL


def test_sigint_while_it_starts_leaves_nothing(model, tmp_path):
    command = [sys.executable, "-m", "slacktide", "serve", str(model), *ENGINE, "--port", str(free_port())]
    (tmp_path / "tmp").mkdir()
    environment = os.environ | cpu_environment()
    environment |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "TMPDIR": str(tmp_path / "tmp"),
        "VLLM_RPC_BASE_PATH": tempfile.gettempdir(),
    }  # fmt: skip
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        while b"slacktide: command" not in (tmp_path / "log").read_bytes():
            assert process.poll() is None
            time.sleep(0.1)
        time.sleep(2)  # vLLM is importing, or its engine is starting
        process.send_signal(signal.SIGINT)
        status = process.wait(60)
    assert status != 0  # it never served
    wait_for(lambda: processes(process.pid) == [])
    assert not list((tmp_path / "tmp").glob("slacktide*"))


@pytest.mark.skipif("SLACKTIDE_SLOW_TESTS" not in os.environ, reason="two engines take minutes: SLACKTIDE_SLOW_TESTS=1")
def test_data_parallel_engines_behind_two_api_servers(model, tmp_path):
    """Each engine has its own files; metrics of both are in /metrics; nothing stays when they are ended."""
    log = tmp_path / "steps.jsonl"
    flags = ["--data-parallel-size", "2", "--additional-config.slacktide.step_log", str(log), *OURS]
    with serve(model, tmp_path / "log", *flags, timeout=900) as running:
        work = workload(24, 40, 9, arrivals=np.arange(24) * 0.05, slo_ttft=60.0, slo_tbt=60.0)
        found, _ = run(running, work)
        assert found.end_reason.tolist() == [FINISHED] * 24
        assert files(running) == ["estimate-0.json", "estimate-1.json", "metrics-0.json", "metrics-1.json"]
        time.sleep(3)  # each engine writes twice a second, each API server copies once
        with urllib.request.urlopen(running.url + "/metrics", timeout=60) as response:
            lines = response.read().decode().splitlines()
        attained = [line for line in lines if line.startswith("slacktide:slo_attained_total")]
        assert len(attained) == 2
        assert sum(float(line.rpartition(" ")[2]) for line in attained) >= 24
        assert all(path.stat().st_size for path in (log, tmp_path / "steps-1.jsonl"))
        running.stop()
        assert files(running) == []
