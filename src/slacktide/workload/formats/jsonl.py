"""JSON lines, one request a line: Mooncake, vLLM's `timed_trace` (the same fields), and vLLM's custom prompts.

Mooncake: `timestamp` (ms), `input_length`, `output_length`, `hash_ids` (512 tokens each). `timed_trace` differs in
defaults only: time stamps in seconds and 16 tokens a hash id (`--timed-trace-sec-multiplier`,
`--timed-trace-chunk-hash-size`). Which of the two a file is shows in the number of hash ids. Our extension fields
(`slo_ttft_ms`, `priority`, ...) are read from every line.
https://github.com/kvcache-ai/Mooncake/tree/main/FAST25-release
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from slacktide.core.types import FloatArray, IntArray
from slacktide.errors import InputError
from slacktide.workload.formats.base import (
    TIME_UNITS,
    Labels,
    ReadOptions,
    Trace,
    check_hash_counts,
    check_seconds,
    check_slo_ms,
    check_tokens,
    check_unique,
    drop_rows,
    encode_labels,
    first_bad,
    infer_block_size,
    sort_by_time,
)
from slacktide.workload.formats.jsontext import decode, repeated_key
from slacktide.workload.specs import misspelt, suggest
from slacktide.workload.tokens import token_counter

TIMED_TRACE_BLOCK_SIZE = 16
"""vLLM's default for --timed-trace-chunk-hash-size."""

FAST_REQUESTS_PER_SECOND = 10_000.0
"""Mean rate from which milliseconds look mistaken for another unit: no single deployment sees it."""

FIRST_DATE, LAST_DATE = 946_684_800.0, 4_102_444_800.0
"""Epoch seconds of 2000 and 2100: no replay begins so long after its own zero unless its time stamps are dates."""

Number = int | float | None


@cache
def _record_type(lengths: tuple[str, ...], text: str | None) -> Any:
    """msgspec struct of one line: the format's own fields and our extensions; other fields are ignored."""
    import msgspec

    fields: list[tuple[str, Any, Any]] = [(name, Number, None) for name in lengths]
    fields += [
        (name, Number, None)
        for name in ("timestamp", "max_tokens", "priority", "slo_ttft_ms", "slo_tbt_ms", "slo_tpot_ms", "slo_e2el_ms")
    ]
    fields += [(name, str | int | None, None) for name in ("slo_class", "tenant", "session_id", "request_id")]
    fields += [("hash_ids", list[int] | None, None)] if text is None else [(text, str | None, None)]
    return msgspec.defstruct("Record", fields, gc=False)


class _Lines:
    """The records of a JSONL file with their line numbers."""

    def __init__(self, path: str, data: bytes, record: Any, needed: tuple[str, ...]) -> None:
        import msgspec

        self.path = path
        self.records: list[Any] = []
        self.lines: list[int] = []
        decoder = msgspec.json.Decoder(record)
        for number, line in enumerate(data.splitlines(), 1):
            if not line.strip():
                continue
            try:
                self.records.append(decoder.decode(line))
            except (ValueError, RecursionError):
                decode(path, line, number, record)  # raises with the position
                raise InputError(f"{path}: line {number}: not a readable JSON object") from None
            self.lines.append(number)
        if not self.records:
            raise InputError(f"{path}: no rows")
        self._refuse_repeats(data, record.__struct_fields__)
        first = decode(path, data.splitlines()[self.lines[0] - 1], self.lines[0])
        extra = [name for name in first if name not in record.__struct_fields__]
        absent = [name for name in record.__struct_fields__ if name not in first and name not in needed]
        for name in extra:
            meant = misspelt(name, absent)
            if meant is not None:
                where = f"{path}: line {self.lines[0]}"
                raise InputError(f'{where}: field "{name}" is not known, nearest is "{meant}"; rename or delete it')
        self.notes: tuple[str, ...] = (f"{path}: not used: field {', '.join(extra)}",) if extra else ()
        self.names: list[str] = list(first)
        self._fields = set(record.__struct_fields__)

    def _refuse_repeats(self, data: bytes, fields: tuple[str, ...]) -> None:
        """A field that stands twice in a line has two values. Lines are looked at only if there are too many names."""
        if all(data.count(b'"%s"' % name.encode()) <= len(self.records) for name in fields):
            return
        for number, line in enumerate(data.splitlines(), 1):
            name = repeated_key(line)
            if name is not None:
                raise InputError(f"{self.path}: line {number}: field {name} stands there twice; keep one")

    def locate(self, row: int) -> str:
        return f"{self.path}: line {self.lines[row]}"

    def values(self, name: str) -> list[Any]:
        return [getattr(record, name) for record in self.records]

    def missing(self, values: Sequence[Any]) -> int | None:
        """Number of the first row without the value, or None."""
        return next((row for row, value in enumerate(values) if value is None), None)

    def numbers(self, name: str) -> FloatArray:
        """f8 values of a needed field; InputError names the first line without it."""
        values = self.values(name)
        row = self.missing(values)
        if row is not None:
            near = suggest(name, [n for n in self.names if n not in self._fields])
            raise InputError(f"{self.locate(row)}: field {name} missing{near}; add it or delete the line")
        return self._floats(name, values)

    def optional(self, name: str, empty: float = np.nan) -> FloatArray | None:
        """f8 values with `empty` for absent ones; None when no line has the field."""
        values = self.values(name)
        if all(value is None for value in values):
            return None
        return self._floats(name, [empty if value is None else value for value in values])

    def _floats(self, name: str, values: list[Any]) -> FloatArray:
        try:
            return np.array(values, dtype=np.float64)
        except OverflowError:  # an integer beyond the float range
            row = next(i for i, value in enumerate(values) if abs(value) > 1e300)
            raise InputError(f"{self.locate(row)}: field {name} is far too large") from None

    def labels(self, name: str) -> Labels | None:
        """A text field, or None when no line has it."""
        values = self.values(name)
        if all(value is None for value in values):
            return None
        return encode_labels(None if value is None else str(value) for value in values)


def read_mooncake(path: str, data: bytes, options: ReadOptions) -> Trace:
    """Mooncake or timed_trace JSONL -> Trace. Raises InputError naming the line and field of the first fault."""
    needed = ("input_length", "output_length")
    lines = _Lines(path, data, _record_type(needed, None), needed)
    lowest = 0 if options.drop_empty else 1
    prompts = check_tokens(lines.numbers("input_length"), "input_length", lines.locate, lowest)
    outputs = check_tokens(lines.numbers("output_length"), "output_length", lines.locate, lowest)
    trace = Trace(name=path, num_prompt_tokens=prompts, num_output_tokens=outputs, notes=lines.notes, format="mooncake")
    trace = _extend(trace, lines)
    lists = lines.values("hash_ids")
    size = options.hash_block_size
    if any(lists):
        counts = np.array([len(ids or ()) for ids in lists], dtype=np.int64)
        if options.format == "timed_trace" and size is None:
            size = TIMED_TRACE_BLOCK_SIZE
        size = infer_block_size(prompts, counts, size)
        offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        trace = replace(trace, hash_ids=(_hash_values(lists), offsets), hash_block_size=size)
        trace = check_hash_counts(trace, lines.locate)
    timed_trace = options.format == "timed_trace" or (options.format is None and size == TIMED_TRACE_BLOCK_SIZE)
    trace = _with_times(trace, lines, options.time_unit, "s" if timed_trace else "ms")
    empty = (prompts == 0) | (outputs == 0)
    return sort_by_time(drop_rows(trace, {"with 0 tokens": empty}), from_first=True)


def _hash_values(lists: list[list[int] | None]) -> IntArray:
    """All ids in a row; ids beyond 64 bits are replaced by their rank of appearance (only equality matters)."""
    flat = [value for ids in lists for value in ids or ()]
    try:
        return np.array(flat, dtype=np.int64)
    except OverflowError:
        table: dict[int, int] = {}
        return np.array([table.setdefault(value, len(table)) for value in flat], dtype=np.int64)


def _with_times(trace: Trace, lines: _Lines, unit: str | None, assumed: str) -> Trace:
    """Times from `timestamp`: all lines have one, or none has; a gap in between is an error, never filled."""
    values = lines.values("timestamp")
    if all(value is None for value in values):
        return trace
    stamps = lines.numbers("timestamp")
    row = first_bad(stamps >= 0)
    if row is not None:
        raise InputError(f"{lines.locate(row)}: timestamp is {stamps[row]:g}, expected 0 or more")
    origin = float(stamps.min())
    if unit is None:
        _refuse_dates(lines, origin, assumed)
    seconds = check_seconds((stamps - origin) * TIME_UNITS[unit or assumed], "timestamp", lines.locate)
    notes = trace.notes
    if unit is None and assumed == "s":
        notes += (f"{trace.name}: 16 tokens a hash id, so read as vLLM timed_trace with time stamps in seconds",)
    elif unit is None and len(trace) > 1 and len(trace) > FAST_REQUESTS_PER_SECOND * float(seconds.max()) > 0:
        notes += (
            f"{trace.name}: time stamps read as milliseconds give {len(trace) / seconds.max():.0f} requests/s;"
            " if they are seconds, set the time unit to s (--read time_unit=s)",
        )
    return replace(trace, arrival_time=seconds, notes=notes)


def _refuse_dates(lines: _Lines, origin: float, assumed: str) -> None:
    """Raise InputError for time stamps that are dates of this century in another unit than the assumed one."""
    for unit, scale in TIME_UNITS.items():
        if unit != assumed and FIRST_DATE <= origin * scale < LAST_DATE:
            raise InputError(
                f"{lines.path}: timestamp {origin:.17g} is a date in {unit}, and {assumed} are expected;"
                f" say --read time_unit={unit}, or {assumed} if that is right"
            )


def _extend(trace: Trace, lines: _Lines) -> Trace:
    """The extension fields of our own format, where lines have them."""
    changes: dict[str, Any] = {}
    if lines.optional("slo_tbt_ms") is not None and lines.optional("slo_tpot_ms") is not None:
        raise InputError(f"{trace.name}: fields slo_tbt_ms and slo_tpot_ms mean the same; keep one")
    for field, names in (
        ("slo_ttft", ["slo_ttft_ms"]),
        ("slo_tbt", ["slo_tbt_ms", "slo_tpot_ms"]),
        ("slo_e2e", ["slo_e2el_ms"]),
    ):
        for name in names:
            column = lines.optional(name)
            if column is not None:
                changes[field] = check_slo_ms(column, name, lines.locate)
    limits = lines.optional("max_tokens", empty=0.0)
    if limits is not None:
        given = np.array([value is not None for value in lines.values("max_tokens")])
        checked = check_tokens(np.where(given, limits, 1.0), "max_tokens", lines.locate)
        changes["max_tokens"] = np.where(given, checked, 0)
    priority = lines.optional("priority", empty=0.0)
    if priority is not None:
        row = next((i for i, p in enumerate(priority) if p != int(p) or abs(p) >= 2**31), None)
        if row is not None:
            raise InputError(f"{lines.locate(row)}: priority is {priority[row]:g}, expected a whole number of 32 bits")
        changes["priority"] = priority.astype(np.int64)
    changes["slo_class"], changes["tenant"] = lines.labels("slo_class"), lines.labels("tenant")
    changes["session"] = lines.labels("session_id")
    ids = [None if value is None else str(value) for value in lines.values("request_id")]
    check_unique(ids, "request_id", lines.locate)
    return replace(trace, **changes)


def read_custom(
    path: str, data: bytes, options: ReadOptions, count: Callable[[Sequence[str]], IntArray] | None = None
) -> Trace:
    """vLLM's custom JSONL (`prompt`, optional `output_tokens`) -> Trace without times.

    Prompt lengths come from `count`, else the tokenizer of the options, else the estimate of `tokens.py`, and a note
    says which. Raises InputError for empty prompts, or output lengths that are neither in the file nor in the options.
    """
    lines = _Lines(path, data, _record_type(("output_tokens",), "prompt"), ("prompt",))
    texts = lines.values("prompt")
    row = next((i for i, text in enumerate(texts) if not text), None)
    if row is not None:
        state = "missing" if texts[row] is None else "empty"
        near = suggest("prompt", [n for n in lines.names if n != "prompt"]) if state == "missing" else ""
        raise InputError(f"{lines.locate(row)}: field prompt is {state}{near}")
    lengths = lines.values("output_tokens")
    missing = [i for i, value in enumerate(lengths) if value is None]
    if missing and options.default_output_tokens is None:
        raise InputError(
            f"{lines.locate(missing[0])}: field output_tokens missing; add it, or set a default output"
            " length (--read default_output_tokens=N)"
        )
    notes = lines.notes
    if missing:
        lengths = [options.default_output_tokens if value is None else value for value in lengths]
        notes += (
            f"{path}: {len(missing)} of {len(texts)} prompts state no output length and get"
            f" {options.default_output_tokens} tokens",
        )
    outputs = check_tokens(lines._floats("output_tokens", lengths), "output_tokens", lines.locate)
    counter, how = token_counter(options.tokenizer)
    prompts = check_tokens((count or counter)(texts), "prompt length", lines.locate)
    notes += (f"{path}: prompt lengths {how}",)
    return _extend(
        Trace(name=path, num_prompt_tokens=prompts, num_output_tokens=outputs, notes=notes, format="custom"), lines
    )
