"""The replay: who is sent what and when, and what becomes of it in the log."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import os
import signal

import numpy as np
import pytest

from slacktide.errors import InputError
from slacktide.loadgen.client import Outcome
from slacktide.loadgen.prompts import Prompts, as_text
from slacktide.loadgen.record import client_arrays, client_figures, run_log
from slacktide.loadgen.replay import Limits, Replay, Target, replay, targets_of
from slacktide.metrics.log import ABORTED, CUT_OFF, FAILED, FINISHED, REJECTED
from slacktide.metrics.summary import summarize
from slacktide.workload.requests import ClosedLoop, Workload

from .fake_openai import FakeServer, serve_all


def workload(arrivals, prompts=None, outputs=None, **columns) -> Workload:
    n = len(arrivals)
    columns = {name: np.array(c) if isinstance(c, list) else c for name, c in columns.items()}
    return Workload(
        arrival_time=np.array(arrivals, dtype=float),
        num_prompt_tokens=np.array(prompts or [5] * n),
        num_output_tokens=np.array(outputs or [3] * n),
        **columns,
    )


def run(work, script=serve_all, *, limits=None, target=None, **more) -> tuple[Replay, list]:
    with FakeServer(script) as server:
        result = replay(work, dataclasses.replace(target or Target(""), url=server.url), limits, **more)
    return result, server.seen


# ---- prompts ---------------------------------------------------------------------------------------------------------


def test_prompts_have_their_lengths_and_repeat_with_the_seed():
    work = workload([0, 0, 0], prompts=[1, 7, 100])
    ids = [Prompts(work, 3).token_ids(row) for row in range(3)]
    assert [len(i) for i in ids] == [1, 7, 100]
    assert ids == [Prompts(work, 3).token_ids(row) for row in range(3)]
    assert ids != [Prompts(work, 4).token_ids(row) for row in range(3)]
    assert all(1000 <= i < 30_000 for one in ids for i in one)
    assert all(5 <= i < 10 for i in Prompts(work, 0, vocabulary=10).token_ids(2))  # a small vocabulary: its upper half
    with pytest.raises(InputError, match="--vocab-size"):
        Prompts(work, 0, vocabulary=3)


def test_equal_hashes_are_equal_tokens_and_nothing_else_is():
    blocks = (np.array([7, 8, 7, 9, 7]), np.array([0, 2, 4, 5, 5]))
    work = workload([0] * 4, prompts=[10, 11, 3, 8], hash_ids=blocks, hash_block_size=4)
    ids = [Prompts(work, 0).token_ids(row) for row in range(4)]
    assert [len(i) for i in ids] == [10, 11, 3, 8]
    assert ids[0][:4] == ids[1][:4]
    assert ids[2] == ids[0][:3]  # a block that the prompt cuts
    assert ids[0][4:] != ids[1][4:10]
    assert Prompts(work, 0).warmup(0, 0)[:4] != ids[0][:4]


def test_texts_for_chat_have_a_word_for_each_token():
    assert as_text([1234, 7, 29_999]) == "234 7 999"


# ---- what is sent ----------------------------------------------------------------------------------------------------


def test_requests_say_what_the_trace_says():
    work = workload(
        [0.0, 0.01], prompts=[4, 6], outputs=[2, 3], slo_ttft=[0.5, math.inf], slo_tbt=[0.05, math.inf],
        slo_class=[1, 0], slo_classes=("default", "chat"), tenant=[0, 1], tenants=("a", "b"), priority=[0, 3],
    )  # fmt: skip
    target = Target("", headers={"authorization": "Bearer k"}, extra_body={"top_p": 0.5})
    result, seen = run(work, target=target, num_warmups=2)
    assert result.model == "tiny"
    assert result.max_model_len == 4096
    assert [x.path for x in seen] == ["/v1/completions"] * 4
    assert {x.headers["authorization"] for x in seen} == {"Bearer k"}
    first, second = (x.body for x in sorted(seen[2:], key=lambda x: len(x.body["prompt"])))
    assert first["prompt"] == Prompts(work, 0).token_ids(0)
    assert first["vllm_xargs"] == {"slo_ttft_ms": 500.0, "slo_tbt_ms": 50.0, "slo_class": "chat", "tenant": "a"}
    assert second["vllm_xargs"] == {"slo_class": "default", "tenant": "b"}
    assert (first.get("priority"), second["priority"]) == (None, 3)
    for body, tokens in ((first, 2), (second, 3)):
        assert (body["max_tokens"], body["ignore_eos"], body["stream"], body["top_p"]) == (tokens, True, True, 0.5)
        assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    warm = [x.body["prompt"] for x in seen[:2]]
    assert [len(p) for p in warm] == [4, 6]
    assert all(p[0] != q[0] for p in warm for q in (first["prompt"], second["prompt"]))


def test_targets_can_be_kept_to_ourselves_and_chat_has_messages():
    work = workload([0.0], slo_ttft=[0.5])
    _, seen = run(work, target=Target("", chat=True, send_slo=False), num_warmups=0)
    (x,) = seen
    assert x.path == "/v1/chat/completions"
    assert len(x.body["messages"][0]["content"].split()) == 5
    assert "prompt" not in x.body
    assert "vllm_xargs" not in x.body
    assert targets_of(work, 0) == {"slo_ttft_ms": 500.0}


def test_requests_leave_when_they_are_due_not_when_the_server_is_free():
    """All five arrive at a server that answers none before it has them all: a closed loop would wait for ever."""
    work = workload([0.0, 0.02, 0.04, 0.05, 0.3])

    async def script(x):
        while len(x.server.seen) < 5:
            await asyncio.sleep(0.005)
        await serve_all(x)

    result, _ = run(work, script, num_warmups=0)
    assert [o.reason for o in result.outcomes] == [FINISHED] * 5
    for o, arrival in zip(result.outcomes, work.arrival_time, strict=True):
        assert o.due == result.start + arrival
        assert o.due <= o.woken <= o.sent <= o.token_times[0] <= o.end


def test_waiting_for_a_free_place_counts_as_latency():
    work = workload([0.0, 0.0, 0.0])

    async def script(x):
        await asyncio.sleep(0.05)
        assert sum(not e.writer.is_closing() for e in x.server.seen) == 1  # one at a time
        await serve_all(x)

    result, _ = run(work, script, limits=Limits(max_concurrency=1), num_warmups=0)
    log = run_log(work, result)
    assert log.finished.all()
    queued = np.array(client_arrays(result)["queue_times"])
    assert sorted(queued)[1] >= 0.05
    assert sorted(queued)[2] >= 0.1
    first = log.first_token_time - log.arrival_time
    assert (first >= queued).all()
    assert client_figures(result)["max_client_queue_ms"] >= 100


def test_a_closed_loop_sends_when_its_users_are_ready():
    work = workload([0.0] * 6, closed=ClosedLoop(concurrency=2, think_time=0.01))
    active = [0, 0]

    async def script(x):
        active[0] += 1
        active[1] = max(active)
        await asyncio.sleep(0.02)
        await serve_all(x)
        active[0] -= 1

    result, _ = run(work, script, num_warmups=0)
    log = run_log(work, result)
    assert active == [0, 2]
    assert log.finished.all()
    assert (np.sort(log.arrival_time)[2:] >= 0.03).all()  # an answer and a thought after the first


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_refusals_and_failures_have_their_reasons():
    async def script(x):
        match len(x.body["prompt"]):
            case 1:
                await x.refuse(503, {"error": {"message": "full"}}, ["retry-after: 3"])
            case 2:
                await x.refuse(400, {"error": {"message": "bad"}})
            case 3:
                await x.head()
                await x.chunk(1, 1)
            case _:
                await serve_all(x)

    work = workload([0.0] * 4, prompts=[1, 2, 3, 4], slo_ttft=[10.0] * 4)
    result, _ = run(work, script, num_warmups=0)
    log = run_log(work, result)
    assert log.end_reason.tolist() == [REJECTED, FAILED, FAILED, FINISHED]
    summary = summarize(log)
    assert (summary["completed"], summary["failed"], summary["attainment"]) == (1, 3, 0.25)
    assert client_arrays(result)["errors"] == [
        "rejected: HTTP 503, retry after 3 s: full",
        "failed: HTTP 400: bad",
        "failed: the stream breaks off after 1 tokens",
        "",
    ]
    assert client_figures(result)["errors"]["failed: the stream breaks off"] == 1


def test_a_server_that_dies_ends_the_run_with_a_clear_report():
    async def script(x):
        await x.head()
        await x.chunk(1, 1)
        if len(x.server.seen) == 3:
            x.server.die_now()
        await asyncio.sleep(600)

    work = workload([0.0, 0.0, 0.05, 0.2, 0.3, 0.6, 60.0, 61.0], slo_ttft=[9.0] * 8)
    result, _ = run(work, script, limits=Limits(give_up=0.2), num_warmups=0)
    log = run_log(work, result)
    assert log.n == 8  # those never sent would have failed: they count
    assert (log.end_reason == FAILED).all()
    assert summarize(log)["attainment"] == 0.0
    assert log.sim_duration < 60
    (note,) = log.notes
    assert note.startswith("the server could not be reached from ")
    assert note.endswith("2 of 8 requests were not sent and count as failed")
    assert client_figures(result)["errors"]["failed: not sent: the server is gone"] == 2


def test_a_server_that_comes_back_is_no_end():
    async def script(x):
        if len(x.server.seen) > 1:
            await serve_all(x)
            return
        x.server.die_now()
        while x.server.loop.time() < x.time + 0.3:
            await asyncio.sleep(0.01)
        await x.server.listen(x.server.port)

    work = workload([0.0, 0.15, 1.5, 1.5])
    result, _ = run(work, script, limits=Limits(give_up=60.0), num_warmups=0)
    assert result.gone_since is None
    assert [o.reason for o in result.outcomes] == [FAILED, FAILED, FINISHED, FINISHED]
    assert result.outcomes[1].unreachable


def test_the_end_of_the_run_cuts_off_and_leaves_out():
    async def script(x):
        if len(x.body["prompt"]) == 1:
            await serve_all(x)
        else:
            await x.head()
            await x.chunk(1, 1)
            await asyncio.sleep(600)

    work = workload([0.0, 0.0, 60.0, 61.0], prompts=[1, 2, 3, 4], slo_ttft=[9.0] * 4)
    result, _ = run(work, script, limits=Limits(max_duration=0.5), num_warmups=0)
    log = run_log(work, result)
    assert log.end_reason.tolist() == [FINISHED, CUT_OFF]
    assert "2 of 4 requests were not due when the run ended, and are left out" in log.notes
    summary = summarize(log)
    assert (summary["attainment"], summary["excluded"]) == (1.0, 1)
    assert log.sim_duration >= 0.5


def test_an_interrupt_ends_the_run_and_reports_it():
    async def script(x):
        await x.head()
        await x.chunk(1, 1)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(600)

    work = workload([0.0, 60.0])
    result, _ = run(work, script, num_warmups=0)
    log = run_log(work, result)
    assert result.interrupted
    assert log.end_reason.tolist() == [CUT_OFF]
    assert "interrupted: judged by what had happened until then" in log.notes
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_impatient_clients_leave():
    async def script(x):
        await x.head()
        await x.chunk(1, 1)
        await asyncio.sleep(600)

    work = workload([0.0], abort_time=[0.2])
    result, _ = run(work, script, num_warmups=0)
    log = run_log(work, result)
    assert log.end_reason.tolist() == [ABORTED]
    assert log.abort_time[0] == 0.2
    assert log.end_time[0] >= 0.2


@pytest.mark.parametrize(
    ("models", "target", "part"),
    [
        ({"data": [{"id": "a"}, {"id": "b"}]}, Target("", model="c"), "--model c: .* not serve it; it serves a, b"),
        ({"data": []}, Target(""), "no list of models"),
        ({"data": [1]}, Target(""), "no list of models"),
        ([], Target(""), "no list of models"),
        (404, Target(""), "HTTP 404"),
    ],
)  # fmt: skip
def test_a_server_that_cannot_serve_is_found_before_the_run(models, target, part):
    with FakeServer(models=models) as server, pytest.raises(InputError, match=part):
        replay(workload([0.0]), dataclasses.replace(target, url=server.url))


def test_a_refused_warm_up_stops_before_the_run():
    def refuse(x):
        return x.refuse(400, {"error": {"message": "Token id 29999 is out of vocabulary"}})

    with FakeServer(refuse) as server, pytest.raises(InputError, match="out of vocabulary; a smaller --vocab-size"):
        replay(workload([0.0]), Target(server.url))


def test_a_url_with_v1_is_the_same_server():
    assert (
        Target("http://a:1/v1/").path("/v1/models") == Target("http://a:1").path("/v1/models") == "http://a:1/v1/models"
    )


# ---- from outcomes to metrics, to the bit ----------------------------------------------------------------------------


def finished(due, times, **more) -> Outcome:
    more = {"delivered": len(times)} | more
    return Outcome(due=due, woken=due, sent=due, token_times=times, end=times[-1], reason=FINISHED, **more)


def test_every_metric_from_scripted_times():
    """Two served requests, one of them with two tokens in one chunk; one rejected; the clock started at 100."""
    work = workload([0.0, 1.0, 2.0], prompts=[10, 20, 30], outputs=[3, 4, 5], slo_ttft=[1.0] * 3, slo_tbt=[0.5] * 3)
    outcomes = [
        finished(100.0, [100.5, 101.0, 102.5], prompt_tokens=10),
        finished(101.0, [101.25, 101.5, 101.5, 102.0], prompt_tokens=21),  # a chat template added one
        Outcome(due=102.0, woken=102.0, sent=102.0, end=102.125, reason=REJECTED, error="HTTP 503"),
    ]
    log = run_log(work, Replay(outcomes, start=100.0, end=103.0))
    summary = summarize(log)
    assert log.num_prompt_tokens.tolist() == [10, 21, 30]
    assert log.sim_duration == 2.5  # to the last answer
    assert (summary["completed"], summary["failed"]) == (2, 1)
    assert (summary["total_input_tokens"], summary["total_output_tokens"]) == (31, 7)
    assert summary["request_throughput"] == 2 / 2.5
    assert summary["output_throughput"] == 7 / 2.5
    assert summary["mean_ttft_ms"] == (500 + 250) / 2
    assert summary["mean_tpot_ms"] == pytest.approx((2000 / 2 + 750 / 3) / 2)
    assert summary["mean_e2el_ms"] == (2500 + 1000) / 2
    assert summary["mean_itl_ms"] == pytest.approx((500 + 1500 + 250 + 0 + 500) / 5)
    assert summary["max_gap_ms"] == 1500
    # deadlines of the first: 1.0, 1.5, 2.0 s after its arrival; its third token comes after 2.5 s
    assert summary["attainment"] == 1 / 3
    assert summary["violations"] == {"ttft": 0, "tbt": 1, "e2e": 0, "unserved": 1}
    assert summary["request_goodput"] == 1 / 2.5


def test_latency_counts_from_the_intended_send_time():
    late = dataclasses.replace(finished(10.0, [13.0]), woken=11.5, sent=12.0)
    log = run_log(workload([0.0], outputs=[1]), Replay([late], start=10.0, end=13.0))
    assert summarize(log)["mean_ttft_ms"] == 3000
    assert any("1500 ms late in sending" in note for note in log.notes)
    figures = client_figures(Replay([late], start=10.0, end=13.0))
    assert (figures["max_send_lag_ms"], figures["max_client_queue_ms"]) == (1500, 500)
    assert client_arrays(Replay([late], start=10.0, end=13.0))["queue_times"] == [2.0]


def test_answers_in_chunks_and_short_ones_are_told():
    chunky = finished(0.0, [1.0, 2.0], by_chunk=True, delivered=5)
    short = finished(0.0, [1.0])
    log = run_log(workload([0.0, 0.0], outputs=[5, 5]), Replay([chunky, short], start=0.0, end=2.0))
    summary = summarize(log)
    assert summary["total_output_tokens"] == 6
    assert summary["mean_tpot_ms"] == 250  # of 5 tokens over a second, though they came in two chunks
    assert any(note.startswith("1 of 2 answers came without token counts") for note in log.notes)
    assert any(note.startswith("1 of 2 answers ended before their length") for note in log.notes)


def test_a_detailed_record_is_read_back_as_the_same_run():
    from slacktide.metrics.bench import bench_run
    from slacktide.report.files import detailed_arrays

    work = workload([0.0, 0.5])
    result, _ = run(work, num_warmups=0)
    log = run_log(work, result)
    record = {"duration": log.sim_duration} | detailed_arrays(log) | client_arrays(result)
    again, summary = bench_run(json.loads(json.dumps(record)))
    for key in ("completed", "mean_ttft_ms", "mean_itl_ms", "p99_e2el_ms", "total_output_tokens", "request_throughput"):
        assert summary[key] == pytest.approx(summarize(log)[key], rel=1e-9)
    assert again.n == 2
