"""95 % intervals of shares and means, for bands and brackets."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Z = 1.959963984540054
"""The normal distribution's 97.5 % quantile."""


def wilson(share: float, n: int) -> tuple[float, float]:
    """Of a share of n independent trials (Wilson, 1927); (0, 1) for none.

    Requests of one run are not independent, neighbours fail together: it is a lower bound of the true width.
    """
    if n <= 0:
        return 0.0, 1.0
    middle = (share + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
    return max(min(middle - half, share), 0.0), min(max(middle + half, share), 1.0)


def student_half(values: Sequence[float]) -> float:
    """Half the width of a mean's (Student, 1908); NaN for fewer than two values."""
    if len(values) < 2:
        return math.nan
    from scipy.special import stdtrit

    return float(stdtrit(len(values) - 1, 0.975)) * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def share_interval(shares: Sequence[float], n: int) -> tuple[float, float]:
    """Of a mean share: Student's over the seeds, and at least Wilson's of n requests; that alone with one seed.

    Seeds that agree, as at 100 % or where all replay one trace, say nothing of requests that nobody drew.
    """
    middle = float(np.mean(shares))
    low, high = wilson(middle, n)
    if len(shares) < 2:
        return low, high
    half = student_half(shares)
    if n <= 0:
        low = high = middle
    return max(min(middle - half, low), 0.0), min(max(middle + half, high), 1.0)
