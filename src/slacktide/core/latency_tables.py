"""Family `tables`: a step time composed from measured kernels. The truth of the simulator.

T = host + host_per_sequence * sequences + dense(tokens) + per_sequence(sequences) + attention(batch); dense = layers *
(GEMMs + element-wise + all-reduce) + embedding, per_sequence = lm_head + sampler. Attention has one of two forms:
- measured mixed kernel: prefill(chunk, cached) + increment(chunk, cached, decodes, mean context), where the increment
  is the measured mixed time minus the prefill's, so that prefill-decode interference is in the numbers;
- additive: V(u + c) - V(u) summed over chunks + interference * decode(n, mean context) when both kinds are present.
Several chunks count as one chunk with all their tokens and as many attended pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from slacktide.core import packing as p
from slacktide.core import shape as s
from slacktide.core.latency import PackedModel, check_seconds
from slacktide.core.types import FloatArray


@dataclass(frozen=True, eq=False)
class Grid:
    """Values on the product of increasing node vectors; `values.shape` = the nodes' lengths. Seconds."""

    nodes: tuple[FloatArray, ...]
    values: FloatArray

    def __post_init__(self) -> None:
        """Raise ValueError for a grid that could not be interpolated."""
        if self.values.shape != tuple(len(n) for n in self.nodes) or min(self.values.shape) < 2:
            raise ValueError(f"grid: values {self.values.shape} do not match nodes {[len(n) for n in self.nodes]}")
        if not all(np.all(np.diff(n) > 0) for n in self.nodes):
            raise ValueError("grid: nodes must increase")
        if not np.all(np.isfinite(self.values)) or np.any(self.values < 0):
            raise ValueError("grid: values must be finite and >= 0")

    def interpolate(self, points: list[FloatArray], held: tuple[bool, ...]) -> FloatArray:
        """Multilinear; below the first node held, above the last held where `held`, else linear."""
        cells, parts = [], []
        for nodes, x, hold in zip(self.nodes, np.broadcast_arrays(*points), held, strict=True):
            i = np.clip(np.searchsorted(nodes, x, side="right") - 1, 0, len(nodes) - 2)
            part = np.maximum((x - nodes[i]) / (nodes[i + 1] - nodes[i]), 0.0)
            cells.append(i)
            parts.append(np.minimum(part, 1.0) if hold else part)
        total = np.zeros(parts[0].shape)
        for corner in np.ndindex(*(2,) * len(cells)):
            weight = np.prod([f if up else 1 - f for f, up in zip(parts, corner, strict=True)], axis=0)
            total += weight * self.values[tuple(i + up for i, up in zip(cells, corner, strict=True))]
        return total


def uniform_curve(values: FloatArray, step: float, x: FloatArray) -> FloatArray:
    """Linear interpolation of values at 0, step, 2 step, ...; runs on linearly beyond the last."""
    position = np.asarray(x) / step
    i = np.minimum(position.astype(np.int64), len(values) - 2)
    result: FloatArray = values[i] + (position - i) * (values[i + 1] - values[i])
    return result


@dataclass(frozen=True, eq=False)
class TablesModel(PackedModel):
    """Composed kernel tables. All times in seconds, for all layers of the model on all its GPUs.

    dense: float64, index = tokens of the batch (0 unused). `dense_measured` = the last token count that rests on
    measurements; the curve is linear beyond. per_sequence: index = sequences. decode: Grid (n, mean context).
    prefill: Grid (chunk, cached) and increment: Grid (chunk, cached, n, mean context), both or neither; without them
    `potential_values` (V at multiples of `potential_step`) and `interference` (factor >= 1) serve. prefill_launch: the
    least cost of a prefill attention. kv_seconds: least time to read one token's KV. skew: share of max - mean that is
    added to the mean decode context.
    """

    dense: FloatArray
    per_sequence: FloatArray
    decode: Grid
    prefill: Grid | None = None
    increment: Grid | None = None
    potential_values: FloatArray | None = None
    potential_step: float = 1.0
    prefill_launch: float = 0.0
    kv_seconds: float = 0.0
    interference: float = 1.0
    skew: float = 0.0
    host_per_step: float = 0.0
    host_per_sequence: float = 0.0
    dense_measured: int = 0
    sources: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ValueError for incomplete or invalid tables."""
        if (self.prefill is None) != (self.increment is None):
            raise ValueError("tables model: prefill and increment grids come together")
        if (self.prefill is None) == (self.potential_values is None):
            raise ValueError("tables model: expected either measured mixed grids or a potential")
        check_seconds("tables model", self.coefficients())
        for name in ("dense", "per_sequence", "potential_values"):
            values = getattr(self, name)
            if values is not None and not (np.all(np.isfinite(values)) and np.all(values >= 0) and len(values) > 1):
                raise ValueError(f"tables model: {name} must be at least 2 finite values >= 0")

    @property
    def family(self) -> str:
        """Always tables."""
        return "tables"

    def coefficients(self) -> dict[str, float]:
        """The scalar parameters; the tables themselves are in the fields."""
        return {
            "host_per_step": self.host_per_step,
            "host_per_sequence": self.host_per_sequence,
            "interference": self.interference,
            "skew": self.skew,
            "prefill_launch": self.prefill_launch,
            "kv_seconds": self.kv_seconds,
            "dense_measured": float(self.dense_measured),
        }

    def potential(self, positions: FloatArray) -> FloatArray:
        """V at prompt positions, seconds; zeros for a model with measured mixed attention."""
        if self.potential_values is None:
            return np.zeros(np.shape(positions))
        return uniform_curve(self.potential_values, self.potential_step, positions)

    def _pack(self) -> FloatArray:
        header = {
            p.FAMILY: p.TABLES,
            p.HOST_PER_STEP: self.host_per_step,
            p.HOST_PER_SEQUENCE: self.host_per_sequence,
            p.PREFILL_LAUNCH: self.prefill_launch,
            p.INTERFERENCE: self.interference,
            p.KV_SECONDS: self.kv_seconds,
            p.SKEW: self.skew,
        }
        curves = [(p.DENSE, self.dense, 1.0), (p.PER_SEQUENCE, self.per_sequence, 1.0)]
        if self.potential_values is not None:
            curves.append((p.POTENTIAL, self.potential_values, self.potential_step))
        tables = []
        for slot, values, step in curves:
            header |= {slot + 1: float(len(values)), slot + 2: step}
            tables.append((slot, [values]))
        grids = ((p.DECODE_GRID, self.decode), (p.PREFILL_GRID, self.prefill), (p.INCREMENT_GRID, self.increment))
        for slot, grid in grids:
            if grid is not None:
                header |= {slot + 1 + i: float(len(nodes)) for i, nodes in enumerate(grid.nodes)}
                tables.append((slot, [*grid.nodes, grid.values]))
        return p.pack(header, tables)

    def reference(self, shapes: FloatArray) -> FloatArray:
        """Numpy twin."""
        n, sequences = shapes[:, s.NUM_TOKENS], shapes[:, s.NUM_SEQUENCES]
        time = self.host_per_step + self.host_per_sequence * sequences
        time = time + uniform_curve(self.dense, 1.0, n) + uniform_curve(self.per_sequence, 1.0, sequences)
        return np.where(n > 0, time + self.attention(shapes), 0.0)

    def attention(self, shapes: FloatArray) -> FloatArray:
        """Attention of all layers, seconds, for float64[m, 12]."""
        tokens, decodes = shapes[:, s.PREFILL_TOKENS], shapes[:, s.NUM_DECODES]
        pairs = shapes[:, s.PREFILL_WORK] - 0.5 * shapes[:, s.PREFILL_SQUARE]
        cached = np.where(tokens > 0, pairs / np.maximum(tokens, 1) - 0.5 * tokens, 0.0)
        prefill = self._prefill(tokens, cached, shapes[:, s.PREFILL_POTENTIAL])
        prefill = np.maximum(prefill, self.kv_seconds * (shapes[:, s.PREFILL_CONTEXT] + tokens))
        mean = shapes[:, s.DECODE_CONTEXT] / np.maximum(decodes, 1)
        context = mean + self.skew * (shapes[:, s.DECODE_MAX_CONTEXT] - mean)
        alone = self.decode.interpolate([decodes, context], (False, False))
        if self.increment is None:
            beside = self.interference * alone
        else:
            points = [tokens, cached, decodes, context]
            beside = self.increment.interpolate(points, (True, True, False, False))
        decode = np.where(decodes == 0, 0.0, np.where(tokens > 0, beside, alone))
        total: FloatArray = np.where(tokens > 0, prefill, 0.0) + decode
        return total

    def _prefill(self, tokens: FloatArray, cached: FloatArray, potential: FloatArray) -> FloatArray:
        if self.prefill is None:
            return self.prefill_launch + potential
        single = self.prefill.interpolate([tokens, np.maximum(cached, 0.0)], (False, False))
        # Fewer pairs than one prompt of that length (several whole prompts): scale what is not launch cost by pairs.
        share = np.minimum(1 + 2 * cached / np.maximum(tokens, 1), 1.0)
        fewer = self.prefill_launch + np.maximum(single - self.prefill_launch, 0.0) * share
        return np.where(cached >= 0, single, fewer)
