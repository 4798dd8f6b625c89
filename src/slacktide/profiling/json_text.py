"""JSON that people edit: what cannot be meant is refused in one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from slacktide.errors import InputError


def parse(text: str, where: str) -> Any:
    """The JSON value in `text`, named `where` in errors. Raises InputError, also for a key that stands twice (Python's
    parser would take the last one in silence)."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise InputError(f"{where}: field {twice} stands twice in one object; keep one")
        return found

    try:
        return json.loads(text, object_pairs_hook=once)
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        # A number of thousands of digits, or nesting without end, is no syntax error to Python.
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise InputError(f"{where}: not valid JSON ({reason})") from error


def read(path: str | Path, where: str) -> Any:
    """The JSON value in a file. Raises InputError."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a name with a null byte
        raise InputError(f"{where}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    return parse(text, where)


def is_number(value: object) -> bool:
    """A JSON number that float64 holds: no boolean, NaN or infinity, and no whole number of 400 digits."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
