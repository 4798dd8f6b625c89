"""Simulate one policy and print what the users would have seen.

With --out DIR it writes requests.parquet, steps.parquet and summary.json. --html, --timeline and --explain ask the
policy before every step and record what it decides (decisions.parquet): the run takes several times as long.

example:
  slacktide simulate --trace azure-conv --num-prompts 2000 --profile h100/llama-3-8b --policy sarathi-edf \\
    --slo ttft:1000,tbt:50 --rate 20
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from slacktide.cli import options
from slacktide.cli.output import print_json
from slacktide.cli.scenario import add_scenario, print_notes, run_all
from slacktide.cli.views import add_views, as_runs, check_views, explanation, wanted, write_views
from slacktide.errors import InputError

if TYPE_CHECKING:
    from slacktide.metrics.decisions import Decisions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    options.add_policy(parser)
    add_scenario(parser)
    options.add_save(parser)
    add_views(parser)


def run(args: argparse.Namespace) -> int:
    """Do it."""
    specs = options.policies(args)
    if len(specs) != 1:
        names = ", ".join(spec.label for spec in specs)
        raise InputError(
            f"--policy names {len(specs)} policies ({names}), expected one; 'slacktide compare' takes more"
        )
    check_views(args, [spec.label for spec in specs])
    recorded: dict[str, Decisions] | None = {} if wanted(args) else None
    runs = as_runs(run_all(args, specs, subdirectories=False, recorded=recorded), recorded)
    record, written = runs[0].record, write_views(args, runs)
    told = None if args.explain is None else explanation(args, runs[0])
    if args.json:
        print_json(record if told is None else record | {"explanation": told})
        return 0
    print(told or "", end="")
    from slacktide.report.tables import print_comparison

    print_comparison([record])
    print_notes([record])
    if args.out is not None:
        print(f"wrote {args.out}")
    for line in written:
        print(line)
    return 0
