"""Simulate several policies on the same requests and print one table.

With --out DIR each policy's run goes into DIR/LABEL (requests.parquet, steps.parquet, summary.json); compare.json and
the figure compare.png stand beside them. --html, --timeline and --explain ask the policies before every step and record
what they decide (decisions.parquet): the runs take several times as long.

example:
  slacktide compare --trace azure-conv --num-prompts 2000 --profile h100/llama-3-8b --policy vllm-v1,sarathi-edf \\
    --slo ttft:1000,tbt:50 --rate 20
"""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING, Any

from slacktide.cli import options
from slacktide.cli.output import print_json
from slacktide.cli.scenario import COMPARE, add_scenario, print_notes, run_all
from slacktide.cli.views import add_views, as_runs, check_views, chosen, explanation, wanted, write_views
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
    check_views(args, [spec.label for spec in specs])
    recorded: dict[str, Decisions] | None = {} if wanted(args) else None
    runs = run_all(args, specs, subdirectories=True, recorded=recorded)
    records = [record for record, _ in runs]
    written = _write(args, runs) if args.out is not None else []
    written += write_views(args, as_runs(runs, recorded))
    told = None if args.explain is None else explanation(args, chosen(args, as_runs(runs, recorded)))
    if args.json:
        print_json({"runs": records} | ({} if told is None else {"explanation": told}))
        return 0
    print(told or "", end="")
    from slacktide.report.tables import print_comparison

    print_comparison(records)
    print_notes(records)
    for line in written:
        print(line)
    return 0


def _write(args: argparse.Namespace, runs: list[tuple[dict[str, Any], Any]]) -> list[str]:
    """Figure first, compare.json last: with it, everything is there. Returns what to tell."""
    from slacktide.report.figures import compare_figure
    from slacktide.report.files import write_json

    figure = args.out / "compare.png"
    try:
        compare_figure(runs, figure)
        told = f"wrote {args.out} (figure: {figure})"
    except InputError as error:
        told = f"wrote {args.out}, without a figure: {error}"
    write_json(args.out / COMPARE, {"runs": [record for record, _ in runs]})
    if args.html is not None:
        return [told]
    page = shlex.join(["slacktide", "report", str(args.out), "--html", str(args.out / "report.html")])
    return [told, f"to look at it: {page}"]
