"""Replays real vLLM runs in the simulator and measures how far apart the two are.

Data: `data/` (see its README). Times in seconds; errors are (simulated / measured) - 1.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from slacktide.core.latency import LatencyModel
from slacktide.core.latency_tables import Grid, TablesModel
from slacktide.core.policies.vllm_v1 import VllmV1
from slacktide.core.types import FloatArray, IntArray
from slacktide.metrics.log import RunLog
from slacktide.profiling.profiles import DEFAULT_HOST_OVERHEAD, load_profile
from slacktide.sim.engine import EngineConfig, simulate
from slacktide.workload.requests import Workload

DATA = Path(__file__).parent / "data"
MAX_NUM_BATCHED_TOKENS = 2048
"""Both runs' setting."""
LARGEST_GRAPH = 256
"""Tokens of the largest CUDA graph: 512 on the RTX 4090, 256 where max_num_seqs is 128; it hardly matters above 256."""


@dataclass(frozen=True)
class Run:
    """A real run, and how it is replayed. Facts from the runs' own records (data/README.md)."""

    gpu: str
    profile: str
    max_num_seqs: int
    num_gpu_blocks: int | None
    """As vLLM reported it, its own null block included; None: from the GPU's memory."""
    bars: dict[str, float]
    """Metric -> largest error that the simulator promises."""


RUNS = {
    "rtx-pro-6000": Run(
        "RTX-PRO-6000", "rtx-pro-6000/llama-3-8b", 128, None,
        dict.fromkeys(("mean_ttft", "p99_ttft", "mean_tpot", "p99_tpot", "makespan"), 0.03),
    ),
    "rtx-4090": Run("RTX-4090", "rtx-4090/llama-3-8b", 256, 2588, {"mean_ttft": 0.10, "mean_tpot": 0.10}),
}  # fmt: skip


@dataclass(frozen=True)
class Requests:
    """What happened to each request; float64[n] seconds from the first arrival, tokens int64[n]."""

    arrival: FloatArray
    prompt: IntArray
    output: IntArray
    scheduled: FloatArray
    first: FloatArray
    last: FloatArray


@dataclass(frozen=True)
class Options:
    """One hypothesis about the real engine. The defaults are what its records say, and our one constant."""

    host_overhead: float = DEFAULT_HOST_OVERHEAD
    enable_prefix_caching: bool = True
    reserve_full_isl: bool = True
    pipeline_depth: int = 2
    """vLLM 0.19 schedules asynchronously by default."""
    extra_blocks: int = 0
    watermark: float = 0.0
    skew: float = 0.0
    host_per_sequence: float = 0.0
    interference: float | None = None
    """None: the measured mixed attention; a number: prefill + that factor times the decode attention alone."""
    graph_sizes: bool = False
    """Dense layers of small steps at the size of the CUDA graph that vLLM pads them to."""


def read_rows(name: str, gpu: str) -> list[dict[str, str]]:
    """Rows of a data file that belong to a GPU."""
    with (DATA / name).open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["gpu"] == gpu]


def measured(run: Run) -> Requests:
    """The real run."""
    rows = read_rows("requests.csv", run.gpu)

    def column(name: str) -> FloatArray:
        return np.array([float(row[name]) for row in rows])

    prompt, output = column("prompt_tokens").astype(np.int64), column("output_tokens").astype(np.int64)
    times = (column(name) for name in ("scheduled_s", "first_token_s", "last_token_s"))
    return Requests(column("arrival_s"), prompt, output, *times)


def graph_size(n: int) -> int:
    """Tokens that vLLM's CUDA graph for a step of n computes: 1, 2, 4, multiples of 8, from 256 on of 16."""
    if n <= 4:
        return 1 << (n - 1).bit_length()
    multiple = 8 if n <= 256 else 16
    return -(-n // multiple) * multiple


def latency(run: Run, options: Options) -> LatencyModel:
    """The truth model under a hypothesis."""
    profile = load_profile(
        run.profile,
        host_overhead=options.host_overhead,
        host_per_sequence=options.host_per_sequence,
        skew=options.skew,
    )
    model = profile.latency
    assert isinstance(model, TablesModel)
    if options.graph_sizes:
        dense = model.dense.copy()
        dense[1 : LARGEST_GRAPH + 1] = [model.dense[graph_size(n)] for n in range(1, LARGEST_GRAPH + 1)]
        model = replace(model, dense=dense)
    if options.interference is None:
        return model
    assert model.increment is not None
    nodes = model.increment.nodes
    alone = model.decode.interpolate([nodes[2][:, None], nodes[3][None, :]], (False, False))
    shape = tuple(len(axis) for axis in nodes)
    return replace(model, increment=Grid(nodes, np.broadcast_to(options.interference * alone, shape).copy()))


def num_usable_blocks(run: Run) -> int:
    """KV blocks that requests can hold: vLLM keeps one of num_gpu_blocks for itself."""
    return load_profile(run.profile, num_gpu_blocks_override=run.num_gpu_blocks).num_blocks


def replay(run: Run, real: Requests, options: Options | None = None) -> RunLog:
    """The simulator's account of the same requests. Deterministic: nothing is drawn."""
    options = options or Options()
    config = EngineConfig(
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        max_num_seqs=run.max_num_seqs,
        num_blocks=num_usable_blocks(run) + options.extra_blocks,
        watermark=options.watermark,
        enable_prefix_caching=options.enable_prefix_caching,
        pipeline_depth=options.pipeline_depth,
    )
    workload = Workload(real.arrival, real.prompt, real.output, max_tokens=real.output)
    policy = VllmV1(scheduler_reserve_full_isl=options.reserve_full_isl)
    return simulate(workload, policy, latency(run, options), config).log


def simulated(real: Requests, log: RunLog) -> Requests:
    """A replay in the form of the real run."""
    return replace(real, scheduled=log.first_scheduled_time, first=log.first_token_time, last=log.last_token_time)


def metrics(requests: Requests) -> dict[str, float]:
    """Seconds, and output tokens per second; TPOT over requests of two tokens or more."""
    ttft, more = requests.first - requests.arrival, requests.output > 1
    tpot = ((requests.last - requests.first) / np.maximum(requests.output - 1, 1))[more]
    e2el, queue = requests.last - requests.arrival, requests.scheduled - requests.arrival
    return {
        "mean_ttft": float(ttft.mean()),
        "median_ttft": float(np.median(ttft)),
        "p99_ttft": float(np.percentile(ttft, 99)),
        "mean_tpot": float(tpot.mean()),
        "median_tpot": float(np.median(tpot)),
        "p99_tpot": float(np.percentile(tpot, 99)),
        "mean_e2el": float(e2el.mean()),
        "p99_e2el": float(np.percentile(e2el, 99)),
        "mean_queue_time": float(queue.mean()),
        "makespan": float(requests.last.max()),
        "output_throughput": float(requests.output.sum() / requests.last.max()),
    }


def errors(real: Requests, log: RunLog) -> dict[str, float]:
    """Relative error of each metric."""
    truth, ours = metrics(real), metrics(simulated(real, log))
    return {name: ours[name] / truth[name] - 1 for name in truth}


def broken_bars(run: Run, error: dict[str, float]) -> list[str]:
    """One line for each promise that does not hold."""
    return [
        f"{run.gpu}: {name} is {error[name]:+.1%} off, promised within {bar:.0%}"
        for name, bar in run.bars.items()
        if not abs(error[name]) <= bar
    ]


def describe(log: RunLog) -> dict[str, Any]:
    """What only the simulator can tell."""
    return {
        "num_blocks": log.num_blocks,
        "min_free_blocks": int(log.num_free_blocks.min()),
        "num_steps": log.num_steps,
        "preemptions": int(log.num_preemptions.sum()),
        "recomputed_tokens": int(log.recomputed_tokens.sum()),
        "cached_tokens": int(log.cached_tokens.sum()),
        "scheduled_tokens": int(log.scheduled_tokens.sum()),
    }
