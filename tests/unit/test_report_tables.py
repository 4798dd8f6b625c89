"""Comparison tables: nothing is cut off at any width, the best is marked, oracles are not."""

from __future__ import annotations

import io
from typing import Any

import pytest

from slacktide.report.tables import comparison_text, markdown, number, percent, print_comparison

SUMMARY: dict[str, Any] = {
    "attainment": 0.9, "request_goodput": 7.25, "p50_ttft_ms": 36000.0, "p90_ttft_ms": 52000.0, "p99_ttft_ms": 55000.0,
    "p50_itl_ms": 18.5, "p99_itl_ms": 366.0, "max_gap_ms": 37000.0, "p50_tpot_ms": 23.1, "request_throughput": 8.0,
    "output_throughput": 12345.6, "failed": 0, "num_preemptions": 12345, "preemption_tax": 0.094,
    "step_mode_time_share": {"decode": 0.25, "prefill": 0.25, "mixed": 0.5}, "sim_duration": 3612.7, "wall_time": 12.3,
    "slo_mode": "deadline", "tolerated_late_share": 0.0, "excluded": 0, "notes": ["two rows left out"],
}  # fmt: skip


def record(label: str, oracle: bool = False, **changes: Any) -> dict[str, Any]:
    return {
        "policy": label.partition(":")[0], "label": label, "oracle": oracle, "profile": "2x-rtx-pro-6000/qwen3-8b",
        "profile_label": "prior", "summary": SUMMARY | changes,
    }  # fmt: skip


RUNS = [
    record("vllm-v1"),
    record("sliding:window=3,chunker=greedy", attainment=0.9996, p50_ttft_ms=250.4, num_preemptions=7),
    record("oracle-srpt", oracle=True, attainment=1.0, p50_ttft_ms=1.0),
]


@pytest.mark.parametrize("width", [100, 80, 60, 160])
def test_every_number_is_there_and_fits(width: int) -> None:
    text = comparison_text(RUNS, width)
    assert max(map(len, text.splitlines())) <= width
    assert text.count("Served") == (1 if width >= 100 else 2)  # narrower: the columns go into one more table
    for value in ("90.0", ">99.9*", "7.25", "36,000", "55,000", "366", "12,346", "12,345", "9.4", "3,613", "12.3"):
        assert value in text, value
    assert "\x1b" not in text


def test_head_and_foot() -> None:
    text = comparison_text(RUNS)
    assert "profile: 2x-rtx-pro-6000/qwen3-8b [prior]" in text
    assert "SLO: mode deadline; a share of all arrivals" in text
    assert "oracle-srpt (oracle)" in text
    assert "never marked best" in text
    assert text.count("two rows left out") == 1  # said once, not per run
    assert "greedy" in text  # a long label is folded, not cut


def test_best_is_marked_among_what_can_be_deployed() -> None:
    text = comparison_text(RUNS)
    assert "250*" in text
    assert "7*" in text
    assert "1.00*" not in text
    assert "100*" not in text
    assert "12,346*" not in text  # all tie
    alone = comparison_text(RUNS[:1])
    assert "*" not in alone


def test_what_cannot_be_seen_is_a_tie() -> None:
    text = comparison_text([record("a", p50_itl_ms=18.51), record("b", p50_itl_ms=18.49)])
    assert "*" not in text


def test_gaps_in_the_records() -> None:
    bench = {"label": "server", "summary": {"mean_ttft_ms": 5.0, "p50_ttft_ms": 4.0, "p99_ttft_ms": 9.0}}
    text = comparison_text([bench])
    assert "4.00" in text
    assert "preemp" not in text  # a column nobody has a value for
    assert "Engine" not in text
    both = comparison_text([bench, RUNS[0]])
    assert " - " in both
    narrow = comparison_text([{"label": "x", "summary": {"failed": 3}}])
    assert "steps of this kind, % of busy time)" in narrow  # the title of a narrow table is whole
    judged = comparison_text([record("a", attainment=None)])
    assert "SLO: none to judge by" in judged
    assert "1 % of later tokens may be late" in comparison_text([record("a", tolerated_late_share=0.01)])


def test_notes_of_one_run_name_it() -> None:
    text = comparison_text([record("a", excluded=3), record("b", notes=[])])
    assert "a: two rows left out" in text
    assert "a: 3 requests open at the end" in text


def test_markdown() -> None:
    text = markdown([*RUNS, record("pipe|line")])
    lines = text.splitlines()
    assert lines[3] == "**Served (times in ms)**"
    assert lines[5].startswith("| policy | SLO met % | good req/s | TTFT p50 | TTFT p90 | TTFT p99 | TBT p50 |")
    assert lines[8].startswith("| sliding:window=3,chunker=greedy | **>99.9** | 7.25 | **250** |")
    assert "| preemptions |" in text
    assert "| pipe\\|line |" in text
    assert {line.count("|") for line in lines[5:11]} == {11, 12}  # the escaped one counts its own
    assert markdown([{"label": "x", "summary": {}}]).strip() == ""


def test_terminal_and_pipe() -> None:
    out = io.StringIO()
    print_comparison(RUNS, out)
    assert out.getvalue() == comparison_text(RUNS)


def test_terminal_is_coloured_not_starred(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    print_comparison(RUNS, out)
    assert "\x1b[1;32m" in out.getvalue()
    assert "250*" not in out.getvalue()


def test_numbers() -> None:
    assert [number(v) for v in (0.5, 7.321, 73.21, 732.1, 7321.0)] == ["0.50", "7.32", "73.2", "732", "7,321"]
    assert [percent(v) for v in (0, 0.0001, 0.25, 0.9999, 1)] == ["0.0", "<0.1", "25.0", ">99.9", "100"]


def test_a_long_name_is_broken_between_its_parts():
    text = comparison_text([record("a"), record("sarathi:chunk_size=2048,max_num_seqs=1024")], 80)
    lines = [line.strip() for line in text.splitlines()]
    assert any(line.startswith("chunk_size=2048,") for line in lines)
    assert not any(line.startswith(("048", "48", "8 ")) for line in lines)
