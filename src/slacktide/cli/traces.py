"""List the packaged traces: size, arrival times or lengths alone, licence and source.

`--trace` also takes a file (its format is found out) and synthetic:prompt=512,output=256.

example:
  slacktide traces
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from slacktide.cli.output import emit, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Nothing beside what every verb takes."""


def run(args: argparse.Namespace) -> int:
    """Print the traces."""
    from slacktide.workload.packaged import list_traces

    found = [dataclasses.asdict(trace) for trace in list_traces()]
    emit(args, "traces", {"traces": found}, lambda: _show(found))
    return 0


def _show(found: list[dict[str, Any]]) -> None:
    rows = []
    for trace in found:
        times = "yes" if trace["timed"] else "no"
        rows.append([trace["name"], f"{trace['rows']:,}", times, trace["description"], trace["licence"]])
    table(["trace", "requests", "times", "what it is", "licence"], rows, right=[1], whole=[0])
    print("Traces without arrival times need --rate.")
    print("Sources and attributions: slacktide traces --json")
