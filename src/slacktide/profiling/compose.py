"""Composes the part of a step that depends on tokens and on sequences from measured kernels. Seconds.

dense(tokens) = layers * (four GEMMs + element-wise + 2 all-reduces when tensor parallel) + embedding + last norm;
per_sequence(n) = lm_head + sampler. Attention is in `compose_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slacktide.core.types import FloatArray
from slacktide.profiling.kernel_tables import Gpu, Model, Rows, read_kernels

DENSE_TOKENS = 16384
"""Last tabulated token count: above vLLM's largest default of max_num_batched_tokens that we profile (16384)."""
MAX_SEQUENCES = 2048
"""Last tabulated sequence count: twice vLLM's largest default of max_num_seqs; linear beyond."""
ELEMENTWISE_LAUNCH = 2.5e-6
"""Seconds of a fused element-wise kernel at one token: the smallest times of the measured tables are 1.7 to 2.7 us."""
ELEMENTWISE_EFFICIENCY = 0.85
"""Share of the memory bandwidth that large element-wise kernels reach (README of the kernel data)."""
SAMPLER_LAUNCH = 25e-6
"""Seconds of the sampler at one sequence: 24.7 us on the RTX PRO 6000, 25.0 us on the RTX 4090."""
SAMPLER_BYTES_PER_LOGIT = 6.0
"""One float32 write and one bf16 read: gives 154 us for 256 sequences of 128k logits where 164 us were measured."""
AIC_GPUS = ("H200-SXM", "H100-SXM", "A100-SXM-80GB", "L40S", "RTX-PRO-6000")
"""GPUs with GEMM, additive attention and all-reduce tables of ai-dynamo/aiconfigurator."""
LSS_MODELS = {"Llama-3-8B": "Llama-3.1-8B", "Qwen3-32B": "Qwen3-32B"}
"""Our model names in the tables of casys-kaist/LLMServingSim (Llama 3 and 3.1 have the same dimensions)."""
LSS_LAYERS = {
    ("RTX-PRO-6000", "Llama-3-8B", 1), ("RTX-PRO-6000", "Llama-3-8B", 2), ("RTX-PRO-6000", "Qwen3-32B", 1),
    ("RTX-PRO-6000", "Qwen3-32B", 2), ("RTX-4090", "Llama-3-8B", 1),
}  # fmt: skip
"""(GPU, model, tensor parallel) whose layers were measured one by one."""
INTERCONNECTS = {
    "nvlink": "assumed 45 GB/s, 10 us (NVLink bridge)",
    "pcie": "PCIe peer-to-peer, all-reduce table of 2x L40S",
    "pcie-host": "PCIe via host memory, assumed 9 GB/s, 15 us",
}
"""Interconnects that can be chosen for GPUs whose all-reduce nobody measured (RTX 3090)."""


@dataclass(frozen=True)
class Part:
    """A composed curve (index = tokens or sequences), what it rests on, and up to where that was measured."""

    values: FloatArray
    source: str
    measured: int


def extend(x: FloatArray, known: FloatArray, values: FloatArray) -> FloatArray:
    """Linear interpolation; held below the first known point, linear beyond the last.

    The slope beyond is that over the upper half of the known range: neighbouring points differ by tile effects.
    """
    inside = np.interp(x, known, values)
    half = min(int(np.searchsorted(known, known[-1] / 2, side="right")) - 1, len(known) - 2)
    half = max(half, 0)
    slope = max((values[-1] - values[half]) / (known[-1] - known[half]), 0.0)
    result: FloatArray = inside + slope * np.maximum(x - known[-1], 0.0)
    return result


def dense_curve(gpu: Gpu, model: Model, tensor_parallel: int, interconnect: str | None) -> Part:
    """Seconds of everything that depends on the tokens of the batch, index 0..DENSE_TOKENS (0 holds that of 1)."""
    tokens = np.arange(DENSE_TOKENS + 1, dtype=np.float64)
    tokens[0] = 1.0
    if (gpu.name, model.name, tensor_parallel) in LSS_LAYERS:
        layer = _measured_layers(gpu, model, tensor_parallel, tokens)
    elif gpu.name in AIC_GPUS:
        layer = _aic_layer(gpu, model, tensor_parallel, tokens)
    else:
        layer = _scaled_layer(gpu, model, tensor_parallel, tokens)
    values, source = layer.values, layer.source
    if tensor_parallel > 1:
        reduce = all_reduce(gpu, tensor_parallel, tokens * model.hidden * 2, interconnect)
        values = values + 2 * model.layers * reduce.values
        source += f"; 2 all-reduces a layer: {reduce.source}"
    return Part(values, source, layer.measured)


def elementwise(gpu: Gpu, bytes_moved: FloatArray) -> FloatArray:
    """Seconds of one fused element-wise kernel: launch + bytes over the bandwidth that such kernels reach."""
    result: FloatArray = ELEMENTWISE_LAUNCH + bytes_moved / (ELEMENTWISE_EFFICIENCY * gpu.bandwidth)
    return result


def _elementwise_layer(gpu: Gpu, model: Model, tensor_parallel: int, tokens: FloatArray) -> FloatArray:
    """Two norms with residual, rotary embedding, activation, and query/key norm where the model has it; bf16."""
    heads = (model.heads + model.kv_heads) * model.head_dim / tensor_parallel
    norm = elementwise(gpu, tokens * 4 * model.hidden * 2)
    rotary = elementwise(gpu, tokens * 2 * heads * 2)
    activation = elementwise(gpu, tokens * 3 * model.intermediate / tensor_parallel * 2)
    return 2 * norm + rotary * (2 if model.qk_norm else 1) + activation


def _once(gpu: Gpu, model: Model, tokens: FloatArray) -> FloatArray:
    """Embedding lookup and last norm, once a step."""
    return 2 * elementwise(gpu, tokens * 2 * model.hidden * 2)


def _gemm(rows: Rows, n: int, k: int, m: FloatArray) -> tuple[FloatArray, int]:
    of_shape = (rows["n"] == n) & (rows["k"] == k)
    known = rows["m"][of_shape]
    return extend(m, known, rows["time"][of_shape]), int(known[-1])


def _aic_layer(gpu: Gpu, model: Model, tensor_parallel: int, tokens: FloatArray) -> Part:
    rows = read_kernels("gemm", gpu=gpu.name)
    layer = _elementwise_layer(gpu, model, tensor_parallel, tokens)
    measured = DENSE_TOKENS
    for n, k in model.gemms(tensor_parallel).values():
        time, last = _gemm(rows, n, k, tokens)
        layer = layer + time
        measured = min(measured, last)
    source = "GEMMs measured (aiconfigurator, shapes interpolated), element-wise by bandwidth"
    return Part(model.layers * layer + _once(gpu, model, tokens), source, measured)


def _measured_layers(gpu: Gpu, model: Model, tensor_parallel: int, tokens: FloatArray) -> Part:
    rows = read_kernels("layers", gpu=gpu.name, model=LSS_MODELS[model.name], tp=tensor_parallel)
    count = {"layernorm": 2 * model.layers, "embedding": 1, "final_layernorm": 1}
    total = np.zeros(len(tokens))
    for layer in sorted(set(rows["layer"].tolist())):
        chosen = rows["layer"] == layer
        total = total + count.get(layer, model.layers) * extend(tokens, rows["tokens"][chosen], rows["time"][chosen])
    return Part(total, "every layer measured (LLMServingSim, to 2048 tokens)", int(rows["tokens"].max()))


def _scaled_layer(gpu: Gpu, model: Model, tensor_parallel: int, tokens: FloatArray) -> Part:
    """GEMMs of Llama 3 8B measured on this GPU, each scaled by columns * depth to this model's; rest by bandwidth."""
    from slacktide.profiling.kernel_tables import models

    base = models()["llama-3-8b"]
    if gpu.name == "RTX-3090":
        rows = read_kernels("rtx3090_layers", tp=tensor_parallel)
        parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
        origin = "GEMMs measured (LLMServingSim v0, RTX 3090"
    else:
        rows = read_kernels("layers", gpu=gpu.name, model=LSS_MODELS[base.name], tp=tensor_parallel)
        parts = {}
        origin = f"GEMMs measured (LLMServingSim, {gpu.name}"
    layer = _elementwise_layer(gpu, model, tensor_parallel, tokens)
    wanted, measured = model.gemms(tensor_parallel), base.gemms(tensor_parallel)
    for name, (n, k) in wanted.items():
        scale = n * k / (measured[name][0] * measured[name][1])
        for kernel in parts.get(name, (name,)):
            chosen = rows["layer"] == kernel
            layer = layer + scale * extend(tokens, rows["tokens"][chosen], rows["time"][chosen])
    origin += ")" if wanted == measured else ", Llama 3 8B, scaled by shape)"
    source = origin + ", element-wise by bandwidth"
    return Part(model.layers * layer + _once(gpu, model, tokens), source, int(rows["tokens"].max()))


def all_reduce(gpu: Gpu, num_gpus: int, message_bytes: FloatArray, interconnect: str | None) -> Part:
    """Seconds of one all-reduce of each message size."""
    if interconnect in ("nvlink", "pcie-host"):
        latency, bandwidth = (10e-6, 45e9) if interconnect == "nvlink" else (15e-6, 9e9)
        # A ring of N moves 2 (N-1)/N of the message over each link: for 2 GPUs, the message once.
        values = latency + message_bytes * 2 * (num_gpus - 1) / num_gpus / bandwidth
        return Part(values, INTERCONNECTS[interconnect], 0)
    table = "L40S" if interconnect == "pcie" else gpu.name
    rows = read_kernels("all_reduce", gpu=table)
    chosen = rows["num_gpus"] == num_gpus
    known, times = rows["message_bytes"][chosen], np.maximum.accumulate(rows["time"][chosen])
    source = f"measured ({num_gpus}x {table})" if interconnect is None else INTERCONNECTS[interconnect]
    return Part(extend(message_bytes, known, times), source, int(known[-1]))


def sequence_curve(gpu: Gpu, model: Model, tensor_parallel: int) -> Part:
    """Seconds of lm_head and sampler by number of sequences, index 0 to MAX_SEQUENCES (0 holds the value of 1)."""
    n = np.arange(MAX_SEQUENCES + 1, dtype=np.float64)
    n[0] = 1.0
    if (gpu.name, model.name, tensor_parallel) in LSS_LAYERS:
        rows = read_kernels("per_sequence", gpu=gpu.name, model=LSS_MODELS[model.name], tp=tensor_parallel)
        total = np.zeros(len(n))
        for layer in ("lm_head", "sampler"):
            chosen = rows["layer"] == layer
            total = total + extend(n, rows["sequences"][chosen], rows["time"][chosen])
        return Part(total, "lm_head and sampler measured (LLMServingSim, to 256 sequences)", 256)
    sampler = SAMPLER_LAUNCH + n * model.vocab * SAMPLER_BYTES_PER_LOGIT / (ELEMENTWISE_EFFICIENCY * gpu.bandwidth)
    if gpu.name in AIC_GPUS:
        head, last = _gemm(read_kernels("gemm", gpu=gpu.name), model.vocab // tensor_parallel, model.hidden, n)
        source = "lm_head measured (aiconfigurator, scaled to the vocabulary), sampler by bandwidth"
        return Part(head + sampler, source, last)
    name = "rtx3090_layers" if gpu.name == "RTX-3090" else "per_sequence"
    keys: dict[str, str | int] = {"tp": tensor_parallel}
    if name == "per_sequence":
        keys |= {"gpu": gpu.name, "model": LSS_MODELS["Llama-3-8B"]}
    rows = read_kernels(name, **keys)
    chosen = rows["layer"] == "lm_head"
    count = rows.get("sequences", rows.get("tokens", n))[chosen]
    scale = model.vocab * model.hidden / (128256 * 4096)  # the measured head is that of Llama 3 8B
    return Part(
        scale * extend(n, count, rows["time"][chosen]) + sampler,
        f"lm_head measured on {gpu.name} (Llama 3 8B, scaled by shape), sampler by bandwidth",
        int(count.max()),
    )
