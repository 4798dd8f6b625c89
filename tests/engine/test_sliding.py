"""`sliding` on a real server: 50 requests, and what the server says of their targets against the client's clock.

At the end one server is interrupted and the other one's engine killed: neither may leave a file.
"""

from __future__ import annotations

import os
import signal
import time
import urllib.request

import numpy as np
import pytest

from slacktide.loadgen.record import run_log
from slacktide.loadgen.replay import Target, replay
from slacktide.metrics.log import FINISHED
from slacktide.metrics.slo import judge
from slacktide.workload.requests import Workload

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm runs these tests")

from .test_server import engine_of, files, processes, serve, wait_for

N = 50
# Far from what any machine does, so that no network delay decides: a millisecond (the least target accepted) for
# a prompt of four steps, or a minute.
IMPOSSIBLE, EASY = 1e-3, 60.0


def counters(url: str) -> dict[str, float]:
    """The server's own counters, summed over their labels."""
    with urllib.request.urlopen(url + "/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if line.startswith("slacktide:"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
    return found


def ended(found: dict[str, float]) -> float:
    """Requests that have got a verdict."""
    return found.get("slacktide:requests_total", 0.0)


@pytest.mark.parametrize("policy", ["sliding", "qoserve"])
def test_the_reported_attainment_is_the_clients(model, tmp_path, policy):
    rng = np.random.default_rng(5)
    hard = np.arange(N) % 5 == 0
    work = Workload(
        arrival_time=np.cumsum(rng.exponential(0.03, N)),
        num_prompt_tokens=np.where(hard, 450, rng.integers(5, 300, N)),
        num_output_tokens=rng.integers(2, 20, N),
        slo_ttft=np.where(hard, IMPOSSIBLE, EASY),
        slo_tbt=np.full(N, EASY),
    )
    with serve(model, tmp_path / "log", "--policy", policy, "--slo", "ttft:60000,tbt:60000") as server:
        before = counters(server.url)
        log = run_log(work, replay(work, Target(server.url, vocabulary=512), num_warmups=0))
        after = counters(server.url)
        wait_until = time.monotonic() + 60  # the engine writes its counters down twice a second
        while ended(after) - ended(before) < N and time.monotonic() < wait_until:
            time.sleep(0.5)
            after = counters(server.url)
        assert files(server)
        if policy == "sliding":
            os.kill(engine_of(server), signal.SIGKILL)
            wait_for(lambda: processes(server.pid) == [])
        else:
            server.stop(signal.SIGINT)
        assert files(server) == []
    assert log.end_reason.tolist() == [FINISHED] * N
    assert log.num_delivered_tokens.tolist() == work.num_output_tokens.tolist()
    met = int(judge(log).met.sum())
    assert met == int((~hard).sum())
    attained = after["slacktide:slo_attained_total"] - before.get("slacktide:slo_attained_total", 0.0)
    assert ended(after) - ended(before) == N
    assert attained == met
    assert after.get("slacktide:fallbacks_total", 0.0) == 0
