"""Our own format: one row a request, as CSV or Parquet.

| column | meaning |
|---|---|
| `prompt_tokens`, `output_tokens` | needed; whole numbers from 1 on |
| `arrival_s` | seconds from the start of the run, or epoch seconds; without it the file has no times |
| `max_tokens` | the client's limit on output tokens |
| `slo_ttft_ms`, `slo_tbt_ms` (or `slo_tpot_ms`), `slo_e2el_ms` | targets; an empty cell leaves the run's SLO in force |
| `priority` | whole number, lower first |
| `slo_class`, `tenant`, `session_id`, `request_id` | text; request ids must be unique |
| `hash_ids` | ids of prefix blocks: a list, in CSV `1 2 3` |
| `abort_s` | when the client gives up, on the clock of `arrival_s` |
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from slacktide.core.types import FloatArray, IntArray
from slacktide.errors import InputError
from slacktide.workload.formats.base import (
    Labels,
    ReadOptions,
    Trace,
    check_hash_counts,
    check_seconds,
    check_slo_ms,
    check_tokens,
    check_unique,
    drop_rows,
    first_bad,
    infer_block_size,
    sort_by_time,
)
from slacktide.workload.formats.columns import Columns
from slacktide.workload.specs import misspelt

REQUIRED = ("prompt_tokens", "output_tokens")
OPTIONAL = ("arrival_s", "max_tokens", "slo_ttft_ms", "slo_tbt_ms", "slo_tpot_ms", "slo_e2el_ms", "priority",
            "slo_class", "tenant", "session_id", "request_id", "hash_ids", "abort_s")  # fmt: skip

BLOCK_SIZE_KEY = b"hash_block_size"
"""Key in the Parquet schema's metadata for the tokens behind one hash id."""

LATEST_START = 1e8
"""Seconds; a first arrival after three years is a date (epoch seconds), not an idle server."""

LATEST_DATE = 1e11
"""Epoch seconds of the year 5138; a later start is a date in milliseconds, microseconds or nanoseconds."""

MAX_PRIORITY = 2**31 - 1
"""vLLM's priority is a 32-bit number in practice; more would overflow sort keys."""


def read_own(columns: Columns, options: ReadOptions) -> Trace:
    """Our CSV or Parquet -> Trace. Raises InputError naming line and column of the first bad cell."""
    columns.require(REQUIRED)
    locate = columns.locate
    absent = [name for name in OPTIONAL if name not in columns]
    for name in columns.names:
        meant = None if name in OPTIONAL else misspelt(name, absent)
        if meant is not None:
            raise InputError(f'{columns.path}: column "{name}" is not known, nearest is "{meant}"; rename or delete it')
    prompts, outputs, empty = read_lengths(columns, *REQUIRED, drop=options.drop_empty)
    arrival, notes = _arrival(columns)
    trace = Trace(
        name=columns.path,
        num_prompt_tokens=prompts,
        num_output_tokens=outputs,
        arrival_time=arrival,
        max_tokens=_max_tokens(columns),
        slo_ttft=_slo(columns, "slo_ttft_ms"),
        slo_tbt=_slo(columns, "slo_tbt_ms", "slo_tpot_ms"),
        slo_e2e=_slo(columns, "slo_e2el_ms"),
        priority=_priority(columns),
        slo_class=_labels(columns, "slo_class"),
        tenant=_labels(columns, "tenant"),
        session=_labels(columns, "session_id"),
        patience=_patience(columns),
        format="slacktide",
    )
    if "request_id" in columns:
        codes, texts = columns.labels("request_id")
        if len(texts) < int((codes >= 0).sum()):
            check_unique([texts[code] if code >= 0 else None for code in codes], "request_id", locate)
    if "hash_ids" in columns:
        ids = columns.id_lists("hash_ids")
        stated = columns.metadata.get(BLOCK_SIZE_KEY, b"")
        given = int(stated) if stated.isdigit() and len(stated) < 9 and int(stated) else None
        size = infer_block_size(prompts, np.diff(ids[1]), options.hash_block_size or given)
        trace = check_hash_counts(replace(trace, hash_ids=ids, hash_block_size=size), locate)
    trace = replace(trace, notes=trace.notes + notes + columns.unused_note())
    return sort_by_time(drop_rows(trace, {"with 0 tokens": empty}), from_first=False)


def read_lengths(columns: Columns, prompt: str, output: str, drop: bool) -> tuple[IntArray, IntArray, np.ndarray]:
    """Prompt and output tokens as i8, and a mask of the rows with 0 tokens (all False unless `drop`)."""
    prompts, outputs = columns.numbers(prompt), columns.numbers(output)
    lowest = 0 if drop else 1
    empty = ((prompts == 0) | (outputs == 0)) if drop else np.zeros(len(prompts), dtype=np.bool_)
    checked = (
        check_tokens(prompts, prompt, columns.locate, lowest),
        check_tokens(outputs, output, columns.locate, lowest),
    )
    return *checked, empty


def _slo(columns: Columns, *names: str) -> FloatArray | None:
    """An SLO column under any of its names, in seconds; InputError when two of them are there."""
    present = [name for name in names if name in columns]
    if len(present) > 1:
        raise InputError(f"{columns.path}: columns {' and '.join(present)} mean the same; keep one")
    if not present:
        return None
    return check_slo_ms(columns.numbers(present[0], empty_ok=True), present[0], columns.locate)


def _labels(columns: Columns, name: str) -> Labels | None:
    return columns.labels(name) if name in columns else None


def _max_tokens(columns: Columns) -> IntArray | None:
    if "max_tokens" not in columns:
        return None
    values = columns.numbers("max_tokens", empty_ok=True)
    stated = ~np.isnan(values)
    check_tokens(np.where(stated, values, 1), "max_tokens", columns.locate)
    return np.where(stated, values, 0).astype(np.int64)


def _priority(columns: Columns) -> IntArray | None:
    if "priority" not in columns:
        return None
    values = np.nan_to_num(columns.numbers("priority", empty_ok=True), nan=0.0)
    row = first_bad((np.abs(values) <= MAX_PRIORITY) & (values == np.floor(values)))
    if row is not None:
        raise InputError(f"{columns.locate(row)}: priority is {values[row]:g}, expected a whole number of 32 bits")
    return values.astype(np.int64)


def _arrival(columns: Columns) -> tuple[FloatArray | None, tuple[str, ...]]:
    """Arrival times as given, or from the first one on when that lies days away (epoch seconds), with a note."""
    if "arrival_s" not in columns:
        return None, ()
    times = columns.numbers("arrival_s")
    row = first_bad(np.isfinite(times) & (times >= 0))
    if row is not None:
        raise InputError(f"{columns.locate(row)}: arrival_s is {times[row]:g}, expected seconds from 0 on")
    start = float(times.min())
    notes: tuple[str, ...] = ()
    if start > LATEST_DATE:
        raise InputError(
            f"{columns.path}: arrival_s begins at {start:.6g}: seconds expected, these look like milliseconds or finer;"
            " divide the column"
        )
    if start > LATEST_START:
        times, notes = times - start, (f"{columns.path}: times count from the first row, arrival_s {start:.6f}",)
    return check_seconds(times, "arrival_s", columns.locate), notes


def _patience(columns: Columns) -> FloatArray | None:
    """Seconds from arrival to abort; infinity for empty cells."""
    if "abort_s" not in columns:
        return None
    if "arrival_s" not in columns:
        raise InputError(f"{columns.path}: abort_s is on the clock of arrival_s, and there is no column arrival_s")
    arrival = columns.numbers("arrival_s")
    abort = np.nan_to_num(columns.numbers("abort_s", empty_ok=True), nan=np.inf)
    row = first_bad(abort >= arrival)
    if row is not None:
        raise InputError(
            f"{columns.locate(row)}: abort_s is {abort[row]:g}, before arrival_s {arrival[row]:g};"
            " both count from the start of the run"
        )
    return np.asarray(abort - arrival, dtype=np.float64)


def looks_own(names: list[str]) -> bool:
    """True when both needed columns are there."""
    return all(name in names for name in REQUIRED)


def block_size_metadata(size: int) -> dict[bytes, bytes]:
    """Parquet schema metadata that states the hash block size."""
    return {BLOCK_SIZE_KEY: str(size).encode()}
