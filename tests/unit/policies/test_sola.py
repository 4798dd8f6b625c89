"""SOLA where only a stream that cannot come back stands against prompts."""

from __future__ import annotations

import math

from slacktide.core.latency import AffineModel
from slacktide.core.live import (
    ADMISSION_ORDER,
    FIRST_TOKEN,
    LAST_TOKEN,
    NUM_BLOCKS,
    NUM_CACHED,
    NUM_CACHED_FREE,
    NUM_COMPUTED,
    NUM_OUTPUT,
    STATUS,
    LiveTable,
)
from slacktide.core.policies.sola import Sola
from slacktide.core.types import PREEMPTED, RUNNING, SLO, Limits, Request, StepView

MODEL = AffineModel(alpha_p=0.01, beta_p=0.0003, alpha_d=0.008, beta_d=0.0001, kappa=0.0001)


def test_a_half_done_prompt_goes_on_while_a_preempted_stream_lacks_a_block():
    """The stream's 27 blocks are cached and free; it needs 28, and 27 are free in all."""
    table = LiveTable()
    table.append(Request(0, 0.0, 27, 60, SLO(0.5, 0.1)))
    table.append(Request(1, 0.1, 42, 60, SLO(math.inf, 0.1)))
    stream = {STATUS: PREEMPTED, NUM_OUTPUT: 28, NUM_CACHED: 54, NUM_CACHED_FREE: 27}
    prompt = {STATUS: RUNNING, NUM_COMPUTED: 35, NUM_BLOCKS: 18, ADMISSION_ORDER: 0}
    for row, values in enumerate((stream, prompt)):
        for field, value in values.items():
            table.ints[field, row] = value
    table.floats[FIRST_TOKEN, 0], table.floats[LAST_TOKEN, 0] = 0.3, 1.0
    plan = Sola().plan(StepView(1.05, table.live, Limits(3, 2, 2, 27, 45), MODEL))
    assert plan.rows.tolist() == [1]
    assert 1 <= plan.num_scheduled_tokens[0] <= 3
