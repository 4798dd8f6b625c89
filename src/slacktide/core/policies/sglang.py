"""SGLang: prompts first in steps of their own, with an estimate of the KV that running requests will still need.

While any waiting prompt fits, the step holds prompt chunks alone (or beside the decodes, with enable_mixed_chunk); else
all decode. A prompt is admitted when it, its whole output limit and a share (`new_token_ratio`) of what the running
ones may still produce fit the free KV; the share falls with every decode step, and when a decode step does run out of
KV, the requests with the fewest output tokens are retracted (computed again later) and the share jumps up to what was
really used. Source: SGLang's srt/managers: scheduler.py, schedule_policy.py, schedule_batch.py. Ignores SLOs,
priorities, dfs-weight, and the in-batch prefix rule (a policy does not see what waiting prompts share). Deviations: an
empty engine admits its first request whatever its limit, so that nothing waits for ever; SGLang drops the last request
that no longer fits, here a half-done prompt is retracted for it; a full batch is noticed to shrink one step sooner.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from slacktide.core.policies._shared import (
    Phases,
    new_blocks,
    phases,
    require_at_least,
    require_choice,
    smaller,
    uncached_tokens,
)
from slacktide.core.policy import register
from slacktide.core.types import PREEMPTED, IntArray, Plan, StepView

# SGLang's constants (srt/environ.py).
INIT_NEW_TOKEN_RATIO, MIN_NEW_TOKEN_RATIO_FACTOR, NEW_TOKEN_RATIO_DECAY_STEPS = 0.7, 0.14, 600
RETRACT_DECODE_STEPS = 20  # decode steps that the ratio after a retraction leaves room for
CLIP_MAX_NEW_TOKENS = 4096  # longer output limits count as this many tokens in the estimate
LPM_MAX_QUEUE = 128  # longer queues go first come first served, as matching prefixes of all would cost too much

_NONE: IntArray = np.empty(0, dtype=np.int64)
_NONE.flags.writeable = False


class _State:
    """What SGLang's scheduler remembers from step to step."""

    def __init__(self) -> None:
        self.ratio = 0.0  # new_token_ratio at the last reset or retraction
        self.decays = 0  # decode steps since then
        self.full_at: int | None = None  # running requests when the batch was found full; None: not full
        self.seen: IntArray = _NONE  # requests of the last view
        self.tokens: IntArray | None = None  # their output tokens after its plan, if all of them run then
        self.retracted: dict[int, float] = {}  # request -> when it went back to the end of the queue


@register("sglang")
@dataclass(frozen=True)
class SgLang:
    """Parameters are SGLang's own flags; none leaves the engine's value."""

    schedule_policy: Literal["fcfs", "lpm", "lof"] = "fcfs"
    """Order of the queue: fcfs, lpm (longest cached prefix first; fcfs beyond 128 waiting) or lof (longest output limit
    first)."""
    chunked_prefill_size: int | None = 8192
    """Most prompt tokens of a step; none cuts no prompt, except where the engine's budget must."""
    max_prefill_tokens: int = 16384
    """Without chunks: most prompt tokens of a step, unless its first prompt is longer."""
    enable_mixed_chunk: bool = False
    """Run decodes beside prompt chunks."""
    schedule_conservativeness: float = 1.0
    """Scales new_token_ratio, the share of running requests' output limits that admission keeps free."""
    max_running_requests: int | None = None
    """Most running requests; none takes the engine's max_num_seqs."""
    steerable: ClassVar[bool] = False  # vLLM cannot be told whom to retract
    decode_runs: ClassVar[bool] = True  # the steps passed over are counted from the tokens they produced
    _state: _State = field(default_factory=_State, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise ValueError naming the parameter that is out of its range."""
        require_choice(self, schedule_policy=("fcfs", "lpm", "lof"))
        require_at_least(self, 1, "chunked_prefill_size", "max_prefill_tokens", "max_running_requests")
        require_at_least(self, 0, "schedule_conservativeness")
        self._state.ratio = self._initial_ratio

    @property
    def _initial_ratio(self) -> float:
        return min(INIT_NEW_TOKEN_RATIO * self.schedule_conservativeness, 1.0)

    @property
    def new_token_ratio(self) -> float:
        """Share of the running requests' remaining output limits that admission keeps free now."""
        state, initial = self._state, self._initial_ratio
        if state.decays == 0:
            return state.ratio
        least = initial * MIN_NEW_TOKEN_RATIO_FACTOR
        return max(state.ratio - state.decays * (initial - least) / NEW_TOKEN_RATIO_DECAY_STEPS, least)

    def plan(self, view: StepView) -> Plan:
        """One step: prompts if any fits, else decodes."""
        now = phases(view)
        num_running = now.running.size - now.waiting.size
        self._catch_up(view, num_running)
        plan = self._prompt_step(view, now) if now.waiting.size or now.half_done.size else None
        plan = plan or self._decode_step(view, now)
        self._remember(view, now, plan)
        return plan

    # ---- what is remembered

    def _catch_up(self, view: StepView, num_running: int) -> None:
        """Count decode steps that the simulator ran by itself; start over when nothing of the last view is left.

        SGLang resets its ratio when it idles, which a view does not tell apart from a change of all requests.
        """
        state, live = self._state, view.live
        at = np.flatnonzero(state.seen == live.index[0])  # rows keep their order: if any is left, the first one is
        if not at.size:
            state.ratio, state.decays, state.full_at = self._initial_ratio, 0, None
            state.retracted.clear()
        elif state.tokens is not None:
            produced = int(live.num_output_tokens[0] + live.num_in_flight_tokens[0])
            state.decays += max(0, produced - int(state.tokens[at[0]]))
        if state.full_at is not None and num_running < state.full_at:
            state.full_at = None

    def _remember(self, view: StepView, now: Phases, plan: Plan) -> None:
        state, live, rows = self._state, view.live, plan.rows
        state.seen, state.tokens = live.index.copy(), None
        waiting = now.waiting.size
        if waiting:
            admitted = rows.size - int(now.running[rows].sum())
            waiting -= admitted
            if state.full_at is not None:
                state.full_at = now.running.size - waiting
        if not waiting and not plan.preempted.size:  # all run after this step: the simulator may go on by itself
            state.tokens = live.num_output_tokens + live.num_in_flight_tokens
            state.tokens[rows] += plan.num_scheduled_tokens == uncached_tokens(view)[rows]

    # ---- prompts

    def _prompt_step(self, view: StepView, now: Phases) -> Plan | None:
        """Chunks of the half-done prompt and of new ones; None when there is none to run."""
        live, limits, bs = view.live, view.limits, view.limits.block_size
        mixed, free = _NONE, limits.num_free_blocks
        if self.enable_mixed_chunk:
            mixed = now.decodes
            free -= int(new_blocks(view, mixed).sum())
            if free < 0:
                return None  # the decodes come first: retract
        chunk = max(0, smaller(limits.max_num_batched_tokens, self.chunked_prefill_size) - mixed.size)
        rows, tokens, charged = list[int](), list[int](), 0
        for row in now.half_done.tolist():  # at most one, unless chunks end exactly with a budget
            held = int(live.num_blocks[row]) * bs - int(live.num_computed_tokens[row])
            need = int(live.num_tokens_needed[row])
            part = min(need, chunk, held + free * bs)
            if part > 0:
                rows.append(row)
                tokens.append(part)
                chunk -= part
                free -= max(0, -(-(part - held) // bs))
                left = int(live.max_tokens[row] - live.num_output_tokens[row])
                charged += part + (min(left, CLIP_MAX_NEW_TOKENS) if part == need else 0)
        if chunk > 0 and now.waiting.size and self._state.full_at is None:
            new, parts = self._admit(view, now, charged + mixed.size, free, chunk, bool(rows))
            rows += new
            tokens += parts
        if not rows and now.waiting.size == now.running.size:  # an empty engine: the first request whatever its limit
            first = int(self._queue(view, now.waiting)[0])
            room = (free - int(live.num_cached_free_blocks[first])) * bs
            rows, tokens = [first], [min(int(uncached_tokens(view)[first]), chunk, room)]
        if not rows:
            return None
        chosen, parts_of = np.array(rows, dtype=np.int64), np.array(tokens, dtype=np.int64)
        if mixed.size:
            chosen, parts_of = np.concatenate((mixed, chosen)), np.concatenate((np.ones_like(mixed), parts_of))
        return Plan(chosen, parts_of)

    def _admit(
        self, view: StepView, now: Phases, charged: int, free: int, chunk: int, started: bool
    ) -> tuple[list[int], list[int]]:
        """New requests in queue order with their tokens, until one does not fit; the last may be cut.

        charged: KV tokens that this step takes already. free: KV blocks. chunk: prompt tokens left. started: the step
        holds a prompt already.
        """
        live, limits, state = view.live, view.limits, self._state
        num_running = now.running.size - now.waiting.size
        seats = smaller(limits.max_num_seqs, self.max_running_requests) - num_running
        if seats <= 0:
            state.full_at = num_running
            return [], []
        outputs = live.num_output_tokens + live.num_in_flight_tokens
        future = np.minimum(live.max_tokens - outputs, CLIP_MAX_NEW_TOKENS)
        room = limits.num_free_blocks * limits.block_size - charged
        reserve = float(future[now.decode].sum()) * self.new_token_ratio

        # More than the seats, or than one token each, never matters: a long queue costs no more than a short one.
        queue = self._queue(view, now.waiting)[: min(seats, chunk) + 1]
        extend = live.num_prompt_tokens[queue] + live.num_output_tokens[queue] - live.num_cached_tokens[queue]
        taken = live.num_cached_free_blocks[queue]
        before = np.cumsum(extend) - extend
        parts = np.minimum(np.maximum(chunk - before, 0), extend)
        # SGLang's gate: prompt + output limit + 1 stay below the room (a cached prefix taken is no room any more).
        no_room = np.cumsum(extend + future[queue] + 1 + taken * limits.block_size) >= room - reserve
        no_room |= np.cumsum(-(-parts // limits.block_size) + taken) > free
        stop = no_room | (parts == 0) | (before >= self.max_prefill_tokens)
        if self.chunked_prefill_size is None:
            follows = (before > 0) | started  # only a prompt alone is cut, to fit the engine
            stop |= follows & ((before + extend >= self.max_prefill_tokens) | (parts < extend))
        count = int(stop.argmax()) if stop.any() else queue.size
        if count > seats or (count < queue.size and no_room[count]):
            state.full_at = num_running  # no more until a running one ends
        count = min(count, seats)
        return queue[:count].tolist(), parts[:count].tolist()

    def _queue(self, view: StepView, waiting: IntArray) -> IntArray:
        """The queue in service order; a retracted request queues from when it was retracted."""
        live, state = view.live, self._state
        if bool((live.status[waiting] == PREEMPTED).any()):
            since = live.arrival_time[waiting].copy()
            for i in np.flatnonzero(live.status[waiting] == PREEMPTED).tolist():
                since[i] = state.retracted.get(int(live.index[waiting[i]]), since[i])
            waiting = waiting[np.argsort(since, kind="stable")]
        if self.schedule_policy == "lof":
            return waiting[np.argsort(-live.max_tokens[waiting], kind="stable")]
        if self.schedule_policy == "lpm" and waiting.size <= LPM_MAX_QUEUE:
            return waiting[np.argsort(-live.num_cached_tokens[waiting], kind="stable")]
        return waiting

    # ---- decodes

    def _decode_step(self, view: StepView, now: Phases) -> Plan:
        """One token for every decode; when KV runs out, retract those with the fewest output tokens."""
        live, limits, state = view.live, view.limits, self._state
        decodes, half_done = now.decodes, now.half_done
        decodes = decodes[: limits.max_num_batched_tokens]
        if not decodes.size:
            return Plan(decodes, decodes)
        blocks = new_blocks(view, decodes)
        short = int(blocks.sum()) - limits.num_free_blocks
        if short <= 0:
            state.decays += 1
            return Plan(decodes, np.ones_like(decodes))
        outputs = live.num_output_tokens[decodes]
        # First to go: fewest output tokens, then the longest prompt, then the latest in the batch.
        order = np.lexsort((-np.arange(decodes.size), -live.num_prompt_tokens[decodes], outputs))
        own = live.num_blocks - live.num_shared_blocks
        lost = list[int]()
        for i in order[:-1].tolist():
            if short <= 0:
                break
            lost.append(int(decodes[i]))
            short -= int(blocks[i] + own[decodes[i]])
        if short > 0:
            lost += half_done.tolist()
            short -= int(own[half_done].sum())
        kept = decodes[~np.isin(decodes, lost)]
        state.ratio, state.decays, state.full_at = self._ratio_after_retraction(view, kept), 0, None
        state.retracted.update((int(live.index[row]), view.now) for row in lost)
        if short > 0:
            kept = kept[:0]
        return Plan(kept, np.ones_like(kept), np.array(lost, dtype=np.int64))

    def _ratio_after_retraction(self, view: StepView, kept: IntArray) -> float:
        """Share of their output limits that the kept requests will have used some steps from now."""
        produced = int(view.live.num_output_tokens[kept].sum()) + RETRACT_DECODE_STEPS * kept.size
        return min(1.0, produced / (int(view.live.max_tokens[kept].sum()) + 1))
