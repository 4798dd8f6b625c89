"""What no policy can pass: an upper bound of goodput, and the rate that a machine could sustain for ever.

Both price work by `step_prices`: whoever schedules, it takes at least that long. Derivation: docs/background/bounds.md.

- `bound`: in every stretch of time, the work that arrived and falls due in it costs no more than the stretch; so many
  requests must miss that the rest fits, the costliest first at best. Misses of stretches that share no request add up.
  The bound is a rate from which on more requests must miss than may, at every rate. It knows all arrivals and lengths,
  and holds for the very requests that a policy is tried on, bursts included.
- `sustained`: the same with the requests repeated for ever: n / (cost of the requests that must be met). A short run
  can pass it, for it may end with work left over; no policy can go on above it.

Decodes of requests in time are limited by how many such requests can be open at once (Little's law, exactly, on the
trace): at low rates the weights of the model are read for few of them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from slacktide.core.kernels import compiled
from slacktide.core.types import FloatArray, IntArray
from slacktide.errors import InputError
from slacktide.metrics.slo import MODES
from slacktide.search.demand import demand_of, most_open, most_open_for_ever
from slacktide.search.evaluate import NEEDS_SLO
from slacktide.search.scenario import Scenario, Setup, prepare
from slacktide.search.step_prices import Domain, Prices, StepPoints, step_points
from slacktide.search.truth import profile_facts
from slacktide.workload.arrivals import parse_arrival
from slacktide.workload.load import load_trace
from slacktide.workload.requests import MAX_RATE, Workload

RESOLUTION = 0.005
"""Relative width at which rates are told apart: a quarter of a goodput search's."""
EMPHASES = (1.0, 4.0, 30.0, 0.25)
"""Weights of prefill against decode work, for one set of prices each: a burst of prompts is bound by other step types
than the mean load. Any prices are valid; more of them only tighten."""
DURATIONS = 48
"""Lengths of the stretches tried, from the tightest first-token target to the longest request."""
STARTS, PAIRS = 600, 1_000_000
"""Most arrivals at which a stretch may begin, and most of them times all requests (seconds of work for a long trace);
evenly spread ones then."""
ROUNDS = 6
"""Most refinements of the limit on open requests."""
SLACK = 1e-6
"""Share by which a stretch must be too short: covers rounding, and the tolerance of the judge (1e-9 s)."""


@compiled
def _least_misses(
    first: IntArray, durations: FloatArray, begin: FloatArray, prefill: FloatArray, per_decode: FloatArray, e: float,
    decodes: FloatArray, context: FloatArray, ttft: FloatArray, tbt: FloatArray, finish: FloatArray, enough: int,
) -> int:  # fmt: skip
    """How many requests must miss, by stretches (begin of request first[i], durations[j]) of disjoint requests.

    A stretch looks at the requests first[i] .. last, where `last` is the last with something due in it: as many of them
    miss as must be left out, costliest first, until the rest fits. Stretches that share no request add up, also where
    they overlap in time. Stops at `enough`.
    """
    n = begin.size
    misses = np.zeros(n + 1, dtype=np.int64)  # among the requests before an index
    due, at = np.empty(n), 0
    for i in range(first.size):
        start = first[i]
        while at < start:
            at += 1
            misses[at] = max(misses[at], misses[at - 1])
        for j in range(durations.size):
            total, count, last = 0.0, 0, start
            for x in range(start, n):
                left = durations[j] - (begin[x] - begin[start])
                if left < 0:
                    break
                if left < min(ttft[x], finish[x]):
                    continue
                k = 0.0
                if left >= finish[x]:
                    k = decodes[x]
                elif tbt[x] > 0:
                    k = min(decodes[x], np.floor((left - ttft[x]) / tbt[x]))
                due[count] = prefill[x] + k * per_decode[x] + e * k * (context[x] + 0.5 * (k - 1))
                total += due[count]
                count += 1
                last = x
            limit = durations[j] * (1 + SLACK) + SLACK
            if total <= limit:
                continue
            costs = np.sort(due[:count])
            dropped = 0
            while total > limit and dropped < count:
                dropped += 1
                total -= costs[count - dropped]
            misses[last + 1] = max(misses[last + 1], misses[start] + dropped)
            if misses[last + 1] >= enough:
                return int(misses[last + 1])
    return int(misses.max())


class Bound:
    """The bound of one workload on one engine."""

    def __init__(self, workload: Workload, setup: Setup, mode: str, target: float, late_tolerance: float) -> None:
        if mode not in MODES:
            raise InputError(f"SLO mode {mode!r}: expected one of {', '.join(MODES)}")
        if workload.closed is not None or setup.scenario.max_concurrency is not None:
            raise InputError(
                "a bound needs requests that arrive by themselves, not a closed loop or a concurrency limit"
            )
        if len(workload) < 2 or not workload.span > 0:
            raise InputError(
                f"{workload.name}: {len(workload)} request(s) over {workload.span:g} s have no rate to bound"
            )
        self.demand = demand_of(workload, setup, mode, late_tolerance)
        if not np.isfinite(np.minimum(self.demand.ttft, self.demand.finish)).any():
            raise InputError(f"no request has a first-token or end-to-end target: {NEEDS_SLO}")
        self.own_rate, self.n = workload.rate, len(workload)
        self.misses = self.n * (1 - target)
        self.may_miss = math.floor(self.misses + 1e-9)
        longest = int((workload.num_prompt_tokens + workload.num_output_tokens).max())
        config = setup.config
        domain = Domain(
            config.max_num_batched_tokens,
            config.max_num_seqs,
            longest,
            config.num_blocks * config.block_size,
            self.demand.shared,
        )
        self.points: StepPoints = step_points(setup.profile.latency, domain)
        d = self.demand
        self.longest_prefill = float(d.ttft.max())
        gaps = workload.slo_tbt[workload.num_output_tokens > 1]
        self.longest_decode = float(gaps.max(initial=0.0)) if mode == "gap" and late_tolerance == 0 else math.inf
        tightest, widest = (
            float(d.ttft[np.isfinite(d.ttft)].min(initial=1e9)),
            float(d.finish[np.isfinite(d.finish)].max(initial=0.0)),
        )
        low = min(tightest, widest) if widest > 0 else tightest
        beyond = max(widest - low, 0.0) + workload.span
        self.durations = low + np.concatenate([[0.0], np.geomspace(0.02 * low, max(beyond, 0.04 * low), DURATIONS)])
        self.first = np.unique(
            np.linspace(0, self.n - 1, min(self.n, STARTS, max(PAIRS // self.n, 32))).astype(np.int64)
        )
        self._prices: dict[tuple[float, float], list[Prices]] = {}

    def prices(self, rate: float, *, for_ever: bool = False) -> list[Prices]:
        """Valid prices at `rate` (a factor on the trace's own) and below; `for_ever`: for the trace repeated."""
        seats, context = (most_open_for_ever if for_ever else most_open)(self.demand, rate)
        key = (float(np.append(self.points.seats, np.inf)[np.searchsorted(self.points.seats, seats)]), context)
        if key not in self._prices:
            d = self.demand
            total = (
                float(d.prefill.sum()),
                float(d.decodes.sum()),
                float((d.decodes * (d.context + (d.decodes - 1) / 2)).sum()),
            )
            self._prices[key] = [
                self.points.prices((total[0] * m, total[1], total[2]), most_decodes=seats, most_context=context,
                                   longest_prefill=self.longest_prefill, longest_decode=self.longest_decode)
                for m in EMPHASES
            ]  # fmt: skip
        return self._prices[key]

    def costs(self, at: Prices) -> tuple[FloatArray, FloatArray]:
        """Per request: seconds of its prefill, and of each decode beside its context.

        A decode counts no more than the prefill of one token behind its prompt, which a preempted request might have
        computed instead.
        """
        d = self.demand
        prefill = at.p * d.prefill + at.w * d.attention
        return prefill, np.clip(at.p * (d.context + 1) - at.e * d.context, 0.0, at.d)

    def impossible(self, rate: float, prices: list[Prices]) -> bool:
        """Whether more requests than may must miss at `rate` (a factor on the trace's own)."""
        d = self.demand
        for at in prices:
            prefill, decode = self.costs(at)
            misses = _least_misses(
                self.first, self.durations, d.arrival / rate, prefill, decode, min(at.e, at.p), d.decodes, d.context,
                d.ttft, d.tbt, d.finish, self.may_miss + 1,
            )  # fmt: skip
            if misses > self.may_miss:
                return True
        return False

    def sustained(self, prices: list[Prices]) -> float:
        """Requests/s at which the costs of those that must be met fill all time.

        Over many rounds of the trace the share of misses may be met exactly, so that a part of a request may miss. A
        round's least cost is convex in its misses: no round gains by leaving its own to another.
        """
        d, least = self.demand, math.inf
        for at in prices:
            prefill, decode = self.costs(at)
            cost = prefill + d.decodes * decode + min(at.e, at.p) * d.decodes * (d.context + (d.decodes - 1) / 2)
            cost.sort()
            whole = self.n - math.ceil(self.misses - 1e-9)
            part = self.n - whole - self.misses  # of the cheapest that may miss in part
            kept = cost[:whole].sum() + (part * cost[whole] if part > 0 else 0.0)
            least = min(least, self.n / kept if kept > 0 else math.inf)
        return least


def capacity_bound(
    workload: Workload, setup: Setup, *, mode: str = "deadline", target: float = 0.99, late_tolerance: float = 0.0
) -> dict[str, Any]:
    """`bound` and `sustained` in requests/s (None: the rate does not limit), and what they rest on.

    At a limit on open requests that holds up to some rate, impossibility grows with the rate: from the same arrival on,
    at least the same work falls due within the same time. So: from infinite rates down, find the least impossible rate,
    take the limit there, and repeat; each rate above the last answer was covered by one of the rounds. Raises
    InputError.
    """
    bound = Bound(workload, setup, mode, target, late_tolerance)
    high, answer = math.inf, math.inf
    for _ in range(ROUNDS):
        prices = bound.prices(high)
        found = _least_impossible(bound, prices, min(high, MAX_RATE))
        if found is None or found > answer * (1 - RESOLUTION):
            break
        high = answer = found
        if found == 0:
            break
    sustained, above = math.inf, math.inf
    for _ in range(ROUNDS):
        found = bound.sustained(bound.prices(above / bound.own_rate, for_ever=True)) * (1 + SLACK)
        if not found < sustained * (1 - RESOLUTION):
            break
        sustained = above = found
    at = bound.prices(high or math.inf)[0]
    return {
        "bound": None if math.isinf(answer) else float(answer * bound.own_rate),
        "sustained": None if math.isinf(sustained) else float(sustained),
        "may_miss": bound.may_miss, "num_prompts": bound.n, "target": target, "slo_mode": mode,
        "prices_us": {name: 1e6 * getattr(at, name) for name in ("p", "d", "e")},
    }  # fmt: skip


def _least_impossible(bound: Bound, prices: list[Prices], high: float) -> float | None:
    """The least rate (a factor on the trace's own) found impossible at these prices; None if `high` is not."""
    top = min(high, 2.0**20)  # beyond it all arrive within a millionth of their span
    if not bound.impossible(top, prices):
        return None
    low = top
    while bound.impossible(low / 2, prices):
        low /= 2
        if low < 2.0**-40:  # impossible at any rate: alone, too many requests take longer than their targets
            return 0.0
    low, top = low / 2, low
    while top / low > 1 + RESOLUTION:
        middle = math.sqrt(low * top)
        low, top = (low, middle) if bound.impossible(middle, prices) else (middle, top)
    return top


def bound_of_scenario(scenario: Scenario, *, target: float = 0.99) -> dict[str, Any]:
    """`capacity_bound` of a scenario at any rate, with what it was computed for. Raises InputError.

    Without an arrival process, data without times get Poisson arrivals, as in a goodput search. `bound` is a rate as
    one asks for it (`--rate`): drawn arrivals, a rotated trace, or one without its oversized requests come a little
    slower or faster than that.
    """
    own_times = _has_own_times(scenario)
    if not own_times and (scenario.arrival or "trace") == "trace" and scenario.burstiness is None:
        scenario = replace(scenario, arrival="poisson")
    kind = parse_arrival(scenario.arrival or "trace").kind
    if kind in ("closed", "ramp", "onoff"):
        raise InputError(
            f"a bound needs arrivals that a rate only stretches, not --arrival {kind}: use trace, poisson or gamma"
        )
    setup = prepare(replace(scenario, rate=1.0))
    found = capacity_bound(
        setup.workload, setup, mode=scenario.slo_mode, target=target, late_tolerance=scenario.late_tolerance
    )
    if found["bound"] is not None:
        found["bound"] /= setup.workload.rate
    return {
        **profile_facts(setup.profile), "trace": setup.workload.name,
        "slo": scenario.slo, "seed": scenario.seed, "notes": list(setup.workload.notes),
    } | found  # fmt: skip


def _has_own_times(scenario: Scenario) -> bool:
    """The arrivals are the trace's own."""
    if scenario.burstiness is not None or parse_arrival(scenario.arrival or "trace").kind != "trace":
        return False
    return load_trace(scenario.trace, scenario.num_prompts, scenario.seed).arrival_time is not None


def bound_of_search(scenario: Scenario, engine: dict[str, Any], *, target: float, seeds: int) -> float | None:
    """Mean of `bound` over the seeds of a goodput search, for a policy with these engine settings of its own.

    None where the rate does not limit, or nothing can be proven (no first-token target, times that fall with work).
    """
    own_times, found = _has_own_times(scenario), []
    for s in range(seeds):
        seed = replace(scenario, seed=scenario.seed + s, rotate=s / seeds if own_times else 0.0,
                       engine=scenario.engine | engine)  # fmt: skip
        try:
            found.append(bound_of_scenario(seed, target=target)["bound"])
        except InputError:
            return None
    return None if None in found else sum(found) / len(found)
