"""Fit a latency model to measured steps, tell its error on steps it has not seen, and write a profile.

FILES are what `slacktide profile` measured, step logs of the plug-in, or detailed results of `vllm bench serve` (their
steps are read off the token times); several are fitted together. Settings that the files do not tell must be given.

example:
  slacktide fit steps.jsonl --num-gpu-blocks-override 12000 --block-size 16 --max-num-batched-tokens 2048 \\
    --max-num-seqs 256 --name my-gpu/my-model --out my-engine
"""

from __future__ import annotations

import argparse
from pathlib import Path

from slacktide.cli.output import out_dir
from slacktide.cli.profile import DIRECTORY, add_engine_facts, add_family, fit_and_tell


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="measured steps")
    parser.add_argument("--name", metavar="NAME", help="name of the profile (default: GPU and model)")
    add_family(parser)
    add_engine_facts(parser.add_argument_group("the engine (names as in `vllm serve`)"))


def run(args: argparse.Namespace) -> int:
    """Do it. Raises InputError."""
    args.out = args.out or DIRECTORY
    out_dir(args)
    return fit_and_tell(args, args.files, [])
