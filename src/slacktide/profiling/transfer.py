"""A predictor that moves between GPUs: features in seconds at data-sheet speed, weights without a unit.

Each feature is work divided by the GPU's peak (FLOP over FLOP/s, bytes over bytes/s), so a weight is an inverse
efficiency: fitted on one GPU and model it predicts another, whose sheet is all that is needed. Good for a first belief
on a GPU nobody measured; a fit on the GPU itself is better (benchmarks/predictor says by how much).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slacktide.core import shape as s
from slacktide.core.latency_families import scenes
from slacktide.core.types import FloatArray
from slacktide.profiling.fit import nonnegative_least_squares
from slacktide.profiling.kernel_tables import Gpu, Model

NAMES = (
    "host", "roofline", "gemm_flops", "weight_bytes", "pair_flops", "prefill_kv_bytes", "decode_kv_bytes",
    "activation_bytes", "head_flops",
)  # fmt: skip
ACTIVATION_FACTOR = 16
"""Bytes that element-wise kernels move per token and layer, in units of the hidden size: eight reads or writes of 2."""


def normalised_features(shapes: FloatArray, gpu: Gpu, model: Model, tensor_parallel: int = 1) -> FloatArray:
    """float64[m, 12] -> float64[m, 9]: 1, then seconds at peak of each kind of work (NAMES), on one of the GPUs."""
    flops, bandwidth, n = gpu.flops * tensor_parallel, gpu.bandwidth * tensor_parallel, shapes[:, s.NUM_TOKENS]
    head = 2.0 * model.vocab * model.hidden
    gemm = 2.0 * model.linear_parameters * n / flops
    weights = np.full(len(shapes), (2.0 * model.linear_parameters + head) / bandwidth)
    pairs = shapes[:, s.PREFILL_WORK] - 0.5 * shapes[:, s.PREFILL_SQUARE]
    columns = [
        np.ones(len(shapes)),
        np.maximum(gemm, weights),
        gemm,
        weights,
        4.0 * model.layers * model.heads * model.head_dim * pairs / flops,
        model.kv_bytes_per_token * (shapes[:, s.PREFILL_CONTEXT] + shapes[:, s.PREFILL_TOKENS]) / bandwidth,
        model.kv_bytes_per_token * shapes[:, s.DECODE_CONTEXT] / bandwidth,
        ACTIVATION_FACTOR * model.layers * model.hidden * n / bandwidth,
        head * shapes[:, s.NUM_SEQUENCES] / flops,
    ]
    return np.stack(columns, axis=1)


@dataclass(frozen=True, eq=False)
class TransferModel:
    """`weights` float64[3, 9] >= 0: scenes decode, prefill, mixed; the first is seconds, the others have no unit."""

    weights: FloatArray

    @classmethod
    def fit(
        cls, shapes: FloatArray, times: FloatArray, gpu: Gpu, model: Model, tensor_parallel: int = 1
    ) -> TransferModel:
        """Least squares of relative errors, one expert per scene. Raises ValueError for a scene without steps."""
        x, scene = normalised_features(shapes, gpu, model, tensor_parallel), scenes(shapes)
        if len(np.unique(scene)) < 3:
            raise ValueError("transfer fit: expected steps of pure decode, pure prefill and mixed batches")
        rows = [scene == i for i in range(3)]
        return cls(np.stack([nonnegative_least_squares(x[r] / times[r, None], np.ones(int(r.sum()))) for r in rows]))

    def step_times(self, shapes: FloatArray, gpu: Gpu, model: Model, tensor_parallel: int = 1) -> FloatArray:
        """Seconds of steps float64[m, 12] on a GPU and model."""
        x = normalised_features(shapes, gpu, model, tensor_parallel)
        times: FloatArray = (x * self.weights[scenes(shapes)]).sum(axis=1)
        return times
