"""Policies as users write them: `sliding:window=3,chunker=greedy` -> class, typed parameters, unique label.

A policy's parameters are the fields of its dataclass; the string below a field is its help. Fields that users may set
are int, float, bool, str, a Literal, or one of these or None.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import math
import textwrap
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

from slacktide.core.policy import get, names
from slacktide.errors import InputError, unknown_name

MAX_WHOLE = 2**62
"""Largest whole number of a parameter: beyond, it no longer fits the 64 bits of compiled policies."""

_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


@dataclasses.dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a policy."""

    name: str
    kind: type[int] | type[float] | type[bool] | type[str]
    choices: tuple[str | int, ...]
    """Allowed values; empty = any of the kind."""
    optional: bool
    """`none` is a value."""
    required: bool
    """It has no default."""
    default: Any
    doc: str

    @property
    def expected(self) -> str:
        """What a value has to look like, in words."""
        known = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}[self.kind]
        words = " or ".join(map(str, self.choices)) if self.choices else known
        return f"{words} or none" if self.optional else words

    def convert(self, text: str) -> Any:
        """The typed value of `text`. Raises ValueError."""
        if self.optional and text.lower() == "none":
            return None
        value: Any = text
        if self.kind is bool:
            value = _WORDS.get(text.lower())
            if value is None:
                raise ValueError(text)
        elif self.kind in (int, float):
            value = self.kind(text)
        if self.kind is int and abs(value) > MAX_WHOLE:
            raise ValueError(text)
        not_a_number = isinstance(value, float) and math.isnan(value)
        if not_a_number or (self.choices and value not in self.choices):
            raise ValueError(text)
        return value


@dataclasses.dataclass(frozen=True, slots=True)
class PolicySpec:
    """A policy as the user asked for it."""

    name: str
    cls: type
    parameters: dict[str, Any]
    """What was given, typed; the rest has its defaults."""
    engine: dict[str, Any]
    """Engine settings among them: they override the engine's flags for the runs of this policy."""
    label: str
    """Unique among the policies asked for, e.g. `sliding:window=3`."""

    def build(self) -> Any:
        """A fresh instance. Raises InputError when the policy refuses a value."""
        accepted = {parameter.name for parameter in parameters_of(self.cls)}
        try:
            return self.cls(**{name: value for name, value in self.parameters.items() if name in accepted})
        except (TypeError, ValueError) as error:
            raise InputError(f"policy {self.label!r}: {error}") from error

    def all_parameters(self) -> dict[str, Any]:
        """Every parameter with its value, defaults and engine overrides included: for the run's record."""
        defaults = {p.name: p.default for p in parameters_of(self.cls) if not p.required}
        return defaults | self.parameters


@functools.cache
def parameters_of(cls: type) -> tuple[Parameter, ...]:
    """The parameters of a policy's class, in the order of its fields; none when it is no dataclass.

    Raises TypeError for a public field whose type has no form on a command line.
    """
    if not dataclasses.is_dataclass(cls):
        return ()
    hints = typing.get_type_hints(cls)
    docs = _field_docs(cls)
    found: list[Parameter] = []
    for field in dataclasses.fields(cls):
        if not field.init or field.name.startswith("_"):
            continue
        kind, choices, optional = _kind(cls, field.name, hints[field.name])
        default: Any = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        required = default is dataclasses.MISSING
        found.append(
            Parameter(
                name=field.name,
                kind=kind,
                choices=choices,
                optional=optional,
                required=required,
                default=None if required else default,
                doc=docs.get(field.name, ""),
            )
        )
    return tuple(found)


def _kind(cls: type, name: str, hint: Any) -> tuple[Any, tuple[str | int, ...], bool]:
    optional = False
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        optional = len(members) < len(typing.get_args(hint))
        hint = members[0] if len(members) == 1 else hint
    if typing.get_origin(hint) is Literal:
        choices = typing.get_args(hint)
        kinds = {type(choice) for choice in choices}
        if kinds in ({str}, {int}):
            return kinds.pop(), choices, optional
    if hint in (int, float, bool, str):
        return hint, (), optional
    raise TypeError(f"{cls.__qualname__}.{name}: {hint} has no form on a command line (use init=False for state)")


def _field_docs(cls: type) -> dict[str, str]:
    """The string literal below each annotated field, base classes first."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):  # builtins, or a class typed into an interpreter
            continue
        body = cast("ast.ClassDef", tree.body[0]).body
        for statement, below in itertools.pairwise(body):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                match below:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        docs[statement.target.id] = " ".join(text.split())
                    case _:
                        pass
    return docs


def parse_policies(texts: Sequence[str], engine: Mapping[str, Callable[[str], Any]] | None = None) -> list[PolicySpec]:
    """The policies that the values of `--policy` name, in order. Raises InputError.

    Each text is a comma-separated list of `name`, `name:parameter=value`, `module:Class[:parameter=value]`, or `all`
    (every policy of this package that is no oracle). An item with `=` before any `:` is a parameter of the policy
    before it. `engine` maps settings that every policy takes (beside its own parameters) to their readers, which
    raise ValueError.
    """
    specs: list[PolicySpec] = []
    seen: dict[str, int] = {}
    for text in texts:
        for name, given in _split(text):
            for spec in _expand(name, given, engine or {}):
                seen[spec.label] = seen.get(spec.label, 0) + 1
                repeat = seen[spec.label]
                specs.append(dataclasses.replace(spec, label=f"{spec.label}#{repeat}") if repeat > 1 else spec)
    if not specs:
        raise InputError("no policy named: expected for example --policy vllm-v1 ('slacktide policies' lists them)")
    return specs


def _split(text: str) -> list[tuple[str, list[str]]]:
    """(name, ["parameter=value", ...]) of each policy in a list."""
    found: list[tuple[str, list[str]]] = []
    for raw in text.split(","):
        item = raw.strip()
        if not item:
            raise InputError(f"--policy {text!r}: an empty item between commas; expected name[:parameter=value]")
        segments = item.split(":")
        if "=" in segments[0]:
            if not found:
                raise InputError(f"--policy {text!r}: {item!r} stands before any policy; expected name:{item}")
            found[-1][1].append(item)
            continue
        first = next((i for i, segment in enumerate(segments) if "=" in segment), len(segments))
        name, parameter = ":".join(segments[:first]), ":".join(segments[first:])
        found.append((name.strip(), [parameter] if parameter else []))
    return found


def _expand(name: str, given: list[str], engine: Mapping[str, Callable[[str], Any]]) -> list[PolicySpec]:
    if name == "all":
        return [
            spec for each in names() if not getattr(get(each), "oracle", False) for spec in [_spec(each, given, engine)]
        ]
    return [_spec(name, given, engine)]


def _spec(name: str, given: list[str], engine: Mapping[str, Callable[[str], Any]]) -> PolicySpec:
    head, _, tail = name.partition(":")
    if tail == "" and name.endswith(":"):
        raise InputError(f"policy {name!r}: expected parameter=value after ':'")
    if tail and head in names():
        raise InputError(f"policy {head!r}: expected parameter=value after ':', found {tail!r}")
    cls = get(name)
    try:
        own = {parameter.name: parameter for parameter in parameters_of(cls)}
    except (TypeError, NameError) as error:  # a field of a type that no command line can give, or an unknown one
        raise InputError(f"policy {name!r}: {error}") from error
    parameters: dict[str, Any] = {}
    for item in given:
        key, _, value = item.partition("=")
        key, value = key.strip().replace("-", "_"), value.strip()
        if key in parameters:
            raise InputError(f"policy {name!r}: parameter {key} is given twice")
        parameters[key] = _value(name, key, value, own, engine)
    missing = [p.name for p in own.values() if p.required and p.name not in parameters]
    if missing:
        raise InputError(f"policy {name!r} needs {', '.join(missing)}: expected {name}:{missing[0]}=...")
    label = name + "".join(
        f"{',' if i else ':'}{key}={_text(value)}" for i, (key, value) in enumerate(parameters.items())
    )
    # `none` leaves an engine setting that is a parameter, too, to the engine.
    overrides = {key: value for key, value in parameters.items() if key in engine and value is not None}
    spec = PolicySpec(name=name, cls=cls, parameters=parameters, engine=overrides, label=label)
    spec.build()  # a value that the policy itself refuses must be found before anything runs
    return spec


def _value(
    policy: str, key: str, text: str, own: Mapping[str, Parameter], engine: Mapping[str, Callable[[str], Any]]
) -> Any:
    if key in own:
        try:
            return own[key].convert(text)
        except ValueError as error:
            expected = own[key].expected
            raise InputError(f"policy {policy!r}: parameter {key}={text!r}: expected {expected}") from error
    if key in engine:
        try:
            return engine[key](text)
        except ValueError as error:
            raise InputError(f"policy {policy!r}: engine setting {key}={text!r}: {error}") from error
    if not own and not engine:
        raise InputError(f"policy {policy!r} has no parameters, found {key}={text!r}")
    hint = f"('slacktide policies {policy}' explains them)"
    raise unknown_name(f"parameter of policy {policy!r}:", key, {*own, *engine}, hint)


def _text(value: Any) -> str:
    """A value as it is written in a label."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
