"""KV-block arithmetic and the conservation law. Everything in tokens and blocks."""

from __future__ import annotations

from typing import overload

import numpy as np

from slacktide.core.types import IntArray


@overload
def blocks_for(num_tokens: int, block_size: int) -> int: ...
@overload
def blocks_for(num_tokens: IntArray, block_size: int) -> IntArray: ...
def blocks_for(num_tokens: int | IntArray, block_size: int) -> int | IntArray:
    """Blocks that hold `num_tokens` tokens: the ceiling of num_tokens / block_size."""
    return -(-num_tokens // block_size)


def usable_blocks(num_gpu_blocks: int) -> int:
    """Blocks that requests can use: vLLM keeps one (the null block) for itself."""
    return max(num_gpu_blocks - 1, 0)


def lifetime_blocks(num_prompt_tokens: IntArray, num_output_tokens: IntArray, block_size: int) -> IntArray:
    """Most blocks that requests ever hold: the last output token is never computed, so it needs no slot."""
    computed: IntArray = np.maximum(num_prompt_tokens + num_output_tokens - 1, 1)
    return blocks_for(computed, block_size)


def check_conservation(num_free_blocks: int, held: IntArray, num_blocks: int) -> None:
    """Without prefix sharing, free + held = total. Raises AssertionError that tells the three numbers."""
    total_held = int(np.sum(held))
    assert 0 <= num_free_blocks <= num_blocks, f"{num_free_blocks} free of {num_blocks} KV blocks"
    assert num_free_blocks + total_held == num_blocks, (
        f"KV blocks leak: {num_free_blocks} free + {total_held} held != {num_blocks}"
    )
