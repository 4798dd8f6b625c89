"""Requests from length distributions (`synthetic:prompt=512,output=256`) and mixtures of traces
(`mix:sharegpt*3+arxiv*1`). Neither has times: both need a rate or an arrival process.

`synthetic:` takes prompt=, output= (see `lengths.py`), or lengths=NAME (rows of a packaged length table);
n= requests (1000), max_prompt=, max_output=. `mix:` takes NAME*WEIGHT joined by +, then n=; each request gets the
name of its part as SLO class, so that `--slo "sharegpt=ttft:5x,tbt:40;arxiv=ttft:10x,tbt:80"` fits it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from slacktide.core.types import IntArray
from slacktide.errors import InputError, unknown_name
from slacktide.workload.formats.base import Trace
from slacktide.workload.lengths import parse_lengths
from slacktide.workload.packaged import PACKAGED
from slacktide.workload.requests import MAX_REQUEST_TOKENS
from slacktide.workload.rng import stream
from slacktide.workload.specs import check_keys, parse_number, parse_whole, split_spec

DEFAULT_REQUESTS = 1000
"""As `--num-prompts` in `vllm bench serve`."""

MAX_REQUESTS = 50_000_000
"""More requests than memory holds comfortably (about 100 bytes each): a typing error."""

_KEYS = ("prompt", "output", "lengths", "n", "max_prompt", "max_output")


def is_generated(text: str) -> bool:
    """True for the texts that this module turns into requests."""
    return text.startswith(("synthetic:", "mix:")) or text == "synthetic"


def generate(text: str, n: int | None, seed: int, read: Callable[[str], Trace]) -> Trace:
    """Requests without times for a `synthetic:` or `mix:` text; `n` goes before the text's own n=.

    `read` opens the parts of a mixture by name. Raises InputError for anything unclear.
    """
    return _mixture(text, n, seed, read) if text.startswith("mix:") else _synthetic(text, n, seed, read)


def _synthetic(text: str, n: int | None, seed: int, read: Callable[[str], Trace]) -> Trace:
    _, given = split_spec(text, "trace")
    check_keys(given, _KEYS, "synthetic")
    count = _count(given, n, text)
    if "lengths" in given:
        if set(given) - {"lengths", "n"}:
            raise InputError(f"{text!r}: lengths= takes both lengths from a table; leave prompt=, output= and max_ out")
        tables = [trace.name for trace in PACKAGED]
        if given["lengths"] not in tables:
            raise unknown_name("length table", given["lengths"], tables)
        table = read(given["lengths"])
        rows = draw_rows(len(table), count, seed)
        return Trace(
            name=text,
            num_prompt_tokens=table.num_prompt_tokens[rows],
            num_output_tokens=table.num_output_tokens[rows],
            format="synthetic",
            source=table.source,
        )
    columns = {}
    for side in ("prompt", "output"):
        if side not in given:
            raise InputError(f"{text!r}: {side}= is missing, as in synthetic:prompt=512,output=256")
        limit = given.get(f"max_{side}", str(MAX_REQUEST_TOKENS))
        highest = parse_whole(limit, f"synthetic: max_{side}", 1, MAX_REQUEST_TOKENS)
        columns[side] = parse_lengths(given[side], side).draw(count, stream(seed, f"{side} lengths"), highest)
    return Trace(
        name=text,
        num_prompt_tokens=columns["prompt"],
        num_output_tokens=columns["output"],
        format="synthetic",
        source="generated",
    )


def _mixture(text: str, n: int | None, seed: int, read: Callable[[str], Trace]) -> Trace:
    """Each request comes from part i with probability weight_i / sum of weights, drawn from that part's rows."""
    formula, _, settings = text.removeprefix("mix:").partition(",")
    _, given = split_spec(f"mix:{settings}", "trace")
    check_keys(given, ("n",), "mix")
    count = _count(given, n, text)
    names, weights = [], []
    for part in formula.split("+"):
        name, _, weight = (piece.strip() for piece in part.partition("*"))
        value = parse_number(weight or "1", f"{text!r}: weight of {name}")
        if not name or not 0 < value <= 1e9:
            raise InputError(
                f"{text!r}: expected NAME*WEIGHT joined by +, weights above 0, as in mix:sharegpt*3+arxiv*1"
            )
        if name in names:
            raise InputError(f"{text!r}: {name} is given twice")
        names.append(name)
        weights.append(value)
    parts = [read(name) for name in names]
    share = np.array(weights) / sum(weights)
    choice = np.searchsorted(np.cumsum(share)[:-1], stream(seed, "mixture").random(count), side="right")
    drawn: dict[str, Any] = {
        field: np.zeros(count, dtype=np.int64) for field in ("num_prompt_tokens", "num_output_tokens")
    }
    for code, table in enumerate(parts):
        places = np.flatnonzero(choice == code)
        rows = draw_rows(len(table), len(places), seed, names[code])
        for field, column in drawn.items():
            column[places] = getattr(table, field)[rows]
    notes = tuple(note for table in parts for note in table.notes)
    if any(table.hash_ids is not None for table in parts):
        notes += (f"{text}: prefix blocks (hash_ids) are not carried into a mixture",)
    return Trace(
        name=text,
        **drawn,
        slo_class=(choice.astype(np.int64), tuple(names)),
        format="mix",
        notes=notes,
        source="; ".join(dict.fromkeys(table.source for table in parts if table.source)),
    )


def _count(given: dict[str, str], n: int | None, text: str) -> int:
    own = parse_whole(given.get("n", str(DEFAULT_REQUESTS)), f"{text!r}: n", 1, MAX_REQUESTS)
    return own if n is None else check_count(n)


def check_count(n: int) -> int:
    """A number of requests within bounds; raises InputError."""
    if not 1 <= n <= MAX_REQUESTS:
        raise InputError(f"number of requests {n}: expected 1 to {MAX_REQUESTS:,}")
    return n


def draw_rows(rows: int, n: int, seed: int, part: str = "") -> IntArray:
    """n row numbers in random order: every row once before any comes again. A longer draw begins with a shorter one."""
    generator = stream(seed, f"rows {part}".strip())
    rounds = [generator.permutation(rows) for _ in range(-(-n // rows))] or [np.empty(0, dtype=np.int64)]
    return np.concatenate(rounds)[:n].astype(np.int64)


def draw(trace: Trace, n: int, seed: int) -> Trace:
    """n rows of a length table, drawn by seed; a note says when some come more than once."""
    drawn = trace.take(draw_rows(len(trace), n, seed))
    if n <= len(trace):
        return drawn
    return replace(drawn, notes=(*drawn.notes, f"{trace.name}: {n} requests from {len(trace)} rows, so rows repeat"))
