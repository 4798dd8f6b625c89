"""The dominance table: `tide` against every baseline at its best setting, cell by cell; and what no policy can pass.

make bench NAME=dominance [ARGS="--jobs 2 --only baselines|tide|bounds --pieces 20 --full"]

Resumable: each finished piece is one line of results/*.jsonl and is not measured again; README.md is written from
these files, unfinished cells as such. `--only tide` measures a changed `tide` again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from cells import Cell, biased, fraction, full, half, varying
from pieces import THROUGHPUT_LOADS, THROUGHPUT_PROFILES, Piece, run, step_of
from policies import BIASED, FAMILIES, THROUGHPUT, TIDE, variants
from report import render

from slacktide.core.policy import names
from slacktide.search.pool import Store, run_tasks

HERE = Path(__file__).parent
RESULTS = HERE / "results"
SIDES = ("baselines", "bounds", "tide")


def rows_of(side: str) -> list[dict[str, Any]]:
    """What a side has measured; read while another process may write to the file."""
    path = RESULTS / f"{side}.jsonl"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def known(kind: str, side: str = "baselines") -> dict[str, list[dict[str, Any]]]:
    """Rows of a kind by cell."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows_of(side):
        if row["kind"] == kind:
            found.setdefault(row["cell"], []).append(row)
    return found


def mean(row: dict[str, Any]) -> float:
    """Mean goodput of a row over the test seeds."""
    return float(sum(row["rates"]) / len(row["rates"]))


def searched(kind: str, cells: list[Cell], families: tuple[str, ...]) -> Iterator[Piece]:
    """Goodput pieces. A rival starts by itself, or where it was with the front of its grid; `tide` starts its search
    where the best rival ended."""
    best = known("goodput")
    rows = {row["key"]: row for row in rows_of("baselines")}
    for cell in cells:
        for family in families:
            rates = [mean(row) for row in best.get(replace(cell, bias=None).name, []) if mean(row) > 0]
            given = (("start", step_of(max(rates))),) if family == TIDE and rates else ()
            piece = Piece(kind, cell, family, given)
            lengths = range(len(piece.grid) - 1, 0, -1) if kind == "goodput" else ()
            before = next((n for n in lengths if piece.key_with(piece.grid[:n]) in rows), None)
            if before is not None:
                row = rows[piece.key_with(piece.grid[:before])]
                piece = replace(piece, given=(*given, ("earlier", {**row, "grid": before})))
            yield piece


def overloads(cells: list[Cell], families: tuple[str, ...]) -> Iterator[Piece]:
    """Overload pieces of the cells whose rivals are all measured and not all at 0."""
    rivals = known("goodput")
    for cell in cells:
        rows = {row["family"]: row for row in rivals.get(cell.name, [])}
        rate = max((row["rates"][0] for row in rows.values()), default=0.0)
        if len(rows) < len(FAMILIES) or rate == 0:
            continue
        for family in families:
            variant = variants(TIDE, cell.mode)[0] if family == TIDE else rows[family]["variant"]
            yield Piece("overload", cell, family, (("rate", rate), ("variant", variant)))


def throughputs(families: tuple[str, ...]) -> Iterator[Piece]:
    """Throughput pieces: the cell's load is PROMPT/OUTPUT tokens."""
    for profile in THROUGHPUT_PROFILES:
        for prompt, output in THROUGHPUT_LOADS:
            for family in families:
                yield Piece("throughput", Cell(profile, f"{prompt}/{output}", "none"), family)


def pieces(side: str, cells: list[Cell]) -> Iterator[list[Piece]]:
    """Pieces of a side in phases; a later phase may need an earlier one's rows."""
    if side == "bounds":
        yield [Piece("bound", cell, "bound") for cell in [*cells, *varying()]]
        return
    rivals = tuple(FAMILIES)
    tide = (TIDE,)
    yield list(searched("goodput", cells, tide if side == "tide" else rivals))
    yield list(throughputs(tide if side == "tide" else THROUGHPUT))
    yield list(overloads(half() if cells == fraction() else cells, tide if side == "tide" else rivals))
    yield list(searched("goodput", varying(), tide if side == "tide" else rivals))
    yield list(searched("biased", biased(), tide if side == "tide" else BIASED))


def measure(side: str, cells: list[Cell], jobs: int, most: int | None) -> None:
    """Run what is missing of a side, up to `most` pieces."""
    with Store(RESULTS / f"{side}.jsonl") as store:
        left = most
        for phase in pieces(side, cells):
            todo = [piece for piece in phase if store.get(piece.key) is None][:left]
            left = None if left is None else left - len(todo)

            def then(key: str, row: dict[str, Any]) -> list[Any]:
                store.put(key, row)
                print(key, row.get("variant", ""), row.get("rates", row.get("attainment", "")), flush=True)
                return []

            run_tasks(run, [(piece.key, piece) for piece in todo], then, min(jobs, max(len(todo), 1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=(*SIDES, "report"), help="one side; without it all, one after the other")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--pieces", type=int, help="stop after so many pieces of a side")
    parser.add_argument("--full", action="store_true", help="all 288 cells, after the fraction of 36")
    given = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    for side in (given.only,) if given.only else SIDES:
        if side == TIDE and not version_known():
            parser.error("no policy tide in slacktide/core/policies")
        if side != "report":
            measure(side, full() if given.full else fraction(), given.jobs, given.pieces)
    render(HERE)


def version_known() -> bool:
    """Whether there is a `tide` to measure."""
    return TIDE in names()


if __name__ == "__main__":
    main()
