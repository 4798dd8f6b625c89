"""Keeps our failures out of serving: a time limit on decisions, and a fuse that switches the policy off.

A thread sleeps until a decision has run for longer than its bound, and raises `TooSlow` in the thread that decides
(CPython's PyThreadState_SetAsyncExc). A loop in Python is broken off that way; one in compiled code is only as soon as
it returns.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from types import TracebackType

ARMS_PER_BOUND = 4
"""Decisions put the alarm off that often within a bound: each time costs some microseconds. While they come more often
than every 3/4 of a bound it never rings, and the watcher never asks for the interpreter's lock."""


class TooSlow(Exception):
    """A decision took longer than its bound."""


class _TimerSpec(ctypes.Structure):
    """The kernel's struct itimerspec: interval and value, each seconds and nanoseconds."""

    _fields_ = (("interval", ctypes.c_long * 2), ("value", ctypes.c_long * 2))


class Alarm:
    """Wakes one waiting thread after a time that another thread keeps putting off.

    On Linux a timerfd, because a timed wait of Python's would have to wake up, and stop the engine's thread for its
    turn at the interpreter's lock, only to see that it can sleep on. Elsewhere such a wait.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._closed = threading.Event()
        self._descriptor = -1
        spec = _TimerSpec()
        spec.value[0], spec.value[1] = int(seconds), max(1, int(seconds % 1 * 1e9))
        self._spec, self._soon = ctypes.byref(spec), ctypes.byref(_TimerSpec((0, 0), (0, 1)))
        with contextlib.suppress(OSError, AttributeError):  # another system
            self._set = ctypes.PyDLL(None).timerfd_settime
            self._set.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
            self._descriptor = ctypes.PyDLL(None).timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC)

    def put_off(self) -> None:
        """Ring so many seconds from now."""
        if self._descriptor >= 0:
            self._set(self._descriptor, 0, self._spec, None)

    def wait(self) -> bool:
        """Until it rings; False once it is closed."""
        if self._descriptor < 0:
            return not self._closed.wait(self._seconds / ARMS_PER_BOUND)
        with contextlib.suppress(OSError):
            os.read(self._descriptor, 8)
        if self._closed.is_set():
            os.close(self._descriptor)
        return not self._closed.is_set()

    def close(self) -> None:
        """Wake the waiting thread for the last time."""
        self._closed.set()
        if self._descriptor >= 0:
            self._set(self._descriptor, 0, self._soon, None)


class TimeLimit:
    """Context manager around a decision, used by one thread. Costs two uncontended locks (under a microsecond)."""

    def __init__(self, bound: float) -> None:
        """`bound` in seconds."""
        self._bound = bound
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._began = self._next_arm = 0.0
        self._raised = False
        self._alarm = Alarm(bound)
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> TimeLimit:
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="slacktide-watchdog", daemon=True)
            self._watcher.start()
        began = time.monotonic()
        with self._lock:
            self._began = began
            self._thread = threading.get_ident()
        if began >= self._next_arm:
            self._next_arm = began + self._bound / ARMS_PER_BOUND
            self._alarm.put_off()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disarm()

    def disarm(self) -> None:
        """No exception arrives once this has returned: one that is on its way is taken back."""
        with self._lock:
            self._thread = None
            if self._raised:
                self._raised = False
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threading.get_ident()), None)

    def _watch(self) -> None:
        while self._alarm.wait():
            while (left := self._check()) > 0:  # it rang for an earlier decision; this one has still time
                time.sleep(left)

    def _check(self) -> float:
        """Break off a decision that is over its bound; seconds that a running one has left, else 0."""
        with self._lock:
            if self._thread is None:
                return 0.0
            left = self._began + self._bound - time.monotonic()
            if left <= 0:
                kind = ctypes.py_object(TooSlow)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), kind)
                self._thread, self._raised = None, True
            return left

    def close(self) -> None:
        """End the watchdog."""
        if self._watcher is not None:
            self._alarm.close()


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
