"""What a client can tell of an engine: its steps, read off the times at which tokens arrive.

The tokens of one step reach all clients at nearly the same moment, so token times of concurrent requests fall into
clusters, one for each step; who has a token in a cluster, and which one, is the batch. Only steps whose batch is
certain are kept: everybody in it was busy in the step before, nobody waits whose prompt could be computed unseen.
Coarser than the engine's own log: network and front end are in the times, steps of a few milliseconds run together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slacktide.core import shape as s
from slacktide.core.types import FloatArray, IntArray
from slacktide.errors import InputError
from slacktide.profiling import json_text
from slacktide.profiling.experiments import ladder
from slacktide.profiling.json_text import is_number
from slacktide.profiling.measurements import Host, Steps, logged

SPREAD = 0.2
"""Tokens within this share of a typical gap belong to one step: a front end delivers a step's tokens within a few
milliseconds, steps follow each other at the gap."""
LEAST_SPREAD = 1e-3
"""Seconds: finer than this, event loops shuffle tokens."""
MAX_NUMBER = 1e12
"""Of a benchmark result: beyond any length, and beyond the seconds of any clock by far."""
OUTPUTS = (8, 64)
"""Output tokens of designed loads: long enough for many decode steps, short enough for many prompts."""


@dataclass(frozen=True)
class Load:
    """A designed load: `concurrency` users, each sending its next request when the last one ended."""

    concurrency: int
    prompt: IntArray
    output: IntArray


def loads(
    max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int, seed: int = 0, requests: int = 200
) -> list[Load]:
    """Closed loops from one user to as many as the engine has seats, prompt lengths log-uniform over what one step
    takes: together they show pure prefill (one user), decodes at every batch size, and mixed steps (turn-overs)."""
    rng = np.random.default_rng(seed)
    longest = max(min(max_num_batched_tokens, max_model_len - OUTPUTS[1] - 1), 16)
    found = []
    for n in ladder(1, max_num_seqs, 2.0):
        count = requests + 8 * n
        prompt = np.exp(rng.uniform(math.log(16), math.log(longest), count)).astype(np.int64)
        output = rng.integers(*OUTPUTS, count)
        found.append(Load(n, prompt, output))
    return found


def steps_from_tokens(
    sent: FloatArray, prompt: IntArray, tokens: Sequence[FloatArray], max_num_batched_tokens: int
) -> tuple[FloatArray, FloatArray]:
    """(shapes float64[m, 12], seconds float64[m]) of the steps that are certain.

    sent float64[n], prompt int64[n], tokens: each request's token times (all in seconds on one clock).
    """
    counts = np.array([len(times) for times in tokens])
    if counts.sum() == 0:
        return np.empty((0, s.SHAPE_SIZE)), np.empty(0)
    time = np.concatenate([np.asarray(times, dtype=np.float64) for times in tokens])
    owner = np.repeat(np.arange(len(tokens)), counts)
    k = np.concatenate([np.arange(c) for c in counts])
    order = np.argsort(time, kind="stable")
    time, owner, k = time[order], owner[order], k[order]
    gaps = np.concatenate([np.diff(times) for times in tokens if len(times) > 1] or [np.array([0.01])])
    apart = max(SPREAD * float(np.median(gaps)), LEAST_SPREAD)
    cluster = np.concatenate([[0], np.cumsum(np.diff(time) > apart)])
    starts = np.searchsorted(cluster, np.arange(cluster[-1] + 2))
    ends = np.array([time[b - 1] for b in starts[1:]])  # a step ends when its last token is out
    first = np.array([times[0] if len(times) else np.inf for times in tokens])
    last = np.array([times[-1] if len(times) else np.inf for times in tokens])
    last_cluster = np.full(len(tokens), -1)
    shapes, seconds = [], []
    for c in range(int(cluster[-1]) + 1):
        rows = slice(starts[c], starts[c + 1])
        who, number = owner[rows], k[rows]
        found = _step(who, number, prompt, last_cluster, c)
        last_cluster[who] = c
        if found is None:
            continue
        shape, alone = found
        if c == 0 and not alone:
            continue
        begin = float(sent[who].max()) if alone else float(ends[c - 1])
        waits = (sent <= begin + apart) & (first > ends[c] + apart)
        since = sent[who[number == 0]]
        # Sent before the step before this one began: part of the prompt may have been computed in that step.
        late = (since > begin + apart) | (since <= (ends[c - 2] if c > 1 else -np.inf) + apart)
        others = np.sum((sent < ends[c]) & (last > begin)) - 1
        if (
            (alone and others > 0)
            or waits.any()
            or late.any()
            or shape[s.NUM_TOKENS] > max_num_batched_tokens
            or ends[c] <= begin
        ):
            continue
        shapes.append(shape)
        seconds.append(float(ends[c]) - begin)
    return (np.stack(shapes) if shapes else np.empty((0, s.SHAPE_SIZE))), np.array(seconds)


def _step(
    who: IntArray, number: IntArray, prompt: IntArray, last_cluster: IntArray, c: int
) -> tuple[FloatArray, bool] | None:
    """(shape, whether it is a prompt by itself) of a cluster; None when its batch is not certain."""
    decodes = number > 0
    if len(np.unique(who)) < len(who):
        return None  # two tokens of a request: several steps ran together
    alone = not decodes.any()
    if (alone and len(who) != 1) or not np.all(last_cluster[who[decodes]] == c - 1):
        return None
    tokens = np.where(decodes, 1, prompt[who])
    contexts = np.where(decodes, prompt[who] + number - 1, 0)
    return s.batch_shape(tokens, contexts, decodes), alone


def steps_of_result(path: Path, max_num_batched_tokens: int | None) -> Steps:
    """Steps in a detailed result of `vllm bench serve --save-detailed`, or of ours. Raises InputError."""
    data = json_text.read(path, str(path))
    names = ("start_times", "ttfts", "itls", "input_lens", "output_lens")
    if not isinstance(data, dict) or any(not isinstance(data.get(name), list) for name in names):
        raise InputError(
            f"{path}: expected a detailed result (vllm bench serve --save-detailed) with {', '.join(names)}"
        )
    if max_num_batched_tokens is None:
        raise InputError(f"{path}: a benchmark result does not tell the token budget: give --max-num-batched-tokens")
    lengths = {len(data[name]) for name in names}
    if len(lengths) != 1:
        raise InputError(f"{path}: {', '.join(names)} have different lengths: found {sorted(lengths)}")
    sent, prompt, tokens = _columns(path, data)
    shapes, seconds = steps_from_tokens(sent, prompt, tokens, max_num_batched_tokens)
    text = f"{len(shapes)} steps read off the token times of {path.name}"
    note = "times seen by a client: front end and network are in them"
    facts = {"engine": {"max_num_batched_tokens": max_num_batched_tokens}}
    return logged(shapes, seconds, Host(), text, whole=True, notes=(note,), facts=facts)


def _columns(path: Path, data: dict[str, Any]) -> tuple[FloatArray, IntArray, list[FloatArray]]:
    sent, prompt, tokens = [], [], []
    rows = zip(data["start_times"], data["ttfts"], data["itls"], data["input_lens"], data["output_lens"], strict=True)
    for i, (start, ttft, itl, length, output) in enumerate(rows):
        numbers = [start, ttft, length, output, *(itl if isinstance(itl, list) else [None])]
        if not all(is_number(v) and 0 <= v <= MAX_NUMBER for v in numbers):
            raise InputError(
                f"{path}: request {i}: expected numbers from 0 on in start_times, ttfts, itls, input_lens, output_lens"
            )
        sent.append(float(start))
        prompt.append(int(length))
        # Several tokens in a chunk: their steps cannot be told apart, and such a request shows no step.
        whole = ttft > 0 and len(itl) == output - 1
        tokens.append(start + ttft + np.concatenate([[0.0], np.cumsum(itl)]) if whole else np.empty(0))
    return np.array(sent), np.array(prompt, dtype=np.int64), tokens


def frontend_seconds(ttft: FloatArray, engine: FloatArray) -> float:
    """Seconds between client and engine, both ways: the median of what lone requests waited beyond their steps."""
    return max(float(np.median(ttft - engine)), 0.0) if len(ttft) else 0.0
