"""Tell what no policy can pass: an upper bound of the rate at which the SLO can be met, for this very trace.

`bound` holds for any scheduler, even one that knows all arrivals and output lengths: above it, some stretch of time is
too short for what falls due in it, bursts included. `sustained` is what no scheduler can keep up for ever when these
requests come again and again; a short run may pass it. Both count the requests that may miss (1 - target) as if they
cost nothing, and take it that nobody preempts requests to find them in the prefix cache again.

example:
  slacktide bound --trace azure-conv --num-prompts 2000 --profile h100/llama-3-8b --slo ttft:1000,tbt:50
"""

from __future__ import annotations

import argparse
from typing import Any

from slacktide.cli import options
from slacktide.cli.output import emit, table
from slacktide.cli.scenario import add_scenario, print_notes, scenario_of, writable

BASIS = {"bound": "any policy, these requests", "sustained": "any policy, for ever"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "--target",
        type=options.share_above_zero,
        default=0.99,
        metavar="SHARE",
        help="share of the arrivals that must meet the SLO (default: 0.99)",
    )
    add_scenario(parser, rates=False)


def run(args: argparse.Namespace) -> int:
    """Compute, write, print. Raises InputError."""
    from slacktide.search.bounds import bound_of_scenario

    writable(args)
    record = bound_of_scenario(scenario_of(args), target=args.target)
    emit(args, "bound", record, lambda: _show(record))
    return 0


def _show(record: dict[str, Any]) -> None:
    from slacktide.report.tables import number, percent, profile_line

    print(profile_line(record))
    print(f"no policy meets the SLO of {percent(record['target'])} % of all arrivals (mode {record['slo_mode']}) above")
    rows = [
        [name, "not limited by the rate" if record[name] is None else number(record[name]), basis]
        for name, basis in BASIS.items()
    ]
    table(["limit", "req/s", "holds for"], rows, right=(1,))
    print_notes([record])
