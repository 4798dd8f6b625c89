"""Charts of a goodput search, a sweep and an advice: what their files hold, without runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from slacktide.core.types import FloatArray
from slacktide.report.charts import Chart, Mark, Series
from slacktide.report.curves import colour
from slacktide.report.intervals import share_interval, student_half
from slacktide.report.source import Run
from slacktide.report.tables import number, percent

BANDS = (
    "Band: 95 % interval, Student's over the seeds, at least Wilson's; where one seed ran, Wilson's alone, which is "
    "too narrow for bursts and carries that seed's luck."
)


@dataclass(frozen=True, slots=True)
class _Rate:
    """What a search knows of one rate: the mean share over its seeds, its interval, how many ran.

    `stopped`: one of them ended early, so that the share is not known, only that it is no more than this.
    """

    rate: float
    share: float
    low: float
    high: float
    seeds: int
    stopped: bool


def _rates(record: dict[str, Any]) -> list[_Rate]:
    """The simulated rates of one policy in order."""
    found: dict[float, list[dict[str, Any]]] = {}
    for evaluation in record["evaluations"]:
        if _finite(evaluation["rate"]):
            found.setdefault(float(evaluation["rate"]), []).append(evaluation)
    rates = []
    for rate, each in sorted(found.items()):
        shares = [float(e["attainment"]) for e in each]
        low, high = share_interval(shares, record["num_prompts"])
        rates.append(_Rate(rate, float(np.mean(shares)), low, high, len(each), any(e["stopped"] for e in each)))
    return rates


def goodput_chart(runs: list[Run]) -> Chart:
    """Attainment of every simulated rate with its interval, and each policy's answer with its own."""
    series, marks, rows, rates = [], [], [], []
    for i, run in enumerate(runs):
        record = run.record
        most = 1.0 - 0.5 / record["num_prompts"]  # all of them: no more nines
        dots = [(e["rate"], min(e["attainment"], most), e["stopped"]) for e in record["evaluations"]]
        dots = sorted(dot for dot in dots if _finite(dot[0]))
        whole, bound = (
            np.array([dot[:2] for dot in dots if dot[2] is stopped], dtype=np.float64).reshape(-1, 2)
            for stopped in (False, True)
        )
        known = [rate for rate in _rates(record) if not rate.stopped]
        line, low, high = (
            falling(np.array([(r.rate, min(getattr(r, name), most)) for r in known]).reshape(-1, 2))
            for name in ("share", "low", "high")
        )
        series.append(Series(run.name, line[:, 0], line[:, 1], colour(i), "line", i, band=(low[:, 1], high[:, 1])))
        series.append(Series(f"{run.name}, runs", whole[:, 0], whole[:, 1], colour(i), "dots", i))
        series.append(Series(f"{run.name}, at most", bound[:, 0], bound[:, 1], colour(i), "dots", i, hollow=True))
        rate = record["rate"]
        if rate is not None:
            marks.append(Mark(rate, "", low=record["rate_low"], high=record["rate_high"], colour=colour(i), run=i))
        rates += [float(dot[0]) for dot in dots]
        rows += [_rate_row(run.name, each) for each in _rates(record)]
    target = runs[0].record["target"]
    marks.append(Mark(target, f"target {percent(target)} %", axis="y"))
    x_range = None
    answers = [m.high or m.value for m in marks if m.axis == "x"]
    if answers and rates:  # the search starts far away: what matters lies around the answers
        lows = [m.low if m.low is not None else m.value for m in marks if m.axis == "x"]
        x_range = (max(min(rates), 0.5 * min(lows)), min(max(rates), 1.6 * max(answers)))
        series = [_within(s, x_range) for s in series]
    interval = "95 % interval" if any(run.record.get("confidence") for run in runs) else "bracket"
    return Chart(
        "attainment", "Attainment against rate", "requests per second", "% of arrivals in time", series,
        y_scale="tail", marks=marks, x_range=x_range,
        note=f"Dashes down: the goodput, with its {interval} as a bar at the foot. Dots: simulated rates, a dot a "
        "seed; hollow: stopped early, so no more than this. Lines: the falling curve nearest to the rates at which no "
        f"seed was stopped. {BANDS}",
        head=["policy", "req/s", "% in time", "95 % interval", "seeds"], rows=rows,
    )  # fmt: skip


def _rate_row(name: str, rate: _Rate) -> list[str]:
    if rate.stopped:
        return [name, number(rate.rate), f"at most {percent(rate.share)}", "stopped early", str(rate.seeds)]
    interval = f"{percent(rate.low)} to {percent(rate.high)}"
    return [name, number(rate.rate), percent(rate.share), interval, str(rate.seeds)]


def falling(points: FloatArray) -> FloatArray:
    """The non-increasing curve nearest to points (rate, attainment), sorted by rate: float64[n, 2].

    Least squares by pooling neighbours that rise (pool adjacent violators; Ayer et al., 1955).
    """
    pools: list[list[float]] = []  # sum, count
    for value in points[:, 1].tolist():
        pools.append([value, 1.0])
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] < pools[-1][0] / pools[-1][1]:
            total, count = pools.pop()
            pools[-1] = [pools[-1][0] + total, pools[-1][1] + count]
    level = np.concatenate([np.full(int(count), total / count) for total, count in pools] or [np.empty(0)])
    return np.column_stack([points[:, 0], level])


def _within(series: Series, x_range: tuple[float, float]) -> Series:
    keep = (series.x >= x_range[0] - 1e-9) & (series.x <= x_range[1] + 1e-9)
    band = None if series.band is None else (series.band[0][keep], series.band[1][keep])
    return replace(series, x=series.x[keep], y=series.y[keep], band=band)


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def sweep_axis(runs: list[Run]) -> str | None:
    """The varied number that goes on the x axis: the rate, or else the one with most values; never the seed."""
    values: dict[str, set[float]] = {}
    for run in runs:
        for name, value in run.record["varied"].items():
            if name != "seed" and _finite(value) and not isinstance(value, bool):
                values.setdefault(name, set()).add(float(value))
    several = {name: of for name, of in values.items() if len(of) > 1}
    if not several:
        return None
    return "rate" if "rate" in several else max(several, key=lambda name: len(several[name]))


def sweep_chart(runs: list[Run], figure: str, title: str, unit: str) -> Chart | None:
    """A figure of the summary over the varied number, one line per policy and other setting.

    Band: the interval over seeds; of attainment also where one seed ran.
    """
    axis = sweep_axis(runs)
    if axis is None:
        return None
    groups: dict[str, dict[float, list[tuple[float, int]]]] = {}
    for run in runs:
        varied, value = run.record["varied"], run.summary.get(figure)
        if not _finite(varied.get(axis)) or value is None or not _finite(value):
            continue
        rest = [f"{n}={_text(v)}" for n, v in varied.items() if n not in (axis, "seed")]
        name = ", ".join([str(run.record.get("policy_label") or run.record["policy"]), *rest])
        judged = _count(run.summary, "num_requests") - _count(run.summary, "excluded")
        groups.setdefault(name, {}).setdefault(float(varied[axis]), []).append((float(value), judged))
    is_share = figure == "attainment"
    show = percent if is_share else number
    series, rows = [], []
    for i, (name, points) in enumerate(groups.items()):
        x = np.array(sorted(points))
        means = np.array([np.mean([value for value, _ in points[v]]) for v in x])
        ends = [_ends([value for value, _ in points[v]], points[v][0][1] if is_share else None) for v in x]
        low, high = np.array(ends).T
        band = (low, high) if np.isfinite(low).all() else None
        series.append(Series(name, x, means, colour(i), "line", i, band=band))
        for v, mean, a, b in zip(x.tolist(), means.tolist(), low.tolist(), high.tolist(), strict=True):
            interval = f"{show(a)} to {show(b)}" if math.isfinite(a) else "-"
            rows.append([name, f"{v:g}", show(mean), interval, str(len(points[v]))])
    note = "Band: 95 % interval of the mean over the seeds." if any(s.band for s in series) else ""
    return Chart(
        f"sweep-{figure}", title, "rate (requests/s)" if axis == "rate" else axis, unit, series, percent=is_share,
        note=BANDS if is_share and note else note, head=["policy", axis, title, "95 % interval", "runs"], rows=rows,
    )  # fmt: skip


def _ends(values: list[float], n: int | None) -> tuple[float, float]:
    """Ends of the interval of a mean; n: the values are shares of so many. NaN where nothing is known."""
    if n is not None and (n > 0 or len(values) > 1):
        return share_interval(values, n)
    half = student_half(values)
    middle = float(np.mean(values))
    return (math.nan if math.isnan(half) else max(middle - half, 0.0)), middle + half


def _count(summary: dict[str, Any], name: str) -> int:
    value = summary.get(name)
    return value if type(value) is int else 0


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def advise_charts(data: dict[str, Any]) -> list[Chart]:
    """Throughput of both modes over the concurrency and over theta (closed forms)."""
    curves, simulated = data["curves"], data["simulated"]

    def column(name: str) -> Any:
        return np.asarray(curves[name], dtype=np.float64)

    n, at = column("concurrency"), float(data["concurrency"])
    theta = column("theta")
    dots = [
        Series(f"{mode}, simulated", np.array([at]), np.array([simulated[mode]["request_throughput"]]), of, "dots")
        for mode, of in (("exclusive", "c1"), ("mixed", "c0"))
    ]
    cross = data.get("n_cross")
    marks = [Mark(float(cross), f"exclusive wins from {cross:,}")] if cross else []
    mixed = np.full(theta.size, float(curves["mixed_at_concurrency"][0]))
    return [
        Chart(
            "concurrency", "Throughput against concurrency", "requests in the system", "requests/s",
            [Series("exclusive", n, column("exclusive"), "c1"), Series("mixed", n, column("mixed"), "c0"), *dots],
            "log", marks=marks, note="Lines: closed forms. Dots: simulated.",
            head=["mode", "simulated req/s"], rows=[[m, number(simulated[m]["request_throughput"])] for m in simulated],
        ),
        Chart(
            "theta", f"Throughput against theta, at {data['concurrency']:,} requests",
            "theta: share of slots free before a refill", "requests/s",
            [Series("exclusive", theta, column("exclusive_over_theta"), "c1"), Series("mixed", theta, mixed, "c0")],
            "log", marks=[Mark(float(data["theta0"]), "theta 0")] if data["theta0"] > 0 else [],
            note="How long to wait before prompts get their own steps.",
        ),
    ]  # fmt: skip
