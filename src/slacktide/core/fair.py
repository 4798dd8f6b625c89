"""Weighted fairness between tenants: a counter of served token cost for each (virtual token counter).

Who has the lowest counter is served first where requests are equally urgent, and gives way last where not all can be in
time. Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, algorithm 2 and its weighted form.
The compiled half is `kernels_fair`; docs/background/tide.md says where `tide` uses it, and what it bounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from slacktide.core.types import FloatArray

INPUT_COST, OUTPUT_COST = 1.0, 2.0
"""Cost of a prompt token and of an output token: the ratio of Sheng et al., after what providers charge."""

# Rows of the table, a column per tenant.
COST, WEIGHT, AHEAD, QUEUED, SERVED, LEVEL = range(6)
"""COST: the counter, served cost over weight. AHEAD: the counter with what this step's order has promised so far.
QUEUED: 1 while prompts wait. SERVED: cost served since the start, for reports. LEVEL: its first column is the counter
at which a tenant starts that comes back."""
ROWS = 6

EXAMPLE = "tenant_weights=search:2+batch:0.5"


def parse_weights(text: str) -> dict[str, float]:
    """`search:2+batch:0.5` -> weights by name. Raises ValueError."""
    weights: dict[str, float] = {}
    for item in text.split("+") if text.strip() else []:
        name, colon, value = item.strip().rpartition(":")
        try:
            weight = float(value)
        except ValueError:
            weight = math.nan
        if not colon or not name or not 0 < weight < math.inf:
            raise ValueError(
                f"tenant_weights={text!r}: {item.strip()!r}: expected NAME:WEIGHT, weight above 0, as in {EXAMPLE}"
            )
        if name in weights:
            raise ValueError(f"tenant_weights={text!r}: tenant {name!r} is named twice")
        weights[name] = weight
    return weights


_OFF: FloatArray = np.empty((ROWS, 0))


@dataclass
class Shares:
    """The table of one policy, which grows with the tenants that the host tells of."""

    weights: dict[str, float]
    names: tuple[str, ...] = ()
    table: FloatArray = field(default_factory=lambda: np.empty((ROWS, 0)))

    def of(self, names: Sequence[str]) -> FloatArray:
        """float64[ROWS, tenants]; no column where there is one tenant, or none is known."""
        if len(names) < 2:
            return _OFF
        known = len(self.names)
        if len(names) > known:
            grown = np.zeros((ROWS, len(names)))
            grown[:, :known] = self.table[:, :known]
            grown[WEIGHT, known:] = [self.weights.get(name, 1.0) for name in names[known:]]
            self.table, self.names = grown, tuple(names)
        return self.table

    def served(self) -> dict[str, dict[str, float]]:
        """Tenant -> weight, cost served, share of it; tenants that got something, most first."""
        total = float(self.table[SERVED].sum()) if self.names else 0.0
        found = [
            (name, {"weight": float(self.table[WEIGHT, k]), "cost": float(self.table[SERVED, k]),
                    "share": float(self.table[SERVED, k]) / total})
            for k, name in enumerate(self.names) if self.table[SERVED, k] > 0.0
        ]  # fmt: skip
        return dict(sorted(found, key=lambda item: -item[1]["cost"]))
