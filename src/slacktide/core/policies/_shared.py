"""What several policies need: checks of their parameters, and the arithmetic of orders, needs and reservations."""

from __future__ import annotations

from typing import Any

import numpy as np

from slacktide.core.kv import blocks_for
from slacktide.core.pack import pack
from slacktide.core.types import RUNNING, BoolArray, FloatArray, IntArray, Limits, Plan, StepView

LAST = 1 << 62
"""Sorts behind every admission number."""


def require_at_least(policy: Any, minimum: float, *names: str) -> None:
    """Raise ValueError for the first of the fields `names` whose value is below `minimum`; None passes."""
    for name in names:
        value = getattr(policy, name)
        if value is not None and not value >= minimum:
            raise ValueError(f"{name}={value}: expected at least {minimum}")


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


def ends_in_flight(view: StepView) -> BoolArray:
    """bool[n]: rows that the step in flight surely ends (it reaches max_tokens), or that the model can hold no more."""
    live = view.live
    ended = (live.num_in_flight_tokens > 0) & (live.num_output_tokens + live.num_in_flight_tokens >= live.max_tokens)
    return ended | (live.num_computed_tokens >= view.limits.max_model_len - 1)


def blocks_to_completion(view: StepView) -> IntArray:
    """int64[n]: KV blocks that each row still takes if it runs to max_tokens (TensorRT-LLM's "to completion").

    A request that could outgrow the whole KV cache reserves all of it. Blocks of a cached prefix that others hold
    cost a waiting row nothing.
    """
    live, limits = view.live, view.limits
    length = np.minimum(live.num_prompt_tokens + live.max_tokens, limits.max_model_len) - 1
    whole = np.minimum(blocks_for(np.maximum(length, 1), limits.block_size), limits.num_blocks)
    shared = live.num_cached_tokens // limits.block_size - live.num_cached_free_blocks
    left: IntArray = np.maximum(whole - live.num_blocks - shared, 0)
    return left


def new_blocks(view: StepView, rows: IntArray, tokens: IntArray) -> IntArray:
    """Blocks that running rows take for `tokens` further tokens each."""
    live = view.live
    return blocks_for(live.num_computed_tokens[rows] + tokens, view.limits.block_size) - live.num_blocks[rows]


def runnable_decodes(view: StepView) -> IntArray:
    """Rows that can decode now, in the order of their admission."""
    return by_admission(view, np.flatnonzero(view.live.is_decode & ~ends_in_flight(view)))


def with_room(view: StepView, rows: IntArray) -> IntArray:
    """Leading decodes whose next token fits the token budget and the free blocks.

    For policies whose reservations make all of them fit; the exception is a request that outgrew the cache it was
    let into, with async scheduling deciding a step that it does not need.
    """
    rows = rows[: view.limits.max_num_batched_tokens]
    blocks = new_blocks(view, rows, np.ones_like(rows))
    if int(blocks.sum()) <= view.limits.num_free_blocks:
        return rows
    return rows[np.cumsum(blocks) <= view.limits.num_free_blocks]


def fitting(costs: IntArray, room: float) -> int:
    """How many leading costs fit `room` together."""
    return int(np.searchsorted(np.cumsum(costs), room, side="right"))


def pack_decodes_first(
    view: StepView, prefill_key: IntArray | FloatArray, chunk_size: int, max_num_seqs: int | None, watermark: float
) -> Plan:
    """Sarathi-Serve's batch: every decode, then prefill chunks in the order of `prefill_key` (lower first, ties by
    arrival) up to a total of `chunk_size` tokens. More decodes than that leave no room for a chunk.
    """
    decode = view.live.is_decode
    decodes = by_admission(view, np.flatnonzero(decode))
    prefills = np.flatnonzero(~decode)
    if prefills.size:
        prefills = prefills[np.argsort(prefill_key[prefills], kind="stable")]
    return pack(
        with_seats(view, max_num_seqs),
        np.concatenate((decodes, prefills)),
        token_budget=min(max(chunk_size, decodes.size), view.limits.max_num_batched_tokens),
        watermark_blocks=watermark_blocks(view.limits, watermark),
    )


def admission_key(view: StepView) -> IntArray:
    """int64[n]: running rows by admission, then waiting ones."""
    live = view.live
    return np.where(live.status == RUNNING, live.admission_order, LAST)
