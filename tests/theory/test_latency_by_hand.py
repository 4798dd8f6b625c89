"""Step times of packaged profiles recomputed from the packaged kernel tables, in plain Python, by the composition

T = L (GEMM(qkv) + GEMM(o) + GEMM(gate_up) + GEMM(down) + element-wise + attention + 2 all-reduce)
    + embedding, last norm + lm_head and sampler (by sequences) + host

Element-wise without a table: 2.5 us + bytes / (0.85 bandwidth). Written from that formula and the tables' columns
alone. Batches lie on measured lengths, so that what is left for the repairs of the tables is small.
"""

from __future__ import annotations

import bisect
import csv
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import slacktide.data
from slacktide.core.latency import LatencyModel
from slacktide.profiling.profiles import load_profile

DATA = Path(slacktide.data.__file__).parent
HOST = 1e-3
Point = tuple[float, ...]


@lru_cache
def kernels(name: str, keys: tuple[str, ...], value: str) -> dict[Point, list[tuple[float, float]]]:
    """(values of the key columns) -> sorted (value column, microseconds)."""
    rows = pq.read_table(DATA / "kernels" / f"{name}.parquet").to_pylist()
    found: dict[Point, list[tuple[float, float]]] = {}
    for row in rows:
        found.setdefault(tuple(row[k] for k in keys), []).append((row[value], row["time_us"]))
    return {key: sorted(points) for key, points in found.items()}


def line(points: list[tuple[float, float]], x: float) -> float:
    """Linear between neighbours; the last two points' line beyond."""
    at = min(max(bisect.bisect_right(points, (x, float("inf"))), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


@lru_cache
def table(name: str, key: str) -> dict[str, dict[str, str]]:
    with (DATA / name).open(encoding="utf-8") as file:
        return {row[key]: row for row in csv.DictReader(file)}


class Hand:
    """One profile: its dimensions, and each term of the sum in microseconds."""

    def __init__(self, gpu: str, model: str, tp: int) -> None:
        self.gpu, self.tp = gpu, tp
        spec, dims = table("gpus.csv", "gpu")[gpu], table("models.csv", "model")[model]
        self.bandwidth = float(spec["hbm_gbs"]) * 1e3  # bytes per microsecond
        self.kv_bandwidth = float(spec["measured_decode_attention_gbs"] or spec["hbm_gbs"]) * 1e3
        names = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab")
        self.layers, self.hidden, self.heads, self.kv, self.head, self.width, self.vocab = (int(dims[k]) for k in names)
        self.qk_norm = dims["qk_norm"] == "1"
        self.kv_bytes = 2 * self.kv * self.head * 2 / tp

    def stream(self, elements: float) -> float:
        """A fused element-wise kernel that moves so many bf16 values."""
        return 2.5 + 2 * elements / (0.85 * self.bandwidth)

    def elementwise(self, n: int) -> float:
        """Per layer: two norms (read x and residual, write both), rotary, SwiGLU."""
        rotary = self.stream(2 * n * (self.heads + self.kv) * self.head / self.tp)
        norms = 2 * self.stream(4 * n * self.hidden)
        return norms + rotary * (1 + self.qk_norm) + self.stream(3 * n * self.width / self.tp)

    def shapes(self) -> list[tuple[int, int]]:
        qkv = (self.heads + 2 * self.kv) * self.head // self.tp
        ffn = self.width // self.tp
        return [(qkv, self.hidden), (self.hidden, self.heads * self.head // self.tp), (2 * ffn, self.hidden),
                (self.hidden, ffn)]  # fmt: skip

    def sampler(self, sequences: int) -> float:
        return 25 + sequences * self.vocab * 6 / (0.85 * self.bandwidth)

    def all_reduce(self, n: int, of: str) -> float:
        return line(kernels("all_reduce", ("gpu", "num_gpus"), "message_bytes")[of, self.tp], 2 * n * self.hidden)


class Additive(Hand):
    """Kernels measured apart (H100, A100): interference of 1.6 on the decodes of a mixed batch."""

    def gemm(self, n: int, k: int, m: int) -> float:
        return line(kernels("gemm", ("gpu", "n", "k"), "m")[self.gpu, n, k], m)

    def time(self, chunks: list[tuple[int, int]], decodes: list[int]) -> float:
        n, sequences = sum(c for c, _ in chunks) + len(decodes), len(chunks) + len(decodes)
        layer = sum(self.gemm(*shape, n) for shape in self.shapes()) + self.elementwise(n)
        key = (self.gpu, self.heads // self.tp, self.kv // self.tp)
        if chunks:
            whole = kernels("prefill_attention", ("gpu", "num_heads", "num_kv_heads"), "seq_len")[key]
            launch = whole[0][1]
            # T(u + c) - T(u), with T(0) = launch: one launch for all chunks of the step.
            layer += launch + sum(line(whole, u + c) - (line(whole, u) if u else launch) for c, u in chunks)
        if decodes:
            context = sum(decodes) / len(decodes)
            columns = ("gpu", "num_heads", "num_kv_heads", "batch_size")
            by_context = kernels("decode_attention", columns, "ctx")[*key, len(decodes)]
            read = len(decodes) * context * self.kv_bytes / self.kv_bandwidth
            layer += (1.6 if chunks else 1.0) * max(line(by_context, context), read)
        if self.tp > 1:
            layer += 2 * self.all_reduce(n, self.gpu)
        head = self.gemm(self.vocab // self.tp, self.hidden, sequences)
        once = 2 * self.stream(2 * n * self.hidden) + head + self.sampler(sequences)
        return self.layers * layer + once


class Measured(Hand):
    """Every layer and the mixed attention measured (RTX PRO 6000, RTX 4090; Llama 3.1 8B)."""

    def time(self, chunks: list[tuple[int, int]], decodes: list[int]) -> float:
        n, sequences = sum(c for c, _ in chunks) + len(decodes), len(chunks) + len(decodes)
        layers = kernels("layers", ("gpu", "model", "tp", "layer"), "tokens")
        total = 0.0
        for (gpu, model, tp, layer), points in layers.items():
            if (gpu, model, tp) == (self.gpu, "Llama-3.1-8B", self.tp):
                count = {"embedding": 1, "final_layernorm": 1, "layernorm": 2 * self.layers}.get(layer, self.layers)
                total += count * line(points, n)
        heads = kernels("per_sequence", ("gpu", "model", "tp", "layer"), "sequences")
        for layer in ("lm_head", "sampler"):
            total += line(heads[self.gpu, "Llama-3.1-8B", self.tp, layer], sequences)
        return total + self.layers * self.attention(chunks, decodes)

    def attention(self, chunks: list[tuple[int, int]], decodes: list[int]) -> float:
        """The row of one chunk with all tokens, and of all decodes at their mean context."""
        chunk, cached = sum(c for c, _ in chunks), sum(u for _, u in chunks)
        context = sum(decodes) / len(decodes) if decodes else 0
        keys = ("gpu", "model", "tp", "prefill_chunk", "kv_prefill", "kv_decode")
        key = (self.gpu, "Llama-3.1-8B", self.tp, chunk, cached, context)
        return (
            line(kernels("mixed_attention", keys, "n_decode")[key], len(decodes))
            if decodes
            else kernels("mixed_attention", keys, "n_decode")[key][0][1]
        )


class Rescaled(Hand):
    """2x RTX 3090: its own GEMMs; attention of the RTX 4090, by bandwidth (decodes) and measured prefills."""

    def time(self, chunks: list[tuple[int, int]], decodes: list[int]) -> float:
        n, sequences = sum(c for c, _ in chunks) + len(decodes), len(chunks) + len(decodes)
        own = kernels("rtx3090_layers", ("tp", "layer"), "tokens")
        gemms = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        layer = sum(line(own[self.tp, name], n) for name in gemms) + self.elementwise(n)
        keys = ("gpu", "model", "tp", "prefill_chunk", "kv_prefill", "n_decode")
        if chunks:
            ((chunk, cached),) = chunks
            first, row = (kernels("mixed_attention", (*keys, "kv_decode"), "prefill_chunk")[
                "RTX-4090", "Llama-3.1-8B", 1, chunk, u, 0, 0][0][1] for u in (0, cached))  # fmt: skip
            layer += row * line(own[self.tp, "attn"], chunk) / first  # measured per chunk on the RTX 3090
        if decodes:
            assert not chunks
            alone = kernels("mixed_attention", keys, "kv_decode")["RTX-4090", "Llama-3.1-8B", 1, 0, 0, len(decodes)]
            smallest = kernels("mixed_attention", keys, "kv_decode")["RTX-4090", "Llama-3.1-8B", 1, 0, 0, 1][0][1]
            share = (self.kv / self.tp) / 8  # of the 4090's KV heads
            time = line(alone, sum(decodes) / len(decodes))
            layer += (smallest + (time - smallest) * share) * 1008 / 936
        message = 2 * n * self.hidden  # a ring of two moves the message once over the 45 GB/s bridge
        layer += 2 * (10 + message / 45e3) if self.tp > 1 else 0.0
        once = 2 * self.stream(2 * n * self.hidden) + line(own[self.tp, "lm_head"], sequences) + self.sampler(sequences)
        return self.layers * layer + once


def by_model(model: LatencyModel, chunks: list[tuple[int, int]], decodes: list[int]) -> float:
    tokens = np.array([c for c, _ in chunks] + [1] * len(decodes))
    contexts = np.array([u for _, u in chunks] + decodes)
    phases = np.array([False] * len(chunks) + [True] * len(decodes))
    return model.step_time(tokens, contexts, phases)


BATCHES = [
    ([(512, 0)], []),
    ([(2048, 0)], []),
    ([(1024, 1024)], []),
    ([(2048, 2048)], []),
    ([(4096, 12288)], []),  # deep in a long prompt
    ([(512, 0), (1024, 512)], []),
    ([], [1024]),
    ([], [512] * 32),
    ([], [1024, 3072] * 16),
    ([], [1024] * 256),
    ([], [16384] * 8),
    ([(512, 512)], [1024] * 32),
    ([(2048, 0)], [512] * 128),
    ([(1024, 1024)], [2048] * 256),
]
IDS = [f"{sum(c for c, _ in chunks)}+{len(decodes)}" for chunks, decodes in BATCHES]


@pytest.mark.parametrize(("chunks", "decodes"), BATCHES, ids=IDS)
@pytest.mark.parametrize(
    ("name", "gpu", "model", "tp"),
    [
        ("h100/llama-3-8b", "H100-SXM", "Llama-3-8B", 1),
        ("a100/llama-3-8b", "A100-SXM-80GB", "Llama-3-8B", 1),
        ("a100/qwen3-8b", "A100-SXM-80GB", "Qwen3-8B", 1),
        ("4x-h100/llama-3-70b", "H100-SXM", "Llama-3-70B", 4),
    ],
)
def test_kernels_measured_apart(
    name: str, gpu: str, model: str, tp: int, chunks: list[tuple[int, int]], decodes: list[int]
) -> None:
    hand = Additive(gpu, model, tp).time(chunks, decodes) * 1e-6 + HOST
    assert by_model(load_profile(name).latency, chunks, decodes) == pytest.approx(hand, rel=0.02)


ON_GRID = [
    ([(512, 0)], []),
    ([(2048, 4096)], []),
    ([(256, 16384)], []),
    ([], [1024]),
    ([], [4096] * 64),
    ([], [512] * 128),
    ([], [512] * 256),  # pure decodes go to 256
    ([(512, 1024)], [1024] * 32),
    ([(16, 0)], [16384] * 8),
    ([(1024, 0)], [2048] * 128),
    ([(1024, 512)], [1024] * 160),  # mixed rows end at 128 decodes: the line through 64 and 128
    ([(512, 0)], [512, 1536] * 16),  # by the mean context
]


@pytest.mark.parametrize(("chunks", "decodes"), ON_GRID, ids=[f"{len(c)}+{len(d)}" for c, d in ON_GRID])
@pytest.mark.parametrize("gpu", ["RTX-PRO-6000", "RTX-4090"])
def test_mixed_attention_measured(gpu: str, chunks: list[tuple[int, int]], decodes: list[int]) -> None:
    hand = Measured(gpu, "Llama-3-8B", 1).time(chunks, decodes) * 1e-6 + HOST
    assert by_model(load_profile(f"{gpu.lower()}/llama-3-8b").latency, chunks, decodes) == pytest.approx(
        hand, rel=0.005
    )


@pytest.mark.parametrize(
    ("chunks", "decodes"), [([(512, 0)], []), ([(1024, 2048)], []), ([], [1024] * 32), ([], [512] * 128), ([], [4096])]
)
def test_rescaled_to_the_rtx_3090(chunks: list[tuple[int, int]], decodes: list[int]) -> None:
    hand = Rescaled("RTX-3090", "Llama-3-8B", 2).time(chunks, decodes) * 1e-6 + HOST
    found = by_model(load_profile("2x-rtx-3090/llama-3-8b?interconnect=nvlink").latency, chunks, decodes)
    assert found == pytest.approx(hand, rel=1e-6)


@pytest.mark.parametrize("name", ["h100/llama-3-8b", "4x-h100/llama-3-70b", "a100/qwen2.5-7b", "l40s/qwen3-8b"])
def test_chunks_cost_what_the_whole_prompt_costs(name: str) -> None:
    """Attention of a prompt in chunks: the differences of V add up to the whole, and each step launches once."""
    model = load_profile(name).latency
    no_decodes = np.zeros(1, dtype=bool)
    for length in (1000, 4096, 20000):
        for chunk in (96, 512, 2048):
            starts = np.arange(0, length, chunk)
            parts = [
                model.batch_shape(np.array([min(chunk, length - u)]), np.array([u]), no_decodes)[11] for u in starts
            ]
            whole = model.batch_shape(np.array([length]), np.array([0]), no_decodes)[11]
            assert sum(parts) == pytest.approx(whole, rel=1e-9)


def test_every_sequence_has_its_logits_and_every_layer_two_all_reduces() -> None:
    """Splitting one chunk in two adds a row to lm_head and sampler alone; another wire costs 2 L messages more."""
    model = load_profile("h100/llama-3-8b").latency
    hand = Additive("H100-SXM", "Llama-3-8B", 1)
    one, two = by_model(model, [(1024, 0)], []), by_model(model, [(512, 0), (512, 512)], [])
    logits = [hand.gemm(128256, 4096, n) + hand.sampler(n) for n in (1, 2)]
    assert two - one == pytest.approx((logits[1] - logits[0]) * 1e-6, abs=2e-9)
    fast, slow = (
        by_model(load_profile(f"2x-rtx-3090/llama-3-8b?interconnect={wire}").latency, [(700, 0)], [])
        for wire in ("nvlink", "pcie-host")
    )
    message = 700 * 4096 * 2
    assert slow - fast == pytest.approx(2 * 32 * (5e-6 + message / 9e9 - message / 45e9), rel=1e-9)
