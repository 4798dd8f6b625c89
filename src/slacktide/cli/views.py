"""`--html`, `--timeline` and `--explain`: a run as a page, as a trace for Perfetto, or one request's life as text."""

from __future__ import annotations

import argparse
import math
import os
from typing import TYPE_CHECKING, Any

from slacktide.cli import options
from slacktide.errors import InputError

if TYPE_CHECKING:
    from slacktide.metrics.decisions import Decisions
    from slacktide.metrics.log import RunLog
    from slacktide.report.source import Run


def window(text: str) -> tuple[float, float]:
    """FROM:TO in seconds; either may be left out."""
    first, colon, last = text.partition(":")
    low = options.number(first) if first.strip() else -math.inf
    high = options.number(last) if last.strip() else math.inf
    if not colon or not low < high or (low, high) == (-math.inf, math.inf):
        raise options.Invalid(f"expected FROM:TO in seconds, FROM before TO, found {text!r}")
    return low, high


def add_views(parser: argparse.ArgumentParser) -> None:
    """The three flags and what goes with them."""
    group = parser.add_argument_group("look at it")
    group.add_argument("--html", type=options.path, metavar="FILE", help="write a page: one file, works offline")
    group.add_argument(
        "--timeline",
        type=options.path,
        metavar="FILE",
        help="write a trace that ui.perfetto.dev and chrome://tracing open",
    )
    group.add_argument(
        "--window", type=window, metavar="FROM:TO", help="seconds of the run in the timeline (default: from the start)"
    )
    group.add_argument(
        "--explain",
        type=options.count_or_zero,
        metavar="ID",
        help="print the life of a request, by its number in the trace",
    )
    group.add_argument(
        "--run",
        metavar="LABEL",
        help="the run of --timeline and --explain, where there are several (default: the first)",
    )


def wanted(args: argparse.Namespace) -> bool:
    """Any of them: then a simulation records its decisions."""
    return args.html is not None or args.timeline is not None or args.explain is not None


def check_views(args: argparse.Namespace, labels: list[str] | None = None) -> None:
    """Flags that contradict one another, and places that cannot be written: found before a run, not after it.

    `labels`: of the runs, where they are known. Raises InputError.
    """
    if args.window is not None and args.timeline is None:
        raise InputError("--window goes with --timeline: name a file for it")
    if args.run is not None and args.timeline is None and args.explain is None:
        raise InputError("--run goes with --timeline or --explain: name one of them")
    if args.run is not None and labels is not None and args.run not in labels:
        raise InputError(f"--run {args.run!r}: no such run; there are {', '.join(labels)}")
    files = {"--html": args.html, "--timeline": args.timeline}
    for flag, path in files.items():
        if path is None:
            continue
        if path.is_dir():
            raise InputError(f"{flag} {path}: expected a file, found a directory; name a file in it")
        parent = next(place for place in (path.absolute().parent, *path.absolute().parents) if place.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise InputError(f"{flag} {path}: {parent} cannot be written; name another place")
    if args.html is not None and args.timeline is not None and args.html.absolute() == args.timeline.absolute():
        raise InputError(f"--html and --timeline both name {args.html}: the one would replace the other")


def chosen(args: argparse.Namespace, runs: list[Run]) -> Run:
    """The run that `--run` names."""
    if args.run is None:
        return runs[0]
    for run in runs:
        if run.record.get("label") == args.run:
            return run
    labels = ", ".join(str(run.record.get("label")) for run in runs)
    raise InputError(f"--run {args.run!r}: no such run; there are {labels}")


def write_views(args: argparse.Namespace, runs: list[Run]) -> list[str]:
    """Write what the flags ask for; returns what to tell. `--explain` is left to `explanation`."""
    told = []
    if args.html is not None:
        from slacktide.report.html import write_html
        from slacktide.report.source import Source

        title = args.out.name if getattr(args, "out", None) is not None else args.html.stem
        size = write_html(args.html, Source("runs", runs, {}, title))
        told.append(f"wrote {args.html} ({size / 1e3:,.0f} kB)")
    if args.timeline is not None:
        told.append(write_trace(args, chosen(args, runs)))
    return told


def write_trace(args: argparse.Namespace, run: Run) -> str:
    """Write the timeline of a run; returns what to tell."""
    from slacktide.report.timeline import timeline, write_timeline

    log = log_of(run, "--timeline")
    trace, shows = timeline(log, run.name, run.decisions, _clipped(args.window, log))
    write_timeline(args.timeline, trace)
    return f"wrote {args.timeline}: {shows}"


def _clipped(asked: tuple[float, float] | None, log: RunLog) -> tuple[float, float] | None:
    if asked is None:
        return None
    return max(asked[0], log.start_time), min(asked[1], log.end_of_run + 1e-6)


def log_of(run: Run, flag: str) -> RunLog:
    """The run's log. Raises InputError where its files hold none."""
    if run.log is None:
        raise InputError(
            f"{flag}: run {run.name!r} has no per-request figures: give the directory that --out wrote, or a file "
            "written with --save-detailed"
        )
    return run.log


def explanation(args: argparse.Namespace, run: Run) -> str:
    """The text of `--explain`. Raises InputError for a request that the run does not have."""
    from slacktide.report.explain import explain
    from slacktide.report.learned import learned_text

    told = explain(log_of(run, "--explain"), args.explain, run.name, run.decisions)
    return told + learned_text(run.record.get("learned"), f"{run.name} by the end of the run")


def as_runs(runs: list[tuple[dict[str, Any], RunLog]], recorded: dict[str, Decisions] | None) -> list[Run]:
    """Simulated runs as a report takes them."""
    from slacktide.report.source import Run

    return [Run(record, log, (recorded or {}).get(record["label"])) for record, log in runs]
