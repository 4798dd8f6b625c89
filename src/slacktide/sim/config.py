"""Engine settings of a simulation, by vLLM's names, and what they cannot hold."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slacktide.core.kv import lifetime_blocks
from slacktide.core.types import IntArray
from slacktide.errors import InputError
from slacktide.workload.requests import Workload

MAX_NUM_BLOCKS = 50_000_000
"""More KV blocks than any machine holds: 8 GPUs of 288 GB, at 1 token a block and 70 kB a token, have 33 million."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Engine settings, by vLLM's names. Raises InputError for values that no engine starts with.

    `num_blocks` counts usable KV blocks (vLLM's num_gpu_blocks - 1). `pipeline_depth` 2 is vLLM's async scheduling:
    a step is decided while the one before it runs. `watermark`: share of the blocks that admission leaves free.
    """

    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    num_blocks: int = 8192
    block_size: int = 16
    watermark: float = 0.0
    max_model_len: int = 2**31 - 1
    enable_prefix_caching: bool = False
    pipeline_depth: int = 1

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs", "num_blocks", "block_size", "max_model_len"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}: expected at least 1")
        if self.num_blocks > MAX_NUM_BLOCKS:
            raise InputError(f"num_blocks={self.num_blocks}: expected at most {MAX_NUM_BLOCKS:,} KV blocks")
        if not 0 <= self.watermark < 1:
            raise InputError(f"watermark={self.watermark}: expected a share from 0 to below 1")
        if self.pipeline_depth not in (1, 2):
            raise InputError(f"pipeline_depth={self.pipeline_depth}: expected 1 (synchronous) or 2 (async scheduling)")


def never_fits(workload: Workload, config: EngineConfig) -> IntArray:
    """Requests that the engine cannot hold even alone: too long for the model, or for all its KV blocks."""
    length = workload.num_prompt_tokens + workload.num_output_tokens
    blocks = lifetime_blocks(workload.num_prompt_tokens, workload.num_output_tokens, config.block_size)
    return np.flatnonzero((blocks > config.num_blocks) | (length > config.max_model_len))
