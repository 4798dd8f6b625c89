"""Whatever bytes a file holds, a reader gives a workload that keeps the invariants, or one InputError. Nothing else."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slacktide.errors import InputError
from slacktide.workload import ReadOptions, Workload, load_workload, parse_arrival, parse_slos
from slacktide.workload.formats.detect import FORMATS, parse_trace
from slacktide.workload.traces import read_trace, write_trace

CASES = Path(__file__).parents[1] / "cases"

OWN = (
    b"arrival_s,prompt_tokens,output_tokens,slo_ttft_ms,priority,tenant,session_id,request_id,hash_ids,max_tokens,abort_s\n"
    b"0,600,5,500,0,a,s,x,1 2,9,\n1.5,20,7,,1,b,,y,,,4\n"
)
EXTENDED = (
    b'{"timestamp": 5, "input_length": 700, "output_length": 3, "hash_ids": [1, 2], "slo_tpot_ms": 40, "tenant": 4}\n'
)
CUSTOM = b'{"prompt": "hello world", "output_tokens": 5}\n{"prompt": "\\u6570", "output_tokens": 1}\n'


def _parquet() -> bytes:
    workload = load_workload("synthetic:prompt=uniform:10:600,output=5,n=20", rate=3)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.parquet"
        write_trace(workload, path)
        return path.read_bytes()


VALID = [file.read_bytes() for file in sorted(CASES.glob("*/*")) if file.suffix in (".csv", ".json", ".jsonl")]
VALID += [OWN, EXTENDED, CUSTOM, _parquet()]

TOKENS = [b"nan", b"-1", b"0", b"1e999", b"", b",", b"\n", b"\r", b'"', b"{", b"[", b"]", b"null", b"\xff", b"\0",
          b"9" * 30, b"2024-13-01", b"1_0", b"true", b'{"a":1}', b"-0.0", "\u0661".encode(), b"\\ud800"]  # fmt: skip


def outcome(data: bytes, options: ReadOptions | None = None) -> Workload | None:
    """What the reader made of it; checks the invariants of a workload and the form of an error."""
    message = ""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        path.write_bytes(data)
        try:
            workload = load_workload(str(path), rate=2.0, options=options)
        except InputError as error:
            message = str(error)
    if message:
        assert "\n" not in message
        return None
    n = len(workload)
    assert n > 0
    assert (np.diff(workload.arrival_time) >= 0).all()
    assert np.isfinite(workload.arrival_time).all()
    for column in (workload.num_prompt_tokens, workload.num_output_tokens, workload.max_tokens):
        assert column.dtype == np.int64
        assert ((column >= 1) & (column <= 10_000_000)).all()
    assert (workload.num_output_tokens <= workload.max_tokens).all()
    for column in (workload.slo_ttft, workload.slo_tbt, workload.slo_e2e):
        assert (column > 0).all()
    return workload


def test_every_seed_of_the_fuzzer_is_read_or_refused():
    read = [outcome(data) is not None for data in VALID]
    assert sum(read) >= 10


@settings(max_examples=150)
@given(st.binary(max_size=400))
def test_arbitrary_bytes(data):
    outcome(data)


@settings(max_examples=100)
@given(st.text(max_size=300), st.sampled_from(FORMATS))
def test_arbitrary_text_under_every_explicit_format(text, name):
    outcome(text.encode("utf-8", "surrogatepass"), ReadOptions(format=name))


@st.composite
def mutated(draw) -> bytes:
    """A valid file with a few places cut, doubled or overwritten by troublesome tokens."""
    data = draw(st.sampled_from(VALID))
    for _ in range(draw(st.integers(1, 4))):
        first = draw(st.integers(0, len(data)))
        last = min(len(data), first + draw(st.integers(0, 12)))
        patch = draw(st.one_of(st.sampled_from(TOKENS), st.binary(max_size=3), st.just(data[first:last] * 2)))
        data = data[:first] + patch + data[last:]
    return data[: draw(st.one_of(st.just(len(data)), st.integers(0, len(data))))]


@settings(max_examples=400)
@given(mutated())
def test_mutated_valid_files(data):
    outcome(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ["timestamp", "input_length", "output_length", "hash_ids", "prompt", "output_tokens", "conversations", "from",
          "value", "input_lens", "output_lens", "ttfts", "itls", "errors", "start_times", "duration", "completed",
          "slo_ttft_ms", "priority", "tenant", "request_id", "max_tokens"]  # fmt: skip


@settings(max_examples=250)
@given(st.lists(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6), min_size=1, max_size=3), st.booleans())
def test_json_of_any_shape(objects, as_list):
    text = json.dumps(objects) if as_list else "\n".join(map(json.dumps, objects))
    outcome(text.encode())


@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["human", "gpt", "system", "user", "tool", "", None, 3]), st.text(max_size=6) | st.none()
        ),
        max_size=8,
    )
)
def test_conversations_of_any_order(messages):
    record = [{"id": 1, "conversations": [{"from": who, "value": text} for who, text in messages]}]
    workload = outcome(json.dumps(record).encode())
    if workload is not None:
        assert (np.diff(workload.num_prompt_tokens) > 0).all()


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 1e6), st.integers(1, 10_000_000), st.integers(1, 10_000_000), st.floats(0.001, 1e8) | st.none()
        ),
        min_size=1,
        max_size=20,
    )
)
def test_csv_and_parquet_round_trips(rows):
    times, prompts, outputs, slos = (list(column) for column in zip(*rows, strict=True))
    workload = Workload(
        np.array(times), np.array(prompts), np.array(outputs),
        slo_ttft=np.array([np.inf if slo is None else slo * 1e-3 for slo in slos]),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for suffix in ("csv", "parquet"):
            path = Path(folder) / f"t.{suffix}"
            write_trace(workload, path)
            trace = read_trace(path)
            assert np.array_equal(trace.arrival_time, workload.arrival_time)
            assert np.array_equal(trace.num_prompt_tokens, workload.num_prompt_tokens)
            assert np.array_equal(trace.num_output_tokens, workload.num_output_tokens)
            again = load_workload(str(path))
            assert np.allclose(again.slo_ttft, workload.slo_ttft, rtol=1e-12)


@settings(max_examples=300)
@given(st.one_of(st.text(max_size=40), st.text("ttfbe2lx:,;= .0159-ms", max_size=30)))
def test_specifications_of_any_text(text):
    for parse in (parse_slos, parse_arrival):
        with contextlib.suppress(InputError):
            assert parse(text) == parse(f" {text} ")


@settings(max_examples=150)
@given(st.text("promtuenilga=,:*+0159. sharegptmix", max_size=40))
def test_generated_workloads_of_any_text(text):
    for prefix in ("synthetic:", "mix:"):
        try:
            workload = load_workload(prefix + text, rate=1.0, num_prompts=5)
        except InputError:
            continue
        assert len(workload) == 5


@pytest.mark.parametrize("data", VALID)
def test_every_cut_of_a_small_file_is_read_or_refused(data):
    for end in range(0, min(len(data), 600), 7):
        try:
            trace = parse_trace("f", data[:end] or b"\n", ReadOptions())
        except InputError:
            continue
        assert len(trace) > 0
