"""Slacktide from Python: simulate, compare and search, with results that show themselves in a notebook.

```python
import slacktide

result = slacktide.compare(
    ["vllm-v1", "sarathi-edf"], trace="azure-conv", profile="h100/llama-3-8b", slo="ttft:1000,tbt:50",
    rate=20, num_prompts=300,
)
print(result)
```

Every name here is also one of `slacktide` itself. Words, units and defaults are those of the command line: SLOs are
texts in milliseconds, rates are requests per second, engine settings have vLLM's names. What a user can mend raises
`InputError`, whose message is one line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

from slacktide.api.shown import Advice, Comparison, Goodput, Run, Sweep
from slacktide.core.spec import PolicySpec
from slacktide.errors import InputError, unknown_name
from slacktide.profiling.profiles import Profile, ProfileInfo, load_profile
from slacktide.search.scenario import Scenario
from slacktide.workload.packaged import PackagedTrace
from slacktide.workload.slos import SLOPreset, list_slo_presets
from slacktide.workload.traces import Trace, list_traces, read_trace

__all__ = [
    "Advice", "Comparison", "Goodput", "Load", "Profile", "Run", "Scenario", "Sweep", "Trace", "advise", "bound",
    "cite", "compare", "goodput", "load_profile", "policies", "profiles", "read_trace", "results", "simulate",
    "slo_presets", "sweep", "traces",
]  # fmt: skip

Policies = str | type | Sequence[str | type]
"""Policies as `--policy` takes them (`"vllm-v1,sliding:window=3"`), classes of your own, or a list of both."""


class Load(TypedDict, total=False):
    """What `compare`, `simulate`, `goodput`, `sweep` and `advise` take by name beside trace, profile and SLO."""

    rate: float
    """Requests per second; a trace's own times are rescaled to it. Not for `goodput`, which searches it."""
    arrival: str
    """trace, poisson, gamma, onoff, ramp or closed, with parameters: `onoff:on=10,off=20,ratio=4`."""
    burstiness: float
    """Gamma arrivals of this shape; 1 = Poisson, below 1 = burstier."""
    num_prompts: int
    """How many requests; default: the trace's."""
    max_concurrency: int
    """Most requests in the system at once."""
    max_tokens: int | str
    """Output limit that requests declare; `exact`: their true length."""
    seed: int
    """Of everything random."""
    slo_mode: str
    """`deadline` or `gap`: see the page on metrics."""
    late_tolerance: float
    """Share of a request's tokens that may be late."""
    oversized: str
    """`error`, `drop` or `reject`: requests that the engine can never hold."""
    interference: float
    """Factor on the decode attention of mixed steps, where a profile has no measured one."""
    interconnect: str
    """Link between GPUs, where a profile knows several: nvlink, pcie, pcie-host."""
    read: str
    """How a trace file is read, as `--read`."""
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    block_size: int
    num_gpu_blocks_override: int
    gpu_memory_utilization: float
    enable_prefix_caching: bool
    watermark: float
    long_prefill_token_threshold: int
    pipeline_depth: int


def simulate(
    policy: str | type, *, trace: str | Path, profile: str | Path, slo: str | None = None, **load: Unpack[Load]
) -> Run:
    """Simulate one policy and return what the users would have seen. Raises InputError."""
    specs = _specs(policy)
    if len(specs) != 1:
        raise InputError(
            f"{len(specs)} policies ({', '.join(s.label for s in specs)}): expected one; compare takes more"
        )
    return _compare(specs, _scenario(trace, profile, slo, load)).runs[0]


def compare(
    policies: Policies, *, trace: str | Path, profile: str | Path, slo: str | None = None, **load: Unpack[Load]
) -> Comparison:
    """Simulate several policies on the same requests. Raises InputError.

    The result prints as a table; in a notebook it shows a table and a figure by itself.
    """
    return _compare(_specs(policies), _scenario(trace, profile, slo, load))


def goodput(
    policies: Policies,
    *,
    trace: str | Path,
    profile: str | Path,
    slo: str,
    target: float = 0.99,
    seeds: int = 3,
    resolution: float = 0.02,
    jobs: int = 1,
    **load: Unpack[Load],
) -> Goodput:
    """The highest rate at which each policy meets the SLO of `target` (a share) of all arrivals. Raises InputError.

    The rate is bisected per policy and seed until its bracket is narrower than `resolution` (relative). `jobs`:
    processes; with more than one, policies must be importable (a class typed into a notebook is not).
    """
    from slacktide.search.goodput import find_goodput

    specs, scenario = _specs(policies), _scenario(trace, profile, slo, load)
    return Goodput(find_goodput(scenario, specs, target=target, seeds=seeds, resolution=resolution, jobs=jobs))


def sweep(
    policies: Policies,
    vary: Mapping[str, Sequence[Any]],
    *,
    trace: str | Path,
    profile: str | Path,
    slo: str | None = None,
    jobs: int = 1,
    **load: Unpack[Load],
) -> Sweep:
    """Simulate every combination of the varied settings and the policies. Raises InputError.

    `vary`: values by name, e.g. `{"rate": [10, 20], "sarathi.chunk_size": [256, 512]}`; names as for `--vary`.
    """
    from slacktide.cli.vary import parse_vary
    from slacktide.search.sweep import grid, run_grid

    specs, scenario = _specs(policies), _scenario(trace, profile, slo, load)
    texts = [f"{name}={'|'.join(_text(value) for value in values)}" for name, values in vary.items()]
    return Sweep(run_grid(grid(scenario, specs, parse_vary(texts, specs)), jobs=jobs))


def bound(
    *, trace: str | Path, profile: str | Path, slo: str, target: float = 0.99, **load: Unpack[Load]
) -> dict[str, Any]:
    """Rates that no scheduler can pass at this SLO, as in bound.json: `bound` for this trace, `sustained` for ever.

    None: not limited by the rate. Raises InputError.
    """
    from slacktide.search.bounds import bound_of_scenario

    return bound_of_scenario(_scenario(trace, profile, slo, load), target=target)


def advise(*, trace: str | Path, profile: str | Path, slo: str | None = None, **load: Unpack[Load]) -> Advice:
    """Exclusive or mixed batching for this GPU, model and load, with the figures behind it. Raises InputError."""
    from slacktide.search.advise import advise as advice

    return Advice(advice(_scenario(trace, profile, slo, load)))


def results(path: str | Path) -> Comparison:
    """Results that `--out` or `vllm bench serve --save-detailed` wrote: a file or a directory. Raises InputError."""
    from slacktide.report.load import load_runs

    return Comparison([Run(record, log) for record, log in load_runs(path)])


def policies() -> list[dict[str, Any]]:
    """The policies of this package: name, summary, description, parameters."""
    from slacktide.cli.policies import describe
    from slacktide.core.policy import names

    return [describe(name) for name in names()]


def profiles() -> list[ProfileInfo]:
    """The packaged profiles of GPUs and models, best founded first."""
    from slacktide.profiling.profiles import list_profiles

    return list_profiles()


def traces() -> list[PackagedTrace]:
    """The packaged traces."""
    return list(list_traces())


def slo_presets() -> list[SLOPreset]:
    """The named SLOs, with where they come from."""
    return list(list_slo_presets())


def cite(*names: str) -> list[dict[str, str]]:
    """The sources behind policies, profiles and traces: `of`, `text`, `url` and a paper's `key`. Raises InputError."""
    from slacktide.cli.cite import sources_of

    return [dataclasses.asdict(source) for source in sources_of(list(names))]


def _compare(specs: list[PolicySpec], scenario: Scenario) -> Comparison:
    from slacktide.search.scenario import prepare, run_policy

    setups = [prepare(scenario, spec.engine) for spec in specs]  # all input errors before the first run
    return Comparison([Run(*run_policy(setup, spec)) for setup, spec in zip(setups, specs, strict=True)])


def _scenario(trace: str | Path, profile: str | Path, slo: str | None, load: Load) -> Scenario:
    """Values are read by the command line's readers, so that both refuse the same. Raises InputError."""
    from slacktide.cli.options import ENGINE_FLAGS
    from slacktide.cli.vary import LOAD

    given = {name: value for name, value in load.items() if value is not None}
    fields: dict[str, Any] = {}
    engine: dict[str, Any] = {}
    for name, value in given.items():
        if name in ENGINE_FLAGS:
            engine[name] = _read(name, value, ENGINE_FLAGS[name].read)
        elif name == "read":
            fields[name] = str(value)
        elif name in LOAD and name not in ("slo", "trace", "profile"):
            fields[name] = _read(name, value, LOAD[name])
        else:
            raise unknown_name("setting", name, Load.__annotations__)
    return Scenario(trace=str(trace), profile=str(profile), slo=slo, engine=engine, **fields)


def _read(name: str, value: Any, reader: Any) -> Any:
    try:
        return reader(_text(value))
    except (ValueError, TypeError) as error:
        raise InputError(f"{name}={value!r}: {error}") from error


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _specs(given: Policies) -> list[PolicySpec]:
    """The policies asked for, with labels that are all different. Raises InputError."""
    from slacktide.cli.options import ENGINE_FLAGS
    from slacktide.core.spec import parse_policies

    items: Sequence[Any] = list(given) if isinstance(given, (list, tuple)) else [given]
    readers = {name: flag.read for name, flag in ENGINE_FLAGS.items()}
    specs: list[PolicySpec] = []
    for item in items:
        if isinstance(item, str):
            specs += parse_policies([item], readers)
        elif isinstance(item, type) and (hasattr(item, "plan") or hasattr(item, "score")):
            name = str(getattr(item, "name", item.__name__))
            spec = PolicySpec(name=name, cls=item, parameters={}, engine={}, label=name)
            spec.build()
            specs.append(spec)
        else:
            raise InputError(f"policy {item!r}: expected a name, or a class with a method `plan` or `score`")
    if not specs:
        raise InputError("no policy named: expected for example 'vllm-v1' (slacktide.policies() lists them)")
    seen: dict[str, int] = {}
    unique = []
    for spec in specs:
        seen[spec.label] = seen.get(spec.label, 0) + 1
        repeat = seen[spec.label]
        unique.append(dataclasses.replace(spec, label=f"{spec.label}#{repeat}") if repeat > 1 else spec)
    return unique
