"""What a policy may believe of a GPU: a predictor fitted to steps sampled from the truth."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from slacktide.core import shape as s
from slacktide.core.latency import LatencyModel
from slacktide.core.types import FloatArray
from slacktide.profiling.fit import describe_errors, fit, labelled, scene_errors

if TYPE_CHECKING:
    from slacktide.profiling.profiles import Profile

SAMPLES_PER_SCENE = 1500
"""Enough for 8 weights per scene to settle within 1 %, and fitted in well under half a second."""
MAX_CHUNKS = 3
MAX_CACHED = 4096
MEDIAN_CONTEXT, CONTEXT_SPREAD = 800.0, 0.9
"""Mean decode context of a batch: lognormal, 5 to 95 % from 180 to 3500 tokens, the range of the packaged traces."""


def sample_shapes(profile: Profile, seed: int, samples: int = SAMPLES_PER_SCENE) -> FloatArray:
    """Random steps float64[3 * samples, 12] (decode, prefill, mixed) that the profile's engine could run.

    1 to 3 chunks with at most max_num_batched_tokens new tokens, half of them after 0 to 4096 cached ones; decodes
    log-uniform up to max_num_seqs with lognormal contexts, as many as the KV cache can hold.
    """
    rng = np.random.default_rng(seed)
    shapes = np.zeros((3 * samples, s.SHAPE_SIZE))
    decode, prefill = np.ones(3 * samples, dtype=bool), np.ones(3 * samples, dtype=bool)
    prefill[:samples] = False
    decode[samples : 2 * samples] = False
    _add_decodes(shapes, decode, profile, rng)
    _add_chunks(shapes, prefill, profile, rng)
    shapes[:, s.NUM_TOKENS] = shapes[:, s.PREFILL_TOKENS] + shapes[:, s.NUM_DECODES]
    shapes[:, s.NUM_SEQUENCES] = shapes[:, s.NUM_PREFILLS] + shapes[:, s.NUM_DECODES]
    return shapes


def _add_decodes(shapes: FloatArray, rows: FloatArray, profile: Profile, rng: np.random.Generator) -> None:
    m = int(rows.sum())
    context = np.clip(MEDIAN_CONTEXT * np.exp(CONTEXT_SPREAD * rng.standard_normal(m)), 16, 16384)
    most = min(profile.max_num_seqs, profile.max_num_batched_tokens)
    n = np.floor(np.exp(rng.uniform(0.0, np.log(most + 1.0), m)))
    n = np.clip(n, 1, np.maximum(profile.num_blocks * profile.block_size / context, 1)).astype(np.int64)
    shapes[rows, s.NUM_DECODES] = n
    shapes[rows, s.DECODE_CONTEXT] = np.round(n * context)
    shapes[rows, s.DECODE_MAX_CONTEXT] = np.round(context * np.where(n > 1, rng.uniform(1.0, 4.0, m), 1.0))


def _add_chunks(shapes: FloatArray, rows: FloatArray, profile: Profile, rng: np.random.Generator) -> None:
    m = int(rows.sum())
    room = profile.max_num_batched_tokens - shapes[rows, s.NUM_DECODES]
    total = np.exp(rng.uniform(np.log(16.0), np.log(np.maximum(room, 17.0))))
    count = rng.integers(1, MAX_CHUNKS + 1, m)
    part = rng.uniform(0.1, 1.0, (m, MAX_CHUNKS)) * (np.arange(MAX_CHUNKS) < count[:, None])
    c = np.ceil(total[:, None] * part / part.sum(axis=1, keepdims=True))
    u = np.floor(rng.uniform(0.0, MAX_CACHED, c.shape)) * (rng.random(c.shape) < 0.5) * (c > 0)
    shapes[rows, s.NUM_PREFILLS] = (c > 0).sum(axis=1)
    shapes[rows, s.PREFILL_TOKENS] = c.sum(axis=1)
    shapes[rows, s.PREFILL_CONTEXT] = u.sum(axis=1)
    shapes[rows, s.PREFILL_WORK] = (c * (u + c)).sum(axis=1)
    shapes[rows, s.PREFILL_SQUARE] = (c * c).sum(axis=1)
    shapes[rows, s.PREFILL_MAX] = c.max(axis=1)
    potential = profile.latency.potential
    shapes[rows, s.PREFILL_POTENTIAL] = (potential(u + c) - potential(u)).sum(axis=1)


def fit_belief(profile: Profile, seed: int = 0, features: str = "extended") -> LatencyModel:
    """Non-negative least squares of relative errors; half of the sampled steps are kept out and give the error.

    `features`: `extended` or `paper` (`profiling.fit`). Raises InputError for another name.
    """
    shapes = sample_shapes(profile, seed)
    times = profile.latency.step_times(shapes)
    train = np.arange(len(shapes)) % 2 == 0
    model = fit(shapes[train], times[train], features=features)
    text = describe_errors(scene_errors(model, shapes[~train], times[~train]))
    steps = f"fitted to {int(train.sum())} sampled steps of {profile.name}"
    return labelled(model, f"{features} features {steps}; median error on as many others: {text}")
