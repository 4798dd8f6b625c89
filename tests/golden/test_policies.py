"""Every policy's integers on one committed trace at eight loads: a changed decision shows, wherever it comes from."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from slacktide.core import policy

ROOT = Path(__file__).parents[2]


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden", ROOT / "scripts" / "golden.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


golden = _script()
TABLE = json.loads(golden.GOLDEN.read_text())


@pytest.mark.parametrize("name", policy.names())
def test_integers(name: str) -> None:
    assert name in TABLE["policies"], "a new policy: run `make golden` and say so in CHANGELOG.md"
    assert golden.table([name])[name] == TABLE["policies"][name]


def test_table_is_about_what_exists() -> None:
    assert sorted(TABLE["policies"]) == policy.names()
    assert TABLE["columns"] == list(golden.COLUMNS)


def test_loads_separate_the_policies() -> None:
    """A table in which all policies agree would prove nothing."""
    heavy = {name: tuple(rows["14"]) for name, rows in TABLE["policies"].items()}
    assert len(set(heavy.values())) >= len(heavy) - 1
    assert all(row[7] == 300 for row in heavy.values())
