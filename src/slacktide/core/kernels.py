"""The only file that names numba. Import it on first use only: loading numba takes about half a second."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba

from slacktide.core.live import (
    ADMISSION_ORDER,
    MAX_TOKENS,
    NUM_BLOCKS,
    NUM_CACHED,
    NUM_CACHED_FREE,
    NUM_COMPUTED,
    NUM_IN_FLIGHT,
    NUM_OUTPUT,
    NUM_PROMPT,
    NUM_SHARED,
    STATUS,
)
from slacktide.core.types import RUNNING, FloatArray, IntArray

IMPORTED = re.compile(rb"^from slacktide\.([\w.]+) import", re.MULTILINE)
"""Modules of the package that a source imports from."""
F = TypeVar("F", bound=Callable[..., Any])


def _forget_stale_code() -> None:
    """Delete cached machine code when any compiled source has changed since it was made, and files that are empty.

    numba looks at the file of a function alone, but its machine code contains the functions of other files that it
    calls, and the constants that these import: after an update of one of them it would go on with the old ones. An
    empty index, as a loss of power leaves it, would end every start with an EOFError.
    """
    package = Path(__file__).parents[1]
    sources = {source: source.read_bytes() for source in sorted(package.rglob("*.py"))}
    compiled_ones = {source for source, text in sources.items() if b"@compiled" in text}
    imported = {
        package.joinpath(*name.decode().split(".")).with_suffix(".py")
        for source in compiled_ones
        for name in IMPORTED.findall(sources[source])
    }
    digest = hashlib.sha256()
    for source, text in sources.items():
        if source in compiled_ones or source in imported:
            digest.update(text)
    stamp = Path(__file__).parent / "__pycache__" / "compiled.sha256"
    with contextlib.suppress(OSError):  # what cannot be written cannot have been cached here either
        fresh = stamp.exists() and stamp.read_text() == digest.hexdigest()
        for code in package.rglob("__pycache__/*.nb[ci]"):
            if not fresh or code.stat().st_size == 0:
                code.unlink(missing_ok=True)
        if fresh:
            return
        stamp.parent.mkdir(exist_ok=True)
        stamp.write_text(digest.hexdigest())


_forget_stale_code()


def compiled(function: F) -> F:
    """Compile a function on first call and keep the machine code on disk.

    The plain function stays reachable as `.py_func`, the oracle of the tests. No fast-math: results must not depend
    on how the compiler groups a sum.
    """
    try:
        return numba.njit(cache=True, nogil=True, fastmath=False)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # no directory can be written (a read-only install without a home): compiled in each process
        return numba.njit(nogil=True, fastmath=False)(function)  # type: ignore[no-any-return]


@compiled
def list_order(ints: IntArray, n: int, order: IntArray) -> tuple[int, int]:
    """Fill `order` with vLLM's own order: running rows by admission, then waiting rows as they stand.

    Returns how many rows run, and how many there are in all: rows of negative status are gone. Insertion sort, because
    admission nearly always follows arrival.
    """
    running = 0
    for row in range(n):
        if ints[STATUS, row] == RUNNING:
            rank = ints[ADMISSION_ORDER, row]
            at = running
            while at > 0 and ints[ADMISSION_ORDER, order[at - 1]] > rank:
                order[at] = order[at - 1]
                at -= 1
            order[at] = row
            running += 1
    at = running
    for row in range(n):
        if ints[STATUS, row] >= 0 and ints[STATUS, row] != RUNNING:
            order[at] = row
            at += 1
    return running, at


@compiled
def _pick_victim(ints: IntArray, n: int, gone: IntArray, victim_key: FloatArray) -> int:
    """Running row to preempt: largest key, ties to the latest arrival. Without keys the tail of the running list."""
    best = -1
    for row in range(n):
        if ints[STATUS, row] != RUNNING or gone[row] != 0:
            continue
        if best < 0:
            best = row
        elif victim_key.size > 0:
            if victim_key[row] >= victim_key[best]:
                best = row
        elif ints[ADMISSION_ORDER, row] > ints[ADMISSION_ORDER, best]:
            best = row
    return best


@compiled
def _unschedule(ints: IntArray, plan: IntArray, count: int, victim: int, block_size: int) -> tuple[int, int, int]:
    """Take back what a victim was given in this step: (new count, tokens, blocks beyond those it held before)."""
    for i in range(count):
        if plan[0, i] == victim:
            tokens = plan[1, i]
            blocks = -(-(ints[NUM_COMPUTED, victim] + tokens) // block_size) - ints[NUM_BLOCKS, victim]
            for j in range(i, count - 1):
                plan[0, j], plan[1, j] = plan[0, j + 1], plan[1, j + 1]
            return count - 1, tokens, blocks
    return count, 0, 0


@compiled
def walk(
    ints: IntArray,
    n: int,
    order: IntArray,
    token_budget: int,
    max_num_seqs: int,
    block_size: int,
    num_free_blocks: int,
    watermark_blocks: int,
    max_model_len: int,
    long_prefill_threshold: int,
    chunk_cap: IntArray,
    victim_key: FloatArray,
    chunked_prefill: bool,
    reserve_full_isl: bool,
    admit: bool,
    list_rules: bool,
    plan: IntArray,
) -> tuple[int, int]:
    """The greedy packer; `slacktide.core.pack.pack` explains the arguments. The readable twin is `pack_reference`.

    Writes scheduled rows into plan[0], their tokens into plan[1], preempted rows into plan[2]; returns both counts.
    An empty `order` stands for vLLM's list order, an empty `chunk_cap` for no cap. Long, because the whole step is one
    loop over a budget: split up, each part would hand six running totals to the next.
    """
    keep_back = reserve_full_isl and not list_rules
    num_running = 0
    reserved = 0  # blocks that running prompts still need; vLLM itself does not keep them back
    for row in range(n):
        if ints[STATUS, row] == RUNNING:
            num_running += 1
            if keep_back:
                known = ints[NUM_PROMPT, row] + ints[NUM_OUTPUT, row]
                reserved += max(0, -(-known // block_size) - ints[NUM_BLOCKS, row])
    num_candidates = order.size
    waiting_last = order.size == 0
    if waiting_last:
        order = plan[3]
        _, num_candidates = list_order(ints, n, order)
    gone = plan[4]  # rows preempted in this step
    gone[:n] = 0
    count = 0
    num_preempted = 0
    num_admitted = 0
    for position in range(num_candidates):
        if token_budget <= 0:
            break
        row = order[position]
        cap = chunk_cap[row] if chunk_cap.size > 0 else 1 << 62  # no cap
        if long_prefill_threshold > 0:
            cap = min(cap, long_prefill_threshold)
        if ints[STATUS, row] == RUNNING:
            in_flight = ints[NUM_IN_FLIGHT, row]
            known_output = ints[NUM_OUTPUT, row] + in_flight
            if gone[row] != 0 or (in_flight > 0 and known_output >= ints[MAX_TOKENS, row]):
                continue  # preempted above, or the step in flight surely ends it
            computed = ints[NUM_COMPUTED, row]
            tokens = min(ints[NUM_PROMPT, row] + known_output - computed, max_model_len - 1 - computed)
            tokens = min(tokens, token_budget, cap)
            if tokens <= 0:
                continue
            blocks = -(-(computed + tokens) // block_size) - ints[NUM_BLOCKS, row]
            while blocks > num_free_blocks and gone[row] == 0:
                if num_admitted > 0:  # nobody is admitted in a step that preempts: take the last one back first
                    last = count - 1
                    while ints[STATUS, plan[0, last]] == RUNNING:
                        last -= 1
                    token_budget += plan[1, last]
                    num_free_blocks += plan[5, last]
                    for j in range(last, count - 1):
                        plan[0, j], plan[1, j], plan[5, j] = plan[0, j + 1], plan[1, j + 1], plan[5, j + 1]
                    count -= 1
                    num_admitted -= 1
                    admit = False
                    continue
                victim = _pick_victim(ints, n, gone, victim_key)
                count, tokens_back, blocks_back = _unschedule(ints, plan, count, victim, block_size)
                token_budget += tokens_back
                num_free_blocks += blocks_back + ints[NUM_BLOCKS, victim] - ints[NUM_SHARED, victim]
                gone[victim] = 1
                plan[2, num_preempted] = victim
                num_preempted += 1
            if gone[row] != 0:
                if list_rules:
                    break
                continue
            reserved = max(0, reserved - blocks)
        else:
            if not admit or num_preempted > 0 or num_running >= max_num_seqs:
                if waiting_last:
                    break
                continue
            cached = ints[NUM_CACHED, row]
            known = ints[NUM_PROMPT, row] + ints[NUM_OUTPUT, row]
            tokens = min(known - cached, cap)
            if tokens <= 0:
                continue
            if tokens > token_budget and not chunked_prefill:
                admit = False  # the scan stops at a head that cannot be served
                continue
            tokens = min(tokens, token_budget)
            shared = cached // block_size - ints[NUM_CACHED_FREE, row]
            blocks = -(-(cached + tokens) // block_size) - shared
            must_fit = -(-min(known, max_model_len) // block_size) - shared if reserve_full_isl else blocks
            headroom = watermark_blocks if num_running > 0 else 0
            if max(must_fit, blocks) + headroom + reserved > num_free_blocks:
                admit = False
                continue
            num_running += 1
            num_admitted += 1
            if keep_back:
                reserved += max(0, must_fit - blocks)
        num_free_blocks -= blocks
        token_budget -= tokens
        plan[0, count] = row
        plan[1, count] = tokens
        plan[5, count] = blocks
        count += 1
    return count, num_preempted
