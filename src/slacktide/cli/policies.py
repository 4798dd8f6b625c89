"""List the scheduling policies: what each does, and its parameters with their defaults.

With a NAME (also `module:Class` or an installed plug-in), the whole description of that policy.

example:
  slacktide policies
"""

from __future__ import annotations

import argparse
import inspect
from typing import Any

from slacktide.cli.output import emit, table
from slacktide.core.policy import get, names
from slacktide.core.spec import Parameter, parameters_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One optional name."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="describe this policy alone")


def run(args: argparse.Namespace) -> int:
    """Print the policies. Raises InputError for an unknown name."""
    found = [describe(name) for name in ([args.name] if args.name else names())]
    emit(args, "policies", {"policies": found}, lambda: _one(found[0]) if args.name else _all(found))
    return 0


def describe(name: str) -> dict[str, Any]:
    """A policy's name, first sentence, whole description, flags and parameters, in JSON's types."""
    cls = get(name)
    text = inspect.cleandoc(_own_doc(cls))
    return {
        "name": name,
        "summary": " ".join(text.split("\n\n")[0].split()),
        "description": text,
        "oracle": bool(getattr(cls, "oracle", False)),
        "steerable": bool(getattr(cls, "steerable", True)),
        "parameters": [_parameter(parameter) for parameter in parameters_of(cls)],
    }


def _own_doc(cls: type) -> str:
    """The file's description (one policy, one file), else the class's; not the signature that dataclasses invent."""
    module = inspect.getmodule(cls)
    own = cls.__dict__.get("__doc__") or ""
    invented = own.startswith(f"{cls.__name__}(")
    return (module.__doc__ if module and module.__doc__ else None) or ("" if invented else own)


def _parameter(parameter: Parameter) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "type": parameter.kind.__name__,
        "optional": parameter.optional,
        "choices": list(parameter.choices),
        "required": parameter.required,
        "default": parameter.default,
        "description": parameter.doc,
    }


def _marks(policy: dict[str, Any]) -> str:
    marks = []
    if policy["oracle"]:
        marks.append("oracle: sees true output lengths")
    if not policy["steerable"]:
        marks.append("simulator only")
    return "; ".join(marks)


def _all(found: list[dict[str, Any]]) -> None:
    rows = []
    for policy in found:
        given = ", ".join(f"{p['name']}={_default(p)}" for p in policy["parameters"])
        marks = _marks(policy)
        summary = policy["summary"] + (f" ({marks})" if marks else "")
        rows.append([policy["name"], summary, given])
    table(["policy", "what it does", "parameters"], rows)
    print("Describe one: slacktide policies NAME. Set parameters: --policy NAME:parameter=value,parameter=value")


def _one(policy: dict[str, Any]) -> None:
    marks = _marks(policy)
    print(policy["name"] + (f" ({marks})" if marks else ""))
    print(f"\n{policy['description']}\n")
    if not policy["parameters"]:
        print("No parameters.")
        return
    rows = [[p["name"], _default(p), _values(p), p["description"]] for p in policy["parameters"]]
    table(["parameter", "default", "values", "meaning"], rows)


def _default(parameter: dict[str, Any]) -> str:
    if parameter["required"]:
        return "(required)"
    value = parameter["default"]
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _values(parameter: dict[str, Any]) -> str:
    kinds = {"int": "whole number", "float": "number", "bool": "true, false", "str": "word"}
    known = ", ".join(map(str, parameter["choices"])) or kinds[parameter["type"]]
    return f"{known}, none" if parameter["optional"] else known
