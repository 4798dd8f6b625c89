"""Random workloads for the conformance tests: which requests arrive before which step, and which are aborted."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from headless import BLOCK_SIZE, Options, request


@dataclass(frozen=True)
class Arrival:
    """One request: the turn of the loop before which it arrives, and what it wants."""

    turn: int
    number: int
    prompt: int
    output: int
    priority: int
    tokens: tuple[int, ...] | None
    max_tokens: int
    abort_turn: int | None


@dataclass(frozen=True)
class Case:
    """A workload with its engine."""

    options: Options
    arrivals: tuple[Arrival, ...]

    def requests(self) -> list[tuple[int, Any, int | None]]:
        """(turn, vLLM request, abort turn), fresh ones: a request serves one run."""
        return [
            (
                a.turn,
                request(
                    a.number, a.prompt, a.output, arrival=1000.0 + a.number, priority=a.priority, tokens=a.tokens,
                    hashed=self.options.prefix_caching, max_tokens=a.max_tokens,
                ),
                a.abort_turn,
            )
            for a in self.arrivals
        ]  # fmt: skip


def case(seed: int, *, prefixes: bool = False, priorities: bool = False) -> Case:
    """A random engine and workload: from idle to overloaded, with and without KV pressure."""
    rng = np.random.default_rng(seed)
    budget = int(rng.choice([16, 40, 64, 128, 256, 512, 2048]))
    options = Options(
        max_num_batched_tokens=budget,
        max_num_seqs=int(rng.choice([1, 2, 4, 8, 16])),
        num_blocks=int(rng.choice([24, 40, 80, 200, 1000])),
        prefix_caching=prefixes,
        policy="priority" if priorities else "fcfs",
        threshold=int(rng.choice([0, 0, 8, 30, 100])),
        threshold_adaptive=bool(rng.random() < 0.3),
        reserve_full_isl=bool(rng.random() < 0.7),
        watermark=float(rng.choice([0.0, 0.0, 0.05])),
        is_async=bool(rng.random() < 0.5),
    )
    options = replace(options, max_num_seqs=min(options.max_num_seqs, budget))
    most = (options.num_blocks - 1) * BLOCK_SIZE
    gaps = rng.geometric(float(rng.choice([0.9, 0.5, 0.15])), size=int(rng.integers(3, 25))) - 1
    heads = [tuple(int(t) for t in rng.integers(0, 40_000, size=int(n))) for n in rng.integers(10, 150, size=3)]
    arrivals = []
    for number, turn in enumerate(itertools.accumulate(gaps.tolist())):
        prompt = int(min(rng.integers(1, rng.choice([20, 100, 400])), most * 2 // 3))
        output = int(min(rng.integers(1, rng.choice([3, 30, 100])), most - prompt))
        tokens = None
        if prefixes and rng.random() < 0.7:
            head = heads[int(rng.integers(0, 3))][:prompt]
            tokens = (*head, *(int(t) for t in rng.integers(0, 40_000, size=prompt - len(head))))
        longer = output if rng.random() < 0.5 else output + int(rng.integers(1, 50))
        abort = turn + int(rng.integers(1, 40)) if rng.random() < 0.1 else None
        priority = int(rng.integers(0, 3)) if priorities else 0
        arrivals.append(Arrival(turn, number, prompt, output, priority, tokens, longer, abort))
    return Case(options, tuple(arrivals))
