"""Reduce the measured kernel tables to what the packaged GPU profiles need: `build_profiles.py --source DIR`.

Writes src/slacktide/data/kernels/*.parquet, gpus.csv, models.csv and licenses/. Deterministic: the same source gives
the same bytes (with the same pyarrow). Nothing of the product runs it; the outcome is committed.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

DATA = Path(__file__).resolve().parent.parent / "src" / "slacktide" / "data"
TENSOR_PARALLEL = (1, 2, 4)
GEMM_SCALED_COLUMNS = 65536
"""Largest measured number of GEMM columns; wider products (lm_head of 128k to 152k) scale from it linearly."""
MIXED_NODES = {  # the complete factor-2 grid inside the measured mixed attention; the other rows are a check
    "prefill_chunk": [16, 32, 64, 128, 256, 512, 1024, 2048],
    "kv_prefill": [0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384],
    "kv_decode": [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384],
}
Columns = dict[str, np.ndarray]


def read(path: Path) -> Columns:
    table = pq.read_table(path)
    return {name: np.asarray(table.column(name).to_pylist()) for name in table.schema.names}


def write(name: str, columns: dict[str, Any], group_by: list[str]) -> None:
    """Write rows sorted by all key columns, one row group per distinct `group_by`, so that a reader can skip."""
    keys = [c for c in columns if c != "time_us"]
    order = np.lexsort([columns[k] for k in reversed(keys)])
    arrays = {k: np.asarray(v)[order] for k, v in columns.items()}
    fields = []
    for key, values in arrays.items():
        kind = pa.string() if values.dtype.kind == "U" else pa.float32() if key == "time_us" else pa.int32()
        fields.append(pa.field(key, kind))
    table = pa.table({k: pa.array(v.tolist(), f.type) for (k, v), f in zip(arrays.items(), fields, strict=True)})
    marks = np.array(["|".join(str(arrays[g][i]) for g in group_by) for i in range(len(order))])
    starts = [0, *(np.flatnonzero(marks[1:] != marks[:-1]) + 1).tolist(), len(order)]
    path = DATA / "kernels" / f"{name}.parquet"
    with pq.ParquetWriter(path, table.schema, compression="zstd", compression_level=19) as writer:
        for start, end in itertools.pairwise(starts):
            writer.write_table(table.slice(start, end - start), row_group_size=end - start)
    print(f"{path.name}: {len(order)} rows, {len(starts) - 1} row groups, {path.stat().st_size / 1e3:.0f} kB")


def gemm_shapes(models: list[dict[str, str]]) -> list[tuple[int, int]]:
    """Distinct (columns n, depth k) of the linear layers, for every model and tensor-parallel size."""
    shapes = set()
    for model in models:
        hidden, heads, kv, head = (int(model[c]) for c in ("hidden", "heads", "kv_heads", "head_dim"))
        intermediate, vocab = int(model["intermediate"]), int(model["vocab"])
        for tp in TENSOR_PARALLEL:
            if heads % tp or kv % tp:
                continue
            shapes |= {
                ((heads + 2 * kv) * head // tp, hidden),
                (hidden, heads * head // tp),
                (2 * intermediate // tp, hidden),
                (hidden, intermediate // tp),
                (vocab // tp, hidden),
            }
    return sorted(shapes)


def interpolate_gemm(table: Columns, gpu: str, shapes: list[tuple[int, int]]) -> Columns:
    """Times of the wanted (n, k) by bilinear interpolation of log time over (log n, log k), per measured m."""
    of_gpu = table["gpu"] == gpu
    ns, ks, ms = (np.unique(table[c][of_gpu]) for c in ("n", "k", "m"))
    grid = np.full((len(ns), len(ks), len(ms)), np.nan)
    index = [np.searchsorted(v, table[c][of_gpu]) for v, c in ((ns, "n"), (ks, "k"), (ms, "m"))]
    grid[tuple(index)] = np.log(table["latency_ms"][of_gpu] * 1e3)
    rows: dict[str, list[Any]] = {c: [] for c in ("gpu", "n", "k", "m", "time_us")}
    for n, k in shapes:
        wide = max(n / GEMM_SCALED_COLUMNS, 1.0)
        i, fi = _cell(np.log(ns), np.log(n / wide))
        j, fj = _cell(np.log(ks), np.log(k))
        corners = [(1 - fi, i, 1 - fj, j), (1 - fi, i, fj, j + 1), (fi, i + 1, 1 - fj, j), (fi, i + 1, fj, j + 1)]
        log_time = np.zeros(len(ms))
        for wi, a, wj, b in corners:
            if wi * wj > 0:
                log_time += wi * wj * grid[a, b]
        known = np.isfinite(log_time)
        rows["gpu"] += [gpu] * int(known.sum())
        rows["n"] += [n] * int(known.sum())
        rows["k"] += [k] * int(known.sum())
        rows["m"] += ms[known].tolist()
        rows["time_us"] += (np.exp(log_time[known]) * wide).tolist()
    return {k: np.asarray(v) for k, v in rows.items()}


def _cell(nodes: np.ndarray, x: float) -> tuple[int, float]:
    i = int(np.clip(np.searchsorted(nodes, x, side="right") - 1, 0, len(nodes) - 2))
    return i, float(np.clip((x - nodes[i]) / (nodes[i + 1] - nodes[i]), 0.0, 1.0))


def attention_pairs(models: list[dict[str, str]], known: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """(heads, KV heads) per GPU that occur; where a pair is not measured, the nearest head count with the same KV."""
    pairs = set()
    for model in models:
        for tp in TENSOR_PARALLEL:
            heads, kv = int(model["heads"]), int(model["kv_heads"])
            if heads % tp or kv % tp:
                continue
            heads, kv = heads // tp, kv // tp
            near = sorted((abs(h - heads), h) for h, v in known if v == kv)
            pairs.add((near[0][1], kv))
    return pairs


def build_aic(profiles: Path, models: list[dict[str, str]]) -> None:
    """Tables of ai-dynamo/aiconfigurator."""
    gemm = read(profiles / "aic_gemm_bf16.parquet")
    parts = [interpolate_gemm(gemm, gpu, gemm_shapes(models)) for gpu in sorted(set(gemm["gpu"].tolist()))]
    write("gemm", {k: np.concatenate([part[k] for part in parts]) for k in parts[0]}, ["gpu"])
    for name, keys in (("prefill_attention", ["seq_len"]), ("decode_attention", ["batch_size", "ctx"])):
        table = read(profiles / f"aic_{name}_bf16.parquet")
        keep = np.zeros(len(table["gpu"]), dtype=bool)
        for gpu in sorted(set(table["gpu"].tolist())):
            of_gpu = table["gpu"] == gpu
            known = set(zip(table["num_heads"][of_gpu].tolist(), table["num_kv_heads"][of_gpu].tolist(), strict=True))
            for heads, kv in attention_pairs(models, known):
                keep |= of_gpu & (table["num_heads"] == heads) & (table["num_kv_heads"] == kv)
        if name == "prefill_attention":
            keep &= table["batch_size"] == 1
        columns = {k: table[k][keep] for k in ["gpu", "num_heads", "num_kv_heads", *keys]}
        write(name, columns | {"time_us": table["latency_ms"][keep] * 1e3}, ["gpu", "num_heads", "num_kv_heads"])
    reduce = read(profiles / "aic_allreduce_bf16.parquet")
    keep = (reduce["impl"] == "vllm_graph") & np.isin(reduce["num_gpus"], TENSOR_PARALLEL)
    columns = {k: reduce[k][keep] for k in ("gpu", "num_gpus", "message_bytes")}
    write("all_reduce", columns | {"time_us": reduce["latency_ms"][keep] * 1e3}, ["gpu"])


def build_lss(profiles: Path) -> None:
    """Tables of casys-kaist/LLMServingSim."""
    keys = ["gpu", "model", "tp"]
    dense = read(profiles / "lss_dense.parquet")
    write("layers", {k: dense[k] for k in [*keys, "layer", "tokens", "time_us"]}, keys)
    heads = read(profiles / "lss_per_sequence.parquet")
    write("per_sequence", {k: heads[k] for k in [*keys, "layer", "sequences", "time_us"]}, keys)
    mixed = read(profiles / "lss_attention.parquet")
    chunk, decodes = mixed["prefill_chunk"], mixed["n_decode"]
    on_grid = np.ones(len(chunk), dtype=bool)
    for name, nodes in MIXED_NODES.items():
        on_grid &= np.isin(mixed[name], nodes)
    keep = (decodes == 0) | ((chunk == 0) & np.isin(mixed["kv_decode"], MIXED_NODES["kv_decode"])) | on_grid
    order = [*keys, "prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"]
    write("mixed_attention", {k: mixed[k][keep] for k in order}, keys)
    old = read(profiles / "lss_v0_layers.parquet")
    wanted = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head", "attn"]
    keep = (old["gpu"] == "RTX-3090") & np.isin(old["layer"], wanted)
    write("rtx3090_layers", {k: old[k][keep] for k in ["tp", "layer", "tokens", "time_us"]}, ["tp"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="directory with profiles/, gpu_specs.csv, ...")
    source = parser.parse_args().source
    (DATA / "kernels").mkdir(parents=True, exist_ok=True)
    (DATA / "licenses").mkdir(parents=True, exist_ok=True)
    with (source / "model_configs.csv").open(encoding="utf-8", newline="") as file:
        models = list(csv.DictReader(file))
    build_aic(source / "profiles", models)
    build_lss(source / "profiles")
    shutil.copyfile(source / "gpu_specs.csv", DATA / "gpus.csv")
    shutil.copyfile(source / "model_configs.csv", DATA / "models.csv")
    for name in ("Apache-2.0.txt", "MIT-LLMServingSim.txt"):
        shutil.copyfile(source / "LICENSES" / name, DATA / "licenses" / name)


if __name__ == "__main__":
    main()
