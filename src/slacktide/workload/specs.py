"""The small grammar of specifications on the command line: `kind:key=value,key=value`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from slacktide.errors import InputError, unknown_name


def split_spec(text: str, kind: str) -> tuple[str, dict[str, str]]:
    """`name:key=value,...` -> (name, {key: value}); raises InputError for anything else or a key given twice."""
    name, _, rest = text.strip().partition(":")
    settings: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not key or not value:
            raise InputError(f"{kind} {text!r}: {item!r} is not of the form key=value")
        if key in settings:
            raise InputError(f"{kind} {text!r}: {key} is given twice")
        settings[key] = value
    return name.strip(), settings


def check_keys(settings: dict[str, str], known: Iterable[str], kind: str) -> None:
    """Raise InputError for the first key that is not known, with near ones."""
    names = list(known)
    for key in settings:
        if key not in names:
            raise unknown_name(f"{kind} parameter", key, names)


def parse_number(text: str, what: str) -> float:
    """A finite number from plain decimal text; raises InputError for anything else ('nan', '1_000', '')."""
    if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text.strip()):
        raise InputError(f"{what}: found {text!r}, expected a number")
    value = float(text)
    if not math.isfinite(value):
        raise InputError(f"{what}: {text!r} is too large")
    return value


def parse_whole(text: str, what: str, lowest: int, highest: int) -> int:
    """A whole number within bounds; raises InputError for anything else."""
    value = parse_number(text, what)
    if value != int(value) or not lowest <= value <= highest:
        raise InputError(f"{what}: found {text!r}, expected a whole number from {lowest} to {highest:,}")
    return int(value)


def misspelt(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` was probably meant to be, or None: nearly equal, or about arrival like it.

    For columns that would be passed over in silence otherwise: `slo_ttft` for `slo_ttft_ms`, `arrival` for `arrival_s`.
    """
    import difflib

    names = list(known)
    near = difflib.get_close_matches(name.casefold(), names, n=1, cutoff=0.8)  # 0.8: one letter in five may differ
    if near:
        return near[0]
    return next((other for other in names if name[:7].casefold() == other[:7] == "arrival"), None)


def suggest(name: str, known: Iterable[str]) -> str:
    """`, nearest is "x"` for the most similar known name, or an empty string when none is near."""
    import difflib

    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f', nearest is "{near[0]}"' if near else ""
