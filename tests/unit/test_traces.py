"""Readers and writers: every format, every kind of fault with its line, and round trips."""

from __future__ import annotations

import gzip
import json
import math
from importlib import resources
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slacktide.errors import InputError
from slacktide.workload import ReadOptions, Workload, list_traces, load_workload
from slacktide.workload.formats.bench import read_bench_result
from slacktide.workload.tokens import estimate_tokens, token_counter
from slacktide.workload.traces import read_trace, write_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
OWN = "arrival_s,prompt_tokens,output_tokens\n"


@pytest.fixture
def write(tmp_path: Path):
    def put(content: str | bytes, name: str = "trace") -> str:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    return put


def jsonl(*records: dict) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


# ---- detection ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "format"),
    [
        (AZURE + "2024-05-12 10:00:00,5,6\n", "azure"),
        ("timestamp,contexttokens,GENERATEDTOKENS\n2024-05-12 10:00:00,5,6\n", "azure"),
        ("GeneratedTokens, TIMESTAMP ,ContextTokens\r\n6,2024-05-12T10:00:00Z,5\r\n", "azure"),
        ('"TIMESTAMP","ContextTokens","GeneratedTokens"\n"2024-05-12 10:00:00","5","6"\n', "azure"),
        (BURST + "0,GPT-4,5,6,11,API log\n", "burstgpt"),
        (OWN + "0,5,6\n", "slacktide"),
        ("\n\r\n" + OWN + "\n0,5,6\n\n", "slacktide"),
        ("arrival_s;prompt_tokens;output_tokens\n0;5;6\n", "slacktide"),
        ("arrival_s\tprompt_tokens\toutput_tokens\n0\t5\t6", "slacktide"),
        ("\ufeff" + OWN + "0,5,6\n", "slacktide"),
        (jsonl({"timestamp": 0, "input_length": 5, "output_length": 6, "hash_ids": [1]}), "mooncake"),
        ("\n" + jsonl({"timestamp": 0, "input_length": 5.0, "output_length": 6}), "mooncake"),
        (jsonl({"prompt": "twenty ASCII letters", "output_tokens": 6}), "custom"),
        ('[{"conversations": [{"role": "user", "content": "twenty ASCII letters"},'
         ' {"role": "assistant", "content": "twenty-four ASCII letter"}]}]', "sharegpt"),
        (
            jsonl({"conversations": [{"from": "human", "value": "x" * 20}, {"from": "gpt", "value": "y" * 24}]}),
            "sharegpt",
        ),
        ('{"input_lens": [5], "output_lens": [6], "start_times": [77.5]}', "vllm-bench"),
        ('{\n "duration": 1.0,\n "input_lens": [5],\n "output_lens": [6]\n}', "vllm-bench"),
    ],
)  # fmt: skip
def test_formats_are_told_by_content(write, content, format):
    trace = read_trace(write(content, "misleading.txt"))
    assert trace.format == format
    assert (trace.num_prompt_tokens.tolist(), trace.num_output_tokens.tolist()) == ([5], [6])
    assert trace.arrival_time is None or trace.arrival_time.tolist() == [0]


def test_gzip_is_unpacked(write):
    assert len(read_trace(write(gzip.compress((OWN + "0,5,6\n").encode())))) == 1
    with pytest.raises(InputError, match="broken gzip"):
        read_trace(write(gzip.compress((OWN + "0,5,6\n").encode())[:-9]))


def test_an_explicit_format_goes_first(write):
    path = write(OWN + "0,5,6\n")
    with pytest.raises(InputError, match='column "TIMESTAMP" not found'):
        read_trace(path, ReadOptions(format="azure"))
    with pytest.raises(InputError, match="did you mean azure"):
        read_trace(path, ReadOptions(format="azur"))
    with pytest.raises(InputError, match="line 1, column 1: malformed JSON"):
        read_trace(path, ReadOptions(format="mooncake"))


# ---- faults, each with its line -------------------------------------------------------------------------------------

STAMP = "2024-05-12 10:00:00"
FAULTS = [
    ("", "the file is empty"),
    (" \n\n", "the file is empty"),
    (b"\x00\x01\x02", "neither Parquet nor UTF-8"),
    ("a,b".encode("utf-16"), "neither Parquet nor UTF-8"),
    (OWN.encode() + b"0,5,\xff\n", "line 2: no UTF-8 text"),
    (b"PAR1 and no more", "not a readable Parquet"),
    (OWN, "no rows below the header"),
    ("x,y\n1,2\n", "no known trace format"),
    ("0.5,100,200\n", "expected a header"),
    ("<html>not found</html>\n", "no known trace format"),
    ("arrival_s,prompt_tokens,output_token\n0,1,2\n", 'column "output_tokens" not found, nearest is "output_token"'),
    ("TIMESTAMP,ContextToken,GeneratedTokens\n", "column .ContextTokens. not found"),
    (f"TIMESTAMP,ContextToken,GeneratedTokens\n{STAMP},1,2\n", 'column "ContextTokens" not found, nearest is "Con'),
    ("prompt_tokens,output_tokens,prompt_tokens\n1,2,3\n", 'two columns are called "prompt_tokens"'),
    (OWN + "0,5,6\n1,5\n", "line 3: 2 cells, expected 3"),
    (OWN + "0,5,6\n\n1,5,6,7\n", "line 4: 4 cells, expected 3"),
    (OWN + '0,5,6\n1,"5,6\n', "line 3: 2 cells"),
    (OWN + "0,5,6\n\n1,5,\n", "line 4: output_tokens is empty"),
    (OWN + "0,5,6\n1,5,abc\n", "line 3: output_tokens is 'abc', expected a number"),
    (OWN + "0,5,nan\n", "line 2: output_tokens is 'nan'"),
    (OWN + "0,5,0\n", "line 2: output_tokens is 0, expected a whole number of tokens from 1"),
    (OWN + "0,-5,6\n", "line 2: prompt_tokens is -5"),
    (OWN + "0,5.5,6\n", "line 2: prompt_tokens is 5.5"),
    (OWN + "0,10000001,6\n", "line 2: prompt_tokens is 10000001"),
    (OWN + "0,1e999,6\n", "line 2: prompt_tokens is inf"),
    (OWN + "-1,5,6\n", "line 2: arrival_s is -1"),
    (OWN + ",5,6\n", "line 2: arrival_s is empty"),
    (OWN + "0,5,6\n1e12,5,6\n", "line 3: arrival_s is 1e"),
    (OWN + "1e999,5,6\n", "line 2: arrival_s is inf"),
    ("arrival,prompt_tokens,output_tokens\n0,5,6\n", 'column "arrival" is not known, nearest is "arrival_s"'),
    ("arrival_time,prompt_tokens,output_tokens\n0,5,6\n", 'column "arrival_time" is not known, nearest is "arrival_s"'),
    ("prompt_tokens,output_tokens,slo_ttft\n5,6,7\n", 'column "slo_ttft" is not known, nearest is "slo_ttft_ms"'),
    ("prompt_tokens,output_tokens,slo_ttft_ms\n5,6,0\n", "line 2: slo_ttft_ms is 0"),
    ("prompt_tokens,output_tokens,slo_ttft_ms\n5,6,1e300\n", "line 2: slo_ttft_ms is 1e"),
    ("prompt_tokens,output_tokens,slo_tbt_ms,slo_tpot_ms\n5,6,1,1\n", "mean the same"),
    ("prompt_tokens,output_tokens,priority\n5,6,0.5\n", "line 2: priority is 0.5"),
    ("prompt_tokens,output_tokens,priority\n5,6,1e12\n", "line 2: priority is 1e"),
    ("prompt_tokens,output_tokens,max_tokens\n5,6,\n5,6,0\n", "line 3: max_tokens is 0"),
    ("prompt_tokens,output_tokens,abort_s\n5,6,3\n", "abort_s is on the clock of arrival_s"),
    (OWN.replace("\n", ",abort_s\n") + "5,6,7,3\n", "line 2: abort_s is 3, before arrival_s 5"),
    ("prompt_tokens,output_tokens,request_id\n5,6,a\n5,6,b\n5,6,a\n", "line 4: request_id 'a' is already.*line 2"),
    ("prompt_tokens,output_tokens,hash_ids\n5,6,1 x\n", "line 2: hash_ids is '1 x'"),
    ("prompt_tokens,output_tokens,hash_ids\n5,6,1 2\n", "line 2: 2 hash ids for 5 prompt tokens"),
    (AZURE + "yesterday,5,6\n", "line 2: TIMESTAMP is 'yesterday'"),
    (AZURE + f"{STAMP},5,6\n,5,6\n", "line 3: TIMESTAMP is ''"),
    (AZURE + "2024-02-30 10:00:00,5,6\n", "line 2: TIMESTAMP '2024-02-30 10:00:00' is no possible date"),
    (AZURE + f"{STAMP},5,6\n2024-05-12 25:00:00,5,6\n", "line 3: TIMESTAMP '2024-05-12 25:00:00' is no"),
    (AZURE + f"{STAMP}+99:00,5,6\n", "line 2: TIMESTAMP has the impossible zone"),
    (AZURE + f"{STAMP},5,6\n{STAMP}Z,5,6\n", "line 2: TIMESTAMP has no zone"),
    (AZURE + "0001-01-01 00:00:00,5,6\n9999-01-01 00:00:00,5,6\n", "TIMESTAMP is"),
    (AZURE + f"{STAMP},0,6\n", "line 2: ContextTokens is 0"),
    (BURST + "0,GPT-4,-5,6,1,x\n", "line 2: Request tokens is -5"),
    (BURST + ",GPT-4,5,6,1,x\n", "line 2: Timestamp is empty"),
    (jsonl({"timestamp": 0, "input_lenght": 5, "output_length": 6}), 'input_length missing, nearest is "input_lenght"'),
    (jsonl({"timestamp": 0, "input_length": None, "output_length": 6}), "line 1: field input_length missing"),
    (
        jsonl({"timestamp": 0, "input_length": "5", "output_length": 6}),
        "line 1: field input_length: expected number, got str",
    ),
    (jsonl({"timestamp": 0, "input_length": 5, "output_length": 0}), "line 1: output_length is 0"),
    (jsonl({"timestamp": 0, "input_length": 5, "output_length": -1}), "line 1: output_length is -1"),
    (jsonl({"timestamp": 0, "input_length": 10**400, "output_length": 1}), "line 1"),
    (jsonl({"timestamp": 0, "input_length": 5, "output_length": 6}) + "\n[1]\n", "line 3: expected object"),
    ('{"timestamp": NaN, "input_length": 5, "output_length": 6}\n', "line 1"),
    ('{"timestamp": 0, "input_length": 5, "output_length": 6}\n{"timestamp": 1', "line 2, column 16: cut off"),
    ('{"timestamp": 0, "input_length": 5, "out\n{"timestamp": 1}\n', "line 1, column"),
    (jsonl({"timestamp": 0, "input_length": 5, "output_length": 6, "hash_ids": [1, 2]}), "line 1: 2 hash ids"),
    (jsonl({"input_length": 5, "output_length": 6, "request_id": 1}) * 2, "line 2: request_id '1' is already"),
    (jsonl({"input_length": 5, "output_length": 6, "slo_tbt_ms": 1, "slo_tpot_ms": 1}), "mean the same"),
    (jsonl({"input_length": 5, "output_length": 6, "priority": 0.5}), "line 1: priority is 0.5"),
    (jsonl({"input_length": 5, "output_length": 6, "max_tokens": 0}), "line 1: max_tokens is 0"),
    (jsonl({"prompt": "", "output_tokens": 5}), "line 1: field prompt is empty"),
    (jsonl({"promt": "a", "output_tokens": 5}), 'field prompt is missing, nearest is "promt"'),
    (jsonl({"prompt": "a"}), "line 1: field output_tokens missing.*default output length"),
    (jsonl({"prompt": "a", "output_tokens": 0}), "line 1: output_tokens is 0"),
    (jsonl({"Timestamp": 0, "input_length": 5, "output_length": 6}), 'field "Timestamp" is not known, nearest is "ti'),
    (jsonl({"timestamp": -1, "input_length": 5, "output_length": 6}), "line 1: timestamp is -1, expected 0 or more"),
    (jsonl({"input_lens": [1], "output_lens": [1]}) * 2, "holds several results"),
    (
        '[{"input_length": 5, "output_length": 6}]',
        "list of objects with input_length, output_length, expected id, conv",
    ),
    (jsonl({"input_toks": 5, "output_toks": 6}), "no known trace format: fields input_toks, output_toks"),
    (jsonl({"colour": "red"}), "no known trace format: fields colour"),
    ("{}", "no known trace format: fields none"),
    ("[]", "no conversations"),
    ("[1, 2]", "no usable conversation in 2: 2 without messages"),
    ('[{"id": "a"', "line 1, column"),
    ("[" * 100_000, "line 1"),
    ('{"input_lens": [1]}', "no output_lens per request"),
    ('{"duration": 3.0, "completed": 4}', "--save-detailed"),
    ('{"input_lens": [1, 2], "output_lens": [1]}', "output_lens has 1 values, input_lens has 2"),
    ('{"input_lens": [], "output_lens": []}', "input_lens is empty"),
    ('{"input_lens": [true], "output_lens": [1]}', r"input_lens\[0\] is True"),
    ('{"input_lens": [1], "output_lens": [1], "ttfts": [-1]}', r"request 0 \(from 0\): ttfts is -1"),
    ('{"input_lens": [1], "output_lens": [1], "itls": [[0.1, -0.1]]}', r"itls\[0\] holds a negative"),
    ('{"input_lens": [1], "output_lens": [1], "itls": [3]}', r"itls\[0\] is 3"),
    ('{"input_lens": [1], "output_lens": [1], "duration": -1}', "duration is -1"),
]


@pytest.mark.parametrize(("content", "message"), FAULTS, ids=[message[:40] for _, message in FAULTS])
def test_faults_are_named_with_their_place(write, content, message):
    with pytest.raises(InputError, match=message) as caught:
        load_workload(write(content), rate=1.0)
    assert "\n" not in str(caught.value)


def test_no_such_file_and_folder(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        read_trace(tmp_path / "absent.csv")
    with pytest.raises(InputError, match="cannot be read"):
        read_trace(tmp_path)


# ---- what each reader keeps -----------------------------------------------------------------------------------------


def test_unsorted_rows_are_sorted_with_one_note_that_counts_them(write):
    trace = read_trace(write(OWN + "3,10,1\n1,20,1\n2,30,1\n1,40,1\n5,50,1\n"))
    assert trace.num_prompt_tokens.tolist() == [20, 40, 30, 10, 50]
    assert [note for note in trace.notes if "3 of 5 rows are earlier" in note] == list(trace.notes)
    assert len(trace.notes) == 1


def test_epoch_seconds_count_from_the_first_row(write):
    trace = read_trace(write(OWN.replace("\n", ",abort_s\n") + "1715508000.5,5,6,1715508004.5\n1715508001.5,5,6,\n"))
    assert trace.arrival_time.tolist() == [0, 1]
    assert trace.patience.tolist() == [4, math.inf]
    assert any("times count from the first row" in note for note in trace.notes)


def test_equal_rows_are_two_requests(write):
    assert len(read_trace(write(OWN + "0,5,6\n0,5,6\n"))) == 2


def test_own_times_stay_as_given_and_foreign_ones_count_from_the_first(write):
    assert read_trace(write(OWN + "2.5,5,6\n")).arrival_time.tolist() == [2.5]
    stamps = jsonl(*({"timestamp": t, "input_length": 5, "output_length": 6} for t in (1e12, 1e12 + 500)))
    assert read_trace(write(stamps)).arrival_time.tolist() == [0, 0.5]


def test_every_own_column(write):
    header = "arrival_s,prompt_tokens,output_tokens,max_tokens,slo_ttft_ms,slo_tpot_ms,slo_e2el_ms,priority,slo_class"
    header += ",tenant,session_id,request_id,hash_ids,abort_s,colour\n"
    rows = '0.5,600,6,50,250,40,9000,-2,chat,acme,s1,r1,"[7, 8]",4.5,red\n1,5,6,,,,,,,,,,,,\n'
    workload = load_workload(write(header + rows), max_tokens=30)
    assert workload.max_tokens.tolist() == [50, 30]
    assert workload.slo_ttft.tolist() == [0.25, math.inf]
    assert workload.slo_tbt.tolist() == [0.04, math.inf]
    assert workload.slo_e2e.tolist() == [9.0, math.inf]
    assert workload.priority.tolist() == [-2, 0]
    assert [workload.slo_classes[code] for code in workload.slo_class] == ["chat", "default"]
    assert [workload.tenants[code] for code in workload.tenant] == ["acme", "default"]
    assert workload.session.tolist() == [0, -1]
    assert workload.sessions == ("s1",)
    assert workload.hash_ids[0].tolist() == [7, 8]
    assert workload.hash_ids[1].tolist() == [0, 2, 2]
    assert workload.abort_time.tolist() == [4.5, math.inf]
    assert any("not used: column colour" in note for note in workload.notes)


def test_outputs_beyond_the_rows_max_tokens_are_cut_and_counted(write):
    workload = load_workload(write("prompt_tokens,output_tokens,max_tokens\n5,60,50\n5,6,50\n"), rate=1)
    assert workload.num_output_tokens.tolist() == [50, 6]
    assert any("1 of 2 outputs are longer than max_tokens" in note for note in workload.notes)


def test_drop_empty_counts_rows_in_strict_formats(write):
    path = write(AZURE + f"{STAMP},0,6\n{STAMP},5,6\n{STAMP},5,0\n")
    trace = read_trace(path, ReadOptions(drop_empty=True))
    assert len(trace) == 1
    assert any("left out 2 of 3 rows: 2 with 0 tokens" in note for note in trace.notes)


def test_azure_zones_on_both_sides_of_utc(write):
    rows = "2024-05-12 10:00:00-05:30,1,6\n2024-05-12 15:30:01Z,2,6\n2024-05-12T17:30:02+0200,3,6\n"
    assert read_trace(write(AZURE + rows)).arrival_time.tolist() == [0, 1, 2]


def test_mooncake_blocks_and_milliseconds(write):
    records = ({"timestamp": 1500 * i, "input_length": 600, "output_length": 2, "hash_ids": [0, i]} for i in (0, 1, 2))
    trace = read_trace(write(jsonl(*records)))
    assert trace.arrival_time.tolist() == [0, 1.5, 3.0]
    assert trace.hash_block_size == 512
    assert trace.hash_ids[0].tolist() == [0, 0, 0, 1, 0, 2]


def test_timed_trace_is_told_by_its_block_size_or_set(write):
    record = {"timestamp": 2.5, "input_length": 201, "output_length": 2, "hash_ids": list(range(13))}
    path = write(jsonl({**record, "timestamp": 0}, record))
    trace = read_trace(path)
    assert trace.hash_block_size == 16
    assert trace.arrival_time.tolist() == [0, 2.5]
    assert any("timed_trace with time stamps in seconds" in note for note in trace.notes)
    in_ms = read_trace(path, ReadOptions(time_unit="ms", hash_block_size=16))
    assert in_ms.arrival_time.tolist() == [0, 0.0025]
    assert in_ms.hash_block_size == 16
    assert read_trace(path, ReadOptions(format="timed_trace")).arrival_time.tolist() == [0, 2.5]


def test_hash_ids_that_end_before_the_prompt_are_counted(write):
    record = {"timestamp": 0, "input_length": 5000, "output_length": 2, "hash_ids": [1]}
    trace = read_trace(write(jsonl(record)))
    assert any("in 1 rows the hash ids" in note for note in trace.notes)


def test_hash_ids_beyond_64_bits_keep_their_equality(write):
    big = 2**64 - 1
    records = [{"input_length": 600, "output_length": 2, "hash_ids": [big, i]} for i in (1, 2)]
    ids = read_trace(write(jsonl(*records))).hash_ids[0]
    assert ids[0] == ids[2]
    assert ids[1] != ids[3]


def test_milliseconds_that_look_like_seconds_are_pointed_out(write):
    records = [{"timestamp": i / 10, "input_length": 5, "output_length": 2} for i in range(100)]
    assert any("set the time unit to s" in note for note in read_trace(write(jsonl(*records))).notes)


def test_custom_prompts_with_default_output_length(write):
    path = write(jsonl({"prompt": "x" * 41, "output_tokens": 3}, {"prompt": "数学"}))
    trace = read_trace(path, ReadOptions(default_output_tokens=64))
    assert trace.num_prompt_tokens.tolist() == [11, 2]
    assert trace.num_output_tokens.tolist() == [3, 64]
    assert any("1 of 2 prompts state no output length" in note for note in trace.notes)
    assert any("estimated" in note for note in trace.notes)


def test_estimate_counts_ascii_in_fours_and_others_singly():
    assert estimate_tokens(["", "a", "abcd", "abcde", "日本", "ab日本"]).tolist() == [0, 1, 1, 2, 2, 3]


def test_a_tokenizer_that_cannot_be_had_is_an_error(tmp_path):
    with pytest.raises(InputError, match="tokenizer"):
        token_counter(str(tmp_path / "nothing"))


def test_an_installed_tokenizer_is_used(write, monkeypatch):
    class Encoding:
        def __init__(self, text):
            self.ids = text.split()

    class Tokenizer:
        @classmethod
        def from_pretrained(cls, name):
            assert name == "some/model"
            return cls()

        def encode_batch(self, texts, add_special_tokens):
            assert not add_special_tokens
            return [Encoding(text) for text in texts]

    module = type("tokenizers", (), {"Tokenizer": Tokenizer})
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", module)
    trace = read_trace(write(jsonl({"prompt": "a b c", "output_tokens": 1})), ReadOptions(tokenizer="some/model"))
    assert trace.num_prompt_tokens.tolist() == [3]
    assert any("counted by the tokenizer some/model" in note for note in trace.notes)


def chat(*pairs: tuple[str, str | None]) -> str:
    return json.dumps([{"id": "c", "conversations": [{"from": who, "value": text} for who, text in pairs]}])


def test_a_conversation_ends_at_its_first_odd_message(write):
    path = write(chat(("human", "a" * 8), ("gpt", "b" * 4), ("human", "c" * 4), ("gpt", None), ("human", "d")))
    trace = read_trace(path)
    assert trace.num_prompt_tokens.tolist() == [2]
    assert any("1 conversations end early" in note for note in trace.notes)


def test_messages_of_one_speaker_in_a_row_are_one(write):
    path = write(
        chat(("human", "a" * 8), ("human", "b" * 8), ("gpt", "c" * 4), ("gpt", "d" * 4), ("human", "unanswered"))
    )
    trace = read_trace(path)
    assert (trace.num_prompt_tokens.tolist(), trace.num_output_tokens.tolist()) == ([4], [2])


@pytest.mark.parametrize(
    ("pairs", "reason"),
    [
        ([("system", "a")], "without a question first"),
        ([("tool", "a"), ("gpt", "b")], "without a question first"),
        ([("human", "a"), ("tool", "b")], "with an unknown speaker"),
        ([("human", "   "), ("gpt", "b")], "with an empty question"),
        ([("human", "a"), ("gpt", "")], "with an empty answer"),
    ],
)
def test_reasons_to_leave_a_conversation_out(write, pairs, reason):
    with pytest.raises(InputError, match=f"no usable conversation in 1: 1 {reason}"):
        read_trace(write(chat(*pairs)))


def test_bench_result_of_older_versions_has_no_times(write):
    path = write('{"input_lens": [5, 6], "output_lens": [7, 8], "errors": ["", null]}')
    result = read_bench_result(path)
    assert result.start_times is None
    assert result.ttfts is None
    assert result.served.all()
    with pytest.raises(InputError, match="no arrival times"):
        load_workload(path)
    assert len(load_workload(path, rate=1)) == 2


# ---- Parquet --------------------------------------------------------------------------------------------------------


def parquet(path: Path, **columns) -> str:
    pq.write_table(pa.table(columns), path)
    return str(path)


def test_parquet_types_and_faults(tmp_path):
    path = tmp_path / "t.parquet"
    good = parquet(path, prompt_tokens=pa.array([5, 6], pa.uint16()), output_tokens=[7.0, 8.0], tenant=[1, None],
                   hash_ids=[[1], None])  # fmt: skip
    trace = read_trace(good)
    assert trace.num_output_tokens.tolist() == [7, 8]
    assert trace.tenant[0].tolist() == [0, -1]
    assert trace.hash_ids[1].tolist() == [0, 1, 1]
    for message, columns in {
        "row 2: prompt_tokens is empty": {"prompt_tokens": [5, None], "output_tokens": [1, 1]},
        "row 1: prompt_tokens is NaN": {"prompt_tokens": [math.nan, 5.0], "output_tokens": [1, 1]},
        "row 2: output_tokens is 0": {"prompt_tokens": [5, 5], "output_tokens": [1, 0]},
        "column prompt_tokens holds bool": {"prompt_tokens": [True], "output_tokens": [1]},
        "column tenant holds list": {"prompt_tokens": [5], "output_tokens": [1], "tenant": [[1]]},
        "column hash_ids holds list<": {"prompt_tokens": [5], "output_tokens": [1], "hash_ids": [[1.5]]},
        'column "output_tokens" not found': {"prompt_tokens": [5]},
    }.items():
        with pytest.raises(InputError, match=message):
            read_trace(parquet(path, **columns))
    with pytest.raises(InputError, match="no rows"):
        read_trace(parquet(path, prompt_tokens=pa.array([], pa.int64()), output_tokens=pa.array([], pa.int64())))
    with pytest.raises(InputError, match="a Parquet file, not azure"):
        read_trace(path, ReadOptions(format="azure"))


# ---- writers --------------------------------------------------------------------------------------------------------


def rich_workload() -> Workload:
    return Workload(
        arrival_time=np.array([0.0, 0.123456789, 7.25]),
        num_prompt_tokens=np.array([100, 40, 5]),
        num_output_tokens=np.array([7, 8, 9]),
        max_tokens=np.array([64, 64, 9]),
        slo_ttft=np.array([0.25, math.inf, 0.1]),
        slo_tbt=np.array([math.inf, 0.05, 0.05]),
        priority=np.array([0, -1, 3]),
        tenant=np.array([1, 0, 0]),
        tenants=("b", "a"),
        slo_class=np.array([0, 1, 0]),
        slo_classes=("chat", "batch"),
        session=np.array([0, -1, 0]),
        sessions=("s",),
        hash_ids=([3, 4, 5, 6, 7, 8, 9, 3, 4], [0, 7, 9, 9]),
        hash_block_size=16,
        abort_time=np.array([math.inf, 5.0, math.inf]),
    )


def names(workload: Workload, labels: str, codes: str) -> list[str]:
    return [getattr(workload, labels)[code] for code in getattr(workload, codes)]


@pytest.mark.parametrize("suffix", ["csv", "parquet", "jsonl"])
def test_written_traces_read_back(tmp_path, suffix):
    workload = rich_workload()
    if suffix == "jsonl":
        with pytest.raises(InputError, match="cannot hold abort times"):
            write_trace(workload, tmp_path / "t.jsonl")
        workload = Workload(**{**vars(workload), "abort_time": np.full(3, np.inf)})
    path = tmp_path / f"t.{suffix}"
    write_trace(workload, path)
    options = ReadOptions(time_unit="ms", hash_block_size=None if suffix == "parquet" else 16)
    again = load_workload(str(path), options=options)
    for column in ("num_prompt_tokens", "num_output_tokens", "max_tokens", "priority", "session"):
        assert np.array_equal(getattr(again, column), getattr(workload, column)), column
    for column in ("arrival_time", "slo_ttft", "slo_tbt", "slo_e2e", "abort_time"):
        assert getattr(again, column) == pytest.approx(getattr(workload, column), rel=1e-12), column
    assert names(again, "tenants", "tenant") == names(workload, "tenants", "tenant")
    assert names(again, "slo_classes", "slo_class") == names(workload, "slo_classes", "slo_class")
    assert again.hash_ids[0].tolist() == workload.hash_ids[0].tolist()
    assert again.hash_ids[1].tolist() == workload.hash_ids[1].tolist()
    assert again.hash_block_size == 16


def test_a_packaged_trace_survives_mooncake_jsonl(tmp_path):
    workload = load_workload("mooncake-conversation", num_prompts=300)
    write_trace(workload, tmp_path / "t.jsonl")
    again = load_workload(str(tmp_path / "t.jsonl"))
    assert again.arrival_time == pytest.approx(workload.arrival_time)
    assert np.array_equal(again.hash_ids[0], workload.hash_ids[0])
    assert again.hash_block_size == 512


def test_writers_refuse(tmp_path):
    workload = rich_workload()
    with pytest.raises(InputError, match="unknown format to write"):
        write_trace(workload, tmp_path / "t.xlsx")
    with pytest.raises(InputError, match="cannot be written"):
        write_trace(workload, tmp_path / "absent" / "t.csv")
    closed = load_workload("sharegpt", num_prompts=3, arrival="closed:concurrency=2")
    with pytest.raises(InputError, match="closed loop"):
        write_trace(closed, tmp_path / "t.csv")


# ---- packaged traces ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", list_traces(), ids=lambda entry: entry.name)
def test_packaged_traces_are_what_the_registry_says(entry):
    trace = read_trace(entry.name)
    assert len(trace) == entry.rows
    assert (trace.arrival_time is not None) == entry.timed
    assert (trace.num_prompt_tokens > 0).all()
    assert trace.notes == ()
    assert entry.licence
    assert entry.attribution
    assert "https://" in entry.source


def test_packaged_traces_have_the_statistics_of_their_sources():
    code, moon, clients = (load_workload(name) for name in ("azure-code", "mooncake-conversation", "servegen-m-large"))
    gaps = np.diff(code.arrival_time)
    assert gaps.std() / gaps.mean() == pytest.approx(12.6, abs=0.05)
    assert moon.hash_block_size == 512
    assert np.array_equal(np.diff(moon.hash_ids[1]), -(-moon.num_prompt_tokens // 512))
    assert len(clients.tenants) == 20


def test_provenance_stands_beside_the_files():
    folder = resources.files("slacktide.data.traces")
    readme = folder.joinpath("README.md").read_text(encoding="utf-8")
    sizes = 0
    for entry in list_traces():
        assert all(text in readme for text in (entry.name, entry.licence, entry.source, entry.attribution))
        data = entry.read_bytes()
        sizes += len(data)
        metadata = pq.read_schema(pa.BufferReader(data)).metadata
        assert metadata[b"licence"].decode() == entry.licence
    assert sizes < 2.5e6


def test_labels_are_numbered_by_first_appearance_around_empty_cells(write):
    rows = "".join(f"5,6,{label}\n" for label in ("b", "", "a", "b", "", "c"))
    codes, texts = read_trace(write("prompt_tokens,output_tokens,tenant\n" + rows)).tenant
    assert codes.tolist() == [0, -1, 1, 0, -1, 2]
    assert texts == ("b", "a", "c")
