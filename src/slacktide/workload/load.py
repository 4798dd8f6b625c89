"""From what the command line says to a `Workload`: `load_workload` is the one entry."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from slacktide.core.types import FloatArray, IntArray
from slacktide.errors import InputError
from slacktide.workload.arrivals import Arrival, arrival_times, parse_arrival
from slacktide.workload.formats.base import Labels, ReadOptions, Trace
from slacktide.workload.requests import DEFAULT_LABELS, MAX_REQUEST_TOKENS, Workload
from slacktide.workload.slos import IsolatedPrefill, SLOs, parse_slos, slo_columns
from slacktide.workload.specs import check_keys, parse_whole, split_spec
from slacktide.workload.synthetic import check_count, draw, generate, is_generated


def load_workload(
    trace: str,
    *,
    rate: float | None = None,
    arrival: str | Arrival = "trace",
    num_prompts: int | None = None,
    seed: int = 0,
    slo: str | SLOs | None = None,
    max_tokens: int | str | None = None,
    isolated_prefill: IsolatedPrefill | None = None,
    options: ReadOptions | None = None,
) -> Workload:
    """The workload of a packaged name, a file, `synthetic:...` or `mix:...`.

    `rate` in requests/s rescales a trace's own times; for data without times, and for the other arrival processes, it
    is the mean rate (without a word on `arrival`: Poisson). `num_prompts` takes the first rows, or draws from length
    tables. `slo` is text as in `slos.py`; SLO columns of the trace go before it. `max_tokens`: the trace's column goes
    first; then a number for all, `"exact"` (= the true output length), or None: the trace's largest output length, as
    an operator who knows the service's cap would set. Longer outputs are cut there, and counted.
    Raises InputError, also when there are neither times nor a rate.
    """
    process = parse_arrival(arrival) if isinstance(arrival, str) else arrival
    slos = parse_slos(slo) if isinstance(slo, str) else slo
    if num_prompts is not None:
        check_count(num_prompts)
    table = load_trace(trace, num_prompts, seed, options)
    timed = process.kind == "trace" and table.arrival_time is not None
    notes: list[str] = []
    if not timed:
        process, rate = _process_for(table, process, rate, notes)
    table = _select(table, num_prompts, timed, seed)
    times = np.asarray(table.arrival_time) if timed else arrival_times(process, len(table), rate, seed)
    workload = _assemble(table, times, process, slos, max_tokens, isolated_prefill, notes)
    return workload.scaled_to(rate) if timed and rate is not None else workload


def parse_read_options(text: str) -> ReadOptions:
    """`time_unit=us,hash_block_size=64,...` -> ReadOptions; a switch is `drop_empty=true`. Raises InputError."""
    _, given = split_spec(f"read:{text}", "--read")
    kinds = {field.name: str(field.type) for field in fields(ReadOptions)}
    check_keys(given, kinds, "--read")
    values: dict[str, Any] = {}
    for name, value in given.items():
        if kinds[name].startswith("int"):
            values[name] = parse_whole(value, f"--read {name}", 1, MAX_REQUEST_TOKENS)
        elif kinds[name] == "bool":
            if value.lower() not in ("true", "false"):
                raise InputError(f"--read {name}={value}: expected true or false")
            values[name] = value.lower() == "true"
        else:
            values[name] = value
    return ReadOptions(**values)


def load_trace(trace: str, n: int | None = None, seed: int = 0, options: ReadOptions | None = None) -> Trace:
    """The rows behind a packaged name, a file, `synthetic:...` or `mix:...`, before times and SLOs are set."""

    def read(name: str) -> Trace:
        try:
            stat = Path(name).stat()
        except (OSError, ValueError):  # a packaged name, or a path that read_trace will complain about
            return _read(name, options, None)
        return _read(name, options, (stat.st_mtime_ns, stat.st_size))

    return generate(trace, n, seed, read) if is_generated(trace) else read(trace)


@lru_cache(maxsize=4)  # a search asks for the same trace at every rate
def _read(name: str, options: ReadOptions | None, version: tuple[int, int] | None) -> Trace:
    """The rows of a packaged trace or a file; `version` tells a changed file from the one read before."""
    from slacktide.workload.traces import read_trace

    del version
    return read_trace(name, options)


def _process_for(table: Trace, process: Arrival, rate: float | None, notes: list[str]) -> tuple[Arrival, float | None]:
    """The arrival process and rate of requests whose own times are missing or unwanted."""
    if process.kind == "trace":
        if rate is None:
            raise InputError(
                f"{table.name} has no arrival times: give a rate (--rate REQUESTS_PER_SECOND) or an arrival"
                " process (--arrival closed:concurrency=32, ramp:start=1,end=10)"
            )
        how = f"Poisson arrivals at {rate:g} requests/s" if math.isfinite(rate) else "all arrive at once"
        notes.append(f"{table.name} has no arrival times: {how}")
        return Arrival("poisson", {}), rate
    own = table.arrival_time
    if process.needs_rate and rate is None and own is not None and len(own) > 1 and own[-1] > own[0]:
        rate = float((len(own) - 1) / (own[-1] - own[0]))
        notes.append(f"no rate given: {process.kind} arrivals at the trace's mean rate of {rate:.4g} requests/s")
    return process, rate


def _select(table: Trace, n: int | None, timed: bool, seed: int) -> Trace:
    """n rows: drawn from a length table, else the first ones; a file without times is repeated when it is short."""
    if table.shuffle:
        return draw(table, len(table) if n is None else n, seed)
    if n is None:
        return table
    if n <= len(table):
        return table.take(np.arange(n))
    if timed:
        raise InputError(
            f"{table.name} has only {len(table)} requests, {n} are wanted; take fewer (--num-prompts), or"
            " repeat rows under other arrivals (--arrival poisson)"
        )
    note = f"{table.name}: {n} requests from {len(table)} rows, so rows repeat"
    return replace(table.take(np.arange(n) % len(table)), notes=(*table.notes, note))


def _assemble(
    table: Trace,
    times: FloatArray,
    process: Arrival,
    slos: SLOs | None,
    max_tokens: int | str | None,
    isolated_prefill: IsolatedPrefill | None,
    notes: list[str],
) -> Workload:
    n = len(table)
    limits, outputs = _limits(table, max_tokens, notes)
    slo_class, slo_classes = _with_default(table.slo_class, n)
    tenant, tenants = _with_default(table.tenant, n)
    session, sessions = table.session or (np.full(n, -1, dtype=np.int64), ())
    columns = slo_columns(slos or SLOs(), table.num_prompt_tokens, slo_class, slo_classes, isolated_prefill)
    stated = (table.slo_ttft, table.slo_tbt, table.slo_e2e)
    targets = [
        base if own is None else np.where(np.isnan(own), base, own) for base, own in zip(columns, stated, strict=True)
    ]
    if slos is not None and any(column is not None and not np.isnan(column).all() for column in stated):
        notes.append(f"{table.name}: SLO columns of the trace go before the SLO given")
    patience = table.patience if table.patience is not None else np.full(n, np.inf)
    optional: dict[str, Any] = {
        name: getattr(table, name) for name in ("priority", "failed") if getattr(table, name) is not None
    }
    return Workload(
        arrival_time=times, num_prompt_tokens=table.num_prompt_tokens, num_output_tokens=outputs, max_tokens=limits,
        slo_ttft=targets[0], slo_tbt=targets[1], slo_e2e=targets[2], tenant=tenant, slo_class=slo_class,
        session=session, abort_time=times + patience, hash_ids=table.hash_ids,
        hash_block_size=table.hash_block_size, tenants=tenants, slo_classes=slo_classes, sessions=sessions,
        closed=process.closed, name=table.name, source=table.source, notes=(*table.notes, *notes), **optional,
    )  # fmt: skip


def _with_default(labels: Labels | None, n: int) -> Labels:
    """A label column without holes: empty cells get the label `default`."""
    if labels is None:
        return np.zeros(n, dtype=np.int64), DEFAULT_LABELS
    codes, texts = labels
    if (codes >= 0).all():
        return codes, texts
    texts = texts if DEFAULT_LABELS[0] in texts else (*texts, *DEFAULT_LABELS)
    return np.where(codes < 0, texts.index(DEFAULT_LABELS[0]), codes), texts


def _limits(table: Trace, max_tokens: int | str | None, notes: list[str]) -> tuple[IntArray, IntArray]:
    """(max_tokens, output tokens cut at it), i8 each, by the rule in `load_workload`."""
    outputs = table.num_output_tokens
    if isinstance(max_tokens, str) and max_tokens != "exact":
        if not max_tokens.strip().isascii() or not max_tokens.strip().isdigit():
            raise InputError(f"max_tokens {max_tokens!r}: expected a number of tokens, or exact")
        max_tokens = int(max_tokens.strip()[:20])
    if max_tokens == "exact":
        limits = outputs.copy()
    elif max_tokens is None:
        limits = np.full(len(table), int(outputs.max()), dtype=np.int64)
    else:
        if not 1 <= int(max_tokens) <= MAX_REQUEST_TOKENS:
            raise InputError(f"max_tokens {max_tokens}: expected 1 to {MAX_REQUEST_TOKENS:,}, or exact")
        limits = np.full(len(table), int(max_tokens), dtype=np.int64)
    if table.max_tokens is not None:
        limits = np.where(table.max_tokens > 0, table.max_tokens, limits)
    longer = int((outputs > limits).sum())
    if longer:
        notes.append(f"{table.name}: {longer} of {len(table)} outputs are longer than max_tokens and end there")
    return limits, np.minimum(outputs, limits)
