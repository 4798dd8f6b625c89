"""The one exception for input the user can mend; the command line turns it into one line and exit status 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Bad input. The message names the file, line or field, what was found, what was expected and how to mend it.

    Always one line: it is printed as it is, without a traceback.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def unknown_name(kind: str, name: str, known: Iterable[str], hint: str = "") -> InputError:
    """Error for a name that is not among `known`; lists near names (or all of them when none is near)."""
    choices = sorted(known)
    near = difflib.get_close_matches(name, choices, n=3, cutoff=0.5)
    found = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(choices)}"
    return InputError(f"unknown {kind} {name!r}: {found}{' ' + hint if hint else ''}")
