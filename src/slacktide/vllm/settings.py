"""Settings of the plug-in: `--additional-config '{"slacktide": {...}}'`, checked with clear messages.

Imports no vLLM. Every field of `Settings` is a key; an unknown key or a bad value raises InputError, which stops the
server at start.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slacktide.core.pack import as_policy
from slacktide.core.policy import Policy
from slacktide.core.spec import PolicySpec, parameters_of, parse_policies
from slacktide.errors import InputError, unknown_name
from slacktide.vllm.targets import Targets, absolute, read_slos
from slacktide.workload.slos import SLOs, SLOSpec

KEY = "slacktide"
MODES = ("active", "shadow", "stock")
"""active: our policy schedules. shadow: vLLM schedules, our policy decides beside it. stock: vLLM alone."""

ENGINE_PARAMETERS = {
    "long_prefill_token_threshold": "long_prefill_token_threshold",
    "long_prefill_token_threshold_adaptive": "long_prefill_token_threshold_adaptive",
    "scheduler_reserve_full_isl": "scheduler_reserve_full_isl",
    "scheduling_policy": "policy",
}
"""Parameters of a policy that are engine flags too -> field of vLLM's SchedulerConfig. Not given, the flag's value
holds: `vllm-v1` is then vLLM as it was started."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a user may set. Raises InputError naming the key."""

    policy: str = "vllm-v1"
    """Policy with its parameters, as on our command line: `sarathi-edf:chunk_size=512`."""
    slo: str = ""
    """Targets of requests that bring none, as on our command line: `ttft:2000,tbt:200`, `chat`, `ttft:5x`, classes."""
    classes: Mapping[str, str] = field(default_factory=dict)
    """Class -> its targets, for requests with `slo_class`; `slo` may name classes, too."""
    mode: str = "active"
    """One of MODES, at start; `control_file` changes it at run time."""
    control_file: str = ""
    """A file whose content, one of MODES, is read twice a second: the switch for a running server."""
    max_decision_ms: float = 100.0
    """A decision that takes longer is broken off, and vLLM schedules that step."""
    max_failures: int = 3
    """So many failed decisions in a row switch the policy off."""
    off_steps: int = 1000
    """For so many steps vLLM then schedules alone."""
    prefix_lookups: int = 64
    """Waiting requests, at most, whose prefix-cache hits are looked up anew in a step."""
    prior: Mapping[str, float] | str = field(default_factory=dict)
    """Step times believed before any was measured: a profile's name or file, or an object with alpha_p, beta_p,
    alpha_d, beta_d in milliseconds (per token)."""
    state_dir: str = ""
    """Where the engine leaves its metrics for the front end; empty: a directory of the temporary one."""
    estimate_dir: str = ""
    """Where the engine publishes the TTFT it predicts, for admission in the front end; empty: `state_dir`."""
    step_log: str = ""
    """Step log (JSON lines, rotating) to write; empty: none."""
    step_log_mb: float = 64.0
    """Size at which the step log is rotated; four old files are kept."""
    shadow_replay_s: float = 60.0
    """Seconds between two replays of the newest requests in shadow mode, which predict attainment; 0: none."""
    capture: str = ""
    """Trace of the requests served (CSV that `--trace` reads; no text, no token ids); empty: none."""

    def __post_init__(self) -> None:
        for name, low in (("max_failures", 1), ("off_steps", 1), ("prefix_lookups", 0)):
            _number(name, getattr(self, name), low, whole=True)
        for name, least in (("max_decision_ms", 1e-3), ("step_log_mb", 1e-3), ("shadow_replay_s", 0.0)):
            _number(name, getattr(self, name), least)
        for name in ("policy", "slo", "mode", "control_file", "state_dir", "estimate_dir", "step_log", "capture"):
            if not isinstance(getattr(self, name), str):
                raise InputError(f"{KEY}.{name}={getattr(self, name)!r}: expected text")
        if self.mode not in MODES:
            raise unknown_name(f"{KEY}.mode", self.mode, MODES)
        if not isinstance(self.classes, Mapping):
            raise InputError(f"{KEY}.classes={self.classes!r}: expected an object")
        if isinstance(self.prior, str):
            return
        if not isinstance(self.prior, Mapping):
            raise InputError(f"{KEY}.prior={self.prior!r}: expected an object, or the name of a profile")
        for name, value in self.prior.items():
            if name not in ("alpha_p", "beta_p", "alpha_d", "beta_d"):
                raise unknown_name(f"{KEY}.prior", str(name), ("alpha_p", "beta_p", "alpha_d", "beta_d"))
            _number(f"prior.{name}", value, 0.0)

    def slos(self) -> SLOs:
        """The targets as they are written. Raises InputError."""
        found = read_slos(self.slo, f"{KEY}.slo") if self.slo.strip() else SLOs()
        by_class = dict(found.by_class)
        for name, text in self.classes.items():
            where = f"{KEY}.classes.{name}"
            if not isinstance(text, str):
                raise InputError(f"{where}={text!r}: expected targets as in 'ttft:500,tbt:50'")
            one = read_slos(text, where)
            if one.default is None or one.by_class:
                raise InputError(f"{where}={text!r}: expected the targets of this class alone, as in 'ttft:500,tbt:50'")
            if name in by_class:
                raise InputError(f"{where}: {KEY}.slo names this class, too: leave one out")
            by_class[str(name)] = one.default
        return SLOs(found.default, by_class)

    def targets(self) -> Targets:
        """The targets of requests. Raises InputError, also for a relative TTFT without anything to multiply."""
        slos = self.slos()
        specs = {"": slos.default or SLOSpec(), **slos.by_class}
        factors = {name: spec.ttft_factor for name, spec in specs.items() if spec.ttft_factor > 0}
        if factors and not self.prior:
            raise InputError(
                f"{KEY}: ttft:{next(iter(factors.values())):g}x is a multiple of the time a prompt takes alone, and no "
                f"step has been measured yet: name a profile (--profile, {KEY}.prior, e.g. h100/llama-3-8b), or give ms"
            )
        by_class = {name: absolute(spec) for name, spec in specs.items() if name}
        targets = Targets(absolute(specs[""]), by_class, factors)
        for name in by_class:  # configured classes keep their codes however many clients invent
            targets.classes.code(name)
        return targets


def _number(name: str, value: Any, low: float, *, whole: bool = False) -> None:
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= sys.float_info.max:
        expected = "a whole number" if whole else "a number"
        raise InputError(f"{KEY}.{name}={value!r}: expected {expected} of at least {low:g}")


def from_additional_config(additional_config: Any) -> Settings:
    """The settings in vLLM's `additional_config`; defaults when there are none. Raises InputError."""
    given = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
    if given is None:
        return Settings()
    if not isinstance(given, Mapping):
        example = f'{{"{KEY}": {{"policy": "sarathi-edf", "slo": "ttft:2000,tbt:200"}}}}'
        raise InputError(f"additional_config.{KEY}: expected an object, found {given!r}; for example {example}")
    known = [f.name for f in dataclasses.fields(Settings)]
    for key in given:
        if key not in known:
            raise unknown_name(f"key {KEY}.", str(key), known)
    return Settings(**given)


def policy_spec(settings: Settings, scheduler_config: Any = None) -> PolicySpec:
    """The policy asked for, with the engine's flags as defaults of the parameters that mean the same.

    Raises InputError for an unknown policy, a bad parameter, more than one policy, an oracle, or a policy whose plans
    vLLM cannot be steered to.
    """
    specs = parse_policies([settings.policy])
    if len(specs) != 1:
        raise InputError(f"{KEY}.policy={settings.policy!r}: expected one policy, found {len(specs)}")
    spec = specs[0]
    if getattr(spec.cls, "oracle", False):
        raise InputError(f"policy {spec.name!r} looks at true output lengths, which no engine knows; choose another")
    if scheduler_config is not None:
        known = {parameter.name for parameter in parameters_of(spec.cls)}
        flags = {
            name: getattr(scheduler_config, flag)
            for name, flag in ENGINE_PARAMETERS.items()
            if name in known and hasattr(scheduler_config, flag)
        }
        spec = dataclasses.replace(spec, parameters=flags | spec.parameters)
    if getattr(spec.build(), "steerable", True) is False:
        raise InputError(
            f"policy {spec.label!r} makes plans that vLLM cannot be steered to (steerable = False): it runs in the "
            "simulator only; choose another"
        )
    return spec


def build_policy(spec: PolicySpec) -> Policy:
    """A fresh instance that plans whole steps."""
    return as_policy(spec.build())


def state_dir(settings: Settings, instance_id: str) -> Path:
    """Where engine and front end of one server meet: both know the settings and vLLM's instance id.

    With several API servers each has an instance id of its own, but all share vLLM's directory for Prometheus, which
    the first process removes at its end.
    """
    shared = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if settings.state_dir:
        return Path(settings.state_dir)
    return Path(shared) / KEY if shared else Path(tempfile.gettempdir()) / f"{KEY}-{instance_id}"
