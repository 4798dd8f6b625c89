"""A `vllm bench serve --save-result --save-detailed` file as a `RunLog`.

Such a file holds, per request, `input_lens`, `output_lens`, `ttfts`, `itls`, and mostly `start_times` and `errors`
(`latencies` in some versions), in seconds, and for the run `duration` and `completed`. Ours holds the same arrays.

Who was served: a request without an error text that returned output. vllm bench counts an answer with no output as
completed, and its zeros then enter the means (seen as https://github.com/tenstorrent/vllm/issues/354); here it failed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from slacktide.core.types import SLO, BoolArray, FloatArray, IntArray
from slacktide.errors import InputError
from slacktide.metrics.log import CUT_OFF, END_REASONS, FAILED, FINISHED, RunLog
from slacktide.metrics.slo import with_slo
from slacktide.metrics.summary import summarize

DETAIL = "(write the file with --save-result --save-detailed)"

DURATION_SLACK = 0.01
"""Share by which a request may end after the run: the clocks are read one after the other."""

MAX_TOKENS = 1e9
"""Longest prompt or output believed: a hundred times the largest context window any model offers."""

MAX_CLOCK = 1e15
"""Latest start, seconds on any clock: Unix time in microseconds is as large, and differences still tell microseconds
apart no more beyond it."""

_ENGINE = {
    "preemptions": "num_preemptions",
    "recomputed_tokens": "recomputed_tokens",
    "scheduled_tokens": "scheduled_tokens",
}  # arrays of our own files, and the columns they fill


def bench_run(
    result: dict[str, Any] | str | os.PathLike[str],
    slo: SLO | None = None,
    *,
    mode: str = "deadline",
    tolerated_late_share: float = 0.0,
    where: str = "vllm bench result",
) -> tuple[RunLog, dict[str, Any]]:
    """Read a detailed vllm bench result (the parsed JSON object, named `where` in errors, or a path), judged by `slo`.

    The run: times count from the first request's start; what was left out, counted or assumed stands in `notes`. The
    summary: `summarize` of it with the failures listed apart: failed_with_error, failed_empty, completed_in_file.
    Raises InputError for a file that is missing or malformed, that has no per-request arrays or arrays of different
    lengths, or holds values that are no lengths or times.
    """
    data = result if isinstance(result, dict) else read_json(result)
    reader = _Reader(where if data is result else str(result), data)
    log = reader.log(slo)
    summary = summarize(log, mode=mode, tolerated_late_share=tolerated_late_share)
    failed = reader.failed_with_error
    summary |= {"failed_with_error": failed, "failed_empty": summary["failed"] - failed}
    return log, summary | {"completed_in_file": data.get("completed")}


def bench_log(result: dict[str, Any] | str | os.PathLike[str], slo: SLO | None = None) -> RunLog:
    """The run of `bench_run`."""
    return bench_run(result, slo)[0]


def bench_summary(result: dict[str, Any] | str | os.PathLike[str], slo: SLO | None = None) -> dict[str, Any]:
    """The summary of `bench_run`."""
    return bench_run(result, slo)[1]


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON object in a file. Raises InputError naming the file and, for broken JSON, the place."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise InputError(f"{path}: {twice!r} stands twice in one object; keep one")
        return found

    try:
        data = json.loads(Path(path).read_text(encoding="utf-8-sig"), object_pairs_hook=once)
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{path}: cannot read it: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not a JSON text (byte {error.start} is no UTF-8)") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{path}: not JSON: {error.msg} in line {error.lineno}, column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or nesting without end
        raise InputError(f"{path}: JSON that cannot be read ({type(error).__name__})") from error
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


class _Reader:
    """Checks one file's arrays and builds the log; `where` names the file in messages."""

    def __init__(self, where: str, data: dict[str, Any]) -> None:
        self.where, self.data = where, data
        self.notes: list[str] = []
        self.failed_with_error = 0

    def log(self, slo: SLO | None) -> RunLog:
        lists = {name: self._list(name) for name in ("input_lens", "output_lens", "ttfts", "itls")}
        optional = ("start_times", "latencies", "errors", *_ENGINE)
        lists |= {name: self._list(name) for name in optional if name in self.data}
        sizes = {name: len(of) for name, of in lists.items()}
        if len(set(sizes.values())) > 1:
            raise self._bad(f"arrays of different lengths: {', '.join(f'{k} {v}' for k, v in sizes.items())}")
        n = sizes["ttfts"]
        prompt, output = self._lengths("input_lens", lists), self._lengths("output_lens", lists)
        first = self._numbers("ttfts", lists["ttfts"])
        start = self._starts(lists.get("start_times"), n)
        reason = self._reasons(lists.get("errors", [""] * n), output)
        served = reason == FINISHED
        for row in np.flatnonzero(served & (first == 0)):
            raise self._bad(
                f"row {row}: ttfts is 0 but output_lens is {output[row]}: its first token's time is unknown"
            )
        offsets, token_time = self._token_times(lists["itls"], start, first)
        entries = np.diff(offsets)
        self._note_chunks(served, output, entries)
        last = np.where(entries > 0, token_time[np.maximum(offsets[1:] - 1, 0)] if offsets[-1] else start, start)
        end = last
        if "latencies" in lists:
            end = np.maximum(last, start + self._numbers("latencies", lists["latencies"]))
        engine: dict[str, Any] = {of: self._lengths(name, lists) for name, of in _ENGINE.items() if name in lists}
        log = RunLog(
            arrival_time=start,
            num_prompt_tokens=prompt,
            num_output_tokens=output,
            end_time=np.where(reason == CUT_OFF, np.nan, end),
            end_reason=reason,
            token_offsets=offsets,
            token_time=token_time,
            num_delivered_tokens=output,
            sim_duration=self._duration(end),
            notes=tuple(self.notes),
            **engine,
        )
        return log if slo is None else with_slo(log, slo)

    def _bad(self, what: str) -> InputError:
        return InputError(f"{self.where}: {what}")

    def _list(self, name: str) -> list[Any]:
        found = self.data.get(name)
        if found is None:
            raise self._bad(f"no array {name!r}: the file has no per-request figures {DETAIL}")
        if not isinstance(found, list):
            raise self._bad(f"{name}: expected an array, one entry per request, found {type(found).__name__}")
        return found

    def _numbers(self, name: str, values: list[Any], upper: float = 1e9) -> FloatArray:
        """float64 of finite numbers from 0 to `upper` (1e9 s is 31 years: no latency). JSON's NaN is refused."""
        try:
            array = np.array(values, dtype=np.float64) if all(type(v) in (int, float) for v in values) else None
        except OverflowError:  # an integer beyond float64
            array = None
        if array is None or not ((array >= 0) & (array <= upper)).all():
            for row, value in enumerate(values):
                if type(value) not in (int, float) or not 0 <= value <= upper:
                    raise self._bad(f"{name}[{row}]: expected a number from 0 to {upper:g}, found {json.dumps(value)}")
        assert array is not None
        return array

    def _lengths(self, name: str, lists: dict[str, list[Any]]) -> IntArray:
        array = self._numbers(name, lists[name], MAX_TOKENS)
        for row in np.flatnonzero(array % 1):
            raise self._bad(f"{name}[{row}]: expected a whole number of tokens, found {array[row]}")
        return array.astype(np.int64)

    def _starts(self, values: list[Any] | None, n: int) -> FloatArray:
        if values is None:
            self.notes.append("no start_times in the file: every request is taken to start at 0 (latencies unaffected)")
            return np.zeros(n)
        starts = self._numbers("start_times", values, MAX_CLOCK)
        return starts - starts.min() if n else starts

    def _reasons(self, errors: list[Any], output: IntArray) -> Any:
        """End reason of each request: our own files begin the error text with it; any other text is a failure."""
        reasons = np.full(len(errors), FINISHED, dtype=np.int8)
        for row, text in enumerate(errors):
            if text is not None and not isinstance(text, str):
                raise self._bad(f"errors[{row}]: expected a text, found {json.dumps(text)}")
            if text:
                word = text.split(":")[0].strip()
                reasons[row] = END_REASONS.index(word) if word in END_REASONS[1:] else FAILED
        self.failed_with_error = int(((reasons != FINISHED) & (reasons != CUT_OFF)).sum())
        empty = (reasons == FINISHED) & (output == 0)
        reasons[empty] = FAILED
        completed, claimed = int((reasons == FINISHED).sum()), self.data.get("completed")
        if empty.any():
            self.notes.append(f"answers with neither an error nor any output: {int(empty.sum())}, counted as failed")
        if claimed is not None and claimed != completed:
            self.notes.append(f"the file's own `completed` is {claimed}; by our count {completed} were served")
        return reasons

    def _token_times(self, itls: list[Any], start: FloatArray, first: FloatArray) -> tuple[IntArray, FloatArray]:
        """Offsets and times of the tokens: start + ttft, then the gaps added one by one. ttft 0 = no token came."""
        counts = np.zeros(len(itls) + 1, dtype=np.int64)
        times: list[FloatArray] = [np.empty(0)]
        for row, row_gaps in enumerate(itls):
            if not isinstance(row_gaps, list):
                raise self._bad(f"itls[{row}]: expected an array of gaps, found {json.dumps(row_gaps)}")
            later = self._numbers(f"itls[{row}]", row_gaps)
            if first[row] > 0:
                times.append(start[row] + first[row] + np.concatenate([[0.0], np.cumsum(later)]))
                counts[row + 1] = len(later) + 1
        return np.cumsum(counts), np.concatenate(times)

    def _note_chunks(self, served: BoolArray, output: IntArray, entries: IntArray) -> None:
        differ = int((served & (entries != output)).sum())
        if differ:
            self.notes.append(
                f"{differ} of {int(served.sum())} served requests came in chunks that are not one token each: "
                "their gaps and deadlines are those of chunks"
            )

    def _duration(self, end: FloatArray) -> float:
        if self.data.get("duration") is not None:
            duration = float(self._numbers("duration", [self.data["duration"]])[0])
            if duration <= 0:
                raise self._bad(f"duration: expected a positive number of seconds, found {duration}")
            last = float(end.max(initial=0.0))
            if last > duration * (1 + DURATION_SLACK):
                self.notes.append(
                    f"the file's duration is {duration:g} s, yet its requests end after {last:g} s: rates are too high"
                )
            return duration
        self.notes.append("no duration in the file: taken from the first start to the last end")
        return float(end.max(initial=0.0))
