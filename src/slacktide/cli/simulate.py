"""Simulate one policy and print what the users would have seen.

With --out DIR it writes requests.parquet, steps.parquet and summary.json.

example:
  slacktide simulate --trace azure-conv --num-prompts 2000 --profile h100/llama-3-8b --policy sarathi-edf \\
    --slo ttft:1000,tbt:50 --rate 20
"""

from __future__ import annotations

import argparse

from slacktide.cli import options
from slacktide.cli.output import print_json
from slacktide.cli.scenario import add_scenario, print_notes, run_all
from slacktide.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    options.add_policy(parser)
    add_scenario(parser)
    options.add_save(parser)


def run(args: argparse.Namespace) -> int:
    """Do it."""
    specs = options.policies(args)
    if len(specs) != 1:
        names = ", ".join(spec.label for spec in specs)
        raise InputError(
            f"--policy names {len(specs)} policies ({names}), expected one; 'slacktide compare' takes more"
        )
    record, _ = run_all(args, specs, subdirectories=False)[0]
    if args.json:
        print_json(record)
        return 0
    from slacktide.report.tables import print_comparison

    print_comparison([record])
    print_notes([record])
    if args.out is not None:
        print(f"wrote {args.out}")
    return 0
