"""The comparison figure: drawn without a display, the same bytes twice, one line where it cannot be drawn."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slacktide.errors import InputError
from slacktide.metrics.log import RunLog
from slacktide.report import figures
from slacktide.report.figures import compare_figure
from slacktide.report.files import Record, run_record


def served(n: int = 40, **changes: Any) -> RunLog:
    arrival = np.arange(n) * 0.25
    times = (arrival[:, None] + [0.5, 0.75, 1.0]).ravel()
    columns: dict[str, Any] = {
        "arrival_time": arrival,
        "num_prompt_tokens": np.full(n, 10),
        "num_output_tokens": np.full(n, 3),
        "slo_ttft": np.full(n, 0.5),
        "slo_tbt": np.full(n, 0.5),
        "end_time": arrival + 1.0,
        "end_reason": np.zeros(n, dtype=np.int8),
        "token_offsets": np.arange(n + 1) * 3,
        "token_time": times,
        "sim_duration": float(n / 4 + 1.0),
    }
    return RunLog(**(columns | changes))


def nobody_served() -> RunLog:
    n = 3
    return served(
        n,
        end_reason=np.ones(n, dtype=np.int8),
        token_offsets=np.zeros(n + 1, dtype=np.int64),
        token_time=np.empty(0),
        slo_ttft=np.full(n, np.inf),
        slo_tbt=np.full(n, np.inf),
    )


def run(log: RunLog, label: str, **more: Any) -> tuple[Record, RunLog]:
    return run_record(log, policy=label, profile="h100/llama-3-8b", profile_label="measured", **more), log


def test_a_figure_of_three_runs(tmp_path: Path) -> None:
    runs = [run(served(), "a"), run(nobody_served(), "b"), run(served(), "c", oracle=True)]
    for name in ("one.png", "two.png"):
        compare_figure(runs, tmp_path / name, dpi=50)
    data = (tmp_path / "one.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert data == (tmp_path / "two.png").read_bytes()
    assert len(list(tmp_path.iterdir())) == 2


def test_what_is_drawn() -> None:
    runs = [run(served(), "a"), run(served(), "b:x=1", oracle=True)]
    first, gap, met, busy = figures._draw(runs).axes
    assert first.lines[-1].get_xdata() == [500.0, 500.0]  # the SLO
    assert gap.lines[-1].get_xdata() == [500.0, 500.0]
    np.testing.assert_allclose(first.lines[0].get_xdata(), 500.0)
    assert {text.get_text() for text in met.texts} == {"a", "b:x=1 (oracle)", "100 %"}
    assert [bar.get_width() for bar in met.patches] == [100.0, 100.0]
    assert "SLO 500 ms" in [text.get_text() for text in first.texts]
    assert max(busy.lines[0].get_ydata()) == pytest.approx(4.0)  # 4 arrivals a second stay 1 s each


def test_unserved_requests_lower_the_curve() -> None:
    half = served(2, token_offsets=[0, 3, 3], token_time=[0.5, 0.75, 1.0], end_reason=np.array([0, 1], dtype=np.int8))
    first = figures._draw([run(half, "a")]).axes[0]
    assert first.lines[0].get_ydata()[-1] == 0.5


def test_no_line_where_targets_differ() -> None:
    first = figures._draw([run(served(2, slo_ttft=np.array([0.5, 1.0])), "a")]).axes[0]
    assert [text.get_text() for text in first.texts] == []


def test_titles() -> None:
    logs = [served(n) for n in (2, 3, 4)]
    assert figures._title([run(logs[0], "a"), run(logs[0], "b")]) == "h100/llama-3-8b [measured], 2 requests"
    assert figures._title([run(log, "a") for log in logs]) == "3 runs"


def test_a_run_of_no_length_is_left_out_of_the_time_panel() -> None:
    log = nobody_served()
    still = dataclasses.replace(log, arrival_time=np.zeros(3), end_time=np.zeros(3), sim_duration=0.0)
    assert len(figures._draw([run(still, "a")]).axes[3].lines) == 1  # the legend's handle alone


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    record, log = run(served(2), "a")
    with pytest.raises(InputError, match="no run with per-request figures"):
        compare_figure([(record, None)], tmp_path / "x.png")
    with pytest.raises(InputError, match="17 runs: at most 16"):
        compare_figure([(record, log)] * 17, tmp_path / "x.png")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write .*x\.png"):
        compare_figure([(record, log)], tmp_path / "file" / "x.png", dpi=20)


def test_without_matplotlib_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("matplotlib")] + ["matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=r"figures need matplotlib .*pip install matplotlib"):
        compare_figure([run(served(2), "a")], tmp_path / "x.png")
