"""One self-contained HTML page from a result: the answer first, then the charts and tables behind it.

The page works without scripts; page.js adds reading values off the charts, switching runs and the theme.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from slacktide import __version__
from slacktide.metrics.late import Lateness, lateness
from slacktide.metrics.slo import Verdicts, judge
from slacktide.report import curves
from slacktide.report.answer import answer
from slacktide.report.charts import Chart, stroke
from slacktide.report.files import write_files
from slacktide.report.html_parts import MAX_DRAWN, charts_grid, figures_table, settings_of
from slacktide.report.html_searches import Section, advise_sections, goodput_sections, sweep_sections, validate_sections
from slacktide.report.late_table import worst_table
from slacktide.report.source import Run, Source
from slacktide.report.tables import ENGINE, SERVED, Column, count, footnotes, headline, percent

MAX_NOTES = 4
"""Remarks before the rest folds away: the charts should be seen without scrolling."""

MAX_ENGINES = 8
"""Runs whose engine is drawn and whose worst requests are listed: some 60 kB each."""


def write_html(path: str | os.PathLike[str], source: Source) -> int:
    """Write the page, whole or not at all; returns its size in bytes. Raises InputError naming the path."""
    data = page(source).encode()
    target = Path(path)
    write_files(target.parent, {target.name: lambda temporary: temporary.write_bytes(data)})
    return len(data)


def page(source: Source) -> str:
    """The page. The same result gives the same page."""
    sections = _SECTIONS.get(source.kind, _runs_sections)(source)
    text = answer(source)
    title = f"{source.title}: slacktide report" if source.title else "slacktide report"
    notes = _notes(source)
    switches = _switches(source)
    body = "".join(
        f'<section aria-labelledby="h{i}"><h2 id="h{i}">{escape(name)}</h2>{content}</section>'
        for i, (name, content) in enumerate(sections)
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{_resource('page.css')}</style></head><body>"
        '<a class="skip" href="#main">Skip to the answer</a>'
        f'<header><span class="brand">slacktide report</span><span class="what">{escape(source.title)}</span>'
        '<button id="theme" type="button" hidden>Dark</button></header>'
        f'<main id="main"><h1>{escape(text)}</h1>{notes}{switches}{body}</main>'
        f"<footer>slacktide {escape(__version__)}. Definitions of all figures: docs/metrics.md. "
        "The page is complete in itself; nothing is loaded from elsewhere.</footer>"
        '<div id="tip" role="status" aria-live="polite" hidden></div>'
        f"<script>{_resource('page.js')}</script></body></html>"
    )


def _resource(name: str) -> str:
    return resources.files("slacktide.report").joinpath(name).read_text(encoding="utf-8")


def _notes(source: Source) -> str:
    """What the profile rests on, how requests are judged, and the runs' own remarks."""
    records = [run.record for run in source.runs]
    if source.kind == "runs":
        lines = [*headline(records), *footnotes(records)]
    else:
        profiles = {f"profile: {r['profile']} [{r['profile_label']}]" for r in records if r.get("profile_label")}
        lines = sorted(profiles)
    said: dict[str, list[str]] = {}
    for run in source.runs:
        for note in run.record.get("notes") or ():
            said.setdefault(str(note), []).append(run.name)
    several = len(records)
    notes = [f"{', '.join(names)}: {note}" if len(names) < several else note for note, names in said.items()]
    notes += [str(note) for note in source.data.get("notes") or ()]
    items = [f"<li>{escape(line)}</li>" for line in lines + [f"note: {n}" for n in notes if n not in lines]]
    top, rest = items[:MAX_NOTES], items[MAX_NOTES:]
    more = f"<details><summary>{len(rest)} more notes</summary><ul>{''.join(rest)}</ul></details>" if rest else ""
    return f'<div class="notes"><ul>{"".join(top)}</ul>{more}</div>' if items else ""


def _switches(source: Source) -> str:
    """One switch per run: it shows and hides the run in all charts, and is their legend."""
    if source.kind not in ("runs", "goodput") or len(source.runs) < 2:
        return ""
    buttons = "".join(
        f'<button type="button" class="switch" data-run="{i}" aria-pressed="true"><svg width="26" height="8" '
        f'aria-hidden="true"><line class="line {curves.colour(i)}" style="{stroke(i)}" x2="26" y1="4" y2="4"/></svg>'
        f"{escape(run.name)}</button>"
        for i, run in enumerate(source.runs[:MAX_DRAWN])
    )
    return f'<div class="switches" role="group" aria-label="Runs shown in the charts">{buttons}</div>'


def _named_summaries(runs: Sequence[Run]) -> list[tuple[str, dict[str, Any], str]]:
    return [
        (run.name, run.summary, f"{curves.colour(i)}{' oracle' if run.record.get('oracle') else ''}")
        for i, run in enumerate(runs)
    ]


# ---- runs and comparisons --------------------------------------------------------------------------------------------


def _runs_sections(source: Source) -> list[Section]:
    runs = source.runs[:MAX_DRAWN]
    tables = figures_table(_named_summaries(source.runs), SERVED, "Times in milliseconds.", "policy")
    engine = figures_table(_named_summaries(source.runs), ENGINE, "decode, prefill, mixed: % of busy time.", "policy")
    sections: list[Section] = [("Who was served, and how fast", tables)]
    drawn = [(i, run, run.log) for i, run in enumerate(runs) if run.log is not None and run.log.n]
    verdicts: list[Verdicts] = []
    lates: list[Lateness] = []
    if drawn:
        logs = [log for _, _, log in drawn]
        named = [run for _, run, _ in drawn]
        for _, run, log in drawn:
            mode, share = run.summary.get("slo_mode", "deadline"), run.summary.get("tolerated_late_share") or 0.0
            verdicts.append(judge(log, mode, share))
            lates.append(lateness(log))
        sections[0] = (sections[0][0], tables + _intervals(named, logs, verdicts))
        places = [i for i, _, _ in drawn]
        charts = [curves.ttft_chart(named, logs), curves.tbt_chart(named, logs)]
        sections.append(("How long users waited", charts_grid(_recoloured(chart, places) for chart in charts)))
        over = [curves.in_system_chart(named, logs)]
        if any(verdict.has_slo.any() for verdict in verdicts):
            over.insert(0, curves.violations_chart(named, logs, verdicts))
            slack = curves.slack_chart(named, lates)
            over += [slack] if slack is not None else []
        sections.append(("Over time", charts_grid(_recoloured(chart, places) for chart in over)))
    sections.append(("What the engine did", engine))
    best = max(
        (run for _, run, _ in drawn[:MAX_ENGINES]), key=lambda run: run.summary.get("attainment") or 0, default=None
    )
    for j, (_, run, log) in enumerate(drawn[:MAX_ENGINES]):
        charts = curves.step_charts(f"run{j}", log)
        content = charts_grid(charts) + worst_table(run, verdicts[j], lates[j])
        heading = f"{run.name}: {'engine over time, and ' if charts else ''}its latest requests"
        sections[-1] = (sections[-1][0], sections[-1][1] + _fold(heading, content, run is best))
    if len(drawn) > MAX_ENGINES:
        more = f"<p>Engines of the first {MAX_ENGINES} runs; for another, make a report of its own directory.</p>"
        sections[-1] = (sections[-1][0], sections[-1][1] + more)
    sections += [(title, table) for title, key in (("By class", "classes"), ("By tenant", "tenants"))
                 if (table := _groups(source.runs, key))]  # fmt: skip
    return [*sections, ("Settings, and the command to repeat it", settings_of(source.runs))]


def _recoloured(chart: Chart, places: Sequence[int]) -> Chart:
    """Runs without a log leave their colour unused: series count only those drawn."""
    if list(places) == list(range(len(places))):
        return chart
    series = [
        s if s.run is None else replace(s, run=places[s.run], colour=curves.colour(places[s.run])) for s in chart.series
    ]
    return replace(chart, series=series)


def _fold(heading: str, content: str, is_open: bool) -> str:
    return f'<details class="run"{" open" if is_open else ""}><summary>{escape(heading)}</summary>{content}</details>'


def _intervals(runs: Sequence[Run], logs: Sequence[Any], verdicts: Sequence[Verdicts]) -> str:
    """Bars of attainment with the interval that one run's traffic leaves open."""
    rows = ""
    for i, (run, log, verdict) in enumerate(zip(runs, logs, verdicts, strict=True)):
        share = run.summary.get("attainment")
        if share is None:
            continue
        found = curves.attainment_interval(verdict, log)
        band = text = ""
        if found is not None:
            low, high = found
            band = f'<u style="left:{100 * low:.2f}%;width:{100 * (high - low):.2f}%"></u>'
            text = f" ({percent(low)} to {percent(high)})"
        rows += (
            f'<div class="bar {curves.colour(i)} r{i}"><span>{escape(run.name)}</span>'
            f'<div><i style="width:{100 * share:.2f}%"></i>{band}</div>'
            f"<b>{percent(share)} %<small>{text}</small></b></div>"
        )
    if not rows:
        return ""
    note = (
        "In brackets: 95 % interval by means of 20 batches of consecutive arrivals, at least Wilson's; other traffic "
    )
    note += "may differ more."
    told = f"<p>{note}</p>" if "<u " in rows else ""
    return f'<div class="bars"><h3>Requests that met their SLO</h3>{rows}{told}</div>'


_GROUP = (
    Column("requests", lambda s: s.get("num_requests"), count, key="num_requests"),
    *(column for column in SERVED if column.key in ("attainment", "request_goodput", "p50_ttft_ms", "p99_ttft_ms")),
    *(column for column in SERVED if column.key in ("p99_itl_ms", "max_gap_ms")),
    Column("preemptions", lambda s: s.get("num_preemptions"), count, -1, key="num_preemptions"),
)


def _groups(runs: Sequence[Run], key: str) -> str:
    """One table per run over its classes or tenants."""
    out = ""
    for run in runs[:MAX_DRAWN]:
        groups = run.summary.get(key) or {}
        rows = [(name, figures, "") for name, figures in groups.items()]
        if rows:
            out += figures_table(rows, _GROUP, run.name, "class" if key == "classes" else "tenant", best=False)
    return out


_SECTIONS: dict[str, Callable[[Source], list[Section]]] = {
    "goodput": goodput_sections,
    "sweep": sweep_sections,
    "advise": advise_sections,
    "validate": validate_sections,
}
