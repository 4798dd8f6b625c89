"""Targets of requests: the run's defaults, the classes', and what a request brings along. Validated, never trusted.

A request carries them in `sampling_params.extra_args` (`vllm_xargs` in the HTTP API): `slo_ttft_ms`, `slo_tbt_ms` (or
`slo_tpot_ms`), `slo_e2el_ms`, `slo_class`, `tenant`. A bad value is replaced by the default and counted: a scheduler
has no way to answer 400; the front-end middleware does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slacktide.core.types import MAX_SLO_SECONDS, SLO
from slacktide.errors import InputError, unknown_name

KEYS = {"ttft": "ttft", "tbt": "tbt", "tpot": "tbt", "itl": "tbt", "e2el": "e2e", "e2e": "e2e"}
"""Names in `slo` -> fields of SLO. Values in milliseconds, as in `vllm bench serve --goodput`."""

EXTRA_ARGS = {"slo_ttft_ms": "ttft", "slo_tbt_ms": "tbt", "slo_tpot_ms": "tbt", "slo_e2el_ms": "e2e"}

MIN_SLO_SECONDS = 1e-3
"""A shorter target is clamped to this: nothing meets it, but a sort key of 0 or less would overtake everybody."""

MAX_LABELS = 256
"""Classes, and tenants, told apart; later ones share one code, so that clients cannot grow metrics without end."""

MAX_LABEL_LENGTH = 64
OTHER = "other"


def parse_slo(text: str, where: str = "slo") -> SLO:
    """`ttft:2000,tbt:200,e2el:30000` (milliseconds; commas or spaces) -> SLO. Raises InputError.

    Presets and `ttft:5x` need a profile, which the engine has not: `slacktide serve` writes them out as numbers.
    """
    found: dict[str, float] = {}
    items = text.replace(",", " ").replace(": ", ":").split()
    if not items:
        raise InputError(f"{where} is empty: expected for example ttft:2000,tbt:200 (milliseconds)")
    for item in items:
        key, colon, value = item.partition(":")
        if not colon:
            raise InputError(f"{where}: {item!r}: expected key:milliseconds, as in ttft:2000,tbt:200")
        if key not in KEYS:
            raise unknown_name(f"target in {where}:", key, KEYS, "(as in ttft:2000,tbt:200,e2el:30000)")
        name = KEYS[key]
        if name in found:
            raise InputError(f"{where}: {name} is given twice in {text!r}")
        found[name] = _seconds(value, f"{where}: {key}:{value}")
    return SLO(**found)


def _seconds(value: Any, where: str) -> float:
    """Milliseconds (a number or text) as seconds. Raises InputError."""
    try:
        seconds = math.nan if isinstance(value, bool) else float(value) / 1e3
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not 0 < seconds <= MAX_SLO_SECONDS:
        raise InputError(f"{where}: expected milliseconds above 0 and at most {MAX_SLO_SECONDS * 1e3:g}")
    return seconds


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

    def _label(self, value: Any) -> str:
        if value is None:
            return ""
        text = str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else ""
        if not text or not text.isprintable() or len(text) > MAX_LABEL_LENGTH:
            self.invalid += 1
            return ""
        return text

    def _clamp(self, value: Any) -> float | None:
        """Milliseconds -> seconds within bounds; None for what is no number."""
        try:
            seconds = math.nan if isinstance(value, bool) else float(value) / 1e3
        except (TypeError, ValueError, OverflowError):
            seconds = math.nan
        if math.isnan(seconds):
            self.invalid += 1
            return None
        if not MIN_SLO_SECONDS <= seconds <= MAX_SLO_SECONDS:
            self.clamped += 1
            return min(max(seconds, MIN_SLO_SECONDS), MAX_SLO_SECONDS)
        return seconds
