"""Pieces of the page: figures, tables, settings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from slacktide.report.charts import NAMED_LINES, Chart, draw
from slacktide.report.source import Run
from slacktide.report.tables import Column

MAX_DRAWN = 16
"""Runs with curves: more colours and dashes cannot be told apart."""


def figure(chart: Chart, *, with_lines: bool = False) -> str:
    """A chart with its title, note and numbers; `with_lines`: name many lines in a legend."""
    table = "<span></span>"  # every figure has five parts, so that neighbours align
    if chart.rows:
        table = f"<details><summary>Numbers</summary>{plain_table(chart.head, chart.rows)}</details>"
    unit = f'<span class="unit">{escape(chart.y_label)}</span>'
    note = f"<p>{escape(chart.note)}</p>"
    legend = _legend(chart, with_lines)
    caption = f"<figcaption><b>{escape(chart.title)}</b>{unit}</figcaption>"
    return f"<figure>{caption}{legend}{draw(chart)}{note}{table}</figure>"


def _legend(chart: Chart, with_lines: bool) -> str:
    """Names of what is drawn as bars or dots; few lines carry their own, and many runs have their switches."""
    named = [s for s in chart.series if s.kind in ("bars", "dots", "area") and s.run is None and not s.quiet]
    if with_lines:
        lines = [s for s in chart.series if s.kind in ("line", "step") and not s.quiet]
        named += lines if len(lines) > NAMED_LINES else []
    items = "".join(f'<span class="key {s.colour}"><i></i>{escape(s.name)}</span>' for s in named)
    return f'<div class="legend">{items}</div>'


def plain_table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """A table of texts; the first column names the row."""
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = ""
    for row in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        body += f'<tr><th scope="row">{escape(row[0])}</th>{cells}</tr>'
    named = f"<caption><span>{escape(caption)}</span></caption>" if caption else ""
    return (
        f'<div class="wide" tabindex="0"><table>{named}<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def figures_table(
    rows: Sequence[tuple[str, dict[str, Any], str]],
    columns: Sequence[Column],
    caption: str,
    first: str,
    *,
    best: bool = True,
) -> str:
    """A table of summaries: (name, summary, class of the row). Each cell carries its key and its whole value."""
    used = [c for c in columns if any(c.read(summary) is not None for _, summary, _ in rows)]
    if not used:
        return ""
    top = "".join(f'<th scope="col">{escape(_title(c))}</th>' for c in used)
    rivals = [summary for _, summary, of in rows if "oracle" not in of] if best else []
    winners = {c.title: _best([c.read(summary) for summary in rivals], c) for c in used}
    body = ""
    for name, summary, of in rows:
        cells = ""
        for column in used:
            value = column.read(summary)
            if value is None:
                cells += "<td>-</td>"
                continue
            text = column.show(value)
            mark = ' class="best"' if text == winners[column.title] and "oracle" not in of else ""
            key = escape(column.key, quote=True)
            cells += (
                f'<td data-run="{escape(name, quote=True)}" data-key="{key}" data-value="{value!r}"{mark}>{text}</td>'
            )
        swatch = f'<i class="{of}"></i>' if of else ""
        body += f'<tr><th scope="row">{swatch}{escape(name)}</th>{cells}</tr>'
    return (
        f'<div class="wide" tabindex="0"><table><caption><span>{escape(caption)}</span></caption><thead><tr>'
        f'<th scope="col">{escape(first)}</th>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _title(column: Column) -> str:
    return column.title.replace("_", " ").replace("- ", "")


def _best(values: Sequence[float | None], column: Column) -> str | None:
    """The best value as printed; None where all are alike, or none is better."""
    found = [v for v in values if v is not None]
    if column.better == 0 or len({column.show(v) for v in found}) < 2:
        return None
    return column.show(max(found, key=lambda v: v * column.better))


def charts_grid(charts: Iterable[Chart], *, with_lines: bool = False) -> str:
    """Charts side by side, as the page is wide."""
    content = "".join(figure(chart, with_lines=with_lines) for chart in charts)
    return f'<div class="charts">{content}</div>' if content else ""


def settings_of(runs: Sequence[Run]) -> str:
    """The command, and all that decided the outcome: what the runs share, then what differs."""
    commands = list(dict.fromkeys(str(run.record["command"]) for run in runs if run.record.get("command")))
    out = "".join(command_block(text) for text in commands)
    drawn = runs[:MAX_DRAWN]
    searched = any("evaluations" in run.record for run in drawn)
    hidden = _NO_SETTINGS | (_FOUND if searched else set())
    keys = list(dict.fromkeys(key for run in drawn for key in run.record if key not in hidden))
    texts = {key: [flat(run.record.get(key)) for run in drawn] for key in keys}
    shared = [[key, of[0]] for key, of in texts.items() if len(set(of)) == 1 and of[0]]
    own = [key for key, of in texts.items() if len(set(of)) > 1 and key != "policy"]
    tables = plain_table(["setting", "value"], shared)
    if own:
        rows = [[run.name, *(texts[key][i] for key in own)] for i, run in enumerate(drawn)]
        tables += plain_table(["run", *own], rows)
    return f'{out}<div class="settings">{tables}</div>'


_NO_SETTINGS = {
    "summary", "label", "notes", "command", "evaluations", "seeds", "varied", "policy_label", "error", "stopped",
    "rate_low", "rate_high", "confidence", "wall_time",
}  # fmt: skip
"""Parts of a record that are outcomes, or told elsewhere."""

_FOUND = {"rate", "bound", "steps_outside"}
"""The same of a search's record."""


def command_block(text: str) -> str:
    """A command, as it is typed."""
    return f'<pre class="command" tabindex="0">{escape(text)}</pre>'


def flat(value: Any) -> str:
    """A setting as text; nothing for None."""
    if isinstance(value, dict):
        return ", ".join(f"{key}={flat(item)}" for key, item in value.items() if item is not None)
    if isinstance(value, list):
        return ", ".join(map(flat, value))
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
