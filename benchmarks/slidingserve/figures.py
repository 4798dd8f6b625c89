"""The figure of README.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def transient_figure(rows: list[dict[str, Any]], names: dict[str, str], path: Path) -> None:
    """Late requests over time, one line per arm."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    fig, axis = plt.subplots(figsize=(9, 4))
    minutes = np.arange(40) / 2 + 0.25
    for policy in dict.fromkeys(row["policy"] for row in rows):
        late = np.mean([row["late_by_half_minute"] for row in rows if row["policy"] == policy], axis=0)
        axis.plot(minutes, 100 * late, label=names[policy], linewidth=1.2)
    for part in range(1, 10, 2):
        axis.axvspan(2 * part, 2 * part + 2, color="0.9", zorder=0)
    axis.set(xlabel="arrival, minutes (grey: high rate)", ylabel="late requests, %", xlim=(0, 20), ylim=(0, 100))
    axis.legend(fontsize=7, ncols=2, loc="upper center")
    fig.tight_layout()
    fig.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(fig)
