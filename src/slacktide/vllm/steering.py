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

from typing import Any, NamedTuple

import numpy as np

from slacktide.core.types import RUNNING, IntArray, Limits, Live, Plan
from slacktide.vllm import compat
from slacktide.vllm.kernels import LEFT, MOST, RUNS, SLOT, SPECIAL, read_plan
from slacktide.vllm.mirror import Mirror

_NO_ROWS: IntArray = np.empty(0, dtype=np.int64)


class PlanError(ValueError):
    """A plan that no engine could run."""


FEW = 32
"""Exceptions told to vLLM one by one; from there on naming every served row costs less than it saves."""


class Chunks(NamedTuple):
    """A plan in vLLM's terms."""

    ids: list[str]
    """Requests to serve, in order."""
    slots: IntArray
    """Their slots in the mirror."""
    tokens: IntArray
    """Their tokens."""
    most: IntArray
    """Most tokens that vLLM may give each: NO_LIMIT for one that gets all it needs."""
    limits: dict[str, int] | None
    """Request id -> most tokens, of the requests that vLLM would give more, or none. None: of all that get any."""
    running: list[Any] | None
    """Running requests to serve, in order; None when that is the order of vLLM's running list."""
    admitted: list[Any]
    """Waiting requests to admit, in order."""
    preempted: list[Any]
    rejected: list[Any]
    token_cap: int | None

    def matches(self, scheduled: dict[str, int]) -> bool:
        """Whether vLLM scheduled exactly these tokens."""
        if len(scheduled) != len(self.ids):
            return False
        tokens = self.tokens.tolist()
        if [*scheduled.values()] == tokens and [*scheduled] == self.ids:  # nearly always in the plan's own order
            return True
        return dict(zip(self.ids, tokens, strict=True)) == scheduled


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
    check_cap(plan.token_cap)
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


def check_cap(cap: int | None) -> None:
    """Raise PlanError for a token cap that is none."""
    if cap is None:
        return
    if isinstance(cap, bool) or not isinstance(cap, (int, np.integer)):
        raise PlanError(f"token_cap={cap!r}: expected a whole number or None")
    if cap < 0:
        raise PlanError(f"token_cap={cap}: expected at least 0")


def chunks(
    plan: Plan, live: Live, limits: Limits, shown: IntArray | None, mirror: Mirror, *, speculative: bool
) -> Chunks:
    """The plan in vLLM's terms. `shown`: the mirror's row behind each row of `live`. Raises PlanError."""
    n, rows, tokens = live.index.size, _plain(plan.rows), _plain(plan.num_scheduled_tokens)
    preempted, rejected = _plain(plan.preempted), _plain(plan.rejected)
    relegated = _plain(plan.relegated)
    if relegated is None or relegated.size:
        check_plan(plan, live, limits)
    check_cap(plan.token_cap)
    if rows is None or tokens is None or preempted is None or rejected is None:
        check_plan(plan, live, limits)  # tells which
        raise PlanError("expected one-dimensional arrays of whole numbers")
    out = np.empty((5, n), dtype=np.int64)
    good, served, special, left, in_order = read_plan(
        live.columns[0], n, rows, tokens, preempted, rejected, _NO_ROWS if shown is None else shown,
        mirror.slot_of_row, limits.max_num_batched_tokens, limits.max_num_seqs, speculative, out,
    )  # fmt: skip
    if not good:
        check_plan(plan, live, limits)  # tells what is wrong
        raise PlanError("the plan's rows or tokens are out of range")
    size, objects, ids = rows.size, mirror.objects, mirror.ids
    found = out[SLOT, :size].tolist()
    named = [ids[slot] for slot in found]
    exceptions: dict[str, int] | None = None
    if left + special <= FEW:
        exceptions = {named[i]: int(out[MOST, i]) for i in out[SPECIAL, :special].tolist()}
        for slot in out[LEFT, :left].tolist():
            exceptions[ids[slot]] = 0
    running, admitted = None, []
    if served < size:
        admitted = [objects[found[i]] for i in out[SPECIAL, :special].tolist() if not out[RUNS, i]]
    if not in_order:
        runs = found if served == size else out[SLOT, :size][out[RUNS, :size] == 1].tolist()
        running = [objects[slot] for slot in runs]
    return Chunks(
        named, out[SLOT, :size], tokens, out[MOST, :size], exceptions, running, admitted,
        _objects(preempted, shown, mirror), _objects(rejected, shown, mirror),
        None if plan.token_cap is None else int(plan.token_cap),
    )  # fmt: skip


def _plain(column: Any) -> IntArray | None:
    """The column as compiled code takes it; None for one that is no one-dimensional array of whole numbers."""
    if not isinstance(column, np.ndarray) or column.ndim != 1 or column.dtype.kind not in "iu":
        return None
    if not column.size:
        return _NO_ROWS
    if column.dtype == np.int64 and column.flags.carray:
        return column
    return np.array(column, dtype=np.int64)


def _objects(rows: IntArray, shown: IntArray | None, mirror: Mirror) -> list[Any]:
    """vLLM's requests behind rows of what the policy saw."""
    if not rows.size:
        return []
    slots: list[int] = mirror.slot_of_row[rows if shown is None else shown[rows]].tolist()
    return [mirror.objects[slot] for slot in slots]


class Steering:
    """One step's rearrangement of a scheduler. `begin`, then `super().schedule()`, then `end` in any case."""

    def __init__(self, scheduler: Any, plan: Chunks) -> None:
        self._scheduler, self._plan = scheduler, plan
        self._fields: list[tuple[str, Any]] = []
        self._order: list[Any] | None = None
        self._steered: list[Any] = []
        """The running list as it was, and as this step has it."""
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
            self._steered = plan.running
            if len(plan.running) < len(self._order):
                served = set(plan.running)
                self._steered = plan.running + [request for request in self._order if request not in served]
            scheduler.running = [*self._steered]
        if plan.admitted:
            self._waiting = compat.WaitingOrder(scheduler, plan.admitted)
        if plan.token_cap is not None:
            self._set("max_num_scheduled_tokens", min(plan.token_cap, scheduler.max_num_scheduled_tokens))
        lever = compat.admission_lever(scheduler)
        taken = len(scheduler.running) + scheduler.num_waiting_for_streaming_input
        self._set(lever, min(getattr(scheduler, lever), taken + len(plan.admitted)))
        if plan.limits is None or plan.limits or plan.admitted:
            scheduler._reserve_prefill_lookahead = self._lever()  # shadows the method for this call

    def _lever(self) -> compat.Lever:
        """What vLLM asks for every row, running or waiting: how many of the tokens it thinks of."""
        scheduler, plan = self._scheduler, self._plan
        inherited = scheduler._reserve_prefill_lookahead
        plain = not getattr(scheduler, "num_prefill_lookahead", 0)  # then vLLM's own answer is n itself
        limits, free = plan.limits, None
        if limits is None:
            limits = dict(zip(plan.ids, plan.most.tolist(), strict=True))
        elif scheduler.running:
            free = scheduler.running[0].status  # of a row without a limit: it runs

        def most(request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
            if not plain:
                num_new_tokens = inherited(request, num_computed_tokens, num_new_tokens)
            limit = limits.get(request.request_id)
            if limit is None:
                return num_new_tokens if request.status is free else 0
            return limit if limit < num_new_tokens else num_new_tokens

        return most

    def _set(self, name: str, value: Any) -> None:
        self._fields.append((name, getattr(self._scheduler, name)))
        setattr(self._scheduler, name, value)

    def end(self) -> None:
        """Put back everything that was rearranged, whatever happened meanwhile."""
        scheduler = self._scheduler
        scheduler.__dict__.pop("_reserve_prefill_lookahead", None)
        while self._fields:
            setattr(scheduler, *self._fields.pop())
        if self._order is not None and scheduler.running[: len(self._order)] == self._steered:
            scheduler.running = self._order + scheduler.running[len(self._order) :]  # nobody was preempted
        elif self._order is not None:
            left = set(scheduler.running)
            before = set(self._order)
            scheduler.running = [r for r in self._order if r in left] + [
                r for r in scheduler.running if r not in before
            ]
        self._order = None
        if self._waiting is not None:
            self._waiting.restore()
            self._waiting = None
