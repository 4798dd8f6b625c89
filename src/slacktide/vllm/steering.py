"""From a plan to vLLM's own levers for one step.

Nothing here decides: a checked plan becomes a `Steering`, which rearranges the scheduler, lets `super().schedule()`
run, and puts back what it moved. The levers, all of them in `compat.py`:

| part of the plan | lever |
|---|---|
| tokens of a row, rows left out | `_reserve_prefill_lookahead`, asked by vLLM for every row in both passes |
| order of running rows | order of the running list |
| who is admitted, in which order | head of the waiting queue, and the bound on active requests |
| token cap | `max_num_scheduled_tokens` |
| preempted rows | taken out of the running list and preempted before anything is allocated |
| rejected rows | ended with FINISHED_ERROR |
| relegated rows | a column of the mirror; vLLM is not touched |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from slacktide.core.types import RUNNING, IntArray, Limits, Live, Plan
from slacktide.vllm import compat
from slacktide.vllm.mirror import Mirror

NO_LIMIT = 1 << 62
"""Chunk of a row that gets all it needs: vLLM may then add speculative tokens, which no plan counts."""


class PlanError(ValueError):
    """A plan that no engine could run."""


class Chunks(NamedTuple):
    """A plan in vLLM's terms."""

    limits: dict[str, int]
    """Request id -> most tokens of this step, in service order; an id that is not here gets none."""
    running: list[Any] | None
    """Running requests to serve, in order; None when that is the order of vLLM's running list."""
    admitted: list[Any]
    """Waiting requests to admit, in order."""
    preempted: list[Any]
    rejected: list[Any]
    token_cap: int | None


def check_plan(plan: Plan, live: Live, limits: Limits) -> None:
    """Raise PlanError for rows that do not exist, doubles, tokens nobody needs, or too much of anything."""
    n = live.index.size
    rows, tokens = plan.rows, plan.num_scheduled_tokens
    for name in ("rows", "num_scheduled_tokens", "preempted", "rejected", "relegated"):
        column = getattr(plan, name)
        if not isinstance(column, np.ndarray) or column.ndim != 1 or column.dtype.kind not in "iu":
            raise PlanError(f"{name}: expected a one-dimensional array of whole numbers, found {column!r:.80}")
        if name != "num_scheduled_tokens" and column.size and (column.min() < 0 or column.max() >= n):
            raise PlanError(f"{name}: {column.min()}..{column.max()}, with rows 0..{n - 1}")
    if rows.size != tokens.size:
        raise PlanError(f"{rows.size} rows but {tokens.size} token counts")
    if plan.token_cap is not None and (
        isinstance(plan.token_cap, bool) or not isinstance(plan.token_cap, (int, np.integer))
    ):
        raise PlanError(f"token_cap={plan.token_cap!r}: expected a whole number or None")
    if plan.token_cap is not None and plan.token_cap < 0:
        raise PlanError(f"token_cap={plan.token_cap}: expected at least 0")
    named = rows
    if plan.preempted.size or plan.rejected.size:
        named = np.concatenate([rows, plan.preempted, plan.rejected])
    if named.size and np.bincount(named, minlength=n).max() > 1:
        raise PlanError("a row is named more than once among rows, preempted and rejected")
    runs = live.status == RUNNING
    if plan.preempted.size and not np.all(runs[plan.preempted]):
        raise PlanError("preempts a row that does not run")
    if not rows.size:
        return
    if tokens.min() <= 0:
        raise PlanError("gives a row no token, or less")
    if np.any(tokens > live.num_tokens_needed[rows]):
        raise PlanError("gives a row more tokens than it needs")
    if int(tokens.sum()) > limits.max_num_batched_tokens:
        raise PlanError(f"{int(tokens.sum())} tokens, over the budget of {limits.max_num_batched_tokens}")
    left = plan.preempted.size + int(runs[plan.rejected].sum())
    running = int(runs.sum()) - left + int((~runs[rows]).sum())
    if running > limits.max_num_seqs:
        raise PlanError(f"{running} running requests, with {limits.max_num_seqs} seats")


def chunks(
    plan: Plan, live: Live, slots: Callable[[IntArray], list[int]], mirror: Mirror, *, speculative: bool
) -> Chunks:
    """The plan in vLLM's terms. `slots` gives the mirror's slots behind rows of `live`."""
    rows, tokens = plan.rows, plan.num_scheduled_tokens
    runs = live.status[rows] == RUNNING
    # A waiting row's hits may be fewer than believed: only with speculation, whose padding must stay whole, is it free.
    needed = live.num_tokens_needed[rows]
    if not runs.all():
        needed = np.where(runs, needed, needed - live.num_cached_tokens[rows] if speculative else NO_LIMIT)
    found, objects = slots(rows), mirror.objects
    most = np.where(tokens >= needed, NO_LIMIT, tokens).tolist()
    order = live.admission_order[rows[runs]]
    in_order = bool(np.all(order[1:] > order[:-1]))
    flags = runs.tolist() if len(order) < len(found) or not in_order else []
    return Chunks(
        dict(zip(map(mirror.ids.__getitem__, found), most, strict=True)),
        None if in_order else [objects[slot] for slot, run in zip(found, flags, strict=True) if run],
        [objects[slot] for slot, run in zip(found, flags, strict=True) if not run] if len(order) < len(found) else [],
        [objects[slot] for slot in slots(plan.preempted)] if plan.preempted.size else [],
        [objects[slot] for slot in slots(plan.rejected)] if plan.rejected.size else [],
        None if plan.token_cap is None else int(plan.token_cap),
    )


class Steering:
    """One step's rearrangement of a scheduler. `begin`, then `super().schedule()`, then `end` in any case."""

    def __init__(self, scheduler: Any, plan: Chunks) -> None:
        self._scheduler, self._plan = scheduler, plan
        self._fields: list[tuple[str, Any]] = []
        self._order: list[Any] | None = None
        self._waiting: compat.WaitingOrder | None = None
        self.rejected: list[Any] = []
        """Requests ended by this step: their clients still have to be told."""

    def begin(self) -> None:
        """Rearrange. May raise: `end` then undoes what was done so far."""
        scheduler, plan = self._scheduler, self._plan
        if plan.rejected:
            self.rejected = compat.reject(scheduler, [request.request_id for request in plan.rejected])
        if plan.preempted:
            compat.preempt(scheduler, plan.preempted)
        if plan.running is not None:
            self._order = scheduler.running
            served = set(plan.running)
            rest = [request for request in scheduler.running if request not in served]
            scheduler.running = plan.running + rest
        if plan.admitted:
            self._waiting = compat.WaitingOrder(scheduler, plan.admitted)
        if plan.token_cap is not None:
            self._set("max_num_scheduled_tokens", min(plan.token_cap, scheduler.max_num_scheduled_tokens))
        lever = compat.admission_lever(scheduler)
        taken = len(scheduler.running) + scheduler.num_waiting_for_streaming_input
        self._set(lever, min(getattr(scheduler, lever), taken + len(plan.admitted)))
        limits, inherited = plan.limits, scheduler._reserve_prefill_lookahead
        plain = not getattr(scheduler, "num_prefill_lookahead", 0)  # then vLLM's own answer is n itself

        def most(request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
            limit = limits.get(request.request_id, 0)
            if not plain:
                num_new_tokens = inherited(request, num_computed_tokens, num_new_tokens)
            return limit if limit < num_new_tokens else num_new_tokens

        scheduler._reserve_prefill_lookahead = most  # shadows the method for this call

    def _set(self, name: str, value: Any) -> None:
        self._fields.append((name, getattr(self._scheduler, name)))
        setattr(self._scheduler, name, value)

    def end(self) -> None:
        """Put back everything that was rearranged, whatever happened meanwhile."""
        scheduler = self._scheduler
        scheduler.__dict__.pop("_reserve_prefill_lookahead", None)
        while self._fields:
            setattr(scheduler, *self._fields.pop())
        if self._order is not None:
            left = set(scheduler.running)
            before = set(self._order)
            scheduler.running = [r for r in self._order if r in left] + [
                r for r in scheduler.running if r not in before
            ]
            self._order = None
        if self._waiting is not None:
            self._waiting.restore()
            self._waiting = None
