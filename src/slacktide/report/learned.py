"""What a policy learned while it served (`core.tide_learned.learned`), as the rows of one short table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slacktide.report.steplog import read_step_log

MAX_TENANTS = 8
"""Tenants shown, those served most; the others are one row."""


def last_learned(path: Path) -> dict[str, Any] | None:
    """The newest `learned` of a plug-in's step log; None where its policy learns nothing. Raises InputError."""
    found = None
    for line in read_step_log(path):
        found = line["learned"] if isinstance(line.get("learned"), dict) else found
    return found


def learned_text(learned: Any, title: str) -> str:
    """The table as lines of text; empty where there is nothing."""
    rows = learned_rows(learned)
    width = max((len(name) for name, _ in rows), default=0)
    return (
        "".join([f"what it learned: {title}\n", *(f"  {name:<{width}}  {value}\n" for name, value in rows)])
        if rows
        else ""
    )


def learned_rows(learned: Any) -> list[tuple[str, str]]:
    """(quantity, value) rows; none where there is nothing. What another version wrote differently is left out."""
    if not isinstance(learned, Mapping):
        return []
    rows: list[tuple[str, str]] = []
    for scene, found in _pairs(learned.get("margins")):
        mean, deviation, factor = (_number(found.get(name)) for name in ("mean", "deviation", "factor"))
        rows.append((
            f"{scene} steps", f"take {mean:.3f} of the predicted time (mean deviation {deviation:.3f}, bounds use "
            f"{factor:.3f}; {_number(found.get('steps')):,.0f} steps)",
        ))  # fmt: skip
    mean_output = _number(learned.get("mean_output_tokens"))
    if math.isfinite(mean_output):
        rows.append(("output tokens", f"{mean_output:,.0f} on average"))
    for name, key in (("TTFT targets", "ttft_targets"), ("TBT targets", "tbt_targets")):
        seen = learned.get(key)
        if not isinstance(seen, Mapping):
            continue
        quantiles, arrivals = seen.get("quantiles"), _number(seen.get("requests"))
        if isinstance(quantiles, list) and len(quantiles) == 3:
            low, middle, high = (f"{1e3 * _number(q):,.4g}" for q in quantiles)
            rows.append((name, f"{middle} ms, 5 to 95 %: {low} to {high} ms ({arrivals:,.0f} arrivals)"))
    for name, key, form in (("arrivals", "arrival_rate", "{:,.2f} requests/s lately"),
                            ("missed", "miss_rate", "{:.1%} of the requests lately")):  # fmt: skip
        value = _number(learned.get(key))
        if math.isfinite(value) and rows:  # before the first step both are 0 and say nothing
            rows.append((name, form.format(value)))
    return rows + _tenant_rows(_pairs(learned.get("tenants")))


def _tenant_rows(tenants: list[tuple[str, Mapping[str, Any]]]) -> list[tuple[str, str]]:
    if len(tenants) < 2:
        return []
    rows = [
        (f"tenant {name or '(none)'}", f"{_number(found.get('share')):.1%} of the token cost, weight "
         f"{_number(found.get('weight')):g}")
        for name, found in tenants[:MAX_TENANTS]
    ]  # fmt: skip
    others = tenants[MAX_TENANTS:]
    if others:
        rest = sum(_number(found.get("share")) for _, found in others)
        rows.append((f"{len(others)} other tenants", f"{rest:.1%} of the token cost"))
    return rows


def _pairs(found: Any) -> list[tuple[str, Mapping[str, Any]]]:
    return [(str(k), v) for k, v in found.items() if isinstance(v, Mapping)] if isinstance(found, Mapping) else []


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
