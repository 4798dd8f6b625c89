"""Prices of work that no engine step can undercut: the dual of a linear programme over all step types.

A step with P prefill tokens, n decodes at a total context of C tokens and prefill attention q takes
T(step) >= p P + w q + d n + e C for every step that the engine can run. Summed over steps, work costs at least its
price, whoever schedules it. p, d and e come from the dual of

    min sum_s T(s) x_s   s.t.   sum_s (P, n, C)(s) x_s >= work,  x >= 0       (x_s: how often step type s is run),

over a finite set of (time, P, n, C) points chosen so that an inequality that holds at the points holds for all steps:

- `tables`: on a cell of the product of the tables' nodes, T minus the price is a sum of multi-affine functions (the
  tables), supporting lines of the convex minorants of the two curves over tokens and sequences, and terms that are
  linear in each coordinate. Its minimum lies at a corner. Cached tokens matter to the attention only: the least over
  their nodes is taken.
- other monotone models: the time of a cell's lowest corner with the work of its highest.

w is 1 with a potential (attention is then exactly paid for), else the least attention time per attended pair.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from slacktide.core import shape as s
from slacktide.core.latency import LatencyModel
from slacktide.core.latency_tables import TablesModel, uniform_curve
from slacktide.core.packing import MONOTONE
from slacktide.core.types import BoolArray, FloatArray
from slacktide.errors import InputError
from slacktide.metrics.slo import TIME_TOLERANCE

RATIO, RATIO_OTHERS = 1.6, 1.08
"""Step from one node to the next beyond the tables' own. Tables: only the supporting lines and the limits of tokens and
KV memory lose by coarse cells (1.25 gave bounds within 1.5 % of 1.6's, at four times the points). Others lose up to
the ratio itself in each coordinate."""
CAPPED = 0.8
"""A cell whose contexts reach the cap inside it counts with the cap, or uncapped, as a whole (either is safe, for the
kink is not at a corner): with the cap if its least context is at least this share of it."""
SAFETY = 1e-9
"""Prices are lowered by this share: far more than float64 rounding in a sum, far less than anyone sees."""
TOLERANCE = 1e-7
"""Relative violation at which cutting planes stop; the rest is scaled away."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds per unit of work: `p` per prefill token, `w` per unit of prefill attention, `d` per decode, `e` per token
    of decode context."""

    p: float
    w: float
    d: float
    e: float


@dataclass(frozen=True, slots=True)
class Domain:
    """What steps the engine can run: token budget, seats, longest context of a row, KV tokens in all.

    `shared`: most leading tokens of a row whose KV others may hold as well; they count in each row's context, but once
    in `kv_tokens`.
    """

    max_tokens: int
    max_seqs: int
    max_context: int
    kv_tokens: int
    shared: int = 0

    def holds(self, decodes: FloatArray, context: FloatArray) -> BoolArray:
        """Whether the KV memory holds so many rows of that mean context."""
        return np.asarray(decodes * np.maximum(context - self.shared, 0.0) <= self.kv_tokens)

    @property
    def longest(self) -> int:
        """Longest context of a row that the memory holds."""
        return max(min(self.max_context, self.kv_tokens + self.shared), 2)


@dataclass(frozen=True, eq=False)
class StepPoints:
    """Points that stand for all steps: float64[m] seconds and amounts of work; `least` is the least time of the cell
    that a point belongs to."""

    time: FloatArray
    least: FloatArray
    prefill: FloatArray
    decodes: FloatArray
    context: FloatArray
    low_context: FloatArray
    """The least context of the point's cell."""
    attention: float
    """w of `Prices`."""

    @cached_property
    def seats(self) -> FloatArray:
        """The numbers of decodes among the points."""
        return np.unique(self.decodes)

    def prices(
        self, work: tuple[float, float, float], *, most_decodes: float, most_context: float, longest_prefill: float,
        longest_decode: float,
    ) -> Prices:  # fmt: skip
        """The prices at which `work` (prefill tokens, decodes, decode context) costs most.

        Only decodes up to `most_decodes` and context up to `most_context` tokens a step earn, prefills only in steps of
        at most `longest_prefill` seconds, decodes in steps of at most `longest_decode`: what in-time requests can be.
        A prefill row in a longer step can only be that of a preempted request, in place of a decode: there all decodes
        that are possible at all must be paid for.
        """
        at = int(np.searchsorted(self.seats, most_decodes))
        most = self.seats[at] if at < len(self.seats) else math.inf  # a node, where the minimum may have its kink
        # A step that is too long by no more than the judge forgives is not too long.
        prefills = self.least <= longest_prefill + 2 * TIME_TOLERANCE
        decoding = self.least <= longest_decode + 2 * TIME_TOLERANCE
        decodes = np.minimum(self.decodes, most)
        context = np.where(self.low_context >= CAPPED * most_context, most_context, self.context)
        again = ~prefills & (self.prefill > 0)
        decodes = np.where(again, min(most, float(self.seats[-1])), decodes)
        context = np.where(again, min(most_context, float(self.context.max())), context)
        earned = (prefills * self.prefill, decoding * decodes, decoding * context)
        a = np.stack(earned, axis=1)
        p, d, e = _dual(a, self.time, np.array(work, dtype=np.float64)) * (1 - SAFETY)
        return Prices(float(p), self.attention, float(d), float(e))


def _dual(a: FloatArray, b: FloatArray, c: FloatArray) -> FloatArray:
    """max c y  s.t.  a y <= b, y >= 0, by cutting planes; the answer is feasible for all rows of `a`."""
    from scipy.optimize import linprog

    if not c.any():  # nobody needs anything: any prices do
        return np.zeros(3)
    scale = np.where(a.max(axis=0) > 0, a.max(axis=0), 1.0)
    unit = a / scale
    chosen: BoolArray = np.zeros(len(b), dtype=bool)
    for column in range(3):  # a first set that bounds every price: the cheapest steps per unit of each kind of work
        share = np.where(unit[:, column] > 0, b / np.maximum(unit[:, column], 1e-300), np.inf)
        chosen[np.argsort(share)[:64]] = True
    y, gain = np.zeros(3), c * scale / (c * scale).max()
    bounds = [(0.0, None if a[:, k].max() > 0 else 0.0) for k in range(3)]
    for _ in range(50):
        found: Any = linprog(-gain, A_ub=unit[chosen] / b[chosen, None], b_ub=np.ones(int(chosen.sum())),
                             bounds=bounds, method="highs")  # fmt: skip
        y = np.maximum(found.x, 0.0)
        load = unit @ y / b
        if load.max() <= 1 + TOLERANCE:
            break
        chosen[np.argpartition(load, -64)[-64:]] = True
    worst = max(float((unit @ y / b).max()), 1.0)
    return np.asarray(y / worst / scale)


def has_potential(latency: LatencyModel) -> bool:
    """Whether prefill attention is paid by the model's potential; else attended pairs are its unit."""
    return isinstance(latency, TablesModel) and latency.prefill is None


def step_points(latency: LatencyModel, domain: Domain) -> StepPoints:
    """Points that stand for all steps of `domain`. Raises InputError for a model whose times fall with work."""
    if isinstance(latency, TablesModel):
        return _of_tables(latency, domain)
    if latency.packed[MONOTONE] != 1:
        raise InputError(
            f"a bound needs step times that never fall as work is added; this profile's {latency.family} model does"
        )
    return _of_monotone(latency, domain)


def _nodes(low: float, high: float, ratio: float, *grids: FloatArray) -> FloatArray:
    """Whole numbers from `low` to `high`, `ratio` apart, with the grids' own nodes among them."""
    count = max(2, math.ceil(math.log(max(high / low, 1.0)) / math.log(ratio)) + 1)
    spread = np.unique(np.round(np.geomspace(low, high, count)))
    own = [grid[(grid > low) & (grid < high)] for grid in grids]
    return np.unique(np.concatenate([[low, high], spread, *own]))


def _minorant(values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The largest convex curve below `values` (at 0, 1, ...), and a slope of it at each point."""
    if len(values) == 1:
        return values, np.zeros(1)
    hull: list[int] = []
    for i in range(len(values)):
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (values[b] - values[a]) * (i - b) < (values[i] - values[b]) * (b - a):
                break
            hull.pop()
        hull.append(i)
    x = np.array(hull)
    slopes = np.diff(values[x]) / np.diff(x)
    grid = np.arange(len(values))
    piece = np.minimum(np.searchsorted(x, grid, side="right") - 1, len(slopes) - 1)
    return np.interp(grid, x, values[x]), slopes[piece]


@dataclass(frozen=True, eq=False)
class _Curve:
    """A curve over whole numbers, from below: its convex minorant by supporting lines."""

    values: FloatArray
    slopes: FloatArray

    @classmethod
    def of(cls, values: FloatArray) -> _Curve:
        """The curve made rising first: more chunks than one must not look cheaper."""
        return cls(*_minorant(np.minimum.accumulate(values[::-1])[::-1]))

    def line(self, middle: FloatArray, at: FloatArray) -> FloatArray:
        """The line that touches the minorant at `middle`, evaluated at `at`: below the curve everywhere."""
        m = np.clip(np.round(middle), 0, len(self.values) - 1).astype(np.int64)
        return np.asarray(self.values[m] + self.slopes[m] * (at - m))


def _of_tables(model: TablesModel, domain: Domain) -> StepPoints:
    """Corners of all cells, per scene (pure prefill, pure decode, mixed)."""
    tokens = np.arange(domain.max_tokens + 1, dtype=np.float64)
    sequences = np.arange(max(domain.max_seqs, domain.max_tokens) + 2, dtype=np.float64)
    curves = (
        _Curve.of(uniform_curve(model.dense, 1.0, tokens)[1:]),  # index 0 is a step of one token
        _Curve.of(uniform_curve(model.per_sequence, 1.0, sequences)[1:]),
    )
    inc = model.increment
    chunk_grids = [g.nodes[0] for g in (model.prefill, inc) if g is not None]
    n_grids, ctx_grids = ([g.nodes[axis] for g in (model.decode, inc) if g is not None] for axis in (-2, -1))
    chunks = _nodes(1, domain.max_tokens, RATIO, *chunk_grids)
    seats = _nodes(1, min(domain.max_seqs, domain.max_tokens), RATIO, *n_grids)
    contexts = _nodes(1, domain.longest, RATIO, *ctx_grids)
    none = np.zeros(1)
    parts = [
        _corners(model, domain, curves, chunks, none, none),
        _corners(model, domain, curves, none, seats, contexts),
        _corners(model, domain, curves, chunks, seats, contexts),
    ]
    time, least, prefill, decodes, context, low = (np.concatenate([part[i] for part in parts]) for i in range(6))
    return StepPoints(time, least, prefill, decodes, context, low, _attention_price(model, chunks, domain))


def _corners(
    model: TablesModel, domain: Domain, curves: tuple[_Curve, _Curve], chunks: FloatArray, seats: FloatArray,
    contexts: FloatArray,
) -> tuple[FloatArray, ...]:  # fmt: skip
    """(time, least, P, n, C, least C) of the corners of all cells between the nodes; one node of 0: no such rows."""
    axes = [np.stack([v[:-1], v[1:]]) if len(v) > 1 else np.stack([v, v]) for v in (chunks, seats, contexts)]
    cells = np.meshgrid(*(np.arange(axis.shape[1]) for axis in axes), indexing="ij")
    i, j, k = (cell.ravel() for cell in cells)
    # A cell whose every step lacks tokens or KV memory is none.
    possible = axes[0][0, i] + axes[1][0, j] <= domain.max_tokens
    possible &= domain.holds(axes[1][0, j], axes[2][0, k])
    i, j, k = i[possible], j[possible], k[possible]
    middle_tokens = axes[0][:, i].mean(axis=0) + axes[1][:, j].mean(axis=0)
    prefills = float(chunks[-1] > 0)
    middle_sequences = axes[1][:, j].mean(axis=0) + prefills
    attention = _attention(model, chunks, seats, contexts)
    found = []
    for a, b, c in np.ndindex(2, 2, 2):
        if (a and len(chunks) == 1) or (b and len(seats) == 1) or (c and len(contexts) == 1):
            continue
        p, n, x = axes[0][a, i], axes[1][b, j], axes[2][c, k]
        time = model.host_per_step + model.host_per_sequence * (n + prefills)
        time = (
            time + curves[0].line(middle_tokens - 1, p + n - 1) + curves[1].line(middle_sequences - 1, n + prefills - 1)
        )
        ai, bj, ck = (
            np.minimum(at + up, len(v) - 1)
            for at, up, v in zip((i, j, k), (a, b, c), (chunks, seats, contexts), strict=True)
        )
        found.append((time + attention[ai, bj, ck], p, n, n * x))
    least = np.min([time for time, *_ in found], axis=0)
    time, p, n, c = (np.concatenate([corner[m] for corner in found]) for m in range(4))
    low = axes[1][0, j] * axes[2][0, k]
    return time, np.tile(least, len(found)), p, n, c, np.tile(low, len(found))


def _attention(model: TablesModel, chunks: FloatArray, seats: FloatArray, contexts: FloatArray) -> FloatArray:
    """Least attention time at the nodes beyond what `w` pays for: float64[chunks, seats, contexts].

    With `skew` a longer context than the mean may count: the least from there on.
    """
    p, n, x = np.meshgrid(chunks, seats, contexts, indexing="ij")
    total = np.where((p > 0) & (model.prefill is None), model.prefill_launch, 0.0)
    if seats[-1] == 0:
        return np.asarray(total)
    if chunks[-1] == 0:
        decode = model.decode.interpolate([n, x], (False, False))
    elif model.increment is None:
        decode = model.interference * model.decode.interpolate([n, x], (False, False))
    else:
        beside = [
            model.increment.interpolate([p, np.full(p.shape, u), n, x], (True, True, False, False))
            for u in model.increment.nodes[1]
        ]
        decode = np.min(beside, axis=0)
    if model.skew > 0:
        decode = np.minimum.accumulate(decode[..., ::-1], axis=2)[..., ::-1]
    return np.asarray(total + decode)


def _attention_price(model: TablesModel, chunks: FloatArray, domain: Domain) -> float:
    """w: 1 with a potential; else the least attention time per attended pair of a chunk.

    Attention is bilinear in chunk and cached between nodes; pairs = P (cached + P / 2) are linear in cached and convex
    in P, so attention - w pairs has its minimum, and the ratio its least value, at nodes. Fewer pairs than one whole
    prompt has cost at least in proportion (the model's rule for several prompts), which cached = 0 covers.
    """
    if model.prefill is None:
        return 1.0
    cached = _nodes(1, max(domain.max_context, 2), RATIO, model.prefill.nodes[1])
    p, u = np.meshgrid(chunks[chunks >= 1], np.concatenate([[0.0], cached]), indexing="ij")
    single = model.prefill.interpolate([p, u], (False, False))
    return max(float((single / (p * (u + p / 2))).min()), 0.0)


def _of_monotone(model: LatencyModel, domain: Domain) -> StepPoints:
    """The time of each cell's lowest corner with the work of its highest; prefill attention earns nothing."""
    chunks = _nodes(1, domain.max_tokens, RATIO_OTHERS)
    seats = _nodes(1, min(domain.max_seqs, domain.max_tokens), RATIO_OTHERS)
    contexts = _nodes(1, domain.longest, RATIO_OTHERS)

    def cells(nodes: FloatArray, zero: bool) -> tuple[FloatArray, FloatArray]:
        """(low, high) of each cell; 0 is a cell of its own: no such rows."""
        low, high = (nodes[:-1], nodes[1:]) if len(nodes) > 1 else (nodes, nodes)
        return (np.append(low, 0.0), np.append(high, 0.0)) if zero else (low, high)

    sides = [cells(chunks, True), cells(seats, True), cells(contexts, False)]
    low, high = ([axis.ravel() for axis in np.meshgrid(*(side[k] for side in sides), indexing="ij")] for k in (0, 1))
    keep = (low[0] + low[1] > 0) & (low[0] + low[1] <= domain.max_tokens) & domain.holds(low[1], low[2])
    low, high = [v[keep] for v in low], [v[keep] for v in high]
    shapes = np.zeros((int(keep.sum()), s.SHAPE_SIZE))
    shapes[:, s.PREFILL_TOKENS] = low[0]
    shapes[:, s.NUM_PREFILLS] = low[0] > 0
    shapes[:, s.NUM_DECODES] = low[1]
    shapes[:, s.DECODE_CONTEXT] = low[1] * low[2]
    shapes[:, s.DECODE_MAX_CONTEXT] = np.where(low[1] > 0, low[2], 0.0)
    shapes[:, s.NUM_TOKENS] = low[0] + low[1]
    shapes[:, s.NUM_SEQUENCES] = (low[0] > 0) + low[1]
    shapes[:, s.PREFILL_MAX] = 1.0 * (low[0] > 0)  # many short prompts: the least that these tokens can cost
    time = np.maximum(model.step_times(shapes), 1e-12)
    return StepPoints(time, time, high[0], high[1], high[1] * high[2], low[1] * low[2], 0.0)
