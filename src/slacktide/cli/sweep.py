"""Simulate a grid: every combination of the varied settings and the policies, on all cores.

--vary NAME=VALUES, repeatable. NAME: rate, num_prompts, max_concurrency, max_tokens, seed, slo, trace, profile,
arrival, burstiness, interference, late_tolerance, any setting of the engine (max_num_seqs, ...), or a policy's
parameter, which varies for the policies that have it; POLICY.PARAMETER means that policy alone. VALUES: 2,4,8 or 2:20:2
(from 2 to 20 in steps of 2) or 1..64*2 (1, 2, 4, ... 64); SLOs hold commas themselves and are separated by |.

With --out DIR every run is noted in DIR/sweep.jsonl as it ends: the same command goes on where it was stopped. The
results, in the order of the grid, are in DIR/sweep.csv and sweep.parquet (flat) and sweep.json (whole records).
Exit status 0: all ran; 1: some failed (the table says why); 2: all did.

example:
  slacktide sweep --trace azure-conv --num-prompts 1000 --profile h100/llama-3-8b --policy vllm-v1,sarathi-edf \\
    --slo ttft:1000,tbt:50 --vary rate=10,20 --vary max_num_batched_tokens=1024..4096*2
"""

from __future__ import annotations

import argparse
import csv
import math
from pathlib import Path
from typing import Any

from slacktide.cli import options
from slacktide.cli.goodput import add_jobs, jobs, say
from slacktide.cli.output import plain, print_json, progress, table
from slacktide.cli.scenario import add_scenario, print_notes, scenario_of, writable
from slacktide.errors import InputError

CELLS = "sweep.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    options.add_policy(parser)
    group = parser.add_argument_group("grid")
    group.add_argument(
        "--vary", action="append", required=True, metavar="NAME=VALUES", help="one varied setting; may be repeated"
    )
    add_jobs(group)
    add_scenario(parser)


def run(args: argparse.Namespace) -> int:
    """Run the grid, write, print. Raises InputError."""
    from slacktide.cli.vary import parse_vary
    from slacktide.search.pool import Store
    from slacktide.search.sweep import grid, run_grid

    specs, directory = options.policies(args), writable(args)
    cells = grid(scenario_of(args), specs, parse_vary(args.vary, specs))
    with Store(None if directory is None else directory / CELLS) as store:
        say(store.notes)
        with progress(args, len(cells), "simulating") as advance:
            records = run_grid(cells, jobs=jobs(args), store=store, on_done=advance)
    failed = [record for record in records if record["error"] is not None]
    if directory is not None:
        _write(directory, records, args.command)
    if len(failed) == len(records):
        raise InputError(f"all {len(records)} runs failed; {failed[0]['label']}: {failed[0]['error']}")
    if args.json:
        print_json({"runs": records, "command": args.command})
    else:
        _show(records)
        if directory is not None:
            print(f"wrote {directory / 'sweep.csv'}, sweep.parquet, sweep.json")
    return 1 if failed else 0


def _write(directory: Path, records: list[dict[str, Any]], command: str) -> None:
    from slacktide.report.files import dump, write_files
    from slacktide.search.sweep import flat

    columns, whole = flat(records), plain({"runs": records, "command": command})
    write_files(
        directory,
        {
            "sweep.csv": lambda path: _write_csv(path, columns),
            "sweep.parquet": lambda path: _write_parquet(path, columns),
            "sweep.json": lambda path: path.write_text(dump(whole), encoding="utf-8"),
        },
    )


def _write_csv(path: Path, columns: dict[str, list[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def _write_parquet(path: Path, columns: dict[str, list[Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def column(values: list[Any]) -> Any:
        kinds = {type(value) for value in values if value is not None}
        if kinds == {int, float}:  # a column has one type
            values = [None if value is None else float(value) for value in values]
        elif len(kinds) > 1:
            values = [None if value is None else str(value) for value in values]
        return pa.array(values)

    pq.write_table(pa.table({name: column(values) for name, values in columns.items()}), path)


_COLUMNS = {
    "SLO met %": "attainment",
    "good req/s": "request_goodput",
    "TTFT p99": "p99_ttft_ms",
    "TBT p99": "p99_itl_ms",
    "req/s": "request_throughput",
    "out tok/s": "output_throughput",
    "preemptions": "num_preemptions",
}
"""Head and figure of each column of the table; times in milliseconds."""


def _show(records: list[dict[str, Any]]) -> None:
    from slacktide.report.tables import number, percent

    def cell(record: dict[str, Any], key: str) -> str:
        value = record["summary"].get(key)
        if value is None:
            return "-"
        return percent(value) if key == "attainment" else str(value) if isinstance(value, int) else number(value)

    titles = list(records[0]["varied"])
    rows = []
    for record in records:
        name = record["policy_label"] + (" (oracle)" if record["oracle"] else "")
        row = [*(_short(record["varied"][title]) for title in titles), name]
        figures = [cell(record, key) for key in _COLUMNS.values()]
        rows.append(row + (figures if record["error"] is None else ["failed", *["-"] * (len(figures) - 1)]))
    heads = [*titles, "policy", *_COLUMNS]
    table(heads, rows, right=range(len(titles) + 1, len(heads)))
    failures: dict[str, list[str]] = {}
    for record in records:
        if record["error"] is not None:
            failures.setdefault(record["error"], []).append(record["label"])
    for error, labels in failures.items():
        more = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
        print(f"failed: {labels[0]}{more}: {error}")
    print_notes(records)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return "inf" if math.isinf(value) else f"{value:g}"
    return "-" if value is None else str(value)
