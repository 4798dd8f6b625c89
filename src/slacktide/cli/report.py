"""Print the table of a result: ours (a file or a directory of --out), or a detailed one of `vllm bench serve`.

With --slo every request is judged anew.

example:
  slacktide report result.json --slo ttft:500,tbt:50
"""

from __future__ import annotations

import argparse

from slacktide.cli import options
from slacktide.cli.output import print_json
from slacktide.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "result",
        type=options.path,
        metavar="FILE|DIR",
        help="summary.json, compare.json, a directory, or vllm bench JSON",
    )
    options.add_targets(parser)


def run(args: argparse.Namespace) -> int:
    """Do it."""
    from slacktide.report.load import load_results

    records = load_results(args.result, _slo(args), mode=args.slo_mode, tolerated_late_share=args.late_tolerance)
    if args.out is not None:
        from slacktide.cli.scenario import writable
        from slacktide.report.files import write_json

        directory = writable(args)
        assert directory is not None
        write_json(directory / "report.json", {"runs": records})
    if args.json:
        print_json({"runs": records})
        return 0
    from slacktide.report.tables import print_comparison

    print_comparison(records)
    return 0


def _slo(args: argparse.Namespace):  # type: ignore[no-untyped-def]
    """The one target of --slo; classes and isolated-prefill factors need a simulation."""
    if args.slo is None:
        return None
    from slacktide.core.types import SLO
    from slacktide.workload.slos import parse_slos

    slos = parse_slos(args.slo)
    if slos.by_class or slos.needs_prefill_time or slos.default is None:
        raise InputError(f"--slo {args.slo!r}: a result is judged by one target in ms, e.g. ttft:500,tbt:50")
    return SLO(slos.default.ttft, slos.default.tbt, slos.default.e2e)
