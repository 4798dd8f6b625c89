"""Result files of a run: requests.parquet, steps.parquet, summary.json, and decisions.parquet where it was recorded.

Every file is written beside its place and then renamed; summary.json comes last, and an old one is taken away before
the first rename. So a directory with a summary.json holds one whole run, whenever the program was stopped. The same
run gives the same bytes; what depends on the wall clock stands in summary.json alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from slacktide.errors import InputError
from slacktide.metrics import slo
from slacktide.metrics.bench import read_json
from slacktide.metrics.decisions import Decisions
from slacktide.metrics.log import END_REASONS, FINISHED, REQUEST_COLUMNS, STEP_COLUMNS, RunLog
from slacktide.metrics.summary import summarize

Record = dict[str, Any]
"""A run's record: policy, label, parameters, profile, seed, summary, and what the writer adds. Ready for JSON."""

SUMMARY, REQUESTS, STEPS = "summary.json", "requests.parquet", "steps.parquet"
DECISIONS = "decisions.parquet"

META = b"slacktide"  # key of our scalars in a Parquet file's own metadata
_UNNAMED = ("default",)  # what a run without names calls its one tenant and class, as in workloads
_CODES = {"tenant": "tenants", "slo_class": "slo_classes"}

DETAILED = (
    "input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "errors",
    "preemptions", "recomputed_tokens", "scheduled_tokens",
)  # fmt: skip
"""The arrays that `--save-detailed` adds to a record: vllm bench's, and three of ours."""


def run_record(
    log: RunLog,
    *,
    policy: str,
    label: str | None = None,
    parameters: dict[str, Any] | None = None,
    profile: str | None = None,
    profile_label: str | None = None,
    seed: int | None = None,
    oracle: bool = False,
    summary: dict[str, Any] | None = None,
    **more: Any,
) -> Record:
    """The record of a run. `summary`: `summarize(log)` unless given. `profile_label` says what the profile rests on
    (measured, fitted, composed, prior); `oracle` marks a policy that sees true output lengths. `more` is kept as it is.
    """
    return {
        "policy": policy,
        "label": label or policy,
        "oracle": oracle,
        "parameters": parameters or {},
        "profile": profile,
        "profile_label": profile_label,
        "seed": seed,
        **more,
        "summary": summarize(log) if summary is None else summary,
    }


def detailed_arrays(log: RunLog) -> dict[str, list[Any]]:
    """vllm bench's per-request arrays in the order of the trace, and three of ours. Seconds and tokens.

    As in vllm bench a request without a token has ttft 0 and an error; the error text is the end reason.
    """
    ttft = np.nan_to_num(slo.ttft(log), nan=0.0)
    latency = np.nan_to_num(slo.e2el(log), nan=0.0)
    names = ["" if code == FINISHED else END_REASONS[code] for code in log.end_reason.tolist()]
    return {
        "input_lens": log.num_prompt_tokens.tolist(),
        "output_lens": log.num_delivered_tokens.tolist(),
        "ttfts": ttft.tolist(),
        "itls": [np.diff(log.request_times(i)).tolist() for i in range(log.n)],
        "latencies": latency.tolist(),
        "start_times": log.arrival_time.tolist(),
        "errors": names,
        "preemptions": log.num_preemptions.tolist(),
        "recomputed_tokens": log.recomputed_tokens.tolist(),
        "scheduled_tokens": log.scheduled_tokens.tolist(),
    }


def write_run(
    directory: str | os.PathLike[str],
    record: Record,
    log: RunLog,
    *,
    verdicts: slo.Verdicts | None = None,
    save_detailed: bool = False,
    decisions: Decisions | None = None,
) -> None:
    """Write a run into `directory` (made if needed, an older run in it replaced).

    `verdicts` fills the column slo_met (judged anew in the record's own mode unless given); `save_detailed` adds
    `detailed_arrays` to the record; `decisions` are written where given, and older ones taken away. Raises InputError
    naming the path when it cannot be written.
    """
    mode, share = record["summary"].get("slo_mode", "deadline"), record["summary"].get("tolerated_late_share", 0.0)
    verdict = slo.judge(log, mode, share) if verdicts is None else verdicts
    full = record | detailed_arrays(log) if save_detailed else record
    from slacktide.report.decisions_file import write_decisions

    writers: dict[str, Callable[[Path], object]] = {
        REQUESTS: lambda path: _write_requests(path, log, verdict),
        STEPS: lambda path: _write_steps(path, log),
    }
    if decisions is None:
        with contextlib.suppress(OSError):  # none there, or no directory: write_files tells
            (Path(directory) / DECISIONS).unlink(missing_ok=True)
    else:
        writers[DECISIONS] = lambda path: write_decisions(path, decisions)
    writers[SUMMARY] = lambda path: path.write_text(dump(full), encoding="utf-8")
    write_files(Path(directory), writers)


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write one JSON file so that it is there as a whole or not at all. Raises InputError naming the path."""
    target = Path(path)
    write_files(target.parent, {target.name: lambda temporary: temporary.write_text(dump(value), encoding="utf-8")})


def write_files(directory: Path, writers: dict[str, Callable[[Path], object]]) -> None:
    """Write several files as one: the last name marks the set as complete. Raises InputError naming the path."""
    if directory.exists() and not directory.is_dir():
        raise InputError(
            f"cannot write {directory / next(iter(writers))}: {directory} is a file; name another directory"
        )
    names, target = list(writers), directory
    staged = {name: directory / f".{name}.{os.getpid()}.partial" for name in names}
    with _named_errors(lambda: target):
        directory.mkdir(parents=True, exist_ok=True)
        try:
            for name, write in writers.items():
                target = directory / name
                write(staged[name])
            with _alone_in(directory):
                if len(names) > 1:
                    (directory / names[-1]).unlink(missing_ok=True)
                for name, temporary in staged.items():
                    target = directory / name
                    temporary.replace(target)
        finally:
            for temporary in staged.values():
                with contextlib.suppress(OSError):  # do not hide the first error
                    temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Hold back other processes that rename files here: two runs into one directory must not leave halves of both."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def _named_errors(target: Callable[[], Path]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise InputError(f"cannot write {target()}: {why}; name a directory that can be written") from error


def dump(value: Any) -> str:
    """JSON with one key a line and lists of numbers on one line; NaN raises ValueError. Ends with a line end."""
    return _dump(value, 0) + "\n"


def _dump(value: Any, depth: int) -> str:
    inner, outer = "\n" + "  " * (depth + 1), "\n" + "  " * depth
    if isinstance(value, dict) and value:
        items = [f"{json.dumps(str(key))}: {_dump(item, depth + 1)}" for key, item in value.items()]
        return "{" + inner + ("," + inner).join(items) + outer + "}"
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[" + inner + ("," + inner).join(_dump(item, depth + 1) for item in value) + outer + "]"
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def _write_requests(path: Path, log: RunLog, verdict: slo.Verdicts) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns: dict[str, Any] = {}
    for name, (_, fill) in REQUEST_COLUMNS.items():
        values = getattr(log, name)
        if name in _CODES:
            names = getattr(log, _CODES[name]) or _UNNAMED
            columns[name] = pa.DictionaryArray.from_arrays(values.astype(np.int32), list(names))
        elif name == "end_reason":
            columns[name] = pa.DictionaryArray.from_arrays(values.astype(np.int32), list(END_REASONS))
        else:
            # null reads as "none" everywhere; NaN and infinity do not survive most tools
            hide = ~np.isfinite(values) if fill is None or isinstance(fill, float) else None
            columns[name] = pa.array(values, mask=hide)
    columns["num_delivered_tokens"] = pa.array(log.num_delivered_tokens)
    derived = {"ttft": slo.ttft, "tpot": slo.tpot, "e2el": slo.e2el, "queue_time": slo.queue_time}
    columns |= {name: pa.array(of(log), from_pandas=True) for name, of in derived.items()}
    columns["max_gap"] = pa.array(verdict.max_gap, from_pandas=True)
    columns["slo_met"] = pa.array(verdict.met, mask=~verdict.judged)
    tokens = "token_step" if log.token_step is not None else "token_time"
    columns[tokens] = pa.LargeListArray.from_arrays(pa.array(log.token_offsets), pa.array(getattr(log, tokens)))
    scalars = {
        "format": 1,
        "sim_duration": log.sim_duration,
        "start_time": log.start_time,
        "num_blocks": log.num_blocks,
        "block_size": log.block_size,
        "tenants": log.tenants,
        "slo_classes": log.slo_classes,
        "notes": log.notes,
        "units": "seconds, tokens, KV blocks",
    }
    table = pa.table(columns).replace_schema_metadata({META: json.dumps(scalars)})
    # Steps of one request rise by about 1: as differences they take about a bit each.
    packed = {"token_step.list.element": "DELTA_BINARY_PACKED"} if tokens == "token_step" else None
    dictionary = [*_CODES, "end_reason"]
    with path.open("wb") as file:  # a path alone, such as s3:x, may pass for the address of a remote store
        pq.write_table(table, file, compression="zstd", use_dictionary=dictionary, column_encoding=packed)


def _write_steps(path: Path, log: RunLog) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns: dict[str, Any] = {name: pa.array(getattr(log, name)) for name in STEP_COLUMNS}
    if log.shape is not None:
        columns["shape"] = pa.FixedSizeListArray.from_arrays(pa.array(log.shape.ravel()), log.shape.shape[1])
    with path.open("wb") as file:
        pq.write_table(pa.table(columns), file, compression="zstd")


def read_run(directory: str | os.PathLike[str]) -> tuple[Record, RunLog]:
    """Read back what `write_run` wrote. Raises InputError naming the file that is missing or not ours."""
    folder = Path(directory)
    record = read_json(folder / SUMMARY)
    requests, steps = read_table(folder / REQUESTS), read_table(folder / STEPS)
    summary = record.get("summary") or {}
    if not isinstance(summary, dict):
        raise InputError(f"{folder / SUMMARY}: expected a record with a `summary`, found {str(summary)[:40]}")
    try:
        log = _log_of(requests, steps, summary)
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, NotImplementedError) as error:
        # What numpy, pyarrow and json say of columns of another kind than ours; a RunLog names what does not fit.
        raise InputError(f"{folder / REQUESTS}: not a run of slacktide's, or damaged ({error})") from error
    stated = summary.get("num_requests", log.n)
    if stated != log.n:
        raise InputError(f"{folder / REQUESTS}: {log.n} requests, {SUMMARY} has {stated}; the files are of two runs")
    return record, log


def read_table(path: Path) -> Any:
    """A Parquet file. Raises InputError naming it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with path.open("rb") as file:
            return pq.read_table(file)
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file; a run's directory holds {REQUESTS}, {STEPS}, {SUMMARY}") from error
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path}: cannot read this Parquet file ({error})") from error


def _log_of(requests: Any, steps: Any, summary: dict[str, Any]) -> RunLog:
    scalars = json.loads((requests.schema.metadata or {})[META])
    _check_scalars(scalars)
    columns: dict[str, Any] = {}
    for name, (dtype, fill) in REQUEST_COLUMNS.items():
        column = requests.column(name).combine_chunks()
        if name in _CODES:
            names = scalars[_CODES[name]] or _UNNAMED
            columns[name] = np.array([names.index(v) for v in column.to_pylist()], dtype=np.int64)
        elif name == "end_reason":
            columns[name] = np.array([END_REASONS.index(v) for v in column.to_pylist()], dtype=np.int8)
        else:
            values = column.to_numpy(zero_copy_only=False)
            none = fill if isinstance(fill, float) else math.nan
            columns[name] = np.where(np.isnan(values), none, values) if dtype == "f8" else values
    tokens = "token_step" if "token_step" in requests.column_names else "token_time"
    lists = requests.column(tokens).combine_chunks()
    columns[tokens] = lists.flatten().to_numpy()
    columns["token_offsets"] = np.concatenate([[0], np.cumsum(lists.value_lengths().to_numpy())]).astype(np.int64)
    columns["num_delivered_tokens"] = requests.column("num_delivered_tokens").to_numpy()
    columns |= {name: steps.column(name).to_numpy() for name in STEP_COLUMNS}
    if "shape" in steps.column_names:
        shape = steps.column("shape").combine_chunks()
        columns["shape"] = shape.flatten().to_numpy().reshape(len(shape), -1)
    columns |= {name: scalars[name] for name in ("sim_duration", "start_time", "num_blocks", "block_size")}
    columns |= {name: tuple(scalars[name]) for name in ("tenants", "slo_classes", "notes")}
    for name, (dtype, _) in REQUEST_COLUMNS.items():
        finite = columns[name][np.isfinite(columns[name])] if dtype == "f8" else columns[name]
        if np.abs(finite).max(initial=0) > MAX_READ:
            raise ValueError(f"{name}: a value beyond {MAX_READ:g}")
    return RunLog(**columns, wall_time=summary.get("wall_time"), decision_time=summary.get("decision_time"))


MAX_READ = 1e15
"""Seconds and tokens in a file of ours: beyond any run, and differences of times keep their microseconds."""


def _check_scalars(scalars: dict[str, Any]) -> None:
    """What stands beside the columns. Raises ValueError naming the field."""
    for name, kinds in {"sim_duration": (int, float), "start_time": (int, float), "num_blocks": (int,),
                        "block_size": (int,)}.items():  # fmt: skip
        value = scalars[name]
        if type(value) not in kinds or not abs(value) <= MAX_READ:
            raise ValueError(f"{name}: expected a number, found {str(value)[:40]}")
    for name in ("tenants", "slo_classes", "notes"):
        value = scalars[name]
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise ValueError(f"{name}: expected texts, found {str(value)[:40]}")
