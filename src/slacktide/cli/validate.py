"""Replay a trace on a real engine and in the simulator, and tell how far apart the two are.

MODEL and vLLM's flags: a server is started for it with the profile's settings (and stopped in the end); --url: one
that runs already, with --step-log for its steps and preemptions. The same requests are replayed --repeats times, so
that errors stand beside the spread of reality. Exit status 1: a figure missed its bar, or the server went away.
With --update-profile the result is noted in the profile, and every later simulation says it.

example:
  slacktide validate HuggingFaceTB/SmolLM2-135M-Instruct --profile my-engine/profile.json --trace azure-conv \\
    --num-prompts 200 --rate 2 --length-scale 0.25 --policy vllm-v1 --slo ttft:2000,tbt:200 --out validation
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slacktide.cli import options
from slacktide.cli.output import emit, progress, save_json
from slacktide.errors import InputError

if TYPE_CHECKING:
    from slacktide.core.spec import PolicySpec
    from slacktide.loadgen.replay import Target
    from slacktide.metrics.log import RunLog
    from slacktide.profiling.profiles import Profile
    from slacktide.profiling.validate import Row
    from slacktide.workload.requests import Workload

PASSES_ON = True
"""Arguments that are not ours are vLLM's (see cli/main.py)."""

SETTLE = 1.5
"""Seconds after a run until its last steps are in the step log: the plug-in writes twice a second."""
PAUSE = 1.0
"""Seconds between two runs, so that the engine is idle when the next begins."""
SEEDS = 1000
"""Between the prompts of two --seed: more than anybody's repeats, which take the seeds in between."""
MISSING = 0.05
"""Share of the prompt tokens that may be missing from the step log, as steps around the run's edges."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.usage = "slacktide validate [MODEL | --url URL] --profile FILE --trace ... [arguments] [any vllm serve flag]"
    parser.add_argument("--profile", required=True, metavar="NAME|FILE", help="what the simulator runs on")
    options.add_policy(parser)
    parser.add_argument("--repeats", type=options.count, default=3, metavar="N", help="real runs (default: 3)")
    parser.add_argument(
        "--bar",
        action="append",
        default=[],
        metavar="FIGURE=SHARE",
        help="largest error of a figure, e.g. p50_ttft_ms=0.2, or FIGURE=none; may be repeated (default: throughput "
        "and TPOT 0.05, TTFT p50 0.1 and p99 0.15, attainment 0.03), or the spread of the real runs if that is larger",
    )
    parser.add_argument("--update-profile", action="store_true", help="note the result in the profile's file")
    group = parser.add_argument_group("a server that runs already")
    group.add_argument("--url", metavar="URL", help="its address")
    group.add_argument("--step-log", type=Path, metavar="FILE", help="the step log that its plug-in writes")
    options.add_load(parser, profile=False)
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--length-scale", type=options.positive, default=1.0, metavar="F", help="factor on all lengths (default: 1)"
    )
    group.add_argument(
        "--oversized", choices=("error", "drop"), default="error", help="requests longer than the model's context"
    )
    group.add_argument(
        "--vocab-size", type=options.count, default=30_000, metavar="N", help="token ids below N (default: 30000)"
    )
    options.add_targets(parser)


def run(args: argparse.Namespace) -> int:
    """Do it. Raises InputError."""
    from slacktide.cli.scenario import writable
    from slacktide.profiling.profiles import load_profile
    from slacktide.profiling.validate import parse_bars

    if (args.url is None) == (not args.rest):
        raise InputError("expected either MODEL (a server is started) or --url URL (one runs already)")
    specs = options.policies(args)
    if len(specs) != 1:
        raise InputError(f"--policy: found {len(specs)} policies, expected the one that the server runs")
    bars, profile, directory = parse_bars(args.bar), load_profile(args.profile), writable(args)
    if args.update_profile and not args.profile.lower().endswith(".json"):
        raise InputError(f"--update-profile: {args.profile} is packaged, expected a profile's JSON file")
    with _server(args, specs[0], profile) as (target, step_log):
        work = _workload(args, target)
        notes = _check_engine(target, profile)
        measured = _measure(args, work, target, step_log)
    found = judge_runs(args, work, profile, specs[0], measured, bars)
    found["value"]["notes"] = [*notes, *found["value"]["notes"]]
    if directory is not None:
        _draw(directory, found)
    if args.update_profile:
        _note(Path(args.profile), found["value"])
    emit(args, "validation", found["value"], lambda: _show(found))
    return 0 if found["value"]["ok"] else 1


@contextlib.contextmanager
def _server(args: argparse.Namespace, spec: PolicySpec, profile: Profile) -> Iterator[tuple[Target, Path | None]]:
    """The server to measure, and where its steps are logged."""
    from slacktide.loadgen.replay import Target

    if args.url is not None:
        yield Target(args.url, vocabulary=args.vocab_size), args.step_log
        return
    directory = Path(tempfile.mkdtemp(prefix="slacktide-validate-"))
    try:
        with started(args.rest, spec.label, args.slo, profile, directory) as url:
            yield Target(url, vocabulary=args.vocab_size), directory / "steps.jsonl"
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def started(model: list[str], policy: str, slo: str | None, profile: Profile | None, directory: Path) -> Iterator[str]:
    """`slacktide serve` with the profile's engine settings; yields its address.

    Its log is in `directory`, and so are its steps with a policy; "" is vLLM's own scheduler, which logs none.
    """
    import os

    from slacktide.loadgen.server import ServerProcess, cpu_environment, free_port
    from slacktide.vllm.serve import check_installed, on_cpu

    check_installed()
    port = free_port()
    flags = list(model)
    settings = {} if profile is None else {
        "--max-num-batched-tokens": profile.max_num_batched_tokens, "--max-num-seqs": profile.max_num_seqs,
        "--block-size": profile.block_size,
    }  # fmt: skip
    given = {flag.partition("=")[0].replace("_", "-") for flag in flags}
    for flag, number in settings.items():
        flags += [flag, str(number)] if flag not in given else []
    own = {"slacktide": {"step_log": str(directory / "steps.jsonl"), "step_log_mb": 4096.0}}
    command = [sys.executable, "-m", "slacktide", "serve", *flags, "--port", str(port)]
    command += ["--policy", policy, "--additional-config", json.dumps(own)] if policy else ["--stock"]
    command += ["--slo", slo] if slo else []
    environment = {k: v for k, v in cpu_environment().items() if k not in os.environ} if on_cpu(os.environ) else {}
    url = f"http://127.0.0.1:{port}"
    with ServerProcess(command, url, directory / "server.log", environment=environment):
        yield url


def _workload(args: argparse.Namespace, target: Target) -> Workload:
    from slacktide.cli.bench import fitting, workload_of

    return fitting(args, workload_of(args), target)


def _check_engine(target: Target, profile: Profile) -> list[str]:
    """What the server says of its KV cache against the profile: another pool preempts at other moments."""
    from slacktide.cli.profile_server import server_facts

    facts, notes = server_facts(target), []
    for name, expected in (("num_gpu_blocks", profile.num_blocks + 1), ("block_size", profile.block_size)):
        if name in facts and facts[name] != expected:
            notes.append(
                f"the server has {name} {facts[name]:,}, the profile {expected:,}: the runs differ in KV space"
            )
    return notes


def _measure(
    args: argparse.Namespace, work: Workload, target: Target, step_log: Path | None
) -> list[tuple[dict[str, Any], RunLog]]:
    """(summary, log) of each real run."""
    found = []
    with progress(args, args.repeats * len(work), "replaying") as advance:
        for number in range(args.repeats):
            if number:
                time.sleep(PAUSE)
            found.append(one_run(work, target, step_log, SEEDS * args.seed + number, args, advance))
    return found


def one_run(
    work: Workload, target: Target, step_log: Path | None, seed: int, args: argparse.Namespace,
    advance: Any = lambda _: None,
) -> tuple[dict[str, Any], RunLog]:  # fmt: skip
    """One real run; steps and preemptions come from the step log. `args`: slo_mode, late_tolerance.

    `seed` makes the prompts: two runs on one server need two, or the second finds its prompts in the prefix cache.
    Raises InputError where the step log shows that this happened.
    """
    from slacktide.loadgen.client import clock
    from slacktide.loadgen.record import run_log
    from slacktide.loadgen.replay import Limits, replay
    from slacktide.metrics.summary import summarize

    result = replay(work, target, Limits(), num_warmups=1, seed=seed, progress=advance)
    if result.interrupted:
        raise KeyboardInterrupt
    if result.gone_since is not None:
        raise InputError(f"{target.url}: the server went away during the run; see its log")
    log = run_log(work, result)
    summary = summarize(log, mode=args.slo_mode, tolerated_late_share=args.late_tolerance)
    if step_log is not None:
        from slacktide.cli.profile_server import log_lines

        time.sleep(SETTLE)
        begin = time.time() - (clock() - result.start)  # on the log's clock; steps of the warm-up come before
        lines = [line for line in log_lines(step_log) if line.get("start", 0.0) >= begin]
        if not lines:
            raise InputError(f"--step-log {step_log}: no step in it during the run; is it this server's?")
        _check_computed(work, log, lines)
        summary["num_steps"] = len(lines)
        summary["num_preemptions"] = sum(int(line.get("num_preempted", 0)) for line in lines)
    return summary, log


def _check_computed(work: Workload, log: RunLog, lines: list[dict[str, Any]]) -> None:
    """Raise InputError if the server skipped prompt tokens that no two requests share."""
    if work.hash_ids is not None:
        return
    prompts = int(work.num_prompt_tokens[log.finished].sum())
    computed = sum(int(line.get("prefill_tokens", 0)) for line in lines)
    if computed < (1 - MISSING) * prompts:
        raise InputError(
            f"the server computed {computed:,} of {prompts:,} prompt tokens and took the rest from its prefix cache, "
            "though no two requests of the trace share a prefix: it has seen these prompts before. Use another --seed "
            "or a fresh server; or, if its step log was rotated away during the run, a larger step_log_mb"
        )


def judge_runs(
    args: argparse.Namespace, work: Workload, profile: Profile, spec: PolicySpec,
    measured: list[tuple[dict[str, Any], RunLog]], bars: dict[str, float],
) -> dict[str, Any]:  # fmt: skip
    """Simulate the same requests and compare: `value` (for JSON), `rows`, and the logs for the figure."""
    from slacktide.metrics.summary import summarize
    from slacktide.profiling.validate import compare, in_words, verdict
    from slacktide.search.truth import caveats, profile_facts, twin

    log = twin(work, profile, spec)
    figures, notes = caveats(profile, log, is_open=work.closed is None)
    simulated = summarize(log, mode=args.slo_mode, tolerated_late_share=args.late_tolerance) | figures
    rows = compare([summary for summary, _ in measured], simulated, bars)
    rate = "" if work.closed is not None or not math.isfinite(work.rate) else f" at {work.rate:.3g} requests/s"
    text = in_words(rows, f"{work.name}{rate}, {spec.label}", len(measured))
    value = {
        "policy": spec.name,
        "label": spec.label,
        "trace": work.name,
        "num_prompts": len(work),
        **profile_facts(profile),
        "slo": args.slo,
        "repeats": len(measured),
        "ok": verdict(rows),
        "text": text,
        "rows": [asdict(row) for row in rows],
        "notes": [*work.notes, *notes],
        "measured": [summary for summary, _ in measured],
        "simulated": simulated,
    }
    return {"value": value, "rows": rows, "measured": measured, "simulated": (simulated, log)}


def _draw(directory: Path, found: dict[str, Any]) -> None:
    """CDFs of first tokens and gaps, measured and simulated, in one picture."""
    from slacktide.report.figures import compare_figure

    runs = [({"label": f"measured {i + 1}", "summary": s}, log) for i, (s, log) in enumerate(found["measured"])]
    summary, log = found["simulated"]
    try:
        compare_figure([({"label": "simulated", "summary": summary}, log), *runs][:16], directory / "validation.png")
    except InputError as error:
        found["value"]["notes"].append(f"no figure: {error}")


def _note(path: Path, value: dict[str, Any]) -> None:
    """Put the result into the profile's file."""
    fields = json.loads(path.read_text(encoding="utf-8"))
    rows = {row["figure"]: row["error"] for row in value["rows"] if row["error"] is not None}
    fields["validation"] = {"text": value["text"], "ok": value["ok"], "errors": rows}
    save_json(path.resolve(), fields)  # of a link, the file it stands for


def _show(found: dict[str, Any]) -> None:
    from slacktide.cli.output import table
    from slacktide.report.tables import profile_line

    value, rows = found["value"], found["rows"]
    print(profile_line(value))
    runs = value["repeats"]
    print(f"{value['num_prompts']} requests of {value['trace']}, {value['label']}, {runs} real run{'s' * (runs > 1)}")
    table(
        ["figure", "measured", "spread", "simulated", "error", "bar", ""],
        [_cells(row) for row in rows if row.measured is not None or row.simulated is not None],
        right=range(1, 6),
    )
    for note in value["notes"]:
        print(f"note: {note}")
    print("within the bars" if value["ok"] else "NOT within the bars")


def _cells(row: Row) -> list[str]:
    from slacktide.profiling.validate import ABSOLUTE, FIGURES
    from slacktide.report.tables import number

    points = row.figure in ABSOLUTE

    def show(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.1f} %" if points else number(value)

    def share(value: float | None, sign: str) -> str:
        if value is None:
            return "-"
        return f"{100 * value:{sign}.1f} {'points' if points else '%'}"

    met = "" if row.met is None else "ok" if row.met else "MISSED"
    if row.met and row.error is not None and row.bar is not None and abs(row.error) > row.bar:
        met = "within the spread"
    cells = [show(value) for value in (row.measured, row.spread, row.simulated)]
    return [FIGURES[row.figure], *cells, share(row.error, "+"), share(row.bar, ""), met]
