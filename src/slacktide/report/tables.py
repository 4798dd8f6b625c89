"""Comparison of runs as tables: two stacked ones that fit a 100-column terminal, or Markdown.

The best value of a column is marked. Oracle policies, which see true output lengths, are named as such and never best:
nobody can deploy them. rich is imported when a table is drawn.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

Record = dict[str, Any]

WIDTH = 100
"""Columns of a table outside a terminal; what a terminal has at least when it is not the default 80."""

NAME_WIDTH = 16
"""Least room for a policy's name; longer ones are folded."""

MARK = "*"
"""Marks the best of a column where there is no bold type."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column: title, how to read a number from a summary, how to print it, and which end is good."""

    title: str
    """Up to two words for two lines of a table's head."""
    read: Callable[[dict[str, Any]], float | None]
    show: Callable[[float], str]
    better: int = 0
    """+1 more is better, -1 less is better, 0 neither (a fact, not a merit)."""
    key: str = ""
    """The figure's name in a summary, where it has one; part of a figure after a dot."""


def _column(title: str, key: str, show: Callable[[float], str], better: int = 0) -> Column:
    """A column of one figure of the summary, or of a part of one ("step_mode_time_share.mixed")."""
    name, _, part = key.partition(".")

    def read(summary: dict[str, Any]) -> float | None:
        value = summary.get(name)
        return (value or {}).get(part) if part else value

    return Column(title, read, show, better, key)


def percent(value: float) -> str:
    """A share 0..1 as percent. Only a whole is "100": 99.96 % must not look like it, nor a little like nothing."""
    text = f"{100 * value:.1f}"
    if text == "100.0":
        return "100" if value >= 1 else ">99.9"
    return "<0.1" if text == "0.0" and value > 0 else text


def number(value: float) -> str:
    """Three digits or more: 7.32, 73.2, 732, 7,321."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def count(value: float) -> str:
    """A whole number."""
    return f"{value:,.0f}"


SERVED = (
    _column("SLO met_%", "attainment", percent, +1),
    _column("good req/s", "request_goodput", number, +1),
    _column("TTFT p50", "p50_ttft_ms", number, -1),
    _column("TTFT p90", "p90_ttft_ms", number, -1),
    _column("TTFT p99", "p99_ttft_ms", number, -1),
    _column("TBT p50", "p50_itl_ms", number, -1),
    _column("TBT p99", "p99_itl_ms", number, -1),
    _column("max gap", "max_gap_ms", number, -1),
    _column("TPOT p50", "p50_tpot_ms", number, -1),
)
"""What users of the server saw. Milliseconds."""

ENGINE = (
    _column("req/s", "request_throughput", number, +1),
    _column("output tok/s", "output_throughput", count, +1),
    _column("failed", "failed", count, -1),
    _column("preemp- tions", "num_preemptions", count, -1),
    _column("redone %", "preemption_tax", percent, -1),
    _column("decode", "step_mode_time_share.decode", percent),
    _column("prefill", "step_mode_time_share.prefill", percent),
    _column("mixed", "step_mode_time_share.mixed", percent),
    _column("run s", "sim_duration", number),
    _column("wall s", "wall_time", number),
)
"""What the engine did. decode, prefill, mixed: shares of busy time by kind of step."""

_TITLES = (
    (SERVED, "Served (times in ms)"),
    (ENGINE, "Engine (decode, prefill, mixed: steps of this kind, % of busy time)"),
)


def _names(records: Sequence[Record]) -> list[str]:
    return [
        f"{record.get('label') or record.get('policy')}{' (oracle)' if _oracle(record) else ''}" for record in records
    ]


def _oracle(record: Record) -> bool:
    return bool(record.get("oracle"))


def _cells(records: Sequence[Record], column: Column, *, plain: bool = False) -> Cells:
    """Printed value, and whether it is the best of those that can be deployed: all of a tie, none where all tie."""
    values = [column.read(record.get("summary") or {}) for record in records]
    rivals = [v for v, record in zip(values, records, strict=True) if v is not None and not _oracle(record)]
    # Compared as printed: a difference that the reader cannot see is a tie.
    decided = column.better != 0 and len({column.show(v) for v in rivals}) > 1
    best = column.show(max(rivals, key=lambda v: v * column.better)) if decided else None
    cells = []
    for value, record in zip(values, records, strict=True):
        text = "-" if value is None else column.show(value)
        is_best = text == best and not _oracle(record)
        cells.append((text + (MARK if is_best else " ") if plain and decided else text, is_best))
    return cells


def _used(records: Sequence[Record], columns: Sequence[Column]) -> list[Column]:
    """Columns that some run has a value for: a vllm bench result knows nothing of steps."""
    return [c for c in columns if any(c.read(record.get("summary") or {}) is not None for record in records)]


def headline(records: Sequence[Record]) -> list[str]:
    """Lines above the tables: profile and what it rests on, and how requests are judged."""
    profiles = list(dict.fromkeys(profile_line(record) for record in records if record.get("profile")))
    modes = list(dict.fromkeys(_judged(record.get("summary") or {}) for record in records))
    lines = [*profiles]
    return lines + [line for line in modes if line]


def profile_line(record: Record) -> str:
    """Profile, what it rests on, how wrong it has been: `profile: mine [fitted]; step times off by decode 1.2 %`."""
    label, errors = record.get("profile_label"), record.get("profile_errors")
    line = f"profile: {record['profile']}" + (f" [{label}]" if label else "")
    line += f"; step times off by {errors}" if errors else ""
    found = record.get("profile_validation")
    return line + (f"; simulated against measured: {found}" if found else "; not validated" if label else "")


def _judged(summary: dict[str, Any]) -> str:
    if summary.get("attainment") is None:
        return "SLO: none to judge by" if "slo_mode" in summary else ""
    share = summary.get("tolerated_late_share") or 0.0
    late = f", {100 * share:g} % of later tokens may be late" if share else ""
    return f"SLO: mode {summary.get('slo_mode', 'deadline')}{late}; a share of all arrivals"


def footnotes(records: Sequence[Record]) -> list[str]:
    """Lines below the tables: oracles, requests nobody could judge, and the runs' own notes."""
    lines = []
    if any(_oracle(record) for record in records):
        lines.append("oracle: sees true output lengths; a bound, not a policy to deploy, and never marked best")
    said: dict[str, list[str]] = {}
    for name, record in zip(_names(records), records, strict=True):
        summary = record.get("summary") or {}
        if summary.get("excluded"):
            lines.append(f"{name}: {summary['excluded']} requests open at the end, no deadline passed: left out")
        for note in summary.get("notes") or ():
            said.setdefault(note, []).append(name)
    return lines + [
        note if len(names) == len(records) else f"{', '.join(names)}: {note}" for note, names in said.items()
    ]


def print_comparison(records: Sequence[Record], file: IO[str] | None = None) -> None:
    """Print the tables: on a terminal with its width and bold for the best, else as plain text, 100 columns wide."""
    from rich.console import Console

    console = Console(file=file)
    if not console.is_terminal:
        console.file.write(comparison_text(records))
        return
    _draw(console, records, plain=False)


def comparison_text(records: Sequence[Record], width: int = WIDTH) -> str:
    """The tables as plain text, no control codes; the best of a column carries a star."""
    from rich.console import Console

    out = io.StringIO()
    _draw(Console(file=out, width=width, color_system=None, force_terminal=False), records, plain=True)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n") + "\n"


def _draw(console: Console, records: Sequence[Record], *, plain: bool) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    for line in headline(records):
        console.print(Text(line))
    names = _names(records)
    style = box.Box(_PLAIN_BOX, ascii=True) if plain else box.SIMPLE_HEAD
    longest = max(len(name) for name in [*names, "policy"])
    for columns, title in _TITLES:
        drawn = [(column, _cells(records, column, plain=plain)) for column in _used(records, columns)]
        room = console.width - _EDGE
        name_width = min(longest, max(NAME_WIDTH, room - sum(_width(*column) for column in drawn)))
        for part in _parts(drawn, room - name_width):
            console.print(Text(title, style="" if plain else "bold"))  # a table's own title is cut to its width
            table = Table(box=style)
            table.padding, table.pad_edge = (0, 0, 0, 1), False
            table.add_column("\npolicy", overflow="fold", width=name_width)
            for column, _ in part:
                table.add_column("\n".join(_head(column)), justify="right", no_wrap=True)
            for row, name in enumerate(names):
                texts = (cells[row] for _, cells in part)
                best = "" if plain else "bold green"
                folded = _folded(name, name_width)
                table.add_row(Text(folded), *(Text(text, style=best if is_best else "") for text, is_best in texts))
            console.print(table)
    for line in footnotes(records):
        console.print(Text(line), style="" if plain else "dim")


Cells = list[tuple[str, bool]]


def _head(column: Column) -> list[str]:
    words = column.title.replace("_", " ") if " " not in column.title else column.title
    upper, _, lower = words.partition(" ")
    return [upper, lower.replace("_", " ")] if lower else ["", upper]


def _folded(name: str, width: int) -> str:
    """A long name over several lines, broken behind a colon or comma: half of a number would be another number."""
    lines = [""]
    for piece in re.split("(?<=[:,])", name):
        if lines[-1] and len(lines[-1]) + len(piece) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(lines)


def _parts(drawn: list[tuple[Column, Cells]], room: int) -> list[list[tuple[Column, Cells]]]:
    """Columns in tables that fit `room` characters each, in order: rich would cut what does not fit, in silence."""
    parts: list[list[tuple[Column, Cells]]] = []
    left = 0
    for column, cells in drawn:
        width = _width(column, cells)
        if not parts or width > left:
            parts.append([])
            left = room
        parts[-1].append((column, cells))
        left -= width
    return parts


def _width(column: Column, cells: Cells) -> int:
    return max(map(len, [*_head(column), *(text for text, _ in cells)])) + _GAP


_GAP, _EDGE = 2, 2  # characters between two columns (padding and rule), and at the edges of a table
_PLAIN_BOX = "    \n    \n -- \n    \n    \n    \n    \n    \n"  # one line of dashes below the head, nothing else


def markdown(records: Sequence[Record]) -> str:
    """The tables in Markdown; the best of a column in bold."""
    lines = [*headline(records), ""]
    names = [name.replace("|", "\\|") for name in _names(records)]
    for columns, title in _TITLES:
        used = _used(records, columns)
        if not used:
            continue
        titles = [" ".join(_head(column)).strip().replace("- ", "") for column in used]
        lines += [f"**{title}**", "", f"| policy | {' | '.join(titles)} |", f"|---|{'---:|' * len(used)}"]
        cells = [_cells(records, column) for column in used]
        for row, name in enumerate(names):
            values = [f"**{text}**" if best else text for text, best in (column[row] for column in cells)]
            lines.append(f"| {name} | {' | '.join(values)} |")
        lines.append("")
    lines += [f"- {line}" for line in footnotes(records)]
    return "\n".join(lines).strip("\n") + "\n"
