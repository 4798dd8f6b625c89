"""When requests arrive: a trace's own times, renewal processes, bursts, ramps, or a closed loop.

Common random numbers: a seed gives one sequence of unit-rate points, whatever the rate and the number of requests; a
rate only maps these points to time, monotonically. So two rates differ in load alone and nothing else, and a search
over rates compares like with like. The streams are separate from those of the lengths (`rng.stream`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from slacktide.core.types import FloatArray
from slacktide.errors import InputError, unknown_name
from slacktide.workload.requests import MAX_SECONDS, ClosedLoop, check_rate
from slacktide.workload.rng import stream
from slacktide.workload.specs import check_keys, parse_number, parse_whole, split_spec

MAX_CONCURRENCY = 1_000_000
"""More users in a closed loop than any engine has seats for: a typing error."""

_PARAMETERS: dict[str, tuple[str, ...]] = {
    "trace": (),
    "poisson": (),
    "gamma": ("burstiness",),
    "onoff": ("on", "off", "ratio"),
    "ramp": ("start", "end", "shape", "burstiness"),
    "closed": ("concurrency", "think"),
}


@dataclass(frozen=True, slots=True)
class Arrival:
    """A parsed arrival process: its kind, and its parameters as numbers (s, requests/s) or words."""

    kind: str
    parameters: dict[str, Any]

    @property
    def needs_rate(self) -> bool:
        """True for processes that are given a mean rate from outside."""
        return self.kind in ("poisson", "gamma", "onoff")

    @property
    def closed(self) -> ClosedLoop | None:
        """The closed loop, when it is one."""
        if self.kind != "closed":
            return None
        return ClosedLoop(self.parameters["concurrency"], self.parameters["think"])


def parse_arrival(text: str) -> Arrival:
    """`poisson`, `gamma:burstiness=0.5`, `onoff:on=10,off=20,ratio=4`, `ramp:start=1,end=10,shape=exponential`,
    `closed:concurrency=32,think=1.0` or `trace`. Raises InputError with what is wrong, and near names."""
    kind, given = split_spec(text, "arrival")
    if kind not in _PARAMETERS:
        raise unknown_name("arrival process", kind, _PARAMETERS)
    check_keys(given, _PARAMETERS[kind], f"arrival {kind}")

    def positive(key: str, default: float | None = None) -> float:
        if key not in given and default is not None:
            return default
        if key not in given:
            raise InputError(f"arrival {kind}: {key}= is missing, as in {_EXAMPLES[kind]}")
        value = parse_number(given[key], f"arrival {kind}: {key}")
        if not 0 < value <= MAX_SECONDS:
            raise InputError(f"arrival {kind}: {key}={given[key]}, expected more than 0 and at most {MAX_SECONDS:g}")
        return value

    parameters: dict[str, Any] = {}
    if kind == "gamma":
        parameters = {"burstiness": positive("burstiness", 1.0)}
    elif kind == "onoff":
        parameters = {"on": positive("on"), "off": positive("off"), "ratio": positive("ratio")}
    elif kind == "ramp":
        shape = given.get("shape", "linear")
        if shape not in ("linear", "exponential"):
            raise unknown_name("ramp shape", shape, ("linear", "exponential"))
        parameters = {"start": positive("start"), "end": positive("end"), "shape": shape}
        parameters["burstiness"] = positive("burstiness", 1.0)
    elif kind == "closed":
        if "concurrency" not in given:
            raise InputError(f"arrival closed: concurrency= is missing, as in {_EXAMPLES[kind]}")
        users = parse_whole(given["concurrency"], "arrival closed: concurrency", 1, MAX_CONCURRENCY)
        think = parse_number(given.get("think", "0"), "arrival closed: think")
        parameters = {"concurrency": users, "think": ClosedLoop(users, think).think_time}
    return Arrival(kind, parameters)


_EXAMPLES = {
    "onoff": "onoff:on=10,off=20,ratio=4",
    "ramp": "ramp:start=1,end=10",
    "closed": "closed:concurrency=32,think=1.0",
}


def arrival_times(arrival: Arrival, n: int, rate: float | None, seed: int) -> FloatArray:
    """Arrival times in seconds, f8[n], increasing, for every kind but `trace`; zeros in a closed loop.

    The first arrival is one gap after 0, as in `vllm bench serve`. Unlike it, the times are not stretched afterwards
    to end at exactly n / rate: that would make the gaps dependent. A rate of infinity puts everything at time 0.
    Raises InputError when a rate is missing, not positive, or given to a process that has its own.
    """
    if arrival.kind == "closed":
        if rate is not None:
            raise InputError("a closed loop has no rate of its own: leave --rate out, or use --arrival poisson")
        return np.zeros(n)
    if arrival.kind == "ramp":
        if rate is not None:
            raise InputError("a ramp has its own rates (start, end): leave --rate out")
        return _ramp(arrival.parameters, n, seed)
    if rate is None:
        raise InputError(f"arrival {arrival.kind} needs a mean rate: give --rate REQUESTS_PER_SECOND")
    check_rate(rate)
    if math.isinf(rate):
        return np.zeros(n)
    if arrival.kind == "onoff":
        times = _onoff(arrival.parameters, n, rate, seed)
    else:
        times = np.cumsum(_unit_gaps(n, arrival.parameters.get("burstiness", 1.0), seed)) / rate
    return _in_range(times, f"rate {rate:g}")


def _unit_gaps(n: int, burstiness: float, seed: int) -> FloatArray:
    """n gaps of mean 1: exponential, or gamma with shape = burstiness and scale = 1/burstiness.

    At rate r that is vLLM's gamma(shape=burstiness, scale=1/(r*burstiness)); 1 is Poisson, less is burstier
    (coefficient of variation 1/sqrt(burstiness)).
    """
    generator = stream(seed, "arrivals")
    if burstiness == 1.0:
        return generator.standard_exponential(n)
    return generator.standard_gamma(burstiness, n) / burstiness


def _ramp(parameters: dict[str, Any], n: int, seed: int) -> FloatArray:
    """Rates from start to end over the requests' numbers, as in vLLM's ramp-up: progress = i / (n - 1)."""
    start, end = parameters["start"], parameters["end"]
    progress = np.arange(n) / max(n - 1, 1)
    rates = start + (end - start) * progress
    if parameters["shape"] == "exponential":
        rates = start * (end / start) ** progress
    return _in_range(np.cumsum(_unit_gaps(n, parameters["burstiness"], seed) / rates), f"start={start:g}")


def _onoff(parameters: dict[str, Any], n: int, rate: float, seed: int) -> FloatArray:
    """Two-state Markov-modulated Poisson process with mean rate `rate`.

    Phases last exponential times of mean `on` and `off` seconds (in seconds, at every rate); the rate while on is
    `ratio` times that while off. The unit-rate points are mapped through the inverse of the cumulative intensity, so
    phases and points are common to all rates. The phase at time 0 is drawn in proportion to the mean durations.
    """
    on, off, ratio = parameters["on"], parameters["off"], parameters["ratio"]
    rate_off = rate * (on + off) / (ratio * on + off)
    points = np.cumsum(_unit_gaps(n, 1.0, seed))
    phases = stream(seed, "phases")
    starts_on = phases.random() < on / (on + off)
    means = (on, off) if starts_on else (off, on)
    rates = (ratio * rate_off, rate_off) if starts_on else (rate_off, ratio * rate_off)
    times, load = [np.zeros(1)], [np.zeros(1)]
    while load[-1][-1] < points[-1]:
        if sum(map(len, times)) > 64 * _PHASE_CHUNK + 64 * n:
            raise InputError(
                f"onoff: phases of {on:g} and {off:g} s are too short for {rate:g} requests/s; use poisson"
            )
        durations = phases.standard_exponential(_PHASE_CHUNK) * np.tile(means, _PHASE_CHUNK // 2)
        times.append(times[-1][-1] + np.cumsum(durations))
        load.append(load[-1][-1] + np.cumsum(durations * np.tile(rates, _PHASE_CHUNK // 2)))
    return np.interp(points, np.concatenate(load), np.concatenate(times))


_PHASE_CHUNK = 1024
"""Phases drawn at a time: even, so that every chunk starts with the same state; fixed, so that all rates share them."""


def _in_range(times: FloatArray, what: str) -> FloatArray:
    if not times[-1] <= MAX_SECONDS:
        raise InputError(f"{what} requests/s: the last of {len(times)} arrivals would be after {MAX_SECONDS:g} s")
    return times
