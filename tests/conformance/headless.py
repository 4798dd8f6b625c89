"""vLLM's real scheduler without a model: a tiny configuration, fake model outputs, a loop like the engine core's.

Every sampled token is the number of its position, so that a request's output proves that no token was lost or doubled.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

# The schedulers are built by the hundred: a missing vLLM must skip, not fail.
pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm runs these tests")

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as StockScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

CAPS_LONE_PROMPTS = "long_prefill_token_threshold_adaptive" not in SchedulerConfig.__dataclass_fields__
"""vLLM 0.29 and 0.30 apply long_prefill_token_threshold to a lone request, too; our vllm-v1 is that of 0.32."""

BLOCK_SIZE = 16
EOS = 50_000

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 1, "vocab_size": 60_000,
    "max_position_embeddings": 8192, "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": EOS,
}  # fmt: skip

init_none_hash(sha256)


@dataclass(frozen=True)
class Options:
    """Engine settings of a test."""

    max_num_batched_tokens: int = 256
    max_num_seqs: int = 8
    num_blocks: int = 200
    """Usable blocks: vLLM gets one more."""
    max_model_len: int = 4096
    prefix_caching: bool = False
    policy: str = "fcfs"
    threshold: int = 0
    threshold_adaptive: bool = False
    reserve_full_isl: bool = True
    watermark: float = 0.0
    max_num_active_seqs: int | None = None
    is_async: bool = False
    slacktide: dict[str, Any] = field(default_factory=dict)


_MODEL_CONFIGS: dict[int, ModelConfig] = {}


def model_config(directory: Path, max_model_len: int) -> ModelConfig:
    """A tiny Llama that exists only as a configuration; built once for each length."""
    if max_model_len not in _MODEL_CONFIGS:
        path = directory / f"model-{max_model_len}"
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(MODEL))
        _MODEL_CONFIGS[max_model_len] = ModelConfig(
            model=str(path), skip_tokenizer_init=True, dtype="float32", seed=0, max_model_len=max_model_len
        )
    return _MODEL_CONFIGS[max_model_len]


def scheduler_config(options: Options) -> SchedulerConfig:
    """vLLM's, with the flags that this release has."""
    flags: dict[str, Any] = {
        "max_num_seqs": options.max_num_seqs, "max_num_batched_tokens": options.max_num_batched_tokens,
        "max_model_len": options.max_model_len, "is_encoder_decoder": False, "enable_chunked_prefill": True,
        "long_prefill_token_threshold": options.threshold, "policy": options.policy,
        "scheduler_reserve_full_isl": options.reserve_full_isl, "watermark": options.watermark,
        "async_scheduling": options.is_async,
    }  # fmt: skip
    known = SchedulerConfig.__dataclass_fields__
    if options.threshold_adaptive:
        flags["long_prefill_token_threshold_adaptive"] = True
    if options.max_num_active_seqs is not None:
        flags["max_num_active_seqs"] = options.max_num_active_seqs
    return SchedulerConfig(
        **{name: value for name, value in flags.items() if name in known or name.startswith(("max_m", "is_"))}
    )


def build(directory: Path, options: Options, cls: type | None = None) -> Any:
    """A scheduler: stock (sync or async) unless `cls` is given."""
    model = model_config(directory, options.max_model_len)
    cache = CacheConfig(
        block_size=BLOCK_SIZE,
        gpu_memory_utilization=0.9,
        cache_dtype="auto",
        enable_prefix_caching=options.prefix_caching,
    )
    cache.num_gpu_blocks = options.num_blocks + 1
    own = {"state_dir": str(directory / "state")} | options.slacktide
    config = VllmConfig(
        scheduler_config=scheduler_config(options), model_config=model, cache_config=cache,
        device_config=DeviceConfig("cpu"), additional_config={"slacktide": own},
    )  # fmt: skip
    config.scheduler_config.async_scheduling = options.is_async  # VllmConfig may think again: a test decides itself
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)
    kv = KVCacheConfig(
        num_blocks=options.num_blocks + 1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    chosen = cls or (AsyncScheduler if options.is_async else StockScheduler)
    return chosen(
        vllm_config=config, kv_cache_config=kv, block_size=BLOCK_SIZE, log_stats=False,
        structured_output_manager=StructuredOutputManager(config),
    )  # fmt: skip


def request(
    number: int, prompt: int, output: int, *, arrival: float, priority: int = 0, tokens: Sequence[int] | None = None,
    extra: dict[str, Any] | None = None, hashed: bool = False, max_tokens: int | None = None,
) -> Request:  # fmt: skip
    """A request with `output` tokens; unless `tokens` gives them, its prompt tokens are its own."""
    ids = list(tokens) if tokens is not None else [(number * 7919 + i) % 49_999 for i in range(prompt)]
    params = SamplingParams(max_tokens=max_tokens or output, ignore_eos=max_tokens is None, extra_args=extra)
    params.update_from_generation_config({}, EOS)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256) if hashed else None
    made = Request(
        request_id=f"r{number:05d}", prompt_token_ids=ids, sampling_params=params, pooling_params=None,
        arrival_time=arrival, priority=priority, block_hasher=hasher,
    )  # fmt: skip
    made.true_output = output
    return made


@dataclass
class StepFact:
    """What one schedule() call did."""

    tokens: dict[str, int]
    preempted: tuple[str, ...]
    finished: tuple[str, ...] = ()
    """Requests that had ended by the time the step was scheduled."""


class Engine:
    """The engine core's loop: schedule, run, take the output; with async scheduling one step is in flight meanwhile."""

    def __init__(self, scheduler: Any, *, is_async: bool) -> None:
        self.scheduler, self.is_async = scheduler, is_async
        self.in_flight: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self.facts: list[StepFact] = []
        self.out: dict[str, list[int]] = {}
        self.ends: dict[str, Any] = {}
        self.true_output: dict[str, int] = {}
        self.surprises: list[int] | None = None
        """If a list: gets the steps in which a waiting request's prefix hits changed while the step was scheduled."""

    def add(self, made: Request) -> None:
        """A request arrives."""
        self.true_output[made.request_id] = made.true_output
        self.out[made.request_id] = []
        self.scheduler.add_request(made)

    def abort(self, request_id: str) -> None:
        """A client gives up."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        """One turn."""
        if self.scheduler.has_requests():
            before = self._hits() if self.surprises is not None else {}
            output = self.scheduler.schedule()
            if self.surprises is not None and self._surprised(output, before):
                self.surprises.append(len(self.facts))
            self.facts.append(StepFact(
                dict(output.num_scheduled_tokens), tuple(sorted(output.preempted_req_ids or ())),
                tuple(sorted(output.finished_req_ids)),
            ))  # fmt: skip
            self.in_flight.append((output, self._run(output)))
            if (
                self.is_async
                and len(self.in_flight) < 2
                and (output.total_num_scheduled_tokens or self.scheduler.has_requests())
            ):
                return
        if self.in_flight:
            self._take(*self.in_flight.popleft())

    def _hits(self) -> dict[str, tuple[int, list[Any]]]:
        """Waiting requests -> (tokens they would find cached now, of those blocks the ones nobody holds)."""
        find = self.scheduler.kv_cache_manager.coordinator.find_longest_cache_hit
        found: dict[str, tuple[int, list[Any]]] = {}
        for made in self.scheduler.requests.values():
            if made.status.name in ("WAITING", "PREEMPTED"):
                blocks, tokens = find(made.block_hashes, made.num_tokens - 1)[:2]
                found[made.request_id] = (tokens, [block for block in blocks[0] if block.ref_cnt == 0])
        return found

    def _surprised(self, output: Any, before: dict[str, tuple[int, list[Any]]]) -> bool:
        """Whether somebody else's admission changed what a waiting request finds, or what finding it costs."""
        after = self._hits()
        for request_id, (tokens, unheld) in before.items():
            if request_id not in output.num_scheduled_tokens:
                if after.get(request_id) != (tokens, unheld):
                    return True
                continue
            made = self.scheduler.requests[request_id]
            if made.num_computed_tokens - output.num_scheduled_tokens[request_id] != tokens:
                return True
            if any(block.ref_cnt > 1 for block in unheld):
                return True
        return False

    def _take(self, output: Any, result: ModelRunnerOutput) -> None:
        for client in self.scheduler.update_from_output(output, result).values():
            for one in client.outputs:
                self.out[one.request_id] += one.new_token_ids
                if one.finish_reason is not None:
                    self.ends[one.request_id] = one.finish_reason

    def _run(self, output: Any) -> ModelRunnerOutput:
        """The fake model: a token for every row that reaches the end of what is known."""
        ids = list(output.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for i in ids:
            live = self.scheduler.requests[i]
            # computed tokens include this step's by now; placeholders (async) include this step's token
            position = live.num_computed_tokens
            known = live.num_tokens + max(live.num_output_placeholders - (1 if self.is_async else 0), 0)
            if position < known:
                sampled.append([])
                continue
            number = position - live.num_prompt_tokens
            sampled.append([EOS if number + 1 == self.true_output[i] else number])
        return ModelRunnerOutput(
            req_ids=ids, req_id_to_index={i: n for n, i in enumerate(ids)}, sampled_token_ids=sampled
        )

    def run(self, limit: int = 20_000) -> None:
        """Until nothing is left."""
        for _ in range(limit):
            if not self.scheduler.has_requests() and not self.in_flight:
                return
            self.step()
        raise AssertionError(f"not done after {limit} steps: {self.scheduler.get_request_counts()} running and waiting")

    def check_outputs(self, *, but: Sequence[str] = ()) -> None:
        """Every request got exactly its tokens, in order."""
        for i, wanted in self.true_output.items():
            if i not in but:
                expected = [*range(wanted - 1), EOS]
                assert self.out[i] == expected, (i, wanted, self.out[i])

    def check_blocks(self, options: Options) -> None:
        """No KV block leaks once everything is done."""
        assert self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == options.num_blocks
        assert not self.scheduler.requests
        assert not self.scheduler.running
        assert self.scheduler.get_request_counts() == (0, 0)
