"""Measure an engine and write its profile: what steps cost, its KV cache, its limits, and where all that was measured.

MODEL and vLLM's flags: vLLM is started in this process and made to run exactly the steps of a design (also on GPUs).
--url: a running server gets designed loads; with --step-log FILE (its step log, readable here) the engine's own clock
counts, without it what clients see. --torch-stack MODEL: a GPU without vLLM, a stack of random weights with that
model's dimensions. A run that was stopped goes on where it was; `slacktide fit` makes other models of the same steps.

example:
  slacktide profile HuggingFaceTB/SmolLM2-135M-Instruct --max-model-len 2048 --minutes 5 --out my-engine
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slacktide.cli import options
from slacktide.cli.output import emit, out_dir, progress, save_json
from slacktide.errors import InputError

if TYPE_CHECKING:
    from slacktide.profiling.experiments_run import Engine

PASSES_ON = True
"""Arguments that are not ours are vLLM's (see cli/main.py)."""

DIRECTORY = Path("slacktide-profile")
"""Where results go without --out."""
DESIGNED, TRAFFIC, PROFILE = "measurements.jsonl", "traffic.jsonl", "profile.json"
NOISY = 0.1
"""Median relative distance of samples of one step: an idle GPU has about 0.01, an idle CPU some 0.03."""
BAR = 1000
"""Parts of the progress bar."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.usage = "slacktide profile MODEL [arguments] [any vllm serve flag] | --url URL | --torch-stack MODEL"
    parser.add_argument(
        "--minutes", type=options.positive, default=5.0, metavar="M", help="time to measure, warm (default: 5)"
    )
    parser.add_argument("--name", metavar="NAME", help="name of the profile (default: GPU and model)")
    add_family(parser)
    group = parser.add_argument_group("a running server")
    group.add_argument("--url", metavar="URL", help="measure this OpenAI-compatible server")
    group.add_argument("--step-log", type=Path, metavar="FILE", help="the step log that its plug-in writes")
    group.add_argument("--served-model", metavar="NAME", help="as the server calls it (default: its first)")
    group.add_argument(
        "--vocab-size", type=options.count, default=30_000, metavar="N", help="token ids below N (default: 30000)"
    )
    add_engine_facts(group)
    group = parser.add_argument_group("a GPU without vLLM")
    group.add_argument("--torch-stack", metavar="MODEL", help="dimensions of this model ('slacktide profiles' lists)")
    group.add_argument("--layers", type=options.count, metavar="N", help="measure N layers, and count them up to all")


def add_family(parser: argparse.ArgumentParser) -> None:
    """How steps become a model."""
    parser.add_argument(
        "--family",
        default="auto",
        metavar="NAME",
        help="extended-feature, seven-feature, affine, roofline, or tables with --base; default: the one that errs "
        "least on steps it has not seen",
    )
    parser.add_argument("--base", metavar="PROFILE", help="composed profile whose tables the family tables corrects")


def add_engine_facts(group: argparse._ArgumentGroup) -> None:
    """Settings of an engine that its measurements do not tell."""
    for flag in ("max-num-batched-tokens", "max-num-seqs", "num-gpu-blocks-override", "block-size", "max-model-len"):
        group.add_argument(
            f"--{flag}", type=options.count, metavar="N", help="as the engine has it, if it does not say"
        )


def given_facts(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's settings as typed, by the facts' names."""
    names = ("max_num_batched_tokens", "max_num_seqs", "block_size", "max_model_len")
    return {name: getattr(args, name) for name in names} | {"num_gpu_blocks": args.num_gpu_blocks_override}


def run(args: argparse.Namespace) -> int:
    """Measure, fit, write, tell."""
    args.out = args.out or DIRECTORY
    chosen = [bool(args.rest), args.url is not None, args.torch_stack is not None]
    if sum(chosen) != 1:
        raise InputError("expected one of MODEL (with vLLM's flags), --url URL and --torch-stack MODEL")
    directory = out_dir(args)
    assert directory is not None
    if args.url is not None:
        from slacktide.cli.profile_server import measure_server

        notes = measure_server(args, directory / TRAFFIC)
        source = directory / TRAFFIC
    else:
        source = directory / DESIGNED
        notes = _measure_engine(args, source)
    return fit_and_tell(args, [source], notes)


def _measure_engine(args: argparse.Namespace, path: Path) -> list[str]:
    """Designed steps on an engine in this process."""
    from slacktide.profiling.experiments_run import run_design

    engine, close = _engine(args)
    try:
        with progress(args, BAR, "measuring") as advance:
            done = 0

            def report(share: float) -> None:
                nonlocal done
                now = int(BAR * min(share, 1.0))
                advance(now - done)
                done = now

            outcome = run_design(engine, path, minutes=args.minutes, seed=args.seed, progress=report)
    finally:
        close()
    return outcome.notes


def _engine(args: argparse.Namespace) -> tuple[Engine, Any]:
    if args.torch_stack is not None:
        from slacktide.profiling.torch_stack import TorchStack

        stack = TorchStack.named(args.torch_stack, layers=args.layers, seed=args.seed)
        return stack, stack.close
    from slacktide.loadgen.server import cpu_environment
    from slacktide.vllm.serve import check_installed, on_cpu

    check_installed()
    if on_cpu(os.environ):
        for name, value in cpu_environment().items():
            os.environ.setdefault(name, value)
    from slacktide.profiling.engine_vllm import VllmEngine

    # Flags that are ours as well (a server's facts) go to vLLM here.
    ours = {"max_num_batched_tokens": "", "max_num_seqs": "", "num_gpu_blocks_override": "", "block_size": ""}
    flags = [
        word
        for name in (*ours, "max_model_len")
        if (value := getattr(args, name)) is not None
        for word in ("--" + name.replace("_", "-"), str(value))
    ]
    engine = VllmEngine([*args.rest, *flags], args.seed)
    return engine, engine.close


def fit_and_tell(args: argparse.Namespace, sources: list[Path], notes: list[str]) -> int:
    """Fit a model to the files, write the profile, print what it is worth."""
    from slacktide.profiling.calibrate import calibrate, profile_fields
    from slacktide.profiling.measurements import joined, read_steps

    given = given_facts(args)
    steps = joined([read_steps(path, args.max_num_batched_tokens) for path in sources])
    fitted = calibrate(steps, args.family, args.seed, args.base)
    fields = profile_fields(steps, fitted, args.name or _name(steps.facts), given)
    directory = out_dir(args)
    assert directory is not None
    path = directory / PROFILE
    save_json(path, fields)
    every = [*steps.notes, *notes]
    if (noise := max(fitted.noise.values(), default=0.0)) > NOISY:
        every.append(
            f"samples of the same step differ by {100 * noise:.0f} % (median): something else runs on this machine; "
            "measure again when it is idle"
        )
    value = {"profile": str(path), "fields": fields, "notes": every}
    emit(args, "profile-report", value, lambda: _show(fields, str(path), every))
    return 0


def _name(facts: dict[str, Any]) -> str:
    """GPU and model, as profiles are named."""
    hardware = facts.get("hardware", {})
    where = str(hardware.get("gpu") or hardware.get("cpu") or "engine")
    model = str(facts.get("engine", {}).get("model") or "model")
    return "/".join("-".join(part.lower().split()) for part in (where, model))


def _show(fields: dict[str, Any], path: str, notes: list[str]) -> None:
    from slacktide.cli.output import table

    print(f"profile {fields['name']} [{fields['label']}]: {fields['latency']['family']}")
    rows = [
        [
            scene,
            str(error["steps"]),
            f"{error['median_percent']:.1f} %",
            f"{error['p90_percent']:.1f} %",
            f"{error['noise_percent']:.1f} %" if "noise_percent" in error else "-",
        ]
        for scene, error in fields["errors"].items()
    ]
    table(["steps of", "measured", "median error", "p90 error", "noise"], rows, right=range(1, 5))
    print("errors: cross-validated; noise: samples against the median of their own point")
    if "host" in fields:
        host = fields["host"]
        how = ", overlapped" if host["overlapped"] else ""
        print(f"host: {host['per_step_ms']:.3g} ms a step, {host['per_sequence_ms']:.3g} ms a sequence{how}")
    print(f"KV cache: {fields['num_gpu_blocks']:,} blocks of {fields['block_size']} tokens")
    for note in notes:
        print(f"note: {note}")
    print(f"wrote {path}; use it with --profile {path}")
