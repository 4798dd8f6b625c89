"""Results of any kind as records: our files, a directory of them, and vllm bench's."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

from slacktide.core.types import SLO
from slacktide.errors import InputError
from slacktide.metrics.bench import bench_run, read_json
from slacktide.metrics.log import RunLog
from slacktide.metrics.slo import with_slo
from slacktide.metrics.summary import summarize
from slacktide.report.files import DETAILED, REQUESTS, SUMMARY, Record, read_run

COMPARE = "compare.json"
HEADS = (SUMMARY, COMPARE, "goodput.json", "sweep.json", "advise.json", "validation.json")
"""The file of each verb that stands for all of its result."""

_ARRAYS = ("ttfts", "itls", "input_lens", "output_lens")
_BENCH_SETTINGS = ("backend", "model_id", "request_rate", "burstiness", "max_concurrency", "num_prompts")
_KINDS = "a run's summary.json, a comparison, or a result of `vllm bench serve --save-result`"


def load_results(
    path: str | os.PathLike[str], slo: SLO | None = None, *, mode: str = "deadline", tolerated_late_share: float = 0.0
) -> list[Record]:
    """Records of the results at `path`: a file, or a directory that holds a run, a comparison or several of either.

    With `slo`, or another `mode` or `tolerated_late_share` than the usual one, every run is judged anew; that needs
    per-request figures. Raises InputError for what is no result, or cannot be judged.
    """
    return [record for record, _ in load_runs(path, slo, mode=mode, tolerated_late_share=tolerated_late_share)]


def load_runs(
    path: str | os.PathLike[str], slo: SLO | None = None, *, mode: str = "deadline", tolerated_late_share: float = 0.0
) -> list[tuple[Record, RunLog | None]]:
    """As `load_results`, each record with the run itself where the files hold it (figures need it)."""
    judged: list[tuple[Record, RunLog | None]] = []
    for record, log in _load_any(Path(path)):
        if slo is None and mode == "deadline" and tolerated_late_share == 0.0:
            judged.append((record, log))
            continue
        if log is None:
            label = record.get("label")
            raise InputError(
                f"{path}: run {label!r} has no per-request figures to judge anew: give the directory that --out "
                "wrote, or a file written with --save-detailed"
            )
        again = log if slo is None else with_slo(log, slo)
        summary = summarize(again, mode=mode, tolerated_late_share=tolerated_late_share)
        extra = {key: value for key, value in record["summary"].items() if key not in summary}
        judged.append((record | {"summary": summary | extra}, again))
    return judged


def _load_any(path: Path) -> list[tuple[Record, RunLog | None]]:
    if not path.exists():
        raise InputError(f"{path}: no such file or directory")
    return _load_directory(path) if path.is_dir() else _load_file(path)


_PARTS = ("violations", "end_reasons", "step_mode_share", "step_mode_time_share", "classes", "tenants")
"""Figures of a summary that are objects."""


def only_one(folder: Path) -> None:
    """Raise InputError for a directory that several verbs wrote to: which result is meant, nobody can tell."""
    found = [name for name in HEADS if (folder / name).is_file()]
    if len(found) > 1:
        raise InputError(f"{folder}: holds several results ({', '.join(found)}); name one of these files")


def _load_directory(folder: Path) -> list[tuple[Record, RunLog | None]]:
    only_one(folder)
    if (folder / SUMMARY).is_file():
        return [_load_run(folder)]
    below = [_load_run(child) for child in sorted(folder.iterdir()) if (child / SUMMARY).is_file()]
    if (folder / COMPARE).is_file():
        logs = {record.get("label"): log for record, log in below}
        return [(record, logs.get(record.get("label"), log)) for record, log in _load_file(folder / COMPARE)]
    if below:
        return below
    files = sorted(folder.glob("*.json"))
    if not files:
        raise InputError(f"{folder}: no result in this directory; expected {SUMMARY}, {COMPARE} or other JSON results")
    return [run for file in files for run in _load_file(file)]


def _load_run(folder: Path) -> tuple[Record, RunLog | None]:
    """A run's directory. Without its Parquet files (they are large, and may have been left behind) the record alone."""
    if (folder / REQUESTS).is_file():
        record, log = read_run(folder)
        return _checked(record, folder / SUMMARY), log
    return _from_record(read_json(folder / SUMMARY), folder / SUMMARY)


def _load_file(path: Path) -> list[tuple[Record, RunLog | None]]:
    if path.name == SUMMARY and (path.parent / REQUESTS).is_file():
        return [_load_run(path.parent)]
    data = read_json(path)
    if isinstance(data.get("runs"), list):
        if not data["runs"]:
            raise InputError(f"{path}: `runs` is empty")
        return [_from_record(run, f"{path}: runs[{i}]") for i, run in enumerate(data["runs"])]
    if "summary" in data:
        return [_from_record(data, path)]
    if ("completed" in data and "duration" in data) or all(name in data for name in _ARRAYS):
        return [_from_bench(data, path)]
    raise InputError(f"{path}: no known kind of result; expected {_KINDS}")


def _checked(record: Any, where: object) -> Record:
    if not isinstance(record, dict) or not isinstance(record.get("summary"), dict):
        if isinstance(record, dict) and "evaluations" in record:
            raise InputError(f"{where}: found by 'slacktide goodput': rates, no run to tabulate; simulate one of them")
        raise InputError(f"{where}: expected a record with a `summary`, found {str(record)[:40]}")
    check_figures(record["summary"], where)
    check_texts(record["summary"], where)
    check_texts(record, where)
    name = record.get("label") or record.get("policy")
    return record if record.get("label") else record | {"label": name or "run"}


def check_texts(record: Record, where: object) -> None:
    """Raise InputError for notes that are no list of texts, or a name that is no text."""
    notes = record.get("notes")
    if notes is not None and not (isinstance(notes, list) and all(isinstance(note, str) for note in notes)):
        raise InputError(f"{where}: notes: expected a list of texts")
    for key in ("label", "policy", "profile", "profile_label", "profile_errors", "profile_validation"):
        if record.get(key) is not None and not isinstance(record[key], str):
            raise InputError(f"{where}: {key} is {str(record[key])[:40]!r}, expected text")


def check_figures(figures: dict[str, Any], where: object) -> None:
    """Raise InputError for the first figure that is no number; parts, and rows of classes and tenants, as well."""
    for key, value in figures.items():
        if value is None or key == "notes":
            continue
        if key == "slo_mode":
            kind, good = "text", isinstance(value, str)
        elif key in _PARTS:
            kind, good = "an object", isinstance(value, dict)
        else:
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            kind, good = "a number", number and abs(value) <= sys.float_info.max
        if not good:
            raise InputError(f"{where}: {key} is {str(value)[:40]!r}, expected {kind}")
        if key in ("classes", "tenants"):
            for name, row in value.items():
                if not isinstance(row, dict):
                    raise InputError(f"{where}: {key}: {name} is {str(row)[:40]!r}, expected an object")
                check_figures(row, f"{where}: {key}: {name}")
        elif key in _PARTS:
            check_figures(value, f"{where}: {key}")


def _from_record(data: Any, where: object) -> tuple[Record, RunLog | None]:
    """A record; its run too where it carries --save-detailed's arrays, which are kept out of the record."""
    record = _checked(data, where)
    if not all(name in record for name in _ARRAYS):
        return record, None
    arrays = record | {"duration": record["summary"].get("duration"), "completed": None}
    log, _ = bench_run(arrays, where=str(where))
    return {key: value for key, value in record.items() if key not in DETAILED}, log


def _from_bench(data: dict[str, Any], path: Path) -> tuple[Record, RunLog | None]:
    """A vllm bench file: our figures when it has per-request arrays, else its own figures, and a note that says so."""
    record: Record = {
        "policy": None,
        "label": str(data.get("label") or path.stem),
        "parameters": {name: data[name] for name in _BENCH_SETTINGS if name in data},
        "profile": None,
        "seed": data.get("seed"),
        "source": "vllm bench serve",
    }
    if any(name in data for name in _ARRAYS):
        log, summary = bench_run(data, where=str(path))
        return record | {"summary": summary}, log
    own: dict[str, Any] = {key: _finite(value) for key, value in data.items() if isinstance(value, (int, float))}
    own["notes"] = [f"{path.name}: vllm bench's own figures; no per-request arrays to check them by"]
    return record | {"summary": own}, None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
