"""KV capacity and engine defaults of a GPU, as vLLM finds them. Bytes."""

from __future__ import annotations

from dataclasses import dataclass

from slacktide.errors import InputError
from slacktide.profiling.kernel_tables import Gpu, Model

VISIBLE_MEMORY = 0.985
"""Share of the nominal GiB that a process sees: 23.64 of 24 GiB on an RTX 4090; 79.2 of 80 (0.99) on an H100."""
FIXED_ALLOWANCE = 2**30
"""Context, libraries' workspaces, CUDA graphs, per GPU. With the terms below it predicts 41,068 KV tokens for
Llama-3.1-8B on an RTX 4090 (0.9, 2048 tokens, 256 sequences), where a real vLLM 0.19 run had 41,408."""
BYTES_PER_LOGIT = 10
"""Peak of the sampler per logit: bf16 logits, and float32 logits and probabilities."""
LARGE_MEMORY, HUGE_MEMORY = 70 * 2**30, 160 * 2**30
"""vLLM 0.32's thresholds for its defaults of max_num_batched_tokens and max_num_seqs (server)."""


def engine_defaults(gpu: Gpu) -> tuple[int, int]:
    """(max_num_batched_tokens, max_num_seqs) that `vllm serve` 0.32 chooses on this GPU."""
    if gpu.memory * VISIBLE_MEMORY >= HUGE_MEMORY:
        return 16384, 1024
    if gpu.memory * VISIBLE_MEMORY >= LARGE_MEMORY and not gpu.name.startswith("A100"):
        return 8192, 1024
    return 2048, 256


@dataclass(frozen=True)
class KvCapacity:
    """What is left for the KV cache on one GPU, and why."""

    memory: float
    utilization: float
    weights: float
    allowance: float
    kv_bytes_per_token: float
    """One GPU's share."""

    @property
    def bytes_for_kv(self) -> float:
        """Bytes left on one GPU; negative when the model does not fit."""
        return self.memory * self.utilization - self.weights - self.allowance

    def num_gpu_blocks(self, block_size: int) -> int:
        """Whole blocks that fit (vLLM's num_gpu_blocks)."""
        return max(int(self.bytes_for_kv // (self.kv_bytes_per_token * block_size)), 0)

    def explain(self) -> str:
        """The sum in GiB."""
        gib = 2**30
        return (
            f"{self.utilization:g} of {self.memory / gib:.1f} GiB - weights {self.weights / gib:.1f} - activations and "
            f"workspaces {self.allowance / gib:.1f} = {self.bytes_for_kv / gib:.1f} GiB a GPU for KV"
        )


def kv_capacity(
    gpu: Gpu,
    model: Model,
    tensor_parallel: int,
    *,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    gpu_memory_utilization: float,
) -> KvCapacity:
    """utilization * visible memory - weights - allowance, on each of `tensor_parallel` GPUs.

    Allowance = FIXED_ALLOWANCE + the larger of a layer's activations for max_num_batched_tokens and the logits of
    max_num_seqs (they are not alive together). Raises InputError for settings that make no sense.
    """
    if not 0 < gpu_memory_utilization <= 1:
        raise InputError(f"gpu_memory_utilization {gpu_memory_utilization}: expected more than 0, at most 1")
    if max_num_batched_tokens < 1 or max_num_seqs < 1:
        raise InputError(
            f"max_num_batched_tokens {max_num_batched_tokens}, max_num_seqs {max_num_seqs}: expected at least 1"
        )
    heads = (model.heads + 2 * model.kv_heads) * model.head_dim
    widths = (3 * model.intermediate + heads) / tensor_parallel + 4 * model.hidden
    activations = max_num_batched_tokens * widths * 2
    logits = max_num_seqs * model.vocab * BYTES_PER_LOGIT
    return KvCapacity(
        memory=gpu.memory * VISIBLE_MEMORY,
        utilization=gpu_memory_utilization,
        weights=model.weight_bytes / tensor_parallel,
        allowance=FIXED_ALLOWANCE + max(activations, logits),
        kv_bytes_per_token=model.kv_bytes_per_token / tensor_parallel,
    )
