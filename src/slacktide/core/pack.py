"""The greedy packer: walk the rows in order and give each what the budgets allow. Shared by most policies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from slacktide.core.kv import blocks_for
from slacktide.core.policy import Policy, ScorePolicy
from slacktide.core.types import RUNNING, FloatArray, IntArray, Plan, StepResult, StepView


class WalkArguments(NamedTuple):
    """Arguments of `walk` that stay the same in every step, for a policy that is nothing but vLLM's own order.

    Such a policy offers `walk_arguments(limits) -> WalkArguments | None`; `plan(view)` must equal
    `pack(view, token_budget=..., long_prefill_threshold=..., ...)` with them (list rules, tail victims) in every step.
    The simulator then runs whole stretches in compiled code.
    """

    token_budget: int
    long_prefill_threshold: int
    chunked_prefill: bool
    reserve_full_isl: bool
    watermark_blocks: int


_NO_INTS: IntArray = np.empty(0, dtype=np.int64)
_NO_FLOATS: FloatArray = np.empty(0, dtype=np.float64)
_NO_CAP = 1 << 62
_walk: Any = None


def pack(
    view: StepView,
    order: IntArray | None = None,
    *,
    token_budget: int | None = None,
    long_prefill_threshold: int = 0,
    chunk_cap: IntArray | None = None,
    victim_key: FloatArray | None = None,
    chunked_prefill: bool = True,
    reserve_full_isl: bool = True,
    admit: bool = True,
    watermark_blocks: int | None = None,
    list_rules: bool | None = None,
) -> Plan:
    """Pack a step greedily, by the rules of vLLM's v1 scheduler (0.32).

    order: int64[m] rows in service order; rows left out get nothing. None is vLLM's order: running rows by admission,
        then waiting rows by arrival.
    token_budget: most tokens of the step; None takes the engine's max_num_batched_tokens.
    long_prefill_threshold: most tokens for one row, 0 for no such limit.
    chunk_cap: int64[n], most tokens for each row; 0 leaves a row out.
    victim_key: float64[n]; when blocks run out the running row with the largest key loses its KV, ties to the latest
        arrival. None preempts the latest admitted.
    chunked_prefill: False admits a waiting prompt only when all of it fits the budget.
    reserve_full_isl: admit only when blocks for the whole prompt are free (vLLM's scheduler_reserve_full_isl); in
        an explicit order also the blocks that running prompts still need are kept back, or a prompt admitted before
        a half-done one could evict it (not under list_rules).
    admit: False admits nobody.
    watermark_blocks: blocks that admission leaves free while something runs; None takes the engine's.
    list_rules: vLLM's rules for its own order, to the letter; None means "when no order is given".

    Rules: a running row that lacks blocks preempts until it fits or is itself the victim (which ends the step under
    list_rules); nobody is admitted in a step that preempted; the first waiting row that cannot be admitted ends
    admission; a row whose step in flight reaches max_tokens gets nothing.
    """
    global _walk  # noqa: PLW0603 (numba is loaded with the first plan, not with the module)
    if order is not None and not order.size:
        return Plan(_NO_INTS, _NO_INTS)
    if _walk is None:
        from slacktide.core.kernels import walk

        _walk = walk
    limits, n = view.limits, view.live.index.size
    plan = np.empty((6, n), dtype=np.int64)
    count, num_preempted = _walk(
        view.live.columns[0],
        n,
        _NO_INTS if order is None else order,
        limits.max_num_batched_tokens if token_budget is None else token_budget,
        limits.max_num_seqs,
        limits.block_size,
        limits.num_free_blocks,
        limits.watermark_blocks if watermark_blocks is None else watermark_blocks,
        limits.max_model_len,
        long_prefill_threshold,
        _NO_INTS if chunk_cap is None else chunk_cap,
        _NO_FLOATS if victim_key is None else victim_key,
        chunked_prefill,
        reserve_full_isl,
        admit,
        order is None if list_rules is None else list_rules,
        plan,
    )
    if num_preempted:
        return Plan(plan[0, :count], plan[1, :count], plan[2, :num_preempted])
    return Plan(plan[0, :count], plan[1, :count])


def pack_reference(
    view: StepView,
    order: IntArray | None = None,
    *,
    token_budget: int | None = None,
    long_prefill_threshold: int = 0,
    chunk_cap: IntArray | None = None,
    victim_key: FloatArray | None = None,
    chunked_prefill: bool = True,
    reserve_full_isl: bool = True,
    admit: bool = True,
    watermark_blocks: int | None = None,
    list_rules: bool | None = None,
) -> Plan:
    """The packer in plain Python: what `pack` must equal, and what to read first."""
    live, limits, bs = view.live, view.limits, view.limits.block_size
    running = {int(r) for r in np.flatnonzero(live.status == RUNNING)}
    known = live.num_prompt_tokens + live.num_output_tokens
    budget = limits.max_num_batched_tokens if token_budget is None else token_budget
    watermark = limits.watermark_blocks if watermark_blocks is None else watermark_blocks
    admitted: dict[int, int] = {}
    free, given, preempted = limits.num_free_blocks, dict[int, int](), list[int]()
    kept_back = {r: max(0, blocks_for(int(known[r]), bs) - int(live.num_blocks[r])) for r in running}
    list_rules = order is None if list_rules is None else list_rules
    keep_back = reserve_full_isl and not list_rules
    reserved = sum(kept_back.values()) if keep_back else 0
    num_running = len(running)

    keys = victim_key if victim_key is not None else live.admission_order

    def victim() -> int:
        return max(running, key=lambda r: (float(keys[r]), r))

    def new_blocks(r: int, tokens: int) -> int:
        return blocks_for(int(live.num_computed_tokens[r]) + tokens, bs) - int(live.num_blocks[r])

    for r in map(int, _list_order(view) if order is None else order):
        if budget <= 0:
            break
        cap = _NO_CAP if chunk_cap is None else int(chunk_cap[r])
        cap = min(cap, long_prefill_threshold) if long_prefill_threshold > 0 else cap
        if live.status[r] == RUNNING:
            in_flight, output = int(live.num_in_flight_tokens[r]), int(live.num_output_tokens[r])
            if r not in running or (in_flight > 0 and output + in_flight >= live.max_tokens[r]):
                continue
            computed = int(live.num_computed_tokens[r])
            need = min(int(known[r]) + in_flight - computed, limits.max_model_len - 1 - computed)
            tokens = min(need, budget, cap)
            if tokens <= 0:
                continue
            blocks = new_blocks(r, tokens)
            while blocks > free and r in running:
                if admitted:  # nobody is admitted in a step that preempts: take the last one back first
                    last, its_blocks = admitted.popitem()
                    budget, free, admit = budget + given.pop(last), free + its_blocks, False
                    continue
                lost = victim()
                running.remove(lost)
                preempted.append(lost)
                taken_back = given.pop(lost, 0)
                budget += taken_back
                free += int(live.num_blocks[lost] - live.num_shared_blocks[lost]) + (
                    new_blocks(lost, taken_back) if taken_back else 0
                )
            if r not in running:
                if list_rules:
                    break
                continue
            reserved = max(0, reserved - blocks)
        else:
            if not admit or preempted or num_running >= limits.max_num_seqs:
                continue
            cached = int(live.num_cached_tokens[r])
            tokens = min(int(known[r]) - cached, cap)
            if tokens <= 0:
                continue
            if tokens > budget and not chunked_prefill:
                admit = False
                continue
            tokens = min(tokens, budget)
            shared = cached // bs - int(live.num_cached_free_blocks[r])
            blocks = blocks_for(cached + tokens, bs) - shared
            whole = blocks_for(min(int(known[r]), limits.max_model_len), bs) - shared
            must_fit = max(whole, blocks) if reserve_full_isl else blocks
            if must_fit + (watermark if num_running else 0) + reserved > free:
                admit = False
                continue
            num_running += 1
            admitted[r] = blocks
            reserved += max(0, whole - blocks) if keep_back else 0
        free -= blocks
        budget -= tokens
        given[r] = tokens
    return Plan(
        np.array(list(given), dtype=np.int64),
        np.array(list(given.values()), dtype=np.int64),
        np.array(preempted, dtype=np.int64),
    )


def _list_order(view: StepView) -> Iterable[int]:
    rows, live = range(view.live.index.size), view.live
    running = sorted((r for r in rows if live.status[r] == RUNNING), key=lambda r: int(live.admission_order[r]))
    return running + [r for r in rows if live.status[r] != RUNNING]


class Packed:
    """Lifts a ScorePolicy to a Policy: stable sort by score, then `pack`.

    Uses the policy's optional methods `admit(view) -> bool[n]`, `chunk_cap(view) -> int64[n]`, `victim_key(view) ->
    float64[n]` and `time_limit(view) -> seconds` (most predicted step time: the belief's inverse turns it into a
    token budget, for decodes plus prefills in score order).
    """

    def __init__(self, score_policy: ScorePolicy) -> None:
        self.policy = score_policy
        for flag in ("name", "oracle", "steerable", "decode_runs"):
            if hasattr(score_policy, flag):
                setattr(self, flag, getattr(score_policy, flag))

    def plan(self, view: StepView) -> Plan:
        """Rows by (score, arrival, id); decodes count in the time limit, the token budget bounds the whole step."""
        policy: Any = self.policy
        order = np.argsort(policy.score(view), kind="stable")
        if hasattr(policy, "admit"):
            allowed = np.asarray(policy.admit(view)) | (view.live.status == RUNNING)
            order = order[allowed[order]]
        budget = None
        if hasattr(policy, "time_limit"):
            budget = min(
                _budget_within(view, order, float(policy.time_limit(view))), view.limits.max_num_batched_tokens
            )
        return pack(
            view,
            order,
            token_budget=budget,
            chunk_cap=policy.chunk_cap(view) if hasattr(policy, "chunk_cap") else None,
            victim_key=policy.victim_key(view) if hasattr(policy, "victim_key") else None,
        )

    def observe(self, result: StepResult) -> None:
        """Pass the outcome on."""
        method = getattr(self.policy, "observe", None)
        if method is not None:
            method(result)


def _budget_within(view: StepView, order: IntArray, time: float) -> int:
    """Most tokens whose predicted time is at most `time`; at least the decodes, which always run."""
    from slacktide.core.budget import max_tokens

    live = view.live
    decode = live.is_decode
    decodes = int(decode.sum())
    context = live.num_computed_tokens[decode]
    prefill = order[~decode[order]]
    computed = np.where(live.status == RUNNING, live.num_computed_tokens, live.num_cached_tokens)
    return max(
        decodes,
        max_tokens(
            view.latency,
            time,
            num_decodes=decodes,
            decode_context=int(context.sum()),
            decode_max_context=int(context.max(initial=0)),
            prefill_remaining=(live.num_prompt_tokens + live.num_output_tokens - computed)[prefill],
            prefill_computed=computed[prefill],
            limit=view.limits.max_num_batched_tokens,
        ),
    )


def as_policy(policy: Policy | ScorePolicy) -> Policy:
    """The policy itself when it plans whole steps, else lifted by `Packed`."""
    return policy if isinstance(policy, Policy) else Packed(policy)
