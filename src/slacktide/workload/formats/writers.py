"""Writing a `Workload` as our CSV or Parquet, or as Mooncake JSONL (which most replay tools read)."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from slacktide.errors import InputError, unknown_name
from slacktide.workload.formats.own import block_size_metadata
from slacktide.workload.requests import DEFAULT_LABELS, Workload

_SUFFIXES = {".csv": "csv", ".parquet": "parquet", ".jsonl": "mooncake", ".json": "mooncake"}


def write_trace(workload: Workload, path: str | Path, format: str | None = None) -> None:
    """Write a workload; `format` is csv, parquet or mooncake, by default what the suffix says.

    Columns that hold only defaults are left out. Raises InputError for an unknown format or suffix, a closed loop
    (it has no times), or, in Mooncake JSONL, requests with an abort time.
    """
    file = Path(path)
    kind = format or _SUFFIXES.get(file.suffix.lower(), file.suffix or str(path))
    if kind not in _SUFFIXES.values():
        raise unknown_name("format to write", kind, set(_SUFFIXES.values()))
    if workload.closed is not None:
        raise InputError(f"{path}: the arrivals of a closed loop depend on the server and cannot be written")
    try:
        if kind == "mooncake":
            _write_mooncake(workload, file)
        else:
            _write_table(workload, file, kind)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from None


def _columns(workload: Workload) -> dict[str, Any]:
    """Columns of our format as numpy arrays or lists; those with defaults only are missing."""
    columns: dict[str, Any] = {
        "arrival_s": workload.arrival_time,
        "prompt_tokens": workload.num_prompt_tokens,
        "output_tokens": workload.num_output_tokens,
        "max_tokens": workload.max_tokens,
    }
    for name, values in (
        ("slo_ttft_ms", workload.slo_ttft),
        ("slo_tbt_ms", workload.slo_tbt),
        ("slo_e2el_ms", workload.slo_e2e),
    ):
        if np.isfinite(values).any():
            columns[name] = values * 1e3
    if workload.priority.any():
        columns["priority"] = workload.priority
    for name, labels, codes in (
        ("slo_class", workload.slo_classes, workload.slo_class),
        ("tenant", workload.tenants, workload.tenant),
    ):
        if labels != DEFAULT_LABELS:
            columns[name] = [labels[code] for code in codes]
    if workload.sessions:
        columns["session_id"] = [workload.sessions[code] if code >= 0 else None for code in workload.session]
    if np.isfinite(workload.abort_time).any():
        columns["abort_s"] = workload.abort_time
    return columns


def _write_table(workload: Workload, file: Path, kind: str) -> None:
    import pyarrow as pa
    import pyarrow.csv as pacsv
    import pyarrow.parquet as pq

    arrays: dict[str, Any] = {}
    for name, values in _columns(workload).items():
        no_value = np.isposinf(values) if isinstance(values, np.ndarray) and values.dtype == np.float64 else None
        arrays[name] = pa.array(values, mask=no_value)
    metadata = None
    if workload.hash_ids is not None:
        ids, offsets = workload.hash_ids
        metadata = block_size_metadata(workload.hash_block_size)
        if kind == "parquet":
            arrays["hash_ids"] = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(ids))
        else:
            lists = (ids[first:last] for first, last in pairwise(offsets))
            arrays["hash_ids"] = [" ".join(map(str, part.tolist())) for part in lists]
    table = pa.table(arrays, metadata=metadata)
    if kind == "parquet":
        pq.write_table(table, file, compression="zstd")
    else:
        pacsv.write_csv(table, file)


def _write_mooncake(workload: Workload, file: Path) -> None:
    columns = _columns(workload)
    if "abort_s" in columns:
        raise InputError(f"{file}: Mooncake JSONL cannot hold abort times; write CSV or Parquet")
    renamed = {"prompt_tokens": "input_length", "output_tokens": "output_length"}
    lists = {renamed.get(name, name): np.asarray(values).tolist() for name, values in columns.items()}
    stamps = lists.pop("arrival_s")
    with file.open("w", encoding="utf-8", newline="\n") as out:
        for row, seconds in enumerate(stamps):
            stamp = round(seconds * 1e3, 6)  # nanoseconds: more digits are noise of the conversion
            record: dict[str, Any] = {"timestamp": int(stamp) if stamp == int(stamp) else stamp}
            for name, values in lists.items():
                if values[row] is not None and values[row] != np.inf:
                    record[name] = values[row]
            if workload.hash_ids is not None:
                ids, offsets = workload.hash_ids
                record["hash_ids"] = ids[offsets[row] : offsets[row + 1]].tolist()
            out.write(json.dumps(record) + "\n")
