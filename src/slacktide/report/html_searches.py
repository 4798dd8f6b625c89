"""Sections of the page for results without runs: searches, sweeps, advices, validations."""

from __future__ import annotations

from typing import Any

from slacktide.report import curves, searches
from slacktide.report.answer import verdict_of
from slacktide.report.html_parts import (
    charts_grid,
    command_block,
    figure,
    figures_table,
    flat,
    plain_table,
    settings_of,
)
from slacktide.report.source import Source
from slacktide.report.tables import SERVED, Column, count, number, percent

Section = tuple[str, str]
"""Heading and content."""


def goodput_sections(source: Source) -> list[Section]:
    """A goodput search: the answer per policy, and attainment against the rate."""
    runs = source.runs
    columns = (
        Column("goodput req/s", lambda r: r.get("rate"), number, +1, key="rate"),
        Column("low", lambda r: r.get("rate_low"), number, key="rate_low"),
        Column("high", lambda r: r.get("rate_high"), number, key="rate_high"),
        Column("% of bound", _of_bound, percent, +1, key="bound"),
        Column("runs", lambda r: len(r["evaluations"]), count, key="evaluations"),
    )
    rows = [(run.name, run.record, curves.colour(i)) for i, run in enumerate(runs)]
    target = f"Highest rate at which {percent(runs[0].record['target'])} % of all arrivals meet the SLO."
    if any(_of_bound(run.record) is not None for run in runs):
        target += " Bound: the rate that no policy can pass on these requests (slacktide bound)."
    table = figures_table(rows, columns, target, "policy")
    chart = f'<div class="charts one">{figure(searches.goodput_chart(runs))}</div>'
    return [
        ("Goodput", table + chart),
        ("Settings, and the command to repeat it", _told(source) + settings_of(runs)),
    ]


def _of_bound(record: dict[str, Any]) -> float | None:
    rate, bound = record.get("rate"), record.get("bound")
    return rate / bound if type(bound) is float and bound > 0 and rate is not None else None


def sweep_sections(source: Source) -> list[Section]:
    """A sweep: figures across the grid, and every run."""
    runs = source.runs
    wanted = (
        ("attainment", "Requests that met their SLO", "share of arrivals"),
        ("request_goodput", "Requests served in time", "requests/s"),
        ("p99_ttft_ms", "TTFT, 99th percentile", "ms"),
        ("p99_itl_ms", "TBT, 99th percentile", "ms"),
    )
    charts = [searches.sweep_chart(runs, *names) for names in wanted]
    drawn = [chart for chart in charts if chart is not None and chart.series]
    rows = [(run.name, run.summary, "") for run in runs if run.record.get("error") is None]
    failed = [[run.name, str(run.record["error"])] for run in runs if run.record.get("error") is not None]
    sections = [("Across the grid", charts_grid(drawn, with_lines=True))] if drawn else []
    # No best of a column: fewer requests a second are always served faster.
    sections.append(("All runs", figures_table(rows, SERVED, "Times in milliseconds.", "run", best=False)))
    if failed:
        sections.append(("Failed", plain_table(["run", "why"], failed)))
    return [*sections, ("Settings, and the command to repeat it", _told(source) + settings_of(runs[:1]))]


def advise_sections(source: Source) -> list[Section]:
    """An advice: both modes, and the numbers behind it."""
    data = source.data
    rows = [(mode, figures, "") for mode, figures in data["simulated"].items()]
    table = figures_table(rows, _ADVISED, "Simulated with the advised settings.", "mode")
    stock = data.get("stock_vllm") or {}
    flags = (
        f"<p>Without our plug-in, the best stock settings tried:</p>{command_block(stock['command'])}"
        if stock.get("command")
        else ""
    )
    return [
        ("Both modes", table + charts_grid(searches.advise_charts(data)) + flags),
        ("The numbers behind it", f'<div class="settings">{_facts(data)}</div>{_told(source)}'),
    ]


def _facts(data: dict[str, Any]) -> str:
    """The advice's own figures, each with what it means."""

    def crossing(n: int | None) -> str:
        return "never" if n is None else "always" if n == 0 else f"from {n:,}"

    low, high = data["lead_interval"]
    lead = f"{100 * data['lead']:+.1f} % (95 %: {100 * low:+.1f} to {100 * high:+.1f} %)"
    wins = crossing(data["n_cross"]) + (" requests on" if data["n_cross"] else "")
    first, last = map(crossing, data["n_cross_interval"])
    rows = [
        ["lead", lead, "throughput of exclusive batching over mixed, by the closed forms"],
        ["lead, simulated", f"{100 * data['lead_simulated']:+.1f} %", "the same in the simulated runs above"],
        ["chance", f"{percent(data['chance_exclusive'])} %", "that exclusive is faster, by the closed forms"],
        ["exclusive wins", f"{wins} (95 %: {first} to {last})", "requests in the system"],
        ["theta 0", flat(data["theta0"]), "best share of slots to have free before prompts get steps of their own"],
        ["k", flat(data.get("k")), "the same in slots, as whole prompts fit the token budget"],
        ["N", flat(data.get("slots")), "slots: requests that run at once"],
        ["memory-safe N", flat(data.get("n_safe")), "requests whose KV fits with near certainty"],
        ["token budget", flat(data.get("token_budget")), "most tokens of a step"],
        ["concurrency", flat(data["concurrency"]), "requests in the system, running and waiting"],
        ["load", flat(data.get("load")), "mean tokens of a request; requests simulated"],
        ["decided by", flat(data["decided_by"]), "what the two modes were compared by"],
        ["step costs", flat(data.get("costs")), f"seconds, and seconds a token: {flat(data.get('costs_source'))}"],
        ["error of the costs", f"{100 * data['fit_error']:.1f} %", "median over the steps they fit"],
    ]
    return plain_table(["figure", "value", "meaning"], rows)


_ADVISED = (
    Column("req/s", lambda s: s.get("request_throughput"), number, +1, key="request_throughput"),
    Column("total tok/s", lambda s: s.get("total_token_throughput"), count, +1, key="total_token_throughput"),
    Column("mean TTFT ms", lambda s: s.get("mean_ttft_ms"), number, -1, key="mean_ttft_ms"),
    Column("mean TPOT ms", lambda s: s.get("mean_tpot_ms"), number, -1, key="mean_tpot_ms"),
    Column("p99 TBT ms", lambda s: s.get("p99_itl_ms"), number, -1, key="p99_itl_ms"),
    Column("SLO met %", lambda s: s.get("attainment"), percent, +1, key="attainment"),
)


def validate_sections(source: Source) -> list[Section]:
    """A validation: each figure simulated and measured, then the whole summaries."""
    data = source.data
    head = ["figure", "verdict", "error", "bar", "measured", "simulated", "spread"]
    rows = []
    for row in data["rows"]:
        cells = ["-" if row[name] is None else number(row[name]) for name in ("measured", "simulated", "spread")]
        shares = ["-" if row[name] is None else f"{100 * row[name]:+.1f} %" for name in ("error", "bar")]
        rows.append([row["figure"], verdict_of(row), shares[0], shares[1].lstrip("+"), *cells])
    summaries = [(f"measured {i + 1}", summary, "") for i, summary in enumerate(data["measured"])]
    summaries.append(("simulated", data["simulated"], ""))
    hidden = {"rows", "measured", "simulated", "text", "notes", "command", "ok"}
    settings = [[key, flat(value)] for key, value in data.items() if key not in hidden and value is not None]
    return [
        ("Figure by figure", plain_table(head, rows, _JUDGED)),
        ("All runs", figures_table(summaries, SERVED, "Times in milliseconds.", "run", best=False)),
        (
            "Settings, and the command to repeat it",
            f'{_told(source)}<div class="settings">{plain_table(["setting", "value"], settings)}</div>',
        ),
    ]


_JUDGED = (
    "Errors are shares of the measured figure. Within the spread: beyond its bar, but the real runs differ by more "
    "(spread: their largest minus their least)."
)


def _told(source: Source) -> str:
    return command_block(str(source.data["command"])) if source.data.get("command") else ""
