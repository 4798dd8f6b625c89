"""Compiled functions on first use: loading numba takes half a second, which `slacktide policies` need not wait for."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any


@cache
def kernels(name: str) -> Any:
    """The module `kernels_NAME`."""
    return import_module(f"slacktide.core.kernels_{name}")
