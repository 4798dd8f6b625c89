"""Keeps our failures out of serving: a time limit on decisions, and a fuse that switches the policy off.

A thread looks now and then whether a decision has run for longer than its bound, and raises `TooSlow` in the thread
that decides (CPython's PyThreadState_SetAsyncExc). A loop in Python is broken off that way; one in compiled code is
only as soon as it returns.
"""

from __future__ import annotations

import ctypes
import threading
import time
from types import TracebackType

CHECKS_PER_BOUND = 4
"""The watchdog looks that often within a bound: a decision is stopped after at most 1.25 bounds."""


class TooSlow(Exception):
    """A decision took longer than its bound."""


class TimeLimit:
    """Context manager around a decision, used by one thread. Costs two uncontended locks (under a microsecond)."""

    def __init__(self, bound: float) -> None:
        """`bound` in seconds."""
        self._bound = bound
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._began = 0.0
        self._watcher: threading.Thread | None = None
        self._stop = threading.Event()

    def __enter__(self) -> TimeLimit:
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="slacktide-watchdog", daemon=True)
            self._watcher.start()
        with self._lock:
            self._began = time.monotonic()
            self._thread = threading.get_ident()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disarm()

    def disarm(self) -> None:
        """No exception arrives once this has returned: one that is on its way is taken back."""
        with self._lock:
            self._thread = None
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threading.get_ident()), None)

    def _watch(self) -> None:
        while not self._stop.wait(self._bound / CHECKS_PER_BOUND):
            with self._lock:
                if self._thread is not None and time.monotonic() - self._began > self._bound:
                    kind = ctypes.py_object(TooSlow)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), kind)
                    self._thread = None

    def close(self) -> None:
        """End the watchdog."""
        self._stop.set()


class Fuse:
    """Counts failed decisions in a row; after `limit` of them the policy rests for `rest` steps."""

    def __init__(self, limit: int, rest: int) -> None:
        self._limit, self._rest = limit, rest
        self._failures = self._resting = 0
        self.blown = 0
        """How often the policy was switched off."""

    @property
    def resting(self) -> bool:
        """Whether the policy is switched off now."""
        return self._resting > 0

    def step(self) -> bool:
        """Call once a step; True when the policy may decide it."""
        if self._resting:
            self._resting -= 1
            return False
        return True

    def good(self) -> None:
        """A decision worked."""
        self._failures = 0

    def bad(self) -> bool:
        """A decision failed; True when that blew the fuse."""
        self._failures += 1
        if self._failures < self._limit:
            return False
        self._failures, self._resting = 0, self._rest
        self.blown += 1
        return True
