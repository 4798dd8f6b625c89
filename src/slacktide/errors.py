"""The one exception for input the user can mend; the command line turns it into one line and exit status 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MAX_CONTAINING = 4
"""Names shown that contain the one given: `h100` is part of a dozen profiles."""
MAX_KNOWN = 24
"""Names shown where none is near: all policies, and not all hundred profiles."""


class InputError(ValueError):
    """Bad input. The message names the file, line or field, what was found, what was expected and how to mend it.

    Always one line: it is printed as it is, without a traceback.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def unknown_name(kind: str, name: str, known: Iterable[str], hint: str = "") -> InputError:
    """Error for a name that is not among `known`; lists near names, else those that contain it, else all."""
    choices = sorted(known)
    near = difflib.get_close_matches(name, choices, n=3, cutoff=0.5)
    holding = [choice for choice in choices if name and name.lower() in choice.lower()]
    near = near or sorted(holding, key=len)[:MAX_CONTAINING]  # the shortest add least to what was meant
    more = f", ... ({len(choices)} in all)" if len(choices) > MAX_KNOWN else ""
    found = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(choices[:MAX_KNOWN])}{more}"
    return InputError(f"unknown {kind} {name!r}: {found}{' ' + hint if hint else ''}")
