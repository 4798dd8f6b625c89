"""`slacktide completion`: the script is asked in a real bash."""

from __future__ import annotations

import shlex
import shutil
import subprocess

import pytest

from slacktide.cli.completion import script
from slacktide.cli.main import VERBS, main
from slacktide.core.policy import names

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """What TAB offers after a line."""
    path = tmp_path_factory.mktemp("completion") / "script"
    path.write_text(script("bash"))

    def offered(line: str) -> list[str]:
        words = line.split(" ")
        code = f"source {path}; COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; _slacktide; "
        code += 'printf "%s\\n" "${COMPREPLY[@]}"'
        done = subprocess.run(["bash", "--norc", "-c", code], capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return done.stdout.split()

    return offered


def test_verbs(ask):
    assert set(VERBS) <= set(ask("slacktide "))
    assert ask("slacktide comp") == ["compare", "completion"]


def test_flags_of_a_verb(ask):
    assert "--max-num-seqs" in ask("slacktide compare --max")
    assert "--max-num-seqs" not in ask("slacktide policies --")
    assert ask("slacktide serve --dry") == ["--dry-run"]


def test_names_of_policies_profiles_and_traces(ask):
    assert set(names()) <= set(ask("slacktide compare --policy "))
    assert ask("slacktide goodput --policy vllm-v1,sarathi-e") == ["vllm-v1,sarathi-edf"]
    assert "h100/llama-3-8b" in ask("slacktide simulate --profile h100/")
    assert ask("slacktide compare --trace azure-co") == ["azure-conv", "azure-code"]
    assert ask("slacktide compare --slo-mode g") == ["gap"]
    assert ask("slacktide policies slid") == ["sliding"]
    assert "azure-conv" in ask("slacktide cite azure")
    assert ask("slacktide completion z") == ["zsh"]


def test_elsewhere_files_are_left_to_the_shell(ask):
    assert ask("slacktide report ") == []
    assert "complete -o default" in script("bash")


def test_zsh_runs_the_same_through_bashcompinit():
    first, _, rest = script("zsh").partition("\n")
    assert first == "autoload -U +X bashcompinit && bashcompinit"
    assert rest == script("bash")


def test_an_unknown_shell_is_refused(capsys):
    assert main(["completion", "ksh"]) == 2
    assert "'bash', 'zsh'" in capsys.readouterr().err


def test_the_first_steps_are_commands_that_exist(capsys):
    import re

    from slacktide.cli.main import FIRST_STEPS, load_verb, parser_of

    assert main([]) == 2
    assert FIRST_STEPS in capsys.readouterr().err
    text = re.sub(r"\\\n\s*", " ", FIRST_STEPS)
    commands = [line.strip() for line in text.splitlines() if line.startswith("  slacktide ")]
    assert len(commands) == 3
    for command in commands:
        _, verb, *rest = shlex.split(command)
        parser_of(verb, load_verb(verb)).parse(rest)
