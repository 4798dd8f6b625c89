"""Our figures against vLLM's own benchmark code, to the last bit: both clients read the same scripted streams.

A fake server sends each answer under a clock that stands still between events, so no machine's noise comes in. What
two real runs differ by: benchmarks/bench_agreement.
"""

from __future__ import annotations

import asyncio
import time as real_time
import warnings

import aiohttp
import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm runs these tests")

from slacktide.core.types import SLO
from slacktide.loadgen import client
from slacktide.loadgen.client import Outcome, open_session, send
from slacktide.loadgen.record import run_log
from slacktide.loadgen.replay import Replay
from slacktide.metrics.slo import with_slo
from slacktide.metrics.summary import summarize
from slacktide.workload.requests import Workload

from ..unit.fake_openai import FakeServer

# (sent, times of the tokens) of each request; sums of halves, so that floats are exact
STREAMS = [
    (0.0, [0.5, 0.75, 1.5, 1.75]),
    (0.25, [1.25, 1.5]),
    (0.5, [4.0]),
    (1.0, [1.125, 2.0, 2.5, 2.75, 3.0, 5.5]),
]
PROMPTS = [3, 5, 2, 7]
DURATION = 5.5
GOODPUT = {"ttft": 1000.0, "tpot": 600.0, "e2el": 4000.0}


class Clock:
    """Stands still until a script moves it; knows how many chunks a client has taken in."""

    def __init__(self):
        self.now, self.taken = 0.0, 0

    def perf_counter(self):
        return self.now

    def __getattr__(self, name):  # the rest of the module `time`
        return getattr(real_time, name)


def script(clock, times):
    async def answer(x):
        await x.head()
        for i, now in enumerate(times):
            clock.now, before = now, clock.taken
            await x.chunk(1, i + 1, "length" if i == len(times) - 1 else None)
            while clock.taken == before:
                await asyncio.sleep(0.001)
        await x.end(len(times))

    return answer


def ours(monkeypatch):
    """Outcomes of our client."""
    outcomes = []
    for (sent, times), prompt in zip(STREAMS, PROMPTS, strict=True):
        clock = Clock()

        class Answer(client.Answer):
            def event(self, text, now, clock=clock):
                super().event(text, now)
                clock.taken += 1

        monkeypatch.setattr(client, "clock", clock.perf_counter)
        monkeypatch.setattr(client, "Answer", Answer)
        outcome, clock.now = Outcome(due=sent, woken=sent), sent
        body = b'{"prompt": [%s], "max_tokens": 9}' % b",".join([b"1"] * prompt)

        async def one(url, body=body, outcome=outcome):
            async with open_session(url, {}) as session:
                await send(session, url + "/v1/completions", body, outcome, timeout=60)

        with FakeServer(script(clock, times)) as server:
            asyncio.run(one(server.url))
        outcomes.append(outcome)
    return outcomes


def theirs(monkeypatch):
    """Outputs of vLLM's client."""
    from vllm.benchmarks.lib import endpoint_request_func as module

    outputs = []
    for (sent, times), prompt in zip(STREAMS, PROMPTS, strict=True):
        clock = Clock()
        monkeypatch.setattr(module, "time", clock)
        original = module.json.loads

        class Json:
            """Counts the chunks that the client parses, once each: it tries unfinished ones more than once."""

            def __init__(self, clock, loads):
                self.clock, self.seen, self._loads = clock, set(), loads
                self.JSONDecodeError = ValueError

            def loads(self, text):
                data = self._loads(text)
                if text not in self.seen and data.get("choices"):
                    self.seen.add(text)
                elif data.get("choices"):
                    self.clock.taken += 1
                return data

        monkeypatch.setattr(module, "json", Json(clock, original))
        clock.now = sent

        async def one(url, prompt=prompt):
            given = module.RequestFuncInput(
                prompt=[1] * prompt, api_url=url + "/v1/completions", prompt_len=prompt, output_len=9, model="tiny"
            )
            async with aiohttp.ClientSession() as session:
                return await module.async_request_openai_completions(given, session)

        with FakeServer(script(clock, times)) as server:
            outputs.append(asyncio.run(one(server.url)))
        monkeypatch.undo()
    return outputs


def workload():
    return Workload(
        arrival_time=np.array([sent for sent, _ in STREAMS]),
        num_prompt_tokens=np.array(PROMPTS),
        num_output_tokens=np.array([len(times) for _, times in STREAMS]),
    )


def test_both_clients_see_the_same_times(monkeypatch):
    for own, other, (sent, times) in zip(ours(monkeypatch), theirs(monkeypatch), STREAMS, strict=True):
        assert other.success, other.error
        assert own.token_times == times
        assert other.ttft == own.token_times[0] - sent
        assert other.itl == np.diff(own.token_times).tolist()
        assert other.latency == own.end - sent
        assert (other.output_tokens, other.prompt_len) == (own.delivered, own.prompt_tokens)


def test_both_summaries_are_the_same(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates parts of itself while it is imported
        from vllm.benchmarks.serve import calculate_metrics

    outputs = theirs(monkeypatch)
    given = {
        "input_requests": [None] * len(outputs), "outputs": outputs, "dur_s": DURATION, "tokenizer": None,
        "selected_percentiles": [99.0], "goodput_config_dict": GOODPUT,
    }  # fmt: skip
    metrics, lengths = calculate_metrics(**given)
    replayed = Replay(ours(monkeypatch), start=0.0, end=DURATION)
    log = with_slo(run_log(workload(), replayed), SLO(ttft=1.0, tbt=0.6, e2e=4.0))
    summary = summarize(log, mode="mean")  # what --goodput judges by
    assert log.num_delivered_tokens.tolist() == lengths
    assert summary["duration"] == DURATION
    for key in ("completed", "failed", "request_throughput", "output_throughput", "total_token_throughput"):
        assert summary[key] == getattr(metrics, key), key
    assert summary["request_goodput"] == metrics.request_goodput
    assert 0 < summary["attainment"] < 1
    assert summary["total_input_tokens"] == metrics.total_input
    assert summary["total_output_tokens"] == metrics.total_output
    for name in ("ttft", "tpot", "itl", "e2el"):
        for kind in ("mean", "median", "std"):
            expected = getattr(metrics, f"{kind}_{name}_ms")
            assert summary[f"{kind}_{name}_ms"] == pytest.approx(expected, rel=1e-12), f"{kind}_{name}_ms"
        ((_, expected),) = getattr(metrics, f"percentiles_{name}_ms")
        assert summary[f"p99_{name}_ms"] == pytest.approx(expected, rel=1e-12)
