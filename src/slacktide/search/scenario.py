"""One run from names to record: trace, profile, SLO and engine settings in; policy, simulator and metrics applied.

All verbs that simulate go through `prepare` and `run_policy`, so that a number means the same in each of them.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from slacktide.core.latency import LatencyModel
from slacktide.core.pack import as_policy
from slacktide.core.policy import Policy
from slacktide.core.spec import PolicySpec, parameters_of
from slacktide.core.types import FloatArray, IntArray
from slacktide.errors import InputError
from slacktide.metrics.log import RunLog
from slacktide.metrics.summary import summarize
from slacktide.profiling.profiles import Profile, default_belief, load_profile
from slacktide.search.truth import as_clients_see, at_the_engine, caveats, profile_facts
from slacktide.sim.engine import EngineConfig, never_fits, simulate
from slacktide.workload.load import load_workload, parse_read_options
from slacktide.workload.requests import Workload

OVERSIZED = ("error", "drop", "reject")
"""What to do with requests that the engine cannot hold even alone."""

# Engine settings that change the profile (its KV pool), not the scheduler.
_PROFILE_SETTINGS = ("gpu_memory_utilization", "num_gpu_blocks_override", "block_size", "max_num_seqs")


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything of a run but its policy. Plain values, so that worker processes can be sent one.

    `engine` holds the settings that were given (names as in `EngineConfig`, plus gpu_memory_utilization,
    num_gpu_blocks_override, long_prefill_token_threshold); the profile has the rest. `oversized`: see OVERSIZED.
    `interference`, `interconnect`: see `load_profile`. `rotate`: start a trace with its own times at this share of
    its span and wrap around, for a second realisation of the same traffic. `read`: see `parse_read_options`.
    """

    trace: str
    profile: str
    slo: str | None = None
    rate: float | None = None
    arrival: str | None = None
    burstiness: float | None = None
    num_prompts: int | None = None
    max_concurrency: int | None = None
    max_tokens: str | None = None
    seed: int = 0
    engine: dict[str, Any] = field(default_factory=dict)
    slo_mode: str = "deadline"
    late_tolerance: float = 0.0
    oversized: str = "error"
    interference: float | None = None
    interconnect: str | None = None
    rotate: float = 0.0
    read: str | None = None


@dataclass(frozen=True, slots=True)
class Setup:
    """A scenario made real for one set of engine settings."""

    scenario: Scenario
    workload: Workload
    profile: Profile
    config: EngineConfig
    belief: LatencyModel


def files_named(text: str) -> list[str]:
    """Files that the name of a trace or profile mentions: it is one, or holds some (`mix:a.csv*2+b.csv`)."""
    return [part for part in dict.fromkeys([text, *re.split(r"[:,=+*?]", text)]) if part and os.path.isfile(part)]  # noqa: PTH113 - never raises


def file_versions(text: str) -> tuple[tuple[str, int, int], ...]:
    """What tells a file that was changed from the one read before, for each that `text` names."""
    stats = ((path, Path(path).stat()) for path in files_named(text))
    return tuple((path, stat.st_mtime_ns, stat.st_size) for path, stat in stats)


@lru_cache(maxsize=16)
def _profile(name: str, settings: tuple[tuple[str, Any], ...], version: tuple[Any, ...]) -> Profile:
    del version  # of the file, where it is one
    return load_profile(name, **dict(settings))


@lru_cache(maxsize=16)
def _belief(name: str, settings: tuple[tuple[str, Any], ...], version: tuple[Any, ...]) -> LatencyModel:
    return default_belief(_profile(name, settings, version))


def arrival_text(scenario: Scenario) -> str:
    """The arrival process in words, with --burstiness read as vllm bench does: gamma arrivals of that shape."""
    text = scenario.arrival
    if scenario.burstiness is not None:
        if text not in (None, "trace", "gamma", "poisson"):
            raise InputError(f"--burstiness goes with gamma arrivals, not with --arrival {text}")
        text = f"gamma:burstiness={scenario.burstiness:g}"
    return text or "trace"


_workloads: dict[tuple[Any, ...], Workload] = {}
_MAX_WORKLOADS = 4  # the policies of a comparison share one; a search alternates between few


def _workload(scenario: Scenario, engine_key: tuple[Any, ...], isolated: Callable[[int], float]) -> Workload:
    """The scenario's workload; `engine_key` tells engines apart on which `isolated` prefill times differ."""
    fields = (getattr(scenario, name) for name in Scenario.__dataclass_fields__ if name != "engine")
    key = (*fields, *engine_key, *file_versions(scenario.trace))
    if key not in _workloads:
        workload = load_workload(
            scenario.trace, rate=scenario.rate, arrival=arrival_text(scenario), num_prompts=scenario.num_prompts,
            seed=scenario.seed, slo=scenario.slo, max_tokens=scenario.max_tokens, isolated_prefill=isolated,
            options=None if scenario.read is None else parse_read_options(scenario.read),
        )  # fmt: skip
        while len(_workloads) >= _MAX_WORKLOADS:
            del _workloads[next(iter(_workloads))]
        _workloads[key] = rotated(workload, scenario.rotate) if scenario.rotate else workload
    return _workloads[key]


def rotated(workload: Workload, share: float) -> Workload:
    """The same requests, starting at `share` of the span: what came before follows at the end, one mean gap later.

    Time 0 is the cut itself, not the first arrival after it: a cut falls into long gaps most often, and dropping that
    gap would shorten bursty traces (a quarter of 2,000 requests of azure-code), so that the rates of two rotations
    differed.
    """
    times, n = workload.arrival_time, len(workload)
    cut = times[0] + share * workload.span
    first = int(np.searchsorted(times, cut))
    if n < 2 or not 0 < first < n:
        return workload
    shifted = times - cut
    shifted[:first] += workload.span + workload.span / (n - 1)
    return workload.with_arrivals(np.maximum(shifted, 0.0))


def isolated_prefill(latency: LatencyModel, max_num_batched_tokens: int) -> Callable[[int], float]:
    """Seconds that a prompt's prefill takes alone on the engine, in chunks of the token budget."""

    @lru_cache(maxsize=65536)
    def seconds(tokens: int) -> float:
        total, done = 0.0, 0
        while done < tokens:
            chunk = min(max_num_batched_tokens, tokens - done)
            total += latency.step_time(np.array([chunk]), np.array([done]), np.array([False]))
            done += chunk
        return total

    return seconds


def isolated_service(latency: LatencyModel, max_num_batched_tokens: int) -> Callable[[IntArray, IntArray], FloatArray]:
    """Seconds that whole requests take alone: their prefill, then one decode step per further token.

    Decode steps are summed by the trapezium rule over the context (step times grow nearly linearly with it).
    """
    prefill = isolated_prefill(latency, max_num_batched_tokens)

    def seconds(prompt: IntArray, output: IntArray) -> FloatArray:
        first = latency.step_times(_decode_shapes(prompt))
        last = latency.step_times(_decode_shapes(prompt + np.maximum(output - 2, 0)))
        decodes = np.maximum(output - 1, 0) * (first + last) / 2
        return np.array([prefill(int(p)) for p in prompt]) + decodes

    return seconds


def _decode_shapes(context: IntArray) -> FloatArray:
    from slacktide.core import shape as s

    shapes = np.zeros((context.size, s.SHAPE_SIZE))
    shapes[:, [s.NUM_TOKENS, s.NUM_SEQUENCES, s.NUM_DECODES]] = 1.0
    shapes[:, s.DECODE_CONTEXT] = shapes[:, s.DECODE_MAX_CONTEXT] = context
    return shapes


def prepare(scenario: Scenario, overrides: dict[str, Any] | None = None) -> Setup:
    """Load what a scenario names. `overrides` are engine settings of one policy. Raises InputError."""
    given = scenario.engine | (overrides or {})
    settings = {name: given[name] for name in _PROFILE_SETTINGS if name in given}
    for name in ("interference", "interconnect"):
        if getattr(scenario, name) is not None:
            settings[name] = getattr(scenario, name)
    key = tuple(sorted(settings.items()))
    version = file_versions(scenario.profile)
    profile = _profile(scenario.profile, key, version)
    config = EngineConfig(
        max_num_batched_tokens=given.get("max_num_batched_tokens", profile.max_num_batched_tokens),
        max_num_seqs=given.get("max_num_seqs", profile.max_num_seqs),
        num_blocks=profile.num_blocks,
        block_size=profile.block_size,
        watermark=given.get("watermark", 0.0),
        max_model_len=given.get("max_model_len", profile.max_model_len or 2**31 - 1),
        # on by default, as in vLLM
        enable_prefix_caching=given.get("enable_prefix_caching", profile.enable_prefix_caching is not False),
        pipeline_depth=given.get("pipeline_depth", profile.pipeline_depth),
    )
    isolated = isolated_prefill(profile.latency, config.max_num_batched_tokens)
    workload = _workload(scenario, (key, version, config.max_num_batched_tokens), isolated)
    workload = _fitting(workload, config, scenario)
    _check_hash_blocks(workload, config)
    return Setup(scenario, workload, profile, config, _belief(scenario.profile, key, version))


def _check_hash_blocks(workload: Workload, config: EngineConfig) -> None:
    """The trace tells of shared prefixes in its own blocks only: the engine's must divide them."""
    size = workload.hash_block_size
    if config.enable_prefix_caching and workload.hash_ids is not None and size % config.block_size:
        raise InputError(
            f"{workload.name}: its hash ids stand for {size} tokens each, which KV blocks of {config.block_size} do not"
            f" divide; use --block-size 16 (or another divisor of {size}), or --no-enable-prefix-caching"
        )


def _fitting(workload: Workload, config: EngineConfig, scenario: Scenario) -> Workload:
    """Deal with requests that can never fit, as the scenario says."""
    if scenario.oversized not in OVERSIZED:
        raise InputError(f"oversized={scenario.oversized!r}: expected one of {', '.join(OVERSIZED)}")
    rows = never_fits(workload, config)
    if not rows.size or scenario.oversized == "reject":
        return workload
    if scenario.oversized == "drop" and rows.size < len(workload):
        keep = np.ones(len(workload), dtype=bool)
        keep[rows] = False
        note = f"{rows.size} of {len(workload)} requests can never fit the engine and were left out"
        return workload.take(keep).with_notes(note)
    first = int(rows[0])
    raise InputError(
        f"{workload.name}: request {first} (in order of arrival) can never fit: "
        f"{workload.num_prompt_tokens[first]} prompt + {workload.num_output_tokens[first]} output tokens, the engine "
        f"holds {min(config.num_blocks * config.block_size, config.max_model_len)} ({rows.size} such requests of "
        f"{len(workload)}); use another profile, more KV blocks (--num-gpu-blocks-override), a longer --max-model-len, "
        "or --oversized drop|reject"
    )


def build_policy(spec: PolicySpec, engine: dict[str, Any]) -> Policy:
    """A fresh policy; engine flags that are parameters of it and not given there are handed on."""
    accepted = {p.name for p in parameters_of(spec.cls)}
    parameters = {n: v for n, v in engine.items() if n in accepted} | spec.parameters
    # The engine's configuration holds these for the run: a policy that checks them again only loses its fast path.
    for name in ("max_num_batched_tokens", "watermark"):
        parameters.pop(name, None)
    return as_policy(replace(spec, parameters=parameters).build())


def run_policy(
    setup: Setup,
    spec: PolicySpec,
    *,
    progress: Callable[[int, float], None] | None = None,
    fast_forward: bool = True,
    stop: Callable[[RunLog], bool] | None = None,
    wrap: Callable[[Policy], Policy] | None = None,
) -> tuple[dict[str, Any], RunLog]:
    """Simulate one policy; returns its record (`summary` and what led to it) and the log.

    `stop`: see `simulate`; a stopped run's record says so (`stopped`). `wrap`: what is simulated in the policy's place,
    for example a recorder around it.
    """
    scenario = setup.scenario
    policy, workload = build_policy(spec, scenario.engine), setup.workload
    result = simulate(
        at_the_engine(workload, setup.profile), policy if wrap is None else wrap(policy), setup.profile.latency,
        setup.config, belief=setup.belief, fast_forward=fast_forward,
        progress=progress, max_concurrency=scenario.max_concurrency, stop=stop,
    )  # fmt: skip
    log = as_clients_see(result.log, workload, setup.profile)
    isolated = isolated_service(setup.profile.latency, setup.config.max_num_batched_tokens)
    summary = summarize(log, mode=scenario.slo_mode, tolerated_late_share=scenario.late_tolerance, isolated=isolated)
    if result.decision_times.size:
        p50, p99 = np.percentile(result.decision_times, (50, 99)) * 1e6
        summary["p50_decision_us"], summary["p99_decision_us"] = float(p50), float(p99)
    is_open = workload.closed is None and math.isfinite(workload.rate) and scenario.max_concurrency is None
    figures, notes = caveats(setup.profile, log, is_open=is_open)
    summary |= figures
    tell = getattr(policy, "learned", None)
    return {
        "policy": spec.name,
        "label": spec.label,
        "oracle": bool(getattr(policy, "oracle", False)),
        "parameters": spec.all_parameters(),
        **profile_facts(setup.profile),
        "seed": scenario.seed,
        "trace": workload.name,
        "num_prompts": len(workload),
        "rate": None if workload.closed is not None or not math.isfinite(workload.rate) else workload.rate,
        "arrival": arrival_text(scenario),
        "slo": scenario.slo,
        "engine": {name: getattr(setup.config, name) for name in EngineConfig.__dataclass_fields__},
        "notes": [*workload.notes, *notes],
        "stopped": result.stopped,
        **({} if tell is None else {"learned": tell()}),
        "summary": summary,
    }, log
