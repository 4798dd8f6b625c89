"""What every reader returns and checks: a table of requests that may still lack arrival times."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from slacktide.core.types import MAX_SLO_SECONDS, BoolArray, FloatArray, IntArray
from slacktide.errors import InputError
from slacktide.workload.requests import MAX_REQUEST_TOKENS, MAX_SECONDS, take_ragged

Labels = tuple[IntArray, tuple[str, ...]]
"""A text column: code of each row (-1 = empty), and the texts in order of first appearance."""

Locate = Callable[[int], str]
"""Number of a row (from 0) -> how the file's user finds it, such as `trace.csv: line 3`."""

MAX_SHOWN = 80
"""Characters of a file's text that an error message repeats: enough to find it, and the hint after it stays in view."""

DEFAULT_BLOCK_SIZE = 512
"""Tokens behind one hash id in the Mooncake traces."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How a file is read. None = what the format says, or what can be told from the file."""

    format: str | None = None
    """Name of the format; None = detect it from the content."""
    time_unit: str | None = None
    """Unit of JSONL time stamps: s, ms, us or ns."""
    hash_block_size: int | None = None
    """Tokens behind one hash id."""
    failed_output_tokens: int | None = None
    """Keep requests that failed in the source and give each this many output tokens; None = leave them out."""
    default_output_tokens: int | None = None
    """Output length of JSONL prompts that state none; None = that is an error."""
    drop_empty: bool = False
    """Leave out (and count) rows with 0 tokens in formats where they are an error."""
    tokenizer: str | None = None
    """Tokenizer (path of a tokenizer.json, or a model name) for files that hold text; None = a documented estimate."""
    first_turn_only: bool = False
    """Conversations: only the first question, as `vllm bench serve` does."""

    def __post_init__(self) -> None:
        if self.time_unit is not None and self.time_unit not in TIME_UNITS:
            raise InputError(f"time unit {self.time_unit!r}: expected one of {', '.join(TIME_UNITS)}")
        for name in ("failed_output_tokens", "default_output_tokens", "hash_block_size"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MAX_REQUEST_TOKENS:
                raise InputError(f"{name}={value}: expected 1 to {MAX_REQUEST_TOKENS:,}")


TIME_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
"""Seconds per unit."""


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests as a file gives them, in the file's order. Columns that it lacks are None.

    Times in seconds, lengths in tokens. `slo_*` in seconds, NaN where a row states none; `max_tokens` 0 likewise.
    """

    name: str
    num_prompt_tokens: IntArray
    num_output_tokens: IntArray
    arrival_time: FloatArray | None = None
    """Seconds; None = the file has no times."""
    max_tokens: IntArray | None = None
    slo_ttft: FloatArray | None = None
    slo_tbt: FloatArray | None = None
    slo_e2e: FloatArray | None = None
    priority: IntArray | None = None
    tenant: Labels | None = None
    slo_class: Labels | None = None
    session: Labels | None = None
    patience: FloatArray | None = None
    """Seconds from arrival until the client gives up; infinity = never."""
    failed: BoolArray | None = None
    hash_ids: tuple[IntArray, IntArray] | None = None
    hash_block_size: int = DEFAULT_BLOCK_SIZE
    format: str = ""
    source: str = ""
    shuffle: bool = False
    """True for length tables, whose order means nothing: a run draws rows instead of taking the first ones."""
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.num_prompt_tokens)

    def take(self, rows: IntArray) -> Trace:
        """The rows given, in that order; repeats are allowed."""
        changes: dict[str, Any] = {}
        for name in _ROW_FIELDS:
            column = getattr(self, name)
            if column is not None:
                changes[name] = column[rows]
        for name in ("tenant", "slo_class", "session"):
            labels = getattr(self, name)
            if labels is not None:
                changes[name] = (labels[0][rows], labels[1])
        if self.hash_ids is not None:
            changes["hash_ids"] = take_ragged(*self.hash_ids, rows)
        return replace(self, **changes)


_ROW_FIELDS = ("num_prompt_tokens", "num_output_tokens", "arrival_time", "max_tokens", "slo_ttft", "slo_tbt",
               "slo_e2e", "priority", "patience", "failed")  # fmt: skip


def encode_labels(texts: Iterable[str | None]) -> Labels:
    """Codes in order of first appearance; None and empty texts become -1."""
    table: dict[str, int] = {}
    codes = [table.setdefault(text, len(table)) if text else -1 for text in texts]
    return np.array(codes, dtype=np.int64), tuple(table)


def shown(text: str) -> str:
    """A cell or name from a file as an error message quotes it: on one line, and cut when it is long."""
    return repr(text) if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]!r}... ({len(text):,} characters)"


def first_bad(good: BoolArray) -> int | None:
    """Number of the first row that is not good, or None."""
    return None if good.all() else int(np.argmin(good))


def check_tokens(values: FloatArray | IntArray, column: str, locate: Locate, lowest: int = 1) -> IntArray:
    """Whole numbers of tokens from `lowest` to MAX_REQUEST_TOKENS as i8; InputError names the first other one."""
    good = (values >= lowest) & (values <= MAX_REQUEST_TOKENS) & (values == np.floor(values))
    row = first_bad(good)
    if row is not None:
        found = f"{values[row]:.17g}"
        raise InputError(
            f"{locate(row)}: {column} is {found}, expected a whole number of tokens from {lowest} to"
            f" {MAX_REQUEST_TOKENS:,}; correct the row or delete it"
        )
    return values.astype(np.int64)


def check_seconds(values: FloatArray, column: str, locate: Locate, lowest: float = 0.0) -> FloatArray:
    """Finite seconds from `lowest` to MAX_SECONDS; InputError names the first other one."""
    row = first_bad((values >= lowest) & (values <= MAX_SECONDS))
    if row is not None:
        raise InputError(
            f"{locate(row)}: {column} is {values[row]:g}, expected {lowest:g} to {MAX_SECONDS:g} s; correct the row or"
            " delete it"
        )
    return values


def check_slo_ms(values: FloatArray, column: str, locate: Locate) -> FloatArray:
    """SLO column in ms -> s; NaN = none given, infinity = no target. InputError names the first impossible one."""
    seconds = np.asarray(values * 1e-3, dtype=np.float64)
    good = np.isnan(seconds) | ((seconds > 0) & ((seconds <= MAX_SLO_SECONDS) | np.isposinf(seconds)))
    row = first_bad(good)
    if row is not None:
        raise InputError(
            f"{locate(row)}: {column} is {values[row]:g}, expected more than 0 and at most"
            f" {MAX_SLO_SECONDS * 1e3:g} ms, or an empty cell"
        )
    return seconds


def check_unique(ids: Iterable[str | None], column: str, locate: Locate) -> None:
    """Raise InputError naming both rows when an explicit request id comes twice."""
    seen: dict[str, int] = {}
    for row, label in enumerate(ids):
        if not label:
            continue
        if label in seen:
            raise InputError(
                f"{locate(row)}: {column} {label!r} is already that of {locate(seen[label])}; ids must be unique"
            )
        seen[label] = row


def drop_rows(trace: Trace, reasons: dict[str, BoolArray], unit: str = "rows") -> Trace:
    """`trace` without the rows of any mask, with one note that counts them; each row under its first reason.

    Raises InputError when no row is left.
    """
    keep = np.ones(len(trace), dtype=np.bool_)
    counts = []
    for reason, mask in reasons.items():
        hit = mask & keep
        keep &= ~mask
        if hit.any():
            counts.append(f"{int(hit.sum())} {reason}")
    if keep.all():
        return trace
    if not keep.any():
        raise InputError(f"{trace.name}: no usable row, {', '.join(counts)}")
    note = f"{trace.name}: left out {int((~keep).sum())} of {len(trace)} {unit}: {', '.join(counts)}"
    kept = trace.take(np.flatnonzero(keep))
    return replace(kept, notes=(*kept.notes, note))


def sort_by_time(trace: Trace, from_first: bool) -> Trace:
    """Rows in order of arrival (stable), with one note that counts those out of order; times from the first row on
    when `from_first`."""
    times = trace.arrival_time
    if times is None:
        return trace
    if from_first:
        times = times - times.min()
    late = int((times < np.maximum.accumulate(times)).sum())
    moved = replace(trace, arrival_time=times)
    if not late:
        return moved
    note = f"{trace.name}: {late} of {len(trace)} rows are earlier than a row before them; sorted by arrival time"
    return replace(moved.take(np.argsort(times, kind="stable")), notes=(*trace.notes, note))


def infer_block_size(prompts: IntArray, counts: IntArray, given: int | None) -> int:
    """Tokens behind one hash id: `given`, else the usual size for which every row has ceil(prompt / size) ids.

    Falls back on Mooncake's 512. 16 is vLLM's default (`--timed-trace-chunk-hash-size`), 64 that of agentic traces.
    """
    if given is not None:
        return given
    stated = counts > 0
    for size in (DEFAULT_BLOCK_SIZE, 16, 64, 32, 128, 256, 1024):
        if (counts[stated] == -(-prompts[stated] // size)).all():
            return size
    return DEFAULT_BLOCK_SIZE


def check_hash_counts(trace: Trace, locate: Locate) -> Trace:
    """Check that no row has more hash ids than blocks; a note counts rows with fewer (their tail is unshared)."""
    if trace.hash_ids is None:
        return trace
    counts, size = np.diff(trace.hash_ids[1]), trace.hash_block_size
    blocks = -(-trace.num_prompt_tokens // size)
    row = first_bad(counts <= blocks)
    if row is not None:
        raise InputError(
            f"{locate(row)}: {counts[row]} hash ids for {trace.num_prompt_tokens[row]} prompt tokens, expected"
            f" at most {blocks[row]} of {size} tokens each; if that size is wrong, say --read hash_block_size=N"
        )
    short = int(((counts > 0) & (counts < trace.num_prompt_tokens // size)).sum())
    if not short:
        return trace
    note = f"{trace.name}: in {short} rows the hash ids (of {size} tokens) end before the prompt; the rest is unshared"
    return replace(trace, notes=(*trace.notes, note))
