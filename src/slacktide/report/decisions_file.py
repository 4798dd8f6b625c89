"""decisions.parquet: what the policy decided in each step of a run, one row per step."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from slacktide.errors import InputError
from slacktide.metrics.decisions import Decisions
from slacktide.report.files import DECISIONS, META, read_table


def write_decisions(path: Path, decisions: Decisions) -> None:
    """One row per step; the preemptions after the last step are those of step num_steps, in the file's metadata."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    m = decisions.num_steps
    edges = np.arange(m + 1)
    chunks = np.searchsorted(decisions.chunk_step, edges).astype(np.int32)
    losses = np.searchsorted(decisions.preempted_step, edges).astype(np.int32)

    def lists(offsets: Any, values: Any) -> Any:
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values[: offsets[-1]].astype(np.int32)))

    columns = {
        "chunk_requests": lists(chunks, decisions.chunk_request),
        "chunk_tokens": lists(chunks, decisions.chunk_tokens),
        "preempted": lists(losses, decisions.preempted_request),
        "predicted": pa.array(decisions.predicted, from_pandas=True),
        "why": pa.DictionaryArray.from_arrays(
            decisions.reason.astype(np.int32), pa.array(decisions.reasons, pa.string())
        ),
    }
    after = decisions.preempted_request[losses[-1] :].tolist()
    table = pa.table(columns).replace_schema_metadata({META: json.dumps({"format": 1, "preempted_after": after})})
    with path.open("wb") as file:
        pq.write_table(table, file, compression="zstd", use_dictionary=["why"])


def read_decisions(directory: str | os.PathLike[str]) -> Decisions | None:
    """What `write_run` wrote of the decisions; None where they were not recorded. Raises InputError for a bad file."""
    path = Path(directory) / DECISIONS
    if not path.is_file():
        return None
    table = read_table(path)
    try:
        after = json.loads((table.schema.metadata or {})[META])["preempted_after"]
        if not isinstance(after, list) or not all(type(row) is int and 0 <= row < 2**31 for row in after):
            raise ValueError(f"preempted_after: expected numbers of requests, found {str(after)[:40]}")
        step = np.arange(len(table))

        def column(name: str) -> tuple[Any, Any]:
            lists = table.column(name).combine_chunks()
            sizes = lists.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
            with np.errstate(invalid="raise"):  # NaN and infinity are no numbers of requests
                return np.repeat(step, sizes), lists.flatten().to_numpy(zero_copy_only=False).astype(np.int64)

        why = table.column("why").combine_chunks()
        preempted_step, preempted = column("preempted")
        return Decisions(
            num_steps=len(table),
            chunk_step=column("chunk_requests")[0],
            chunk_request=column("chunk_requests")[1],
            chunk_tokens=column("chunk_tokens")[1],
            preempted_step=np.concatenate([preempted_step, np.full(len(after), len(table))]).astype(np.int64),
            preempted_request=np.concatenate([preempted, after]).astype(np.int64),
            predicted=table.column("predicted").to_numpy().astype(np.float64),
            reason=why.indices.to_numpy().astype(np.int64),
            reasons=tuple(why.dictionary.to_pylist()),
        )
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, NotImplementedError) as error:
        raise InputError(f"{path}: no decisions of slacktide's, or damaged ({error})") from error
