"""Was the machine quiet during a run? Cores that others kept busy, time that the hypervisor took, and its speed."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

BUSY = 0.1
"""Cores that others keep busy on average, above which a run is disturbed: a twentieth of two cores, as the bars are."""
STOLEN = 0.02
"""Share of the machine's time that went to other guests, above which a run is disturbed."""
DRIFT = 0.05
"""How far the speed may be off the speed at profiling, either way: the bar of throughput and TPOT."""
UNSTEADY = 0.1
"""How far the slowest or the fastest tenth of a run's seconds may be off its median."""
PERIOD = 1.0
"""Seconds between two looks at the processes and the speed: a look costs 5 ms of one core."""
SINES, WARM, TIMES = 65_536, 3, 6
"""Of a measurement of speed, some to warm the cache first: half a megabyte stays in it. No library starts threads."""

_ANGLES = np.linspace(0.1, 3.0, SINES)


def speed() -> float:
    """Vectors of sines a second of this thread's own CPU time.

    CPU time, so that sharing a core with our own processes does not show; a neighbour on the same physical core, a
    lower clock and throttling do, of which `stolen` tells nothing. Memory that others keep busy shows in neither.
    """
    for _ in range(WARM):
        np.sin(_ANGLES)
    began = time.thread_time()
    for _ in range(TIMES):
        np.sin(_ANGLES)
    return TIMES / (time.thread_time() - began)


@dataclass(frozen=True)
class Quiet:
    """What a run had around it."""

    busy_cores: float
    """Cores kept busy by processes that are neither this one nor its children."""
    stolen: float
    """Share of the machine's time that other guests took."""
    speed: float
    """Median over the run's seconds, see `speed`."""
    slow: float
    """Speed of its slowest tenth."""
    fast: float
    """Speed of its fastest tenth."""

    def disturbed(self, reference: float) -> str:
        """Why the run does not count, "" when it does. `reference`: speed when the engine was profiled."""
        if self.busy_cores > BUSY:
            return f"others kept {self.busy_cores:.2f} cores busy"
        if self.stolen > STOLEN:
            return f"other guests took {100 * self.stolen:.0f} % of the time"
        if abs(self.speed / reference - 1) > DRIFT:
            return f"the machine ran at {100 * self.speed / reference:.0f} % of its speed when profiled"
        if self.slow < (1 - UNSTEADY) * self.speed or self.fast > (1 + UNSTEADY) * self.speed:
            slow, fast = 100 * self.slow / reference, 100 * self.fast / reference
            return f"the machine ran at {slow:.0f} to {fast:.0f} % of its speed when profiled"
        return ""


class Watch:
    """Context manager around a run; `result` afterwards."""

    def __enter__(self) -> Watch:
        self._speeds = [speed()]
        self._own: dict[tuple[int, float], float] = {}
        self._stop = threading.Event()
        self._look()
        self._before, self._own_before = _jiffies(), sum(self._own.values())
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        self._look()
        busy, stolen, whole = (a - b for a, b in zip(_jiffies(), self._before, strict=True))
        own = sum(self._own.values()) - self._own_before
        cores = os.cpu_count() or 1
        self.result = Quiet(
            max(cores * busy / whole - own * cores / whole, 0.0) if whole else 0.0,
            stolen / whole if whole else 0.0,
            *(float(np.quantile(self._speeds, q)) for q in (0.5, 0.1, 0.9)),
        )

    def _watch(self) -> None:
        while not self._stop.wait(PERIOD):
            self._look()
            self._speeds.append(speed())

    def _look(self) -> None:
        """Note the CPU seconds of our processes; one that ends between two looks keeps what it had."""
        import psutil  # vLLM brings it; reading results needs none

        me = psutil.Process()
        for process in (me, *me.children(recursive=True)):
            try:
                spent = process.cpu_times()
                self._own[process.pid, process.create_time()] = spent.user + spent.system
            except psutil.Error:
                continue


def _jiffies() -> tuple[float, float, float]:
    """Seconds of all cores since boot: busy for this machine, stolen from it, all. Zeros without /proc/stat."""
    try:
        first = Path("/proc/stat").read_text().split("\n", 1)[0]
    except OSError:
        return 0.0, 0.0, 0.0
    user, nice, system, idle, iowait, irq, softirq, steal = (
        float(v) / os.sysconf("SC_CLK_TCK") for v in first.split()[1:9]
    )
    return user + nice + system + irq + softirq, steal, user + nice + system + idle + iowait + irq + softirq + steal
