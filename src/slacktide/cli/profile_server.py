"""The part of `slacktide profile` that measures a running server: designed loads out, steps in."""

from __future__ import annotations

import argparse
import json
import re
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slacktide.cli.output import progress
from slacktide.errors import InputError

if TYPE_CHECKING:
    import numpy as np

    from slacktide.loadgen.replay import Replay, Target
    from slacktide.profiling.blackbox import Load

SETTLE = 1.5
"""Seconds after a load until its last steps are in the step log: the plug-in writes twice a second."""
LEAST_SECONDS = 4.0
"""Of a load: below, there is no steady state to look at."""
NEEDED = ("max_num_batched_tokens", "max_num_seqs", "max_model_len")


def measure_server(args: argparse.Namespace, path: Path) -> list[str]:
    """Send the loads, write the steps. Returns notes. Raises InputError."""
    from slacktide.cli.profile import given_facts
    from slacktide.loadgen.replay import Target
    from slacktide.profiling.blackbox import loads

    target = Target(args.url, model=args.served_model, send_slo=False, vocabulary=args.vocab_size)
    engine = server_facts(target) | {key: value for key, value in given_facts(args).items() if value is not None}
    missing = [name for name in NEEDED if engine.get(name) is None]
    if missing:
        flags = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise InputError(f"--url {args.url}: the server does not tell {', '.join(missing)}: give {flags}")
    designed = loads(engine["max_num_batched_tokens"], engine["max_num_seqs"], engine["max_model_len"], args.seed)
    old = _resumed(path, engine)
    seconds = max(args.minutes * 60.0 / len(designed), LEAST_SECONDS)
    frontend: list[float] = list(old["frontend"])
    lines = old["lines"]
    _replay(target, designed[0], 2.0, args.seed)  # warm-up
    with progress(args, len(designed), "loading") as advance:
        for number, load in enumerate(designed):
            if number not in old["loads"]:
                found, waits = _one(args, target, load, seconds, number, engine["max_num_batched_tokens"])
                lines += [line | {"load": number} for line in found]
                frontend += waits
                _write(path, args, engine, frontend, lines)
            advance(1)
    kind = "the engine's step log" if args.step_log else "token times that clients saw: front end and network in them"
    return [f"steps from {kind}"]


def _one(
    args: argparse.Namespace, target: Target, load: Load, seconds: float, number: int, budget: int
) -> tuple[list[dict[str, Any]], list[float]]:
    """(lines of steps, seconds between client and engine of lone requests) of one load."""
    import numpy as np

    from slacktide.core.shape import FIELD_NAMES
    from slacktide.loadgen.client import clock
    from slacktide.profiling.blackbox import steps_from_tokens

    offset = time.time() - clock()
    began = time.time()
    replayed = _replay(target, load, seconds, args.seed + number)
    sent = np.array([o.sent for o in replayed.outcomes])
    here = np.isfinite(sent)
    tokens = [np.array(o.token_times) for o, on in zip(replayed.outcomes, here, strict=True) if on]
    sent, prompt = sent[here], load.prompt[here]
    if args.step_log is None:
        shapes, times = steps_from_tokens(sent, prompt, tokens, budget)
        rows = [
            {"duration_s": float(t), **dict(zip(FIELD_NAMES, map(float, shape), strict=True))}
            for t, shape in zip(times, shapes, strict=True)
        ]
        return rows, []
    time.sleep(SETTLE)
    lines = [line for line in log_lines(args.step_log) if line.get("start", 0.0) >= began]
    if not lines:
        raise InputError(
            f"--step-log {args.step_log}: no new step in it during a load; is it the log of the server at {args.url}? "
            "(slacktide.step_log in --additional-config)"
        )
    waits = _frontend(lines, sent + offset, tokens, offset) if load.concurrency == 1 else []
    return lines, waits


def _frontend(lines: list[dict[str, Any]], sent: np.ndarray[Any, Any], tokens: list[Any], offset: float) -> list[float]:
    """What each lone request waited for its first token beyond its steps."""
    found = []
    for at, times in zip(sent, tokens, strict=True):
        if not len(times):
            continue
        first = times[0] + offset
        steps = [line for line in lines if at <= line["start"] <= first and line.get("num_prefills", 0) > 0]
        if steps:
            found.append(float(first - at - sum(line["duration_s"] for line in steps)))
    return found


def _replay(target: Target, load: Load, seconds: float, seed: int) -> Replay:
    import numpy as np

    from slacktide.loadgen.replay import Limits, replay
    from slacktide.workload.requests import ClosedLoop, Workload

    work = Workload(
        arrival_time=np.zeros(len(load.prompt)),
        num_prompt_tokens=load.prompt,
        num_output_tokens=load.output,
        closed=ClosedLoop(load.concurrency),
    )
    return replay(work, target, Limits(max_duration=seconds), num_warmups=1, seed=seed)


def log_lines(path: Path) -> list[dict[str, Any]]:
    """Lines of a step log and of its youngest rotated file."""
    from slacktide.profiling.measurements import read_lines

    found: list[dict[str, Any]] = []
    for name in (path.with_name(path.name + ".1"), path):
        if name.exists():
            found += read_lines(name)
    return found


def server_facts(target: Target) -> dict[str, Any]:
    """What a server tells of its engine: /v1/models, and vLLM's cache_config_info in /metrics. Raises InputError."""
    import asyncio

    from slacktide.loadgen.client import open_session
    from slacktide.loadgen.replay import describe

    async def ask() -> tuple[str, int | None]:
        async with open_session(target.url, target.headers) as session:
            return await describe(session, target)

    model, longest = asyncio.run(ask())
    facts: dict[str, Any] = {"kind": "server", "model": model.rstrip("/").rpartition("/")[2], "max_model_len": longest}
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            target.path("/metrics"), timeout=10
        ) as answer:
            text = answer.read().decode("utf-8", "replace")
    except (urllib.error.URLError, OSError, ValueError):
        return facts
    info = re.search(r"vllm:cache_config_info\{([^}]*)\}", text)
    for name, value in re.findall(r'(\w+)="([^"]*)"', info[1]) if info else []:
        if name in ("num_gpu_blocks", "block_size") and value.isdecimal():
            facts[name] = int(value)
        if name == "enable_prefix_caching":
            facts[name] = value == "True"
    return facts


def _resumed(path: Path, engine: dict[str, Any]) -> dict[str, Any]:
    """Loads, lines and waits of an earlier run on the same server."""
    from slacktide.profiling.measurements import read_lines

    if not path.exists():
        return {"loads": set(), "lines": [], "frontend": []}
    lines = read_lines(path)
    if not lines or lines[0].get("kind") != "traffic":
        raise InputError(f"{path}: not a file of slacktide profile --url; name another --out")
    before = {k: v for k, v in lines[0]["facts"].get("engine", {}).items() if k != "frontend_ms"}
    if before != engine:
        changed = ", ".join(sorted(k for k in {**before, **engine} if before.get(k) != engine.get(k)))
        raise InputError(f"{path}: measured on another engine ({changed} differ); name another --out, or remove it")
    loads = {line["load"] for line in lines[1:] if "load" in line}
    return {"loads": loads, "lines": lines[1:], "frontend": lines[0].get("waits", [])}


def _write(
    path: Path, args: argparse.Namespace, engine: dict[str, Any], waits: list[float], lines: list[dict[str, Any]]
) -> None:
    import numpy as np

    from slacktide.profiling.machine import hardware, versions

    told = dict(engine)
    if waits:
        told["frontend_ms"] = round(max(float(np.median(waits)), 0.0) * 1e3, 3)
    facts = {"engine": told, "versions": versions(), "hardware": hardware()}
    head = {"format": 1, "kind": "traffic", "whole": args.step_log is None, "waits": waits, "facts": facts}
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in [head, *lines]), "utf-8")
    partial.replace(path)
