"""What the plug-in writes down, off the engine's thread: a step log, and the requests served as a trace.

The step log holds one JSON object a line: what a fit needs (the batch's shape with its context sums, measured seconds)
and what an operator asks (mode, prediction, decision time, queue, blocks, fallbacks). The capture is a CSV in our own
trace format: times, lengths, targets, classes, prefix-block ids numbered anew; no text, no token ids, no hashes.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
import queue
import threading
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from slacktide.core.shape import FIELD_NAMES

OLD_FILES = 4
"""Rotated step logs kept: with 64 MB each, hours of a busy engine."""

FLUSH_EVERY = 0.5
"""Seconds between two turns of the writer."""

MAX_QUEUED = 100_000
"""Lines waiting for the writer, at most; beyond (a dead disk) lines are dropped and counted."""

MAX_PREFIX_BLOCKS = 2_000_000
"""Distinct prefix blocks a capture tells apart (some 200 MB); later ones count as unshared."""

CAPTURE_COLUMNS = (
    "arrival_s", "prompt_tokens", "output_tokens", "max_tokens", "slo_ttft_ms", "slo_tbt_ms", "slo_e2el_ms", "priority",
    "slo_class", "tenant", "abort_s", "hash_ids",
)  # fmt: skip


class Writer:
    """One daemon thread that runs all writing; nothing here ever raises into the engine."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._every: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self.dropped = self.failures = 0

    def every_turn(self, task: Callable[[], None]) -> None:
        """Run a task in each turn of the thread."""
        self._every.append(task)
        self._start()

    def put(self, task: Callable[[], None]) -> None:
        """Run a task once, soon."""
        if self._queue.qsize() >= MAX_QUEUED:
            self.dropped += 1
            return
        self._queue.put(task)
        self._start()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="slacktide-writer", daemon=True)
            self._thread.start()

    def _loop(self) -> None:
        while not self._stop.wait(FLUSH_EVERY):
            self._turn()
        self._turn()

    def _turn(self) -> None:
        tasks: list[Callable[[], None]] = []
        with contextlib.suppress(queue.Empty):
            while True:
                task = self._queue.get_nowait()
                if task is not None:
                    tasks.append(task)
        for task in [*tasks, *self._every]:
            try:
                task()
            except Exception:
                self.failures += 1

    def close(self) -> None:
        """Write what is left and end."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)


class RotatingFile:
    """Appends lines; moves the file to NAME.1 ... NAME.4 when it has grown to its size."""

    def __init__(self, path: str | Path, max_bytes: float) -> None:
        self._path, self._max_bytes = Path(path), max_bytes

    def write(self, lines: str) -> None:
        """Append, then rotate when the file is full. Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(lines)
            full = file.tell() >= self._max_bytes
        if full:
            for number in range(OLD_FILES - 1, 0, -1):
                old = self._path.with_name(f"{self._path.name}.{number}")
                if old.exists():
                    old.replace(self._path.with_name(f"{self._path.name}.{number + 1}"))
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))


class StepLine(NamedTuple):
    """One step, as it is logged. Times in seconds; `start` is Unix time."""

    start: float
    duration: float
    predicted: float | None
    decision: float
    mode: str
    shape: tuple[float, ...]
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_preempted: int
    fallback: str
    shadow: dict[str, Any] | None
    learned: dict[str, Any] | None = None
    """What the policy learned so far; on a line every LEARNED_EVERY seconds (ledger)."""
    slack: float = math.inf
    """Least of the live requests at the step's end, seconds; infinity where none has a deadline."""


def step_json(line: StepLine) -> str:
    """The line of the step log: short names for what repeats, the shape's fields by their own names."""
    data: dict[str, Any] = {
        "start": round(line.start, 6),
        "duration_s": round(line.duration, 9),
        "predicted_s": None if line.predicted is None else round(line.predicted, 9),
        "decision_s": round(line.decision, 9),
        "mode": line.mode,
        "num_running": line.num_running,
        "num_waiting": line.num_waiting,
        "num_free_blocks": line.num_free_blocks,
        "num_preempted": line.num_preempted,
    }
    data |= {name: (int(v) if v == int(v) else v) for name, v in zip(FIELD_NAMES, line.shape, strict=True)}
    if line.fallback:
        data["fallback"] = line.fallback
    if line.shadow is not None:
        data["shadow"] = line.shadow
    if line.learned is not None:
        data["learned"] = line.learned
    if math.isfinite(line.slack):
        data["slack_s"] = round(line.slack, 6)
    return json.dumps(data, separators=(",", ":"))


class StepLog:
    """Step lines to a rotating file, through the writer."""

    def __init__(self, writer: Writer, path: str, megabytes: float) -> None:
        self._file = RotatingFile(path, megabytes * 1e6)
        self._lines: list[StepLine] = []
        self._writer = writer
        writer.every_turn(self._flush)

    def add(self, line: StepLine) -> None:
        """Log a step; cheap."""
        if len(self._lines) < MAX_QUEUED:
            self._lines.append(line)
        else:
            self._writer.dropped += 1

    def _flush(self) -> None:
        lines, self._lines = self._lines, []
        if lines:
            self._file.write("".join(step_json(line) + "\n" for line in lines))


def _put_aside(path: Path) -> None:
    """Rename a file to the first free of NAME.1, NAME.2, ...: a restart must not cost what was captured before."""
    if not path.is_file() or not path.stat().st_size:
        return
    number = 1
    while (old := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.replace(old)


class Served(NamedTuple):
    """One request that ended, for the capture. Times in seconds since the engine started; SLOs in seconds."""

    arrival: float
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    slo_ttft: float
    slo_tbt: float
    slo_e2e: float
    priority: int
    slo_class: str
    tenant: str
    abort: float | None
    hashes: tuple[Any, ...]


class Listener(Protocol):
    """Wants to know of every request that ended."""

    def add(self, row: Served) -> None:
        """A request ended and was counted; has to be cheap."""
        ...


class Capture:
    """Requests that ended, as a trace that `--trace` reads."""

    def __init__(self, writer: Writer | None, path: str, block_size: int) -> None:
        """Without a writer nothing is written before `flush` is called, and an older file is replaced."""
        self._keeps = writer is not None
        self._path, self._block_size = Path(path), block_size
        self._rows: list[Served] = []
        self._ids: dict[Any, int] = {}
        self._next_id = 0
        self._begun = False
        self.num_empty = 0
        """Requests that ended before their first token: no trace row, because their length is unknown."""
        if writer is not None:
            writer.every_turn(self.flush)

    def add(self, row: Served) -> None:
        """Note a request; cheap."""
        if row.num_output_tokens < 1 or row.num_prompt_tokens < 1:
            self.num_empty += 1
            return
        self._rows.append(row)

    def flush(self) -> None:
        """Write what was noted since the last time. Raises OSError."""
        rows, self._rows = self._rows, []
        if not rows:
            return
        text = StringIO()
        lines = csv.writer(text, lineterminator="\n")
        if not self._begun:
            lines.writerow(CAPTURE_COLUMNS)
        for row in rows:
            targets = ["" if slo == float("inf") else f"{slo * 1e3:.6g}" for slo in row[4:7]]
            abort = "" if row.abort is None else f"{row.abort:.6f}"
            lines.writerow([
                f"{row.arrival:.6f}", row.num_prompt_tokens, row.num_output_tokens, row.max_tokens, *targets,
                row.priority, row.slo_class, row.tenant, abort, " ".join(map(str, self._numbers(row))),
            ])  # fmt: skip
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._keeps and not self._begun:
            _put_aside(self._path)
        with self._path.open("a" if self._begun else "w", encoding="utf-8") as file:
            file.write(text.getvalue())
        self._begun = True

    def _numbers(self, row: Served) -> list[int]:
        """Prefix-block ids: equal hashes get equal numbers; a block that the prompt does not fill is its own."""
        full = row.num_prompt_tokens // self._block_size
        numbers: list[int] = []
        for block in row.hashes[:full]:
            number = self._ids.get(block)
            if number is None:
                number = self._fresh()
                if len(self._ids) < MAX_PREFIX_BLOCKS:
                    self._ids[block] = number
            numbers.append(number)
        blocks = -(-row.num_prompt_tokens // self._block_size)
        return numbers + [self._fresh() for _ in range(blocks - len(numbers))] if row.hashes else []

    def _fresh(self) -> int:
        self._next_id += 1
        return self._next_id - 1
