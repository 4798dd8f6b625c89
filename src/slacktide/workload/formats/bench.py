"""A result of `vllm bench serve --save-result --save-detailed`, as numbers and as a workload.

Keys: `input_lens`, `output_lens`, `ttfts`, `itls`, `errors`, and in newer versions `start_times` and `latencies`
(seconds); totals `duration`, `completed`, `failed`. A request was served when it has no error text and at least one
output token: vLLM's own `completed` also counts answers without any token.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slacktide.core.types import BoolArray, FloatArray, IntArray
from slacktide.errors import InputError
from slacktide.workload.formats.base import (
    ReadOptions,
    Trace,
    check_seconds,
    check_tokens,
    drop_rows,
    sort_by_time,
)
from slacktide.workload.formats.burstgpt import kept_note
from slacktide.workload.formats.jsontext import decode

NEEDED = ("input_lens", "output_lens")


@dataclass(frozen=True, slots=True, eq=False)
class BenchResult:
    """Per-request arrays in the file's order (seconds, tokens) and totals; None = the file lacks them."""

    path: str
    input_lens: IntArray
    output_lens: IntArray
    errors: tuple[str, ...]
    """Empty text = no error."""
    ttfts: FloatArray | None
    itls: tuple[FloatArray, IntArray] | None
    """(values, offsets): request i owns values[offsets[i]:offsets[i+1]]."""
    start_times: FloatArray | None
    """Seconds from the first start."""
    latencies: FloatArray | None
    duration: float | None
    completed: int | None
    """As the file states it; `served.sum()` is our count."""
    failed: int | None
    notes: tuple[str, ...] = ()

    @property
    def served(self) -> BoolArray:
        """True for requests without an error that got output."""
        return np.array([not text for text in self.errors], dtype=np.bool_) & (self.output_lens > 0)


def read_bench_result(path: str | Path) -> BenchResult:
    """Read a detailed benchmark result. Raises InputError when per-request arrays are missing or do not fit."""
    from slacktide.workload.traces import read_bytes

    return parse_bench_result(str(path), read_bytes(path))


def parse_bench_result(path: str, data: bytes) -> BenchResult:
    """The same from bytes."""
    content = decode(path, data)
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected a JSON object as vllm bench serve writes it")
    for name in NEEDED:
        if name not in content:
            raise InputError(f"{path}: no {name} per request; run vllm bench serve with --save-result --save-detailed")
    n = len(content["input_lens"]) if isinstance(content["input_lens"], list) else 0
    if n == 0:
        raise InputError(f"{path}: input_lens is empty or no list")

    def locate(row: int) -> str:
        return f"{path}: request {row} (from 0)"

    def numbers(name: str) -> FloatArray:
        return check_seconds(_floats(path, name, _list(path, content, name, n)), name, locate)

    errors = content.get("errors")
    texts = [str(text or "") for text in _list(path, content, "errors", n)] if errors is not None else [""] * n
    result = BenchResult(
        path=path,
        input_lens=check_tokens(_floats(path, "input_lens", content["input_lens"]), "input_lens", locate, lowest=0),
        output_lens=check_tokens(
            _floats(path, "output_lens", _list(path, content, "output_lens", n)), "output_lens", locate, lowest=0
        ),
        errors=tuple(texts),
        ttfts=numbers("ttfts") if content.get("ttfts") is not None else None,
        itls=_ragged(path, _list(path, content, "itls", n)) if content.get("itls") is not None else None,
        start_times=_starts(path, content, n, locate),
        latencies=numbers("latencies") if content.get("latencies") is not None else None,
        duration=_total(path, content, "duration"),
        completed=_count(path, content, "completed"),
        failed=_count(path, content, "failed"),
    )
    served = int(result.served.sum())
    if result.completed is None or result.completed == served:
        return result
    note = (
        f"{path}: the file says completed = {result.completed}; {served} of {n} requests have no error and"
        " at least one output token"
    )
    return BenchResult(**{name: getattr(result, name) for name in BenchResult.__slots__} | {"notes": (note,)})


def read_bench(path: str, data: bytes, options: ReadOptions) -> Trace:
    """The requests of a benchmark result as a workload: input and output lengths, sent at the same times.

    Requests without a known output length (failed, or nothing returned) are left out and counted, unless the options
    give them one. Raises InputError.
    """
    result = parse_bench_result(path, data)
    failed = ~result.served
    error = np.array([bool(text) for text in result.errors], dtype=np.bool_)
    kept = options.failed_output_tokens
    trace = Trace(
        name=path,
        num_prompt_tokens=result.input_lens,
        num_output_tokens=result.output_lens if kept is None else np.where(failed, kept, result.output_lens),
        arrival_time=result.start_times,
        failed=failed,
        format="vllm-bench",
        notes=result.notes + kept_note(path, int((failed & (result.input_lens > 0)).sum()), kept),
    )
    reasons = {"with an error": error, "without output": failed} if kept is None else {}
    return sort_by_time(
        drop_rows(trace, reasons | {"without prompt tokens": result.input_lens == 0}, "requests"), False
    )


def _starts(path: str, content: dict[str, Any], n: int, locate: Any) -> FloatArray | None:
    """start_times from the first one on (they are readings of a monotonic clock)."""
    if content.get("start_times") is None:
        return None
    starts = _floats(path, "start_times", _list(path, content, "start_times", n))
    return check_seconds(starts - starts.min(), "start_times", locate)


def _list(path: str, content: dict[str, Any], name: str, n: int) -> list[Any]:
    values = content[name]
    if not isinstance(values, list) or len(values) != n:
        found = f"{len(values)} values" if isinstance(values, list) else "no list"
        raise InputError(f"{path}: {name} has {found}, input_lens has {n}; the file is inconsistent")
    return values


def _floats(path: str, name: str, values: list[Any]) -> FloatArray:
    for row, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e300:
            raise InputError(f"{path}: {name}[{row}] is {value!r:.60}, expected a number")
    return np.array(values, dtype=np.float64)


def _ragged(path: str, rows: list[Any]) -> tuple[FloatArray, IntArray]:
    """Lists of gaps as values and offsets; null counts as an empty list."""
    flat: list[float] = []
    offsets = [0]
    for number, row in enumerate(rows):
        if row is not None and not isinstance(row, list):
            raise InputError(f"{path}: itls[{number}] is {row!r:.60}, expected a list of seconds")
        flat.extend(_floats(path, f"itls[{number}]", row or []))
        offsets.append(len(flat))
    values = np.array(flat, dtype=np.float64)
    if (values < 0).any():
        number = int(np.searchsorted(offsets, int(np.argmax(values < 0)), side="right")) - 1
        raise InputError(f"{path}: itls[{number}] holds a negative time")
    return values, np.array(offsets, dtype=np.int64)


def _total(path: str, content: dict[str, Any], name: str) -> float | None:
    value = content.get(name)
    if value is None:
        return None
    number = float(_floats(path, name, [value])[0])
    if number < 0:
        raise InputError(f"{path}: {name} is {number:g}, expected 0 or more")
    return number


def _count(path: str, content: dict[str, Any], name: str) -> int | None:
    total = _total(path, content, name)
    return None if total is None else int(total)
