"""The documents: links lead somewhere, code blocks run, the site builds.

A block of bash or Python is run as it stands, page by page in an empty directory, unless `<!-- not run: REASON -->`
stands above it or its page is in NOT_RUN: those need an engine, and are checked for their syntax alone
(tests/repo/test_commands.py looks at the commands in them). A Python block that begins with `# NAME.py` is written into
that file. Blocks of our own commands run in this process, all else in a shell. A block of text that follows a block
that was run is what that printed, line by line: when a default changes, print it anew.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from slacktide.cli.main import VERBS, main

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
NOT_RUN = {"serving.md": "a vLLM server", "vllm-plugin.md": "a vLLM server", "calibration.md": "an engine to measure"}
"""Pages none of whose blocks are run, and what they need."""
BLOCK = re.compile(r"(?:<!-- not run: (.+?) -->\n)?^```(bash|python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
GENERATED = {"reference/cli.md", "reference/policies.md", "reference/server-metrics.md", "reference/slos.md",
             "decisions/index.md"}  # fmt: skip


def name(path: Path) -> str:
    return str(path.relative_to(DOCS))


def blocks(path: Path) -> list[tuple[str, str, str]]:
    """(why it is not run, or nothing; language; code) of a page."""
    reason = NOT_RUN.get(name(path), "")
    return [(why or reason, language, code) for why, language, code in BLOCK.findall(path.read_text(encoding="utf-8"))]


RUN = [path for path in PAGES if any(not why and language != "text" for why, language, _ in blocks(path))]


@pytest.mark.parametrize("path", [p for p in PAGES if blocks(p)], ids=name)
def test_blocks_are_well_formed(path):
    for _, language, code in blocks(path):
        if language == "python":
            compile(code, name(path), "exec")
        elif language == "bash":
            done = subprocess.run(["bash", "-n"], input=code, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr


def run_shell(code: str, folder: Path) -> None:
    """Run a block of bash: our own commands here (a new process takes a second each), others in bash."""
    lines = [line for line in re.sub(r"\\\n\s*", " ", code).splitlines() if line.strip()]
    scripts = str(Path(sys.executable).parent)
    environment = os.environ | {"PATH": f"{scripts}:{os.environ['PATH']}"}
    for line in lines:
        if re.match(r"slacktide [^|>;&$]*$", line):
            assert main(shlex.split(line)[1:]) == 0, line
            continue
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", line], cwd=folder, env=environment,
                              capture_output=True, text=True, check=False)  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("path", RUN, ids=name)
def test_blocks_run(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    printed: set[str] = set()
    for why, language, code in blocks(path):
        file = re.match(r"# (\w+\.py)\n", code) if language == "python" else None
        if why:
            printed = set()
            continue
        if language == "text":
            shown = {" ".join(line.split()) for line in code.splitlines()}
            assert not printed or shown - printed == set()
            continue
        if file:
            (tmp_path / file[1]).write_text(code)
            monkeypatch.delitem(sys.modules, file[1].removesuffix(".py"), raising=False)
        elif language == "python":
            exec(compile(code, name(path), "exec"), {"__name__": "__main__"})
        else:
            run_shell(code, tmp_path)
        output = capsys.readouterr()
        assert "error" not in output.err
        printed = {" ".join(line.split()) for line in output.out.splitlines()}


def test_most_blocks_are_run():
    run = [code for path in RUN for why, language, code in blocks(path) if not why and language != "text"]
    assert len(run) >= 15


def slug(heading: str) -> str:
    """The anchor of a heading, as Python-Markdown's toc makes it."""
    text = re.sub(r"[^\w\s-]", "", re.sub(r"[`*]", "", heading)).strip().lower()
    return re.sub(r"[-\s]+", "-", text)


def anchors(path: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_lead_somewhere(path):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        to = (path.parent / target).resolve() if target else path
        if to.is_relative_to(DOCS) and name(to) in GENERATED:
            continue
        assert to.exists(), f"{name(path)}: {target}"
        assert not anchor or anchor in anchors(to), f"{name(path)}: {target}#{anchor}"


def load(script: str):
    spec = importlib.util.spec_from_file_location(script, ROOT / f"scripts/{script}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_hold_every_verb_policy_metric_and_preset():
    from slacktide.core.policy import names
    from slacktide.vllm.metrics import FAMILIES
    from slacktide.workload.slos import list_slo_presets

    pages = load("docs_hooks").pages()
    assert set(pages) == GENERATED
    for verb in VERBS:
        assert f"## slacktide {verb}\n" in pages["reference/cli.md"]
    for policy in names():
        assert f"## {policy}\n" in pages["reference/policies.md"]
    for metric in FAMILIES:
        assert f"`slacktide:{metric}" in pages["reference/server-metrics.md"]
    for preset in list_slo_presets():
        assert f"`{preset.name}`" in pages["reference/slos.md"]
    assert "--max-num-batched-tokens" in pages["reference/cli.md"]


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text()
    listed = set(re.findall(r"[\w/-]+\.md", text.partition("\nnav:")[2]))
    ours = {name(path) for path in PAGES if not name(path).startswith("decisions/")}
    assert ours - listed == set()


def test_pictures_are_there_and_used():
    used = {Path(target).name for path in PAGES for target in re.findall(r"!\[[^]]+\]\(([^)]+)\)", path.read_text())}
    assert used == {path.name for path in (DOCS / "assets").iterdir()}


def test_the_api_page_names_every_name():
    import slacktide

    text = (DOCS / "reference/api.md").read_text()
    shown = set(re.findall(r"\w+", " ".join(re.findall(r"^(?: +members: |::: ).*$", text, re.MULTILINE))))
    assert set(slacktide.__all__) - {"__version__"} - shown == set()


def test_pins_of_the_documents_lie_in_their_ranges():
    ranges = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["docs"]
    text = (ROOT / "requirements/docs.txt").read_text().replace("_", "-")
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", text, re.MULTILINE))
    for requirement in map(Requirement, ranges):
        assert pinned[requirement.name] in requirement.specifier


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="mkdocs is not installed here: `make docs` builds the site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    index = (tmp_path / "site/index.html").read_text()
    assert "https://fonts" not in index


def test_the_citation_names_this_version_and_licence():
    from slacktide import __version__

    text = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {__version__}\n" in text
    assert "\nlicense: Apache-2.0\n" in text
    yaml = pytest.importorskip("yaml")
    data = yaml.safe_load(text)
    assert {"cff-version", "message", "title", "authors"} <= set(data)
