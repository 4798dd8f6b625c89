"""Print a script that completes slacktide's verbs, flags and names on the TAB key, for bash or zsh.

For bash, put it where completions are found by themselves:
  slacktide completion bash > ~/.local/share/bash-completion/completions/slacktide
For zsh, into a file that ~/.zshrc reads with `source`:
  slacktide completion zsh > ~/.slacktide-completion.zsh

It holds this version's names of policies, profiles and traces: print it again after an update.

example:
  slacktide completion bash
"""

# A printed script, not argcomplete: nothing to install, and no Python to start at each press of TAB.

from __future__ import annotations

import argparse
import re

from slacktide.cli.output import emit

SHELLS = ("bash", "zsh")

LISTS = {"--policy": "policies", "--profile": "profiles", "--trace": "traces"}
"""Flags whose values have names; a comma-separated list completes its last item."""
POSITIONAL = {
    "policies": "policies",
    "cite": "policies profiles traces",
    "profiles": "profiles",
    "completion": "shells",
    "help": "verbs",
}
"""Verbs whose first word has a name."""

TEMPLATE = """# Completion of slacktide {version}; written by `slacktide completion`.
_slacktide() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" verb="${{COMP_WORDS[1]}}"
  local verbs={verbs} policies={policies} profiles={profiles} traces={traces} shells={shells}
  local words=""
  COMPREPLY=()
  if [[ $COMP_CWORD -eq 1 ]]; then
    COMPREPLY=($(compgen -W "$verbs --help --version" -- "$current"))
    return
  fi
  case "$verb $before" in
{values}
  esac
  if [[ -n $words ]]; then
    local head=""
    [[ $current == *,* ]] && head="${{current%,*}},"
    COMPREPLY=($(compgen -P "$head" -W "$words" -- "${{current##*,}}"))
    return
  fi
  if [[ $current == -* ]]; then
    case "$verb" in
{flags}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    return
  fi
  case "$verb" in
{positional}
  esac
  [[ -n $words ]] && COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _slacktide slacktide
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The shell."""
    parser.add_argument("shell", choices=SHELLS, help="shell to complete in")


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    text = script(args.shell)
    emit(args, "completion", {"shell": args.shell, "script": text}, lambda: print(text, end=""))
    return 0


def script(shell: str) -> str:
    """The script for a shell; zsh runs bash's through bashcompinit, which comes with zsh."""
    from slacktide import __version__
    from slacktide.cli.main import VERBS, load_verb, parser_of
    from slacktide.core.policy import names
    from slacktide.profiling.profiles import list_profiles
    from slacktide.workload.packaged import PACKAGED

    values, flags = [], []
    for verb in VERBS:
        options = parser_of(verb, load_verb(verb))._option_string_actions
        flags.append(f"      {verb}) words={_quoted(sorted(f for f in options if f.startswith('--')))} ;;")
        for flag, action in options.items():
            if flag in LISTS:
                values.append(f'    "{verb} {flag}") words="${LISTS[flag]}" ;;')
            elif action.choices is not None:
                values.append(f'    "{verb} {flag}") words={_quoted([str(choice) for choice in action.choices])} ;;')
    positional = [f'    {verb}) words="{_variables(lists)}" ;;' for verb, lists in POSITIONAL.items()]
    text = TEMPLATE.format(
        version=__version__, verbs=_quoted(list(VERBS)), policies=_quoted(names()), shells=_quoted(list(SHELLS)),
        profiles=_quoted([info.name for info in list_profiles()]), traces=_quoted([t.name for t in PACKAGED]),
        values="\n".join(values), flags="\n".join(flags), positional="\n".join(positional),
    )  # fmt: skip
    return text if shell == "bash" else f"autoload -U +X bashcompinit && bashcompinit\n{text}"


def _variables(lists: str) -> str:
    return " ".join(f"${name}" for name in lists.split())


def _quoted(words: list[str]) -> str:
    """Words in double quotes; none of ours needs an escape, and one that would is left out."""
    return '"' + " ".join(word for word in words if re.fullmatch(r"[\w./:=+-]+", word)) + '"'
