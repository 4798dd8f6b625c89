"""The only file that names numba. Import it on first use only: loading numba takes about half a second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile a function on first call and keep the machine code on disk.

    The plain function stays reachable as `.py_func`, the oracle of the tests. No fast-math: results must not depend
    on how the compiler groups a sum.
    """
    return numba.njit(cache=True, nogil=True, fastmath=False)(function)  # type: ignore[no-any-return]
