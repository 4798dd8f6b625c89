"""What a policy learns of outputs: how many tokens requests want, and how many a step yields."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from slacktide.core.types import IntArray, Live

FORGET = 0.99
"""Weight of the past per finished request: the last 100 count."""
FRESH = 0.05
"""Weight of the newest step in the yield: the last 20 steps count."""
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


@dataclass
class StepYield:
    """Output tokens per decode and step: 1 without speculative decoding, else accepted drafts + 1."""

    mean: float = 1.0
    _before: dict[int, int] = field(default_factory=dict[int, int])

    def watch(self, live: Live, decodes: IntArray) -> float:
        """Compare with the step before (every step must be shown), remember this one; returns the smoothed mean >= 1.

        `decodes`: rows that decode in this step.
        """
        output = live.num_output_tokens
        if self._before:
            known = dict(zip(live.index.tolist(), output.tolist(), strict=True))
            gained = [known[i] - before for i, before in self._before.items() if i in known]
            if gained:
                self.mean = max(1.0, FRESH * sum(gained) / len(gained) + (1 - FRESH) * self.mean)
        self._before = dict(zip(live.index[decodes].tolist(), output[decodes].tolist(), strict=True))
        return self.mean
