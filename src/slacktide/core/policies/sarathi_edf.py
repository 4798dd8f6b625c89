"""Sarathi-EDF: Sarathi-Serve's batches, prompts by the deadline of their first token.

As `sarathi`, but prompts are served earliest deadline first (arrival + TTFT target), half done and waiting ones alike,
so a new urgent prompt overtakes a started one. The chunk is fixed, and late requests are never dropped: beyond
saturation old, hopeless prompts hold up those that could still make it. Source: baseline of QoServe/Niyama
(arXiv 2503.22562, section 4). Ignores TBT targets, and requests without a TTFT target go by their end-to-end one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from slacktide.core.policies._shared import pack_decodes_first, require_at_least, require_share
from slacktide.core.policy import register
from slacktide.core.types import Plan, StepView


@register("sarathi-edf")
@dataclass(frozen=True)
class SarathiEdf:
    """Decodes first, then chunks by deadline."""

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
        live = view.live
        target = np.where(np.isinf(live.slo_ttft), live.slo_e2e, live.slo_ttft)
        return pack_decodes_first(view, live.arrival_time + target, self.chunk_size, self.max_num_seqs, self.watermark)
