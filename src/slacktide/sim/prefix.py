"""Prefix cache: KV blocks that outlive their request and are found again by content.

vLLM's rules (0.32, v1/core/block_pool.py): a full block of known tokens is cached as soon as it is scheduled; blocks
of ended or preempted requests stay cached in a free list, oldest first, the tail of a request before its head; blocks
without content go to the list's front. A new block takes the first of the list and evicts its content. Equal blocks
are not merged: the first cached is found, the others take its place when it is evicted. A request finds the longest run
of leading blocks, but computes at least its last token itself.

State, as arrays that the compiled step shares: `slots` int32[6, num_blocks + 2] with lines CONTENT (-1 none), REF,
PREV, NEXT (a doubly linked free list between two sentinels), OLDER and NEWER (a ring of the slots with one content, in
order of caching); `slot_of` int32[contents], content -> its oldest slot or -1; `table` int32[blocks of all requests],
slot of each block of each request; `content` int64, likewise; `offset` int64[n + 1].
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slacktide.core.kernels import compiled
from slacktide.core.kv import blocks_for
from slacktide.core.live import (
    INDEX,
    NUM_BLOCKS,
    NUM_CACHED,
    NUM_CACHED_FREE,
    NUM_OUTPUT,
    NUM_PROMPT,
    NUM_SHARED,
    STATUS,
)
from slacktide.core.types import RUNNING, WAITING, IntArray

CONTENT, REF, PREV, NEXT, OLDER, NEWER = range(6)
Int32Array = npt.NDArray[np.int32]


class PrefixState(NamedTuple):
    """Arrays of the cache; all empty when prefix caching is off."""

    slots: Int32Array
    slot_of: Int32Array
    table: Int32Array
    content: IntArray
    offset: IntArray


def empty_state() -> PrefixState:
    """Prefix caching off."""
    none = np.empty(0, dtype=np.int32)
    return PrefixState(np.empty((6, 0), dtype=np.int32), none, none, np.empty(0, np.int64), np.empty(0, np.int64))


def make_state(
    num_blocks: int,
    block_size: int,
    num_prompt_tokens: IntArray,
    num_output_tokens: IntArray,
    hash_ids: tuple[IntArray, IntArray] | None,
    hash_block_size: int,
) -> PrefixState:
    """Fresh cache of `num_blocks` blocks for the requests of a run.

    `hash_ids` = (ids, offsets): one id per `hash_block_size` prompt tokens (a multiple of block_size), where equal ids
    after equal ids mean equal tokens. Blocks without an id have content of their own: only the request itself can find
    them again, after a preemption. Raises ValueError when hash_block_size is no multiple of block_size.
    """
    lengths = blocks_for(num_prompt_tokens + num_output_tokens, block_size)
    offset = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    content = np.arange(offset[-1], dtype=np.int64)
    next_content = int(offset[-1])
    if hash_ids is not None:
        if hash_block_size % block_size:
            raise ValueError(
                f"hash blocks of {hash_block_size} tokens cannot be cut into blocks of {block_size} tokens"
            )
        per_hash = hash_block_size // block_size
        codes: dict[tuple[int, int], int] = {}
        ids, starts = hash_ids
        for r in range(lengths.size):
            parent, full = -1, int(num_prompt_tokens[r]) // block_size
            for j, hash_id in enumerate(ids[starts[r] : starts[r + 1]].tolist()):
                parent = codes.setdefault((parent, hash_id), len(codes))
                first, last = j * per_hash, min((j + 1) * per_hash, full)
                if last > first:
                    at = offset[r] + first
                    content[at : at + last - first] = next_content + parent * per_hash + np.arange(last - first)
        next_content += len(codes) * per_hash
    slots = np.zeros((6, num_blocks + 2), dtype=np.int32)
    slots[CONTENT] = -1
    chain = np.concatenate([[num_blocks], np.arange(num_blocks), [num_blocks + 1]])
    slots[NEXT, chain[:-1]] = chain[1:]
    slots[PREV, chain[1:]] = chain[:-1]
    slot_of = np.full(next_content, -1, dtype=np.int32)
    return PrefixState(slots, slot_of, np.full(int(offset[-1]), -1, dtype=np.int32), content, offset)


@compiled
def _unlink(slots: Int32Array, slot: int) -> None:
    before, after = slots[PREV, slot], slots[NEXT, slot]
    slots[NEXT, before] = after
    slots[PREV, after] = before


@compiled
def lookup(px: PrefixState, index: int, known_tokens: int, block_size: int) -> tuple[int, int]:
    """Leading blocks of a request that are cached, and how many of them nobody holds."""
    start = px.offset[index]
    hits, unheld = 0, 0
    for b in range((known_tokens - 1) // block_size):
        slot = px.slot_of[px.content[start + b]]
        if slot < 0:
            break
        hits += 1
        if px.slots[REF, slot] == 0:
            unheld += 1
    return hits, unheld


@compiled
def refresh_hits(ints: IntArray, n: int, px: PrefixState, block_size: int, short: bool) -> None:
    """Write into the columns what each waiting row would find and, when blocks are short, what running rows share."""
    nothing_shared = px.slot_of.size == px.content.size  # no hash ids: only a preempted request can find blocks
    for row in range(n):
        index = ints[INDEX, row]
        if nothing_shared and ints[STATUS, row] == WAITING:
            continue
        if ints[STATUS, row] == RUNNING:
            if short:
                shared = 0
                for b in range(px.offset[index], px.offset[index] + ints[NUM_BLOCKS, row]):
                    if px.slots[REF, px.table[b]] > 1:
                        shared += 1
                ints[NUM_SHARED, row] = shared
        elif ints[STATUS, row] >= 0:
            hits, unheld = lookup(px, index, ints[NUM_PROMPT, row] + ints[NUM_OUTPUT, row], block_size)
            ints[NUM_CACHED, row] = hits * block_size
            ints[NUM_CACHED_FREE, row] = unheld


@compiled
def is_short(n: int, num_free_blocks: int, token_budget: int, block_size: int) -> bool:
    """Whether a step could run out of blocks: each row may start one, and the budget fills so many more."""
    return num_free_blocks < n + token_budget // block_size + 1


@compiled
def take_hits(px: PrefixState, index: int, hits: int) -> int:
    """Hold the first `hits` cached blocks; returns how many left the free list."""
    start, taken = px.offset[index], 0
    for b in range(hits):
        slot = px.slot_of[px.content[start + b]]
        if px.slots[REF, slot] == 0:
            _unlink(px.slots, slot)
            taken += 1
        px.slots[REF, slot] += 1
        px.table[start + b] = slot
    return taken


@compiled
def take_new(px: PrefixState, index: int, first: int, last: int) -> None:
    """Give blocks [first, last) of a request new slots, oldest free ones first. The caller knows that they suffice."""
    start, head = px.offset[index], px.slots.shape[1] - 2
    for b in range(first, last):
        slot = px.slots[NEXT, head]
        _unlink(px.slots, slot)
        if px.slots[CONTENT, slot] >= 0:
            _forget(px, slot)
        px.slots[REF, slot] = 1
        px.table[start + b] = slot


@compiled
def _forget(px: PrefixState, slot: int) -> None:
    """Evict the content of a slot; an equal block cached later takes its place."""
    slots, content = px.slots, px.slots[CONTENT, slot]
    older, newer = slots[OLDER, slot], slots[NEWER, slot]
    slots[NEWER, older] = newer
    slots[OLDER, newer] = older
    if px.slot_of[content] == slot:
        px.slot_of[content] = newer if newer != slot else -1
    slots[CONTENT, slot] = -1


@compiled
def publish(px: PrefixState, index: int, first: int, last: int) -> None:
    """Make full blocks [first, last) of a request findable, behind equal ones; published ones stay as they are."""
    start, slots = px.offset[index], px.slots
    for b in range(max(first, 0), last):
        slot, content = px.table[start + b], px.content[start + b]
        if slots[CONTENT, slot] >= 0:
            continue
        slots[CONTENT, slot] = content
        oldest = px.slot_of[content]
        if oldest < 0:
            px.slot_of[content] = oldest = slots[OLDER, slot] = slots[NEWER, slot] = slot
            continue
        newest = slots[OLDER, oldest]
        slots[NEWER, newest] = slots[OLDER, oldest] = slot
        slots[OLDER, slot], slots[NEWER, slot] = newest, oldest


@compiled
def release(px: PrefixState, index: int, num_blocks: int) -> int:
    """Let go of a request's blocks, tail first; returns how many became free.

    Cached ones join the free list's end; those without content its front, where the next new block takes them.
    """
    start, slots, freed = px.offset[index], px.slots, 0
    head, tail = slots.shape[1] - 2, slots.shape[1] - 1
    front = head  # behind which the next one without content goes: they keep their order
    for b in range(num_blocks - 1, -1, -1):
        slot = px.table[start + b]
        slots[REF, slot] -= 1
        if slots[REF, slot] == 0:
            before = slots[PREV, tail]
            if slots[CONTENT, slot] < 0:
                before = front
                front = slot
            after = slots[NEXT, before]
            slots[PREV, slot], slots[NEXT, slot] = before, after
            slots[NEXT, before] = slots[PREV, after] = slot
            freed += 1
    return freed
