"""Writes down what a policy decides while it runs in the simulator: a policy around a policy.

The engine asks it before every step (no compiled stretches), so a recorded run takes several times as long; its outcome
is the same to the byte.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from slacktide.core.policy import Policy
from slacktide.core.types import IntArray, Plan, StepResult, StepView
from slacktide.metrics.decisions import Decisions

_PENDING = 4
"""Plans whose outcome is still open, at most: two steps are in flight with pipeline depth 2, and one may come to
nothing."""


class Recorder:
    """A policy that hands everything on to `policy` and keeps what `decisions` tells."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.name = str(getattr(policy, "name", type(policy).__qualname__))
        self._observe = getattr(policy, "observe", None)
        self._pending: list[tuple[IntArray, IntArray, str, float]] = []  # requests, those with a prompt, why, predicted
        self._chunks: list[tuple[IntArray, IntArray]] = []  # per step: requests, tokens
        self._preempted: list[tuple[int, int]] = []
        self._predicted: list[float] = []
        self._reason: list[int] = []
        self._codes: dict[str, int] = {}

    def plan(self, view: StepView) -> Plan:
        """The policy's own plan."""
        plan = self._policy.plan(view if self._observe is not None else view._replace(last=None))
        if plan.rows.size or plan.preempted.size:
            requests = view.live.index[plan.rows]
            live = view.live
            # A request that comes back with all but one token in the prefix cache decodes, as the engine counts it.
            left = (live.num_tokens_needed - live.num_cached_tokens)[plan.rows]
            decodes = (left == 1) & (live.num_output_tokens + live.num_in_flight_tokens > 0)[plan.rows]
            prompts = requests[~decodes]
            seconds = np.nan if plan.predicted_step_time is None else float(plan.predicted_step_time)
            self._pending.append((requests, prompts, reason_text(plan.why), seconds))
            del self._pending[:-_PENDING]
        return plan

    def observe(self, result: StepResult) -> None:
        """Note what the step did; the policy learns it as ever."""
        step = len(self._reason)
        self._preempted += [(step, index) for index in result.preempted.tolist()]
        position = -1 if not result.indices.size else self._position(result.indices)
        _, prompts, why, seconds = self._pending.pop(position) if self._pending else (_NONE, _NONE, "", np.nan)
        if result.indices.size:
            if position >= 0:
                del self._pending[:position]  # plans that came to nothing
            chunk = np.isin(result.indices, prompts)
            self._chunks.append((result.indices[chunk], result.tokens[chunk]))
            self._predicted.append(seconds)
            self._reason.append(self._codes.setdefault(why, len(self._codes)))
        if self._observe is not None:
            self._observe(result)

    def _position(self, indices: IntArray) -> int:
        """The oldest open plan that holds all these requests."""
        for position, (requests, *_) in enumerate(self._pending):
            if np.isin(indices, requests).all():
                return position
        return 0

    def decisions(self) -> Decisions:
        """All that was decided so far, as columns."""
        sizes = [requests.size for requests, _ in self._chunks]
        m = len(self._reason)
        preempted = np.array(self._preempted, dtype=np.int64).reshape(-1, 2)
        return Decisions(
            num_steps=m,
            chunk_step=np.repeat(np.arange(m), sizes),
            chunk_request=_joined([requests for requests, _ in self._chunks]),
            chunk_tokens=_joined([tokens for _, tokens in self._chunks]),
            preempted_step=preempted[:, 0],
            preempted_request=preempted[:, 1],
            predicted=np.array(self._predicted, dtype=np.float64),
            reason=np.array(self._reason, dtype=np.int64),
            reasons=tuple(self._codes),
        )


_NONE: IntArray = np.empty(0, dtype=np.int64)


def _joined(parts: list[IntArray]) -> IntArray:
    return np.concatenate(parts).astype(np.int64) if parts else _NONE


def reason_text(why: dict[str, Any] | None) -> str:
    """A plan's `why` as one line of JSON; "" for none. Floats to six digits: equal reasons then are one text."""
    return "" if not why else json.dumps(_plain(why), separators=(", ", ": "))


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if np.isfinite(value) else str(value)
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
