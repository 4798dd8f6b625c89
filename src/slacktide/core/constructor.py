"""SlidingServe's violation checker and BatchConstructor: which prompts end in this step, and how long it may take."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from slacktide.core.bounded import Step
from slacktide.core.knapsack import choose, choose_paper, paper_values
from slacktide.core.kv import blocks_for
from slacktide.core.types import RUNNING, BoolArray, FloatArray, IntArray


class Batch(NamedTuple):
    """What a constructor chose."""

    rows: IntArray
    """Prompts that end in this step, anchor first."""
    bound: float
    """Seconds within which the step must end for them and for the decodes."""
    value: FloatArray
    """Value of each."""


def can_hold(step: Step, rows: IntArray) -> BoolArray:
    """bool[m]: rows whose whole rest fits the free KV blocks, each taken alone; waiting rows need a seat too."""
    live, limits, found = step.view.live, step.view.limits, step.survey
    running = live.status[rows] == RUNNING
    shared = live.num_cached_tokens[rows] // limits.block_size - live.num_cached_free_blocks[rows]
    mine = np.where(running, live.num_blocks[rows], shared)
    blocks = blocks_for(found.computed[rows] + found.remaining[rows], limits.block_size) - mine
    seats = limits.max_num_seqs - int((live.status == RUNNING).sum())
    fits: BoolArray = (blocks <= limits.num_free_blocks) & (running | (seats > 0))
    return fits


def construct(
    step: Step,
    order: IntArray,
    bound: float,
    full_time: float,
    *,
    least: float,
    rho: float,
    quantum: int,
    max_candidates: int,
    max_anchors: int,
    endangered_only: bool,
) -> tuple[Batch | None, int]:
    """(the best set or None, number of prompts at risk): the sound BatchConstructor.

    `order`: prompts that can still be on time, in service order. `bound`: T_cur. `full_time`: predicted time of the
    full batch. At risk is a prompt whose slack is at least `least` (the shortest step) but below `full_time`. As an
    anchor it gives the step min(its slack, bound). `endangered_only` counts just the prompts that would miss if they
    waited a step; otherwise every prompt that ends counts.
    """
    found = step.survey
    slack = found.slack[order]
    risky = (slack >= least) & (slack < full_time)
    at_risk = int(np.count_nonzero(risky))
    if not at_risk:
        return None, 0
    rows = order[:max_candidates]
    if at_risk > int(np.count_nonzero(risky[:max_candidates])):  # those at risk further back come along
        extra = order[max_candidates:][risky[max_candidates:]][:max_anchors]
        rows = np.concatenate((rows, extra))
    rows = rows[(found.slack[rows] >= least) & can_hold(step, rows)]
    slack, remaining = found.slack[rows], found.remaining[rows]
    anchors = np.flatnonzero(slack < full_time)
    if not anchors.size:
        return None, at_risk
    if anchors.size > max_anchors:
        by_slack = anchors[np.argsort(slack[anchors], kind="stable")]
        anchors = by_slack[np.linspace(0, by_slack.size - 1, max_anchors).astype(np.int64)]
    capacity = np.full(rows.size, -1, dtype=np.int64)
    queue = step.load(rows, remaining)
    for a in anchors.tolist():
        capacity[a] = step.within(queue, min(float(slack[a]), bound))
    values = paper_values(slack, remaining)
    counts = None
    if endangered_only:
        counts = (slack < full_time + np.maximum(remaining / rho, least)).astype(np.int64)
    picked = choose(slack, remaining, values, capacity, counts=counts, quantum=quantum)
    if not picked.size:
        return None, at_risk
    # The prediction for the set itself decides: drop the least valuable until it fits. The anchor stays.
    anchor, others = picked[:1], picked[1:]
    others = others[np.argsort(-values[others], kind="stable")]
    limit = min(float(slack[anchor[0]]), bound)
    while True:
        chosen = np.concatenate((anchor, others))
        whole = step.load(rows[chosen], remaining[chosen])
        total = int(remaining[chosen].sum())
        if step.survey.num_decodes + total <= step.limit and step.seconds(whole, total) <= limit:
            return Batch(rows[chosen], limit, values[chosen]), at_risk
        if not others.size:
            return None, at_risk
        others = others[:-1]


def construct_paper(
    step: Step, order: IntArray, full_time: float, *, quantum: int, max_candidates: int, max_anchors: int
) -> tuple[Batch | None, int]:
    """Algorithm 2 as printed, over the first `max_candidates` prompts and at most `max_anchors` anchors (the paper has
    no limits, and may take seconds without): late prompts stay at risk, no partial chunks, TBT not looked at."""
    found = step.survey
    rows = order[:max_candidates]
    slack, remaining = found.slack[rows], found.remaining[rows]
    risky = np.flatnonzero(slack < full_time)
    capacity = np.full(rows.size, -1, dtype=np.int64)
    queue = step.load(rows, remaining)
    for a in risky[:max_anchors].tolist():
        capacity[a] = max(step.within(queue, float(slack[a])), -1)
    picked = choose_paper(slack, remaining, capacity, quantum=quantum)
    if not picked.size:
        return None, int(risky.size)
    return Batch(rows[picked], float(slack[picked[0]]), np.zeros(picked.size)), int(risky.size)
