"""A small neural network as predictor, in numpy: the arm that tells whether linear features leave something behind.

Eleven numbers of a batch's shape, logarithmic and standardised, two hidden layers, the logarithm of the time: under
10,000 weights. It is neither monotone nor invertible, and no policy runs on it; benchmarks/predictor compares it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from slacktide.core.types import FloatArray

INPUTS = 11
"""All of `core.shape` but the model's own potential."""


@dataclass(frozen=True, eq=False)
class MlpModel:
    """`layers`: (weights, biases) of each layer; `mean`, `scale` of the inputs; `offset` of the log time."""

    layers: tuple[tuple[FloatArray, FloatArray], ...]
    mean: FloatArray
    scale: FloatArray
    offset: float

    @property
    def num_weights(self) -> int:
        """Weights and biases."""
        return sum(w.size + b.size for w, b in self.layers)

    def step_times(self, shapes: FloatArray) -> FloatArray:
        """Seconds of steps float64[m, 12]."""
        x = (np.log1p(shapes[:, :INPUTS]) - self.mean) / self.scale
        for w, b in self.layers[:-1]:
            x = np.maximum(x @ w + b, 0.0)
        w, b = self.layers[-1]
        times: FloatArray = np.exp((x @ w + b)[:, 0] + self.offset)
        return times


def fit_mlp(
    shapes: FloatArray, times: FloatArray, *, hidden: tuple[int, ...] = (48, 32), epochs: int = 400, seed: int = 0
) -> MlpModel:
    """Adam on squared errors of the log time, batches of 256, rate 3e-3 falling to 0. Same seed, same model."""
    rng = np.random.default_rng(seed)
    x, y = np.log1p(shapes[:, :INPUTS]), np.log(times)
    mean, scale, offset = x.mean(axis=0), np.maximum(x.std(axis=0), 1e-9), float(y.mean())
    x, y = (x - mean) / scale, (y - offset)[:, None]
    sizes = (INPUTS, *hidden, 1)
    params: list[Any] = []
    for a, b in itertools.pairwise(sizes):
        params += [rng.standard_normal((a, b)) * np.sqrt(2.0 / a), np.zeros(b)]
    first, second = [np.zeros_like(p) for p in params], [np.zeros_like(p) for p in params]
    steps, step = epochs * -(-len(x) // 256), 0
    for _ in range(epochs):
        for rows in np.array_split(rng.permutation(len(x)), -(-len(x) // 256)):
            step += 1
            rate = 3e-3 * 0.5 * (1 + np.cos(np.pi * step / steps))
            for i, gradient in enumerate(_gradients(params, x[rows], y[rows])):
                first[i] = 0.9 * first[i] + 0.1 * gradient
                second[i] = 0.999 * second[i] + 0.001 * gradient**2
                corrected = first[i] / (1 - 0.9**step), second[i] / (1 - 0.999**step)
                params[i] = params[i] - rate * corrected[0] / (np.sqrt(corrected[1]) + 1e-8)
    layers = tuple((params[i], params[i + 1]) for i in range(0, len(params), 2))
    return MlpModel(layers, mean, scale, offset)


def _gradients(params: list[Any], x: FloatArray, y: FloatArray) -> list[FloatArray]:
    inputs, count = [x], len(params) // 2
    for i in range(count):
        z = inputs[-1] @ params[2 * i] + params[2 * i + 1]
        inputs.append(np.maximum(z, 0.0) if i < count - 1 else z)
    delta, found = 2.0 * (inputs[-1] - y) / len(x), []
    for i in reversed(range(count)):
        found += [delta.sum(axis=0), inputs[i].T @ delta]
        delta = (delta @ params[2 * i].T) * (inputs[i] > 0)
    return found[::-1]
