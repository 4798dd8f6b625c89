"""The page: its numbers are those of the files, nothing comes from elsewhere, and any text is only text."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slacktide.cli.main import main
from slacktide.errors import InputError
from slacktide.metrics.late import parts_of
from slacktide.report.answer import answer
from slacktide.report.files import read_run, run_record, write_json, write_run
from slacktide.report.html import page, write_html
from slacktide.report.source import Run, Source, read_source

from .looks import overloaded

VOID = {"meta", "link", "br", "hr", "img", "input", "line", "circle", "rect", "polygon", "polyline"}


class Page(HTMLParser):
    """Checks that tags match; keeps what the tests ask for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[tuple[dict[str, str], str]] = []
        self.ids: list[str] = []
        self.headings: list[str] = []
        self.addresses: list[str] = []
        self._current: dict[str, str] | None = None
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        if "id" in found:
            self.ids.append(found["id"])
        self.addresses += [found[name] for name in ("src", "href", "action", "data") if name in found]
        if "data-value" in found:
            self._current = found
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._current is not None:
            self.cells.append((self._current, data))
            self._current = None
        if self.open and self.open[-1] in ("h1", "h2"):
            self.headings.append(data)


def look(source: Source) -> Page:
    text = page(source)
    assert len(text) < 5e6
    found = Page(text)
    assert len(found.ids) == len(set(found.ids))
    assert all(address.startswith("#") for address in found.addresses)
    body = text.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|@import|url\(", body)
    return found


@pytest.fixture
def comparison(tmp_path: Path) -> Path:
    for name in ("vllm-v1", "sliding"):
        record, log, decisions = overloaded(name)
        write_run(tmp_path / name, record, log, decisions=decisions)
    write_json(tmp_path / "compare.json", {"runs": [overloaded(name)[0] for name in ("vllm-v1", "sliding")]})
    return tmp_path


def test_numbers_of_a_comparison_are_those_of_its_files(comparison: Path) -> None:
    found = look(read_source(comparison))
    summaries = {name: json.loads((comparison / name / "summary.json").read_text())["summary"]
                 for name in ("vllm-v1", "sliding")}  # fmt: skip
    seen = set()
    for cell, text in found.cells:
        if cell.get("data-run") not in summaries:
            continue
        name, _, part = cell["data-key"].partition(".")
        value = summaries[cell["data-run"]][name]
        value = value[part] if part else value
        assert float(cell["data-value"]) == value
        shown = re.sub(r"[<>,]", "", text)
        scaled = 100 * value if name in ("attainment", "preemption_tax", "step_mode_time_share") else value
        assert float(shown) == pytest.approx(scaled, abs=0.51 if "," in text or scaled >= 100 else 0.051)
        seen.add((cell["data-run"], cell["data-key"]))
    for key in ("attainment", "request_goodput", "p99_ttft_ms", "p99_itl_ms", "num_preemptions"):
        assert {("vllm-v1", key), ("sliding", key)} <= seen


def test_parts_of_the_latest_requests_add_up(comparison: Path) -> None:
    found = look(read_source(comparison / "vllm-v1"))
    _, log = read_run(comparison / "vllm-v1")
    parts: dict[int, dict[str, float]] = {}
    for cell, _ in found.cells:
        if "data-request" in cell:
            parts.setdefault(int(cell["data-request"]), {})[cell["data-part"]] = float(cell["data-value"])
    assert len(parts) == 10
    for request, seconds in parts.items():
        latency = seconds.pop("latency")
        assert sum(seconds.values()) == pytest.approx(latency, abs=1e-9)
        assert latency == pytest.approx(log.end_time[request] - log.arrival_time[request])
        whole = parts_of(log, request, overloaded()[2]).seconds
        assert seconds == {name: whole[name] for name in seconds}
        assert all(whole[name] == 0 for name in whole if name not in seconds)


def test_what_a_page_of_a_comparison_shows(comparison: Path) -> None:
    text = page(read_source(comparison))
    found = look(read_source(comparison))
    assert found.headings[0] == answer(read_source(comparison))
    assert found.headings[1:] == ["Who was served, and how fast", "How long users waited", "Over time",
                                  "What the engine did", "By class", "By tenant",
                                  "Settings, and the command to repeat it"]  # fmt: skip
    for words in ("slacktide simulate --policy x", "made for a test", "Slack at completion",
                  "KV blocks and preemptions", "SLO 200 ms", "SLO 20 ms"):  # fmt: skip
        assert words in text, words
    for part in ("ttft", "tbt", "violations", "system", "slack", "run0-tokens", "run0-modes", "run0-kv", "run1-queue"):
        assert part in found.ids
    assert page(read_source(comparison)) == text
    assert text.count('aria-pressed="true"') == 2
    assert text.count('role="img"') == text.count('<svg class="chart"')


def test_time_of_the_engine_never_exceeds_the_time_there_is(comparison: Path) -> None:
    text = page(read_source(comparison))
    for data in re.findall(r'data-for="run\d-modes">(.*?)</script>', text):
        total = np.sum([series["y"] for series in json.loads(data)["s"]], axis=0)
        assert (total <= 1 + 3e-5).all()  # printed with five digits
        assert total.max() > 0.99


def test_without_decisions_the_page_says_what_is_estimated(tmp_path: Path) -> None:
    record, log, decisions = overloaded()
    lost = log.num_preemptions > 0  # they alone shall be late
    log = dataclasses.replace(log, slo_ttft=np.where(lost, 1e-6, 9.0))
    source = Source("runs", [Run(record, log)])
    assert "preemption time is estimated" in page(source)
    assert "preemption time is estimated" not in page(Source("runs", [Run(record, log, decisions)]))


def test_any_text_is_only_text() -> None:
    record, log, _ = overloaded()
    evil = '</script><script>alert(1)</script>"><img src=x onerror=alert(2)>'
    source = Source("runs", [Run(record | {"label": evil, "notes": [evil], "command": evil, "trace": evil}, log)] * 2)
    found = look(source)
    assert found.addresses == ["#main"]
    assert page(source).count("<script") == page(Source("runs", [Run(record, log)] * 2)).count("<script")


@pytest.mark.parametrize("served", [0, 1, 2])
def test_tiny_runs(served: int) -> None:
    """No request, one, none served."""
    _, log, _ = overloaded()
    n = max(served, 1)
    columns: dict[str, Any] = {name: getattr(log, name)[:n] for name in
                               ("arrival_time", "num_prompt_tokens", "num_output_tokens", "slo_ttft")}  # fmt: skip
    none = {"token_offsets": np.zeros(n + 1, dtype=np.int64), "token_time": np.empty(0), "sim_duration": 1.0,
            "end_time": columns["arrival_time"], "end_reason": np.ones(n, dtype=np.int8)}  # fmt: skip
    tiny = type(log)(**columns, **none)
    look(Source("runs", [Run(run_record(tiny, policy="x"), tiny)]))
    if served == 2:
        times = columns["arrival_time"] + 0.01
        one = none | {"token_offsets": np.array([0, 1, 2]), "token_time": times, "end_time": times,
                      "end_reason": np.zeros(2, dtype=np.int8)}  # fmt: skip
        log = type(log)(**columns, **one)
        assert "Every request met its SLO." in page(Source("runs", [Run(run_record(log, policy="x"), log)]))


def test_a_record_without_its_run() -> None:
    record, _, _ = overloaded()
    found = look(Source("runs", [Run(record)]))
    assert "Over time" not in found.headings


def a_goodput() -> dict[str, Any]:
    def run(label: str, rate: float | None, low: float | None, high: float | None, **more: Any) -> dict[str, Any]:
        evaluations = [{"rate": r, "attainment": a, "stopped": a < 0.97, "wall_time": 0.1}
                       for r, a in ((2.0, 1.0), (4.0, 0.995), (6.0, 0.9))]  # fmt: skip
        return {"policy": label, "label": label, "oracle": False, "profile": "h100/llama-3-8b",
                "profile_label": "composed", "trace": "azure-conv", "num_prompts": 1000,
                "slo": "ttft:500,tbt:50", "target": 0.99, "rate": rate,
                "rate_low": low, "rate_high": high, "confidence": 0.95, "evaluations": evaluations, "notes": [],
                "seeds": []} | more  # fmt: skip

    return {"runs": [run("a", 4.1, 4.0, 4.3), run("b", 5.2, 5.1, 5.4), run("c", 9.0, 8.0, 10.0, oracle=True)],
            "command": "slacktide goodput --trace azure-conv"}  # fmt: skip


def written(tmp_path: Path, name: str, value: Any) -> Source:
    write_json(tmp_path / name, value)
    return read_source(tmp_path)


def test_a_goodput_search(tmp_path: Path) -> None:
    source = written(tmp_path, "goodput.json", a_goodput())
    assert source.kind == "goodput"
    found = look(source)
    assert found.headings[0] == (
        "At TTFT 500 ms and TBT 50 ms, b serves 5.20 req/s with 99.0 % in time on azure-conv, h100/llama-3-8b; a 4.10."
    )
    rates = {cell["data-run"]: float(cell["data-value"]) for cell, _ in found.cells if cell["data-key"] == "rate"}
    assert rates == {"a": 4.1, "b": 5.2, "c (oracle)": 9.0}
    assert "slacktide goodput --trace azure-conv" in page(source)
    near = a_goodput()
    near["runs"][0]["rate_high"] = 5.15
    assert "overlap" in answer(written(tmp_path, "goodput.json", near))
    free = a_goodput()
    free["runs"][1] |= {"rate": None, "rate_low": None, "rate_high": None}
    assert "at any rate" in look(written(tmp_path, "goodput.json", free)).headings[0]


def test_a_sweep(tmp_path: Path) -> None:
    runs = [
        {"policy": "a", "label": f"a rate={rate} seed={seed}", "policy_label": "a", "oracle": False, "error": None,
         "varied": {"rate": rate, "seed": seed}, "notes": [], "profile": "p", "trace": "t", "slo": "ttft:500",
         "summary": {"attainment": 1 / rate, "request_goodput": 3.0 + rate + seed / 10, "p99_ttft_ms": 10.0 * rate}}
        for rate in (1, 2, 4) for seed in (0, 1)
    ]  # fmt: skip
    runs.append(runs[0] | {"label": "broken", "error": "<no room>", "summary": {}})
    source = written(tmp_path, "sweep.json", {"runs": runs, "command": "slacktide sweep"})
    found = look(source)
    assert found.headings[0] == (
        "At TTFT 500 ms, the most requests are served by a rate=4: 7.05 req/s in time (25.0 % of all), the mean of 2 "
        "seeds, the best of 3 settings on t, p. 1 of 7 runs failed."
    )
    assert "1 of 7 runs failed" in found.headings[0]
    alike = [run | {"policy_label": "b", "label": run["label"].replace("a ", "b ")} for run in runs[:6]]
    tied = written(tmp_path, "sweep.json", {"runs": runs[:6] + alike, "command": "slacktide sweep"})
    assert "are served by a rate=4 and b rate=4: 7.05 req/s" in answer(tied)
    assert "Failed" in found.headings
    assert {"sweep-attainment", "sweep-request_goodput", "sweep-p99_ttft_ms"} <= set(found.ids)
    assert 'class="band' in page(source)


def an_advice() -> dict[str, Any]:
    modes = {"request_throughput": 3.0, "mean_ttft_ms": 100.0, "attainment": None}
    return {
        "recommendation": "exclusive", "decided_by": "throughput", "concurrency": 128, "theta0": 0.05, "k": 6,
        "n_safe": 700, "slots": 128, "token_budget": 8192, "n_cross": 73, "n_cross_interval": [20, None], "lead": 0.06,
        "lead_interval": [0.01, 0.1], "lead_simulated": 0.04, "chance_exclusive": 0.99, "fit_error": 0.01,
        "load": {"prompt": 500.0}, "profile": "rtx", "trace": "t", "simulated": {"mixed": modes, "exclusive": modes},
        "costs": {}, "costs_source": "x", "stock_vllm": {"command": "vllm serve MODEL"}, "notes": [],
        "curves": {"theta": [0.1, 0.5], "exclusive_over_theta": [3.0, 2.0], "mixed_at_concurrency": [2.5],
                   "concurrency": [4, 8], "exclusive": [1.0, 2.0], "mixed": [1.0, 1.5]},
    }  # fmt: skip


def test_an_advice(tmp_path: Path) -> None:
    found = look(written(tmp_path, "advise.json", an_advice()))
    assert found.headings[0].startswith("Use exclusive batching for rtx at 128 requests")
    text = page(read_source(tmp_path))
    assert found.headings[0].endswith(
        "(decided by throughput; chance that exclusive is faster by the closed forms 99.0 %)."
    )
    by_slo = an_advice() | {"decided_by": "attainment"}
    modes = by_slo["simulated"]
    by_slo["simulated"] = {
        mode: modes[mode] | {"attainment": met} for mode, met in (("mixed", 0.9), ("exclusive", 0.95))
    }
    assert "(decided by attainment, 95.0 against 90.0 %; chance" in answer(written(tmp_path, "advise.json", by_slo))
    for words in ("+6.0 % (95 %: +1.0 to +10.0 %)", "from 73 requests on (95 %: from 20 to never)", "memory-safe"):
        assert words in text, words
    assert {"concurrency", "theta"} <= set(found.ids)


def a_validation() -> dict[str, Any]:
    row = {"figure": "p50_ttft_ms", "measured": 100.0, "spread": 5.0, "simulated": 130.0, "error": 0.3, "bar": 0.1,
           "met": False}  # fmt: skip
    return {"rows": [row, row | {"figure": "request_throughput", "met": True}], "repeats": 3, "ok": False,
            "text": "far off", "simulated": {"p50_ttft_ms": 130.0}, "measured": [{"p50_ttft_ms": 100.0}],
            "notes": []}  # fmt: skip


def test_a_validation(tmp_path: Path) -> None:
    source = written(tmp_path, "validation.json", a_validation())
    assert look(source).headings[0] == "Simulated against measured, 1 of 2 figures miss their bar: far off."
    assert "MISSED" in page(source)
    calm = a_validation()
    calm["rows"][0] |= {"spread": 40.0, "met": True}
    source = written(tmp_path, "validation.json", calm)
    assert look(source).headings[0].startswith("Simulated against measured, no figure misses, but 2 of 2 only because")
    assert "within the spread" in page(source)
    calm["rows"] = [row | {"met": None} for row in calm["rows"]]
    assert "no figure could be judged" in answer(written(tmp_path, "validation.json", calm))
    calm["rows"] = [row | {"met": True, "error": 0.01} for row in calm["rows"]]
    assert "every judged figure is within its bar" in answer(written(tmp_path, "validation.json", calm))


@pytest.mark.parametrize(
    ("name", "value", "path"),
    [("goodput.json", a_goodput(), ("runs", 0, "rate")),
     ("goodput.json", a_goodput(), ("runs", 1, "evaluations", 0, "rate")),
     ("goodput.json", a_goodput(), ("runs", 0, "num_prompts")), ("advise.json", an_advice(), ("curves", "theta")),
     ("advise.json", an_advice(), ("simulated", "mixed")), ("advise.json", an_advice(), ("theta0",)),
     ("advise.json", an_advice(), ("lead_interval",)), ("advise.json", an_advice(), ("n_cross_interval", 0)),
     ("validation.json", a_validation(), ("rows", 0, "measured")), ("validation.json", a_validation(), ("text",))],
)  # fmt: skip
@pytest.mark.parametrize("bad", ["text", None, {}, [{}]])
def test_damaged_files_are_one_line(tmp_path: Path, name: str, value: Any, path: tuple[Any, ...], bad: Any) -> None:
    damaged = copy.deepcopy(value)
    at = damaged
    for key in path[:-1]:
        at = at[key]
    if bad is None and path[-1] in ("rate", "measured", 0):  # null is "unlimited", "not known" or "never"
        bad = [1]
    if path[-1] == "text" and bad == "text":
        bad = 3
    at[path[-1]] = bad
    write_json(tmp_path / name, damaged)
    if path[-1] == "rate" and bad == "text" and "evaluations" in path:
        page(read_source(tmp_path))  # "inf" stands for a rate that no axis shows
        return
    with pytest.raises(InputError, match=name) as refused:
        page(read_source(tmp_path))
    assert "\n" not in str(refused.value)


def test_the_command_line(comparison: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "page.html"
    assert main(["report", str(comparison), "--html", str(file)]) == 0
    assert f"wrote {file}" in capsys.readouterr().out
    assert file.read_text() == page(read_source(comparison))
    assert main(["report", str(comparison), "--html", str(file), "--slo", "ttft:1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"wrote": [str(file)]}
    assert "At TTFT 1 ms, " in file.read_text()
    write_json(tmp_path / "g" / "goodput.json", a_goodput())
    for arguments, message in [
        ([str(tmp_path / "none"), "--html", str(file)], "no such file"),
        ([str(comparison), "--html", str(comparison)], "found a directory"),
        ([str(tmp_path / "g"), "--html", str(file), "--slo", "ttft:1"], "leave out --slo"),
        ([str(tmp_path / "g"), "--timeline", str(file)], "holds no requests"),
    ]:
        assert main(["report", *arguments]) == 2
        err = capsys.readouterr().err
        assert message in err
        assert err.count("\n") == 1
    assert write_html(file, Source("runs", [Run(overloaded()[0])])) == len(file.read_bytes())
