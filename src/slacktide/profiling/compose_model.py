"""Puts composed parts together into a latency model: measured tables, or a roofline where nothing was measured."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from slacktide.core.latency_families import RooflineModel
from slacktide.core.latency_tables import TablesModel
from slacktide.profiling import compose_attention
from slacktide.profiling.compose import (
    AIC_GPUS,
    ELEMENTWISE_EFFICIENCY,
    ELEMENTWISE_LAUNCH,
    SAMPLER_BYTES_PER_LOGIT,
    SAMPLER_LAUNCH,
    dense_curve,
    sequence_curve,
)
from slacktide.profiling.kernel_tables import Gpu, Model, gpus

GEMM_EFFICIENCY = 0.83
"""Median share of the data sheet's FLOP/s that large GEMMs reach on the five measured data-centre GPUs (0.67-0.86)."""
READ_EFFICIENCY = 0.82
"""Median share of the bandwidth that reading weights reaches there (0.81-0.88)."""
DECODE_EFFICIENCY = 0.83
"""Median share of the bandwidth that decode attention reaches there (0.76-0.90)."""
ATTENTION_EFFICIENCY = 0.4
"""Share of the FLOP/s that prefill attention of 2048 tokens reaches (0.39 H100, 0.40 A100, 0.43 RTX PRO 6000)."""
ALL_REDUCE_LATENCY = 15e-6
"""Seconds of a small all-reduce where none was measured (5 us over NVLink, 11 to 25 us over PCIe)."""


def tables(
    gpu: Gpu, model: Model, tensor_parallel: int, label: str, interconnect: str | None, chosen: dict[str, float]
) -> TablesModel:
    """The truth of a GPU with measured kernels. `chosen`: interference, skew, host_per_step, host_per_sequence."""
    parts: dict[str, Any] = dict(_parts(gpu.name, model, tensor_parallel, interconnect))
    sources = {"label": label, **parts.pop("sources"), "host": f"{chosen['host_per_step'] * 1e3:g} ms a step"}
    if parts.get("increment") is None:
        sources["mixed batches"] = f"assumed: decode attention times {chosen['interference']:g}"
        return TablesModel(**(parts | chosen), sources=sources)
    own = {k: v for k, v in chosen.items() if k != "interference"}
    return TablesModel(**(parts | own), sources=sources)


@lru_cache(maxsize=8)
def _parts(gpu_name: str, model: Model, tensor_parallel: int, interconnect: str | None) -> dict[str, Any]:
    """The composed tables, which do not depend on the settings; cached, read-only."""
    gpu = gpus()[gpu_name]
    dense = dense_curve(gpu, model, tensor_parallel, interconnect)
    sequences = sequence_curve(gpu, model, tensor_parallel)
    attention = compose_attention.measured(gpu, model, tensor_parallel)
    if attention is None and gpu.name in AIC_GPUS:
        attention = compose_attention.additive(gpu, model, tensor_parallel)
    if attention is None:
        attention = compose_attention.rescaled(gpu, model, tensor_parallel, gpus()["RTX-4090"])
    source = attention.pop("source")
    for array in (dense.values, sequences.values, attention.get("potential_values", np.empty(0))):
        array.flags.writeable = False
    return {
        "dense": dense.values,
        "dense_measured": dense.measured,
        "per_sequence": sequences.values,
        **attention,
        "sources": {
            "tokens": f"{dense.source}; linear beyond {dense.measured} tokens",
            "sequences": sequences.source,
            "attention": source,
        },
    }


def roofline(gpu: Gpu, model: Model, tensor_parallel: int, chosen: dict[str, float]) -> RooflineModel:
    """A prior from the data sheet. `chosen` as for `tables`, without skew."""
    flops, bandwidth = gpu.flops * GEMM_EFFICIENCY, gpu.bandwidth * ELEMENTWISE_EFFICIENCY
    head = model.vocab * model.hidden
    kernels = model.layers * (5 if model.qk_norm else 4)
    width = (model.heads + model.kv_heads) * model.head_dim * 2 * (2 if model.qk_norm else 1)
    moved = model.layers * 2 * (8 * model.hidden + (width + 3 * model.intermediate) / tensor_parallel)
    fixed = chosen["host_per_step"] + kernels * ELEMENTWISE_LAUNCH + SAMPLER_LAUNCH
    per_token = moved / bandwidth
    if tensor_parallel > 1:
        fixed += 2 * model.layers * ALL_REDUCE_LATENCY
        ring = 2 * (tensor_parallel - 1) / tensor_parallel
        per_token += 2 * model.layers * model.hidden * 2 * ring / (gpu.link_bandwidth * READ_EFFICIENCY)
    sampler = model.vocab * SAMPLER_BYTES_PER_LOGIT / bandwidth
    return RooflineModel(
        fixed=fixed,
        weight_read=2 * (model.linear_parameters + head) / tensor_parallel / (gpu.bandwidth * READ_EFFICIENCY),
        per_token=2 * model.linear_parameters / tensor_parallel / flops,
        per_logits_row=2 * head / tensor_parallel / flops,
        per_sequence=chosen["host_per_sequence"] + sampler,
        elementwise_per_token=per_token,
        per_pair=4 * model.layers * model.heads * model.head_dim / tensor_parallel / (gpu.flops * ATTENTION_EFFICIENCY),
        per_kv_token=model.kv_bytes_per_token / tensor_parallel / (gpu.bandwidth * DECODE_EFFICIENCY),
        interference=chosen["interference"],
        sources={
            "label": "prior",
            "latency": "data sheet dimensions with the median efficiencies of measured GPUs",
            "mixed batches": f"assumed: decode attention times {chosen['interference']:g}",
        },
    )
