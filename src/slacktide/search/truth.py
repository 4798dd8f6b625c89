"""How far a simulated figure can be trusted: what its profile rests on, steps beyond what was measured, saturation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from slacktide.core.spec import PolicySpec
from slacktide.core.types import FloatArray
from slacktide.metrics.log import RunLog
from slacktide.profiling.profiles import Profile, default_belief
from slacktide.profiling.region import decode_contexts
from slacktide.sim.engine import EngineConfig, simulate
from slacktide.workload.requests import Workload

NEAR_SATURATION = 0.5
"""Share of the arrival time during which requests wait: beyond it the engine is at its limit for most of the run, and
its queue, which grows with the step time's error over the time left idle, can be off by any factor."""


def profile_facts(profile: Profile) -> dict[str, Any]:
    """What every record says of its profile."""
    return {
        "profile": profile.name,
        "profile_label": profile.label,
        "profile_errors": profile.errors or None,
        "profile_validation": profile.validation or None,
    }


def steps_outside(profile: Profile, log: RunLog) -> float | None:
    """Share of a simulated run's steps beyond what the profile was measured on; None where nobody can tell."""
    if profile.region is None or not log.num_steps or log.token_step is None:
        return None
    contexts = decode_contexts(log.num_steps, log.token_step.astype(np.int64), log.token_offsets, log.num_prompt_tokens)
    columns: dict[str, FloatArray] = {
        "num_tokens": log.num_tokens.astype(np.float64),
        "num_prefills": log.num_prefills.astype(np.float64),
        "prefill_tokens": log.num_prefill_tokens.astype(np.float64),
        "num_decodes": log.num_decodes.astype(np.float64),
        "decode_context": contexts,
    }
    return float(profile.region.outside(columns).mean())


def waiting_share(log: RunLog) -> float | None:
    """Share of the time between first and last arrival during which requests were left waiting after a step had been
    scheduled; None without steps or without a stretch of time."""
    if not log.num_steps or log.n < 2:
        return None
    first, last = float(log.arrival_time.min()), float(log.arrival_time.max())
    inside = (log.start >= first) & (log.start < last)
    if last <= first or not inside.any():
        return None
    return float(log.duration[inside & (log.num_waiting > 0)].sum() / (last - first))


def caveats(profile: Profile, log: RunLog, *, is_open: bool) -> tuple[dict[str, float | None], list[str]]:
    """(figures for the summary, notes for the reader). `is_open`: requests come by themselves, at a rate."""
    outside, waiting = steps_outside(profile, log), waiting_share(log) if is_open else None
    notes = outside_notes(outside)
    if waiting is not None and waiting > NEAR_SATURATION:
        notes.append(
            f"near saturation: requests waited during {100 * min(waiting, 1.0):.0f} % of the run; there a small error "
            "in step times becomes a large one in latency"
        )
    return {"steps_outside": outside, "waiting_time_share": waiting}, notes


def outside_notes(share: float | None, label: str = "") -> list[str]:
    """What to tell the reader of a share of steps beyond the measurements; nothing where it is 0 or unknown."""
    if not share:
        return []
    whose = f"{label}: " if label else ""
    return [
        f"{whose}{100 * share:.1f} % of the steps lie beyond what the profile was measured on: their times are guesses"
    ]


def twin(workload: Workload, profile: Profile, spec: PolicySpec, engine: dict[str, Any] | None = None) -> RunLog:
    """The run that a real server with this profile is predicted to make of the workload, as its clients see it.

    `engine`: settings that differ from the profile's. Requests reach the engine after `profile.frontend` seconds;
    latencies count from when they were sent.
    """
    from slacktide.search.scenario import build_policy

    given = {name: value for name, value in (engine or {}).items() if name in EngineConfig.__dataclass_fields__}
    config = EngineConfig(
        **{
            "max_num_batched_tokens": profile.max_num_batched_tokens,
            "max_num_seqs": profile.max_num_seqs,
            "num_blocks": profile.num_blocks,
            "block_size": profile.block_size,
            "enable_prefix_caching": profile.enable_prefix_caching is not False,  # vLLM's default is on
            "pipeline_depth": profile.pipeline_depth,
        }
        | given
    )
    policy = build_policy(spec, {"max_num_batched_tokens": config.max_num_batched_tokens} | (engine or {}))
    belief = default_belief(profile)
    log = simulate(at_the_engine(workload, profile), policy, profile.latency, config, belief=belief).log
    return as_clients_see(log, workload, profile)


def at_the_engine(workload: Workload, profile: Profile) -> Workload:
    """The workload as the engine gets it, `profile.frontend` seconds after it was sent (a closed loop: at once)."""
    if not profile.frontend or workload.closed is not None:
        return workload
    return workload.with_arrivals(workload.arrival_time + profile.frontend)


def as_clients_see(log: RunLog, workload: Workload, profile: Profile) -> RunLog:
    """The log of such a run with arrivals at the moment of sending."""
    if not profile.frontend or workload.closed is not None:
        return log
    if log.n != len(workload):  # a run that was stopped knows only those who came
        return replace(log, arrival_time=np.maximum(log.arrival_time - profile.frontend, 0.0))
    return replace(log, arrival_time=workload.arrival_time)
