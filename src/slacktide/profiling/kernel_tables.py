"""Reads the packaged kernel tables and dimensions. Times come out in seconds per layer (files hold microseconds)."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

import numpy as np

from slacktide.core.types import FloatArray

Rows = dict[str, FloatArray]


@dataclass(frozen=True)
class Gpu:
    """Dimensions of one GPU: bytes, bytes/s, FLOP/s (dense bf16); 0 where nothing was measured."""

    name: str
    memory: float
    bandwidth: float
    flops: float
    link_bandwidth: float
    measured_flops: float
    measured_bandwidth: float
    measured_decode_bandwidth: float


@dataclass(frozen=True)
class Model:
    """Dimensions of one dense transformer, bf16."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    qk_norm: bool
    linear_parameters: float
    weight_bytes: float
    kv_bytes_per_token: int

    def gemms(self, tensor_parallel: int) -> dict[str, tuple[int, int]]:
        """(columns n, depth k) of the four products of a layer on one GPU."""
        heads = (self.heads + 2 * self.kv_heads) * self.head_dim // tensor_parallel
        return {
            "qkv_proj": (heads, self.hidden),
            "o_proj": (self.hidden, self.heads * self.head_dim // tensor_parallel),
            "gate_up_proj": (2 * self.intermediate // tensor_parallel, self.hidden),
            "down_proj": (self.hidden, self.intermediate // tensor_parallel),
        }


def _csv(name: str) -> list[dict[str, str]]:
    with files("slacktide.data").joinpath(name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@lru_cache(maxsize=1)
def gpus() -> dict[str, Gpu]:
    """GPUs by the name of the data file. A vendor's "GB" of GPU memory is a GiB (`capacity.VISIBLE_MEMORY` of it)."""
    found = {}
    for row in _csv("gpus.csv"):
        found[row["gpu"]] = Gpu(
            name=row["gpu"],
            memory=float(row["memory_gb"]) * 2**30,
            bandwidth=float(row["hbm_gbs"]) * 1e9,
            flops=float(row["bf16_dense_tflops"]) * 1e12,
            link_bandwidth=float(row["link_gbs_per_direction"]) * 1e9,
            measured_flops=float(row["measured_gemm_tflops_m2048"] or 0) * 1e12,
            measured_bandwidth=float(row["measured_weight_read_gbs"] or 0) * 1e9,
            measured_decode_bandwidth=float(row["measured_decode_attention_gbs"] or 0) * 1e9,
        )
    return found


@lru_cache(maxsize=1)
def models() -> dict[str, Model]:
    """Models by lower-case name."""
    found = {}
    for row in _csv("models.csv"):
        found[row["model"].lower()] = Model(
            name=row["model"],
            **{k: int(row[k]) for k in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab")},
            qk_norm=row["qk_norm"] == "1",
            linear_parameters=float(row["linear_params_b"]) * 1e9,
            weight_bytes=float(row["weights_gb_bf16"]) * 1e9,
            kv_bytes_per_token=int(row["kv_bytes_per_token_bf16"]),
        )
    return found


def read_kernels(name: str, **keys: str | int) -> Rows:
    """Rows of kernels/NAME.parquet with the given key values: numeric columns as float64, `time_us` as `time` (s).

    A row group holds one combination of the keys it is grouped by, so groups that cannot match are not read.
    """
    import pyarrow.parquet as pq

    path = files("slacktide.data").joinpath("kernels").joinpath(f"{name}.parquet")
    with path.open("rb") as handle:
        file = pq.ParquetFile(handle)
        columns = file.schema_arrow.names
        parts: list[Any] = []
        for group in range(file.num_row_groups):
            meta = file.metadata.row_group(group)
            ranges = {k: meta.column(columns.index(k)).statistics for k in keys}
            if all(r.min <= keys[k] <= r.max for k, r in ranges.items()):
                table = file.read_row_group(group)
                keep = np.ones(table.num_rows, dtype=bool)
                for k, r in ranges.items():
                    if r.min != r.max:
                        keep &= np.asarray(table.column(k).to_numpy() == keys[k], dtype=bool)
                numeric = [c for c in columns if c not in keys]
                parts.append({c: np.asarray(table.column(c).to_numpy())[keep] for c in numeric})
    rows: Rows = {}
    for column in parts[0] if parts else []:
        values = np.concatenate([part[column] for part in parts])
        rows[column] = values if values.dtype.kind == "O" else values.astype(np.float64)
    if "time_us" in rows:
        rows["time"] = rows.pop("time_us") * 1e-6
    return rows


def table2(rows: Rows, x: str, y: str) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Distinct values of two columns and the times on their product, NaN where none was measured."""
    xs, i = np.unique(rows[x], return_inverse=True)
    ys, j = np.unique(rows[y], return_inverse=True)
    values = np.full((len(xs), len(ys)), np.nan)
    values[i, j] = rows["time"]
    return xs, ys, values
