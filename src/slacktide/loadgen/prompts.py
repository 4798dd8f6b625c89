"""Prompts of given lengths: random token ids, so that the server computes exactly as many tokens as the trace says.

Requests whose trace has prefix-block hashes get equal ids for equal hashes, so that a prefix cache hits where it did
in the trace. The same seed and workload give the same prompts.
"""

from __future__ import annotations

import numpy as np

from slacktide.core.types import IntArray
from slacktide.errors import InputError
from slacktide.workload.requests import Workload

LOWEST_ID = 1000
"""Tokenizers keep their special tokens below; a smaller vocabulary is used from its middle on."""

VOCABULARY = 30_000
"""Default vocabulary: nearly every model has at least 32,000 tokens, and special ones may stand at the very end."""


class Prompts:
    """Makes the prompt of each request. Raises InputError for a vocabulary below 4 tokens."""

    def __init__(self, workload: Workload, seed: int, vocabulary: int = VOCABULARY) -> None:
        if vocabulary < 4:
            raise InputError(f"--vocab-size {vocabulary}: expected 4 or more")
        self._workload, self._seed = workload, seed
        self._low, self._high = min(LOWEST_ID, vocabulary // 2), vocabulary

    def token_ids(self, row: int) -> list[int]:
        """Ids of request `row`, as many as its num_prompt_tokens."""
        length = int(self._workload.num_prompt_tokens[row])
        shared = self._shared(row)
        own = self._draw((1, row), max(length - len(shared), 0))
        ids: list[int] = np.concatenate([shared, own])[:length].tolist()
        return ids

    def warmup(self, number: int, row: int) -> list[int]:
        """Ids of a warm-up request as long as request `row`; they share no prefix with any other."""
        ids: list[int] = self._draw((2, number), int(self._workload.num_prompt_tokens[row])).tolist()
        return ids

    def _shared(self, row: int) -> IntArray:
        """Ids of the prefix blocks of a request; a hash's block is the same wherever it occurs."""
        blocks = self._workload.hash_ids
        if blocks is None:
            return np.empty(0, dtype=np.int64)
        values, offsets = blocks
        size = self._workload.hash_block_size
        found = [self._draw((0, int(h) & (2**63 - 1)), size) for h in values[offsets[row] : offsets[row + 1]]]
        return np.concatenate(found) if found else np.empty(0, dtype=np.int64)

    def _draw(self, key: tuple[int, int], length: int) -> IntArray:
        """Ids by key: (0, hash), (1, request) or (2, warm-up)."""
        sequence = np.random.SeedSequence(self._seed, spawn_key=key)
        return np.random.Generator(np.random.PCG64(sequence)).integers(self._low, self._high, length)


def as_text(token_ids: list[int]) -> str:
    """A text of about as many tokens, for chat: most tokenizers make one token of a number below 1,000."""
    return " ".join(str(i % 1000) for i in token_ids)
