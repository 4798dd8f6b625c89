"""Every command in the documents and in the help texts is one that exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from slacktide.cli.main import VERBS, load_verb, main, parser_of

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")])
SHELL_BLOCK = re.compile(r"^```(?:bash|sh|shell|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    """Commands in the shell blocks of a document; a backslash at the end joins lines, `$ ` is a prompt."""
    found = []
    for block in SHELL_BLOCK.findall(text):
        lines = re.sub(r"\\\n\s*", " ", block).splitlines()
        found += [line.removeprefix("$ ").strip() for line in lines]
    return found


def check(command: str) -> None:
    """Raise when `command` is one of ours and would be refused before it does anything."""
    words = shlex.split(command, comments=True)
    for i, word in enumerate(words):
        if word in ("|", "&&", ";", ">"):
            words = words[:i]
            break
    if words[:1] == ["make"]:
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        for word in words[1:]:
            assert "=" in word or word.startswith("-") or word in targets, f"{command!r}: no target {word}"
    if words[:1] == ["slacktide"] and words[1:] not in ([], ["--help"], ["--version"]):
        assert words[1] in VERBS, f"{command!r}: no verb {words[1:2]}"
        if words[2:] != ["--help"]:
            parser_of(words[1], load_verb(words[1])).parse(words[2:])


def example(verb: str) -> str:
    """The command below `example:` in a verb's description."""
    text = load_verb(verb).__doc__ or ""
    match = re.search(r"^example:\n((?:  .*\n?)+)\Z", text.strip(), re.MULTILINE)
    assert match, f"the description of {verb} does not end with 'example:' and a command"
    return re.sub(r"\\\n\s*", " ", match[1]).strip()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_of_a_document_exist(path):
    for command in commands(path.read_text(encoding="utf-8")):
        check(command)


@pytest.mark.parametrize("text", ["slacktide nothing", "slacktide doctor --nothing", "make nothing"])
def test_a_command_that_does_not_exist_is_found(text):
    with pytest.raises((AssertionError, SystemExit)):
        check(commands(f"```bash\n{text}\n```\n")[0])


@pytest.mark.parametrize("verb", VERBS)
def test_example_of_a_verb_is_accepted(verb):
    command = example(verb)
    assert command.startswith(f"slacktide {verb}")
    check(command)


QUICK = ["cite", "compare", "completion", "doctor", "policies", "profiles", "simulate", "traces"]
"""Verbs whose examples need no file, no server and no more than some seconds."""


@pytest.mark.parametrize("verb", QUICK)
def test_example_of_a_quick_verb_works(verb, capsys):
    assert main(shlex.split(example(verb))[1:]) == 0
    assert capsys.readouterr().out
