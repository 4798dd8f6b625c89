"""vLLM's v0 scheduler without chunked prefill: prompts first, and never beside decodes.

If the head of the queue fits, the step holds only whole prompts, first come first served, while their sum fits the
token budget; otherwise every running request decodes, and when KV blocks run out the latest admitted is preempted and
computed again. Source: Kwon et al., SOSP 2023, and vllm/core/scheduler.py of vLLM 0.6 (default mode). Ignores SLOs,
priorities and swapping (v0 swaps only beam groups). v0 refuses a prompt longer than the budget; here it runs alone,
cut over several prompt steps, so that all policies serve the same requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from slacktide.core.pack import pack
from slacktide.core.policies._shared import (
    by_admission,
    require_at_least,
    require_share,
    smaller,
    uncached_tokens,
    watermark_blocks,
    with_seats,
)
from slacktide.core.policy import register
from slacktide.core.types import RUNNING, BoolArray, IntArray, Plan, StepView


@register("vllm-v0")
@dataclass(frozen=True)
class VllmV0:
    """Parameters are vLLM's own flags; none leaves the engine's value."""

    max_num_batched_tokens: int | None = None
    """Most prompt tokens of a step; none takes the engine's."""
    max_num_seqs: int | None = None
    """Most running requests; none takes the engine's (v0's own default: 256)."""
    watermark: float | None = 0.01
    """Share of the KV blocks that admission leaves free (v0's constant); none takes the engine's."""
    scheduler_delay_factor: float = 0.0
    """Hold prompts back until the oldest has waited this many times the last prompt step's time; 0 is off."""
    _clock: dict[str, float] = field(
        default_factory=lambda: {"last_call": 0.0, "prompt_time": 0.0, "was_prompt": 0.0}, init=False, repr=False
    )

    def __post_init__(self) -> None:
        """Raise ValueError naming the parameter that is out of its range."""
        require_at_least(self, 1, "max_num_batched_tokens", "max_num_seqs")
        require_at_least(self, 0, "scheduler_delay_factor")
        require_share(self, "watermark")

    @property
    def decode_runs(self) -> bool:
        """The delay measures steps, so it must see each one."""
        return self.scheduler_delay_factor == 0

    def plan(self, view: StepView) -> Plan:
        """One step: prompts, or else decodes."""
        view = with_seats(view, self.max_num_seqs)
        decode, running = view.live.is_decode, view.live.status == RUNNING
        delayed = self.scheduler_delay_factor > 0 and not self._passed_delay(view, running)
        half_done = by_admission(view, np.flatnonzero(running & ~decode))
        waiting = np.flatnonzero(~running)
        if half_done.size or (waiting.size and not delayed):
            plan = self._prompt_step(view, half_done, waiting, admit=not delayed)
            if plan.rows.size:
                self._clock["was_prompt"] = 1.0
                return plan
        return pack(view, chunk_cap=decode.astype(np.int64), admit=False)

    def _prompt_step(self, view: StepView, half_done: IntArray, waiting: IntArray, admit: bool) -> Plan:
        budget = smaller(view.limits.max_num_batched_tokens, self.max_num_batched_tokens)
        cap = None
        if not half_done.size and int(uncached_tokens(view)[waiting[0]]) > budget:
            cap = np.full(view.live.index.size, budget, dtype=np.int64)  # the head can never run whole: cut it
        return pack(
            view,
            np.concatenate((half_done, waiting)),
            token_budget=budget,
            chunk_cap=cap,
            chunked_prefill=False,
            admit=admit,
            watermark_blocks=watermark_blocks(view.limits, self.watermark),
            list_rules=True,
        )

    def _passed_delay(self, view: StepView, running: BoolArray) -> bool:
        """v0's rule: the oldest waiting request has waited delay_factor x the last prompt step, or nothing runs."""
        clock = self._clock
        if clock["was_prompt"]:
            clock["prompt_time"] = view.now - clock["last_call"]
        clock["last_call"], clock["was_prompt"] = view.now, 0.0
        waiting = view.live.arrival_time[~running]
        if not waiting.size or not running.any():
            return True
        return float(view.now - waiting[0]) > self.scheduler_delay_factor * clock["prompt_time"]
