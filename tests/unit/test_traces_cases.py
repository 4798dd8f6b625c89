"""User files that broke other tools (tests/cases): what each reader must make of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from slacktide.errors import InputError
from slacktide.workload import ReadOptions, load_workload
from slacktide.workload.formats.bench import read_bench_result
from slacktide.workload.traces import read_trace

CASES = Path(__file__).parents[1] / "cases"


def load(name: str, **more):
    return load_workload(str(CASES / name), **more)


def lengths(workload) -> list[tuple[int, int]]:
    return list(zip(workload.num_prompt_tokens.tolist(), workload.num_output_tokens.tolist(), strict=True))


# ---- azure_timestamps -----------------------------------------------------------------------------------------------


def test_azure_2024_mixed_fractions_zones_and_midnight():
    workload = load("azure_timestamps/azure_2024_mixed.csv")
    assert workload.arrival_time.tolist() == pytest.approx([0, 0.748163, 0.75, 1.25, 1.791683], abs=1e-9)
    assert lengths(workload) == [(1452, 3), (584, 12), (862, 38), (1569, 1), (76, 104)]
    assert workload.notes == ()


def test_azure_2023_seven_digits_keep_the_order_within_a_microsecond():
    workload = load("azure_timestamps/azure_2023_seven_digits.csv")
    assert workload.arrival_time.tolist() == pytest.approx([0, 0, 0, 1.5], abs=1e-9)  # all round to 18:16:00.000000
    assert lengths(workload) == [(374, 44), (396, 109), (879, 55), (91, 16)]
    assert workload.notes == ()


def test_azure_2025_columns_go_by_name_and_the_extra_one_is_named_once():
    workload = load("azure_timestamps/azure_2025_multimodal.csv")
    assert workload.arrival_time.tolist() == pytest.approx([0, 0.25, 1.0], abs=1e-9)
    assert lengths(workload) == [(800, 20), (4100, 64), (1900, 7)]
    assert [note for note in workload.notes if "NumImages" in note and "not used" in note] == list(workload.notes)
    assert len(workload.notes) == 1


def test_azure_zones_on_some_rows_only_name_the_line():
    with pytest.raises(InputError, match="line 3: TIMESTAMP has no zone"):
        load("azure_timestamps/azure_with_and_without_zone.csv")


@pytest.mark.parametrize("name", ["azure_2023_seven_digits", "azure_2024_mixed", "azure_2025_multimodal"])
def test_azure_is_detected_without_an_option(name):
    assert read_trace(CASES / f"azure_timestamps/{name}.csv").format == "azure"


def test_times_do_not_depend_on_the_machines_zone_or_locale():
    code = (
        "import sys, time; time.tzset(); from slacktide.workload import load_workload as load; "
        "print([load(p).arrival_time.tolist() for p in sys.argv[1:]])"
    )
    files = [str(CASES / f"azure_timestamps/azure_{year}.csv") for year in ("2023_seven_digits", "2024_mixed")]
    answers = set()
    for zone in ("UTC", "America/New_York", "Asia/Kolkata"):
        env = {**os.environ, "TZ": zone, "LC_ALL": "C"}
        run = subprocess.run([sys.executable, "-c", code, *files], capture_output=True, text=True, check=True, env=env)
        answers.add(run.stdout)
    assert len(answers) == 1


# ---- burstgpt_variants ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["full.csv", "older.csv"])
def test_burstgpt_both_column_sets_give_the_same_requests(name):
    workload = load(f"burstgpt_variants/{name}")
    assert workload.arrival_time.tolist() == pytest.approx([0, 0, 40.5, 113.25])
    assert lengths(workload) == [(472, 18), (1087, 230), (417, 276), (185, 1)]
    note = next(note for note in workload.notes if "left out" in note)
    assert "left out 2 of 6 rows: 1 with 0 response tokens (failed), 1 with 0 request tokens" in note


def test_burstgpt_failed_rows_are_kept_by_an_option_and_marked():
    workload = load("burstgpt_variants/full.csv", options=ReadOptions(failed_output_tokens=50))
    assert lengths(workload) == [(472, 18), (1087, 230), (417, 276), (1360, 50), (185, 1)]
    assert workload.failed.tolist() == [False, False, False, True, False]
    assert any("kept 1 failed requests, marked as such, with 50" in note for note in workload.notes)
    assert [workload.sessions[code] for code in workload.session] == ["101", "102", "103", "101", "104"]


def test_burstgpt_misspelt_header_names_the_column_and_the_nearest():
    with pytest.raises(InputError, match='column "Request tokens" not found, nearest is "Request token"'):
        load("burstgpt_variants/misspelt_header.csv")


def test_burstgpt_all_failed():
    with pytest.raises(InputError, match="no usable row, 2 with 0 response tokens"):
        load("burstgpt_variants/all_failed.csv")


# ---- missing_timestamps ---------------------------------------------------------------------------------------------


def test_one_missing_timestamp_is_never_filled():
    with pytest.raises(InputError, match="line 3: field timestamp missing"):
        load("missing_timestamps/one_missing.jsonl")


def test_no_timestamps_ask_for_a_rate_and_repeat_by_seed():
    with pytest.raises(InputError, match=r"no arrival times.*--rate.*--arrival"):
        load("missing_timestamps/none_given.jsonl")
    one, two = (load("missing_timestamps/none_given.jsonl", rate=5, seed=1) for _ in range(2))
    assert lengths(one) == [(400, 10), (400, 10), (900, 10), (400, 10)]
    assert one.arrival_time.tobytes() == two.arrival_time.tobytes()
    assert one.hash_ids[0].tolist() == [1, 2, 3, 4, 5]


def test_cut_off_line_is_named_with_the_position():
    with pytest.raises(InputError, match=r"line 3, column 39: cut off"):
        load("missing_timestamps/cut_off.jsonl")


# ---- sharegpt_odd_conversations -------------------------------------------------------------------------------------


def test_sharegpt_every_answered_turn_is_a_request_of_its_session():
    workload = load("sharegpt_odd_conversations/sharegpt.json", rate=1)
    assert len(workload) == 6
    names = [workload.sessions[code] for code in workload.session]
    assert len(set(names)) == 4
    assert [name.split("#")[0] for name in names] == ["a_0", "b_0", "b_0", "b_0", "h_0", "a_0"]
    ids, offsets = workload.hash_ids
    prompts, outputs = workload.num_prompt_tokens, workload.num_output_tokens
    for turn in (1, 2):
        before, now = ids[offsets[turn] : offsets[turn + 1]], ids[offsets[turn + 1] : offsets[turn + 2]]
        assert prompts[turn + 1] > prompts[turn] + outputs[turn]
        assert np.array_equal(now[: len(before)], before)
    shared = [set(ids[offsets[row] : offsets[row + 1]].tolist()) for row in (0, 3, 4, 5)]
    assert sum(map(len, shared)) == len(set.union(*shared))
    assert (prompts > 0).all()
    assert (outputs > 0).all()


def test_sharegpt_system_text_belongs_to_the_prompt():
    def words(texts):
        return np.array([len(text.split()) for text in texts])

    from slacktide.workload.formats.sharegpt import read_sharegpt

    data = (CASES / "sharegpt_odd_conversations/sharegpt.json").read_bytes()
    trace = read_sharegpt("f", data, ReadOptions(), words)
    assert trace.num_prompt_tokens.tolist() == [5, 4, 16, 25, 5, 9]
    assert trace.num_output_tokens.tolist() == [7, 9, 5, 8, 1, 1]


def test_sharegpt_says_once_what_is_left_out_and_how_lengths_come_about():
    notes = load("sharegpt_odd_conversations/sharegpt.json", rate=1).notes
    (left_out,) = [note for note in notes if "left out" in note]
    for part in (
        "6 of 10",
        "2 without",
        "1 that begin",
        "1 never",
        "1 with an empty answer",
        "1 with an empty question",
    ):
        assert part in left_out
    assert any("6 requests from 4 of 10 conversations" in note for note in notes)
    assert any("estimated" in note for note in notes)


def test_sharegpt_first_turns_only_says_so():
    workload = load("sharegpt_odd_conversations/sharegpt.json", rate=1, options=ReadOptions(first_turn_only=True))
    assert len(workload) == 4
    assert any("only the first question" in note for note in workload.notes)


def test_sharegpt_without_rate_asks_for_one():
    with pytest.raises(InputError, match="--rate"):
        load("sharegpt_odd_conversations/sharegpt.json")


def test_sharegpt_nothing_usable_gives_the_reasons():
    with pytest.raises(InputError, match="no usable conversation in 4: 2 without messages, 1 that begin"):
        load("sharegpt_odd_conversations/nothing_usable.json")


# ---- bench_json_with_failures ---------------------------------------------------------------------------------------


def test_bench_result_as_numbers():
    result = read_bench_result(CASES / "bench_json_with_failures/result.json")
    assert result.served.tolist() == [True, True, False, True, True, False, False]
    assert (result.duration, result.completed, result.failed) == (4.0, 5, 2)
    assert result.ttfts[result.served].mean() == pytest.approx(0.355)
    values, offsets = result.itls
    assert np.diff(offsets).tolist() == [10, 20, 0, 0, 10, 0, 0]
    assert values[offsets[1]] == 0.03
    assert any("completed = 5; 4 of 7" in note for note in result.notes)


def test_bench_result_as_a_workload_leaves_unknown_lengths_out():
    workload = load("bench_json_with_failures/result.json")
    assert lengths(workload) == [(500, 11), (800, 21), (300, 1), (900, 11)]
    assert workload.arrival_time.tolist() == [0, 0.5, 1.5, 2.0]
    assert any("left out 3 of 7 requests: 2 with an error, 1 without output" in note for note in workload.notes)
    assert any("completed = 5; 4 of 7" in note for note in workload.notes)


def test_bench_result_gives_failed_requests_a_length_only_by_an_option():
    workload = load("bench_json_with_failures/result.json", options=ReadOptions(failed_output_tokens=9))
    assert lengths(workload)[2] == (700, 9)
    assert workload.failed.tolist() == [False, False, True, False, False, True, True]
    assert any("kept 3 failed" in note for note in workload.notes)
