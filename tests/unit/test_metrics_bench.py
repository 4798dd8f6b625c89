"""Detailed vllm bench results: failures told apart, broken files refused by one line that says where."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from slacktide.core.types import SLO
from slacktide.errors import InputError
from slacktide.metrics.bench import bench_log, bench_summary, read_json
from slacktide.metrics.log import END_REASONS

# Seven requests in 4 s. Rows 2 and 5 have an error; row 6 has none but returned nothing, and `completed` counts it
# (as in https://github.com/gpustack/gpustack/issues/1677 and https://github.com/tenstorrent/vllm/issues/354).
RESULT: dict[str, Any] = {
    "duration": 4.0,
    "completed": 5,
    "input_lens": [500, 800, 700, 300, 900, 400, 600],
    "output_lens": [11, 21, 0, 1, 11, 0, 0],
    "ttfts": [0.15, 0.48, 0.0, 0.09, 0.7, 0.0, 0.0],
    "itls": [[0.02] * 10, [0.03] * 20, [], [], [0.02] * 10, [], []],
    "latencies": [0.35, 1.08, 0.0, 0.09, 0.9, 0.0, 0.0],
    "start_times": [100.0, 100.5, 101.0, 101.5, 102.0, 102.5, 103.0],
    "errors": ["", "", "503 Service Unavailable", "", "", "Server disconnected", ""],
}
CHAT = SLO(0.5, 0.05)


def result(**changes: Any) -> dict[str, Any]:
    changed = copy.deepcopy(RESULT) | changes
    return {key: value for key, value in changed.items() if value is not None}


def test_failures_are_listed_apart() -> None:
    s = bench_summary(result(), CHAT)
    assert (s["completed"], s["failed"], s["failed_with_error"], s["failed_empty"]) == (4, 3, 2, 1)
    assert s["completed_in_file"] == 5
    assert s["attainment"] == 3 / 7
    assert s["request_goodput"] == 0.75
    assert s["mean_ttft_ms"] == pytest.approx(355)
    assert s["median_ttft_ms"] == pytest.approx(315)
    assert s["mean_tpot_ms"] == pytest.approx(70 / 3)
    assert s["violations"] == {"ttft": 1, "tbt": 0, "e2e": 0, "unserved": 3}
    assert s["notes"] == [
        "answers with neither an error nor any output: 1, counted as failed",
        "the file's own `completed` is 5; by our count 4 were served",
    ]


def test_a_file_gives_the_same(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(RESULT))
    assert bench_summary(path, CHAT) == bench_summary(result(), CHAT)
    log = bench_log(str(path))
    assert log.arrival_time.tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    assert log.request_times(3).tolist() == [1.59]
    assert math.isinf(log.slo_ttft[0])


def test_a_client_knows_nothing_of_the_scheduler() -> None:
    s = bench_summary(result())
    for key in ("num_steps", "num_preemptions", "recomputed_tokens", "scheduled_tokens", "cached_tokens"):
        assert s[key] is None, key


def test_without_an_slo_attainment_is_unknown() -> None:
    s = bench_summary(result())
    assert s["attainment"] is None
    assert s["request_goodput"] is None


def test_our_own_error_texts_keep_their_reason() -> None:
    errors = ["", "", "rejected: queue full", "", "", "expired", "cut_off"]
    log = bench_log(result(errors=errors), CHAT)
    assert [END_REASONS[i] for i in log.end_reason] == [
        "finished", "finished", "rejected", "finished", "finished", "expired", "cut_off",
    ]  # fmt: skip
    assert math.isnan(log.end_time[6])


def test_older_files_lack_arrays() -> None:
    log = bench_log(result(start_times=None, latencies=None, errors=None, duration=None, completed=None))
    assert log.arrival_time.tolist() == [0.0] * 7
    assert log.sim_duration == pytest.approx(0.48 + 20 * 0.03)
    assert log.notes == (
        "no start_times in the file: every request is taken to start at 0 (latencies unaffected)",
        "answers with neither an error nor any output: 3, counted as failed",
        "no duration in the file: taken from the first start to the last end",
    )


def test_null_errors_are_no_errors() -> None:
    assert bench_log(result(errors=[None] * 7)).end_reason.tolist() == [0, 0, 4, 0, 0, 4, 4]


def test_chunks_are_noted() -> None:
    itls = [[0.1] * 2, *RESULT["itls"][1:]]
    log = bench_log(result(itls=itls))
    assert "1 of 4 served requests came in chunks" in log.notes[-1]
    assert log.num_delivered_tokens[0] == 11


def test_a_file_of_no_requests() -> None:
    empty = {name: [] for name in ("input_lens", "output_lens", "ttfts", "itls", "start_times", "errors")}
    s = bench_summary(empty | {"duration": 1.0}, CHAT)
    assert (s["num_requests"], s["attainment"], s["request_throughput"]) == (0, None, 0.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ttfts": None}, "no array 'ttfts': the file has no per-request figures .*--save-detailed"),
        ({"itls": "none"}, "itls: expected an array, one entry per request, found str"),
        ({"errors": [""] * 6}, "arrays of different lengths: .*ttfts 7.*errors 6"),
        ({"ttfts": [math.nan, *RESULT["ttfts"][1:]]}, r"ttfts\[0\]: expected a number from 0 to 1e\+09, found NaN"),
        ({"ttfts": [True, *RESULT["ttfts"][1:]]}, r"ttfts\[0\]: .* found true"),
        ({"ttfts": [*RESULT["ttfts"][:6], -1]}, r"ttfts\[6\]: .* found -1"),
        ({"ttfts": [0.0, *RESULT["ttfts"][1:]]}, "row 0: ttfts is 0 but output_lens is 11"),
        ({"input_lens": [10**400, *RESULT["input_lens"][1:]]}, r"input_lens\[0\]"),
        ({"input_lens": [0.5, *RESULT["input_lens"][1:]]}, r"input_lens\[0\]: expected a whole number"),
        ({"itls": [[0.02, None], *RESULT["itls"][1:]]}, r"itls\[0\]\[1\]: .* found null"),
        ({"itls": [0.02, *RESULT["itls"][1:]]}, r"itls\[0\]: expected an array of gaps, found 0.02"),
        ({"errors": [503, *RESULT["errors"][1:]]}, r"errors\[0\]: expected a text, found 503"),
        (
            {"start_times": [math.inf, *RESULT["start_times"][1:]]},
            r"start_times\[0\]: expected a number .* found Infinity",
        ),
        ({"duration": 0}, "duration: expected a positive"),
        ({"duration": "4"}, r"duration\[0\]: .* found \"4\""),
    ],
)
def test_broken_results(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        bench_log(result(**changes))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"ttfts": [0.1,', "not JSON: .* in line 1, column 16"),
        (b"\xff\xfe", "byte 0 is no UTF-8"),
        (b"[1, 2]", "expected a JSON object, found list"),
        (None, "cannot read it: No such file"),
    ],
)
def test_broken_files(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "broken.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        read_json(path)
    assert str(path) in str(caught.value)
