"""Find the highest request rate at which each policy still meets the SLO of 99 % of all arrivals.

The rate is bisected, per policy and seed, with the same requests and arrival pattern at every rate; the answer is the
mean over the seeds with a 95 % interval. With --out DIR every simulated run is noted in DIR/goodput-evaluations.jsonl:
the same command goes on where it was stopped. The results are in DIR/goodput.json.

example:
  slacktide goodput --trace azure-conv --num-prompts 2000 --profile h100/llama-3-8b --policy vllm-v1,sarathi-edf \\
    --slo ttft:1000,tbt:50
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from slacktide.cli import options
from slacktide.cli.output import plain, print_json, progress, table
from slacktide.cli.scenario import add_scenario, print_notes, scenario_of, writable

EVALUATIONS, RESULT = "goodput-evaluations.jsonl", "goodput.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    options.add_policy(parser)
    group = parser.add_argument_group("search")
    group.add_argument(
        "--target",
        type=options.share_above_zero,
        default=0.99,
        metavar="SHARE",
        help="share of the arrivals that must meet the SLO (default: 0.99)",
    )
    group.add_argument(
        "--seeds",
        type=options.count,
        default=3,
        metavar="N",
        help="searches to average, from --seed on; a trace's own times are replayed from N points (default: 3)",
    )
    group.add_argument(
        "--resolution",
        type=options.positive,
        default=0.02,
        metavar="SHARE",
        help="relative width at which the bisection ends (default: 0.02)",
    )
    add_jobs(group)
    add_scenario(parser, rates=False)


def add_jobs(group: argparse._ArgumentGroup) -> None:
    """`--jobs`; read it with `jobs`."""
    group.add_argument("--jobs", type=options.count, metavar="N", help="processes to run on (default: all cores)")


def jobs(args: argparse.Namespace) -> int:
    """How many processes to use."""
    from slacktide.search.pool import default_jobs

    return args.jobs or default_jobs()


def run(args: argparse.Namespace) -> int:
    """Search, write, print. Raises InputError."""
    from slacktide.search.bounds import bound_of_search
    from slacktide.search.goodput import find_goodput
    from slacktide.search.pool import Store

    specs, directory = options.policies(args), writable(args)
    with Store(None if directory is None else directory / EVALUATIONS) as store:
        say(store.notes)
        with progress(args, len(specs) * args.seeds, "searching") as advance:
            records = find_goodput(
                scenario_of(args), specs, target=args.target, seeds=args.seeds, resolution=args.resolution,
                jobs=jobs(args), store=store, on_done=advance,
            )  # fmt: skip
    bounds: dict[str, float | None] = {}
    for spec, record in zip(specs, records, strict=True):
        own = repr(sorted(spec.engine.items()))
        if own not in bounds:
            bounds[own] = bound_of_search(scenario_of(args), spec.engine, target=args.target, seeds=args.seeds)
        record["bound"] = bounds[own]
    if directory is not None:
        from slacktide.report.files import write_json

        write_json(directory / RESULT, plain({"runs": records, "command": args.command}))
    if args.json:
        print_json({"runs": records, "command": args.command})
        return 0
    _show(records)
    if directory is not None:
        print(f"wrote {directory / RESULT}")
    return 0


def say(notes: list[str]) -> None:
    """Remarks about the search itself, not about its results: on standard error."""
    for note in notes:
        print(f"slacktide: note: {note}", file=sys.stderr)


def _show(records: list[dict[str, Any]]) -> None:
    from slacktide.report.tables import number, percent, profile_line

    first = records[0]
    print(profile_line(first))
    print(f"highest rate at which {percent(first['target'])} % of all arrivals meet the SLO (mode {first['slo_mode']})")
    # Oracles see true output lengths: nobody can deploy them, so they are not what others are measured by.
    rivals = [r["rate"] for r in records if r["rate"] is not None and not r["oracle"]]
    best = max(rivals, default=0.0)
    rows = []
    for record in records:
        rate, low, high = record["rate"], record["rate_low"], record["rate_high"]
        rows.append(
            [
                record["label"] + (" (oracle)" if record["oracle"] else ""),
                "unlimited" if rate is None else number(rate),
                "-" if rate is None else f"{number(low)} to {number(high)}",
                "-" if rate is None or best == 0 else f"{100 * rate / best:.0f} %",
                "-" if rate is None or not record["bound"] else f"{100 * rate / record['bound']:.0f} %",
                str(len(record["evaluations"])),
                number(record["wall_time"]),
            ]
        )
    interval = "95 % interval" if any(r["confidence"] for r in records) else "bracket"
    table(["policy", "goodput req/s", interval, "vs best", "vs bound", "runs", "wall s"], rows, right=range(1, 7))
    if any(record["bound"] for record in records):
        print("vs bound: share of the rate that no policy can pass on these requests ('slacktide bound')")
    print_notes(records)
    if first["profile_label"]:
        print(
            "note: at its goodput an engine is near saturation: step times 1 % off move it by about 1 %, latencies more"
        )
