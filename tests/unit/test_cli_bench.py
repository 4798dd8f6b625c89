"""`slacktide bench` on the command line, against a fake server."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time

import pytest

from slacktide.cli.main import main

from .fake_openai import FakeServer, serve_all

TRACE = "arrival_s,prompt_tokens,output_tokens\n0.0,4,2\n0.02,8,3\n0.04,12,4\n"


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return str(path)


def bench(capsys, server, *arguments):
    """(exit status, the JSON, standard error)."""
    status = main(["bench", "--url", server.url, "--json", "--quiet", *arguments])
    out, err = capsys.readouterr()
    return status, json.loads(out) if out else None, err


def test_a_run_has_vllm_benchs_keys_and_attainment(capsys, trace, tmp_path):
    with FakeServer() as server:
        options = ["--slo", "ttft:60000,tbt:60000", "--save-detailed", "--out", str(tmp_path / "o")]
        status, record, err = bench(capsys, server, "--trace", trace, *options)
    assert (status, err) == (0, "")
    assert record["summary"]["attainment"] == 1.0
    for key in (
        "date", "backend", "model_id", "num_prompts", "request_rate", "burstiness", "max_concurrency", "duration",
        "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput",
        "output_throughput", "total_token_throughput", "mean_ttft_ms", "median_ttft_ms", "std_ttft_ms", "p99_ttft_ms",
        "mean_tpot_ms", "median_tpot_ms", "std_tpot_ms", "p99_tpot_ms", "mean_itl_ms", "median_itl_ms", "std_itl_ms",
        "p99_itl_ms", "mean_e2el_ms", "median_e2el_ms", "std_e2el_ms", "p99_e2el_ms",
        "input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times", "errors",
    ):  # fmt: skip
        assert key in record
    assert record["model_id"] == record["label"] == "tiny"
    assert (record["input_lens"], record["output_lens"]) == ([4, 8, 12], [2, 3, 4])
    assert record["client"]["num_warmups"] == 1
    assert {len(x.body["prompt"]) for x in server.seen[1:]} == {4, 8, 12}
    assert sorted(path.name for path in (tmp_path / "o").iterdir()) == [
        "requests.parquet",
        "steps.parquet",
        "summary.json",
    ]
    assert main(["report", str(tmp_path / "o"), "--json"]) == 0
    (again,) = json.loads(capsys.readouterr().out)["runs"]
    assert again["summary"]["mean_ttft_ms"] == record["summary"]["mean_ttft_ms"]


def test_the_table_and_the_errors(capsys, trace):
    async def script(x):
        await (x.refuse(503, {"error": "full"}) if len(x.body["prompt"]) == 8 else serve_all(x))

    with FakeServer(script) as server:
        assert main(["bench", "--url", server.url, "--trace", trace, "--slo", "ttft:60000", "--label", "mine"]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("slacktide: replaying 3 requests of ")
    assert err.endswith(" over 0.0 s (50 requests/s)\n")
    assert "mine" in out
    assert "66.7" in out
    assert "1 x rejected: HTTP 503: full" in out


def test_lengths_are_scaled_and_prompts_that_do_not_fit_are_dealt_with(capsys, trace):
    models = {"data": [{"id": "tiny", "max_model_len": 13}]}
    with FakeServer(models=models) as server:
        status, _, err = bench(capsys, server, "--trace", trace)
        assert status == 2
        assert (
            "request 2 (in order of arrival) has 12 prompt + 4 output tokens, the model's context is 13 (1 such" in err
        )
        _, record, _ = bench(capsys, server, "--trace", trace, "--oversized", "drop", "--save-detailed")
        assert record["input_lens"] == [4, 8]
        assert "1 of 3 requests do not fit the model's context of 13 and were left out" in record["summary"]["notes"]
        _, record, _ = bench(capsys, server, "--trace", trace, "--length-scale", "0.5", "--save-detailed")
        assert (record["input_lens"], record["output_lens"]) == ([2, 4, 6], [1, 2, 2])
        status, record, _ = bench(capsys, server, "--trace", trace, "--oversized", "send")
        assert (status, record["completed"]) == (0, 3)


def test_a_server_that_dies_is_reported_and_no_success(capsys, trace):
    async def script(x):
        if len(x.server.seen) == 2:
            x.server.die_now()
        else:
            await serve_all(x)

    with FakeServer(script) as server:
        status, record, _ = bench(capsys, server, "--trace", trace, "--give-up", "0.001", "--slo", "ttft:60000")
    assert status == 1
    assert record["summary"]["attainment"] == 0.0
    assert record["client"]["server_gone_since"] is not None
    assert any("could not be reached" in note for note in record["summary"]["notes"])


def test_headers_key_and_body(capsys, trace, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with FakeServer() as server:
        status, record, _ = bench(
            capsys, server, "--trace", trace, "--header", "x-a=b=c", "--extra-body", '{"top_k": 5}',
            "--url", server.url + "/v1", "--backend", "openai-chat",
        )  # fmt: skip
    assert status == 0
    assert server.seen[0].headers["authorization"] == "Bearer secret"
    assert server.seen[0].headers["x-a"] == "b=c"
    assert server.seen[0].body["top_k"] == 5
    assert server.seen[0].path == "/v1/chat/completions"
    assert "secret" not in json.dumps(record)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--url", "localhost:8000"], "expected http://HOST:PORT"),
        (["--url", "http://"], "expected http://HOST:PORT"),
        (["--header", "x"], "--header 'x': expected KEY=VALUE"),
        (["--extra-body", "{"], "--extra-body: no JSON"),
        (["--extra-body", "[]"], "expected a JSON object"),
        (["--timeout", "0"], "expected a number above 0"),
        (["--slo", "ttft:5x"], "needs the isolated prefill time"),
        (["--model", "other"], "the server does not serve it; it serves tiny"),
        (["--num-prompts", "9"], "has only 3 requests"),
    ],
)
def test_mistakes_are_one_line(capsys, trace, arguments, part):
    with FakeServer() as server:
        assert main(["bench", "--url", server.url, "--trace", trace, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert part in err


def test_nobody_listens(capsys, trace):
    with FakeServer() as server:
        url = server.url
    assert main(["bench", "--url", url, "--trace", trace]) == 2
    assert "no server answers" in capsys.readouterr().err


def test_without_aiohttp_the_extra_is_named(capsys, trace, monkeypatch):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    assert main(["bench", "--trace", trace]) == 2
    assert "pip install aiohttp" in capsys.readouterr().err


def test_progress_and_interrupt_leave_a_report(trace, tmp_path):
    """Ctrl-C on the real command: exit status 130, and the JSON of what had happened."""

    async def script(x):
        await x.head()
        await x.chunk(1, 1)
        await asyncio.sleep(600)

    with FakeServer(script) as server:
        command = [sys.executable, "-m", "slacktide", "bench", "--url", server.url, "--trace", trace, "--json"]
        process = subprocess.Popen([*command, "--num-warmups", "0"], stdout=subprocess.PIPE, text=True)
        while len(server.seen) < 3:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert json.loads(out)["summary"]["end_reasons"]["cut_off"] == 3
