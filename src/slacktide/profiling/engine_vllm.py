"""vLLM in this process, made to run exactly the steps of a design.

Our scheduler class carries a policy that plans what the point says and nothing else. Prompts are cut from a pool of
fixed token ids, so that the prefix cache supplies the contexts of the next point and only the step itself costs time;
every row has ids of its own, so that no two rows share KV blocks. A step is timed twice: as the plug-in's step log
times it (from its schedule, or the end of the step before, to its tokens), and as the engine's whole turn, which
includes what the host does between two steps. Nothing of the plug-in is imported: it is reached through the scheduler.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slacktide.core import shape as s
from slacktide.core.types import RUNNING, FloatArray, Plan, StepResult, StepView
from slacktide.errors import InputError
from slacktide.profiling.experiments import Envelope, Point
from slacktide.profiling.machine import hardware, versions

SAFE_IDS = (100, 30_000)
"""Token ids of prompts: above the special ones, below the vocabulary of nearly every model."""
MAX_TURNS = 10_000
"""Turns of the engine without the step that was asked for, after which something is wrong."""


@dataclass(slots=True)
class Role:
    """What a request is there for: a decode at a context, or a chunk of new tokens after cached ones."""

    is_decode: bool
    cached: int
    tokens: int = 1


@dataclass(slots=True)
class Measured:
    """One measured step. Seconds; `turn` is the engine's whole turn, None where steps overlap."""

    shape: FloatArray
    duration: float
    turn: float | None


@dataclass
class Forced:
    """The policy: brings every request to its start, then plans the one step that is to be measured.

    Requests are told apart by the order in which they came in (`expect` before each is added).
    """

    name: str = "profile"
    steerable: bool = True
    roles: dict[int, Role] = field(default_factory=dict)
    armed: bool = False
    """Whether the next step with everybody in place is the one to measure."""
    results: list[tuple[FloatArray, float]] = field(default_factory=list)
    _expected: deque[Role] = field(default_factory=deque)
    _last_index: int = -1
    _planned: deque[tuple[int, int, FloatArray | None]] = field(default_factory=deque)

    def expect(self, role: Role) -> None:
        """The next request that comes in has this role."""
        self._expected.append(role)

    def plan(self, view: StepView) -> Plan:
        """Who is not in place gets what is missing; else the step to measure; else decodes, to fill the pipeline."""
        live = view.live
        for number in sorted(int(i) for i in live.index if i > self._last_index):
            self._last_index = number
            if self._expected:
                self.roles[number] = self._expected.popleft()
        base = np.where(live.status == RUNNING, live.num_computed_tokens, live.num_cached_tokens)
        left, rows, tokens = view.limits.max_num_batched_tokens, [], []
        waiting = False
        for row, number in enumerate(live.index.tolist()):
            role = self.roles.get(number)
            if role is None:
                continue
            missing = self._missing(role, view, row, int(base[row]))
            waiting = waiting or missing > 0
            if missing > 0 and left > 0:
                rows.append(row)
                tokens.append(min(missing, left))
                left -= tokens[-1]
        if waiting:
            return self._made(rows, tokens, None)
        for row, number in enumerate(live.index.tolist()):
            role = self.roles.get(number)
            if role is not None and (role.is_decode or self.armed):
                rows.append(row)
                tokens.append(role.tokens)
        shape = None
        if self.armed:
            self.armed = False
            picked = np.array(rows, dtype=np.int64)
            shape = s.batch_shape(np.array(tokens, dtype=np.int64), base[picked], live.is_decode[picked])
        return self._made(rows, tokens, shape)

    @staticmethod
    def _missing(role: Role, view: StepView, row: int, base: int) -> int:
        live = view.live
        if not role.is_decode:
            return max(role.cached - base, 0)
        started = live.num_output_tokens[row] + live.num_in_flight_tokens[row] > 0
        return 0 if started else int(live.num_prompt_tokens[row]) - base

    def _made(self, rows: list[int], tokens: list[int], shape: FloatArray | None) -> Plan:
        if rows:
            self._planned.append((len(rows), sum(tokens), shape))
        return Plan(np.array(rows, dtype=np.int64), np.array(tokens, dtype=np.int64))

    def observe(self, result: StepResult) -> None:
        """Match the outcome with its plan; one that vLLM changed (KV full, other hits than believed) is not counted."""
        if result.step_time is None or not self._planned:
            return
        count, total, shape = self._planned.popleft()
        if shape is not None and result.indices.size == count and int(result.tokens.sum()) == total:
            self.results.append((shape, result.step_time))


class VllmEngine:
    """The engine. `arguments` are `vllm serve`'s, the model first. Raises InputError without vLLM."""

    kind = "vllm in process"

    def __init__(self, arguments: Sequence[str], seed: int = 0) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        self._llm = _build(list(arguments), seed)
        core = self._llm.llm_engine.engine_core.engine_core
        self._client, self._core = self._llm.llm_engine.engine_core, core
        host = getattr(core.scheduler, "slacktide", None)
        if host is None:
            raise InputError("profile: the engine does not run our scheduler; leave --scheduler-cls out")
        self._policy = Forced()
        host.policy = self._policy
        self._config = core.vllm_config
        self._pool: dict[tuple[str, int], Any] = {}
        self._seed, self._count = seed, 0
        self._overlaps = bool(self._config.scheduler_config.async_scheduling)

    @property
    def envelope(self) -> Envelope:
        """What the engine says it can run."""
        scheduler, cache = self._config.scheduler_config, self._config.cache_config
        return Envelope(
            max_num_batched_tokens=int(scheduler.max_num_batched_tokens),
            max_num_seqs=int(scheduler.max_num_seqs),
            max_model_len=int(self._config.model_config.max_model_len),
            kv_tokens=(int(cache.num_gpu_blocks) - 1) * int(cache.block_size),
            block_size=int(cache.block_size),
        )

    def facts(self) -> dict[str, Any]:
        """Engine settings, versions and hardware, read from the engine."""
        scheduler, cache, model = (
            self._config.scheduler_config, self._config.cache_config, self._config.model_config,
        )  # fmt: skip
        return {
            "engine": {
                "kind": self.kind,
                "model": os.path.basename(str(model.model).rstrip("/")) or "unknown",  # noqa: PTH119 - may be a hub name
                "dtype": str(model.dtype).removeprefix("torch."),
                "max_model_len": int(model.max_model_len),
                "max_num_batched_tokens": int(scheduler.max_num_batched_tokens),
                "max_num_seqs": int(scheduler.max_num_seqs),
                "num_gpu_blocks": int(cache.num_gpu_blocks),
                "block_size": int(cache.block_size),
                "enable_prefix_caching": bool(cache.enable_prefix_caching),
                "async_scheduling": self._overlaps,
                "enforce_eager": bool(model.enforce_eager),
                "tensor_parallel": int(self._config.parallel_config.tensor_parallel_size),
            },
            "versions": versions(),
            "hardware": hardware(),
        }

    def measure(self, point: Point, samples: int) -> list[Measured]:
        """The point's step, `samples` times; fewer when vLLM did not run it as planned."""
        found: list[Measured] = []
        self._policy.roles.clear()
        ids = [self._add("d", i, context, 64) for i, context in enumerate(point.decodes)]
        try:
            for _ in range(samples):
                chunks = [self._add("p", i, u, 1, fresh=c) for i, (c, u) in enumerate(point.chunks)]
                found += self._one_step()
                self._end(chunks)
        finally:
            self._end(ids)
        return found

    def close(self) -> None:
        """End the engine."""
        self._core.shutdown()

    def _add(self, kind: str, row: int, context: int, output: int, fresh: int = 0) -> str:
        """A request whose first `context` tokens are the pool's row; `fresh` more are new."""
        import vllm

        ids = self._pooled(kind, row, context)
        if fresh:
            ids += self._drawn((9, self._count), fresh)
        self._policy.expect(Role(kind == "d", context if fresh else 0, fresh or 1))
        request_id = f"profile-{self._count}"
        self._count += 1
        parameters = vllm.SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
        added = self._llm.llm_engine.add_request(request_id, {"prompt_token_ids": ids}, parameters)
        return added if isinstance(added, str) else request_id

    def _pooled(self, kind: str, row: int, context: int) -> list[int]:
        """The first tokens of a row of the pool: decodes and chunks have rows of their own."""
        key = (kind, row)
        if key not in self._pool or len(self._pool[key]) < context:
            length = max(context, 1024)
            self._pool[key] = self._drawn((1 if kind == "d" else 2, row), length)
        return list(self._pool[key][:context])

    def _drawn(self, key: tuple[int, int], length: int) -> list[int]:
        """Ids by key; a longer draw begins with the shorter one's."""
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(self._seed, spawn_key=key)))
        vocabulary = int(self._config.model_config.get_vocab_size())
        low, high = SAFE_IDS if vocabulary >= SAFE_IDS[1] else (vocabulary // 2, vocabulary)
        return [int(i) for i in rng.integers(low, high, length)]

    def _one_step(self) -> list[Measured]:
        """Run until the armed step has come back."""
        policy, before = self._policy, len(self._policy.results)
        policy.armed = True
        for _ in range(MAX_TURNS):
            asked = policy.armed
            began = time.perf_counter()
            self._client.get_output()
            turn = time.perf_counter() - began
            if len(policy.results) > before:
                shape, duration = policy.results[-1]
                return [Measured(shape, duration, None if self._overlaps else turn)]
            if asked and not policy.armed and not self._overlaps:
                return []  # it ran, but not as planned
        raise RuntimeError("the engine did not run the step that was planned")

    def _end(self, request_ids: list[str]) -> None:
        """Abort requests and let the engine forget them."""
        live = [i for i in request_ids if i]
        if live:
            self._llm.llm_engine.abort_request(live, internal=True)
        for _ in range(8 if not self._core.scheduler.has_unfinished_requests() else 1):
            if not self._core.scheduler.has_requests():
                break
            if not self._core.scheduler.has_unfinished_requests():
                self._client.get_output()


def _build(arguments: list[str], seed: int) -> Any:
    """An LLM with our scheduler, from `vllm serve`'s arguments."""
    try:
        from vllm import LLM
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError as error:
        raise InputError(f"slacktide profile MODEL needs vLLM in this environment ({error}); or use --url") from None
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--model", *arguments]
    parsed = parser.parse_args(arguments)
    given = {name: getattr(parsed, name) for name in EngineArgs.__dataclass_fields__ if hasattr(parsed, name)}
    defaults = parser.parse_args(["--model", parsed.model])
    wanted = {name: value for name, value in given.items() if value != getattr(defaults, name) or name == "model"}
    wanted |= {"enable_prefix_caching": True, "seed": seed, "disable_log_stats": True, "skip_tokenizer_init": True}
    wanted["additional_config"] = {"slacktide": {"policy": "vllm-v1", "max_decision_ms": 60_000.0}}
    sync = _is_cpu() or wanted.get("async_scheduling") is False
    wanted["scheduler_cls"] = f"slacktide.vllm.{'SyncScheduler' if sync else 'Scheduler'}"
    return LLM(**wanted)


def _is_cpu() -> bool:
    """vLLM on CPUs never schedules asynchronously."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())
