"""Sarathi-Serve: every decode first, then prompt chunks in arrival order under one small token budget.

A step holds at most `chunk_size` tokens, so no prompt delays the decodes beside it for long: first every decode, then
the prompts that are half done, then new ones, first come first served, until one does not fit. When KV blocks run out
the newest request is preempted and computed again. Source: Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM
Inference with Sarathi-Serve", OSDI 2024, section 4, and its code (scheduler `sarathi`). Ignores SLOs, priorities and
the code's optional chunk schedule; a step that preempted admits nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from slacktide.core.policies._shared import admission_key, pack_decodes_first, require_at_least, require_share
from slacktide.core.policy import register
from slacktide.core.types import Plan, StepView


@register("sarathi")
@dataclass(frozen=True)
class Sarathi:
    """Decodes first, then chunks, first come first served."""

    chunk_size: int = 512
    """Most tokens of a step, decodes included: 512 for strict TBT targets, 2048 for relaxed ones (OSDI 2024)."""
    max_num_seqs: int | None = None
    """Most running requests; none takes the engine's (Sarathi-Serve's own default: 128)."""
    watermark: float = 0.01
    """Share of the KV blocks that admission leaves free."""
    decode_runs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Raise ValueError naming the parameter that is out of its range."""
        require_at_least(self, 1, "chunk_size", "max_num_seqs")
        require_share(self, "watermark")

    def plan(self, view: StepView) -> Plan:
        """One step."""
        return pack_decodes_first(view, admission_key(view), self.chunk_size, self.max_num_seqs, self.watermark)
