"""What the scheduler tells the front end: a small JSON file per engine, replaced atomically.

The scheduler lives in the engine's process, admission in the API server's; vLLM has no channel between them that a
plug-in may use, so a file in a directory both know carries the estimate. It holds one object:

    {"time": 1700000000.0, "predicted_ttft_s": 0.8, "num_running": 12, "num_waiting": 3, "policy": "sarathi-edf"}

`time` is Unix time in seconds: an estimate older than `MAX_AGE` says nothing (the engine hangs, or died). An engine
that runs out of work must publish once more (`force=True`), or its last word would stand for that long.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from slacktide.core.types import MAX_SLO_SECONDS

MIN_INTERVAL = 0.05
"""Seconds between two writes: a write costs about 0.1 ms, and admission is right to some tens of milliseconds."""

MAX_AGE = 10.0
"""Seconds an estimate counts: longer than any healthy step (a CPU takes seconds for one), shorter than users wait."""

MAX_BYTES = 4096
"""Longest file believed; ours have about 150 bytes."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """One engine's state. Raises ValueError for values that are no times or counts."""

    time: float
    """Unix time in seconds."""
    predicted_ttft_s: float
    """Seconds until the first token of a request of typical length that arrives now."""
    num_running: int
    num_waiting: int
    policy: str

    def __post_init__(self) -> None:
        for name in ("time", "predicted_ttft_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise ValueError(f"estimate: {name}={value!r}, expected seconds from 0 on")
        for name in ("num_running", "num_waiting"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"estimate: {name}={value!r}, expected a count")
        if not isinstance(self.policy, str):
            raise ValueError(f"estimate: policy={self.policy!r}, expected a name")


class Publisher:
    """Writes the estimate of one engine. Never raises: serving goes on when the disk is full, and `failures` counts."""

    def __init__(self, directory: str | os.PathLike[str], engine: int = 0) -> None:
        self._path = Path(directory) / f"estimate-{engine}.json"
        self._partial = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        self._next = 0.0
        self.failures = 0

    def publish(
        self, predicted_ttft_s: float, num_running: int, num_waiting: int, policy: str, *, force: bool = False
    ) -> bool:
        """Write, unless the last write is less than MIN_INTERVAL ago (`force`: also then). True when written."""
        monotonic = time.monotonic()
        if monotonic < self._next and not force:
            return False
        self._next = monotonic + MIN_INTERVAL
        try:
            ttft = min(float(predicted_ttft_s), MAX_SLO_SECONDS)  # infinity is a fair prediction, but no JSON
            estimate = Estimate(time.time(), ttft, num_running, num_waiting, policy)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._partial.write_text(json.dumps(asdict(estimate)), encoding="utf-8")
            self._partial.replace(self._path)
        except (OSError, ValueError):
            self.failures += 1
            return False
        return True

    def remove(self) -> None:
        """Take the file away when the engine shuts down."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


class Reader:
    """Reads the estimates of all engines in a directory, at most once in MIN_INTERVAL."""

    def __init__(self, directory: str | os.PathLike[str], max_age: float = MAX_AGE) -> None:
        self._directory, self._max_age = Path(directory), max_age
        self._next = 0.0
        self._found: Estimate | None = None

    def read(self) -> Estimate | None:
        """The least loaded engine's estimate (the front end sends a new request there); None when none is fresh."""
        monotonic = time.monotonic()
        if monotonic >= self._next:
            self._next = monotonic + MIN_INTERVAL
            oldest = time.time() - self._max_age
            every = map(_read, sorted(self._directory.glob("estimate-*.json")))
            fresh = [found for found in every if found is not None and found.time >= oldest]
            self._found = min(fresh, key=lambda estimate: estimate.predicted_ttft_s, default=None)
        return self._found


def _read(path: Path) -> Estimate | None:
    """The estimate in a file; None when it is gone, or not one."""
    try:
        with path.open("rb") as file:
            data = json.loads(file.read(MAX_BYTES))
        return Estimate(**data)
    except (OSError, ValueError, TypeError, RecursionError):
        return None
