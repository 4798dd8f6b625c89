"""Runs a design on an engine: warm-up, rounds in random order, a reference step in between, within a time budget.

Every sample is written down as soon as it is there (JSON lines, the step log's names), so that a run that was stopped
goes on where it was. The first line says on what it was measured; another engine cannot be mixed in.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from slacktide.core.latency_families import SCENES
from slacktide.core.shape import FIELD_NAMES
from slacktide.core.types import FloatArray
from slacktide.errors import InputError
from slacktide.profiling.experiments import Envelope, Point, describe, design, pilot_points, rough_times
from slacktide.profiling.measurements import read_lines

SAMPLES = 3
"""Steps timed on each visit to a point: setting a point up costs about as much as two of them."""
MAX_ROUNDS = 5
"""Visits to every point: 15 samples tell a median to about a third of their spread."""
REFERENCE_EVERY = 8
"""Visits between two looks at the reference step: a drift shows within a minute or two."""
FORMAT = 1
"""Version of the file's layout."""


class Sample(Protocol):
    """One timed step. Seconds; `turn` None where it cannot be told."""

    shape: FloatArray
    duration: float
    turn: float | None


class Engine(Protocol):
    """What can be profiled with designed steps."""

    @property
    def envelope(self) -> Envelope:
        """What it can run."""
        ...

    def facts(self) -> dict[str, Any]:
        """engine, versions, hardware."""
        ...

    def measure(self, point: Point, samples: int) -> list[Any]:
        """Samples of the point's step; fewer where the engine did not run it as asked."""
        ...


@dataclass
class Outcome:
    """How a run of the design ended."""

    path: Path
    points: int
    rounds: int
    samples: int
    missing: int
    """Points that have no sample yet."""
    notes: list[str]


class Log:
    """The file of samples."""

    def __init__(self, path: Path, facts: dict[str, Any], seed: int) -> None:
        self.path, self.rows = path, list[dict[str, Any]]()
        head: dict[str, Any] = {"format": FORMAT, "seed": seed, "facts": facts}
        if path.exists() and path.stat().st_size:
            lines = read_lines(path)
            if not lines or lines[0].get("format") != FORMAT or "facts" not in lines[0]:
                raise InputError(f"{path}: not a file of slacktide profile; name another --out")
            for part in ("engine", "versions", "hardware"):
                old, new = lines[0]["facts"].get(part), json.loads(json.dumps(facts.get(part)))
                if old != new:
                    changed = sorted(k for k in {**(old or {}), **new} if (old or {}).get(k) != new.get(k))
                    raise InputError(
                        f"{path}: measured on another engine ({part}: {', '.join(changed)} differ); name another "
                        "--out, or remove it"
                    )
            head, self.rows = lines[0], lines[1:]
        self.head = head
        self._write([head, *self.rows])
        self._file = path.open("a", encoding="utf-8")

    def _write(self, lines: list[dict[str, Any]]) -> None:
        """Anew, without a last line that was cut off."""
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        partial = self.path.with_name(self.path.name + ".partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(self.path)

    def set_design(self, value: dict[str, Any]) -> None:
        """Note how the points were chosen."""
        self.head["design"] = value
        self._file.close()
        self._write([self.head, *self.rows])
        self._file = self.path.open("a", encoding="utf-8")

    def add(self, row: dict[str, Any]) -> None:
        """One sample, on disk at once."""
        self.rows.append(row)
        self._file.write(json.dumps(row, separators=(",", ":")) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Done."""
        self._file.close()


def row_of(point: Point, number: int, sample: Any, at: float, **more: Any) -> dict[str, Any]:
    """A sample as its line."""
    values = {name: int(v) if v == int(v) else float(v) for name, v in zip(FIELD_NAMES, sample.shape, strict=True)}
    head = {"point": point.key, "round": number, **more, "t": round(at, 3), "duration_s": round(sample.duration, 9)}
    return head | {"turn_s": None if sample.turn is None else round(sample.turn, 9)} | values


def run_design(
    engine: Engine,
    path: Path,
    *,
    minutes: float,
    seed: int = 0,
    rounds: int = MAX_ROUNDS,
    samples: int = SAMPLES,
    progress: Callable[[float], None] = lambda _: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Outcome:
    """Measure as many points and rounds as fit into `minutes`, after a warm-up; the most telling points first.

    `progress` is called with the share of the budget (or of the work, if more) that is done. Raises InputError.
    """
    log = Log(path, engine.facts(), seed)
    try:
        return _Run(engine, log, minutes * 60.0, seed, rounds, samples, progress, clock).run()
    finally:
        log.close()


class _Run:
    def __init__(
        self, engine: Engine, log: Log, budget: float, seed: int, rounds: int, samples: int,
        progress: Callable[[float], None], clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._engine, self._log, self._budget, self._seed = engine, log, budget, seed
        self._rounds, self._samples, self._progress, self._clock = rounds, samples, progress, clock
        self._began = clock()
        self._before = max((float(row.get("t", 0.0)) for row in log.rows), default=0.0)
        self._visits = 0

    def _spent(self) -> float:
        return self._clock() - self._began

    def run(self) -> Outcome:
        pilots = pilot_points(self._engine.envelope, self._seed)
        warm = self._warm_up(pilots)
        self._budget += self._spent()  # the warm-up comes on top: how long it takes says nothing of the steps
        points = self._chosen(warm)
        self._log.set_design(describe(points) | {"seed": self._seed, "samples_per_visit": self._samples})
        every = [point for scene in SCENES for point in points.get(scene, ())]
        reference = self._reference(points)
        done = {(row["point"], row["round"]) for row in self._log.rows if not row.get("warmup")}
        finished = 0
        for number in range(self._rounds):
            order = np.random.default_rng((self._seed, number)).permutation(len(every))
            for position, i in enumerate(order):
                self._progress(max(self._spent() / self._budget, (number + position / len(every)) / self._rounds))
                if (every[i].key, number) in done:
                    continue
                if self._spent() > self._budget:
                    return self._outcome(every, finished)
                if self._visits % REFERENCE_EVERY == 0:
                    self._visit(reference, number, reference=True)
                self._visit(every[i], number)
                self._visits += 1
            finished = number + 1
        self._progress(1.0)
        return self._outcome(every, finished)

    def _warm_up(self, pilots: list[Point]) -> tuple[FloatArray, FloatArray]:
        """Every end of the range once, twice for the first: kernels get compiled, caches filled, costs become known."""
        self._visit(pilots[0], -1, 1, warmup=True)
        seen = [(point.shape, self._visit(point, -1, 1, warmup=True)) for point in pilots]
        good = [(shape, seconds) for shape, seconds in seen if seconds is not None]
        if not good:
            raise InputError("profile: the engine ran none of the pilot steps as planned; is its KV cache too small?")
        return np.stack([shape for shape, _ in good]), np.array([seconds for _, seconds in good])

    def _chosen(self, warm: tuple[FloatArray, FloatArray]) -> dict[str, list[Point]]:
        """The design, cut to what the rest of the budget holds in two rounds; ends of the range stay."""
        points = design(self._engine.envelope, self._seed, warm)
        cost = {
            scene: rough_times(np.stack([p.shape for p in found]), warm) * (self._samples + 2)
            for scene, found in points.items()
        }
        whole = sum(float(c.sum()) for c in cost.values())
        room = max(self._budget - self._spent(), 0.0) / 2
        if whole <= room:
            return points
        share = room / whole
        return {scene: found[: max(int(np.ceil(share * len(found))), 6)] for scene, found in points.items()}

    @staticmethod
    def _reference(points: dict[str, list[Point]]) -> Point:
        """The decode step in the middle of its scene's tokens: short, and as sensitive to clocks as any."""
        found = sorted(points["decode"], key=lambda point: (len(point.decodes), point.kv_tokens))
        return found[len(found) // 2]

    def _visit(self, point: Point, number: int, samples: int | None = None, **more: Any) -> float | None:
        """Measure a point; the median of its seconds."""
        seconds = []
        for sample in self._engine.measure(point, samples or self._samples):
            self._log.add(row_of(point, number, sample, self._before + self._spent(), **more))
            seconds.append(sample.duration)
        return float(np.median(seconds)) if seconds else None

    def _outcome(self, every: list[Point], finished: int) -> Outcome:
        rows = [row for row in self._log.rows if not row.get("warmup") and not row.get("reference")]
        seen = {row["point"] for row in rows}
        missing = sum(point.key not in seen for point in every)
        notes = []
        if missing:
            notes.append(f"{missing} of {len(every)} points have no sample: more --minutes would add them")
        return Outcome(self._log.path, len(every) - missing, finished, len(rows), missing, notes)
