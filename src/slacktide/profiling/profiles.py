"""GPU profiles `[Nx-]gpu/model`: step times (truth), KV capacity, engine defaults and what each number rests on.

`list_profiles()` is cheap; `load_profile(name)` composes the tables. A name may carry options,
`2x-rtx-3090/llama-3-8b?interconnect=pcie`, and a path to a JSON file loads a user's own profile (`profile_file`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from slacktide.core.latency import LatencyModel
from slacktide.errors import InputError, unknown_name
from slacktide.profiling.capacity import KvCapacity, engine_defaults, kv_capacity
from slacktide.profiling.compose import AIC_GPUS, INTERCONNECTS
from slacktide.profiling.compose_attention import MEASURED_PAIRS
from slacktide.profiling.kernel_tables import Gpu, Model, gpus, models
from slacktide.profiling.region import Region

GPU_NAMES = {
    "rtx-pro-6000": "RTX-PRO-6000", "rtx-4090": "RTX-4090", "rtx-3090": "RTX-3090", "h200": "H200-SXM",
    "h100": "H100-SXM", "a100": "A100-SXM-80GB", "l40s": "L40S", "b200": "B200-SXM", "h100-pcie": "H100-PCIe",
    "a100-pcie": "A100-PCIe-80GB", "rtx-5090": "RTX-5090", "rtx-a6000": "RTX-A6000", "a40": "A40", "a30": "A30",
    "l4": "L4",
}  # fmt: skip
"""GPU part of a profile's name -> name in the data."""
NUM_GPUS = {"RTX-4090": (1,), "RTX-3090": (1, 2)}
"""Tensor-parallel sizes whose layers were measured; other GPUs have 1, 2 and 4 (all-reduce tables, GEMM shapes)."""
DEFAULT_INTERFERENCE = 1.6
"""Factor on the decode attention of mixed batches where the mixed kernel was not measured.

(T_mixed - T_prefill) / T_decode of the measured mixed kernel, 4 query heads per KV head, 16 to 128 decodes at contexts
256 to 4096 beside chunks of at least 128 tokens: median 1.58 on the RTX PRO 6000 (quartiles 1.38, 1.88; 1.52 with half
the heads) and 2.14 on the RTX 4090; 2.8 with 8 query heads per KV head. The server GPU's value is taken.
"""
DEFAULT_HOST_OVERHEAD = 1.0e-3
"""Seconds per step outside the GPU's kernels: with it, a replay of a real vLLM 0.19 run on the RTX PRO 6000 (300
requests, up to 128 sequences) meets its mean TPOT within 0.3 %, its mean TTFT within 1.3 %, its length within 0.1 %."""
DEFAULT_HOST_PER_SEQUENCE = 0.0
"""Seconds per sequence and step. The same run leaves no room for one (its TPOT is met, slightly exceeded, without).
Published eager-mode calibrations up to 1024 decodes exceed the composed kernels by 6 to 17 us per sequence: set
`host_per_sequence` for such engines."""


MAX_FACTOR = 1000.0
"""Of a factor, and seconds of a host's share: no engine is as slow, and sums stay far from infinity."""

REPLAYED = {
    "rtx-pro-6000/llama-3-8b": "replay of a vLLM 0.19 run: mean and p99 of TTFT and TPOT within 3 %",
    "rtx-4090/llama-3-8b": "replay of a vLLM 0.19 run out of KV memory: mean TTFT and TPOT within 10 %",
}
"""Packaged profiles that were held against a real run (benchmarks/fidelity; tests hold these bars)."""


@dataclass(frozen=True, eq=False)
class Profile:
    """What a simulation needs to know of an engine. Times in seconds, sizes in bytes."""

    name: str
    gpu: str
    model: str
    tensor_parallel: int
    latency: LatencyModel
    """The truth: what steps really take."""
    num_blocks: int
    """Usable KV blocks: vLLM's num_gpu_blocks - 1, as it keeps one for itself."""
    block_size: int
    kv_bytes_per_token: int
    """All layers, all GPUs; 0 where unknown (a user's file)."""
    weight_bytes: float
    max_num_batched_tokens: int
    """vLLM's default for this GPU unless given."""
    max_num_seqs: int
    label: str
    """composed, estimate or prior; measured or fitted for a user's file that says so."""
    sources: Mapping[str, str]
    frontend: float = 0.0
    """Seconds between client and engine, both ways together: in a request's TTFT, in no step."""
    pipeline_depth: int = 1
    """2 for an engine that was measured with async scheduling."""
    max_model_len: int | None = None
    """Longest prompt and output together, tokens; None: not told."""
    enable_prefix_caching: bool | None = None
    """None: not told, which means vLLM's default (on)."""
    region: Region | None = None
    """Where the step times were measured; None: not known."""
    errors: str = ""
    """Cross-validated errors of the step times, in words."""
    validation: str = ""
    """How far simulated figures were from measured ones, in words; empty: nobody compared them."""


@dataclass(frozen=True)
class ProfileInfo:
    """A line of `slacktide profiles`."""

    name: str
    label: str
    sources: str


def list_profiles() -> list[ProfileInfo]:
    """Every packaged profile that fits into its GPUs' memory, best founded first. Composes nothing.

    Of priors only the smallest number of GPUs is listed; 2x- and 4x- load as well.
    """
    found = []
    for gpu_name, key in GPU_NAMES.items():
        gpu = gpus()[key]
        for model_name, model in models().items():
            for n in NUM_GPUS.get(key, (1, 2, 4)):
                if _divides(model, n) and _capacity(gpu, model, n).bytes_for_kv > 0:
                    name = f"{gpu_name}/{model_name}" if n == 1 else f"{n}x-{gpu_name}/{model_name}"
                    label, text = _basis(gpu, model, n)
                    found.append(ProfileInfo(name, label, text))
                    if label == "prior":
                        break
    rank = {"composed": 0, "estimate": 1, "prior": 2}
    return sorted(found, key=lambda info: rank[info.label])


def _divides(model: Model, n: int) -> bool:
    return model.heads % n == 0 and model.kv_heads % n == 0


def _capacity(gpu: Gpu, model: Model, n: int) -> KvCapacity:
    tokens, seqs = engine_defaults(gpu)
    return kv_capacity(gpu, model, n, max_num_batched_tokens=tokens, max_num_seqs=seqs, gpu_memory_utilization=0.9)


def _mixed_measured(gpu: Gpu, model: Model, n: int) -> bool:
    return (gpu.name, model.heads // n, model.kv_heads // n) in MEASURED_PAIRS


def _basis(gpu: Gpu, model: Model, n: int) -> tuple[str, str]:
    """Label and one line on what a profile rests on."""
    if _mixed_measured(gpu, model, n) and (gpu.name in AIC_GPUS or model.name == "Llama-3-8B"):
        return "composed", "measured kernels, mixed attention measured"
    if gpu.name in AIC_GPUS:
        return "composed", f"measured kernels, interference of mixed attention assumed ({DEFAULT_INTERFERENCE:g})"
    if gpu.name in ("RTX-3090", "RTX-4090"):
        where = " and attention" if gpu.name == "RTX-3090" or model.kv_heads // n != 8 else ""
        return "estimate", f"kernels of a near shape or GPU, GEMM{where} rescaled"
    return "prior", "roofline: dimensions and the efficiencies of measured GPUs"


def parse_name(name: str) -> tuple[str, str, int, dict[str, str]]:
    """(gpu, model, number of GPUs, options) of `[Nx-]gpu/model[?key=value&...]`. Raises InputError."""
    base, _, query = name.strip().lower().partition("?")
    options = {}
    for item in filter(None, query.split("&")):
        key, equals, value = item.partition("=")
        if key not in ("interconnect", "interference", "skew") or not equals:
            raise InputError(f"profile {name!r}: option {item!r}: expected interconnect=, interference= or skew=")
        if key in options:
            raise InputError(f"profile {name!r}: option {key} is given twice")
        options[key] = value
    gpu, slash, model = base.partition("/")
    count, x, rest = gpu.partition("x-")
    n = 1
    if x and count.isdecimal():
        n, gpu = int(count), rest
    if not slash or model not in models() or gpu not in GPU_NAMES or n not in NUM_GPUS.get(GPU_NAMES[gpu], (1, 2, 4)):
        raise unknown_name("profile", base, [i.name for i in list_profiles()], "('slacktide profiles' lists them)")
    return gpu, model, n, options


def load_profile(
    name: str,
    *,
    interference: float | None = None,
    interconnect: str | None = None,
    skew: float | None = None,
    host_overhead: float | None = None,
    host_per_sequence: float | None = None,
    gpu_memory_utilization: float = 0.9,
    num_gpu_blocks_override: int | None = None,
    block_size: int | None = None,
    max_num_batched_tokens: int | None = None,
    max_num_seqs: int | None = None,
) -> Profile:
    """Compose a packaged profile, or read a user's JSON file when `name` ends in .json.

    `interference` scales the decode attention of mixed batches where no mixed kernel was measured; `interconnect`
    (nvlink, the default, pcie, pcie-host) chooses the all-reduce of 2x RTX 3090, where none was measured; `skew` is the
    share of max - mean added to the mean decode context (default 0, which replays the real RTX PRO 6000 run best: mean
    TPOT +0.3 %, against +2.2 % at 0.02 and +5.0 % at 0.05, the medians of measured skewed pure and mixed batches);
    `host_overhead` and `host_per_sequence` in seconds. The rest has vLLM's names and meaning. Raises InputError for an
    unknown name, an option that does not apply, and a model that does not fit.
    """
    blocks = {"num_gpu_blocks_override": num_gpu_blocks_override, "block_size": block_size}
    engine = {"max_num_batched_tokens": max_num_batched_tokens, "max_num_seqs": max_num_seqs}
    _check_counts(name, {**blocks, **engine})
    if name.lower().endswith(".json"):
        from slacktide.profiling.profile_file import read_profile

        modelled = {
            "interference": interference,
            "interconnect": interconnect,
            "skew": skew,
            "host_overhead": host_overhead,
            "host_per_sequence": host_per_sequence,
            "gpu_memory_utilization": None if gpu_memory_utilization == 0.9 else gpu_memory_utilization,
        }
        for key, value in modelled.items():
            _applies(name, key, value, False, "a profile file has its own numbers")
        return override(read_profile(name), **blocks, **engine)
    gpu_key, model_key, n, options = parse_name(name)
    gpu, model = gpus()[GPU_NAMES[gpu_key]], models()[model_key]
    if not _divides(model, n):
        raise InputError(f"profile {name!r}: {model.heads} heads, {model.kv_heads} KV heads do not divide by {n} GPUs")
    label, text = _basis(gpu, model, n)
    chosen = {
        "interference": _number(name, "interference", options, interference, DEFAULT_INTERFERENCE),
        "skew": _number(name, "skew", options, skew, 0.0),
        "host_per_step": _number(name, "host_overhead", {}, host_overhead, DEFAULT_HOST_OVERHEAD),
        "host_per_sequence": _number(name, "host_per_sequence", {}, host_per_sequence, DEFAULT_HOST_PER_SEQUENCE),
    }
    factor = interference if interference is not None else options.get("interference")
    assumed = label == "prior" or (gpu.name in AIC_GPUS and not _mixed_measured(gpu, model, n))
    _applies(name, "interference", factor, assumed, "its mixed attention rests on measurements")
    _applies(name, "skew", skew if skew is not None else options.get("skew"), label != "prior", "a roofline has none")
    wire = _interconnect(name, gpu, n, interconnect or options.get("interconnect"))
    tokens, seqs = engine_defaults(gpu)
    tokens, seqs = max_num_batched_tokens or tokens, max_num_seqs or seqs
    capacity = kv_capacity(
        gpu,
        model,
        n,
        max_num_batched_tokens=tokens,
        max_num_seqs=seqs,
        gpu_memory_utilization=gpu_memory_utilization,
    )
    size = block_size or 16
    num_gpu_blocks = num_gpu_blocks_override or capacity.num_gpu_blocks(size)
    if num_gpu_blocks < 2:
        raise InputError(f"profile {name!r}: {capacity.explain()}; use more GPUs or a larger gpu_memory_utilization")
    latency = _latency(gpu, model, n, label, wire, chosen)
    source = capacity.explain() if num_gpu_blocks_override is None else "num_gpu_blocks_override"
    return Profile(
        name=name.strip().lower(),
        gpu=gpu.name,
        model=model.name,
        tensor_parallel=n,
        latency=latency,
        num_blocks=num_gpu_blocks - 1,
        block_size=size,
        kv_bytes_per_token=model.kv_bytes_per_token,
        weight_bytes=model.weight_bytes,
        max_num_batched_tokens=tokens,
        max_num_seqs=seqs,
        label=label,
        sources={**latency.sources, "basis": text, "KV capacity": source},
        validation=REPLAYED.get(name.strip().lower(), ""),
    )


def _check_counts(name: str, given: Mapping[str, int | None]) -> None:
    for key, value in given.items():
        least = 2 if key == "num_gpu_blocks_override" else 1  # vLLM keeps one block for itself
        if value is not None and value < least:
            raise InputError(f"profile {name!r}: {key}={value}: expected at least {least}")


def _number(name: str, key: str, options: Mapping[str, str], given: float | None, default: float) -> float:
    """A keyword wins over the name's option. Raises InputError unless within 0 (interference: 1) and 1000."""
    value: Any = given if given is not None else options.get(key, default)
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    least = 1.0 if key == "interference" else 0.0
    if not least <= number <= MAX_FACTOR:
        raise InputError(f"profile {name!r}: {key}={value}: expected a number of at least {least:g}, at most 1000")
    return number


def _applies(name: str, key: str, value: object, condition: bool, why: str) -> None:
    """Raise InputError for an option that would change nothing."""
    if value is not None and not condition:
        raise InputError(f"profile {name!r}: {key}={value} does not apply: {why}; leave it out")


def _interconnect(name: str, gpu: Gpu, n: int, chosen: str | None) -> str | None:
    """The all-reduce to use; None = the GPU's own measured table."""
    if chosen is not None and chosen not in INTERCONNECTS:
        raise unknown_name("interconnect", chosen, INTERCONNECTS)
    if chosen is not None and (n == 1 or gpu.name != "RTX-3090"):
        raise InputError(f"profile {name!r}: interconnect={chosen} applies to 2x-rtx-3090 only")
    if gpu.name == "RTX-3090" and n > 1:
        return chosen or "nvlink"
    return None


def _latency(gpu: Gpu, model: Model, n: int, label: str, wire: str | None, chosen: dict[str, float]) -> LatencyModel:
    from slacktide.profiling import compose_model

    if label == "prior":
        return compose_model.roofline(gpu, model, n, chosen)
    return compose_model.tables(gpu, model, n, label, wire, chosen)


def default_belief(profile: Profile, *, seed: int = 0, features: str = "extended") -> LatencyModel:
    """The predictor a policy starts from: a fit to steps sampled from the profile's truth.

    `features`: `extended`, or `paper` for SlidingServe's plain seven. Labelled fitted; its error per scene is in
    `sources`. Same seed, same model. Raises InputError for other features.
    """
    from slacktide.profiling.belief import fit_belief

    return fit_belief(profile, seed, features)


def override(profile: Profile, **given: int | None) -> Profile:
    """The profile with engine settings replaced where given; num_gpu_blocks_override counts vLLM's own block."""
    changes: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
    blocks = changes.pop("num_gpu_blocks_override", None)
    if "block_size" in changes and blocks is None:  # the same memory, cut otherwise
        changes["num_blocks"] = (profile.num_blocks + 1) * profile.block_size // changes["block_size"] - 1
    if blocks is not None:
        changes["num_blocks"] = blocks - 1
    return replace(profile, **changes)
