"""The same arrivals through the simulator and through vLLM's scheduler: every step takes one second, on both sides."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import headless as h
import numpy as np
from workloads import Case

from slacktide.core.latency import AffineModel
from slacktide.core.policies.vllm_v1 import VllmV1
from slacktide.core.types import Plan, StepResult, StepView
from slacktide.sim.engine import EngineConfig, simulate
from slacktide.workload.requests import Workload

ONE_SECOND = AffineModel(1.0, 0.0, 1.0, 0.0, 1.0)


@dataclass
class Recorder:
    """The policy, and the facts of every step as it was scheduled."""

    policy: VllmV1
    facts: list[tuple[dict[int, int], tuple[int, ...]]] = field(default_factory=list)
    _open: list[int] = field(default_factory=list)

    def plan(self, view: StepView) -> Plan:
        plan = self.policy.plan(view)
        if plan.rows.size or plan.preempted.size:
            if plan.rows.size:
                self._open.append(len(self.facts))
            self.facts.append(({}, tuple(sorted(view.live.index[plan.preempted].tolist()))))
        return plan

    def observe(self, result: StepResult) -> None:
        """With a step in flight the outcome comes after the next plan: it belongs to the oldest open one."""
        if result.indices.size:
            tokens, _ = self.facts[self._open.pop(0)]
            tokens |= dict(zip(result.indices.tolist(), result.tokens.tolist(), strict=True))


def arrival_time(turn: int) -> float:
    """Half-way before the step that starts at `turn`: nothing happens at that instant on either side."""
    return turn - 0.5 if turn else 0.0


def by_simulator(case: Case) -> tuple[list[tuple[dict[int, int], tuple[int, ...]]], dict[int, int]]:
    """(tokens and preempted requests of each step, tokens of each request)."""
    o, arrivals = case.options, case.arrivals
    hash_ids = None
    if o.prefix_caching:
        ids: dict[tuple[int, ...], int] = {}
        lists = [
            [ids.setdefault(a.tokens[: k * h.BLOCK_SIZE] if a.tokens else (-a.number - 1, k), len(ids))
             for k in range(1, a.prompt // h.BLOCK_SIZE + 1)]
            for a in arrivals
        ]  # fmt: skip
        values = np.array([i for one in lists for i in one], dtype=np.int64)
        hash_ids = (values, np.concatenate([[0], np.cumsum([len(one) for one in lists])]).astype(np.int64))
    workload = Workload(
        arrival_time=np.array([arrival_time(a.turn) for a in arrivals]),
        num_prompt_tokens=np.array([a.prompt for a in arrivals], dtype=np.int64),
        num_output_tokens=np.array([a.output for a in arrivals], dtype=np.int64),
        max_tokens=np.array([a.max_tokens for a in arrivals], dtype=np.int64),
        priority=np.array([a.priority for a in arrivals], dtype=np.int64),
        abort_time=np.array([np.inf if a.abort_turn is None else arrival_time(a.abort_turn) for a in arrivals]),
        hash_ids=hash_ids,
        hash_block_size=h.BLOCK_SIZE,
    )
    config = EngineConfig(
        max_num_batched_tokens=o.max_num_batched_tokens, max_num_seqs=o.max_num_seqs, num_blocks=o.num_blocks,
        block_size=h.BLOCK_SIZE, watermark=o.watermark, max_model_len=o.max_model_len,
        enable_prefix_caching=o.prefix_caching, pipeline_depth=2 if o.is_async else 1,
    )  # fmt: skip
    policy = Recorder(
        VllmV1(
            long_prefill_token_threshold=o.threshold, long_prefill_token_threshold_adaptive=o.threshold_adaptive,
            scheduler_reserve_full_isl=o.reserve_full_isl, scheduling_policy=o.policy,  # type: ignore[arg-type]
        )
    )  # fmt: skip
    log = simulate(workload, policy, ONE_SECOND, config, fast_forward=False, check=True).log
    counts = np.diff(log.token_offsets)
    return policy.facts, {a.number: int(counts[i]) for i, a in enumerate(arrivals)}


def by_vllm(
    case: Case, directory: Path, surprises: list[int]
) -> tuple[list[tuple[dict[int, int], tuple[int, ...]]], dict[int, int]]:
    """The same of vLLM's scheduler, on a clock of one second a step; `surprises` as in headless.Engine."""
    scheduler = h.build(directory, case.options)
    engine = Clocked(scheduler, is_async=case.options.is_async)
    engine.surprises = watched = []
    todo = [(arrival_time(a.turn), made) for a, (_, made, _) in zip(case.arrivals, case.requests(), strict=True)]
    aborts = sorted((arrival_time(a.abort_turn), f"r{a.number:05d}") for a in case.arrivals if a.abort_turn is not None)
    while todo or scheduler.has_requests() or engine.in_flight:
        while todo and todo[0][0] <= engine.now:
            engine.add(todo.pop(0)[1])
        while aborts and aborts[0][0] <= engine.now:
            engine.abort(aborts.pop(0)[1])
        if not scheduler.has_requests() and not engine.in_flight:
            if not todo:
                break
            engine.now = max(engine.now, todo[0][0])
            continue
        engine.step()
    facts = [
        ({int(i[1:]): n for i, n in fact.tokens.items()}, tuple(int(i[1:]) for i in fact.preempted))
        for fact in engine.facts
        if fact.tokens or fact.preempted
    ]
    kept = [i for i, fact in enumerate(engine.facts) if fact.tokens or fact.preempted]
    surprises += [kept.index(i) for i in watched if i in kept]
    return facts, {int(i[1:]): len(tokens) for i, tokens in engine.out.items()}


class Clocked(h.Engine):
    """An engine whose steps take one second; steps without tokens take none."""

    now = 0.0
    free_at = 0.0

    def _run(self, output: Any) -> Any:
        start = max(self.now, self.free_at)
        self.free_at = start + (1.0 if output.total_num_scheduled_tokens else 0.0)
        result = super()._run(output)
        result.end = self.free_at
        return result

    def _take(self, output: Any, result: Any) -> None:
        self.now = max(self.now, result.end)
        super()._take(output, result)
