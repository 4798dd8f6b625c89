"""What the front end makes of a request's targets: check them, take them from gateway headers, decide on admission.

Pure functions over a parsed body and its headers; `middleware.py` wires them into vLLM's server.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slacktide.core.types import MAX_SLO_SECONDS
from slacktide.vllm.estimate import Estimate

TARGETS = ("slo_ttft_ms", "slo_tbt_ms", "slo_e2el_ms")
ALIASES = {"slo_tpot_ms": "slo_tbt_ms"}
"""Other words for a field: TPOT is what gateways call it."""
LABELS = ("slo_class", "tenant")
FIELDS = (*TARGETS, *ALIASES, *LABELS)
"""The keys of `vllm_xargs` that are ours."""

HEADERS = {
    "x-llm-d-slo-ttft-ms": "slo_ttft_ms",
    "x-llm-d-slo-tpot-ms": "slo_tbt_ms",
    "x-slo-ttft-ms": "slo_ttft_ms",
    "x-slo-tpot-ms": "slo_tbt_ms",
}
"""Header -> field: llm-d's names, then its older ones (also inference-perf's). The first that is there counts."""

MAX_LABEL = 64
"""Longest class or tenant, characters: each becomes a row of a table and a metric's label."""

MAX_MS = MAX_SLO_SECONDS * 1e3

MIN_RETRY, MAX_RETRY = 1, 60
"""Bounds of Retry-After in seconds: clients read whole seconds, and no estimate is good for longer than a minute."""


class BadField(ValueError):
    """A field of the request that is wrong: `field` names it, the message says what was expected."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


@dataclass(frozen=True, slots=True)
class Settings:
    """How the front end admits, from JSON in the environment variable `SLACKTIDE_ADMISSION`.

    Raises ValueError naming the key that is wrong.
    """

    reject: int = 0
    """HTTP status for a request predicted to miss its TTFT: 429 or 503; 0 = never reject."""
    estimate_dir: str = ""
    """Where the scheduler publishes its estimate."""
    slo_ttft_ms: float = math.inf
    """TTFT target of requests that bring none and whose class has none."""
    class_slo_ttft_ms: dict[str, float] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    """Further headers -> fields, beside HEADERS."""

    def __post_init__(self) -> None:
        if self.reject not in (0, 429, 503):
            raise ValueError(f"reject: expected 429, 503 or 0, found {self.reject!r}")
        if self.reject and not self.estimate_dir:
            raise ValueError("reject needs estimate_dir, the directory where the scheduler publishes its estimate")
        targets: dict[str, Any] = {"slo_ttft_ms": self.slo_ttft_ms, **self.class_slo_ttft_ms}
        for name, value in targets.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"{name}: expected milliseconds above 0, found {value!r}")
        for header, name in self.headers.items():
            if name not in FIELDS:
                raise ValueError(f"headers: {header} -> {name!r}: expected one of {', '.join(FIELDS)}")

    @classmethod
    def parse(cls, text: str) -> Settings:
        """From JSON; an empty text is the defaults."""
        if not text.strip():
            return cls()
        try:
            data = json.loads(text)
        except RecursionError as error:
            raise ValueError("JSON nested too deeply") from error
        if not isinstance(data, dict):
            raise ValueError(f"expected a JSON object, found {text[:40]!r}")
        for name in ("class_slo_ttft_ms", "headers"):
            if not isinstance(data.get(name, {}), dict):
                raise ValueError(f"{name}: expected an object, found {data[name]!r}")
        try:
            return cls(**data)
        except TypeError as error:  # an unknown key
            raise ValueError(str(error).replace("Settings.__init__() got an ", "")) from error


def with_targets(body: dict[str, Any], headers: Mapping[str, str], extra: Mapping[str, str]) -> dict[str, Any]:
    """The body with our fields of `vllm_xargs` checked, in canonical names and types, and those of headers added.

    `headers`, `extra`: lower-case names. A field of the body goes before a header. The same object when nothing
    changes. Raises BadField.
    """
    given = body.get("vllm_xargs")
    if given is not None and not isinstance(given, dict):
        raise BadField("vllm_xargs", f"expected an object, found {_short(given)}")
    found: dict[str, float | str] = {}
    name: str
    for key, value in (given or {}).items():
        if key in FIELDS:
            name = ALIASES.get(str(key), str(key))
            checked = _checked(name, value, f"vllm_xargs.{key}")
            if found.setdefault(name, checked) != checked:
                raise BadField(f"vllm_xargs.{key}", f"{name} says {found[name]}, this says {checked}; give one")
        elif isinstance(key, str) and key.startswith("slo_"):
            near = difflib.get_close_matches(key, FIELDS, n=1)
            raise BadField(f"vllm_xargs.{key}", f"no such field; {f'did you mean {near[0]}?' if near else known()}")
    for header, key in {**HEADERS, **extra}.items():
        if header in headers:
            name = ALIASES.get(key, key)
            found.setdefault(name, _checked(name, headers[header].strip(), header))
    kept = {key: value for key, value in (given or {}).items() if key not in FIELDS}
    merged = kept | found
    return body if merged == (given or {}) else body | {"vllm_xargs": merged}


def known() -> str:
    """What may be given, in words."""
    return f"known: {', '.join(FIELDS)}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:40] + "..."


def _checked(name: str, value: Any, where: str) -> float | str:
    """A target as a number of ms, a label as text. Numbers written as text are fine: headers know no other."""
    if name in LABELS:
        text = str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else ""
        if not 1 <= len(text) <= MAX_LABEL or not text.isprintable():
            raise BadField(where, f"expected 1 to {MAX_LABEL} printable characters, found {_short(value)}")
        return text
    try:
        number = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 < number <= MAX_MS:
        raise BadField(where, f"expected milliseconds above 0 and at most {MAX_MS:g}, found {_short(value)}")
    return number


def retry_after(body: Mapping[str, Any], estimate: Estimate | None, settings: Settings) -> int | None:
    """Seconds after which to try again when the predicted TTFT exceeds the request's target; None = admit.

    Without a fresh estimate, or without a target, everything is admitted. The wait is the predicted excess: by then
    the queue will have drained to where the target can be met, if nobody else comes.
    """
    if not settings.reject or estimate is None:
        return None
    xargs = body.get("vllm_xargs") or {}
    of_class = settings.class_slo_ttft_ms.get(str(xargs.get("slo_class", "")), settings.slo_ttft_ms)
    excess = estimate.predicted_ttft_s - float(xargs.get("slo_ttft_ms", of_class)) / 1e3
    return None if excess <= 0 else min(max(math.ceil(excess), MIN_RETRY), MAX_RETRY)
