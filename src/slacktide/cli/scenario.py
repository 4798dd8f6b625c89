"""From arguments to a `Scenario`, and from a scenario to runs with a progress bar: for every verb that simulates."""

from __future__ import annotations

import argparse
import hashlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slacktide.cli import options
from slacktide.cli.output import out_dir, progress
from slacktide.errors import InputError

if TYPE_CHECKING:
    from slacktide.core.policy import Policy
    from slacktide.core.spec import PolicySpec
    from slacktide.metrics.decisions import Decisions
    from slacktide.metrics.log import RunLog
    from slacktide.search.scenario import Scenario


COMPARE = "compare.json"

MAX_NAME = 120
"""Characters of a directory's name that come from a label: with ours in it, below the 255 bytes of file systems."""


def add_scenario(parser: argparse.ArgumentParser, *, rates: bool = True) -> None:
    """All arguments of a scenario; `rates` False for verbs that choose the rate themselves."""
    options.add_load(parser, rates=rates)
    group = parser.add_argument_group("how the trace and the profile are read")
    group.add_argument(
        "--max-tokens",
        metavar="N|exact",
        help="output limit that requests declare, which policies see (default: the trace's longest output; exact: the "
        "true length, as with ignore_eos)",
    )
    group.add_argument(
        "--oversized",
        choices=("error", "drop", "reject"),
        default="error",
        help="requests that the engine can never hold: an error (default), left out, or refused on arrival and missed",
    )
    group.add_argument(
        "--interference",
        type=options.factor,
        metavar="F",
        help="factor on the decode attention of mixed steps, where a profile has no measured one",
    )
    group.add_argument(
        "--interconnect",
        metavar="LINK",
        help="link between GPUs, where a profile knows several: nvlink, pcie, pcie-host",
    )
    options.add_targets(parser)
    options.add_engine(parser)


def scenario_of(args: argparse.Namespace) -> Scenario:
    """The scenario that the arguments describe."""
    from slacktide.search.scenario import Scenario

    return Scenario(
        trace=args.trace,
        profile=args.profile,
        slo=args.slo,
        rate=getattr(args, "rate", None),
        arrival=args.arrival,
        burstiness=args.burstiness,
        num_prompts=args.num_prompts,
        max_concurrency=args.max_concurrency,
        max_tokens=args.max_tokens,
        seed=args.seed,
        engine=options.engine_settings(args),
        slo_mode=args.slo_mode,
        late_tolerance=args.late_tolerance,
        oversized=args.oversized,
        interference=args.interference,
        interconnect=args.interconnect,
        read=args.read,
    )


def run_all(
    args: argparse.Namespace,
    specs: list[PolicySpec],
    *,
    subdirectories: bool,
    recorded: dict[str, Decisions] | None = None,
) -> list[tuple[dict[str, Any], RunLog]]:
    """Simulate every policy on the arguments' scenario; with `--out`, write each run as soon as it is done.

    `subdirectories`: each run into a directory of its label below `--out`, else straight into it. `recorded`: record
    every decision, at the cost of the compiled stretches, and fill this in by label.
    """
    from slacktide.report.files import detailed_arrays, write_run
    from slacktide.search.scenario import prepare, run_policy
    from slacktide.sim.decisions import Recorder

    directory = writable(args)
    scenario = scenario_of(args)
    setups = [prepare(scenario, spec.engine) for spec in specs]  # all input errors before the first run
    if directory is not None and subdirectories:
        (directory / COMPARE).unlink(missing_ok=True)  # until the new one is written this is no comparison
    places = directories([spec.label for spec in specs])
    runs = []
    with progress(args, sum(len(setup.workload) for setup in setups), "simulating") as advance:
        for setup, spec, place in zip(setups, specs, places, strict=True):
            done = 0

            def report(ended: int, _: float) -> None:
                nonlocal done
                advance(ended - done)
                done = ended

            recorder: list[Recorder] = []

            def record_it(policy: Policy, recorder: list[Recorder] = recorder) -> Policy:
                recorder.append(Recorder(policy))
                return recorder[0]

            record, log = run_policy(setup, spec, progress=report, wrap=None if recorded is None else record_it)
            record["command"] = args.command
            decisions = recorder[0].decisions() if recorder else None
            if recorded is not None and decisions is not None:
                recorded[record["label"]] = decisions
            if args.save_detailed:
                record = record | detailed_arrays(log)
            if directory is not None:
                write_run(directory / place if subdirectories else directory, record, log, decisions=decisions)
            runs.append((record, log))
    return runs


def writable(args: argparse.Namespace) -> Path | None:
    """The directory of `--out`, checked before hours of work are lost on it. Raises InputError."""
    directory = out_dir(args)
    if directory is not None and not os.access(directory, os.W_OK | os.X_OK):
        raise InputError(f"--out {directory}: not writable; name another directory, or change its permissions")
    return directory


def directories(labels: list[str]) -> list[str]:
    """A name of a directory for each label, all different, also where file systems do not tell cases apart."""
    names: list[str] = []
    for label in labels:
        name = slug(label)
        taken = {other.casefold() for other in names}
        names.append(name if name.casefold() not in taken else f"{name}-{_digest(label)}")
    return names


def slug(label: str) -> str:
    """A label as the name of a directory: letters, digits, dot, dash, equals sign and underscore stay.

    A long one is cut, and a digest of the label takes the place of the rest.
    """
    name = re.sub(r"[^A-Za-z0-9.=_-]+", "_", label)
    return name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}-{_digest(label)}"


def _digest(label: str) -> str:
    return hashlib.sha256(label.encode()).hexdigest()[:8]


def print_notes(records: list[dict[str, Any]]) -> None:
    """Say once what was left out, converted or assumed on the way, and of which runs when not of all."""
    said: dict[str, list[str]] = {}
    for record in records:
        for note in record["notes"]:
            said.setdefault(note, []).append(str(record.get("label") or record.get("policy") or ""))
    for note, names in said.items():
        who = ", ".join(dict.fromkeys(names))
        whose = "" if len(names) == len(records) or note.startswith((f"{who}:", f"{who},")) else f"{who}: "
        print(f"note: {whose}{note}")
