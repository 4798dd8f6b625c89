"""The outcome of a run, simulated or real, as columns: what happened to every request, token and step.

Seconds, tokens and KV blocks. A simulated run gives each token as the step whose end produced it (int32: a run of
130 million tokens fits in half a gigabyte); a real run gives each token's own time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from slacktide.core.types import BoolArray, FloatArray, IntArray

Int32Array = npt.NDArray[np.int32]

FINISHED, REJECTED, EXPIRED, ABORTED, FAILED, CUT_OFF = 0, 1, 2, 3, 4, 5
END_REASONS = ("finished", "rejected", "expired", "aborted", "failed", "cut_off")
"""Names of the values of `RunLog.end_reason`, by code. `cut_off`: still open when a real run ended."""

TOKEN_BLOCK = 1 << 20
"""Tokens handled at once: the f8 temporaries of a block (8 MB each) stay near the caches and far from memory limits."""

REQUEST_COLUMNS: dict[str, tuple[str, float | int | None]] = {
    "arrival_time": ("f8", None),
    "num_prompt_tokens": ("i8", None),
    "num_output_tokens": ("i8", None),
    "slo_ttft": ("f8", math.inf),
    "slo_tbt": ("f8", math.inf),
    "slo_e2e": ("f8", math.inf),
    "tenant": ("i8", 0),
    "slo_class": ("i8", 0),
    "first_scheduled_time": ("f8", math.nan),
    "end_time": ("f8", None),
    "end_reason": ("i1", None),
    "abort_time": ("f8", math.inf),
    "relegated": ("?", 0),
    "num_preemptions": ("i8", 0),
    "recomputed_tokens": ("i8", 0),
    "cached_tokens": ("i8", 0),
    "scheduled_tokens": ("i8", 0),
}
"""Per-request columns: dtype, and the value where a source does not give the column (None: it must)."""

STEP_COLUMNS: dict[str, str] = {
    "start": "f8",
    "duration": "f8",
    "num_tokens": "i4",
    "num_prefill_tokens": "i4",
    "num_prefills": "i4",
    "num_decodes": "i4",
    "num_running": "i4",
    "num_waiting": "i4",
    "num_free_blocks": "i4",
    "num_preempted": "i4",
}
"""Per-step columns and their dtypes. A run without steps (a real one) has none of them."""

_UNSET: Any = None  # a column the source does not give; __post_init__ fills it, so no reader ever sees None


@dataclass(frozen=True, kw_only=True, eq=False)
class RunLog:
    """Outcome of a run. Arrays are made read-only; wrong lengths, dtypes or times raise ValueError naming the column.

    Per request (length n, in the order of the workload; times in seconds on the run's clock):
    """

    arrival_time: FloatArray
    num_prompt_tokens: IntArray
    num_output_tokens: IntArray
    """Output tokens the request wanted (its true length), however many it got."""
    end_time: FloatArray
    """NaN while open. At least the time of the last token."""
    end_reason: npt.NDArray[np.int8]
    """Position in END_REASONS."""
    slo_ttft: FloatArray = _UNSET
    """SLO columns: infinity (the default) means no such target."""
    slo_tbt: FloatArray = _UNSET
    slo_e2e: FloatArray = _UNSET
    tenant: IntArray = _UNSET
    slo_class: IntArray = _UNSET
    first_scheduled_time: FloatArray = _UNSET
    """NaN when never scheduled or not known."""
    abort_time: FloatArray = _UNSET
    """When the client leaves by itself; infinity = never. An abort before it was ours."""
    relegated: BoolArray = _UNSET
    num_preemptions: IntArray = _UNSET
    recomputed_tokens: IntArray = _UNSET
    """Tokens computed again because a preemption lost them and the prefix cache did not keep them."""
    cached_tokens: IntArray = _UNSET
    """Tokens supplied by the prefix cache at each admission; after a preemption also what it kept of the request."""
    scheduled_tokens: IntArray = _UNSET
    """Tokens scheduled in all, recomputed ones included."""

    # Tokens. Those of request i are at token_offsets[i] : token_offsets[i + 1]. Exactly one of the two arrays is given.
    token_offsets: IntArray
    token_step: Int32Array | None = None
    """int32[tokens]: index of the step whose end produced the token; never falls within a request."""
    token_time: FloatArray | None = None
    """float64[tokens]: when the token (or chunk of tokens) came."""
    num_delivered_tokens: IntArray = _UNSET
    """Output tokens delivered. Differs from the count of entries only where a real server sent several per chunk."""

    # Steps (length m; none for a real run).
    start: FloatArray = _UNSET
    duration: FloatArray = _UNSET
    num_tokens: Int32Array = _UNSET
    num_prefill_tokens: Int32Array = _UNSET
    num_prefills: Int32Array = _UNSET
    num_decodes: Int32Array = _UNSET
    num_running: Int32Array = _UNSET
    num_waiting: Int32Array = _UNSET
    num_free_blocks: Int32Array = _UNSET
    num_preempted: Int32Array = _UNSET
    shape: npt.NDArray[np.float32] | None = None
    """float32[m, any]: batch shapes (core/shape.py), when kept."""

    # The whole run.
    sim_duration: float
    """Length of the run in seconds: from `start_time` to its last event."""
    start_time: float = 0.0
    """Where the run's clock started, seconds."""
    num_blocks: int = 0
    block_size: int = 0
    wall_time: float | None = None
    """Seconds of real time the simulation took."""
    decision_time: float | None = None
    """Seconds of real time spent in the policy, all steps together."""
    tenants: tuple[str, ...] = ()
    """Names of the codes in `tenant`. () where there is only the code 0."""
    slo_classes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """What a reader of the numbers must know: what was left out, counted or assumed."""

    def __post_init__(self) -> None:
        n = len(self.arrival_time)
        for name, (dtype, fill) in REQUEST_COLUMNS.items():
            value = getattr(self, name)
            self._set(name, np.full(n, fill, dtype) if value is None and fill is not None else value, dtype, n)
        m = 0 if _absent(self.start) else len(self.start)
        for name, dtype in STEP_COLUMNS.items():
            value = getattr(self, name)
            self._set(name, np.zeros(m, dtype) if value is None else value, dtype, m)
        self._set("token_offsets", self.token_offsets, "i8", n + 1)
        self._check_tokens(m)
        delivered = self.num_delivered_tokens
        self._set("num_delivered_tokens", np.diff(self.token_offsets) if _absent(delivered) else delivered, "i8", n)
        if self.shape is not None:
            _require(self.shape.ndim == 2 and len(self.shape) == m, "shape", f"{m} rows", self.shape.shape)
        self._check_times()
        for codes, names in (("tenant", "tenants"), ("slo_class", "slo_classes")):
            top = int(getattr(self, codes).max(initial=0)) + 1
            known = max(len(getattr(self, names)), 1)
            _require(int(getattr(self, codes).min(initial=0)) >= 0 and top <= known, codes, f"codes below {known}", top)

    def _set(self, name: str, value: Any, dtype: str, length: int) -> None:
        """Store a read-only column; numbers of another kind (floats for integers) are refused, not truncated."""
        array = np.asarray(value)
        _require(array.shape == (length,), name, f"length {length}", array.shape)
        kind_fits = array.size == 0 or np.can_cast(array.dtype, np.dtype(dtype), "same_kind")
        _require(kind_fits, name, f"dtype {dtype}", array.dtype)
        column = array.astype(dtype, copy=False).view()
        column.flags.writeable = False
        object.__setattr__(self, name, column)

    def _check_tokens(self, m: int) -> None:
        offsets = self.token_offsets
        _require(offsets[0] == 0 and bool((np.diff(offsets) >= 0).all()), "token_offsets", "0 and rising", offsets[:3])
        _require((self.token_step is None) != (self.token_time is None), "token_step, token_time", "exactly one", "")
        total = int(offsets[-1])
        if self.token_step is not None:
            low, high = (int(np.min(self.token_step)), int(np.max(self.token_step))) if total else (0, -1)
            _require(low >= 0 and high < m, "token_step", f"indices of {m} steps", (low, high))
            self._set("token_step", self.token_step, "i4", total)
        else:
            self._set("token_time", self.token_time, "f8", total)

    def _check_times(self) -> None:
        """Time never goes back: arrivals before tokens, tokens in order, ends not before the last token."""
        _require(math.isfinite(self.sim_duration) and self.sim_duration >= 0, "sim_duration", ">= 0", self.sim_duration)
        _require(bool(np.isfinite(self.arrival_time).all()), "arrival_time", "finite times", "NaN or infinity")
        steps_rise = bool((np.diff(self.step_end) >= 0).all()) and bool((self.duration >= 0).all())
        _require(steps_rise, "start, duration", "step ends that rise", "a fall or NaN")
        for a, b, low, high in self.token_blocks():
            times, starts = self.times(low, high), self.token_offsets[a:b] - low
            follows = np.ones(high - low, dtype=bool)
            np.greater_equal(times[1:], times[:-1], out=follows[1:])
            follows[starts[starts < high - low]] = True  # the first token of a request follows none
            follows &= ~np.isnan(times)
            _require(bool(follows.all()), "token times", "rising within a request", "a fall or NaN")
        early = self.first_token_time < self.arrival_time
        _require_no_row(early, "token times", "none before its request arrives")
        known, reason = ~np.isnan(self.end_time), self.end_reason
        bad = known & (self.end_time < np.fmax(self.arrival_time, self.last_token_time))
        _require_no_row(bad, "end_time", "not before the last token")
        codes_fit = int(reason.min(initial=0)) >= 0 and int(reason.max(initial=0)) < len(END_REASONS)
        _require(codes_fit, "end_reason", f"0..{len(END_REASONS) - 1}", reason)
        bad = known == (reason == CUT_OFF)
        _require_no_row(bad, "end_time", "NaN for cut_off rows, and only there")

    @property
    def n(self) -> int:
        """Number of requests that arrived."""
        return len(self.arrival_time)

    @property
    def num_steps(self) -> int:
        """Number of engine steps."""
        return len(self.start)

    @property
    def end_of_run(self) -> float:
        """When the run ended, on its clock."""
        return self.start_time + self.sim_duration

    @cached_property
    def step_end(self) -> FloatArray:
        """float64[m]: when each step ended; a step's tokens exist from then on."""
        return np.asarray(self.start + self.duration)

    @cached_property
    def num_entries(self) -> IntArray:
        """int64[n]: entries in the token arrays of each request."""
        return np.diff(self.token_offsets)

    @cached_property
    def first_token_time(self) -> FloatArray:
        """float64[n]; NaN before the first token."""
        return self._edge(self.token_offsets[:-1])

    @cached_property
    def last_token_time(self) -> FloatArray:
        """float64[n]; NaN before the first token."""
        return self._edge(self.token_offsets[1:] - 1)

    def _edge(self, positions: IntArray) -> FloatArray:
        result = np.full(self.n, np.nan)
        has = self.num_entries > 0
        result[has] = self.times_at(positions[has])
        return result

    @cached_property
    def finished(self) -> BoolArray:
        """bool[n]: served to the end."""
        return np.asarray(self.end_reason == FINISHED)

    def times(self, low: int, high: int) -> FloatArray:
        """Times of the tokens low..high-1 of the whole run, float64[high - low]. A view where the run stores times."""
        if self.token_step is not None:
            return np.asarray(self.step_end[self.token_step[low:high]])
        assert self.token_time is not None
        return self.token_time[low:high]

    def times_at(self, positions: IntArray) -> FloatArray:
        """Times of the tokens at the given positions, float64[len(positions)]."""
        if self.token_step is not None:
            return np.asarray(self.step_end[self.token_step[positions]])
        assert self.token_time is not None
        return np.asarray(self.token_time[positions])

    def request_times(self, i: int) -> FloatArray:
        """Token times of request i, float64[its tokens]."""
        return self.times(int(self.token_offsets[i]), int(self.token_offsets[i + 1]))

    def token_blocks(self) -> Iterator[tuple[int, int, int, int]]:
        """Cut the run into stretches (a, b, low, high): requests a..b-1 have the tokens low..high-1.

        Stretches hold at most TOKEN_BLOCK tokens, or one request; those without tokens are skipped.
        """
        a = 0
        while a < self.n:
            low = int(self.token_offsets[a])
            b = max(a + 1, int(np.searchsorted(self.token_offsets, low + TOKEN_BLOCK, side="right")) - 1)
            high = int(self.token_offsets[b])
            if high > low:
                yield a, b, low, high
            a = b


def _absent(column: object) -> bool:
    return column is None


def _require(fits: bool, column: str, expected: str, found: object) -> None:
    if not fits:
        raise ValueError(f"RunLog: {column}: expected {expected}, found {found}")


def _require_no_row(bad: BoolArray, column: str, expected: str) -> None:
    for row in np.flatnonzero(bad):
        _require(False, column, expected, f"row {row}")
