"""Learns how many output tokens requests want, from those that finished."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from slacktide.core.types import IntArray, Live

FORGET = 0.99
"""Weight of the past per finished request: the last 100 count."""
LEAST = 20
"""Finished requests before the mean is believed."""


@dataclass
class OutputLengths:
    """Mean output length of finished requests, exponentially weighted."""

    count: int = 0
    total: float = 0.0
    weight: float = 0.0
    _last: dict[int, int] = field(default_factory=dict[int, int])

    def watch(self, live: Live) -> None:
        """Remember how far each request is: the step that ends it adds one token."""
        self._last = dict(zip(live.index.tolist(), live.num_output_tokens.tolist(), strict=True))

    def observe(self, finished: IntArray) -> None:
        """Take requests that finished."""
        for index in np.asarray(finished).tolist():
            if index in self._last:
                self.total = FORGET * self.total + self._last[index] + 1
                self.weight = FORGET * self.weight + 1
                self.count += 1

    def expected(self, prior: float) -> float:
        """Mean output tokens; `prior` until enough requests have finished."""
        return self.total / self.weight if self.count >= LEAST else prior
