"""Which steps to measure: the fewest that pin the predictor, chosen before anything is timed.

A point is one engine step: prompt chunks (new tokens after cached ones) and decodes (each with its context). Candidates
cover pure prefill, pure decode and mixed steps over the whole range of an engine, with equal and skewed contexts. Of
them the design takes, scene by scene, the point that adds most to the determinant of the information matrix of the
predictor's features (sequential D-optimal design: Dykstra, Technometrics 13(3), 1971; Wynn, Annals of Mathematical
Statistics 41(5), 1970), in units of the expected step time, because the fit minimises relative errors.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from slacktide.core import shape as s
from slacktide.core.latency_extended import KNOTS, extended_features
from slacktide.core.latency_families import SCENES
from slacktide.core.types import FloatArray
from slacktide.errors import InputError

POINTS_PER_FEATURE = 1.5
"""Points of a scene for each feature that its candidates tell apart: a fit with a third of its freedom left over."""
MIN_POINTS = 10
"""Least points of a scene."""
MAX_CANDIDATES = 1500
"""Candidates of a scene that the design looks at: the greedy search stays under a second."""
KV_SHARE = 0.85
"""Share of the KV pool that one point may fill: the rest is room for what the step itself writes, and for rounding."""
CONTEXTS = (16, 64, 256, 1024, 4096, 16384)
"""Decode contexts and cached prompt tokens: a factor 4 apart, as attention grows linearly with them."""
SKEW = 8
"""In a skewed batch a quarter of the rows have this many times the context of the others: a few long documents in a
crowd of chats."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """What an engine can run in one step. Tokens and sequences; `kv_tokens` is the whole KV pool."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    kv_tokens: int
    block_size: int = 16


@dataclass(frozen=True, slots=True)
class Point:
    """One step: chunks as (new tokens, cached tokens) and the contexts of the decodes."""

    chunks: tuple[tuple[int, int], ...] = ()
    decodes: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        """A short name, the same for equal points: `p256@0+p64@128;d4x512+d1x4096`."""
        chunks = "+".join(f"p{c}@{u}" for c, u in self.chunks)
        groups = itertools.groupby(sorted(self.decodes))
        decodes = "+".join(f"d{len(list(group))}x{context}" for context, group in groups)
        return ";".join(filter(None, (chunks, decodes)))

    @property
    def shape(self) -> FloatArray:
        """`core.shape.batch_shape` of the step, float64[12]."""
        rows = [*self.chunks, *((1, context) for context in self.decodes)]
        tokens, contexts = (np.array([row[i] for row in rows], dtype=np.int64) for i in (0, 1))
        return s.batch_shape(tokens, contexts, np.arange(len(rows)) >= len(self.chunks))

    @property
    def kv_tokens(self) -> int:
        """Tokens in the KV cache once the step has run."""
        return sum(c + u for c, u in self.chunks) + sum(self.decodes) + len(self.decodes)


def parse_key(key: str) -> Point:
    """The point behind `Point.key`. Raises InputError for a text that is none."""
    chunks: list[tuple[int, int]] = []
    decodes: list[int] = []
    try:
        for part in key.replace(";", "+").split("+"):
            first, second = part[1:].split("@" if part[0] == "p" else "x")
            if part[0] == "p":
                chunks.append((int(first), int(second)))
            elif part[0] == "d":
                decodes += [int(second)] * int(first)
            else:
                raise ValueError(part)
    except (ValueError, IndexError) as error:
        raise InputError(f"point {key!r}: expected chunks and decodes as in p256@0+p64@128;d4x512") from error
    return Point(tuple(chunks), tuple(decodes))


def ladder(low: int, high: int, factor: float = 2.0) -> list[int]:
    """low, low * factor, ... and high, whole and rising."""
    if high < low:
        return []
    count = max(int(np.ceil(np.log(high / low) / np.log(factor))), 1) if high > low else 0
    return sorted({round(low * (high / low) ** (i / count)) for i in range(count + 1)} if count else {low})


def fits(point: Point, envelope: Envelope) -> bool:
    """Whether the engine can run the point in one step."""
    rows = len(point.chunks) + len(point.decodes)
    tokens = sum(c for c, _ in point.chunks) + len(point.decodes)
    longest = max([c + u for c, u in point.chunks] + [u + DECODE_ROOM for u in point.decodes], default=0)
    blocks = sum(-(-(c + u) // envelope.block_size) for c, u in point.chunks)
    blocks += sum(-(-(u + DECODE_ROOM) // envelope.block_size) for u in point.decodes)
    return (
        0 < rows <= envelope.max_num_seqs
        and tokens <= envelope.max_num_batched_tokens
        and longest < envelope.max_model_len
        and blocks * envelope.block_size <= KV_SHARE * envelope.kv_tokens
    )


DECODE_ROOM = 16
"""Tokens that a decode row grows by while it is measured (a few samples, and steps that keep the pipeline full)."""


def batches(envelope: Envelope) -> list[tuple[int, ...]]:
    """Decode batches: sizes by the factor 1.5, contexts equal or skewed."""
    found: list[tuple[int, ...]] = []
    block = envelope.block_size
    most = min(envelope.max_num_seqs, envelope.max_num_batched_tokens)
    for n in sorted({*ladder(1, most, 1.5), max(most - 1, 1)}):  # all seats, and all but one for a prompt
        for context in CONTEXTS:
            found.append((_decode_context(context, block),) * n)
            if n >= 4:
                few = n // 4
                found.append(
                    (_decode_context(context, block),) * (n - few) + (_decode_context(SKEW * context, block),) * few
                )
    return found


def full_steps(rows: list[tuple[int, ...]], envelope: Envelope) -> list[Point]:
    """Decodes and a chunk that fills the token budget: what a busy vLLM runs most of the time."""
    found, block = [], envelope.block_size
    for decodes in rows:
        rest = envelope.max_num_batched_tokens - len(decodes)
        found += [Point(((rest, u),), decodes) for u in (0, -(-CONTEXTS[2] // block) * block) if rest > 0]
    return found


def _decode_context(context: int, block: int) -> int:
    """A context that the prefix cache supplies but for one token: whole blocks and one more; short ones as they are."""
    return context if context < block else context // block * block + 1


def prompts(envelope: Envelope) -> list[tuple[tuple[int, int], ...]]:
    """Prompt chunks: one, or two to eight at once; after cached tokens or from the start."""
    found: list[tuple[tuple[int, int], ...]] = []
    block = envelope.block_size
    for total in ladder(16, envelope.max_num_batched_tokens, 1.5):
        cached = (0, *(-(-context // block) * block for context in CONTEXTS[1:]))
        found.extend(((total, u),) for u in dict.fromkeys(cached))
        found.extend(((total // parts, 0),) * parts for parts in (2, 4, 8) if total >= 16 * parts)
    return found


def candidates(envelope: Envelope, seed: int = 0) -> dict[str, list[Point]]:
    """Points of each scene that the engine can run, at most MAX_CANDIDATES each."""
    rng = np.random.default_rng(seed)
    rows, chunks = batches(envelope), prompts(envelope)
    found = {
        "decode": [Point((), b) for b in rows],
        "prefill": [Point(c, ()) for c in chunks],
        "mixed": [Point(c, b) for c in chunks for b in rows] + full_steps(rows, envelope),
    }
    chosen: dict[str, list[Point]] = {}
    for scene, points in found.items():
        good = [point for point in points if fits(point, envelope)]
        if len(good) > MAX_CANDIDATES:
            good = [good[i] for i in sorted(rng.choice(len(good), MAX_CANDIDATES, replace=False))]
        chosen[scene] = good
    if not all(chosen[scene] for scene in ("decode", "prefill")):
        raise InputError(
            f"engine with {envelope.max_num_batched_tokens} tokens a step, {envelope.max_num_seqs} sequences, contexts "
            f"up to {envelope.max_model_len} and {envelope.kv_tokens} KV tokens: too small to measure; expected room "
            "for a prompt of 16 tokens and a decode"
        )
    return chosen


def rough_times(shapes: FloatArray, pilot: tuple[FloatArray, FloatArray] | None = None) -> FloatArray:
    """Expected seconds of steps, to weigh the design by: from a few measured steps (shapes, seconds), or made up.

    Only ratios matter. Without a pilot: a step costs as much as 256 tokens before its first one (the knee of a server
    GPU between reading weights and arithmetic), and attention a thousandth of a token for each pair.
    """
    weights = np.array([256.0, 1.0, 1e-3, 1e-3])
    if pilot is not None and len(pilot[1]) >= 4:
        from slacktide.profiling.fit import nonnegative_least_squares

        known = rough_columns(pilot[0])
        weights = nonnegative_least_squares(known / pilot[1][:, None], np.ones(len(known)))
        weights[0] = max(weights[0], 1e-6)
    times: FloatArray = rough_columns(shapes) @ weights
    return times


def rough_columns(shapes: FloatArray) -> FloatArray:
    """1, tokens, pairs, decode context: float64[m, 4]."""
    pairs = shapes[:, s.PREFILL_WORK] - 0.5 * shapes[:, s.PREFILL_SQUARE]
    return np.stack([np.ones(len(shapes)), shapes[:, s.NUM_TOKENS], pairs, shapes[:, s.DECODE_CONTEXT]], axis=1)


def corners(points: Sequence[Point]) -> list[Point]:
    """The points at the ends of the range: fewest and most tokens, most decode context, most cached tokens."""
    shapes = np.stack([point.shape for point in points])
    ends = [int(np.argmin(shapes[:, s.NUM_TOKENS])), int(np.argmax(shapes[:, s.NUM_TOKENS]))]
    ends += [int(np.argmax(shapes[:, column])) for column in (s.DECODE_CONTEXT, s.PREFILL_CONTEXT, s.NUM_SEQUENCES)]
    return [points[i] for i in dict.fromkeys(ends)]


def choose(points: Sequence[Point], knots: FloatArray, times: FloatArray, start: Sequence[Point] = ()) -> list[Point]:
    """Sequential D-optimal choice: `start`, then again and again the point that the features so far say least about.

    `times` float64[len(points)]: expected seconds. As many points as the scene has features that can be told apart,
    times POINTS_PER_FEATURE.
    """
    x = extended_features(np.stack([point.shape for point in points]), knots) / times[:, None]
    scale = np.abs(x).max(axis=0)
    x = x[:, scale > 0] / scale[scale > 0]
    rank = int(np.linalg.matrix_rank(x, tol=1e-6 * np.sqrt(len(x))))
    wanted = min(max(int(np.ceil(POINTS_PER_FEATURE * rank)), MIN_POINTS), len(points))
    chosen = [points.index(point) for point in start]
    inverse = np.eye(x.shape[1]) * 1e6  # a weak prior: makes the first few choices defined
    for i in chosen:
        inverse = _updated(inverse, x[i])
    while len(chosen) < wanted:
        gain = np.einsum("ij,jk,ik->i", x, inverse, x)
        gain[chosen] = -1.0
        best = int(np.argmax(gain))
        chosen.append(best)
        inverse = _updated(inverse, x[best])
    return [points[i] for i in chosen]


def _updated(inverse: FloatArray, row: FloatArray) -> FloatArray:
    """The inverse of (matrix + row row'), by Sherman and Morrison."""
    column = inverse @ row
    result: FloatArray = inverse - np.outer(column, column) / (1.0 + row @ column)
    return result


def design(
    envelope: Envelope, seed: int = 0, pilot: tuple[FloatArray, FloatArray] | None = None
) -> dict[str, list[Point]]:
    """The points to measure, by scene; the ends of the range are always among them. Raises InputError."""
    knots = np.array([k for k in KNOTS if k < envelope.max_num_batched_tokens] or [0], dtype=np.float64)
    found: dict[str, list[Point]] = {}
    for scene, points in candidates(envelope, seed).items():
        if points:
            times = rough_times(np.stack([point.shape for point in points]), pilot)
            found[scene] = choose(points, knots, times, corners(points))
    return found


def pilot_points(envelope: Envelope, seed: int = 0) -> list[Point]:
    """A few points that show what steps cost here: the ends of each scene's range."""
    every = candidates(envelope, seed)
    return list(dict.fromkeys(point for scene in SCENES if every[scene] for point in corners(every[scene])))


def describe(points: dict[str, list[Point]]) -> dict[str, Any]:
    """How the points were chosen, for the profile file."""
    return {
        "chosen": "sequential D-optimal on the extended features, relative errors, ends of the range included",
        **{scene: len(found) for scene, found in points.items()},
    }
