"""Arguments that verbs share. Names are those of `vllm serve` and `vllm bench serve` wherever vLLM has one.

Engine settings that are not given stay out of `engine_settings`, so that the profile's defaults hold.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from slacktide.errors import InputError

if TYPE_CHECKING:
    from slacktide.core.spec import PolicySpec


MAX_FACTOR = 1000.0
"""Mixed steps a thousand times as slow as their parts: no GPU; measured ones are within 2."""


MAX_WAIT = 1e9
"""Seconds (31 years) of a timeout or pause: beyond about 9e9 the system's timers overflow."""


MAX_TOKENS = 10_000_000
"""Longest prompt or output, as in traces (workload.requests)."""


class Invalid(argparse.ArgumentTypeError, ValueError):
    """A value that cannot be read; argparse shows its message, and so does the reader of policy parameters."""


# ---- values ----------------------------------------------------------------------------------------------------------


def count(text: str) -> int:
    """A whole number of at least 1, also as vLLM writes them: 8k = 8000, 8K = 8192."""
    return _whole(text, least=1)


def count_or_zero(text: str) -> int:
    """A whole number of at least 0."""
    return _whole(text, least=0)


def _whole(text: str, least: int) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", text.strip().replace("_", ""))
    if match is None:
        raise Invalid(f"expected a whole number of at least {least}, found {text!r}")
    scale = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}[match[2]]
    if "." not in match[1]:  # exactly, however many digits
        value = int(match[1]) * scale
    else:
        exact = Decimal(match[1]) * scale  # in decimals, as it is written: 1.005 * 1000 in binary is not 1005
        if exact != int(exact):
            raise Invalid(f"expected a whole number, found {text!r} = {exact:f}")
        value = int(exact)
    if not least <= value < 2**62:  # beyond, int64 columns would overflow
        raise Invalid(f"expected a whole number of at least {least}, found {text!r}")
    return value


def number(text: str) -> float:
    """A finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise Invalid(f"expected a number, found {text!r}")
    return value


def positive(text: str) -> float:
    """A finite number above 0."""
    value = number(text)
    if value <= 0:
        raise Invalid(f"expected a number above 0, found {text!r}")
    return value


def tokens(text: str) -> float:
    """A mean number of tokens: from 1 to 10 million."""
    value = number(text)
    if not 1 <= value <= MAX_TOKENS:
        raise Invalid(f"expected tokens from 1 to {MAX_TOKENS:,}, found {text!r}")
    return value


def seconds(text: str) -> float:
    """Seconds above 0, at most 31 years: what clocks and timers take."""
    value = positive(text)
    if value > MAX_WAIT:
        raise Invalid(f"expected seconds above 0, at most {MAX_WAIT:g}, found {text!r}")
    return value


def rate(text: str) -> float:
    """Requests per second: above 0, or `inf` = everything at once."""
    return math.inf if text.strip().lower() == "inf" else positive(text)


def share(text: str) -> float:
    """A number from 0 to 1."""
    value = number(text)
    if not 0 <= value <= 1:
        raise Invalid(f"expected a share from 0 to 1, found {text!r}")
    return value


def share_above_zero(text: str) -> float:
    """A number above 0, up to 1."""
    value = share(text)
    if value == 0:
        raise Invalid(f"expected a share above 0, up to 1, found {text!r}")
    return value


def share_below_one(text: str) -> float:
    """A number from 0, below 1."""
    value = share(text)
    if value == 1:
        raise Invalid(f"expected a share from 0, below 1, found {text!r}")
    return value


def switch(text: str) -> bool:
    """True or false, for a switch written as a policy parameter."""
    words = {"true": True, "on": True, "yes": True, "1": True, "false": False, "off": False, "no": False, "0": False}
    if text.lower() not in words:
        raise Invalid(f"expected true or false, found {text!r}")
    return words[text.lower()]


def factor(text: str) -> float:
    """A number from 1 to 1000."""
    value = number(text)
    if not 1 <= value <= MAX_FACTOR:
        raise Invalid(f"expected a number from 1 to {MAX_FACTOR:g}, found {text!r}")
    return value


def path(text: str) -> Path:
    """A path; the empty text, which an unset variable of a script gives, would be the current directory."""
    if not text.strip():
        raise Invalid("expected a path, found nothing; write . for the current directory")
    return Path(text)


def depth(text: str) -> int:
    """Pipeline depth, 1 or 2."""
    if text not in ("1", "2"):
        raise Invalid(f"expected 1 or 2, found {text!r}")
    return int(text)


# ---- engine ----------------------------------------------------------------------------------------------------------


class EngineFlag(NamedTuple):
    """One setting of the engine."""

    read: Callable[[str], Any]
    metavar: str
    help: str


ENGINE_FLAGS: dict[str, EngineFlag] = {
    "max_num_batched_tokens": EngineFlag(count, "N", "token budget of a step"),
    "max_num_seqs": EngineFlag(count, "N", "most running requests"),
    "max_model_len": EngineFlag(count, "N", "longest prompt and output together, in tokens"),
    "block_size": EngineFlag(count, "N", "tokens of a KV block"),
    "num_gpu_blocks_override": EngineFlag(count, "N", "KV blocks, instead of those that fit the memory"),
    "gpu_memory_utilization": EngineFlag(share_above_zero, "SHARE", "share of the GPU's memory to use"),
    "enable_prefix_caching": EngineFlag(switch, "", "reuse the KV blocks of common prefixes"),
    "watermark": EngineFlag(share_below_one, "SHARE", "share of the KV blocks that an admission leaves free"),
    "long_prefill_token_threshold": EngineFlag(
        count_or_zero, "N", "most tokens of one prompt in a step, 0 = no such limit"
    ),
    "pipeline_depth": EngineFlag(depth, "{1,2}", "2 = async scheduling: decisions are one step stale"),
}
"""Settings by the name they have in a record and as a policy parameter; the flag has dashes."""


def add_engine(parser: argparse.ArgumentParser) -> None:
    """The engine's settings; what is not given has the profile's default."""
    group = parser.add_argument_group("engine (names and meaning as in `vllm serve`; defaults are the profile's)")
    for name, flag in ENGINE_FLAGS.items():
        option = "--" + name.replace("_", "-")
        if flag.read is switch:
            group.add_argument(option, action=argparse.BooleanOptionalAction, default=None, help=flag.help)
        else:
            group.add_argument(option, type=flag.read, metavar=flag.metavar, help=flag.help)


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The engine settings that were given, by name."""
    return {name: value for name in ENGINE_FLAGS if (value := getattr(args, name)) is not None}


# ---- policies --------------------------------------------------------------------------------------------------------


def add_policy(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """`--policy`, repeatable; read it with `policies`."""
    parser.add_argument(
        "--policy",
        action="append",
        required=required,
        metavar="LIST",
        help="policies with their parameters, e.g. vllm-v1,sliding:window=3; 'all' for every one; may be repeated",
    )


def policies(args: argparse.Namespace) -> list[PolicySpec]:
    """The policies of `--policy`; an engine setting among their parameters overrides the flag. Raises InputError."""
    from slacktide.core.spec import parse_policies

    return parse_policies(args.policy or [], {name: flag.read for name, flag in ENGINE_FLAGS.items()})


# ---- load and targets ------------------------------------------------------------------------------------------------


def add_load(parser: argparse.ArgumentParser, *, rates: bool = True, profile: bool = True) -> None:
    """Trace, profile, and how requests arrive. `rates` False: for verbs that choose the rate themselves; `profile`
    False: for verbs that measure a real server."""
    group = parser.add_argument_group("load")
    group.add_argument(
        "--trace",
        required=True,
        metavar="NAME|FILE|SPEC",
        help="a packaged trace ('slacktide traces'), a file, or synthetic:prompt=512,output=256,...",
    )
    group.add_argument(
        "--read",
        metavar="LIST",
        help="how a trace file is read: format=, time_unit=s|ms|us|ns, hash_block_size=, failed_output_tokens=, "
        "default_output_tokens=, drop_empty=true, tokenizer=, first_turn_only=true",
    )
    if profile:
        group.add_argument(
            "--profile",
            required=True,
            metavar="NAME",
            help="GPU and model, e.g. h100/llama-3-8b ('slacktide profiles')",
        )
    if rates:
        group.add_argument(
            "--rate",
            "--request-rate",
            dest="rate",
            type=rate,
            metavar="R",
            help="requests per second; a trace's own times are rescaled to it (default: the trace's own rate)",
        )
    group.add_argument(
        "--arrival",
        default="trace",
        metavar="PROCESS",
        help="trace, poisson, gamma, onoff, ramp or closed, with its parameters: onoff:on=10,off=20,ratio=4 "
        "(default: trace, or poisson for data without times)",
    )
    group.add_argument(
        "--burstiness",
        type=positive,
        metavar="B",
        help="gamma arrivals of this shape: 1 = Poisson, below 1 = burstier",
    )
    group.add_argument("--num-prompts", type=count, metavar="N", help="how many requests (default: the trace's)")
    group.add_argument("--max-concurrency", type=count, metavar="N", help="most requests in the system at once")


def arrival(args: argparse.Namespace) -> str:
    """The arrival process as `workload.arrivals.parse_arrival` reads it: `--burstiness` alone means gamma, as in
    `vllm bench serve`. Raises InputError when both cannot hold."""
    kind: str = args.arrival
    if args.burstiness is None:
        return kind
    if kind not in ("trace", "poisson", "gamma"):
        raise InputError(f"--burstiness {args.burstiness:g} does not go with --arrival {kind}: leave one out")
    return f"gamma:burstiness={args.burstiness:g}"


def add_targets(parser: argparse.ArgumentParser) -> None:
    """The latency target and how requests are judged by it."""
    group = parser.add_argument_group("target")
    group.add_argument(
        "--slo",
        metavar="LIST",
        help="milliseconds, e.g. ttft:500,tbt:50,e2el:5000; ttft:5x = times the isolated prefill; or a preset's name",
    )
    group.add_argument(
        "--slo-mode",
        choices=("deadline", "gap"),
        default="deadline",
        help="later tokens are judged by their deadline, or each by its gap to the one before (default: deadline)",
    )
    group.add_argument(
        "--late-tolerance",
        type=share_below_one,
        default=0.0,
        metavar="SHARE",
        help="share of a request's tokens that may be late (default: 0)",
    )


def add_save(parser: argparse.ArgumentParser) -> None:
    """`--save-detailed`, as in `vllm bench serve`."""
    parser.add_argument("--save-detailed", action="store_true", help="add the arrays of every request to the results")


# ---- every verb ------------------------------------------------------------------------------------------------------


def add_common(parser: argparse.ArgumentParser) -> None:
    """What every verb takes. Called by the dispatcher, not by verbs."""
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="one JSON document on standard output, nothing else there")
    group.add_argument("--out", type=path, metavar="DIR", help="write the results into this directory as well")
    group.add_argument(
        "--seed", type=count_or_zero, default=0, metavar="N", help="seed of everything random (default: 0)"
    )
    group.add_argument("--quiet", action="store_true", help="no progress bar")
