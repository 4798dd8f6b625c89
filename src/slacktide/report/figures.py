"""One picture that compares runs: first tokens, gaps, who met the SLO, and how busy the engine was.

matplotlib (extra `report`) is imported when a figure is drawn.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slacktide.core.types import FloatArray
from slacktide.errors import InputError
from slacktide.metrics import slo
from slacktide.metrics.log import RunLog
from slacktide.metrics.stats import Distribution
from slacktide.report.files import Record, write_files
from slacktide.report.tables import percent

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C8C")
"""Okabe and Ito's palette (told apart with any colour vision), ordered so that neighbours differ in lightness too."""

DASHES = ("-", "--", "-.", ":")
"""One dash per round through the colours, so that more than eight runs stay apart."""

MAX_RUNS = 16
"""More lines than this in one panel cannot be told apart."""

NAME_LENGTH = 60
"""Characters of a label in a figure: longer ones would leave the panels no room."""

LEGEND_WIDTH = 140
"""Characters that a line of the legend holds at its size, 11 inches wide."""

_POINTS = 1000  # of a curve: more than the pixels of a panel
_STRETCHES = 100  # stretches of time: more of them, and a busy panel of several runs is noise
_INK, _GREY = "#222222", "#777777"


def compare_figure(
    runs: Sequence[tuple[Record, RunLog | None]], path: str | os.PathLike[str], *, dpi: int = 150
) -> None:
    """Draw a PNG that compares the runs (as `load_runs` gives them) and write it whole or not at all.

    Panels: CDF of TTFT over all arrivals (a curve that ends below 1 left requests without a first token); the share of
    gaps between tokens that are longer than x, as a log scale shows one stall in ten thousand and a CDF does not; bars
    of SLO attainment; requests in the system over time. The same runs give the same bytes.
    Raises InputError when matplotlib is missing, no run holds per-request figures, there are more than MAX_RUNS, or
    the file cannot be written.
    """
    drawn = [(record, log) for record, log in runs if log is not None]
    if not drawn:
        raise InputError("no run with per-request figures to draw: give the directory that --out wrote")
    if len(drawn) > MAX_RUNS:
        raise InputError(f"{len(drawn)} runs: at most {MAX_RUNS} lines can be told apart in one figure; name fewer")
    figure = _draw(drawn)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    target = Path(path)
    write_files(target.parent, {target.name: lambda temporary: temporary.write_bytes(buffer.getvalue())})


def _draw(runs: Sequence[tuple[Record, RunLog]]) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(f"figures need matplotlib ({error}): pip install matplotlib") from error

    logs = [log for _, log in runs]
    names = _short([f"{r.get('label') or r.get('policy')}{' (oracle)' if r.get('oracle') else ''}" for r, _ in runs])
    rows = 0.28 * len(runs)  # inches that the names below the panels take
    figure = Figure(figsize=(11, 7.2 + rows), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_title(runs), fontsize=11, color=_INK)
    ((first, gap), (met, busy)) = figure.subplots(2, 2)
    styles = [{"color": COLOURS[i % len(COLOURS)], "linestyle": DASHES[i // len(COLOURS)]} for i in range(len(runs))]
    ttfts = [_with_unserved(slo.ttft(log)) for log in logs]
    _frame(first, "Time to first token", "ms", "share of arrivals served within")
    first.set_ylim(0, 1.02)
    _curves(first, ttfts, styles, _target(logs, "slo_ttft"))
    _frame(gap, "Gaps between tokens (TBT)", "ms", "share of gaps that are longer")
    gap.set_yscale("log")
    gap.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    _curves(gap, [_longer(slo.gaps(log)) for log in logs], styles, _target(logs, "slo_tbt"))
    _bars(met, runs, names, styles)
    _in_system(busy, logs, styles)
    handles = [busy.plot([], [], **style, linewidth=2.2)[0] for style in styles]
    columns = max(1, min(4, len(names), LEGEND_WIDTH // max(map(len, names))))
    figure.legend(handles, names, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    return figure


def _short(names: Sequence[str]) -> list[str]:
    """Names that leave the panels room: the middle of a long one is cut, and its number tells it from its like."""
    ends = NAME_LENGTH // 2
    return [
        name if len(name) <= NAME_LENGTH else f"{i + 1}: {name[:ends]} ... {name[-ends:]}"
        for i, name in enumerate(names)
    ]


def _title(runs: Sequence[tuple[Record, RunLog]]) -> str:
    parts = []
    for record, log in runs:
        label = record.get("profile_label")
        of = f"{record.get('profile')}{f' [{label}]' if label else ''}, " if record.get("profile") else ""
        parts.append(f"{of}{log.n:,} requests")
    return " | ".join(dict.fromkeys(parts)) if len(set(parts)) <= 2 else f"{len(runs)} runs"


def _with_unserved(values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """CDF whose denominator counts those without a value too."""
    d = Distribution.of(values)
    x, share = d.cdf()
    return x, share * (d.size / max(len(values), 1))


def _target(logs: Sequence[RunLog], column: str) -> float | None:
    """The SLO in ms where all requests of all runs share one; else there is no one line to draw."""
    found = {float(v) for log in logs for v in np.unique(getattr(log, column))}
    only = found.pop() if len(found) == 1 else np.inf
    return only * 1e3 if np.isfinite(only) else None


def _longer(d: Distribution) -> tuple[FloatArray, FloatArray]:
    """Share of numbers above each value but the largest, above which there is none."""
    return d.values[:-1], 1.0 - np.cumsum(d.counts)[:-1] / max(d.size, 1)


def _curves(
    axes: Any, curves: Sequence[tuple[FloatArray, FloatArray]], styles: Sequence[dict[str, str]], target: float | None
) -> None:
    """Step curves of a share over seconds, drawn in ms on a log scale; `target` in ms as a line."""
    axes.set_xscale("log")
    for (x, y), style in zip(curves, styles, strict=True):
        if not len(x):
            continue
        # Points evenly spaced in rank, and all of both tails: where a curve is steep or rare none is lost.
        i = np.arange(len(x))
        picks = np.unique(np.concatenate([np.linspace(0, len(x) - 1, _POINTS).astype(int), i[:_POINTS], i[-_POINTS:]]))
        shown = np.maximum(x[picks] * 1e3, 1e-3)  # a gap of 0 (two tokens of one step) has no place on a log axis
        axes.step(shown, y[picks], where="post", linewidth=1.8, **style)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    if target is not None:
        axes.axvline(target, color=_INK, linewidth=1, linestyle=(0, (2, 2)))
        text, base = f"SLO {target:g} ms", axes.get_xaxis_transform()
        axes.annotate(text, (target, 0.03), (4, 0), xycoords=base, textcoords="offset points", color=_INK, fontsize=8.5)


def _bars(axes: Any, runs: Sequence[tuple[Record, RunLog]], names: Sequence[str], styles: Sequence[Any]) -> None:
    _frame(axes, "Requests that met their SLO", "% of arrivals", "")
    axes.grid(visible=False, axis="y")
    for row, ((record, _), style) in enumerate(zip(runs, styles, strict=True)):
        attainment = (record.get("summary") or {}).get("attainment")
        oracle = bool(record.get("oracle"))
        axes.barh(row, 100 * (attainment or 0), color=style["color"], height=0.42, alpha=0.45 if oracle else 1.0)
        text = "no SLO" if attainment is None else f"{percent(attainment)} %"
        axes.annotate(text, (100 * (attainment or 0), row), (4, 0), textcoords="offset points", va="center", fontsize=9)
        axes.annotate(names[row], (0, row - 0.22), (2, 2), textcoords="offset points", fontsize=9, color=_INK)
    axes.set_yticks([])
    axes.set_ylim(len(runs) - 0.5, -0.75)
    axes.set_xlim(0, 114)  # room for the numbers behind full bars
    axes.set_xticks(range(0, 101, 20))


def _in_system(axes: Any, logs: Sequence[RunLog], styles: Sequence[dict[str, str]]) -> None:
    """Requests that arrived and have not ended: averages over equal stretches of time, by integrating N(t)."""
    _frame(axes, "Requests in the system (waiting and running)", "s", "requests")
    for log, style in zip(logs, styles, strict=True):
        if not log.n or log.sim_duration <= 0:
            continue
        edges = np.linspace(log.start_time, log.end_of_run, min(max(log.n // 20, 10), _STRETCHES) + 1)
        ends = np.where(np.isnan(log.end_time), log.end_of_run, log.end_time)
        spent = _time_before(edges, log.arrival_time) - _time_before(edges, ends)  # request-seconds up to each edge
        axes.plot((edges[1:] + edges[:-1]) / 2, np.diff(spent) / np.diff(edges), linewidth=1.6, **style)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)


def _time_before(edges: FloatArray, moments: FloatArray) -> FloatArray:
    """Sum over the moments before each edge of (edge - moment)."""
    rising = np.sort(moments)
    upto = np.searchsorted(rising, edges, side="right")
    total = np.concatenate([[0.0], np.cumsum(rising)])
    return np.asarray(upto * edges - total[upto])


def _frame(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=10.5, loc="left", color=_INK)
    axes.set_xlabel(x, fontsize=9, color=_GREY)
    axes.set_ylabel(y, fontsize=9, color=_GREY)
    axes.grid(visible=True, color="#E6E6E6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8.5, colors=_INK, length=3)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
