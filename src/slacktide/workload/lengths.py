"""Distributions of prompt and output lengths, written `512`, `uniform:100:900`, `lognormal:1000:1.2`, ...

| text | lengths |
|---|---|
| `512` or `constant:512` | always 512 |
| `uniform:LOW:HIGH` | every whole number from LOW to HIGH equally often |
| `lognormal:MEAN:CV` | lognormal with this mean and coefficient of variation (before rounding) |
| `gamma:MEAN:CV` | gamma, likewise |
| `exponential:MEAN` | exponential |
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from slacktide.core.types import FloatArray, IntArray
from slacktide.errors import InputError, unknown_name
from slacktide.workload.requests import MAX_REQUEST_TOKENS
from slacktide.workload.specs import parse_number, parse_whole

_ARGUMENTS = {
    "constant": ("TOKENS",),
    "uniform": ("LOW", "HIGH"),
    "lognormal": ("MEAN", "CV"),
    "gamma": ("MEAN", "CV"),
    "exponential": ("MEAN",),
}

MAX_CV = 100.0
"""Largest coefficient of variation taken as meant; the burstiest published length tables stay below 5."""


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """A distribution over whole numbers of tokens; `a`, `b` are its arguments as in the table above."""

    kind: str
    a: float
    b: float = 0.0

    def draw(self, n: int, generator: np.random.Generator, highest: int = MAX_REQUEST_TOKENS) -> IntArray:
        """n lengths, i8[n]: rounded, and kept within 1 and `highest` tokens."""
        return np.clip(np.rint(self._draw_real(n, generator)), 1, highest).astype(np.int64)

    def _draw_real(self, n: int, generator: np.random.Generator) -> FloatArray:
        if self.kind == "constant":
            return np.full(n, self.a)
        if self.kind == "uniform":
            return generator.integers(int(self.a), int(self.b), size=n, endpoint=True).astype(np.float64)
        if self.kind == "exponential":
            return self.a * generator.standard_exponential(n)
        if self.kind == "gamma":
            shape = 1.0 / self.b**2  # CV = 1/sqrt(shape)
            return np.asarray(self.a / shape * generator.standard_gamma(shape, n), dtype=np.float64)
        variance = math.log1p(self.b**2)  # of log X, from mean and CV of X
        return np.asarray(self.a * np.exp(math.sqrt(variance) * generator.standard_normal(n) - variance / 2))


def parse_lengths(text: str, what: str = "lengths") -> LengthDistribution:
    """A distribution from its text; raises InputError for unknown kinds, missing or impossible arguments."""
    kind, *arguments = (part.strip() for part in text.split(":"))
    if not arguments and kind and not kind[0].isalpha():
        kind, arguments = "constant", [kind]
    if kind not in _ARGUMENTS:
        raise unknown_name(f"{what} distribution", kind, _ARGUMENTS)
    names = _ARGUMENTS[kind]
    form = ":".join((kind, *names))
    if len(arguments) != len(names):
        raise InputError(f"{what}={text}: expected {form}")
    if kind in ("constant", "uniform"):
        bounds = [parse_whole(value, f"{what}={text}", 1, MAX_REQUEST_TOKENS) for value in arguments]
        if bounds != sorted(bounds):
            raise InputError(f"{what}={text}: LOW is above HIGH")
        return LengthDistribution(kind, *bounds)
    mean = parse_number(arguments[0], f"{what}={text}")
    if not 1 <= mean <= MAX_REQUEST_TOKENS:
        raise InputError(f"{what}={text}: MEAN must lie between 1 and {MAX_REQUEST_TOKENS:,} tokens")
    if kind == "exponential":
        return LengthDistribution(kind, mean)
    cv = parse_number(arguments[1], f"{what}={text}")
    if not 0 < cv <= MAX_CV:
        raise InputError(f"{what}={text}: CV must lie above 0 and at most at {MAX_CV:g}")
    return LengthDistribution(kind, mean, cv)
