"""BurstGPT: `Timestamp` (s), `Request tokens`, `Response tokens`, and in newer files `Session ID`, `Elapsed time`.

Failed requests have 0 response tokens; they are left out and counted, unless the options give them an output length.
Requests of all models count. https://github.com/HPMLL/BurstGPT
"""

from __future__ import annotations

import numpy as np

from slacktide.errors import InputError
from slacktide.workload.formats.base import (
    ReadOptions,
    Trace,
    check_seconds,
    check_tokens,
    drop_rows,
    first_bad,
    sort_by_time,
)
from slacktide.workload.formats.columns import Columns

REQUIRED = ("Timestamp", "Request tokens", "Response tokens")
OPTIONAL = ("Session ID", "Elapsed time", "Model", "Total tokens", "Log Type")


def read_burstgpt(columns: Columns, options: ReadOptions) -> Trace:
    """BurstGPT CSV -> Trace with times from the first request on. Raises InputError naming line and column."""
    prompts = check_tokens(columns.numbers("Request tokens"), "Request tokens", columns.locate, lowest=0)
    outputs = check_tokens(columns.numbers("Response tokens"), "Response tokens", columns.locate, lowest=0)
    stamps = columns.numbers("Timestamp")
    row = first_bad(np.isfinite(stamps) & (stamps >= 0))
    if row is not None:
        raise InputError(f"{columns.locate(row)}: Timestamp is {stamps[row]:g}, expected seconds from 0 on")
    # From the first row on: epoch seconds are fine.
    arrival = check_seconds(stamps - stamps.min(), "Timestamp", columns.locate)
    session = columns.labels("Session ID") if "Session ID" in columns else None
    failed = outputs == 0
    kept = options.failed_output_tokens
    trace = Trace(
        name=columns.path,
        num_prompt_tokens=prompts,
        num_output_tokens=outputs if kept is None else np.where(failed, kept, outputs),
        arrival_time=arrival,
        session=session,
        failed=failed,
        format="burstgpt",
        notes=columns.unused_note() + kept_note(columns.path, int((failed & (prompts > 0)).sum()), kept),
    )
    reasons = {"with 0 response tokens (failed)": failed} if kept is None else {}
    trace = drop_rows(trace, reasons | {"with 0 request tokens": prompts == 0})
    return sort_by_time(trace, from_first=True)


def kept_note(path: str, failed: int, tokens: int | None) -> tuple[str, ...]:
    """The note on failed requests that an option keeps."""
    if tokens is None or not failed:
        return ()
    return (f"{path}: kept {failed} failed requests, marked as such, with {tokens} output tokens each",)
