"""From what the clients saw to the `RunLog` and the record that every other run has.

Times count from the start of the replay. A request's arrival is its intended send time (in a closed loop: the moment
its user was ready).
"""

from __future__ import annotations

import datetime
import math
import re
from collections import Counter
from typing import Any

import numpy as np

from slacktide.core.types import FloatArray
from slacktide.loadgen.client import Outcome
from slacktide.loadgen.replay import Replay
from slacktide.metrics.log import CUT_OFF, END_REASONS, FAILED, FINISHED, RunLog
from slacktide.workload.requests import Workload

LATE = 0.02
"""Seconds a client may send late before the report says so: twice the resolution that users read latencies at."""


def arrived(replay: Replay) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Rows whose time had come before the run ended: the others never arrived, and are left out.

    A server that is gone is no reason to leave a request out: it would have arrived, and failed.
    """
    came = [not (math.isnan(o.due) and o.reason == CUT_OFF) for o in replay.outcomes]
    return np.flatnonzero(came)


def run_log(workload: Workload, replay: Replay) -> RunLog:
    """The run as a log, judged by the workload's SLOs; what readers must know stands in `notes`."""
    rows = arrived(replay)
    outcomes = [replay.outcomes[row] for row in rows]
    work = workload.take(rows) if len(rows) < len(workload) else workload
    due = _column(outcomes, "due") - replay.start
    arrival = np.where(np.isnan(due), work.arrival_time, due) if workload.closed else work.arrival_time
    end = _column(outcomes, "end") - replay.start
    reason = np.array([o.reason for o in outcomes], dtype=np.int8)
    never_sent = np.isnan(end) & (reason != CUT_OFF)
    tokens = [np.array(o.token_times) - replay.start for o in outcomes]
    delivered = np.array([o.delivered for o in outcomes], dtype=np.int64)
    wanted = np.maximum(work.num_output_tokens, delivered)
    # A server that ends early by itself (no ignore_eos) has served the request: nothing more was to come.
    wanted = np.where(reason == FINISHED, delivered, wanted)
    prompt = [o.prompt_tokens or int(n) for o, n in zip(outcomes, work.num_prompt_tokens, strict=True)]
    return RunLog(
        arrival_time=arrival,
        num_prompt_tokens=np.array(prompt, dtype=np.int64),
        num_output_tokens=wanted,
        end_time=np.where(never_sent, arrival, end),
        end_reason=reason,
        slo_ttft=work.slo_ttft,
        slo_tbt=work.slo_tbt,
        slo_e2e=work.slo_e2e,
        tenant=work.tenant,
        slo_class=work.slo_class,
        abort_time=arrival + (work.abort_time - work.arrival_time),
        token_offsets=np.concatenate([[0], np.cumsum([len(times) for times in tokens])]).astype(np.int64),
        token_time=np.concatenate([np.empty(0), *tokens]),
        num_delivered_tokens=delivered,
        sim_duration=_duration(replay, outcomes),
        tenants=work.tenants,
        slo_classes=work.slo_classes,
        notes=(*workload.notes, *_notes(workload, replay, outcomes)),
    )


def _column(outcomes: list[Outcome], name: str) -> FloatArray:
    return np.array([getattr(outcome, name) for outcome in outcomes], dtype=np.float64)


def _duration(replay: Replay, outcomes: list[Outcome]) -> float:
    """To the last answer, as vllm bench counts it; to the end of the run when something was open then."""
    last = max((o.end for o in outcomes if not math.isnan(o.end)), default=replay.end)
    is_open = any(o.reason == CUT_OFF for o in outcomes)
    return max(replay.end if is_open or math.isnan(last) else last, replay.start) - replay.start


def _notes(workload: Workload, replay: Replay, outcomes: list[Outcome]) -> list[str]:
    notes, n = [], len(workload)
    wanted = workload.num_output_tokens.tolist()
    finished = [(o, want) for o, want in zip(replay.outcomes, wanted, strict=True) if o.reason == FINISHED]
    if replay.gone_since is not None:
        unsent = sum(math.isnan(o.sent) and o.reason == FAILED for o in outcomes)
        notes.append(
            f"the server could not be reached from {replay.gone_since - replay.start:.1f} s on: the run ended, "
            f"{unsent} of {n} requests were not sent and count as failed"
        )
    if replay.interrupted:
        notes.append("interrupted: judged by what had happened until then")
    if len(outcomes) < n:
        notes.append(f"{n - len(outcomes)} of {n} requests were not due when the run ended, and are left out")
    chunked = sum(o.by_chunk for o, _ in finished)
    if chunked:
        notes.append(
            f"{chunked} of {len(finished)} answers came without token counts: their token times are those of chunks"
        )
    short = sum(o.delivered < want for o, want in finished)
    if short:
        notes.append(f"{short} of {len(finished)} answers ended before their length (does the server know ignore_eos?)")
    lag = _lags(outcomes)
    p99 = float(np.percentile(lag, 99)) if len(lag) else 0.0
    if p99 > LATE:
        late = f"{lag.max() * 1e3:.0f} ms late in sending (p99 {p99 * 1e3:.0f} ms)"
        notes.append(f"this client was up to {late}: latencies include that")
    return notes


def _lags(outcomes: list[Outcome]) -> FloatArray:
    """Seconds between a request's time and the client's turn; without the wait for a free place."""
    lag = _column(outcomes, "woken") - _column(outcomes, "due")
    return np.asarray(lag[~np.isnan(lag)])


def client_figures(replay: Replay) -> dict[str, Any]:
    """How the client itself did, and what errors it met, by how often."""
    outcomes = replay.outcomes
    lag = _lags(outcomes)
    queued = _column(outcomes, "sent") - _column(outcomes, "woken")
    queued = queued[~np.isnan(queued)]
    errors = Counter(
        re.sub(r" after \d+ tokens", "", _error(o)) for o in outcomes if o.reason not in (FINISHED, CUT_OFF)
    )
    return {
        "num_warmups": replay.num_warmups,
        "p99_send_lag_ms": float(np.percentile(lag, 99)) * 1e3 if len(lag) else None,
        "max_send_lag_ms": float(lag.max()) * 1e3 if len(lag) else None,
        "mean_client_queue_ms": float(queued.mean()) * 1e3 if len(queued) else None,
        "max_client_queue_ms": float(queued.max()) * 1e3 if len(queued) else None,
        "chunk_timed": sum(o.by_chunk for o in outcomes),
        "server_gone_since": None if replay.gone_since is None else replay.gone_since - replay.start,
        "interrupted": replay.interrupted,
        "errors": dict(errors.most_common()),
    }


def _error(outcome: Outcome) -> str:
    """As in `errors` of a detailed result: the text begins with the reason."""
    return "" if outcome.reason == FINISHED else f"{END_REASONS[outcome.reason]}: {outcome.error}".removesuffix(": ")


def client_arrays(replay: Replay) -> dict[str, list[Any]]:
    """What a detailed result has from the client: texts of errors, and vllm bench's `queue_times` (seconds)."""
    outcomes = [replay.outcomes[row] for row in arrived(replay)]
    waits = np.nan_to_num(_column(outcomes, "sent") - _column(outcomes, "due"), nan=0.0)
    return {"errors": [_error(o) for o in outcomes], "queue_times": waits.tolist()}


def bench_keys(summary: dict[str, Any], replay: Replay, settings: dict[str, Any]) -> dict[str, Any]:
    """vllm bench's scalar keys on the top level of the record, for tools that read such files."""
    head = {"date": datetime.datetime.now().strftime("%Y%m%d-%H%M%S"), "model_id": replay.model, **settings}
    return head | {key: value for key, value in summary.items() if isinstance(value, (int, float)) or value is None}
