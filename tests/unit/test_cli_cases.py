"""User files that broke other tools (tests/cases), and their whole kind, from the command line to the result."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from slacktide.cli.main import main

CASES = Path(__file__).parents[1] / "cases"
PROFILE = "h100/llama-3-8b"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
DAY = "2024-05-12 10:00:0"
ROWS = f"{DAY}0.5,500,10\n{DAY}1,600,20\n{DAY}2.25,700,30\n"
BURST = "Timestamp,Request tokens,Response tokens\n"
OWN = "arrival_s,prompt_tokens,output_tokens"
LINE = '{"timestamp": 0, "input_length": 400, "output_length": 10}\n'
LATER = '{"timestamp": 500, "input_length": %s, "output_length": 7}\n'


@pytest.fixture
def simulate(capsys, tmp_path):
    """Simulate a trace; returns (the record, where --out wrote), or the one line of a refusal as text."""

    def run(trace, *more):
        out = tmp_path / "out"
        status = main(
            ["simulate", "--trace", str(trace), "--profile", PROFILE, "--policy", "vllm-v1", "--json",
             "--save-detailed", "--out", str(out), *map(str, more)]
        )  # fmt: skip
        printed, complaint = capsys.readouterr()
        if status == 0:
            record = json.loads(printed)
            assert json.loads((out / "summary.json").read_text())["input_lens"] == record["input_lens"]
            return record
        assert status == 2
        assert printed == ""
        assert complaint.count("\n") == 1
        assert complaint.startswith("slacktide: error: ")
        assert not out.exists() or not list(out.iterdir())
        return complaint

    return run


@pytest.fixture
def write(tmp_path):
    """Write a file of the user's; returns its path."""

    def make(content, name="trace.data"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return make


def lengths(record):
    return list(zip(record["input_lens"], record["output_lens"], strict=True))


# ---- the five folders ------------------------------------------------------------------------------------------------

SERVED = {
    "azure_timestamps/azure_2024_mixed.csv": (
        [0, 0.748163, 0.75, 1.25, 1.791683], [(1452, 3), (584, 12), (862, 38), (1569, 1), (76, 104)], [],
    ),
    "azure_timestamps/azure_2023_seven_digits.csv": (
        [0, 0, 0, 1.5], [(374, 44), (396, 109), (879, 55), (91, 16)], [],
    ),
    "azure_timestamps/azure_2025_multimodal.csv": ([0, 0.25, 1.0], [(800, 20), (4100, 64), (1900, 7)], ["NumImages"]),
    "burstgpt_variants/full.csv": (
        [0, 0, 40.5, 113.25], [(472, 18), (1087, 230), (417, 276), (185, 1)],
        ["not used: column Elapsed time", "left out 2 of 6 rows: 1 with 0 response tokens (failed), 1 with 0 request"],
    ),
    "burstgpt_variants/older.csv": (
        [0, 0, 40.5, 113.25], [(472, 18), (1087, 230), (417, 276), (185, 1)],
        ["not used: column Model", "left out 2 of 6 rows: 1 with 0 response tokens (failed), 1 with 0 request"],
    ),
    "bench_json_with_failures/result.json": (
        [0, 0.5, 1.5, 2.0], [(500, 11), (800, 21), (300, 1), (900, 11)],
        ["completed = 5; 4 of 7", "left out 3 of 7 requests: 2 with an error, 1 without output"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SERVED)
def test_served_as_they_are(simulate, name):
    times, sizes, notes = SERVED[name]
    record = simulate(CASES / name, "--slo", "ttft:500,tbt:50")
    assert record["start_times"] == pytest.approx(times, abs=1e-6)
    assert lengths(record) == sizes
    assert record["summary"]["completed"] == record["num_prompts"] == len(times)
    assert len(record["notes"]) == len(notes)  # each thing is said once
    for part, note in zip(notes, record["notes"], strict=True):
        assert part in note


REFUSED = {
    "azure_timestamps/azure_with_and_without_zone.csv": ["line 3", "TIMESTAMP", "write all with a zone"],
    "burstgpt_variants/misspelt_header.csv": [
        "line 1", 'column "Request tokens" not found', 'nearest is "Request token"', "rename the column",
    ],
    "burstgpt_variants/all_failed.csv": ["no usable row", "2 with 0 response tokens"],
    "missing_timestamps/one_missing.jsonl": ["line 3", "field timestamp missing", "add it or delete the line"],
    "missing_timestamps/none_given.jsonl": ["no arrival times", "--rate", "--arrival"],
    "missing_timestamps/cut_off.jsonl": ["line 3, column 39", "cut off", "fetch or write the file again"],
    "sharegpt_odd_conversations/sharegpt.json": ["no arrival times", "--rate", "--arrival"],
    "sharegpt_odd_conversations/nothing_usable.json": [
        "no usable conversation in 4", "2 without messages", "1 that begin with an answer", "1 never answered",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_one_line_and_no_results(simulate, name):
    told = simulate(CASES / name)
    if "--rate" not in REFUSED[name]:
        assert simulate(CASES / name, "--rate", 5) == told
    assert Path(name).name in told
    for part in REFUSED[name]:
        assert part in told


def test_none_given_with_a_rate_is_the_same_every_time(simulate):
    first, again = (simulate(CASES / "missing_timestamps/none_given.jsonl", "--rate", 5, "--seed", 1) for _ in "ab")
    assert lengths(first) == [(400, 10), (400, 10), (900, 10), (400, 10)]
    assert first["start_times"] == again["start_times"]
    assert first["ttfts"] == again["ttfts"]
    assert simulate(CASES / "missing_timestamps/none_given.jsonl", "--rate", 5, "--seed", 2)["ttfts"] != first["ttfts"]


def test_sharegpt_with_a_rate(simulate):
    record = simulate(CASES / "sharegpt_odd_conversations/sharegpt.json", "--rate", 1)
    assert record["num_prompts"] == 6
    first, second, third = record["input_lens"][1:4]
    assert first < second < third  # the turns of one session
    assert sum("left out 6 of 10" in note for note in record["notes"]) == 1
    assert any("estimated" in note for note in record["notes"])
    first = simulate(CASES / "sharegpt_odd_conversations/sharegpt.json", "--rate", 1, "--read", "first_turn_only=true")
    assert first["num_prompts"] == 4
    assert any("only the first question" in note for note in first["notes"])


@pytest.mark.parametrize("json_too", [False, True])
def test_report_of_a_bench_result_with_failures(capsys, json_too):
    path = str(CASES / "bench_json_with_failures/result.json")
    assert main(["report", path, "--slo", "ttft:500,tbt:50", *(["--json"] if json_too else [])]) == 0
    out = capsys.readouterr().out
    if not json_too:
        assert "42.9" in out
        assert "by our count 4 were served" in out
        return
    (run,) = json.loads(out)["runs"]
    s = run["summary"]
    assert (s["num_requests"], s["completed"], s["failed"]) == (7, 4, 3)
    assert (s["failed_with_error"], s["failed_empty"], s["completed_in_file"]) == (2, 1, 5)
    assert s["attainment"] == pytest.approx(3 / 7)
    assert s["request_goodput"] == pytest.approx(0.75)
    assert (s["mean_ttft_ms"], s["median_ttft_ms"]) == pytest.approx((355, 315))
    assert s["mean_tpot_ms"] == pytest.approx(70 / 3)


def test_failed_rows_are_kept_by_an_option_only(simulate):
    record = simulate(CASES / "burstgpt_variants/full.csv", "--read", "failed_output_tokens=50")
    assert (1360, 50) in lengths(record)
    assert any("kept 1 failed requests, marked as such" in note for note in record["notes"])
    record = simulate(CASES / "bench_json_with_failures/result.json", "--read", "failed_output_tokens=9")
    assert [lengths(record)[i] for i in (2, 5, 6)] == [(700, 9), (400, 9), (600, 9)]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("time_unit=minutes", "expected one of s, ms, us, ns"),
        ("hash_block_sise=5", "did you mean hash_block_size"),
        ("hash_block_size=0", "expected a whole number from 1"),
        ("drop_empty=maybe", "expected true or false"),
        ("format=azur", "did you mean azure"),
        ("drop_empty", "not of the form key=value"),
    ],
)
def test_reading_options_are_checked(simulate, text, part):
    assert part in simulate(CASES / "burstgpt_variants/full.csv", "--read", text)


# ---- their kind: CSV -------------------------------------------------------------------------------------------------

SAME_AZURE = {
    "byte order mark": "\ufeff" + AZURE + ROWS,
    "carriage returns": (AZURE + ROWS).replace("\n", "\r"),
    "mixed line ends": (AZURE + ROWS).replace("\n", "\r\n", 2),
    "semicolons": (AZURE + ROWS).replace(",", ";"),
    "tabs": (AZURE + ROWS).replace(",", "\t"),
    "quotes": '"TIMESTAMP","ContextTokens","GeneratedTokens"\n' + ROWS.replace(",", '","').replace(DAY, '"' + DAY).replace("\n", '"\n'),  # noqa: E501
    "decimal commas": (AZURE + ROWS).replace(",", ";").replace("0.5", "0,5").replace("2.25", "2,25"),
    "lower case": (AZURE + ROWS).lower(),
    "blank lines": "\n" + AZURE + "\n" + ROWS.replace("\n", "\n\n"),
    "spaces": (AZURE + ROWS).replace(",", " , "),
    "T and Z": AZURE + ROWS.replace(" 10:", "T10:").replace(",", "Z,", 1).replace("01,", "01Z,").replace("25,", "25Z,"),
    "zone without minutes": AZURE + ROWS.replace(",5", "+00,5").replace(",6", "+00,6").replace(",7", "+00,7"),
    "zone in words": AZURE + ROWS.replace(",5", " UTC,5").replace(",6", " UTC,6").replace(",7", " UTC,7"),
    "zones of three spellings": AZURE + ROWS.replace(",5", "Z,5").replace(",6", "+0000,6").replace(",7", "-00:00,7"),
    "nine digits": AZURE + ROWS.replace("0.5", "0.500000000"),
    "numbers with points": AZURE + ROWS.replace("500", "5e2").replace("600", "600.0").replace("700", "+700"),
    "gzip": gzip.compress((AZURE + ROWS).encode()),
}  # fmt: skip


@pytest.mark.parametrize("kind", SAME_AZURE)
def test_spellings_of_one_azure_file(simulate, write, kind):
    record = simulate(write(SAME_AZURE[kind]))
    assert record["start_times"] == pytest.approx([0, 0.5, 1.75])
    assert lengths(record) == [(500, 10), (600, 20), (700, 30)]
    assert record["notes"] == []


def test_columns_go_by_name_and_extra_ones_are_named_once(simulate, write):
    record = simulate(write("X,GeneratedTokens,ContextTokens,TIMESTAMP\n7,10,500,2024-05-12 10:00:00\n"))
    assert lengths(record) == [(500, 10)]
    assert [note.partition(": ")[2] for note in record["notes"]] == ["not used: column X"]


def test_unsorted_rows_are_counted_once_and_equal_rows_are_two_requests(simulate, write):
    rows = ROWS.splitlines(keepends=True)
    record = simulate(write(AZURE + rows[2] + rows[0] + rows[0] + rows[1]))
    assert lengths(record) == [(500, 10), (500, 10), (600, 20), (700, 30)]
    (note,) = record["notes"]
    assert "3 of 4 rows are earlier than a row before them" in note


AZURE_FAULTS = [
    (f"{DAY}0,0,10\n", ["line 2", "ContextTokens is 0"]),
    (f"{DAY}0,-0,10\n", ["line 2", "ContextTokens is -0"]),
    (f"{DAY}0,-5,10\n", ["line 2", "ContextTokens is -5"]),
    (f"{DAY}0,5.5,10\n", ["line 2", "ContextTokens is 5.5", "whole number"]),
    (f"{DAY}0,5,NaN\n", ["line 2", "GeneratedTokens is 'NaN'"]),
    (f"{DAY}0,5,-Infinity\n", ["line 2", "GeneratedTokens is '-Infinity'"]),
    (f"{DAY}0,5,1e400\n", ["line 2", "GeneratedTokens is inf"]),
    (f"{DAY}0,5,\n", ["line 2", "GeneratedTokens is empty"]),
    (f'{DAY}0,"1,500",1\n', ["line 2", "ContextTokens is '1,500'"]),
    (f"{DAY}0,99999999999999999999,1\n", ["line 2", "ContextTokens is 1e+20", "10,000,000"]),
    (f"{DAY}0,{'9' * 5000}x,1\n", ["line 2", "ContextTokens is '99", "5,001 characters", "expected a number"]),
    (f"{DAY}0,5\n", ["line 2", "2 cells, expected 3", "cut off"]),
    (f"{DAY}0,5,1,\n", ["line 2", "4 cells, expected 3", "',' too many"]),
    ("2024-02-30 10:00:00,5,1\n", ["line 2", "TIMESTAMP '2024-02-30 10:00:00' is no possible date"]),
    ("2024-05-12 24:00:00,5,1\n", ["line 2", "no possible date"]),
    ("1715508000,5,1\n", ["line 2", "TIMESTAMP is '1715508000'", "expected a time such as"]),
    (f"{DAY}0+24:00,5,1\n", ["line 2", "impossible zone +24:00"]),
    (f"{DAY}0,5,1\n9999-12-31 23:59:59,5,1\n", ["line 3", "9999", "after the earliest", "correct the wrong one"]),
    ("", ["no rows below the header"]),
]


@pytest.mark.parametrize(("rows", "parts"), AZURE_FAULTS)
def test_faults_of_azure_rows(simulate, write, rows, parts):
    told = simulate(write(AZURE + rows))
    assert len(told) < 500
    for part in ["trace.data", *parts]:
        assert part in told


FILE_FAULTS = {
    "empty": (b"", "the file is empty"),
    "byte order mark alone": (b"\xef\xbb\xbf", "the file is empty"),
    "blank": (b" \r\n\n", "the file is empty"),
    "empty gzip": (gzip.compress(b""), "the file is empty"),
    "cut gzip": (gzip.compress((AZURE + ROWS).encode())[:-6], "broken gzip file"),
    "binary": (bytes(range(256)), "neither Parquet nor UTF-8 text"),
    "UTF-16": ((AZURE + ROWS).encode("utf-16"), "UTF-16 to UTF-8"),
    "UTF-16 without mark": ((AZURE + ROWS).encode("utf-16-le"), "UTF-16 to UTF-8"),
    "Latin-1": (AZURE.encode() + b"2024-05-12 10:00:00,5,\xe9\n", "line 2: no UTF-8 text"),
    "cut Parquet": (b"PAR1xxxx", "not a readable Parquet file"),
    "no header": (ROWS.encode(), "expected a header"),
    "comment first": (("# mine\n" + AZURE + ROWS).encode(), "line 1 is '# mine', expected a header"),
    "page of an error": (b"<html><body>404</body></html>", "no known trace format"),
    "two columns of a name": (b"TIMESTAMP,ContextTokens,ContextTokens,GeneratedTokens\n", 'called "ContextTokens"'),
    "two columns without": (b"TIMESTAMP,ContextTokens,,GeneratedTokens,\n", "two columns have no name"),
    "two but for the case": (
        b"TIMESTAMP,ContextTokens,contexttokens,GeneratedTokens\n2024-05-12 10:00:00,1,2,3\n",
        "columns 'ContextTokens' and 'contexttokens' mean the same; keep one",
    ),
    "missing column": (
        b"TIMESTAMP,ContextTokens\n2024-05-12 10:00:00,5\n",
        'line 1: column "GeneratedTokens" not found; the file has TIMESTAMP, ContextTokens; add the column',
    ),
}


@pytest.mark.parametrize("kind", FILE_FAULTS)
def test_files_that_are_no_table(simulate, write, kind):
    content, part = FILE_FAULTS[kind]
    assert part in simulate(write(content))


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("", "no trace named"),
        (".", "Is a directory"),
        ("absent.csv", "no such file"),
        ("azure-con", "did you mean azure-conv"),
        ("x" * 5000, "File name too long"),
        ("a\0b", "null byte"),
    ],
)
def test_names_that_are_no_trace(simulate, name, part):
    assert part in simulate(name)


def test_burstgpt_with_dates_and_out_of_order_failures(simulate, write):
    record = simulate(write(BURST + "1700000009,4,5\n1700000000,9,0\n1700000005,6,7\n1700000003,8,1\n"))
    assert record["start_times"] == pytest.approx([0, 2, 6])
    assert [note.partition(": ")[2] for note in record["notes"]] == [
        "left out 1 of 4 rows: 1 with 0 response tokens (failed)",
        "2 of 3 rows are earlier than a row before them; sorted by arrival time",
    ]


@pytest.mark.parametrize(
    ("rows", "part"),
    [
        ("5,-4,4\n", "line 2: Request tokens is -4"),
        ("5,4,\n", "line 2: Response tokens is empty"),
        ("nan,4,4\n", "line 2: Timestamp is 'nan'"),
        ("-5,4,4\n", "line 2: Timestamp is -5, expected seconds from 0 on"),
        ("1,4,4\n1e12,4,4\n", "line 3: Timestamp is 1e+12"),
        ("2024-01-01 00:00:00,4,4\n", "line 2: Timestamp is '2024-01-01 00:00:00', expected a number"),
        ("5,4,0\n6,4,-0\n", "no usable row, 2 with 0 response tokens"),
    ],
)
def test_faults_of_burstgpt_rows(simulate, write, rows, part):
    assert part in simulate(write(BURST + rows))


@pytest.mark.parametrize(
    ("head", "row", "part"),
    [
        (",request_id", "0,5,5,a\n0,5,5,b\n1,5,5,a", "line 4: request_id 'a' is already that of"),
        (",slo_ttft_ms", "0,5,5,0", "line 2: slo_ttft_ms is 0"),
        (",slo_ttft_ms", "0,5,5,nan", "line 2: slo_ttft_ms is 'nan'"),
        (",slo_ttft_ms", "0,5,5,1e300", "line 2: slo_ttft_ms is 1e+300"),
        (",slo_tbt_ms,slo_tpot_ms", "0,5,5,1,1", "mean the same; keep one"),
        (",slo_ttft", "0,5,5,1", 'column "slo_ttft" is not known, nearest is "slo_ttft_ms"'),
        (",max_tokens", "0,5,5,0", "line 2: max_tokens is 0"),
        (",priority", "0,5,5,1e11", "line 2: priority is 1e+11"),
        (",abort_s", "5,5,5,1", "line 2: abort_s is 1, before arrival_s 5"),
        (",hash_ids", "0,100,5,a", "line 2: hash_ids is 'a'"),
        ("", "1700000000000,5,5\n1700000001000,5,5", "these look like milliseconds"),
        ("", "0,5,5\n1e10,5,5", "line 3: arrival_s is 1e+10"),
    ],
)
def test_faults_of_our_own_columns(simulate, write, head, row, part):
    assert part in simulate(write(f"{OWN}{head}\n{row}\n"))


# ---- their kind: JSON ------------------------------------------------------------------------------------------------

SAME_LINES = {
    "blank lines": "\n" + LINE + "  \n" + LATER % 5 + "\n",
    "CRLF": (LINE + LATER % 5).replace("\n", "\r\n"),
    "carriage returns": (LINE + LATER % 5).replace("\n", "\r"),
    "byte order mark": "\ufeff" + LINE + LATER % 5,
    "no line end": (LINE + LATER % 5).rstrip(),
    "float": LINE + LATER % "5.0",
    "exponent": LINE + LATER % "5e0",
    "gzip": gzip.compress((LINE + LATER % 5).encode()),
    "line separators in a text": LINE.replace("}", ', "tenant": "a\u2028b"}') + LATER % 5,
}


@pytest.mark.parametrize("kind", SAME_LINES)
def test_spellings_of_one_jsonl_file(simulate, write, kind):
    record = simulate(write(SAME_LINES[kind]))
    assert record["start_times"] == [0, 0.5]
    assert lengths(record) == [(400, 10), (5, 7)]


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (LINE.replace("}", "},") + LATER % 5, "line 1, column 59: malformed JSON (Extra data)"),
        (LINE + LATER.replace("}", ",}") % 5, "line 2, column"),
        (LINE + LATER % "NaN", "line 2: JSON is malformed"),
        (LINE + LATER % "-Infinity", "line 2: JSON is malformed"),
        (LINE + LATER % "1e400", "line 2: field input_length: number out of range"),
        (LINE + LATER % ("1" + "0" * 400), "line 2: field input_length is far too large"),
        (LINE + LATER % "-0.0", "line 2: input_length is -0"),
        (LINE + LATER % "5.5", "line 2: input_length is 5.5"),
        (LINE + LATER % '"5"', "line 2: field input_length: expected number, got str"),
        (LINE + LATER % "true", "line 2: field input_length: expected number, got bool"),
        (LINE + LATER % "null", "line 2: field input_length missing; add it"),
        (LINE + LATER % '1, "input_length": 2', "line 2: field input_length stands there twice; keep one"),
        (LINE + '{"input_length": ' + "[" * 9000, "line 2"),
        ("[" * 9000, "RecursionError"),
        (LINE + LINE[:30], "line 2, column"),
        (LINE + "null\n", "line 2: expected object, got null"),
        (LINE.replace("0,", "-1,", 1), "line 1: timestamp is -1"),
        (LINE.replace("timestamp", "Timestamp"), 'line 1: field "Timestamp" is not known, nearest is "timestamp"'),
        ('{"timestamp": 0, "input_len": 4, "output_len": 1}\n', 'field input_length missing, nearest is "input_len"'),
        (LINE.replace("{", "{\n"), "one object over several lines, expected one object a line"),
        ("// mine\n" + LINE, "line 1 is '// mine'"),
        (LINE.replace(": 0", ": 1700000000000000"), "is a date in us, and ms are expected; say --read time_unit=us"),
        (LINE.replace(": 0", ": 1700000000"), "is a date in s, and ms are expected; say --read time_unit=s"),
        (LINE.replace("}", ', "request_id": 1}') * 2, "line 2: request_id '1' is already that of"),
        (LINE.replace("}", ', "hash_ids": [1.5]}'), "line 1: field hash_ids[0]: expected int, got float"),
        ((LINE * 2).encode("utf-16"), "UTF-16"),
    ],
)  # fmt: skip
def test_faults_of_lines(simulate, write, content, part):
    assert part in simulate(write(content))


def test_dates_in_another_unit_are_read_when_said(simulate, write):
    lines = "".join(LINE.replace(": 0", f": {1_700_000_000 + 3 * i}") for i in range(3))
    assert simulate(write(lines), "--read", "time_unit=s")["start_times"] == [0, 3, 6]


def test_a_file_that_changed_is_read_again(simulate, write):
    assert simulate(write(LINE))["num_prompts"] == 1
    assert simulate(write(LINE + LATER % 5))["num_prompts"] == 2


# ---- their kind: results ---------------------------------------------------------------------------------------------

BENCH = json.loads((CASES / "bench_json_with_failures/result.json").read_text())


@pytest.fixture
def report(capsys, write):
    """Report a file with this content; returns the summary, or the one line of a refusal."""

    def run(content, *more):
        path = write(content if isinstance(content, (bytes, str)) else json.dumps(content), "result.json")
        answers = []
        for form in ([], ["--json"]):
            status = main(["report", str(path), *more, *form])
            out, err = capsys.readouterr()
            assert status in (0, 2)
            if status == 2:
                assert out == ""
                assert err.count("\n") == 1
                assert "result.json" in err
            answers.append(json.loads(out)["runs"][0]["summary"] if status == 0 and form else err)
        return answers[1]

    return run


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (BENCH | {"ttfts": [0.1]}, "arrays of different lengths"),
        (BENCH | {"itls": None}, "no array 'itls'"),
        (BENCH | {"duration": 0}, "duration: expected a positive number"),
        (BENCH | {"input_lens": [-5, *BENCH["input_lens"][1:]]}, "input_lens[0]: expected a number from 0"),
        (BENCH | {"input_lens": [10**30, *BENCH["input_lens"][1:]]}, "input_lens[0]"),
        (BENCH | {"errors": [False] * 7}, "errors[0]: expected a text"),
        (json.dumps(BENCH).replace("0.48", "NaN"), "ttfts[1]"),
        (json.dumps(BENCH)[:-1] + ', "duration": 400.0}', "'duration' stands twice"),
        (json.dumps(BENCH)[:300], "not JSON"),
        (json.dumps(BENCH) * 2, "Extra data"),
        ('{"completed": 1, "duration": 1, "x": ' + "[" * 100_000, "RecursionError"),
        ('{"completed": 1, "duration": 1' + "0" * 5000 + "}", "JSON that cannot be read"),
        (b"PAR1\xff", "no UTF-8"),
        ("5", "expected a JSON object, found int"),
        ("{}", "no known kind of result"),
        ('{"runs": []}', "`runs` is empty"),
        ('{"runs": [1]}', "runs[0]: expected a record with a `summary`"),
        ('{"runs": [{"label": "a", "rate": 5, "evaluations": []}]}', "'slacktide goodput'"),
        ('{"runs": [{"summary": {"attainment": "x"}}]}', "runs[0]: attainment is 'x', expected a number"),
        ('{"summary": {"notes": 5}}', "notes"),
        ('{"summary": "x"}', "expected a record with a `summary`"),
    ],
)
def test_results_that_are_none(report, content, part):
    assert part in report(content)


def test_odd_results_that_can_be_read(report):
    told = report("\ufeff" + json.dumps(BENCH))
    assert told["completed"] == 4
    without = {key: value for key, value in BENCH.items() if key not in ("duration", "completed")}
    assert report(without)["completed"] == 4
    notes = report(BENCH | {"duration": 0.5})["notes"]
    assert any("duration is 0.5 s, yet its requests end after 3 s" in note for note in notes)
    assert report(BENCH | {"errors": ["x"] * 7}, "--slo", "ttft:500")["attainment"] == 0
