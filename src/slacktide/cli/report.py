"""Print the table of a result, or make a page, a timeline or an explanation of it.

RESULT: a file or directory of --out (a run, a comparison, a goodput search, a sweep, an advice, a validation), or what
`vllm bench serve` wrote; for --timeline also a step log of the plug-in (.jsonl). With --slo all are judged anew.
Timelines and explanations know every prompt chunk and the policy's reasons where the run itself was made with --html,
--timeline or --explain.

example:
  slacktide report result.json --slo ttft:500,tbt:50
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from slacktide.cli import options
from slacktide.cli.output import print_json
from slacktide.cli.views import add_views, check_views, chosen, explanation, wanted, write_trace
from slacktide.errors import InputError

if TYPE_CHECKING:
    from slacktide.core.types import SLO
    from slacktide.report.source import Source


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "result",
        type=options.path,
        metavar="FILE|DIR",
        help="summary.json, compare.json, a directory, or vllm bench JSON",
    )
    add_views(parser)
    options.add_targets(parser)


def run(args: argparse.Namespace) -> int:
    """Do it."""
    check_views(args)
    if args.out is not None and wanted(args):
        raise InputError("--out goes with the table: leave it out, or leave out --html, --timeline and --explain")
    if args.result.suffix == ".jsonl" and args.timeline is not None:
        return _step_log(args)
    if wanted(args):
        return _look(args)
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


def _look(args: argparse.Namespace) -> int:
    """`--html`, `--timeline`, `--explain`."""
    from slacktide.report.source import read_source

    source = read_source(args.result, _slo(args), mode=args.slo_mode, tolerated_late_share=args.late_tolerance)
    told = []
    if args.html is not None:
        from slacktide.report.html import write_html

        told.append(f"wrote {args.html} ({write_html(args.html, source) / 1e3:,.0f} kB)")
    if args.timeline is not None:
        told.append(write_trace(args, chosen(args, _runs(source, "--timeline"))))
    text = None if args.explain is None else explanation(args, chosen(args, _runs(source, "--explain")))
    if args.json:
        print_json(_wrote(args) | ({} if text is None else {"explanation": text}))
        return 0
    print(text or "", end="")
    for line in told:
        print(line)
    return 0


def _wrote(args: argparse.Namespace) -> dict[str, Any]:
    return {"wrote": [str(path) for path in (args.html, args.timeline) if path is not None]}


def _runs(source: Source, flag: str):  # type: ignore[no-untyped-def]
    if source.kind != "runs":
        raise InputError(f"{flag}: a {source.kind} result holds no requests; simulate one of its settings")
    return source.runs


def _step_log(args: argparse.Namespace) -> int:
    if args.html is not None or args.explain is not None:
        raise InputError(f"{args.result}: a step log knows steps, no requests: --timeline alone can show it")
    from slacktide.report.steplog import read_step_log, step_log_timeline
    from slacktide.report.timeline import write_timeline

    trace, shows = step_log_timeline(read_step_log(args.result), args.result.name, args.window)
    write_timeline(args.timeline, trace)
    if args.json:
        print_json(_wrote(args))
    else:
        print(f"wrote {args.timeline}: {shows}")
    return 0


def _slo(args: argparse.Namespace) -> SLO | None:
    """The one target of --slo; classes and isolated-prefill factors need a simulation."""
    if args.slo is None:
        return None
    from slacktide.core.types import SLO
    from slacktide.workload.slos import parse_slos

    slos = parse_slos(args.slo)
    if slos.by_class or slos.needs_prefill_time or slos.default is None:
        raise InputError(f"--slo {args.slo!r}: a result is judged by one target in ms, e.g. ttft:500,tbt:50")
    return SLO(slos.default.ttft, slos.default.tbt, slos.default.e2e)
