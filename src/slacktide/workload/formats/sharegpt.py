"""ShareGPT conversations (`[{"id", "conversations": [{"from", "value"}, ...]}, ...]`), every turn a request.

A conversation gives one request for each question that is answered. Its prompt is the whole history: system text,
earlier questions and answers, and the question; so the prompts of a session grow, and each begins with the one before
and its answer. That shared prefix is kept as hash ids of 16 tokens (vLLM's block size). Consecutive messages of one
speaker are one message. What comes first decides whether a conversation is of use; a later empty message ends it.
Lengths of parts are added up (a chat template's own tokens are not counted).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from slacktide.core.types import IntArray
from slacktide.errors import InputError
from slacktide.workload.formats.base import ReadOptions, Trace, check_tokens
from slacktide.workload.formats.jsontext import decode
from slacktide.workload.tokens import TokenCounter, token_counter

BLOCK_SIZE = 16
"""Tokens behind one hash id: vLLM's KV block size."""

_SPEAKERS = {
    "human": "user", "user": "user",
    "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "model": "assistant",
    "system": "system",
}  # fmt: skip
"""Names of speakers in published ShareGPT files -> role."""


@dataclass(slots=True)
class _Conversation:
    """One conversation as numbers of texts: system text (or -1), then (question, answer) pairs."""

    label: str
    system: int = -1
    pairs: list[tuple[int, int]] = field(default_factory=list)


def read_sharegpt(path: str, data: bytes, options: ReadOptions, count: TokenCounter | None = None) -> Trace:
    """ShareGPT JSON (or JSONL) -> Trace without times; left-out conversations are counted by reason in one note.

    Token counts come from `count`, else the tokenizer of the options, else the estimate of `tokens.py`, and a note
    says which. Raises InputError when no conversation is usable.
    """
    items = _items(path, data)
    texts: list[str] = []
    usable: list[_Conversation] = []
    reasons: Counter[str] = Counter()
    cut = 0
    for number, item in enumerate(items):
        conversation = _Conversation(label=_label(item, number))
        reason, shortened = _collect(item, conversation, texts)
        if reason:
            reasons[reason] += 1
            continue
        if options.first_turn_only:
            conversation.pairs = conversation.pairs[:1]
        cut += shortened
        usable.append(conversation)
    why = ", ".join(f"{n} {reason}" for reason, n in reasons.items())
    if not usable and isinstance(items[0], dict) and not any(_has_messages(item) for item in items):
        fields = ", ".join(map(str, items[0]))[:120]
        raise InputError(
            f"{path}: a JSON list of objects with {fields or 'no fields'}, expected id, conversations; other"
            " formats hold one object a line (JSONL)"
        )
    if not usable:
        raise InputError(f"{path}: no usable conversation in {len(items)}" + (f": {why}" if why else ""))
    counter, how = token_counter(options.tokenizer)
    trace = _requests(path, usable, (count or counter)(texts))
    notes = [f"{path}: {len(trace)} requests from {len(usable)} of {len(items)} conversations"]
    if reasons:
        notes.append(f"{path}: left out {sum(reasons.values())} of {len(items)} conversations: {why}")
    if cut:
        notes.append(f"{path}: {cut} conversations end early, at an unanswered, empty or unknown message")
    if options.first_turn_only:
        notes.append(f"{path}: only the first question of each conversation, so prefixes are not reused")
    elif len(trace) > len(usable):
        notes.append(f"{path}: the turns of a session arrive by the arrival process, not after the answer before them")
    return replace(trace, notes=(*notes, f"{path}: lengths {how}"))


def _items(path: str, data: bytes) -> list[Any]:
    """The conversations: a JSON list, or one object per line."""
    if data.lstrip()[:1] == b"[":
        items = decode(path, data)
    else:
        items = [decode(path, line, n) for n, line in enumerate(data.splitlines(), 1) if line.strip()]
    if not isinstance(items, list) or not items:
        raise InputError(f"{path}: no conversations")
    return items


def _has_messages(item: Any) -> bool:
    return isinstance(item, dict) and ("conversations" in item or "messages" in item)


def _label(item: Any, number: int) -> str:
    """The session's name: the id with its place, because ids repeat and parts of one chat are separate entries."""
    given = item.get("id") if isinstance(item, dict) else None
    return f"{given}#{number}" if isinstance(given, (str, int)) else f"#{number}"


def _collect(item: Any, conversation: _Conversation, texts: list[str]) -> tuple[str, bool]:
    """Fill `conversation` from `item`; returns (reason to leave it out or "", whether it ends early)."""
    messages = item.get("conversations", item.get("messages")) if _has_messages(item) else None
    if not isinstance(messages, list) or not messages:
        return "without messages", False
    turns = [_message(message) for message in messages]
    system = ""
    while turns and turns[0][0] == "system":
        system += turns.pop(0)[1]
    merged: list[tuple[str, str]] = []
    for role, text in turns:
        if merged and merged[-1][0] == role and role in ("user", "assistant"):
            merged[-1] = (role, merged[-1][1] + text if text else "")
        else:
            merged.append((role, text))
    start = len(texts)
    if system:
        texts.append(system)
        conversation.system = start
    for question, answer in zip(merged[::2], merged[1::2], strict=False):
        if (question[0], answer[0]) != ("user", "assistant") or not question[1] or not answer[1]:
            break
        conversation.pairs.append((len(texts), len(texts) + 1))
        texts += [question[1], answer[1]]
    if conversation.pairs:
        return "", 2 * len(conversation.pairs) < len(merged)
    del texts[start:]
    return _reason(merged), False


def _reason(merged: list[tuple[str, str]]) -> str:
    """Why a conversation without a usable first pair is left out."""
    first = merged[0] if merged else ("", "")
    if first[0] == "assistant":
        return "that begin with an answer"
    if first[0] != "user":
        return "without a question first"
    if not first[1]:
        return "with an empty question"
    if len(merged) < 2:
        return "never answered"
    return "with an empty answer" if merged[1][0] == "assistant" else "with an unknown speaker"


def _message(message: Any) -> tuple[str, str]:
    """(role, text) of one message; unknown speakers get the role "unknown", null or odd content the text ""."""
    if not isinstance(message, dict):
        return "unknown", ""
    speaker = message.get("from", message.get("role"))
    text = message.get("value", message.get("content"))
    role = _SPEAKERS.get(speaker.lower(), "unknown") if isinstance(speaker, str) else "unknown"
    return role, text if isinstance(text, str) and text.strip() else ""


def _requests(path: str, conversations: list[_Conversation], tokens: IntArray) -> Trace:
    """One row per answered question. A block's hash id belongs to its place in the session; sessions with the same
    system text would share its blocks only under one template, so no prefix is shared between sessions."""
    tokens = np.maximum(tokens, 1)  # a text of any length is at least one token
    prompts, outputs, sessions, values, offsets = [], [], [], [], [0]
    next_id = 0
    for code, conversation in enumerate(conversations):
        history = int(tokens[conversation.system]) if conversation.system >= 0 else 0
        for question, answer in conversation.pairs:
            history += int(tokens[question])
            blocks = -(-history // BLOCK_SIZE)
            values.append(np.arange(next_id, next_id + blocks, dtype=np.int64))
            offsets.append(offsets[-1] + blocks)
            prompts.append(history)
            outputs.append(int(tokens[answer]))
            sessions.append(code)
            history += int(tokens[answer])
        next_id += blocks

    def locate(row: int) -> str:
        return f"{path}: conversation {conversations[sessions[row]].label}"

    return Trace(
        name=path,
        num_prompt_tokens=check_tokens(np.array(prompts, dtype=np.int64), "prompt length", locate),
        num_output_tokens=check_tokens(np.array(outputs, dtype=np.int64), "answer length", locate),
        session=(np.array(sessions, dtype=np.int64), tuple(c.label for c in conversations)),
        hash_ids=(np.concatenate(values), np.array(offsets, dtype=np.int64)),
        hash_block_size=BLOCK_SIZE,
        format="sharegpt",
    )
