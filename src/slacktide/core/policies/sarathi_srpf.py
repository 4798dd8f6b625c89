"""Sarathi-SRPF: Sarathi-Serve's batches, prompts by the prefill work they have left.

As `sarathi`, but the prompt with the fewest tokens left to compute comes first, half done and waiting ones alike: the
least mean time to first token, at the price of long prompts, which starve while short ones keep coming. Source:
baseline of QoServe/Niyama (arXiv 2503.22562, section 4). Ignores SLOs and waiting times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from slacktide.core.policies._shared import pack_decodes_first, require_at_least, require_share, uncached_tokens
from slacktide.core.policy import register
from slacktide.core.types import Plan, StepView


@register("sarathi-srpf")
@dataclass(frozen=True)
class SarathiSrpf:
    """Decodes first, then chunks by remaining prefill tokens."""

    chunk_size: int = 256
    """Most tokens of a step, decodes included (QoServe's baselines: 256 for a TBT of 50 ms)."""
    max_num_seqs: int | None = None
    """Most running requests; none takes the engine's."""
    watermark: float = 0.01
    """Share of the KV blocks that admission leaves free."""
    decode_runs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Raise ValueError naming the parameter that is out of its range."""
        require_at_least(self, 1, "chunk_size", "max_num_seqs")
        require_share(self, "watermark")

    def plan(self, view: StepView) -> Plan:
        """One step."""
        return pack_decodes_first(view, uncached_tokens(view), self.chunk_size, self.max_num_seqs, self.watermark)
