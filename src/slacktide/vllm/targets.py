"""Targets of requests: the run's defaults, the classes', and what a request brings along. Validated, never trusted.

A request carries them in `sampling_params.extra_args` (`vllm_xargs` in the HTTP API): `slo_ttft_ms`, `slo_tbt_ms` (or
`slo_tpot_ms`), `slo_e2el_ms`, `slo_class`, `tenant`. A bad value is replaced by the default and counted: a scheduler
has no way to answer 400; the front-end middleware does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slacktide.core.types import MAX_SLO_SECONDS, SLO
from slacktide.errors import InputError
from slacktide.workload.slos import SLOs, SLOSpec, parse_slos

EXTRA_ARGS = {"slo_ttft_ms": "ttft", "slo_tbt_ms": "tbt", "slo_tpot_ms": "tbt", "slo_e2el_ms": "e2e"}

MIN_SLO_SECONDS = 1e-3
"""A shorter target is clamped to this: nothing meets it, but a sort key of 0 or less would overtake everybody."""

MAX_LABELS = 256
"""Classes, and tenants, told apart; later ones share one code, so that clients cannot grow metrics without end."""

MAX_LABEL_LENGTH = 64
OTHER = "other"


def read_slos(text: str, where: str) -> SLOs:
    """`slo` as on our command line: presets, classes, units, `ttft:5x`. Raises InputError that begins with `where`."""
    try:
        return parse_slos(text)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def spelt(spec: SLOSpec) -> str:
    """A target in numbers, as `read_slos` reads it: `ttft:5x,tbt:50`; empty without any."""
    numbers = {"ttft": spec.ttft, "tbt": spec.tbt, "e2el": spec.e2e}
    words = {name: f"{value * 1e3:.10g}" for name, value in numbers.items() if not math.isinf(value)}
    if spec.ttft_factor > 0:
        words = {"ttft": f"{spec.ttft_factor:.10g}x"} | words
    return ",".join(f"{name}:{word}" for name, word in words.items())


def absolute(spec: SLOSpec) -> SLO:
    """The part of a target that is known before a request is: a relative TTFT counts as none."""
    return SLO(spec.ttft, spec.tbt, spec.e2e)


@dataclass(slots=True)
class Labels:
    """Texts (classes or tenants) -> small codes, in order of appearance; at most MAX_LABELS of them."""

    names: list[str] = field(default_factory=lambda: [""])
    _codes: dict[str, int] = field(default_factory=lambda: {"": 0})

    def code(self, text: str) -> int:
        """The text's code; a new one when it was never seen and there is room, else that of `other`."""
        known = self._codes.get(text)
        if known is not None:
            return known
        if len(self.names) >= MAX_LABELS - 1 and text != OTHER:
            return self.code(OTHER)
        self._codes[text] = len(self.names)
        self.names.append(text)
        return self._codes[text]


@dataclass(slots=True)
class Targets:
    """Turns what a request says into an SLO, a class and a tenant; counts what had to be mended."""

    default: SLO = field(default_factory=SLO)
    by_class: Mapping[str, SLO] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)
    """Class ("" is the default) -> TTFT as a multiple of the prompt's isolated prefill time; see `with_ttft`."""
    classes: Labels = field(default_factory=Labels)
    tenants: Labels = field(default_factory=Labels)
    invalid: int = 0
    """Values that were no targets at all: the default stood in."""
    clamped: int = 0
    """Values outside MIN_SLO_SECONDS..MAX_SLO_SECONDS, moved to the nearer end."""

    def of(self, extra_args: Mapping[str, Any] | None) -> tuple[SLO, int, int]:
        """(SLO, class code, tenant code) of a request."""
        if not extra_args:
            return self.default, 0, 0
        slo_class = self._label(extra_args.get("slo_class"))
        tenant = self._label(extra_args.get("tenant"))
        base = self.by_class.get(slo_class, self.default)
        own: dict[str, float] = {}
        for key, name in EXTRA_ARGS.items():
            if key in extra_args:
                seconds = self._clamp(extra_args[key])
                if seconds is not None:
                    own.setdefault(name, seconds)
        if own:
            base = SLO(own.get("ttft", base.ttft), own.get("tbt", base.tbt), own.get("e2e", base.e2e))
        return base, self.classes.code(slo_class), self.tenants.code(tenant)

    def with_ttft(self, extra_args: Mapping[str, Any] | None, alone: Callable[[], float]) -> Mapping[str, Any] | None:
        """What a request says, with a relative TTFT written out as `slo_ttft_ms`; the same object when it has none.

        `alone()` gives the seconds its prompt takes alone. Once written the target stays, whatever is learned later.
        """
        given = extra_args or {}
        label = given.get("slo_class")
        name = str(label) if isinstance(label, (str, int)) else ""
        factor = self.factors.get(name if name in self.by_class else "", 0.0)
        if not factor:
            return extra_args
        if "slo_ttft_ms" in given:
            if self._clamp(given["slo_ttft_ms"], counted=False) is not None:
                return extra_args
            self.invalid += 1
        seconds = min(max(factor * alone(), MIN_SLO_SECONDS), MAX_SLO_SECONDS)
        return {**given, "slo_ttft_ms": seconds * 1e3}

    def _label(self, value: Any) -> str:
        if value is None:
            return ""
        text = str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else ""
        if not text or not text.isprintable() or len(text) > MAX_LABEL_LENGTH:
            self.invalid += 1
            return ""
        return text

    def _clamp(self, value: Any, *, counted: bool = True) -> float | None:
        """Milliseconds -> seconds within bounds; None for what is no number. `counted`: in `invalid`, `clamped`."""
        try:
            seconds = math.nan if isinstance(value, bool) else float(value) / 1e3
        except (TypeError, ValueError, OverflowError):
            seconds = math.nan
        if math.isnan(seconds):
            self.invalid += counted
            return None
        if not MIN_SLO_SECONDS <= seconds <= MAX_SLO_SECONDS:
            self.clamped += counted
            return min(max(seconds, MIN_SLO_SECONDS), MAX_SLO_SECONDS)
        return seconds
