"""What several policies need: checks of their parameters, and the arithmetic of orders, needs and reservations."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from slacktide.core.loading import kernels
from slacktide.core.pack import pack
from slacktide.core.types import RUNNING, BoolArray, FloatArray, IntArray, Limits, Plan, StepView

_NONE: IntArray = np.empty(0, dtype=np.int64)
_NONE.flags.writeable = False


def require_at_least(policy: Any, minimum: float, *names: str) -> None:
    """Raise ValueError for the first of the fields `names` whose value is below `minimum`; None passes."""
    for name in names:
        value = getattr(policy, name)
        if value is not None and not value >= minimum:
            raise ValueError(f"{name}={value}: expected at least {minimum}")


def require_at_most(policy: Any, maximum: float, *names: str) -> None:
    """Raise ValueError for the first of the fields `names` whose value is above `maximum`; None passes."""
    for name in names:
        value = getattr(policy, name)
        if value is not None and not value <= maximum:
            raise ValueError(f"{name}={value}: expected at most {maximum:g}")


def require_share(policy: Any, *names: str) -> None:
    """Raise ValueError for the first of the fields `names` that is no share from 0 to below 1; None passes."""
    for name in names:
        value = getattr(policy, name)
        if value is not None and not 0 <= value < 1:
            raise ValueError(f"{name}={value}: expected a share from 0 to below 1")


def require_choice(policy: Any, **choices: tuple[Any, ...]) -> None:
    """Raise ValueError for the first of the named fields whose value is none of its choices."""
    for name, known in choices.items():
        if getattr(policy, name) not in known:
            raise ValueError(f"{name}={getattr(policy, name)!r}: expected one of {', '.join(map(str, known))}")


def smaller(limit: int, parameter: int | None) -> int:
    """The engine's limit, lowered by a policy's own parameter where it has one."""
    return limit if parameter is None else min(limit, parameter)


def watermark_blocks(limits: Limits, watermark: float | None) -> int | None:
    """Blocks behind a policy's own watermark (a share of all, vLLM's null block included); None: the engine's."""
    return None if watermark is None else int(watermark * (limits.num_blocks + 1))


def with_seats(view: StepView, max_num_seqs: int | None) -> StepView:
    """The view with at most `max_num_seqs` seats."""
    if max_num_seqs is None or max_num_seqs >= view.limits.max_num_seqs:
        return view
    return view._replace(limits=view.limits._replace(max_num_seqs=max_num_seqs))


def by_admission(view: StepView, rows: IntArray) -> IntArray:
    """Running rows in the order of their admission (vLLM's list order)."""
    rank = view.live.admission_order[rows]
    return rows if rows.size < 2 or bool((rank[1:] > rank[:-1]).all()) else rows[np.argsort(rank, kind="stable")]


def uncached_tokens(view: StepView) -> IntArray:
    """int64[n]: tokens that each row must compute until its next output token; prefix-cache hits are taken off."""
    live = view.live
    return live.num_tokens_needed - live.num_cached_tokens


class Phases(NamedTuple):
    """The rows of a view sorted by what they can do now."""

    running: BoolArray
    """bool[n]: holds a seat."""
    decode: BoolArray
    """bool[n]: decodes (also a row whose step in flight surely ends it)."""
    over: BoolArray | None
    """bool[n]: rows to leave alone, because the step in flight ends them; None: no row."""
    decodes: IntArray
    """Rows that can decode in this step, in the order of their admission."""
    half_done: IntArray
    """Running rows with a part of their prompt left, in the order of their admission."""
    waiting: IntArray
    """Rows without a seat, in order of arrival."""


def phases(view: StepView) -> Phases:
    """Sort the rows (compiled: `kernels_phases`)."""
    live, n = view.live, view.live.index.size
    flags, rows = np.empty((3, n), dtype=np.bool_), np.empty((3, n), dtype=np.int64)
    decodes, half_done, waiting, in_flight = kernels("phases").phases(
        live.columns[0], n, view.limits.max_model_len, flags, rows
    )
    return Phases(
        flags[0], flags[1], flags[2] if in_flight else None, rows[0, :decodes], rows[1, :half_done], rows[2, :waiting]
    )


def reserved_room(view: StepView, now: Phases) -> tuple[int, IntArray]:
    """KV blocks not set aside for a running row, and what each waiting row would set aside (TensorRT-LLM's blocks "to
    completion": prompt + max_tokens).

    A request that could outgrow the whole KV cache reserves all of it. Blocks of a cached prefix that others hold
    cost a waiting row nothing.
    """
    live, limits = view.live, view.limits
    room, costs = kernels("phases").reserved_room(
        live.columns[0], live.index.size, now.waiting, limits.max_model_len, limits.block_size, limits.num_blocks,
        limits.num_free_blocks,
    )  # fmt: skip
    return room, costs


def new_blocks(view: StepView, rows: IntArray) -> IntArray:
    """Blocks that each decode takes for its next token."""
    live = view.live
    return live.num_computed_tokens[rows] // view.limits.block_size + 1 - live.num_blocks[rows]


def reserved_decodes(view: StepView, now: Phases) -> IntArray:
    """Decodes of a policy that set blocks aside for all of them, as far as the token budget goes.

    With async scheduling a request that may outgrow the whole cache can lack a block in a step that it will turn out
    not to need.
    """
    rows = now.decodes[: view.limits.max_num_batched_tokens]
    if now.over is None:
        return rows
    limits = view.limits
    kept: IntArray = kernels("phases").within_free(
        view.live.columns[0], rows, limits.num_free_blocks, limits.block_size
    )
    return kept


def fitting(costs: IntArray, room: float) -> int:
    """How many leading costs fit `room` together."""
    return int(np.searchsorted(np.cumsum(costs), room, side="right"))


def pack_decodes_first(
    view: StepView, prefill_key: IntArray | FloatArray, chunk_size: int, max_num_seqs: int | None, watermark: float
) -> Plan:
    """Sarathi-Serve's batch: every decode, then prefill chunks in the order of `prefill_key` (lower first, ties by
    arrival) up to a total of `chunk_size` tokens. More decodes than that leave no room for a chunk.
    """
    live = view.live
    order, decodes = kernels("orders").decodes_first(
        live.columns[0], live.index.size, prefill_key.astype(np.float64, copy=False)
    )
    return pack(
        with_seats(view, max_num_seqs),
        order,
        token_budget=min(max(chunk_size, decodes), view.limits.max_num_batched_tokens),
        watermark_blocks=watermark_blocks(view.limits, watermark),
    )


def admission_key(view: StepView) -> FloatArray:
    """float64[n]: running rows by admission, then waiting ones."""
    live = view.live
    return np.where(live.status == RUNNING, live.admission_order, np.inf)
