"""vLLM's own arguments, as typed or in its `--config` file: looked up, and put back. Needs no vLLM."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slacktide.errors import InputError

ALIASES = {"-pp": "--pipeline-parallel-size", "-sc": "--speculative-config"}


class Flags:
    """Looks up flags among vLLM's arguments (dashes and underscores are one), and then in its `--config` file."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = list(arguments)
        self._file = _read_config(self.value("--config"))

    def value(self, flag: str) -> str | None:
        """The value of the last such flag; "" for a switch; None when it is not there."""
        found: str | None = None
        for i, argument in enumerate(self._arguments):
            name, equals, value = argument.partition("=")
            if _canonical(name) == flag:
                following = self._arguments[i + 1] if i + 1 < len(self._arguments) else "-"
                found = value if equals else ("" if following.startswith("-") else following)
        return found

    def has(self, flag: str) -> bool:
        """Given, on the command line or in the file."""
        return self.value(flag) is not None or flag.removeprefix("--") in getattr(self, "_file", {})

    def get(self, flag: str) -> Any:
        """The value on the command line, else in the file, else None."""
        given = self.value(flag)
        return self._file.get(flag.removeprefix("--")) if given is None else given

    def nested(self, flag: str) -> dict[str, Any]:
        """A JSON flag with its dotted forms (`--flag.key value`) merged in. Raises InputError when it is no object."""
        given = self.get(flag)
        try:
            merged = json.loads(given) if isinstance(given, str) and given else dict(given or {})
        except (ValueError, TypeError, RecursionError) as error:
            raise InputError(f"{flag} {str(given)[:80]!r}: expected a JSON object ({error})") from None
        if not isinstance(merged, dict):
            raise InputError(f"{flag} {given!r}: expected a JSON object")
        for path, text in self._dotted(flag):
            inner, value = merged, text
            for key in path[:-1]:
                inner = inner.setdefault(key, {})
                if not isinstance(inner, dict):
                    raise InputError(f"{flag}.{'.'.join(path)}: {key} is {inner!r} already, expected an object")
            with contextlib.suppress(ValueError):
                value = json.loads(text)
            inner[path[-1]] = value
        return merged

    def without(self, flag: str) -> list[str]:
        """The arguments without a flag that takes a value, and without its dotted forms."""
        drop: set[int] = set()
        for i, argument in enumerate(self._arguments):
            name, equals, _ = argument.partition("=")
            if _canonical(name) == flag or _canonical(name).startswith(flag + "."):
                drop |= {i} if equals else {i, i + 1}
        return [argument for i, argument in enumerate(self._arguments) if i not in drop]

    def _dotted(self, flag: str) -> list[tuple[list[str], Any]]:
        """(keys after the flag, value) of each dotted form."""
        found = []
        for i, argument in enumerate(self._arguments):
            name, equals, value = argument.partition("=")
            if _canonical(name).startswith(flag + "."):
                text = value if equals else self._arguments[i + 1] if i + 1 < len(self._arguments) else ""
                found.append((name.split(".")[1:], text))
        return found


def _canonical(flag: str) -> str:
    head, dot, tail = flag.partition(".")
    return ALIASES.get(head, head.replace("_", "-") if head.startswith("--") else head) + dot + tail


def _read_config(path: str | None) -> dict[str, Any]:
    """vLLM's YAML file of flags, by names with dashes; empty when it cannot be read: vLLM will say why."""
    if not path:
        return {}
    try:
        import yaml  # type: ignore[import-untyped,import-not-found,unused-ignore]

        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except Exception:
        return {}
    return {str(key).replace("_", "-"): value for key, value in data.items()} if isinstance(data, dict) else {}
