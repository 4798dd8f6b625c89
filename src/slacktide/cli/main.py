"""Dispatch: the first argument is a verb, and only that verb's module is imported.

A verb is a module with `add_arguments(parser)`, `run(args) -> int` (the exit status) and a docstring whose last
paragraph is `example:` and a command that works, indented. To add one: write the module and name it in `VERBS`.

Exit status: 0 done, 1 the command ran and says no (a failed check), 2 input the user can mend (one line on standard
error), 130 interrupted, 141 the reader of our output went away.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import io
import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, Protocol, cast

from slacktide import __version__
from slacktide.errors import InputError, unknown_name

VERBS: dict[str, tuple[str, str]] = {
    "compare": ("slacktide.cli.compare", "simulate several policies on the same requests, in one table"),
    "simulate": ("slacktide.cli.simulate", "simulate one policy"),
    "goodput": ("slacktide.cli.goodput", "find the highest rate at which each policy meets the SLO"),
    "bound": ("slacktide.cli.bound", "tell the highest rate that any policy could reach, for comparison"),
    "sweep": ("slacktide.cli.sweep", "simulate a grid of settings and policies, on all cores"),
    "advise": ("slacktide.cli.advise", "prompts and decodes in one step or apart? for a GPU, model, load"),
    "serve": ("slacktide.cli.serve", "start vLLM's server with one of our policies as its scheduler"),
    "bench": ("slacktide.cli.bench", "replay a trace against an OpenAI-compatible server, and judge it"),
    "profile": ("slacktide.cli.profile", "measure an engine; write the profile that the simulator runs on"),
    "fit": ("slacktide.cli.fit", "fit a latency model to measured steps or benchmark results"),
    "validate": ("slacktide.cli.validate", "how far is the simulator from a real engine? one trace on both"),
    "top": ("slacktide.cli.top", "watch a running server in the terminal"),
    "report": ("slacktide.cli.report", "print a result: ours, or a detailed one of vllm bench"),
    "policies": ("slacktide.cli.policies", "list the scheduling policies and their parameters"),
    "profiles": ("slacktide.cli.profiles", "list the GPU and model profiles, with their sources"),
    "traces": ("slacktide.cli.traces", "list the packaged traces, with their sources"),
    "cite": ("slacktide.cli.cite", "print the papers and data behind policies, profiles or a result"),
    "completion": ("slacktide.cli.completion", "print a script that completes our commands in bash or zsh"),
    "doctor": ("slacktide.cli.doctor", "check versions, vLLM and what this machine can run"),
}
"""Verb: its module and one line of help. Ordered as the help prints them."""

EXIT_INPUT, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 2, 130, 141  # 128 + SIGINT, 128 + SIGPIPE, as shells report them


_OUTPUT_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EBADF, errno.EIO)
"""What a write to standard output fails with: disk or quota full, file too large, opened for reading, terminal gone."""


class Verb(Protocol):
    """What a verb's module offers."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's arguments."""
        ...

    def run(self, args: argparse.Namespace) -> int:
        """Do it; returns the exit status. Raises InputError for what the user can mend."""
        ...


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line with near names, and whose flags are never abbreviated.

    Abbreviations would change their meaning with every flag that is added. Dashes and underscores in a flag's name
    are one, as in vLLM (`--max_num_seqs` is `--max-num-seqs`).
    """

    def __init__(self, prog: str, description: str, *, passes_on: bool = False) -> None:
        self._passes_on = passes_on
        super().__init__(
            prog=prog,
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with status 2."""
        line = " ".join(message.split())
        self.exit(EXIT_INPUT, f"{self.prog}: error: {line} (see '{self.prog} --help')\n")

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse, or exit: 0 after help, 2 with one line on a mistake."""
        mine, rest = self._divided(arguments) if self._passes_on else (list(arguments), [])
        given = [_dashed(argument) for argument in mine]
        args, unknown = self.parse_known_args(given)
        if self._passes_on:
            args.rest = rest
        if unknown:
            name = unknown[0].partition("=")[0]
            near = difflib.get_close_matches(name, self._option_string_actions, n=2, cutoff=0.6)
            hint = f": did you mean {' or '.join(near)}?" if near and name.startswith("-") else ""
            self.error(f"unknown argument {unknown[0]!r}{hint}")
        return args

    def _divided(self, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
        """(those this parser knows, all others as they are), for a verb that hands arguments on to another program."""
        mine: list[str] = []
        rest: list[str] = []
        waiting = iter(arguments)
        for argument in waiting:
            name = _dashed(argument).partition("=")[0]
            action = self._option_string_actions.get(name) if argument.startswith("-") else None
            (rest if action is None else mine).append(argument)
            if action is not None and action.nargs != 0 and "=" not in argument:
                mine += [value for value in [next(waiting, None)] if value is not None]
        return mine, rest


def _dashed(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def _top_help() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {verb:<{width}}  {line}" for verb, (_, line) in VERBS.items())
    return f"""usage: slacktide VERB [arguments]

Schedules LLM inference: which requests get how many tokens in every step.

verbs:
{verbs}

  slacktide VERB --help   arguments of a verb, with an example
  slacktide --version     version of slacktide

Every verb takes --json (one JSON document on standard output), --out DIR,
--seed N and --quiet.
"""


FIRST_STEPS = """Where to start (no GPU needed):

  # which scheduler serves this trace best on this GPU?
  slacktide compare --trace azure-conv --num-prompts 1000 --rate 19 \\
    --profile h100/llama-3-8b --slo ttft:1000,tbt:50 \\
    --policy vllm-v1,sliding,tide
  # how many requests per second does each carry within its targets?
  slacktide goodput --trace azure-conv --num-prompts 1000 \\
    --profile h100/llama-3-8b --slo ttft:1000,tbt:50 --policy vllm-v1,tide
  # what can this machine run: vLLM, the plug-in, figures?
  slacktide doctor

"""
"""What to do next, for who types `slacktide` alone."""


def _dispatch(given: list[str]) -> int:
    if not given:
        # Not 0: a script whose variable for the verb came out empty must not pass for a success.
        print(FIRST_STEPS + _top_help(), end="", file=sys.stderr)
        return EXIT_INPUT
    name, rest = given[0], given[1:]
    if name in ("--help", "-h", "help"):
        if name == "help" and rest:
            return _dispatch([rest[0], "--help"])
        print(_top_help(), end="")
        return 0
    if name in ("--version", "-V"):
        print(f"slacktide {__version__}")
        return 0
    if name not in VERBS:
        raise unknown_name("verb", name, VERBS, "('slacktide --help' lists them)")
    verb = load_verb(name)
    args = parser_of(name, verb).parse(rest)
    args.command = command_line(name, rest)
    return verb.run(args)


# Flags about where results go, and how fast: a command that is repeated elsewhere names its own. Value: takes an
# argument?
_PLACES = {
    "--json": False, "--quiet": False, "--out": True, "--html": True, "--timeline": True, "--window": True,
    "--explain": True, "--run": True, "--jobs": True,
}  # fmt: skip


def command_line(name: str, rest: Sequence[str]) -> str:
    """The command that repeats a run, for its record: as it was typed, without the flags about its output."""
    kept, waiting = ["slacktide", name], iter(rest)
    for argument in waiting:
        flag, equals, _ = argument.partition("=")
        if flag not in _PLACES:
            kept.append(argument)
        elif _PLACES[flag] and not equals:
            next(waiting, None)
    return shlex.join(kept)


def load_verb(name: str) -> Verb:
    """Import the module of a verb that is in `VERBS`."""
    return cast("Verb", importlib.import_module(VERBS[name][0]))


def _filled(description: str) -> str:
    """A description in lines that fit the terminal; its commands, which are indented, are broken before a flag."""
    width = max(40, shutil.get_terminal_size().columns - 2)  # argparse's own, for the flags below it

    def command(line: str) -> str:
        lines = [""]
        for part in re.split(r" (?=--|> )", line):
            if lines[-1] and len(lines[-1]) + len(part) + 3 > width:
                lines.append("   ")
            lines[-1] += f" {part}" if lines[-1] else part
        return " \\\n".join(lines)

    def paragraph(text: str) -> str:
        if "\n " not in text:
            return textwrap.fill(text, width, break_on_hyphens=False)
        if max(map(len, text.splitlines())) <= width:
            return text
        return "\n".join(map(command, text.replace(" \\\n    ", " ").splitlines()))

    return "\n\n".join(map(paragraph, description.strip().split("\n\n")))


def parser_of(name: str, verb: Verb) -> OneLineParser:
    """The parser of a verb, with the arguments that every verb has."""
    from slacktide.cli.options import add_common

    passes_on = getattr(verb, "PASSES_ON", False)
    parser = OneLineParser(f"slacktide {name}", _filled(verb.__doc__ or ""), passes_on=passes_on)
    verb.add_arguments(parser)
    add_common(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line on `arguments` (default: the process's) and return the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    _open_streams()
    try:
        for argument in given:
            _check_text(argument)
        status = _dispatch(given)
        sys.stdout.flush()
    except InputError as error:
        return _complain(str(error))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # What is left in the buffer would raise once more at exit: let it go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except OSError as error:
        if error.errno == errno.ENOENT and _is_nowhere():
            return _complain("the current directory does not exist any more: change to another one")
        # A path the user named, or an output that takes no more; any other is a defect of ours and keeps its traceback.
        if error.filename is None and error.errno not in _OUTPUT_ERRORS:
            raise
        return _complain(f"{error.filename or 'output'}: {error.strerror}")
    except SystemExit as stop:  # argparse ends this way, after help (0) or an error (2)
        return stop.code if isinstance(stop.code, int) else EXIT_INPUT
    return status


def _is_nowhere() -> bool:
    """Somebody removed the directory that we are in."""
    try:
        os.getcwd()  # noqa: PTH109 - that it may fail is the point
    except OSError:
        return True
    return False


def _open_streams() -> None:
    """Standard streams that take whatever we print: a closed one swallows it, an ASCII one gets escapes."""
    nowhere = Path(os.devnull)
    if sys.stdout is None:
        sys.stdout = nowhere.open("w", encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = nowhere.open("w", encoding="utf-8")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _check_text(argument: str) -> None:
    """Names stand in results, which are UTF-8. Raises InputError for bytes that are none."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        named = argument.encode("utf-8", "backslashreplace").decode()
        raise InputError(f"argument {named}: not UTF-8; rename the file or directory, or set a UTF-8 locale") from None


def _complain(message: str) -> int:
    print(f"slacktide: error: {message}", file=sys.stderr)
    return EXIT_INPUT


def entry() -> NoReturn:
    """The console script."""
    sys.exit(main())
