"""SLO syntax and presets: `ttft:500,tbt:50,e2el:5000` in milliseconds, per class if wished.

Grammar: items `key:value`, separated by commas or spaces; `;` separates classes, `CLASS=` names one. An item without
`:` is a preset, whose targets later items replace. `ttft:5x` is five times the prompt's isolated prefill time
(SlidingServe's length-proportional target), which the caller must be able to tell.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from slacktide.core.types import MAX_SLO_SECONDS, FloatArray, IntArray
from slacktide.errors import InputError, unknown_name
from slacktide.workload.specs import parse_number

_KEYS = {
    "ttft": "ttft", "tbt": "tbt", "e2el": "e2e",
    "tpot": "tbt", "itl": "tbt", "e2e": "e2e",
    "time_to_first_token": "ttft", "inter_token_latency": "tbt", "request_latency": "e2e",
}  # fmt: skip
"""Accepted names -> field. The first three are ours; tpot, itl are vLLM's words for tbt; the long ones are AIPerf's."""

_UNITS = {"": 1e-3, "ms": 1e-3, "s": 1.0}
"""Seconds per unit; a bare number is in milliseconds, as in `vllm bench serve --goodput`."""

MAX_TTFT_FACTOR = 1e6
"""Largest factor of the isolated prefill time taken as meant; published ones are 5 and 10."""

IsolatedPrefill = Callable[[int], float]
"""Prompt tokens -> seconds its prefill takes alone on the engine."""


@dataclass(frozen=True, slots=True)
class SLOSpec:
    """One target, in seconds; infinity = none. `ttft_factor` > 0: TTFT is that many isolated prefill times."""

    ttft: float = math.inf
    tbt: float = math.inf
    e2e: float = math.inf
    ttft_factor: float = 0.0


@dataclass(frozen=True, slots=True)
class SLOs:
    """Targets of a run: `default` for classes not named (None = no target), `by_class` for the others."""

    default: SLOSpec | None = None
    by_class: dict[str, SLOSpec] = field(default_factory=dict)

    @property
    def needs_prefill_time(self) -> bool:
        """True when some TTFT is given as a factor of the isolated prefill time."""
        specs = [*self.by_class.values(), *([self.default] if self.default else [])]
        return any(spec.ttft_factor > 0 for spec in specs)


@dataclass(frozen=True, slots=True)
class SLOPreset:
    """A named SLO with where it comes from."""

    name: str
    slo: str
    source: str


_SLIDING = "SlidingServe, https://arxiv.org/abs/2606.05933, section on setup"
_QOSERVE = "QoServe (Niyama), artifact branch niyama_asplos2026 of Sarathi-Serve: thirds of 6 s/50 ms, 600 s, 1800 s"
_GUIDELLM = "https://github.com/vllm-project/guidellm/blob/main/docs/guides/service_level_objectives.md"
_CATALOGUE = "https://github.com/kubernetes-sigs/inference-perf workload-catalog (p99 targets, read at 12e8974)"

_PRESETS = (
    SLOPreset("dialogue", "ttft:5x,tbt:40", _SLIDING),
    SLOPreset("summarisation", "ttft:10x,tbt:80", _SLIDING),
    SLOPreset("summarization", "ttft:10x,tbt:80", _SLIDING),
    SLOPreset("qoserve", "ttft:6000,tbt:50", _QOSERVE),
    SLOPreset("qoserve-q2", "e2el:600000", _QOSERVE),
    SLOPreset("qoserve-q3", "e2el:1800000", _QOSERVE),
    SLOPreset("chat", "ttft:200,tbt:50", _GUIDELLM),
    SLOPreset("rag", "ttft:300,tbt:100,e2el:3000", _GUIDELLM),
    SLOPreset("code", "ttft:500,tbt:150", _GUIDELLM),
    SLOPreset("agent", "e2el:5000", _GUIDELLM),
    SLOPreset("interactive-chat", "ttft:500,tbt:50", _CATALOGUE),
    SLOPreset("code-generation", "ttft:30000,tbt:100", _CATALOGUE),
    SLOPreset("batch-summarization-rag", "ttft:15000,tbt:100,e2el:430000", _CATALOGUE),
    SLOPreset("deep-research", "ttft:10000,tbt:100", _CATALOGUE),
    SLOPreset("reasoning", "ttft:2000,tbt:100", _CATALOGUE),
)


def list_slo_presets() -> tuple[SLOPreset, ...]:
    """All presets, in the order of the documentation."""
    return _PRESETS


def parse_slo(text: str) -> SLOSpec:
    """One target such as `ttft:500,tbt:50` or `chat,e2el:3000`; InputError for anything unclear, with near names."""
    presets = {preset.name: preset.slo for preset in _PRESETS}
    tidy = re.sub(r"\s*:\s*", ":", text.strip())
    spec, given = SLOSpec(), set[str]()
    items = [item for item in re.split(r"[,\s]+", tidy) if item]
    if not items:
        raise InputError("SLO is empty: expected for example ttft:500,tbt:50 (milliseconds) or a preset name")
    for item in items:
        key, colon, value = item.partition(":")
        if not colon:
            if item not in presets:
                hint = "(targets are written key:milliseconds, as in ttft:500,tbt:50)"
                raise unknown_name("SLO preset", item, presets, hint)
            if spec != SLOSpec():
                raise InputError(f"SLO {text!r}: preset {item} must stand first and alone; it would replace the others")
            spec = parse_slo(presets[item])
            continue
        if key.lower() not in _KEYS:
            raise unknown_name("SLO target", key, _KEYS, "(values in milliseconds, as in ttft:500,tbt:50,e2el:5000)")
        name = _KEYS[key.lower()]
        if name in given:
            raise InputError(f"SLO {text!r}: {name} is given twice (tpot and itl are other words for tbt)")
        given.add(name)
        spec = _with_target(spec, name, key, value)
    return spec


def _with_target(spec: SLOSpec, name: str, key: str, value: str) -> SLOSpec:
    """`spec` with one target set from text such as `500`, `500ms`, `2s` or (TTFT only) `5x`."""
    match = re.fullmatch(r"([^a-zA-Z]*(?:[eE][+-]?[0-9]+)?)(ms|s|x|)", value)
    if match is None:
        raise InputError(f"SLO {key}:{value}: expected milliseconds (500), a unit (2s), or for ttft a factor (5x)")
    amount, unit = parse_number(match[1], f"SLO {key}:{value}"), match[2]
    if unit == "x":
        if name != "ttft":
            raise InputError(f"SLO {key}:{value}: only ttft can be a multiple of the isolated prefill time")
        if not 0 < amount <= MAX_TTFT_FACTOR:
            raise InputError(f"SLO {key}:{value}: expected a factor above 0 and at most {MAX_TTFT_FACTOR:g}")
        return replace(spec, ttft=math.inf, ttft_factor=amount)
    seconds = amount * _UNITS[unit]
    if not 0 < seconds <= MAX_SLO_SECONDS:
        most = MAX_SLO_SECONDS * 1e3
        raise InputError(f"SLO {key}:{value}: expected more than 0 and at most {most:g} ms; leave it out for no target")
    return replace(spec, ttft=seconds, ttft_factor=0.0) if name == "ttft" else replace(spec, **{name: seconds})


def parse_slos(text: str) -> SLOs:
    """Targets of a run: `ttft:500,tbt:50`, or per class `interactive=ttft:500,tbt:50;batch=e2el:600000`.

    At most one part without `CLASS=` is the default for the classes not named.
    """
    default: SLOSpec | None = None
    by_class: dict[str, SLOSpec] = {}
    for part in filter(None, (piece.strip() for piece in text.split(";"))):
        label, equals, targets = (piece.strip() for piece in part.partition("="))
        if not equals:
            if default is not None:
                raise InputError(f"SLO {text!r}: two parts without a class; write CLASS=ttft:500,... for all but one")
            default = parse_slo(part)
            continue
        if not label or ":" in label:
            raise InputError(f"SLO {part!r}: expected CLASS=ttft:500,... (':' between target and milliseconds)")
        if label in by_class:
            raise InputError(f"SLO {text!r}: class {label} is given twice")
        by_class[label] = parse_slo(targets)
    if default is None and not by_class:
        parse_slo("")
    return SLOs(default, by_class)


def slo_columns(
    slos: SLOs,
    num_prompt_tokens: IntArray,
    slo_class: IntArray,
    slo_classes: Sequence[str],
    isolated_prefill: IsolatedPrefill | None = None,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Per-request targets (ttft, tbt, e2e) in seconds, f8[n] each, from the classes of the requests.

    Raises InputError for a class no request has, or a factor without `isolated_prefill`.
    """
    for label in slos.by_class:
        if label not in slo_classes:
            raise unknown_name("SLO class", label, slo_classes, "(classes come from the trace's slo_class column)")
    n = len(num_prompt_tokens)
    columns = (np.full(n, np.inf), np.full(n, np.inf), np.full(n, np.inf))
    for code, label in enumerate(slo_classes):
        spec = slos.by_class.get(label, slos.default)
        rows = slo_class == code
        if spec is None or not rows.any():
            continue
        columns[0][rows] = spec.ttft
        columns[1][rows] = spec.tbt
        columns[2][rows] = spec.e2e
        if spec.ttft_factor > 0:
            columns[0][rows] = _proportional_ttft(spec.ttft_factor, num_prompt_tokens[rows], isolated_prefill)
    return columns


def _proportional_ttft(factor: float, tokens: IntArray, isolated_prefill: IsolatedPrefill | None) -> FloatArray:
    if isolated_prefill is None:
        raise InputError(f"SLO ttft:{factor:g}x needs the isolated prefill time of a profile: name one, or give ms")
    lengths, where = np.unique(tokens, return_inverse=True)
    targets = factor * np.array([float(isolated_prefill(int(length))) for length in lengths])
    bad = ~((targets > 0) & (targets <= MAX_SLO_SECONDS))
    if bad.any():
        length, target = int(lengths[bad][0]), float(targets[bad][0])
        raise InputError(
            f"SLO ttft:{factor:g}x: a prompt of {length} tokens would be due after {target:g} s,"
            f" expected more than 0 and at most {MAX_SLO_SECONDS:g} s"
        )
    return np.asarray(targets[where], dtype=np.float64)
