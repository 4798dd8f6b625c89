"""Rules over the files of the repository."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
REQUIREMENTS = sorted((ROOT / "requirements").glob("*.txt"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Written in pieces, so that this file does not hold what it forbids.
FORBIDDEN = re.compile("|".join(["/" + "(work|root|tmp)/", "index" + "-url", "issue" + " #"]), re.IGNORECASE)


def tracked() -> list[Path]:
    """Files under version control; everything outside hidden directories where there is no git."""
    try:
        done = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True, check=True)
        return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()]
    except (OSError, subprocess.CalledProcessError):
        return [p for p in ROOT.rglob("*") if p.is_file() and not any(q.startswith(".") for q in p.parts)]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_rules_have_files_to_look_at():
    assert len(SOURCES) > 10
    assert len(tracked()) > 10
    assert FORBIDDEN.search("see " + "/ro" + "ot/x")


def test_no_file_names_a_machine_or_a_package_index():
    found = []
    for path in tracked():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:  # a binary file
            continue
        found += [f"{name(path)}:{i}: {line.strip()}" for i, line in enumerate(lines, 1) if FORBIDDEN.search(line)]
    assert found == []


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_module_has_a_docstring(path):
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{name(path)} has no docstring"


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_exported_names_are_sorted_and_there(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            exported = ast.literal_eval(node.value)
            assert list(exported) == sorted(set(exported))


def test_licence_and_changelog():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "Version 2.0" in text
    assert PROJECT["license"] == "Apache-2.0"
    assert re.search(r"^## Unreleased$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_every_licence_of_packaged_data_is_packaged():
    from slacktide.workload.packaged import list_traces

    texts = {path.stem.partition("-")[0] for path in (ROOT / "src/slacktide/data/licenses").glob("*.txt")}
    named = {licence for trace in list_traces() for licence in trace.licence.split(" and ")}
    assert {licence.partition("-")[0] for licence in named} <= texts


def test_decisions_are_numbered_and_complete():
    files = sorted((ROOT / "docs/decisions").glob("*.md"))
    assert [int(path.name[:4]) for path in files] == list(range(len(files)))
    for path in files:
        headings = re.findall(r"^## (.+)$", path.read_text(), re.MULTILINE)
        assert headings == ["Context", "Choice", "Confirmation"], name(path)


def test_every_data_file_is_packaged():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["slacktide"]
    package = ROOT / "src/slacktide"
    packaged = {path for pattern in settings for path in package.glob(pattern)}
    ours = {path for path in tracked() if package in path.parents and path.suffix != ".py"}
    assert ours
    assert ours - packaged == set()


# ---- requirements ----------------------------------------------------------------------------------------------------


def pins(path: Path) -> dict[str, Version]:
    """Canonical name -> version, with the files it includes."""
    found: dict[str, Version] = {}
    for raw in path.read_text().splitlines():
        line = raw.partition("#")[0].strip()
        if line.startswith("-r "):
            found |= pins(path.parent / line[3:])
        elif line:
            match = re.fullmatch(r"([A-Za-z0-9._-]+)==([0-9][0-9a-z.]*)", line)
            assert match, f"{name(path)}: {raw!r} is not an exact pin"
            found[canonical(match[1])] = Version(match[2])
    return found


def canonical(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


@pytest.mark.parametrize("path", REQUIREMENTS, ids=name)
def test_requirements_are_exact_pins(path):
    assert pins(path)


@pytest.mark.parametrize(
    ("file", "ranges"),
    [
        ("base.txt", PROJECT["dependencies"]),
        ("report.txt", PROJECT["optional-dependencies"]["report"]),
        ("bench.txt", PROJECT["optional-dependencies"]["bench"]),
        ("dev.txt", PROJECT["optional-dependencies"]["dev"]),
    ],
)
def test_pins_lie_in_the_ranges(file, ranges):
    pinned = pins(ROOT / "requirements" / file)
    for requirement in map(Requirement, ranges):
        assert canonical(requirement.name) in pinned
        assert pinned[canonical(requirement.name)] in requirement.specifier


def test_pins_are_what_vllm_works_with():
    pinned = pins(ROOT / "requirements/base.txt")
    assert {package: str(pinned[package]) for package in ("numba", "numpy", "llvmlite")} == {
        "numba": "0.65.0",
        "numpy": "2.3.5",
        "llvmlite": "0.47.0",
    }


def test_doctor_knows_the_dependencies_and_the_vllm_range():
    from slacktide.cli.doctor import NEEDED, VLLM_END, VLLM_FIRST

    assert sorted(NEEDED) == sorted(Requirement(text).name for text in PROJECT["dependencies"])
    (vllm,) = map(Requirement, PROJECT["optional-dependencies"]["vllm"])
    bounds = {clause.operator: clause.version for clause in vllm.specifier}
    assert bounds == {">=": ".".join(map(str, VLLM_FIRST)), "<": ".".join(map(str, VLLM_END))}
