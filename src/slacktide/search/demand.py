"""What the requests of a workload ask of an engine, and by when: all that the bounds look at (`search/bounds.py`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from slacktide.core.types import FloatArray, IntArray
from slacktide.search.scenario import Setup
from slacktide.search.step_prices import has_potential
from slacktide.sim.config import never_fits
from slacktide.workload.requests import Workload


@dataclass(frozen=True, eq=False)
class Demand:
    """What the requests ask for, float64[n] unless said: all that the bound looks at.

    `prefill` tokens and `attention` (units of `step_prices`) that each must compute itself; `decodes`; `context` = its
    prompt; `ttft`, `tbt` (0: all at the end), and `finish`: seconds from its arrival until it has to be done (infinite
    without a target). `shared`: most leading tokens of any prompt that others have as well.
    """

    arrival: FloatArray
    prefill: FloatArray
    attention: FloatArray
    decodes: FloatArray
    context: FloatArray
    ttft: FloatArray
    tbt: FloatArray
    finish: FloatArray
    shared: int = 0


def demand_of(workload: Workload, setup: Setup, mode: str, late_tolerance: float) -> Demand:
    """What an in-time request needs, taken low where a policy may have a choice.

    A prompt's leading blocks that any other request shares may come from the prefix cache: they cost nothing. Requests
    that can never fit, or whose client may leave early, cost nothing either.
    """
    prompt = workload.num_prompt_tokens
    shared = _shared_prefix(workload) if setup.config.enable_prefix_caching else np.zeros(len(prompt), dtype=np.int64)
    latency = setup.profile.latency

    def work(x: IntArray) -> FloatArray:
        tokens = x.astype(np.float64)
        return np.asarray(latency.potential(tokens)) if has_potential(latency) else tokens * tokens / 2

    decodes = np.maximum(workload.num_output_tokens - 1, 0).astype(np.float64)
    later = np.where(decodes > 0, decodes * workload.slo_tbt, 0.0)
    finish = np.minimum(workload.slo_ttft + (later if late_tolerance == 0 else np.inf), workload.slo_e2e)
    free = np.isfinite(workload.abort_time)
    free[never_fits(workload, setup.config)] = True
    counts = np.where(free, 0.0, 1.0)
    pace = workload.slo_tbt if mode != "mean" and late_tolerance == 0 else np.zeros(len(prompt))
    return Demand(
        arrival=workload.arrival_time - workload.arrival_time[0],
        prefill=counts * (prompt - shared), attention=counts * (work(prompt) - work(shared)),
        decodes=counts * decodes, context=prompt.astype(np.float64),
        ttft=np.minimum(workload.slo_ttft, workload.slo_e2e), tbt=np.where(np.isfinite(pace), pace, 0.0), finish=finish,
        shared=int(shared.max()),
    )  # fmt: skip


def _shared_prefix(workload: Workload) -> IntArray:
    """Leading prompt tokens of each request that some other request has as well, in whole hash blocks; always less
    than the prompt, whose last token is never taken from the cache."""
    n, size = len(workload), workload.hash_block_size
    shared = np.zeros(n, dtype=np.int64)
    if workload.hash_ids is None:
        return shared
    ids, starts = workload.hash_ids
    seen: dict[tuple[int, int], int] = {}
    paths: list[list[int]] = []
    count: dict[int, int] = {}
    for i in range(n):
        parent, path = -1, []
        for block in ids[starts[i] : starts[i + 1]].tolist():
            parent = seen.setdefault((parent, block), len(seen))
            path.append(parent)
            count[parent] = count.get(parent, 0) + 1
        paths.append(path)
    for i, path in enumerate(paths):
        shared[i] = size * sum(count[node] > 1 for node in path)
    return np.minimum(shared, workload.num_prompt_tokens - 1)


def most_open(demand: Demand, rate: float) -> tuple[float, float]:
    """(requests, tokens of context) that can be open in time at once when arrivals come at `rate` times their own."""
    begin = demand.arrival / rate
    end = begin + demand.finish
    times = np.concatenate([begin, end])
    order = np.lexsort((np.repeat([0, 1], len(begin)), times))  # who begins as another ends: both open
    size = demand.context + demand.decodes
    seats, context = (np.cumsum(np.concatenate([v, -v])[order]).max() for v in (np.ones(len(begin)), size))
    return float(seats), float(context)


def most_open_for_ever(demand: Demand, rate: float) -> tuple[float, float]:
    """`most_open` where the requests come again and again, one mean gap after the last: more of them overlap."""
    if not np.isfinite(demand.finish).all() or not math.isfinite(rate):
        return math.inf, math.inf
    n = len(demand.arrival)
    begin = demand.arrival / rate
    period = float(begin[-1]) * n / (n - 1)
    rounds = np.floor(demand.finish / period)
    rest = demand.finish - rounds * period
    size = demand.context + demand.decodes
    twice = replace(
        demand, arrival=np.concatenate([begin - period, begin]), finish=np.tile(rest, 2),
        context=np.tile(demand.context, 2), decodes=np.tile(demand.decodes, 2),
    )  # fmt: skip
    seats, context = most_open(twice, 1.0)
    return seats + float(rounds.sum()), context + float((rounds * size).sum())
