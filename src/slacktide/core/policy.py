"""What a policy is, and the registry of policies.

Adding one = one file in `core/policies/`: a frozen dataclass whose fields are the parameters, with `@register(name)`
and either `score` (lower is served first; the shared packer does the rest) or `plan`.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import traceback
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

from slacktide.core.types import FloatArray, Plan, StepResult, StepView
from slacktide.errors import InputError, unknown_name


@runtime_checkable
class Policy(Protocol):
    """Decides whole steps. What is optional is read with getattr by the hosts:

    `oracle` (False): it sees true output lengths; every report marks it.
    `steerable` (True): vLLM can carry its plans out; the plug-in refuses a policy that says False.
    `learned() -> dict`, a method: what it learned so far, as plain values ready for JSON; hosts write it down.
    `decode_runs` (False): a promise that lets the simulator skip asking. While every live request is a running decode
    and blocks suffice, the plan is one token for each, and the policy keeps no state that such a step would change.
    """

    def plan(self, view: StepView) -> Plan:
        """The plan for the next step. Must not keep references to the view's arrays."""
        ...


@runtime_checkable
class ScorePolicy(Protocol):
    """Decides by an order alone: `score` gives one number per row, lower first; ties go by (arrival, id)."""

    def score(self, view: StepView) -> FloatArray:
        """Shape (n,), lower is served first."""
        ...


P = TypeVar("P", bound=type)
_REGISTRY: dict[str, type] = {}


def register(name: str) -> Callable[[P], P]:
    """Class decorator: make a policy known under `name`. Raises ValueError when the name is taken."""

    def add(cls: P) -> P:
        if name in _REGISTRY and _REGISTRY[name] is not cls:
            raise ValueError(f"policy name {name!r} is taken by {_REGISTRY[name].__qualname__}")
        _REGISTRY[name] = cls
        cls.name = name  # type: ignore[attr-defined]
        return cls

    return add


def _load_in_tree() -> None:
    from slacktide.core import policies

    for module in sorted(m.name for m in pkgutil.iter_modules(policies.__path__)):
        importlib.import_module(f"{policies.__name__}.{module}")


def names() -> list[str]:
    """Registered names of the policies in this package, sorted."""
    _load_in_tree()
    return sorted(_REGISTRY)


def get(name: str) -> type:
    """The class of a policy: a registered name, an installed entry point of group `slacktide.policies`, or
    `module:Class`. Nothing outside this package is imported unless it is named. Raises InputError."""
    _load_in_tree()
    if name in _REGISTRY:
        return _REGISTRY[name]
    if ":" in name:
        return _import_class(name)
    from importlib.metadata import entry_points

    for entry in entry_points(group="slacktide.policies"):
        if entry.name == name:
            loaded: Any = entry.load()
            return _checked(name, loaded)
    raise unknown_name("policy", name, _REGISTRY, "('slacktide policies' lists them)")


def _import_class(spec: str) -> type:
    module_name, _, class_name = spec.partition(":")
    if "" not in sys.path:
        # A policy of one's own lies in the directory where one works; `python -m` looks there, an installed command
        # does not. Last, so that no file there hides a module of the same name.
        sys.path.append("")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a syntax error, or whatever the module's own code raises
        where = _place_of(error)
        if isinstance(error, ModuleNotFoundError) and error.name == module_name:
            where = f"; expected {module_name}.py in this directory or on PYTHONPATH, or an installed module"
            raise InputError(f"policy {spec!r}: cannot import module {module_name!r}{where}") from error
        raise InputError(
            f"policy {spec!r}: cannot import module {module_name!r} ({type(error).__name__}: {error}{where})"
        ) from error
    if not hasattr(module, class_name):
        raise InputError(f"policy {spec!r}: module {module_name!r} has no {class_name!r}")
    return _checked(spec, getattr(module, class_name))


def _place_of(error: Exception) -> str:
    """`, file.py line 7` for an error in a user's file; "" for one of the import system itself."""
    if isinstance(error, (ImportError, SyntaxError)):  # say it themselves
        return ""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return "" if "importlib" in last.filename else f", {last.filename} line {last.lineno}"


def _checked(name: str, found: object) -> type:
    if not isinstance(found, type) or not (hasattr(found, "plan") or hasattr(found, "score")):
        raise InputError(f"policy {name!r}: expected a class with a method `plan` or `score`, found {found!r}")
    return found


def observe(policy: object, result: StepResult) -> None:
    """Hand a step's outcome to the policy, if it learns from outcomes."""
    method = getattr(policy, "observe", None)
    if method is not None:
        method(result)
