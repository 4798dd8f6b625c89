"""Measured against simulated: which figures, how far apart, and whether that is near enough.

Several real runs of the same requests differ among themselves; an error is judged by its bar or by that spread,
whichever is larger, because nobody can be asked to predict what the engine itself does not repeat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slacktide.errors import InputError, unknown_name

FIGURES: dict[str, str] = {
    "request_throughput": "requests/s",
    "output_throughput": "output tokens/s",
    "p50_ttft_ms": "TTFT p50, ms",
    "p90_ttft_ms": "TTFT p90, ms",
    "p99_ttft_ms": "TTFT p99, ms",
    "p50_itl_ms": "TBT p50, ms",
    "p99_itl_ms": "TBT p99, ms",
    "max_gap_ms": "TBT max, ms",
    "mean_tpot_ms": "TPOT mean, ms",
    "mean_e2el_ms": "E2EL mean, ms",
    "num_preemptions": "preemptions",
    "num_steps": "steps",
    "attainment": "attainment",
}
"""Key in a summary -> what the table calls it."""

BARS = {
    "request_throughput": 0.05, "mean_tpot_ms": 0.05, "p50_ttft_ms": 0.10, "p99_ttft_ms": 0.15, "attainment": 0.03,
}  # fmt: skip
"""Largest error: relative, of attainment in points (0.03 = 3). Published simulators stay within 2 to 20 % of means and
10 to 30 % of tails; these are what a choice between schedulers needs, whose differences are of that size."""
ABSOLUTE = ("attainment",)
"""Figures whose error is a difference, not a ratio."""


@dataclass(frozen=True)
class Row:
    """One figure. `measured` is the mean of the real runs, `spread` their largest minus their least."""

    figure: str
    measured: float | None
    spread: float | None
    simulated: float | None
    error: float | None
    """Relative, or a difference for ABSOLUTE figures; None where one side does not know the figure."""
    bar: float | None
    met: bool | None
    """None: no bar, or nothing to judge."""


def parse_bars(texts: Sequence[str]) -> dict[str, float]:
    """`--bar p50_ttft_ms=0.2`: BARS with these changed; `=none` takes one away. Raises InputError."""
    bars = dict(BARS)
    for text in texts:
        name, equals, value = text.partition("=")
        if name not in FIGURES:
            raise unknown_name("figure", name, FIGURES)
        if equals and value == "none":
            bars.pop(name, None)
            continue
        try:
            bars[name] = float(value)
        except ValueError:
            bars[name] = -1.0
        if not 0 <= bars[name] < 100:
            raise InputError(f"--bar {text!r}: expected FIGURE=SHARE, e.g. p50_ttft_ms=0.1 (10 %), or FIGURE=none")
    return bars


def compare(
    measured: Sequence[Mapping[str, Any]], simulated: Mapping[str, Any], bars: Mapping[str, float]
) -> list[Row]:
    """Rows of the table from the summaries of real runs and of the simulated one. Raises ValueError without a run."""
    if not measured:
        raise ValueError("compare: expected at least one measured run")
    rows = []
    for figure in FIGURES:
        values = [float(run[figure]) for run in measured if run.get(figure) is not None]
        ours = simulated.get(figure)
        mean = sum(values) / len(values) if values else None
        spread = max(values) - min(values) if values else None
        error = None
        if mean is not None and ours is not None:
            difference = float(ours) - mean
            if figure in ABSOLUTE:
                error = difference
            elif mean:
                error = difference / mean
            elif not difference:
                error = 0.0
        bar = bars.get(figure)
        met = None
        if error is not None and bar is not None and mean is not None and spread is not None:
            scale = 1.0 if figure in ABSOLUTE else abs(mean)
            met = abs(error) * scale <= max(bar * scale, spread) + 1e-12
        rows.append(Row(figure, mean, spread, None if ours is None else float(ours), error, bar, met))
    return rows


def verdict(rows: Sequence[Row]) -> bool:
    """Whether every figure with a bar met it; False when none could be judged."""
    judged = [row.met for row in rows if row.met is not None]
    return bool(judged) and all(judged)


def in_words(rows: Sequence[Row], what: str, runs: int) -> str:
    """One line for the profile: what was compared, and the errors of the figures with bars."""
    parts = [
        f"{FIGURES[row.figure].split(',')[0]} {_percent(row)}"
        for row in rows
        if row.bar is not None and row.error is not None
    ]
    return f"{what}, {runs} real run{'s' * (runs > 1)}: {', '.join(parts)}"


def _percent(row: Row) -> str:
    assert row.error is not None
    return f"{100 * row.error:+.1f} {'points' if row.figure in ABSOLUTE else '%'}"


def ranking_kept(
    measured: Mapping[str, Sequence[float]], simulated: Mapping[str, float]
) -> tuple[bool, list[tuple[str, str]]]:
    """(whether simulation ranks policies by attainment as reality does, pairs that it turns round).

    Only pairs whose measured means differ by more than the larger spread of the two count.
    """
    wrong = []
    names = sorted(set(measured) & set(simulated))
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            first, second = measured[a], measured[b]
            difference = sum(first) / len(first) - sum(second) / len(second)
            spread = max(max(first) - min(first), max(second) - min(second))
            if abs(difference) > spread and difference * (simulated[a] - simulated[b]) < 0:
                wrong.append((a, b))
    return not wrong, wrong
