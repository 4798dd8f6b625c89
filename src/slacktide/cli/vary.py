"""`--vary NAME=VALUES`: what may vary, and how values are written.

VALUES is V1,V2,...; for numbers also start:stop:step (both ends included) and start..stop*factor. In traces and
arrivals an item with `=` and no `:` belongs to the value before it, as in `--policy`: `trace=azure-conv,synthetic:n=9,
prompt=512` has two values. SLOs hold commas themselves, so `|` separates them; it may stand between any values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

from slacktide.cli import options
from slacktide.core.spec import Parameter, PolicySpec, parameters_of
from slacktide.errors import InputError, unknown_name
from slacktide.search.sweep import Axis

MAX_VALUES = 10_000
"""Of one axis; more is a typing error."""

Reader = Callable[[str], Any]


def _word(text: str) -> str:
    if not text:
        raise options.Invalid("expected a value, found nothing")
    return text


def _one_of(*choices: str) -> Reader:
    def read(text: str) -> str:
        if text not in choices:
            raise options.Invalid(f"expected {' or '.join(choices)}, found {text!r}")
        return text

    return read


def _max_tokens(text: str) -> str:
    return text if text == "exact" else str(options.count(text))


LOAD: dict[str, Reader] = {
    "rate": options.rate,
    "arrival": _word,
    "burstiness": options.positive,
    "num_prompts": options.count,
    "max_concurrency": options.count,
    "max_tokens": _max_tokens,
    "seed": options.count_or_zero,
    "slo": _word,
    "slo_mode": _one_of("deadline", "gap"),
    "late_tolerance": options.share_below_one,
    "trace": _word,
    "profile": _word,
    "oversized": _one_of("error", "drop", "reject"),
    "interference": options.factor,
    "interconnect": _word,
}
"""Fields of a scenario by name (dashes or underscores), with their readers."""


def parse_vary(texts: Sequence[str], specs: Sequence[PolicySpec]) -> list[Axis]:
    """The axes that the values of `--vary` describe, in order. Raises InputError."""
    axes: list[Axis] = []
    for text in texts:
        axis = _axis(text, specs)
        if axis.title in (other.title for other in axes):
            raise InputError(f"--vary {axis.title} is given twice: write all its values into one")
        axes.append(axis)
    return axes


def _axis(text: str, specs: Sequence[PolicySpec]) -> Axis:
    name, equals, values = text.partition("=")
    name = name.strip().replace("-", "_") if "." not in name else name.strip()
    name = "rate" if name == "request_rate" else name
    if not equals or not name or not values.strip():
        raise InputError(f"--vary {text!r}: expected NAME=V1,V2,..., for example rate=2,4,8 or max_num_seqs=64:256:64")
    if name in LOAD:
        return Axis(name, "load", _values(text, values, LOAD[name], name))
    if name in options.ENGINE_FLAGS:
        return Axis(name, "engine", _values(text, values, options.ENGINE_FLAGS[name].read))
    owner, _, parameter = name.rpartition(".")
    parameter = parameter.replace("-", "_")
    if owner and not any(owner in (spec.name, spec.label) for spec in specs):
        raise unknown_name("policy in --vary", owner, {spec.name for spec in specs}, "(it must be one of --policy)")
    candidates = [spec for spec in specs if not owner or owner in (spec.name, spec.label)]
    found = {p.name: p for spec in candidates for p in parameters_of(spec.cls)}
    if parameter in found:
        return Axis(parameter, "policy", _values(text, values, _reader(found[parameter])), owner or None)
    if owner and parameter in options.ENGINE_FLAGS:
        return Axis(parameter, "policy", _values(text, values, options.ENGINE_FLAGS[parameter].read), owner)
    known = {*found, *options.ENGINE_FLAGS, *(() if owner else LOAD)}
    raise unknown_name("name in --vary", parameter, known)


def _reader(parameter: Parameter) -> Reader:
    def read(text: str) -> Any:
        try:
            return parameter.convert(text)
        except ValueError as error:
            raise options.Invalid(f"expected {parameter.expected}, found {text!r}") from error

    return read


def _values(text: str, values: str, read: Reader, name: str = "") -> tuple[Any, ...]:
    """The typed values of one axis."""
    found: list[Any] = []
    for item in _split(values, name):
        try:
            found += (None if LOAD.get(name) is _word else _range(item, read)) or [read(item)]
        except ValueError as error:
            raise InputError(f"--vary {text!r}: {error}") from error
    return tuple(found)


def _split(values: str, name: str) -> list[str]:
    if "|" in values or name == "slo":
        return [item.strip() for item in values.split("|")]
    items: list[str] = []
    for item in values.split(","):
        if name in ("trace", "arrival") and items and "=" in item.partition(":")[0]:
            items[-1] += f",{item.strip()}"
        else:
            items.append(item.strip())
    return items


def _range(item: str, read: Reader) -> list[Any] | None:
    """Values of start:stop:step or start..stop*factor; None for anything else. Raises ValueError."""
    arithmetic, geometric = re.fullmatch(r"([^:]+):([^:]+):([^:]+)", item), re.fullmatch(r"(.+)\.\.(.+)\*(.+)", item)
    match = arithmetic or geometric
    if match is None:
        return None
    # In decimals, as they are written: 0.1:0.3:0.1 has three values, which binary fractions miss.
    first, last = (_decimal(read(match[i]), item) for i in (1, 2))
    step = _decimal(options.positive(match[3]), item)
    if last < first or (geometric and step <= 1):
        expected = "start..stop*factor with a factor above 1" if geometric else "start:stop:step"
        raise options.Invalid(f"{item!r}: expected {expected} that rises")
    found: list[Any] = []
    value = first
    while value <= last:
        if len(found) == MAX_VALUES:
            raise options.Invalid(f"{item!r}: more than {MAX_VALUES:,} values")
        found.append(read(f"{value.normalize():f}"))
        value = value * step if geometric else value + step
    return found


def _decimal(value: Any, item: str) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value in (float("inf"), float("-inf")):
        raise options.Invalid(f"{item!r}: a range needs finite numbers at both ends")
    return Decimal(str(value))
