"""Replay a trace against an OpenAI-compatible server and print what its users saw.

Requests are sent when the trace says, whatever became of those before (open loop); latencies count from that moment.
Prompts are random token ids of exactly the trace's lengths, outputs run to the trace's lengths (ignore_eos), and each
request carries its targets as vllm_xargs. Token times follow the server's token counts, not the chunks of the stream.
With --out DIR it writes requests.parquet, steps.parquet and summary.json. Exit status 1: the server went away.

example:
  slacktide bench --url http://127.0.0.1:8000 --trace azure-conv --num-prompts 500 --rate 4 --slo ttft:1000,tbt:100
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from typing import TYPE_CHECKING, Any

from slacktide.cli import options
from slacktide.cli.output import print_json, progress
from slacktide.errors import InputError

if TYPE_CHECKING:
    from slacktide.loadgen.replay import Limits, Replay, Target
    from slacktide.metrics.log import RunLog
    from slacktide.workload.requests import Workload


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    group = parser.add_argument_group("server (names as in `vllm bench serve`)")
    group.add_argument(
        "--url", "--base-url", dest="url", default="http://127.0.0.1:8000", metavar="URL", help="default: %(default)s"
    )
    group.add_argument("--model", metavar="NAME", help="as the server calls it (default: its first)")
    group.add_argument(
        "--backend",
        choices=("vllm", "openai", "openai-chat"),
        default="vllm",
        help="/v1/completions with token ids (vllm, openai: the same), or /v1/chat/completions with texts of about the "
        "right lengths (default: vllm)",
    )
    group.add_argument("--header", action="append", default=[], metavar="KEY=VALUE", help="may be repeated")
    group.add_argument("--extra-body", metavar="JSON", help="an object that goes into every request")
    group.add_argument("--label", metavar="TEXT", help="what the table calls this run (default: the model)")
    options.add_load(parser, profile=False)
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--length-scale",
        type=options.positive,
        default=1.0,
        metavar="F",
        help="factor on all prompt and output lengths, to fit a trace to a small machine (default: 1)",
    )
    group.add_argument(
        "--oversized",
        choices=("error", "drop", "send"),
        default="error",
        help="requests longer than the model's context: an error (default), left out, or sent all the same",
    )
    group.add_argument(
        "--vocab-size", type=options.count, default=30_000, metavar="N", help="token ids below N (default: 30000)"
    )
    group.add_argument("--no-send-slo", action="store_true", help="do not tell the server the targets")
    group = parser.add_argument_group("limits")
    group.add_argument("--num-warmups", type=options.count_or_zero, default=1, metavar="N", help="default: 1")
    group.add_argument(
        "--timeout", type=options.seconds, default=600.0, metavar="S", help="for a whole answer (default: 600 s)"
    )
    group.add_argument(
        "--max-duration", type=options.seconds, default=math.inf, metavar="S", help="end the run then (default: never)"
    )
    group.add_argument(
        "--give-up",
        type=options.seconds,
        default=30.0,
        metavar="S",
        help="end the run when the server could not be reached for so long (default: 30 s)",
    )
    options.add_targets(parser)
    options.add_save(parser)


def run(args: argparse.Namespace) -> int:
    """Do it."""
    from slacktide.cli.scenario import writable
    from slacktide.loadgen.record import client_arrays, run_log
    from slacktide.loadgen.replay import replay
    from slacktide.report.files import detailed_arrays, write_run

    target, limits = _target(args), _limits(args)
    directory = writable(args)
    workload = fitting(args, workload_of(args), target)
    _announce(args, workload)
    with progress(args, len(workload), "replaying") as advance:
        result = replay(workload, target, limits, num_warmups=args.num_warmups, seed=args.seed, progress=advance)
    log = run_log(workload, result)
    record = _record(args, workload, result, log)
    detailed = record | detailed_arrays(log) | client_arrays(result) if args.save_detailed else record
    if directory is not None:
        write_run(directory, detailed, log)
    if args.json:
        print_json(detailed)
    else:
        _show(record)
        if directory is not None:
            print(f"wrote {directory}")
    if result.interrupted:
        return 130
    return 1 if result.gone_since is not None else 0


def _announce(args: argparse.Namespace, workload: Workload) -> None:
    """Say on standard error what is about to happen, and for how long: a unit that is wrong shows now, not in hours."""
    if args.quiet:
        return
    how = f"{workload.span:.1f} s ({workload.rate:.3g} requests/s)" if len(workload) > 1 else "one moment"
    if workload.closed is not None:
        how = f"a closed loop of {workload.closed.concurrency} users"
    print(f"slacktide: replaying {len(workload)} requests of {workload.name} over {how}", file=sys.stderr)
    for note in workload.notes:
        print(f"slacktide: note: {note}", file=sys.stderr)


def _target(args: argparse.Namespace) -> Target:
    """The server of the arguments. Raises InputError for an address, header or body that is none."""
    from slacktide.loadgen.replay import Target

    scheme, separator, rest = args.url.partition("://")
    if scheme not in ("http", "https") or not separator or not rest.strip("/"):
        raise InputError(f"--url {args.url!r}: expected http://HOST:PORT")
    headers = {}
    for header in args.header:
        name, equals, value = header.partition("=")
        if not equals or not name.strip():
            raise InputError(f"--header {header!r}: expected KEY=VALUE")
        headers[name.strip()] = value.strip()
    if (key := os.environ.get("OPENAI_API_KEY")) and not any(name.lower() == "authorization" for name in headers):
        headers["Authorization"] = f"Bearer {key}"
    return Target(
        url=args.url,
        model=args.model,
        chat=args.backend == "openai-chat",
        headers=headers,
        extra_body=_extra_body(args.extra_body),
        send_slo=not args.no_send_slo,
        vocabulary=args.vocab_size,
    )


def _extra_body(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise InputError(f"--extra-body: no JSON ({error})") from None
    if not isinstance(value, dict):
        raise InputError(f"--extra-body: expected a JSON object, found {text!r}")
    return value


def _limits(args: argparse.Namespace) -> Limits:
    from slacktide.loadgen.replay import Limits

    return Limits(
        timeout=args.timeout,
        max_duration=args.max_duration,
        give_up=args.give_up,
        max_concurrency=args.max_concurrency,
    )


def workload_of(args: argparse.Namespace) -> Workload:
    """The requests, their lengths scaled."""
    import dataclasses

    import numpy as np

    from slacktide.workload.load import load_workload, parse_read_options

    workload = load_workload(
        args.trace,
        rate=args.rate,
        arrival=options.arrival(args),
        num_prompts=args.num_prompts,
        seed=args.seed,
        slo=args.slo,
        max_tokens="exact",
        options=None if args.read is None else parse_read_options(args.read),
    )
    if args.length_scale == 1.0:
        return workload

    def scaled(column: Any) -> Any:
        return np.maximum(np.rint(column * args.length_scale), 1).astype(np.int64)

    output, prompt = scaled(workload.num_output_tokens), scaled(workload.num_prompt_tokens)
    changed = dataclasses.replace(
        workload, num_prompt_tokens=prompt, num_output_tokens=output, max_tokens=output, hash_ids=None
    )
    lost = ("prefix hashes do not fit scaled lengths and are left out",) if workload.hash_ids is not None else ()
    return changed.with_notes(f"all lengths times {args.length_scale:g}", *lost)


def fitting(args: argparse.Namespace, workload: Workload, target: Target) -> Workload:
    """Deal with requests that the model's context cannot hold, as --oversized says; asks the server for it."""
    import asyncio

    import numpy as np

    from slacktide.loadgen.client import open_session
    from slacktide.loadgen.replay import describe

    async def ask() -> int | None:
        async with open_session(target.url, target.headers) as session:
            return (await describe(session, target))[1]

    longest = asyncio.run(ask())
    if longest is None or args.oversized == "send":
        return workload
    total = workload.num_prompt_tokens + workload.num_output_tokens
    rows = np.flatnonzero(total > longest)
    if not len(rows):
        return workload
    if args.oversized == "drop" and len(rows) < len(workload):
        note = f"{len(rows)} of {len(workload)} requests do not fit the model's context of {longest} and were left out"
        return workload.take(np.flatnonzero(total <= longest)).with_notes(note)
    first = int(rows[0])
    raise InputError(
        f"{workload.name}: request {first} (in order of arrival) has {workload.num_prompt_tokens[first]} prompt + "
        f"{workload.num_output_tokens[first]} output tokens, the model's context is {longest} ({len(rows)} such "
        f"requests of {len(workload)}); use --oversized drop, or --length-scale below 1"
    )


def _record(args: argparse.Namespace, workload: Workload, result: Replay, log: RunLog) -> dict[str, Any]:
    """The run's record: as every verb's, with vllm bench's keys on its top level, and what the client met."""
    from slacktide.loadgen.record import bench_keys, client_figures
    from slacktide.metrics.summary import summarize
    from slacktide.report.files import run_record

    summary = summarize(log, mode=args.slo_mode, tolerated_late_share=args.late_tolerance)
    rate = None if workload.closed is not None or not math.isfinite(workload.rate) else workload.rate
    settings = {
        "backend": args.backend,
        "request_rate": rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        "num_prompts": len(workload),
    }
    return bench_keys(summary, result, settings) | run_record(
        log,
        policy="server",
        label=args.label or result.model,
        seed=args.seed,
        summary=summary,
        url=args.url,
        trace=workload.name,
        rate=rate,
        arrival=args.arrival,
        length_scale=args.length_scale,
        slo=args.slo,
        max_model_len=result.max_model_len,
        client=client_figures(result),
    )


def _show(record: dict[str, Any]) -> None:
    from slacktide.report.tables import print_comparison

    print_comparison([record])
    for text, times in list(record["client"]["errors"].items())[:10]:  # the ten most frequent say what is wrong
        print(f"{times} x {text}")
