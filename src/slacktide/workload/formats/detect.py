"""Which format a file has, told from its content alone (a suffix may lie), and the reader for it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass

from slacktide.errors import InputError, unknown_name
from slacktide.workload.formats import azure, burstgpt, own
from slacktide.workload.formats.base import ReadOptions, Trace
from slacktide.workload.formats.bench import read_bench
from slacktide.workload.formats.columns import Columns, csv_columns, parquet_columns
from slacktide.workload.formats.jsonl import read_custom, read_mooncake
from slacktide.workload.formats.jsontext import decode
from slacktide.workload.formats.sharegpt import read_sharegpt


@dataclass(frozen=True, slots=True)
class _TableFormat:
    """A CSV format, known by its columns."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    read: Callable[[Columns, ReadOptions], Trace]


_TABLES = {
    "azure": _TableFormat(azure.REQUIRED, (), azure.read_azure),
    "burstgpt": _TableFormat(burstgpt.REQUIRED, burstgpt.OPTIONAL, burstgpt.read_burstgpt),
    "slacktide": _TableFormat(own.REQUIRED, own.OPTIONAL, own.read_own),
}

_JSON = {
    "mooncake": (("input_length", "output_length"), read_mooncake),
    "timed_trace": (("input_length", "output_length"), read_mooncake),
    "custom": (("prompt",), read_custom),
    "sharegpt": (("conversations",), read_sharegpt),
    "vllm-bench": (("input_lens", "output_lens"), read_bench),
}
"""JSON formats: the keys they need, and the reader. `timed_trace` comes second: detection says mooncake."""

FORMATS = (*_TABLES, *_JSON)
"""Names of all formats, for `ReadOptions.format`."""

NEAR = 0.75
"""Least similarity (difflib ratio) of a name taken for a misspelt one."""


def parse_trace(path: str, data: bytes, options: ReadOptions) -> Trace:
    """`data` in the format of the options, else the detected one. Raises InputError."""
    if options.format is not None and options.format not in FORMATS:
        raise unknown_name("trace format", options.format, FORMATS)
    if data[:4] == b"PAR1":
        if options.format not in (None, "slacktide"):
            raise InputError(f"{path}: a Parquet file, not {options.format}")
        return own.read_own(_canonical(parquet_columns(path, data), _TABLES["slacktide"]), options)
    if b"\0" in data[:4096] or data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise InputError(f"{path}: neither Parquet nor UTF-8 text; convert it (UTF-16 to UTF-8, or unpack it)")
    data = data.removeprefix(b"\xef\xbb\xbf")
    start = data.lstrip()[:1]
    if options.format in _JSON or (options.format is None and start in (b"{", b"[")):
        name = options.format or _detect_json(path, data)
        return _JSON[name][1](path, data, options)
    return _read_table(path, data, options)


def _read_table(path: str, data: bytes, options: ReadOptions) -> Trace:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}: line {line}: no UTF-8 text at byte {error.start + 1}; convert the file") from None
    columns = csv_columns(path, text)
    table = _TABLES[options.format] if options.format in _TABLES else _table_of(columns)
    columns = _canonical(columns, table)
    columns.require(table.required)
    if not len(columns):
        raise InputError(f"{path}: no rows below the header")
    return table.read(columns, options)


def _canonical(columns: Columns, table: _TableFormat) -> Columns:
    """Column names in the format's own spelling where they differ in case alone."""
    spelling = {name.casefold(): name for name in (*table.required, *table.optional)}
    columns.rename([spelling.get(name.casefold(), name) for name in columns.names])
    return columns


def _table_of(columns: Columns) -> _TableFormat:
    """The CSV format whose needed columns are there; else InputError on the nearest format's first missing one."""
    names = {name.casefold() for name in columns.names}
    for table in _TABLES.values():
        if all(name.casefold() in names for name in table.required):
            return table
    scores = {
        key: sum(_likeness(name, names) for name in table.required) / len(table.required)
        for key, table in _TABLES.items()
    }
    best = max(scores, key=lambda key: scores[key])
    if scores[best] >= 0.5:  # half of what the format needs is there: say what is missing
        _canonical(columns, _TABLES[best]).require(_TABLES[best].required)
    known = "; ".join(f"{key}: {', '.join(table.required)}" for key, table in _TABLES.items())
    found = ", ".join(columns.names)[:120]
    raise InputError(
        f"{columns.path}: no known trace format: the first line is {found!r}, expected a header with the"
        f" columns of one of {known}; or JSON ({', '.join(_JSON)})"
    )


def _likeness(name: str, names: set[str]) -> float:
    """Similarity of the nearest of `names` to `name` (1 = the same), 0 below NEAR."""
    ratios = [difflib.SequenceMatcher(None, name.casefold(), other).ratio() for other in names]
    best = max(ratios, default=0.0)
    return best if best >= NEAR else 0.0


def _detect_json(path: str, data: bytes) -> str:
    """Name of the JSON format, from the keys of the first object."""
    if data.lstrip()[:1] == b"[":
        return "sharegpt"
    body = data.lstrip()
    first_line = len(data[: len(data) - len(body)].splitlines()) + 1
    line, *more = re.split(rb"[\r\n]+", body, maxsplit=1)
    several = bool(more) and more[0].lstrip()[:1] == b"{"
    spread = False
    try:
        first = decode(path, line, first_line)
    except InputError:
        if several:  # a second object: JSON lines whose first line is broken
            raise
        first, spread = decode(path, data), True
    keys = {name.casefold() for name in first} if isinstance(first, dict) else set()
    scores = {name: sum(_likeness(key, keys) for key in needed) / len(needed) for name, (needed, _) in _JSON.items()}
    totals = {"duration", "completed"} <= keys or {"input_lens", "output_lens"} <= keys
    if (several or "timestamp" in keys) and not totals:
        scores["vllm-bench"] = 0.0  # it is one object for the whole run
    best = max(scores, key=lambda name: scores[name])
    if {"duration", "completed"} <= keys:
        best = "vllm-bench"  # without --save-detailed it has none of the needed keys: its reader says so
    elif scores[best] < 0.5:  # half of what the format needs is there: its reader says what is missing
        known = "; ".join(f"{name}: {', '.join(needed)}" for name, (needed, _) in _JSON.items())
        found = ", ".join(first)[:120] if keys else "none"
        raise InputError(
            f"{path}: line {first_line}: no known trace format: fields {found}; expected those of one of {known}"
        )
    if best == "vllm-bench" and several:
        raise InputError(f"{path}: holds several results; split the file into one for each run")
    if best != "vllm-bench" and spread:
        raise InputError(f"{path}: one object over several lines, expected one object a line (JSONL); try jq -c .")
    return best
