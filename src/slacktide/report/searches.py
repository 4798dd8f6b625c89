"""Charts of a goodput search, a sweep and an advice: what their files hold, without runs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from slacktide.core.types import FloatArray
from slacktide.report.charts import Chart, Mark, Series
from slacktide.report.curves import colour
from slacktide.report.source import Run
from slacktide.report.tables import number, percent


def goodput_chart(runs: list[Run]) -> Chart:
    """Attainment of every simulated rate, and each policy's answer with its interval."""
    series, marks, rows = [], [], []
    rates = [e["rate"] for run in runs for e in run.record["evaluations"] if _finite(e["rate"])]
    for i, run in enumerate(runs):
        record = run.record
        found = sorted((e["rate"], e["attainment"], e["stopped"]) for e in record["evaluations"] if _finite(e["rate"]))
        whole = np.array([(r, a) for r, a, stopped in found if not stopped], dtype=np.float64).reshape(-1, 2)
        bound = np.array([(r, a) for r, a, stopped in found if stopped], dtype=np.float64).reshape(-1, 2)
        whole[:, 1] = np.minimum(whole[:, 1], 1.0 - 0.5 / run.record["num_prompts"])  # all of them: no more nines
        line = falling(whole)
        series.append(Series(run.name, line[:, 0], line[:, 1], colour(i), "line", i))
        series.append(Series(f"{run.name}, runs", whole[:, 0], whole[:, 1], colour(i), "dots", i))
        series.append(Series(f"{run.name}, at most", bound[:, 0], bound[:, 1], colour(i), "dots", i, hollow=True))
        rate, low, high = record["rate"], record["rate_low"], record["rate_high"]
        if rate is not None:
            marks.append(Mark(rate, "", low=low, high=high, colour=colour(i), run=i))
        interval = "-" if rate is None or high is None else f"{number(low)} to {number(high)}"
        rows.append(
            [run.name, "unlimited" if rate is None else number(rate), interval, str(len(record["evaluations"]))]
        )
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
        note=f"Dashes down: the goodput, with its {interval} as a stripe. Dots: simulated rates, of all seeds; hollow: "
        "stopped early, so no more than this. Lines: the falling curve nearest to the full dots.",
        head=["policy", "goodput req/s", interval, "runs"], rows=rows,
    )  # fmt: skip


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
    from dataclasses import replace

    keep = (series.x >= x_range[0] - 1e-9) & (series.x <= x_range[1] + 1e-9)
    return replace(series, x=series.x[keep], y=series.y[keep])


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


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
    """A figure of the summary over the varied number, one line per policy and other setting; seeds make a band."""
    axis = sweep_axis(runs)
    if axis is None:
        return None
    groups: dict[str, dict[float, list[float]]] = {}
    for run in runs:
        varied, value = run.record["varied"], run.summary.get(figure)
        if not _finite(varied.get(axis)) or value is None:
            continue
        rest = [f"{n}={_text(v)}" for n, v in varied.items() if n not in (axis, "seed")]
        name = ", ".join([str(run.record.get("policy_label") or run.record["policy"]), *rest])
        groups.setdefault(name, {}).setdefault(float(varied[axis]), []).append(float(value))
    series, rows = [], []
    for i, (name, points) in enumerate(groups.items()):
        x = np.array(sorted(points))
        means = np.array([np.mean(points[v]) for v in x])
        halves = np.array([_half(points[v]) for v in x])
        band = (np.maximum(means - halves, 0.0), means + halves) if np.isfinite(halves).all() else None
        if band is not None and figure == "attainment":
            band = (band[0], np.minimum(band[1], 1.0))
        series.append(Series(name, x, means, colour(i), "line", i, band=band))
        show = percent if figure == "attainment" else number
        rows += [[name, f"{v:g}", show(float(m)), str(len(points[v]))] for v, m in zip(x.tolist(), means, strict=True)]
    note = "Band: 95 % interval of the mean over the seeds." if any(s.band for s in series) else ""
    return Chart(
        f"sweep-{figure}", title, axis, unit, series, percent=figure == "attainment", note=note,
        head=["policy", axis, title, "runs"], rows=rows,
    )  # fmt: skip


def _half(values: list[float]) -> float:
    """Half of Student's 95 % interval of a mean; NaN for one value."""
    if len(values) < 2:
        return math.nan
    from scipy.special import stdtrit

    return float(stdtrit(len(values) - 1, 0.975)) * float(np.std(values, ddof=1)) / math.sqrt(len(values))


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
