"""Cached machine code never outlives the sources it was made of."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import slacktide

CALLER = """
from slacktide.core.kernels import compiled
from slacktide.core.callee import inner

@compiled
def outer(x):
    return inner(x)
"""
CALLEE = """
from slacktide.core.kernels import compiled

@compiled
def inner(x):
    return x + {added}
"""


def test_a_changed_callee_is_compiled_into_its_unchanged_caller(tmp_path: Path) -> None:
    package = tmp_path / "slacktide"
    shutil.copytree(
        Path(slacktide.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__", "data", "vllm", "cli")
    )
    (package / "core" / "caller.py").write_text(CALLER)
    seen = []
    for added in (1, 22):  # another length: Python itself tells sources of one second apart by their size
        (package / "core" / "callee.py").write_text(CALLEE.format(added=added))
        code = "from slacktide.core.caller import outer; print(outer(1))"
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)},
                              capture_output=True, text=True, check=True)  # fmt: skip
        seen.append(done.stdout.strip())
    assert seen == ["2", "23"]
    assert list(package.rglob("*.nbc")), "nothing was cached, so nothing was shown"


def test_a_changed_constant_is_compiled_into_the_function_that_imports_it(tmp_path: Path) -> None:
    package = tmp_path / "slacktide"
    shutil.copytree(
        Path(slacktide.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__", "data", "vllm", "cli")
    )
    caller = CALLER.replace("callee import inner", "settings import ADDED").replace("inner(x)", "x + ADDED")
    (package / "core" / "caller.py").write_text(caller)
    seen = []
    for added in (1, 22):
        (package / "core" / "settings.py").write_text(f"ADDED = {added}\n")
        code = "from slacktide.core.caller import outer; print(outer(1))"
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)},
                              capture_output=True, text=True, check=True)  # fmt: skip
        seen.append(done.stdout.strip())
    assert seen == ["2", "23"]


def test_an_empty_index_is_made_anew(tmp_path: Path) -> None:
    """What a loss of power leaves of a file that was being written."""
    package = tmp_path / "slacktide"
    shutil.copytree(
        Path(slacktide.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__", "data", "vllm", "cli")
    )
    (package / "core" / "callee.py").write_text(CALLEE.format(added=1))
    code = "from slacktide.core.callee import inner; print(inner(1))"
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)},
                              capture_output=True, text=True, check=True)  # fmt: skip
        assert done.stdout.strip() == "2"
        indices = list(package.rglob("callee*.nbi"))
        assert indices
        for index in indices:
            index.write_bytes(b"")
