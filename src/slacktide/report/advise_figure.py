"""Two curves behind an advice: throughput over theta, and of both modes over concurrency."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

from slacktide.errors import InputError
from slacktide.report.figures import COLOURS
from slacktide.report.files import write_files


def advise_figure(advice: dict[str, Any], path: str | os.PathLike[str], *, dpi: int = 150) -> None:
    """Draw the figure of an advice (`search.advise.advise`) as PNG. The same advice gives the same bytes.

    Raises InputError when matplotlib is missing or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(f"figures need matplotlib ({error}): pip install matplotlib") from error
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    curves, concurrency = advice["curves"], advice["concurrency"]
    exclusive, mixed = COLOURS[1], COLOURS[0]
    left.plot(curves["theta"], curves["exclusive_over_theta"], color=exclusive, label="exclusive, EB(theta N)")
    left.axhline(curves["mixed_at_concurrency"][0], color=mixed, linestyle="--", label="mixed")
    left.axvline(max(advice["theta0"], curves["theta"][0]), color=COLOURS[7], linestyle=":", label="theta_0")
    left.set_xscale("log")
    left.set_xlabel("theta: share of slots free before a refill")
    left.set_title(f"at concurrency {concurrency:,}", fontsize=10, loc="left")
    right.plot(curves["concurrency"], curves["exclusive"], color=exclusive, label="exclusive at theta_0")
    right.plot(curves["concurrency"], curves["mixed"], color=mixed, linestyle="--", label="mixed")
    for mode, colour in (("exclusive", exclusive), ("mixed", mixed)):
        right.plot([concurrency], [advice["simulated"][mode]["request_throughput"]], "o", color=colour)
    if advice["n_cross"]:
        right.axvline(advice["n_cross"], color=COLOURS[7], linestyle=":", label=f"crossover {advice['n_cross']:,}")
    right.set_xscale("log")
    right.set_xlabel("concurrency (dots: simulated)")
    right.set_title(f"{advice['profile']}, {advice['trace']}"[:70], fontsize=10, loc="left")
    for axes in (left, right):
        axes.set_ylabel("requests per second")
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, color="#E6E6E6", linewidth=0.8)
        axes.legend(frameon=False, fontsize=8.5)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    target = Path(path)
    write_files(target.parent, {target.name: lambda temporary: temporary.write_bytes(buffer.getvalue())})
