"""Start vLLM's OpenAI-compatible server with one of our policies as its scheduler.

Every flag that is not listed here goes to `vllm serve` as it is. The server listens on 127.0.0.1 unless --host says
otherwise. What was chosen (scheduler class, policy, targets) is printed first; then this process becomes vLLM's, so
that signals reach it directly: SIGINT and SIGTERM shut it down.

example:
  slacktide serve HuggingFaceTB/SmolLM2-135M-Instruct --slo ttft:2000,tbt:200 --max-num-seqs 64
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from slacktide.cli.output import to_json
from slacktide.errors import InputError

if TYPE_CHECKING:
    from slacktide.vllm.serve import Command, Wish

PASSES_ON = True
"""Arguments that are not ours are kept, in their order, in `args.rest` (see cli/main.py)."""

POLICY = "tide"
"""Policy unless another is named: it has nothing to tune (benchmarks/dominance: ahead of what is tuned)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.usage = "slacktide serve MODEL [arguments] [any vllm serve flag]"
    group = parser.add_argument_group("scheduling")
    group.add_argument("--policy", metavar="NAME", help=f"policy with its parameters (default: {POLICY})")
    group.add_argument(
        "--slo",
        metavar="LIST",
        help="targets of requests that bring none, in ms: ttft:2000,tbt:200; per class: 'ttft:2000;batch=e2el:600000'; "
        "presets and ttft:5x as in the simulator",
    )
    group.add_argument(
        "--profile",
        metavar="NAME",
        help="GPU and model as in the simulator: step times believed until they are measured (default: made up); "
        "ttft:5x needs one",
    )
    group.add_argument(
        "--mode",
        choices=("active", "shadow", "stock"),
        help="active (default); shadow: vLLM schedules, the policy decides beside it and is logged; stock: vLLM alone, "
        "to be switched later",
    )
    group.add_argument("--stock", action="store_true", help="vLLM's own scheduler, without ours: for comparisons")
    group = parser.add_argument_group("front end")
    group.add_argument(
        "--reject",
        type=int,
        choices=(429, 503),
        default=0,
        help="answer with this status and Retry-After when the predicted TTFT exceeds the target (default: off)",
    )
    group.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="NAME=FIELD",
        help="also take a request's FIELD (slo_ttft_ms, slo_tbt_ms, slo_e2el_ms, slo_class, tenant) from this header; "
        "x-llm-d-slo-ttft-ms and x-llm-d-slo-tpot-ms are known; may be repeated",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be started, and end")


def run(args: argparse.Namespace) -> int:
    """Become vLLM's server. Returns only after --dry-run."""
    from slacktide.vllm.serve import command, on_cpu

    rest = list(args.rest)
    if args.seed:
        rest += ["--seed", str(args.seed)]
    made = command(_wish(args), rest, os.environ, cpu=on_cpu(os.environ))
    if not args.dry_run:
        _start(args, made)
    _tell(args, made, None, sys.stdout)
    return 0


def _start(args: argparse.Namespace, made: Command) -> NoReturn:
    """Replace this process by vLLM's."""
    from slacktide.vllm.serve import MODULE, check_installed

    _tell(args, made, check_installed(), sys.stdout if args.json else sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    if args.json:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nothing but our document on standard output
    os.environ.update(made.environment)
    os.execv(sys.executable, [sys.executable, "-m", MODULE, *made.arguments])


def _wish(args: argparse.Namespace) -> Wish:
    """What was asked of us. Raises InputError."""
    from slacktide.vllm.serve import Wish

    slo, classes = _targets(args.slo)
    headers = {}
    for text in args.header:
        name, equals, to = (part.strip() for part in text.partition("="))
        if not equals or not name or not to:
            raise InputError(f"--header {text!r}: expected NAME=FIELD, e.g. x-tenant=tenant")
        headers[name] = to
    given = "--additional-config" in " ".join(args.rest).replace("_", "-")
    policy = args.policy or (None if args.stock or given else POLICY)
    return Wish(policy, slo, classes, args.mode, args.profile, args.stock, args.reject, headers)


def _targets(text: str | None) -> tuple[str | None, dict[str, str]]:
    """(default targets, targets by class) in ms, presets and units spelt out: the command shows what will hold."""
    if text is None:
        return None, {}
    from slacktide.vllm.targets import spelt
    from slacktide.workload.slos import parse_slos

    slos = parse_slos(text)
    default = spelt(slos.default) if slos.default else None
    return default, {name: spelt(spec) for name, spec in slos.by_class.items()}


def _tell(args: argparse.Namespace, made: Command, version: str | None, out: Any) -> None:
    """Print what was chosen."""
    from slacktide.vllm.serve import MODULE

    words = ["python", "-m", MODULE, *made.arguments]
    if args.json:
        out.write(to_json({"vllm": version, **made.chosen, "environment": made.environment, "command": words}))
        return
    chosen = made.chosen
    lines = [f"vLLM: {version}"] if version else []
    if args.stock:
        lines.append("scheduler: vLLM's own")
    else:
        because = chosen["synchronous_because"]
        lines += [
            f"scheduler: {chosen['scheduler']}" + (f" (synchronous: {because})" if because else ""),
            f"policy: {chosen['policy']}" + ("" if chosen["mode"] == "active" else f", mode {chosen['mode']}"),
            f"slo: {_words(chosen['slo'])}",
            *(f"slo of class {name}: {_words(slo)}" for name, slo in chosen["classes"].items()),
        ]
    if chosen["reject"]:
        lines.append(f"reject: {chosen['reject']} when the predicted TTFT exceeds the target")
    lines += [f"listens on: {chosen['listens']}"]
    lines += [f"environment: {name}={shlex.quote(value)}" for name, value in made.environment.items()]
    lines.append(f"command: {shlex.join(words)}")
    print("\n".join(f"slacktide: {line}" for line in lines), file=out)


def _words(slo: dict[str, float | str]) -> str:
    words = [
        f"{name} {value} the prompt's time alone" if isinstance(value, str) else f"{name} {value:g} ms"
        for name, value in slo.items()
    ]
    return ", ".join(words) or "none"
