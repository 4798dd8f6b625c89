"""Azure LLM inference traces, 2023, 2024 and 2025: `TIMESTAMP, ContextTokens, GeneratedTokens`, columns by name.

Time stamps come with no, six or seven digits of fraction, and with or without a zone, even in one file
(https://github.com/Azure/AzurePublicDataset, notebook of 2024). Stamps without zone are UTC; both kinds in one file
cannot be compared and are an error. Times are kept to the microsecond, the finest unit all three years share.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import numpy as np

from slacktide.core.types import FloatArray, IntArray
from slacktide.errors import InputError
from slacktide.workload.formats.base import ReadOptions, Trace, drop_rows, first_bad, shown, sort_by_time
from slacktide.workload.formats.columns import Columns
from slacktide.workload.formats.own import read_lengths
from slacktide.workload.requests import MAX_SECONDS

REQUIRED = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

STAMP = (
    r"^\s*(?P<day>[0-9]{4}-[0-9]{2}-[0-9]{2})[ T](?P<clock>[0-9]{2}:[0-9]{2}:[0-9]{2})"
    r"(?:[.,](?P<fraction>[0-9]{1,9}))?[ ]?(?P<zone>[Zz]|UTC|GMT|[+-][0-9]{2}(?::?[0-9]{2})?)?\s*$"
)
EXAMPLE = "2024-05-12 10:00:00.250000+00:00"


def read_azure(columns: Columns, options: ReadOptions) -> Trace:
    """Azure CSV -> Trace with times from the first request on. Raises InputError naming line and column."""
    prompts, outputs, empty = read_lengths(columns, "ContextTokens", "GeneratedTokens", drop=options.drop_empty)
    seconds = _seconds(columns)
    trace = Trace(
        name=columns.path,
        num_prompt_tokens=prompts,
        num_output_tokens=outputs,
        arrival_time=seconds,
        format="azure",
        notes=columns.unused_note(),
    )
    return sort_by_time(drop_rows(trace, {"with 0 tokens": empty}), from_first=True)


def _seconds(columns: Columns) -> FloatArray:
    """Seconds from the earliest stamp on, rounded to microseconds."""
    import pyarrow as pa
    import pyarrow.compute as pc

    columns.used.add("TIMESTAMP")
    column = columns.table.column("TIMESTAMP").combine_chunks()
    parts = pc.extract_regex(column, STAMP)
    if parts.null_count:
        row = int(np.argmin(parts.is_valid().to_numpy(zero_copy_only=False)))
        raise InputError(
            f"{columns.locate(row)}: TIMESTAMP is {shown(column[row].as_py())}, expected a time such as {EXAMPLE}"
        )
    texts = pc.binary_join_element_wise(parts.field("day"), parts.field("clock"), " ")
    try:
        whole = texts.cast(pa.timestamp("s")).cast(pa.int64()).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid:
        raise _impossible_date(columns, texts.to_pylist()) from None
    fraction = pc.utf8_rpad(parts.field("fraction"), 9, "0").cast(pa.int64()).to_numpy(zero_copy_only=False)
    micros = whole * 1_000_000 + (fraction + 500) // 1000 - _offsets(columns, parts.field("zone"))
    seconds = np.asarray((micros - micros.min()) / 1e6, dtype=np.float64)
    far = first_bad(seconds <= MAX_SECONDS)
    if far is not None:
        raise InputError(
            f"{columns.locate(far)}: TIMESTAMP is {column[far].as_py()!r}, {seconds[far]:.3g} s after the earliest"
            f" ({column[int(np.argmin(micros))].as_py()!r}), expected at most {MAX_SECONDS:g} s; correct the wrong one"
        )
    return seconds


def _offsets(columns: Columns, zones: Any) -> IntArray:
    """Offset of each stamp's zone from UTC in microseconds; InputError when only some stamps have one."""
    encoded = zones.dictionary_encode()
    texts = encoded.dictionary.to_pylist()
    codes = np.asarray(encoded.indices.to_numpy(zero_copy_only=False), dtype=np.int64)
    if "" in texts and len(texts) > 1:
        row = int(np.argmax(codes == texts.index("")))
        raise InputError(
            f"{columns.locate(row)}: TIMESTAMP has no zone while others in the file have one; write all"
            " with a zone (+00:00) or all without"
        )
    minutes = []
    for code, text in enumerate(texts):
        digits = "" if text in ("Z", "z", "UTC", "GMT") else text.replace(":", "")
        hour, minute = (int(digits[1:3]), int(digits[3:5] or 0)) if digits else (0, 0)
        if hour > 23 or minute > 59:
            row = int(np.argmax(codes == code))
            raise InputError(f"{columns.locate(row)}: TIMESTAMP has the impossible zone {text}")
        minutes.append((hour * 60 + minute) * (-1 if digits.startswith("-") else 1))
    return np.array(minutes, dtype=np.int64)[codes] * 60_000_000


def _impossible_date(columns: Columns, texts: list[str]) -> InputError:
    """The error for the first stamp that looks right and is no date, such as 2024-02-30 or 24:00:00."""
    for row, text in enumerate(texts):
        try:
            datetime.strptime(text, "%Y-%m-%d %H:%M:%S")
        except ValueError:
            return InputError(f"{columns.locate(row)}: TIMESTAMP {text!r} is no possible date and time")
    return InputError(f"{columns.path}: TIMESTAMP holds an impossible date")
