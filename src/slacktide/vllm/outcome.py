"""How requests fared: token deadlines as tokens come out, and a verdict when a request ends.

The definitions are those of the reports: token k is due at arrival + ttft + k*tbt, a request attains its SLO when it
finishes with no token late and within its end-to-end target.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from slacktide.core.live import (
    ARRIVAL,
    MAX_TOKENS,
    NUM_PROMPT,
    PRIORITY,
    SLO_CLASS,
    SLO_E2E,
    SLO_TBT,
    SLO_TTFT,
    TENANT,
)
from slacktide.core.types import IntArray, token_deadline
from slacktide.vllm.metrics import Metrics
from slacktide.vllm.mirror import Mirror
from slacktide.vllm.steplog import Listener, Served

MISSED_TTFT, MISSED_TBT = 1, 2

ENDS = {
    "FINISHED_STOPPED": "finished",
    "FINISHED_LENGTH_CAPPED": "finished",
    "FINISHED_REPETITION": "finished",
    "FINISHED_IGNORED": "finished",
    "FINISHED_ABORTED": "aborted",
    "FINISHED_ERROR": "failed",
}
"""vLLM's final statuses -> our end reasons; a request that a plan rejected is told apart by the host."""


def tokens_out(mirror: Mirror, slots: IntArray, rows: IntArray, before: IntArray, now: float) -> None:
    """Rows got output tokens (they had `before` of them): note times, and who was late."""
    floats = mirror.table.floats
    due = token_deadline(floats[ARRIVAL, rows], floats[SLO_TTFT, rows], floats[SLO_TBT, rows], before)
    late = now > due
    if late.any():
        mirror.missed[slots[late]] |= np.where(before[late] == 0, MISSED_TTFT, MISSED_TBT)
    mirror.tokens_out(rows, now)


def ended(
    mirror: Mirror, metrics: Metrics, listeners: Sequence[Listener], request_id: str, rejected: bool, now: float
) -> None:
    """A request ended: count its verdict, tell who listens. Its row is still there."""
    slot = mirror.slot_of.get(request_id)
    if slot is None:
        return
    request: Any = mirror.objects[slot]
    row = int(mirror.row_of_slot[slot])
    ints, floats = mirror.table.ints, mirror.table.floats
    slo_class = mirror.targets.classes.names[int(ints[SLO_CLASS, row])] or "default"
    end = "rejected" if rejected else ENDS.get(request.status.name, "failed")
    metrics.add("requests", slo_class, end)
    arrival, e2e = float(floats[ARRIVAL, row]), float(floats[SLO_E2E, row])
    kinds = [kind for bit, kind in ((MISSED_TTFT, "ttft"), (MISSED_TBT, "tbt")) if mirror.missed[slot] & bit]
    if now > arrival + e2e:
        kinds.append("e2el")
    if end == "finished" and not kinds:
        metrics.add("slo_attained", slo_class)
    for kind in kinds:
        metrics.add("slo_violations", slo_class, kind)
    if not listeners:
        return
    served = Served(
        arrival, int(ints[NUM_PROMPT, row]), int(request.num_output_tokens), int(ints[MAX_TOKENS, row]),
        float(floats[SLO_TTFT, row]), float(floats[SLO_TBT, row]), e2e, int(ints[PRIORITY, row]),
        mirror.targets.classes.names[int(ints[SLO_CLASS, row])],
        mirror.targets.tenants.names[int(ints[TENANT, row])],
        now if end == "aborted" else None, tuple(request.block_hashes),
    )  # fmt: skip
    for listener in listeners:
        listener.add(served)


def predicted_ttft(mirror: Mirror, step_times: Any, max_tokens: int, max_seqs: int, finish_gap: float) -> float:
    """Seconds until the first token of a request of typical length that arrives now. A rough forecast.

    The prompt tokens ahead of it, in steps of the token budget beside all running decodes, at the belief's step time;
    and, with all seats taken, `finish_gap` seconds for every request that has to finish first.
    """
    from slacktide.core import shape as s

    live = mirror.table.live
    n = live.index.size
    needed = live.num_tokens_needed
    decode = live.is_decode
    typical = float(live.num_prompt_tokens.mean()) if n else 1.0
    ahead = float(needed[~decode].sum()) + typical
    decodes = int((decode & live.is_running).sum())
    chunk = max(1.0, min(float(max_tokens - decodes), ahead))
    shape = np.zeros((1, s.SHAPE_SIZE))
    shape[0, s.NUM_DECODES], shape[0, s.PREFILL_TOKENS] = decodes, chunk
    shape[0, s.NUM_TOKENS] = decodes + chunk
    shape[0, s.NUM_PREFILLS], shape[0, s.NUM_SEQUENCES] = 1, decodes + 1
    shape[0, s.DECODE_CONTEXT] = float(live.num_computed_tokens[decode].sum())
    shape[0, s.PREFILL_WORK] = shape[0, s.PREFILL_SQUARE] = chunk * chunk
    shape[0, s.PREFILL_MAX] = chunk
    time = math.ceil(ahead / chunk) * float(step_times(shape)[0])
    return time + max(0, n + 1 - max_seqs) * finish_gap
