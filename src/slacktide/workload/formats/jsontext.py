"""Decoding JSON with errors that name line and column. msgspec is imported on first use."""

from __future__ import annotations

import json
from typing import Any

from slacktide.errors import InputError


def decode(path: str, data: bytes, first_line: int = 1, of: Any = Any) -> Any:
    """`data` as one JSON value of type `of`. Raises InputError with line and column, or the field of a wrong type."""
    import msgspec

    try:
        return msgspec.json.decode(data, type=of)
    except msgspec.ValidationError as error:
        raise InputError(f"{path}: line {first_line}: {_plain(str(error))}") from None
    except (ValueError, RecursionError) as error:  # msgspec.DecodeError is a ValueError
        raise malformed(path, data, first_line, str(error)) from None


def repeated_key(data: bytes) -> str | None:
    """The first key that stands twice in one object of `data` (None if none, or no JSON)."""
    found: list[str] = []

    def watch(pairs: list[tuple[str, Any]]) -> None:
        names = [name for name, _ in pairs]
        found.extend(name for i, name in enumerate(names) if name in names[:i])

    try:
        json.loads(data, object_pairs_hook=watch)
    except (ValueError, RecursionError):
        return None
    return found[0] if found else None


def malformed(path: str, data: bytes, first_line: int, reason: str) -> InputError:
    """The error for JSON that does not parse, with the position where Python's parser stops."""
    line, column = first_line, ""
    try:
        json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        line += data.count(b"\n", 0, error.start)
        reason = f"no UTF-8 text at byte {error.start + 1}"
    except json.JSONDecodeError as error:
        line, column = first_line + error.lineno - 1, f", column {error.colno}"
        reason = "cut off or malformed JSON" if error.pos >= len(data.rstrip()) else "malformed JSON"
        reason += f" ({error.msg})"
    except (ValueError, RecursionError) as error:
        reason = f"JSON that cannot be read ({type(error).__name__})"
    return InputError(f"{path}: line {line}{column}: {reason}; fetch or write the file again")


def _plain(message: str) -> str:
    """msgspec's message in our words: 'Expected `int`, got `str` - at `$.x`' -> 'field x: expected int, got str'."""
    what, _, where = message.replace("`", "").partition(" - at ")
    field = where.removeprefix("$").lstrip(".")
    what = what[:1].lower() + what[1:].replace(" | null", "").replace("int | float", "number")
    return f"field {field}: {what}" if field else what
