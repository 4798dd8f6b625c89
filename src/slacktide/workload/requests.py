"""The requests of one run, as columns: what arrives when, how long it is, and what was promised.

Times in seconds, lengths in tokens. Readers, generators and arrival processes all end in a `Workload`; the simulator
and the load generator start from one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from slacktide.core.types import MAX_SLO_SECONDS, SLO, BoolArray, FloatArray, IntArray, Request
from slacktide.errors import InputError

MAX_REQUEST_TOKENS = 10_000_000
"""Longest prompt or output taken as meant: the largest context window any model advertises (Llama 4 Scout: 10 M)."""

MAX_SECONDS = 1e9
"""Longest span of a trace (31 years): beyond it, milliseconds or nanoseconds were taken for seconds."""

DEFAULT_LABELS = ("default",)
"""Tenant and SLO class of a request whose trace names none."""


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A closed loop: `concurrency` users; each sends its next request `think_time` s after its last one ended.

    Arrival times then depend on the server, so they cannot stand in a column: the simulator hands out the workload's
    requests in row order. The first `concurrency` requests arrive at time 0.
    """

    concurrency: int
    think_time: float = 0.0

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise InputError(f"closed loop: concurrency={self.concurrency}, expected 1 or more")
        if not 0 <= self.think_time <= MAX_SECONDS:
            raise InputError(f"closed loop: think={self.think_time}, expected seconds from 0 on")


@dataclass(frozen=True, eq=False)
class Workload:
    """Requests sorted by (arrival_time, row of the source); every array has length n and is read-only.

    Only the first three columns are needed; the others have defaults (no SLO, priority 0, one tenant, no session, no
    abort, `max_tokens` = the largest output length). Unsorted rows are sorted stably. Raises InputError when a column
    has another length, or a value out of its range.
    """

    arrival_time: FloatArray
    """Seconds, from 0 on. All 0 in a closed loop (see `closed`)."""
    num_prompt_tokens: IntArray
    num_output_tokens: IntArray
    """True output length, at most `max_tokens`; hidden from policies."""
    max_tokens: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """The client's limit on output tokens."""
    slo_ttft: FloatArray = field(default_factory=lambda: np.empty(0))
    """Seconds; infinity = no such target. The same for slo_tbt and slo_e2e."""
    slo_tbt: FloatArray = field(default_factory=lambda: np.empty(0))
    slo_e2e: FloatArray = field(default_factory=lambda: np.empty(0))
    priority: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Lower is served first (vLLM's sense)."""
    tenant: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Code into `tenants`."""
    slo_class: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Code into `slo_classes`."""
    session: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Code into `sessions`; -1 = none."""
    abort_time: FloatArray = field(default_factory=lambda: np.empty(0))
    """When the client gives up, on the clock of arrival_time; infinity = never."""
    failed: BoolArray = field(default_factory=lambda: np.empty(0, dtype=np.bool_))
    """True: failed in the source and kept by an explicit option; its output length is the option's, not a fact."""
    hash_ids: tuple[IntArray, IntArray] | None = None
    """(values i8[total], offsets i8[n+1]): ids of the prompt's blocks of `hash_block_size` tokens; equal leading ids
    mean a shared prefix. Request i owns values[offsets[i]:offsets[i+1]]."""
    hash_block_size: int = 512
    tenants: tuple[str, ...] = DEFAULT_LABELS
    slo_classes: tuple[str, ...] = DEFAULT_LABELS
    sessions: tuple[str, ...] = ()
    closed: ClosedLoop | None = None
    name: str = "workload"
    source: str = ""
    notes: tuple[str, ...] = ()
    """What was left out, converted or assumed, one line each. Hosts print them."""

    def __post_init__(self) -> None:
        n = len(self.arrival_time)
        if n == 0:
            raise InputError(f"{self.name}: no requests")
        self._fill_defaults(n)
        self._check_lengths(n)
        if (np.diff(self.arrival_time) < 0).any():
            order = np.argsort(self.arrival_time, kind="stable")
            for name in COLUMNS:
                object.__setattr__(self, name, getattr(self, name)[order])
            if self.hash_ids is not None:
                object.__setattr__(self, "hash_ids", take_ragged(*self.hash_ids, order))
        self._check_values()
        arrays = [getattr(self, name) for name in COLUMNS] + list(self.hash_ids or ())
        for array in arrays:
            array.flags.writeable = False

    def _fill_defaults(self, n: int) -> None:
        """Fill columns that were left empty and copy the others into their types."""
        outputs = np.asarray(self.num_output_tokens)
        largest = int(outputs.max()) if len(outputs) else 1
        fills: dict[str, Any] = dict(COLUMNS, max_tokens=largest)
        for name, fill in fills.items():
            given = np.asarray(getattr(self, name))
            dtype = _DTYPES[name]
            column = np.full(n, fill, dtype=dtype) if fill is not None and len(given) == 0 else given
            if dtype is np.int64 and column.dtype.kind not in "iub":
                raise InputError(f"{self.name}: column {name} holds {column.dtype}, expected integers")
            object.__setattr__(self, name, np.array(column, dtype=dtype))
        if self.hash_ids is not None:
            ids = tuple(np.array(part, dtype=np.int64) for part in self.hash_ids)
            object.__setattr__(self, "hash_ids", ids)

    def _check_lengths(self, n: int) -> None:
        for name in COLUMNS:
            column = getattr(self, name)
            if column.shape != (n,):
                raise InputError(f"{self.name}: column {name} has {column.shape} values, expected ({n},)")
        if self.hash_ids is not None:
            values, offsets = self.hash_ids
            ok = offsets.shape == (n + 1,) and offsets[0] == 0 and offsets[-1] == len(values)
            if not ok or (np.diff(offsets) < 0).any() or self.hash_block_size < 1:
                raise InputError(f"{self.name}: hash_ids do not fit {n} requests of blocks of {self.hash_block_size}")

    def _check_values(self) -> None:
        """Raise InputError for the first row whose value is out of range."""
        arrival = self.arrival_time
        self._require(np.isfinite(arrival) & (arrival >= 0) & (arrival <= MAX_SECONDS), "arrival_time", "0 to 1e9 s")
        for name in ("num_prompt_tokens", "num_output_tokens", "max_tokens"):
            column = getattr(self, name)
            self._require((column >= 1) & (column <= MAX_REQUEST_TOKENS), name, f"1 to {MAX_REQUEST_TOKENS:,} tokens")
        self._require(self.num_output_tokens <= self.max_tokens, "num_output_tokens", "at most max_tokens")
        for name in ("slo_ttft", "slo_tbt", "slo_e2e"):
            column = getattr(self, name)
            good = (column > 0) & ((column <= MAX_SLO_SECONDS) | np.isposinf(column))
            self._require(good, name, f"more than 0 and at most {MAX_SLO_SECONDS:g} s")
        self._require(self.abort_time >= arrival, "abort_time", "not before arrival_time")
        for name, labels, lowest in (
            ("tenant", self.tenants, 0),
            ("slo_class", self.slo_classes, 0),
            ("session", self.sessions, -1),
        ):
            column = getattr(self, name)
            self._require((column >= lowest) & (column < max(len(labels), lowest + 1)), name, "a code of its labels")
        if self.hash_ids is not None:
            most = -(-self.num_prompt_tokens // self.hash_block_size)
            self._require(np.diff(self.hash_ids[1]) <= most, "num_prompt_tokens", "at least what its hash_ids cover")

    def _require(self, good: BoolArray, name: str, expected: str) -> None:
        if not good.all():
            row = int(np.argmin(good))
            raise InputError(f"{self.name}: request {row}: {name} is {getattr(self, name)[row]}, expected {expected}")

    def __len__(self) -> int:
        return len(self.arrival_time)

    def request(self, index: int) -> Request:
        """Request `index` as the object that policies may see (no true output length)."""
        slo = SLO(float(self.slo_ttft[index]), float(self.slo_tbt[index]), float(self.slo_e2e[index]))
        numbers = {
            name: int(getattr(self, name)[index])
            for name in ("num_prompt_tokens", "max_tokens", "priority", "tenant", "slo_class")
        }
        return Request(id=index, arrival_time=float(self.arrival_time[index]), slo=slo, **numbers)

    @property
    def span(self) -> float:
        """Seconds from the first to the last arrival."""
        return float(self.arrival_time[-1] - self.arrival_time[0])

    @property
    def rate(self) -> float:
        """Mean arrival rate in requests/s: (n - 1) / span. Infinite when all arrive at once, NaN for one request."""
        if len(self) < 2:
            return math.nan
        return (len(self) - 1) / self.span if self.span > 0 else math.inf

    def take(self, rows: npt.ArrayLike) -> Workload:
        """The requests of `rows` (indices or a mask); repeats are allowed. Sorted by arrival again."""
        index = np.asarray(rows)
        if index.dtype == np.bool_:
            index = np.flatnonzero(index)
        index = index.astype(np.int64)
        changes: dict[str, Any] = {name: getattr(self, name)[index] for name in COLUMNS}
        if self.hash_ids is not None:
            changes["hash_ids"] = take_ragged(*self.hash_ids, index)
        return replace(self, **changes)

    def first(self, n: int) -> Workload:
        """The first n requests. Raises InputError when there are fewer, or n < 1."""
        if not 1 <= n <= len(self):
            raise InputError(f"{self.name}: {n} requests wanted, expected 1 to {len(self)}")
        return self.take(np.arange(n))

    def with_arrivals(self, arrival_time: FloatArray) -> Workload:
        """The same requests, row by row, at other times. Each client's patience (abort - arrival) stays."""
        times = np.asarray(arrival_time, dtype=np.float64)
        return replace(self, arrival_time=times, abort_time=times + (self.abort_time - self.arrival_time))

    def scaled_to(self, rate: float) -> Workload:
        """Time stretched or squeezed so that the mean rate becomes `rate` requests/s; infinity = all at once.

        SLOs and patience are the users' and stay; a single request has no rate and stays, too. Raises InputError when
        several requests have no span to stretch.
        """
        check_rate(rate)
        if math.isinf(rate):
            return self.with_arrivals(np.zeros(len(self)))
        if self.closed is not None:
            raise InputError(f"{self.name}: a closed loop has no rate; set its concurrency instead")
        if len(self) == 1:
            return self
        if not self.span > 0:
            raise InputError(
                f"{self.name}: all {len(self)} arrivals at one time, so its rate cannot be set to {rate:g}"
                " requests/s; use --arrival poisson"
            )
        return self.with_arrivals(self.arrival_time * (self.rate / rate))

    def with_notes(self, *notes: str) -> Workload:
        """The same workload with further notes."""
        return replace(self, notes=self.notes + notes)

    def describe(self) -> dict[str, Any]:
        """Figures of the workload for records and lists: counts, rate, mean and percentiles of the lengths."""
        figures: dict[str, Any] = {"name": self.name, "requests": len(self), "span_s": self.span, "rate": self.rate}
        for key, column in (("prompt_tokens", self.num_prompt_tokens), ("output_tokens", self.num_output_tokens)):
            p50, p90, p99 = (float(value) for value in np.percentile(column, (50, 90, 99)))
            figures[key] = {"mean": float(column.mean()), "p50": p50, "p90": p90, "p99": p99, "max": int(column.max())}
        return figures


COLUMNS: dict[str, Any] = {
    "arrival_time": None, "num_prompt_tokens": None, "num_output_tokens": None, "max_tokens": 1,
    "slo_ttft": np.inf, "slo_tbt": np.inf, "slo_e2e": np.inf, "priority": 0, "tenant": 0, "slo_class": 0,
    "session": -1, "abort_time": np.inf, "failed": False,
}  # fmt: skip
"""Every column with the value of a missing one; None = the column is needed."""

_DTYPES: dict[str, Any] = dict.fromkeys(COLUMNS, np.int64)
_DTYPES |= dict.fromkeys(("arrival_time", "slo_ttft", "slo_tbt", "slo_e2e", "abort_time"), np.float64)
_DTYPES |= {"failed": np.bool_}


MAX_RATE = 1e9
"""Highest finite rate in requests/s; beyond any server by far. Infinity means all at once, as in vLLM."""


def check_rate(rate: float) -> None:
    """Raise InputError unless `rate` is a positive number of requests/s (infinity included)."""
    if not rate > 0 or (rate > MAX_RATE and not math.isinf(rate)):
        raise InputError(f"rate {rate} requests/s: expected more than 0 and at most {MAX_RATE:g}, or inf")


def take_ragged(values: IntArray, offsets: IntArray, rows: IntArray) -> tuple[IntArray, IntArray]:
    """Rows of a ragged array (values[offsets[i]:offsets[i+1]] is row i), in the order given."""
    counts = np.diff(offsets)[rows]
    new_offsets = np.concatenate(([0], np.cumsum(counts)))
    gather = np.repeat(offsets[rows] - new_offsets[:-1], counts) + np.arange(new_offsets[-1])
    return values[gather], new_offsets
