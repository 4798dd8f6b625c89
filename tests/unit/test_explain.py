"""The life of a request in text: it names its waits, its chunks, its reasons, and ends in figures that add up."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from slacktide.cli.main import main
from slacktide.errors import InputError
from slacktide.metrics.late import lateness, parts_of
from slacktide.report import explain as module
from slacktide.report.explain import explain
from slacktide.report.files import write_run

from .looks import overloaded


def test_a_life_with_everything_in_it() -> None:
    _, log, decisions = overloaded("sliding")
    request = int(np.argmax(log.num_preemptions))
    text = explain(log, request, "sliding", decisions)
    assert text.startswith(f"request {request} of 60 under sliding\n")
    for words in ("class ", "tenant ", "target: ttft 200 ms, tbt 20 ms", "waits in the queue", "prefill, ", "why: {",
                  "preempted, waits", "slack ", "finished after"):  # fmt: skip
        assert words in text, words
    parts = parts_of(log, request, decisions)
    assert all(name in text for name, value in parts.seconds.items() if value > 1e-9)


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_every_request_can_be_explained(recorded: bool, depth: int) -> None:
    _, log, decisions = overloaded(depth=depth)
    late = lateness(log)
    for request in range(log.n):
        text = explain(log, request, "x", decisions if recorded else None)
        assert not re.search(r"\bnan\b|\binf\b|Traceback", text)
        assert ("late:" in text) == bool(late.late[request] > 1e-9)
        if not recorded and log.num_preemptions[request]:
            assert "estimated" in text


def test_a_rejected_request() -> None:
    _, log, decisions = overloaded()
    assert "rejected after" in explain(log, 5, "x", decisions)


def test_long_lives_are_cut_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    _, log, decisions = overloaded("sliding")
    request = int(np.argmax(log.num_preemptions))
    whole = explain(log, request, "x", decisions)
    monkeypatch.setattr(module, "MAX_LINES", 4)
    cut = explain(log, request, "x", decisions)
    assert "lines left out" in cut
    assert len(cut.splitlines()) < len(whole.splitlines())
    assert cut.splitlines()[-1] == whole.splitlines()[-1]


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record, log, decisions = overloaded()
    write_run(tmp_path, record, log, decisions=decisions)
    assert main(["report", str(tmp_path), "--explain", "3"]) == 0
    assert capsys.readouterr().out == explain(log, 3, "vllm-v1", decisions)
    assert main(["report", str(tmp_path), "--explain", "60"]) == 2
    assert "expected a request from 0 to 59" in capsys.readouterr().err
    with pytest.raises(InputError):
        explain(log, -1, "x")


SMALL = ["--trace", "synthetic:prompt=64,output=8", "--num-prompts", "20", "--profile", "h100/llama-3-8b",
         "--rate", "5", "--slo", "ttft:500,tbt:50"]  # fmt: skip


def test_simulate_and_compare_take_the_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, trace = tmp_path / "p.html", tmp_path / "t.json"
    out = ["--out", str(tmp_path / "run"), "--html", str(page), "--timeline", str(trace), "--explain", "2", "--quiet"]
    assert main(["simulate", *SMALL, "--policy", "sliding", *out]) == 0
    told = capsys.readouterr().out
    assert "request 2 of 20 under sliding" in told
    assert "why: {" in told
    assert f"wrote {page}" in told
    assert (tmp_path / "run" / "decisions.parquet").is_file()
    command = "slacktide simulate " + " ".join(SMALL) + " --policy sliding"
    assert f'"command": "{command}"' in (tmp_path / "run" / "summary.json").read_text()
    assert command in page.read_text()
    assert (
        main(["compare", *SMALL, "--policy", "vllm-v1,sliding", "--explain", "1", "--run", "sliding", "--quiet"]) == 0
    )
    assert "request 1 of 20 under sliding" in capsys.readouterr().out
    assert main(["simulate", *SMALL, "--policy", "vllm-v1", "--explain", "20", "--quiet"]) == 2


def test_explain_ends_with_what_tide_learned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "two.csv"
    rows = [f"{0.05 * i},{100 + i},20,{'ab'[i % 2]}" for i in range(40)]
    trace.write_text("arrival_s,prompt_tokens,output_tokens,tenant\n" + "\n".join(rows) + "\n")
    told = ["simulate", "--trace", str(trace), "--profile", "h100/llama-3-8b", "--policy", "tide:tenant_weights=a:2",
            "--slo", "ttft:500,tbt:50", "--explain", "3", "--out", str(tmp_path / "run")]  # fmt: skip
    assert main(told) == 0
    text = capsys.readouterr().out
    for words in ("what it learned", "output tokens", "20 on average", "500 ms", "tenant a", "weight 2", "tenant b"):
        assert words in text, words
    assert main(["report", str(tmp_path / "run"), "--explain", "3"]) == 0
    assert "weight 2" in capsys.readouterr().out  # the record keeps it
