"""Composes the attention of a profile from measured kernels. Seconds, all layers.

Measured mixed kernel where there is one (`measured`, or `rescaled` from the RTX 4090), else additive kernels with an
interference factor (`additive`). Repairs that all tables get: times never fall as context, chunk or sequences grow
(running maximum; measured dips are noise of a few percent), and a decode is never faster than reading its KV.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from slacktide.core.latency_tables import Grid
from slacktide.core.types import FloatArray
from slacktide.profiling.kernel_tables import Gpu, Model, Rows, read_kernels, table2

POTENTIAL_STEP = 128.0
POTENTIAL_END = 262144
"""V is tabulated to 256k positions, twice the longest prompt of the packaged traces; linear beyond."""
FIT_FROM = 4096.0
"""Prompts from here on give the quadratic growth with which V is continued beyond its last measured length."""
LONG_CHUNKS = (3072.0, 4096.0, 6144.0, 8192.0, 12288.0, 16384.0)
"""Chunk nodes added beyond the measured 2048 tokens."""
MEASURED_PAIRS = {
    ("RTX-PRO-6000", 32, 8): ("Llama-3.1-8B", 1), ("RTX-PRO-6000", 16, 4): ("Llama-3.1-8B", 2),
    ("RTX-PRO-6000", 64, 8): ("Qwen3-32B", 1), ("RTX-PRO-6000", 32, 4): ("Qwen3-32B", 2),
    ("RTX-4090", 32, 8): ("Llama-3.1-8B", 1),
}  # fmt: skip
"""(GPU, query heads, KV heads) of one GPU's share -> the table that measured mixed batches with them (head 128)."""
Fields = dict[str, Any]


def kv_bytes_per_layer(model: Model, tensor_parallel: int) -> float:
    """Bytes of one token's keys and values in one layer on one GPU."""
    return model.kv_bytes_per_token / model.layers / tensor_parallel


def measured(gpu: Gpu, model: Model, tensor_parallel: int) -> Fields | None:
    """Grids from the measured mixed kernel, or None where the pair of head counts was not measured."""
    heads, kv = model.heads // tensor_parallel, model.kv_heads // tensor_parallel
    table = MEASURED_PAIRS.get((gpu.name, heads, kv))
    if table is None:
        return None
    grids = _mixed_grids(gpu.name, *table)
    bandwidth = gpu.measured_decode_bandwidth or gpu.bandwidth
    return _fields(grids, model.layers, kv_bytes_per_layer(model, tensor_parallel) / bandwidth) | {
        "source": f"measured mixed kernel ({gpu.name}, {heads}/{kv} heads, LLMServingSim)"
    }


def _fields(grids: dict[str, Grid], layers: int, kv_seconds: float) -> Fields:
    scaled = {name: Grid(grid.nodes, grid.values * layers) for name, grid in grids.items()}
    prefill = scaled["prefill"]
    return {**scaled, "prefill_launch": float(prefill.values[0, 0]), "kv_seconds": layers * kv_seconds}


def _mixed_grids(gpu: str, model: str, tp: int) -> dict[str, Grid]:
    """prefill(chunk, cached), decode(n, context), increment(chunk, cached, n, context) of one layer."""
    rows = read_kernels("mixed_attention", gpu=gpu, model=model, tp=tp)
    chunk, n = rows["prefill_chunk"], rows["n_decode"]
    mixed = {k: v[(chunk > 0) & (n > 0)] for k, v in rows.items()}
    axes = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    nodes, index = zip(*(np.unique(mixed[a], return_inverse=True) for a in axes), strict=True)
    values = np.full(tuple(len(x) for x in nodes), np.nan)
    values[index] = mixed["time"]
    prefill = _prefill_grid({k: v[n == 0] for k, v in rows.items()}, nodes[1])
    alone = prefill.interpolate([nodes[0][:, None], nodes[1][None, :]], (False, False))
    # Few short decodes hide behind the chunk: there the measured difference is noise around 0, down to -2 us.
    increment = np.maximum(values - alone[:, :, None, None], 0.0)
    increment = np.maximum.accumulate(np.maximum.accumulate(increment, axis=2), axis=3)
    xs, ys, decode = table2({k: v[chunk == 0] for k, v in rows.items()}, "n_decode", "kv_decode")
    return {
        "prefill": prefill,
        "decode": Grid((xs, ys), _nondecreasing(decode)),
        "increment": Grid(tuple(nodes), increment),
    }


def _nondecreasing(values: FloatArray) -> FloatArray:
    result: FloatArray = np.maximum.accumulate(np.maximum.accumulate(values, axis=0), axis=1)
    return result


def _prefill_grid(rows: Rows, cached: FloatArray) -> Grid:
    """Attention of one chunk. Rows of a chunk are linear in the cached length between its own measured lengths.

    Chunks beyond the measured ones get the time per token of the longest measured chunk whose tokens attend, on
    average, to as many positions: T(c, u) = c/C * T(C, u + (c - C)/2).
    """
    chunks = np.unique(rows["prefill_chunk"])
    values = np.empty((len(chunks) + len(LONG_CHUNKS), len(cached)))
    for i, chunk in enumerate(chunks):
        of_chunk = rows["prefill_chunk"] == chunk
        values[i] = _line(cached, rows["kv_prefill"][of_chunk], rows["time"][of_chunk])
    last, top = chunks[-1], values[len(chunks) - 1].copy()
    for i, chunk in enumerate(LONG_CHUNKS, start=len(chunks)):
        values[i] = chunk / last * _line(cached + (chunk - last) / 2, cached, top)
    return Grid((np.concatenate([chunks, LONG_CHUNKS]), cached), _nondecreasing(values))


def _line(x: FloatArray, known: FloatArray, values: FloatArray) -> FloatArray:
    order = np.argsort(known)
    from slacktide.profiling.compose import extend

    return extend(x, known[order], values[order])


def rescaled(gpu: Gpu, model: Model, tensor_parallel: int, base: Gpu) -> Fields:
    """Grids of the RTX 4090 (32/8 heads) carried over to another GPU of the family or another number of heads.

    Decode parts scale with KV bytes over bandwidth, above their launch cost. Prefill scales with query heads, and on
    the RTX 3090 by its own measured prefill without cache over the RTX 4090's, per chunk.
    """
    grids = _mixed_grids(base.name, "Llama-3.1-8B", 1)
    kv_share = model.kv_heads / tensor_parallel / 8
    bandwidth = base.bandwidth / gpu.bandwidth
    decode, increment, prefill = grids["decode"], grids["increment"], grids["prefill"]
    launch = decode.values[0, 0]
    grids["decode"] = Grid(decode.nodes, (launch + (decode.values - launch) * kv_share) * bandwidth)
    grids["increment"] = Grid(increment.nodes, increment.values * kv_share * bandwidth)
    chunks = prefill.nodes[0]
    if gpu.name == base.name:
        share = np.full(len(chunks), model.heads / tensor_parallel / 32)
    else:
        rows = read_kernels("rtx3090_layers", tp=tensor_parallel)
        of = rows["layer"] == "attn"
        known = np.unique(rows["tokens"][of])
        share = np.interp(chunks, known, rows["time"][of]) / np.interp(chunks, chunks, prefill.values[:, 0])
        share[chunks > known[-1]] = share[chunks <= known[-1]][-1]
        share = share * model.heads / 32
    floor = prefill.values[0, 0]
    grids["prefill"] = Grid(prefill.nodes, _nondecreasing(np.maximum(prefill.values * share[:, None], floor)))
    kv_seconds = kv_bytes_per_layer(model, tensor_parallel) / gpu.bandwidth
    return _fields(grids, model.layers, kv_seconds) | {
        "source": "mixed kernel of the RTX 4090 rescaled: decode by KV bytes and bandwidth, prefill by "
        + ("query heads" if gpu.name == base.name else "measured RTX 3090 prefill")
    }


def additive(gpu: Gpu, model: Model, tensor_parallel: int) -> Fields:
    """V and decode grid from kernels measured apart (aiconfigurator)."""
    heads, kv = model.heads // tensor_parallel, model.kv_heads // tensor_parallel
    bytes_per_token = kv_bytes_per_layer(model, tensor_parallel)
    kv_seconds = bytes_per_token / gpu.measured_decode_bandwidth
    potential, launch = _potential(_nearest("prefill_attention", gpu, heads, kv), heads)
    n, context, values = table2(_nearest("decode_attention", gpu, heads, kv), "batch_size", "ctx")
    for column in values.T:
        # Batches too large for the benchmark's memory: time is linear in the number of sequences of equal context.
        known = np.isfinite(column)
        column[~known] = _line(n[~known], n[known], column[known])
    # The benchmark re-read one buffer, so rows that fit the L2 cache are too fast: not below the KV bytes' time.
    values = _nondecreasing(np.maximum(values, kv_seconds * n[:, None] * context[None, :]))
    return {
        "decode": Grid((n, context), values * model.layers),
        "potential_values": potential * model.layers,
        "potential_step": POTENTIAL_STEP,
        "prefill_launch": launch * model.layers,
        "kv_seconds": kv_seconds * model.layers,
        "source": f"prefill and decode kernels measured apart ({gpu.name}, aiconfigurator)",
    }


def _nearest(name: str, gpu: Gpu, heads: int, kv: int) -> Rows:
    """Rows with these KV heads and the nearest number of query heads (28 query heads were not measured)."""
    rows = read_kernels(name, gpu=gpu.name, num_kv_heads=kv)
    near = min(np.unique(rows["num_heads"]), key=lambda h: (abs(h - heads), h))
    return {k: v[rows["num_heads"] == near] for k, v in rows.items()}


def _potential(rows: Rows, heads: int) -> tuple[FloatArray, float]:
    """V at multiples of POTENTIAL_STEP and the launch cost, one layer.

    V = T - T(1), interpolated as V/x, which is linear in x where attention is quadratic; scaled to `heads`.
    """
    length, time = rows["seq_len"], rows["time"]
    launch = float(time[0])
    mean = np.maximum.accumulate(time - launch)[1:] / length[1:]
    x = np.arange(0, POTENTIAL_END + POTENTIAL_STEP, POTENTIAL_STEP)
    long = length[1:] >= FIT_FROM
    slope = np.polyfit(length[1:][long], mean[long], 1)[0]
    value = x * (np.interp(x, length[1:], mean) + slope * np.maximum(x - length[-1], 0.0))
    return _convex(np.maximum.accumulate(value)) * (heads / rows["num_heads"][0]), launch


def _convex(values: FloatArray) -> FloatArray:
    """Lower convex envelope of equally spaced values: a chunk deeper in a prompt attends to more, so never costs less.

    Measured bumps above it are at most 2 us a layer up to 1024 tokens; beyond, 8 % at single lengths, 13 % on the L40S.
    """
    hull: list[int] = []
    for i, value in enumerate(values):
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (values[b] - values[a]) * (i - a) < (value - values[a]) * (b - a):
                break
            hull.pop()
        hull.append(i)
    result: FloatArray = np.interp(np.arange(len(values)), hull, values[hull])
    return result
