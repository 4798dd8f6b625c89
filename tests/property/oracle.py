"""A second simulator, slow and plain, to hold the real one against: objects, lists and a dictionary of KV blocks.

Written from the rules of vLLM 0.32 (v1/core/sched/scheduler.py, kv_cache_manager.py, block_pool.py,
single_type_kv_cache_manager.py, engine/core.py) and from the definitions of the columns, not from the simulator's code.
Every rule stands where vLLM has it. Left out: speculative decoding, connectors, encoders, LoRA, sliding windows.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

Row = tuple[int, int, bool]
"""Tokens of a request in a step, tokens it had computed before, and whether it is a decode."""


@dataclass
class Settings:
    """The engine and vLLM's scheduler flags."""

    max_num_batched_tokens: int = 64
    max_num_seqs: int = 8
    num_blocks: int = 64
    block_size: int = 4
    watermark_blocks: int = 0
    enable_prefix_caching: bool = False
    pipeline_depth: int = 1
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    reserve_full_isl: bool = True
    priority: bool = False
    max_concurrency: int | None = None
    closed: tuple[int, float] | None = None
    """Users of a closed loop and their think time in seconds."""


@dataclass(eq=False)
class Request:
    """One request and all that the engine knows of it."""

    id: int
    arrival_time: float
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    priority: int = 0
    abort_time: float = math.inf
    hash_ids: tuple[int, ...] = ()
    hash_block_size: int = 4

    status: str = "new"  # new, waiting, running, finished, aborted, rejected
    num_outputs: int = 0
    num_computed: int = 0
    num_placeholders: int = 0
    num_in_flight: int = 0
    num_stale: int = 0
    blocks: list[Block] = field(default_factory=list)
    num_cached_blocks: int = 0
    blocks_lost: list[Block] = field(default_factory=list)
    num_preemptions: int = 0
    scheduled_tokens: int = 0
    recomputed_tokens: int = 0
    cached_tokens: int = 0
    most_computed: int = 0
    token_steps: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)
    first_scheduled_time: float = math.nan
    end_time: float = math.nan

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and outputs."""
        return self.num_prompt_tokens + self.num_outputs

    def key(self, index: int, block_size: int) -> Hashable:
        """What makes KV block `index` equal to another: its tokens and all before them.

        Tokens under hash ids are those of the ids; all others are the request's own.
        """
        end = (index + 1) * block_size
        if end <= min(self.num_prompt_tokens, len(self.hash_ids) * self.hash_block_size):
            return (self.hash_ids[: -(-end // self.hash_block_size)], index)
        return (self.id, index)


@dataclass(eq=False)
class Block:
    """One KV block; `key` is set once it is full and cached."""

    id: int
    ref_cnt: int = 0
    key: Hashable = None


class BlockPool:
    """vLLM's pool: a queue of free blocks, least recently used first, and the hash map of cached ones."""

    def __init__(self, num_blocks: int, caching: bool) -> None:
        self.caching = caching
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.free: OrderedDict[int, Block] = OrderedDict((block.id, block) for block in self.blocks)
        self.cached: dict[Hashable, dict[int, Block]] = {}

    def get_cached(self, key: Hashable) -> Block | None:
        """Any block with this content (the first that was cached)."""
        found = self.cached.get(key)
        return next(iter(found.values())) if found else None

    def cache(self, block: Block, key: Hashable) -> None:
        """Make a full block findable. Equal blocks are not merged."""
        assert block.key is None
        block.key = key
        self.cached.setdefault(key, {})[block.id] = block

    def take_new(self, count: int) -> list[Block]:
        """The first blocks of the free queue; what they cached is lost."""
        assert count <= len(self.free)
        taken = []
        for _ in range(count):
            _, block = self.free.popitem(last=False)
            if block.key is not None:
                del self.cached[block.key][block.id]
                block.key = None
            assert block.ref_cnt == 0
            block.ref_cnt = 1
            taken.append(block)
        return taken

    def touch(self, blocks: list[Block]) -> None:
        """Hold cached blocks."""
        for block in blocks:
            if block.ref_cnt == 0:
                del self.free[block.id]
            block.ref_cnt += 1

    def release(self, blocks: list[Block]) -> None:
        """Free blocks, last first: those without content to the head of the queue, cached ones to its tail."""
        first = []
        for block in reversed(blocks):
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                if block.key is None:
                    first.append(block)
                else:
                    self.free[block.id] = block
        for block in reversed(first):
            self.free[block.id] = block
            self.free.move_to_end(block.id, last=False)


@dataclass
class Step:
    """One step that ran."""

    start: float
    end: float
    tokens: dict[int, int]
    rows: list[Row]
    preempted: list[int]
    num_running: int
    num_waiting: int
    num_free_blocks: int


class Engine:
    """The engine's loop around vLLM's scheduler."""

    def __init__(self, requests: list[Request], settings: Settings, step_time: Callable[[list[Row]], float]) -> None:
        self.settings, self.step_time = settings, step_time
        self.pool = BlockPool(settings.num_blocks, settings.enable_prefix_caching)
        self.requests = requests
        self.at_client = deque(sorted(requests, key=lambda r: (r.arrival_time, r.id)))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.in_flight: deque[tuple[int, dict[Request, int], set[Request]]] = deque()
        self.steps: list[Step] = []
        self.now = self.free_at = 0.0
        self.first_sharing: int | None = None
        """First step in which what a request found in the cache, or a victim freed, hung on another row of the step."""
        self.next_sends: list[float] = []
        if settings.closed is not None:
            self.next_sends = [0.0] * min(settings.closed[0], len(requests))

    # The clients

    def receive(self) -> None:
        """Take in what was sent until now, in the order of sending."""
        while self.at_client:
            request = self.at_client[0]
            if self.settings.closed is not None:
                self.next_sends.sort()
                if not self.next_sends or self.next_sends[0] > self.now:
                    return
                request.arrival_time = self.next_sends.pop(0)
            elif request.arrival_time > self.now or self.is_full():
                return
            self.at_client.popleft()
            longest = request.num_prompt_tokens + request.num_output_tokens - 1
            if -(-longest // self.settings.block_size) > self.settings.num_blocks:
                self.end(request, "rejected", request.arrival_time)
            elif request.abort_time <= self.now:
                self.end(request, "aborted", request.abort_time)
            else:
                request.status = "waiting"
                self.waiting.append(request)

    def is_full(self) -> bool:
        """The client's semaphore lets nobody through."""
        return len(self.waiting) + len(self.running) >= (self.settings.max_concurrency or math.inf)

    def end(self, request: Request, reason: str, time: float) -> None:
        """A request leaves; in a closed loop its user thinks and sends the next."""
        request.status, request.end_time = reason, time
        if self.settings.closed is not None:
            self.next_sends.append(time + self.settings.closed[1])

    def abort(self) -> None:
        """Clients that left until now, in the order of their leaving."""
        gone = [r for r in [*self.running, *self.waiting] if r.abort_time <= self.now]
        for request in sorted(gone, key=lambda r: (r.abort_time, r.id)):
            (self.running if request in self.running else self.waiting).remove(request)
            self.free_blocks(request)
            self.end(request, "aborted", request.abort_time)

    # The KV cache

    def free_blocks(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks, request.num_cached_blocks = [], 0

    def find_hit(self, request: Request) -> list[Block]:
        """Longest run of cached blocks from the start; the last token is always computed."""
        hit: list[Block] = []
        if self.settings.enable_prefix_caching:
            for index in range((request.num_tokens - 1) // self.settings.block_size):
                block = self.pool.get_cached(request.key(index, self.settings.block_size))
                if block is None:
                    break
                hit.append(block)
        return hit

    def allocate(self, request: Request, num_new: int, hit: list[Block], waiting: bool) -> bool:
        """vLLM's allocate_slots: take the hit and new blocks for the new tokens, or nothing."""
        size = self.settings.block_size
        evictable = sum(block.ref_cnt == 0 for block in hit)
        watermark = self.settings.watermark_blocks if waiting and self.running else 0
        have = len(request.blocks) + len(hit)
        if waiting and self.settings.reserve_full_isl:
            whole = max(-(-request.num_tokens // size) - have, 0) + evictable
            if whole + watermark > len(self.pool.free):
                return False
        total = request.num_computed + len(hit) * size + num_new
        needed = max(-(-total // size) - have, 0)
        if needed + evictable + watermark > len(self.pool.free):
            return False
        self.pool.touch(hit)
        request.blocks += hit
        request.num_cached_blocks += len(hit)
        request.blocks += self.pool.take_new(needed)
        self.cache_blocks(request, min(total, request.num_tokens))
        return True

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Blocks full of known tokens can be found from now on, though the step has not run yet."""
        if self.settings.enable_prefix_caching:
            while request.num_cached_blocks < num_tokens // self.settings.block_size:
                index = request.num_cached_blocks
                self.pool.cache(request.blocks[index], request.key(index, self.settings.block_size))
                request.num_cached_blocks += 1

    # The scheduler

    def preempt(self, request: Request) -> None:
        """Recompute preemption; a token in flight is still delivered."""
        request.blocks_lost = list(request.blocks)
        self.free_blocks(request)
        request.status = "waiting"
        request.num_computed = request.num_placeholders = 0
        request.num_stale = request.num_in_flight
        request.num_preemptions += 1
        self.waiting.appendleft(request)

    def threshold(self) -> int:
        """Most tokens of one request in this step; 0 is no limit."""
        eligible = len(self.running) + len(self.waiting)
        threshold = self.settings.long_prefill_token_threshold if eligible > 1 else 0
        if threshold > 0 and self.settings.long_prefill_token_threshold_adaptive:
            threshold = max(threshold, self.settings.max_num_batched_tokens // eligible)
        return threshold

    def schedule(self) -> bool:
        """Decide one step and launch it, if it has tokens."""
        budget = self.settings.max_num_batched_tokens
        threshold = self.threshold()
        scheduled: dict[Request, int] = {}
        preempted: list[Request] = []
        before = {r: self.found(r) for r in self.waiting}
        i = 0
        while i < len(self.running) and budget > 0:
            request = self.running[i]
            last = request.num_prompt_tokens + request.max_tokens
            if request.num_placeholders > 0 and request.num_computed + 2 - request.num_placeholders >= last:
                i += 1
                continue
            num_new = request.num_tokens + request.num_placeholders - request.num_computed
            if 0 < threshold < num_new:
                num_new = threshold
            num_new = min(num_new, budget)
            assert num_new > 0
            fits = True
            while not self.allocate(request, num_new, [], waiting=False):
                if self.settings.priority:
                    victim = max(self.running, key=lambda r: (r.priority, r.arrival_time, r.id))
                    position = self.running.index(victim)
                    del self.running[position]
                    if position < i:
                        i -= 1
                    budget += scheduled.pop(victim, 0)
                else:
                    victim = self.running.pop()
                self.preempt(victim)
                if any(set(victim.blocks_lost) & set(other.blocks_lost) for other in preempted):
                    self.note_sharing()
                preempted.append(victim)
                if victim is request:
                    fits = False
                    break
            if not fits:
                break
            scheduled[request] = num_new
            budget -= num_new
            i += 1
        if not preempted:
            self.admit(scheduled, budget, threshold, before)
        return self.launch(scheduled, preempted)

    def note_sharing(self) -> None:
        if self.first_sharing is None:
            self.first_sharing = len(self.steps)

    def found(self, request: Request) -> tuple[int, int]:
        """Length of the request's hit, and how many of its blocks nobody holds."""
        hit = self.find_hit(request)
        return len(hit), sum(block.ref_cnt == 0 for block in hit)

    def admit(
        self, scheduled: dict[Request, int], budget: int, threshold: int, before: dict[Request, tuple[int, int]]
    ) -> None:
        """Waiting requests, until one cannot be admitted."""
        while budget > 0 and self.waiting and len(self.running) < self.settings.max_num_seqs:
            request = self.waiting[0]
            if self.settings.priority:
                request = min(self.waiting, key=lambda r: (r.priority, r.arrival_time, r.id))
            assert request.num_stale == 0, "a request whose output is in flight would be skipped"
            hit = self.find_hit(request)
            if self.found(request) != before[request]:
                self.note_sharing()
            num_new = request.num_tokens - len(hit) * self.settings.block_size
            if 0 < threshold < num_new:
                num_new = threshold
            num_new = min(num_new, budget)
            if not self.allocate(request, num_new, hit, waiting=True):
                return
            self.waiting.remove(request)
            self.running.append(request)
            request.status = "running"
            request.num_computed = len(hit) * self.settings.block_size
            request.cached_tokens += request.num_computed
            scheduled[request] = num_new
            budget -= num_new

    def launch(self, scheduled: dict[Request, int], preempted: list[Request]) -> bool:
        """Advance the counters, as vLLM does before the step runs, and start the step."""
        if not scheduled:
            return bool(preempted) and not self.in_flight  # an empty batch: vLLM schedules again at once
        rows: list[Row] = []
        emitting: set[Request] = set()
        for request, num_new in scheduled.items():
            known = request.num_tokens + request.num_placeholders
            emitted = request.num_outputs + request.num_placeholders > 0
            rows.append((num_new, request.num_computed, emitted and known - request.num_computed == 1))
            request.recomputed_tokens += max(min(request.most_computed - request.num_computed, num_new), 0)
            request.num_computed += num_new
            request.most_computed = max(request.most_computed, request.num_computed)
            request.num_in_flight += num_new
            request.scheduled_tokens += num_new
            if request.num_computed >= known:
                request.num_placeholders += 1
                emitting.add(request)
        start = max(self.now, self.free_at)
        self.free_at = start + self.step_time(rows)
        for request in scheduled:
            if math.isnan(request.first_scheduled_time):
                request.first_scheduled_time = start
        tokens = {request.id: num_new for request, num_new in scheduled.items()}
        counts = (len(self.running), len(self.waiting), len(self.pool.free))
        self.steps.append(Step(start, self.free_at, tokens, rows, [r.id for r in preempted], *counts))
        self.in_flight.append((len(self.steps) - 1, scheduled, emitting))
        return True

    def update(self) -> None:
        """The oldest step in flight has ended: deliver its tokens."""
        index, scheduled, emitting = self.in_flight.popleft()
        ended = []
        for request, num_new in scheduled.items():
            request.num_in_flight -= num_new
            stale = request.num_stale > 0
            if stale:
                request.num_stale -= num_new
            if request.status not in ("waiting", "running") or request not in emitting:
                continue
            request.num_outputs += 1
            request.token_steps.append(index)
            request.token_times.append(self.steps[index].end)
            if not stale:
                request.num_placeholders -= 1
            if request.status == "running" and self.settings.pipeline_depth == 2:
                self.cache_blocks(request, request.num_computed - request.num_placeholders)
            if request.num_outputs == request.num_output_tokens:
                ended.append(request)
                self.free_blocks(request)
                self.end(request, "finished", self.steps[index].end)
        self.running = [r for r in self.running if r not in ended]
        self.waiting = deque(r for r in self.waiting if r not in ended)

    def run(self) -> Engine:
        """Run all requests to their end."""
        while self.at_client or self.waiting or self.running or self.in_flight:
            self.abort()
            self.receive()
            if len(self.in_flight) < self.settings.pipeline_depth and self.schedule():
                continue  # vLLM fills its batch queue before it waits
            if self.in_flight:  # wait for the oldest step
                self.now = self.steps[self.in_flight[0][0]].end
                self.abort()
                self.update()
                continue
            times = self.next_sends if self.settings.closed else [r.arrival_time for r in self.at_client]
            times = times + [r.abort_time for r in [*self.waiting, *self.running]]
            later = [t for t in times if t > self.now]
            if not later:
                assert not self.waiting, "stuck"
                assert not self.running, "stuck"
                break
            self.now = min(later)
        assert all(block.ref_cnt == 0 for block in self.pool.blocks)
        assert len(self.pool.free) == self.settings.num_blocks
        return self
