"""What gets loaded: the core and the command line stay light."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = {"torch", "vllm", "pandas", "pydantic", "pyarrow", "scipy", "matplotlib", "rich", "numba"}


def loaded(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after running `code` (its output is thrown away)."""
    script = (
        f"import sys, json\n{code}\nprint()\nprint(json.dumps(sorted({{m.partition('.')[0] for m in sys.modules}})))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_probe_sees_what_is_loaded():
    assert "numba" in loaded("import slacktide.core.kernels")


def test_core_loads_no_heavy_library():
    code = """
import importlib, pkgutil, slacktide.core
for module in pkgutil.walk_packages(slacktide.core.__path__, "slacktide.core."):
    if not module.name.startswith("slacktide.core.kernels"):  # compiled twins: loaded on first use
        importlib.import_module(module.name)
"""
    assert loaded(code) & HEAVY == set()


def test_asking_for_policies_loads_no_heavy_library():
    assert loaded("import slacktide.core.policy as p; [p.get(name) for name in p.names()]") & HEAVY == set()


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_help_loads_nothing_but_the_standard_library(arguments):
    found = loaded(f"from slacktide.cli.main import main; assert main({arguments}) == 0")
    assert found & (HEAVY | {"numpy", "msgspec"}) == set()


def test_help_of_every_verb_loads_no_heavy_library():
    code = """
from slacktide.cli.main import VERBS, main
for verb in VERBS:
    assert main([verb, "--help"]) == 0
"""
    assert loaded(code) & HEAVY == set()
