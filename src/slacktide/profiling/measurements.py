"""Measured steps from wherever they come: designed experiments, a plug-in's step log, a detailed benchmark result.

All end as batch shapes and seconds of a whole turn of the engine, the host's share included, because that is what
passes between two tokens. A step log times the step alone; the time between a step's end and the next one's start,
while the engine had work, is the host's, and is fitted as so much per step and so much per sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from slacktide.core import shape as s
from slacktide.core.types import BoolArray, FloatArray, IntArray
from slacktide.errors import InputError
from slacktide.profiling import json_text
from slacktide.profiling.json_text import is_number

OUTLIER_SPREADS = 5.0
"""A sample so many robust standard deviations from the median of its point is an outlier (a page fault, another
process); 5 leaves honest tails alone."""
OUTLIER_LEAST = 0.15
"""And at least so far, relatively: with three samples a spread can come out tiny."""
LOG_BLOCK = 50
"""Consecutive steps of a log that stay together in cross-validation: neighbours are nearly copies of one another."""
LOG_WEIGHT = 0.1
"""What a step of a log counts beside a designed point: neighbours in a log are nearly copies of one another."""
MIN_GAPS = 20
"""Pairs of steps from which the host's share is fitted."""
MAX_STEP, MAX_SHAPE = 1e4, 1e16
"""Seconds of a step, and numbers of its shape (squares of 100 million tokens): beyond, a unit was mistaken."""
LONGEST_GAP = 1.0
"""Seconds between two steps beyond which the engine had nothing to do, whatever the log suggests."""


@dataclass(frozen=True)
class Host:
    """What the host adds to a step, seconds; `overlapped`: async scheduling hides it."""

    per_step: float = 0.0
    per_sequence: float = 0.0
    overlapped: bool = False
    known: bool = False
    """False: the source does not tell (already in the times, as with token times seen by a client)."""


@dataclass(frozen=True)
class Steps:
    """m measured steps. `group` int64[m]: steps that belong together (samples of a point, neighbours in a log)."""

    shapes: FloatArray
    """float64[m, 12]."""
    durations: FloatArray
    """float64[m] seconds of the steps alone, or of whole turns where `whole` says so."""
    whole: BoolArray
    """bool[m]: the host's share is in the duration already, as in times that a client sees."""
    designed: BoolArray
    """bool[m]: samples of a designed point, so that its group holds copies of one step."""
    group: IntArray
    weights: FloatArray
    """float64[m]: what a step counts in a fit."""
    host: Host
    source: str
    facts: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.durations)

    @property
    def times(self) -> FloatArray:
        """float64[m] seconds of whole turns."""
        share = self.host.per_step + self.host.per_sequence * self.shapes[:, s.NUM_SEQUENCES]
        return np.where(self.whole, self.durations, self.durations + share)


def outliers(times: FloatArray, group: IntArray) -> BoolArray:
    """bool[m]: samples far from the median of their group."""
    found = np.zeros(len(times), dtype=bool)
    for g in np.unique(group):
        rows = np.flatnonzero(group == g)
        middle = float(np.median(times[rows]))
        spread = 1.4826 * float(np.median(np.abs(times[rows] - middle)))
        far = np.abs(times[rows] - middle)
        found[rows] = (far > OUTLIER_SPREADS * spread) & (far > OUTLIER_LEAST * middle)
    return found


def fit_host(extra: FloatArray, sequences: FloatArray) -> Host:
    """The host's share from what turns took beyond their steps: the medians by batch size, through a rising line."""
    from slacktide.profiling.fit import nonnegative_least_squares

    sizes = np.unique(sequences)
    middle = np.array([np.median(extra[sequences == n]) for n in sizes])
    weight = np.sqrt(np.array([(sequences == n).sum() for n in sizes], dtype=np.float64))
    x = np.stack([np.ones(len(sizes)), sizes], axis=1)
    line = nonnegative_least_squares(x * weight[:, None], np.maximum(middle, 0.0) * weight)
    return Host(float(line[0]), float(line[1]), known=True)


class Line(dict[str, Any]):
    """A JSON object that knows where it stands."""

    number: int = 0
    """In its file, from 1."""


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file, one a line (`Line`); a last line that was cut off is left out. Raises InputError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from error
    found: list[dict[str, Any]] = []
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json_text.parse(line, f"{path}: line {number}")
        except InputError:
            if number == len(lines):  # without its line end: the writer was stopped in it
                break
            raise
        if not isinstance(value, dict):
            raise InputError(f"{path}: line {number}: found {str(value)[:40]!r}, expected a JSON object")
        found.append(Line(value))
        found[-1].number = number  # type: ignore[attr-defined]
    return found


def _number(path: Path, line: dict[str, Any], name: str, expected: str, least: float = -math.inf) -> float:
    """A line's number, NaN where it has none. Raises InputError naming line and field."""
    value = line.get(name)
    if value is None:
        return math.nan
    if not is_number(value) or not value >= least:
        where = f"line {line.number}: " if isinstance(line, Line) else ""
        raise InputError(f"{path}: {where}field {name}: found {repr(value)[:40]}, expected {expected}")
    return float(value)


def shapes_of(path: Path, lines: Sequence[dict[str, Any]], first: int = 1) -> tuple[FloatArray, FloatArray]:
    """(shapes float64[m, 12], duration_s float64[m]) of lines. Raises InputError naming line and field."""
    names = ("duration_s", *s.FIELD_NAMES)
    values = np.zeros((len(lines), len(names)))
    for i, line in enumerate(lines):
        for j, name in enumerate(names):
            value = line.get(name)
            most = MAX_STEP if j == 0 else MAX_SHAPE
            if not is_number(value) or not 0 <= value <= most or (j == 0 and value == 0):  # type: ignore[operator]
                wanted = f"seconds above 0, at most {most:g}" if j == 0 else f"a number of at least 0, at most {most:g}"
                found = "nothing" if value is None else repr(value)[:40]
                at = line.number if isinstance(line, Line) else first + i
                raise InputError(f"{path}: line {at}: field {name}: found {found}, expected {wanted}")
            values[i, j] = value
    return values[:, 1:], values[:, 0]


def read_steps(path: str | Path, max_num_batched_tokens: int | None = None) -> Steps:
    """Measured steps in a file: JSON lines of `slacktide profile` or of a step log, or a detailed benchmark result.

    `max_num_batched_tokens` is needed for a benchmark result only. Raises InputError.
    """
    path = Path(path)
    if path.suffix == ".json":
        from slacktide.profiling.blackbox import steps_of_result

        return steps_of_result(path, max_num_batched_tokens)
    lines = read_lines(path)
    head = lines[0] if lines and "facts" in lines[0] else {}
    if head:
        _check_facts(path, head)
    if head.get("kind") == "traffic":
        found = log_steps(path, lines[1:], whole=bool(head.get("whole")))
        return replace(found, facts=head["facts"])
    if not lines:
        raise InputError(f"{path}: no steps; expected the step log of the plug-in, or what slacktide profile measured")
    return designed_steps(path, lines) if head else log_steps(path, lines)


def _check_facts(path: Path, head: dict[str, Any]) -> None:
    """What a fit takes from the first line. Raises InputError naming the field."""
    facts = head["facts"]
    parts = {"facts": facts, "design": head.get("design", {})}
    if isinstance(facts, dict):
        parts |= {f"facts.{name}": facts.get(name, {}) for name in ("engine", "hardware", "versions")}
    for name, value in parts.items():
        if not isinstance(value, dict):
            raise InputError(f"{path}: line 1: field {name}: found {repr(value)[:40]}, expected a JSON object")
    for name, value in facts.get("engine", {}).items():
        if name in WHOLE_FACTS and value is not None and (type(value) is not int or not 1 <= value < 2**31):
            wanted = "a whole number of at least 1"
        elif name in ("enable_prefix_caching", "async_scheduling") and not isinstance(value, (bool, type(None))):
            wanted = "true or false"
        elif name == "frontend_ms" and value is not None and not is_number(value):
            wanted = "milliseconds"
        else:
            continue
        raise InputError(f"{path}: line 1: field facts.engine.{name}: found {repr(value)[:40]}, expected {wanted}")


WHOLE_FACTS = (
    "num_gpu_blocks", "block_size", "max_num_batched_tokens", "max_num_seqs", "max_model_len", "tensor_parallel",
)  # fmt: skip
"""Facts of an engine that are counts."""


def designed_steps(path: Path, lines: Sequence[dict[str, Any]]) -> Steps:
    """Steps that `slacktide profile` measured: outliers left out, the reference step used for drift alone."""
    head, rows = lines[0], [line for line in lines[1:] if not line.get("warmup")]
    notes = []
    for line in rows:
        _number(path, line, "t", "seconds")
    shapes_of(path, [line for line in rows if line.get("reference")], 2)  # drift reads them, the fit does not
    if (moved := drift(rows)) is not None and abs(moved) > DRIFT:
        notes.append(f"clocks drifted: the reference step took {100 * moved:+.1f} % longer at the end")
    rows = [line for line in rows if not line.get("reference")]
    if not rows:
        raise InputError(f"{path}: no measured step yet; run slacktide profile again with more --minutes")
    shapes, duration = shapes_of(path, rows, 2)
    keys = [str(line.get("point")) for line in rows]
    order = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    group = np.array([order[key] for key in keys], dtype=np.int64)
    bad = outliers(duration, group)
    if bad.any():
        notes.append(f"{int(bad.sum())} of {len(rows)} samples were outliers and are left out")
    extra = np.array([_number(path, line, "turn_s", "seconds", 0.0) for line in rows]) - duration
    here = ~bad & np.isfinite(extra)
    overlapped = bool(head["facts"].get("engine", {}).get("async_scheduling"))
    host = fit_host(extra[here], shapes[here, s.NUM_SEQUENCES]) if here.any() else Host(overlapped=overlapped)
    facts = {"design": head.get("design", {}), **head["facts"]}
    text = f"{len(order)} designed steps, {int((~bad).sum())} samples"
    shapes, duration, group = shapes[~bad], duration[~bad], group[~bad]
    weights = 1.0 / np.bincount(group)[group]  # the samples of a point share its weight
    here = np.ones(len(duration), dtype=bool)
    return Steps(shapes, duration, ~here, here, group, weights, host, text, facts, tuple(notes))


DRIFT = 0.03
"""Relative change of the reference step over a run that is worth a word: the size of the errors aimed at."""


def drift(rows: Sequence[dict[str, Any]]) -> float | None:
    """Relative change of the reference step's time from the start of a run to its end, by the median of all slopes
    (Theil and Sen); None with fewer than 6 references, or when the slopes' middle half includes none."""
    seen = [
        (float(r["t"]), math.log(float(r["duration_s"]))) for r in rows if r.get("reference") and r.get("t") is not None
    ]
    if len(seen) < 6:
        return None
    t, y = np.array(seen).T
    i, j = np.triu_indices(len(t), 1)
    apart = t[j] - t[i] > 0
    slopes = ((y[j] - y[i])[apart]) / ((t[j] - t[i])[apart])
    low, high = np.quantile(slopes, (0.25, 0.75))
    if low <= 0 <= high:
        return None
    return float(math.expm1(float(np.median(slopes)) * (t.max() - t.min())))


def log_steps(path: Path, lines: Sequence[dict[str, Any]], *, whole: bool = False) -> Steps:
    """Steps of a plug-in's step log; `whole`: durations are turns that a client saw."""
    shapes, duration = shapes_of(path, lines)
    if whole:
        return logged(shapes, duration, Host(), f"{len(shapes)} steps that a client saw", whole=True)
    start = np.array([_number(path, line, "start", "seconds") for line in lines])
    order = np.argsort(start, kind="stable")
    shapes, duration, start = shapes[order], duration[order], start[order]
    gap = start[1:] - (start[:-1] + duration[:-1])
    busy = shapes[1:, s.NUM_DECODES] > 0  # a decode in the next step: its request was there all along
    sure = busy & np.isfinite(gap) & (gap < LONGEST_GAP)
    notes: list[str] = []
    if sure.sum() < MIN_GAPS:
        host = Host()
        notes.append("too few steps in a row to tell the host's share: 0 is assumed")
    elif np.median(gap[sure]) < -1e-4:
        host = Host(overlapped=True, known=True)
    else:
        host = fit_host(gap[sure], shapes[:-1][sure][:, s.NUM_SEQUENCES])
    text = f"{len(shapes)} steps of {path.name}"
    return logged(shapes, duration, host, text, whole=False, notes=tuple(notes))


def logged(
    shapes: FloatArray, duration: FloatArray, host: Host, source: str, *, whole: bool, notes: tuple[str, ...] = (),
    facts: dict[str, Any] | None = None,
) -> Steps:  # fmt: skip
    """Steps of traffic, in order of time."""
    n = len(shapes)
    weights, group = np.full(n, LOG_WEIGHT), np.arange(n) // LOG_BLOCK
    designed = np.zeros(n, dtype=bool)
    return Steps(shapes, duration, np.full(n, whole), designed, group, weights, host, source, facts or {}, notes)


def _merged(facts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Facts of several sources; the first that tells something is believed, key by key within engine and the like."""
    found: dict[str, Any] = {}
    for part in reversed(facts):
        for key, value in part.items():
            old = found.get(key)
            found[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return found


def joined(parts: Sequence[Steps]) -> Steps:
    """All steps of several sources. The host's share is that of traffic, where a log tells it, else of the design.

    Raises InputError without any source.
    """
    if not parts:
        raise InputError("fit: expected at least one file of measured steps")
    offsets = np.cumsum([0, *(int(part.group.max(initial=-1)) + 1 for part in parts)])
    known = sorted((part for part in parts if part.host.known), key=lambda part: "design" in part.facts)
    return Steps(
        np.concatenate([part.shapes for part in parts]),
        np.concatenate([part.durations for part in parts]),
        np.concatenate([part.whole for part in parts]),
        np.concatenate([part.designed for part in parts]),
        np.concatenate([part.group + offset for part, offset in zip(parts, offsets[:-1], strict=True)]),
        np.concatenate([part.weights for part in parts]),
        known[0].host if known else parts[0].host,
        " and ".join(part.source for part in parts),
        _merged([part.facts for part in parts]),
        tuple(dict.fromkeys(note for part in parts for note in part.notes)),
    )
