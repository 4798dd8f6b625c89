"""List the profiles: GPU, model and number of GPUs, what their step times rest on.

With a GPU or a model (h100, llama-3-8b), those alone; with a whole name or a profile's JSON file, its memory, defaults,
sources and a few step times.

example:
  slacktide profiles h100/llama-3-8b
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from slacktide.cli.output import emit, table
from slacktide.errors import unknown_name

if TYPE_CHECKING:
    from slacktide.core.latency import LatencyModel

SAMPLE_CONTEXT = 1024
"""Tokens of context of a sample decode: near the mean of the packaged conversation trace."""
SAMPLE_PREFILLS, SAMPLE_DECODES = (512, 2048), (1, 32, 128)
"""Tokens and sequences of the sample steps: common chunks and batches."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One optional name."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="a GPU, a model, a profile, or a profile's JSON file")


def run(args: argparse.Namespace) -> int:
    """Print the profiles. Raises InputError for an unknown name."""
    if args.name and ("/" in args.name or args.name.endswith(".json")):
        found = describe(args.name)
        emit(args, "profiles", {"profiles": [found]}, lambda: _one(found))
        return 0
    from slacktide.profiling.profiles import list_profiles

    every = list_profiles()
    chosen = [info for info in every if args.name is None or args.name.lower() in _parts(info.name)]
    if not chosen:
        known = {part for info in every for part in _parts(info.name)}
        raise unknown_name("GPU or model", args.name, known, "('slacktide profiles' lists them)")
    value = {"profiles": [dataclasses.asdict(info) for info in chosen]}
    emit(args, "profiles", value, lambda: _all([(info.name, info.label, info.sources) for info in chosen]))
    return 0


def _parts(name: str) -> set[str]:
    """What a profile can be found by: `2x-h100/llama-3-8b` by 2x-h100, h100 and llama-3-8b."""
    gpu, _, model = name.partition("/")
    count, _, rest = gpu.partition("x-")
    return {gpu, model, rest if count.isdecimal() else gpu}


def describe(name: str) -> dict[str, Any]:
    """One profile with sample step times, in JSON's types. Raises InputError."""
    from slacktide.profiling.profiles import load_profile

    profile = load_profile(name)
    fields = {f.name: getattr(profile, f.name) for f in dataclasses.fields(profile) if f.name != "latency"}
    return {**fields, "sources": dict(profile.sources), "step_times": _step_times(profile.latency)}


def _step_times(latency: LatencyModel) -> list[dict[str, Any]]:
    """Sample steps: what runs, and milliseconds."""
    import numpy as np

    found: list[dict[str, Any]] = []
    for tokens in SAMPLE_PREFILLS:
        time = latency.step_time(np.array([tokens]), np.array([0]), np.array([False]))
        found.append({"step": f"prefill of {tokens} tokens", "ms": time * 1e3})
    for n in SAMPLE_DECODES:
        time = latency.step_time(np.ones(n, np.int64), np.full(n, SAMPLE_CONTEXT), np.ones(n, np.bool_))
        found.append({"step": f"{n} decode{'s' * (n > 1)} at {SAMPLE_CONTEXT} tokens", "ms": time * 1e3})
    return found


def _all(rows: list[tuple[str, str, str]]) -> None:
    table(["profile", "label", "step times rest on"], rows)
    print("composed: of measured kernels; estimate: rescaled from a near GPU or shape; prior: nobody measured it.")
    print("One in detail: slacktide profiles GPU/MODEL")


def _one(profile: dict[str, Any]) -> None:
    print(f"{profile['name']} ({profile['label']})\n")
    for key, value in profile.items():
        if key not in ("name", "label", "sources", "step_times", "region") and value not in (None, ""):
            print(f"  {key} = {_text(value)}")
    for scene, box in getattr(profile["region"], "boxes", {}).items():
        sides = ", ".join(f"{side} {low:,.0f} to {high:,.0f}" for side, (low, high) in box.items() if high > 0)
        print(f"  measured {scene}: {sides}")
    for sample in profile["step_times"]:
        print(f"  {sample['step']}: {sample['ms']:.2f} ms")
    print("\nsources:")
    for key, source in profile["sources"].items():
        print(f"  {key}: {source}")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and 0 < value < 1:
        return f"{value:.3g}"
    return f"{value:,.0f}" if isinstance(value, (int, float)) else str(value)
