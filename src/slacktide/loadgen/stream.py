"""What a streamed answer says: server-sent events, and how many tokens had come when.

Chunks are not tokens: a server sends several per chunk after speculation or a stall, and chunks without any (a role,
a held-back text). So the count is the server's own, by the first of these that an answer carries:

1. `usage.completion_tokens` of every chunk (vLLM, asked by `stream_options.continuous_usage_stats`);
2. the length of `token_ids`; 3. the number of entries in `logprobs`;
4. one per chunk with text, and the answer is marked (`by_chunk`): its times are those of chunks.
"""

from __future__ import annotations

import json
from typing import Any

MAX_EVENT = 1 << 24
"""Bytes of one event at most (16 MiB): beyond, this is no event stream."""


MAX_TOKENS = 10_000_000
"""Of one request, as in traces: a server that tells more has miscounted, and memory would not hold the times."""


class StreamError(Exception):
    """The answer is broken, or says that the server failed. One line."""


class Events:
    """Splits bytes into the data of server-sent events (HTML standard, section 9.2), wherever reads are cut."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[str]:
        """Events that are complete now. Raises StreamError for what is no event stream."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > MAX_EVENT:
            raise StreamError(f"an event of more than {MAX_EVENT} bytes")
        return [event for line in lines if (event := self._line(line.removesuffix(b"\r"))) is not None]

    def end(self) -> list[str]:
        """The last event, when its empty line is missing."""
        return [event for piece in (b"\n", b"\n") for event in self.feed(piece)]

    def _line(self, line: bytes) -> str | None:
        if not line:
            data, self._data = b"\n".join(self._data), []
            if not data:
                return None
            try:
                return data.decode("utf-8")
            except UnicodeDecodeError:
                raise StreamError(f"an event that is no UTF-8: {data[:60]!r}") from None
        field, colon, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))
        elif field not in (b"", b"event", b"id", b"retry") or not (colon or field):
            raise StreamError(f"not an event stream: {line[:60]!r}")
        return None


class Answer:
    """Tokens of one streamed answer and their times, in seconds on the caller's clock."""

    def __init__(self) -> None:
        self.times: list[float] = []
        """When each token came; those of one chunk share its time."""
        self.by_chunk = False
        """No count of the server's: the entries are chunks."""
        self.usage_tokens: int | None = None
        """The server's total at the end."""
        self.prompt_tokens: int | None = None
        self.finish_reason: str | None = None
        self.done = False
        """The end was announced: [DONE], or a finish reason."""

    def event(self, text: str, now: float) -> None:
        """Take in one event. Raises StreamError when it is no JSON object, counts backwards or reports an error."""
        if text.strip() == "[DONE]":
            self.done = True
            return
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            raise StreamError(f"an event that is no JSON: {text[:60]!r}") from None
        if not isinstance(data, dict):
            raise StreamError(f"an event that is no JSON object: {text[:60]!r}")
        if data.get("error"):
            raise StreamError(f"the server reports: {error_text(data)}")
        usage = data.get("usage")
        total = _integer(usage.get("completion_tokens")) if isinstance(usage, dict) else None
        if isinstance(usage, dict) and _integer(usage.get("prompt_tokens")):
            self.prompt_tokens = usage["prompt_tokens"]
        choices = data.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            self.usage_tokens = total if total is not None else self.usage_tokens
            return
        self._choice(choices[0], total, now)

    def _choice(self, choice: dict[str, Any], total: int | None, now: float) -> None:
        if total is not None:
            new = total - len(self.times)
            self.usage_tokens = total
            if new < 0:
                raise StreamError(f"the server's token count falls from {len(self.times)} to {total}")
        else:
            new = self._count(choice)
        self.times += [now] * new
        reason = choice.get("finish_reason")
        if reason in ("error", "abort"):
            raise StreamError(f"finish_reason {reason} after {len(self.times)} tokens")
        if isinstance(reason, str):
            self.finish_reason, self.done = reason, True

    def _count(self, choice: dict[str, Any]) -> int:
        """Tokens of a chunk without a usage."""
        inner = choice.get("delta")
        delta: dict[str, Any] = inner if isinstance(inner, dict) else choice
        if isinstance(choice.get("token_ids"), list):
            return len(choice["token_ids"])
        logprobs = choice.get("logprobs")
        if isinstance(logprobs, dict):
            entries = logprobs.get("tokens") if "tokens" in logprobs else logprobs.get("content")
            if isinstance(entries, list):
                return len(entries)
        texts = (delta.get(key) for key in ("text", "content", "reasoning", "reasoning_content", "tool_calls"))
        if not any(texts):
            return 0
        self.by_chunk = True
        return 1

    @property
    def delivered(self) -> int:
        """Output tokens delivered: the server's total where it told one, else the entries."""
        return len(self.times) if self.usage_tokens is None else self.usage_tokens


def _integer(value: Any) -> int | None:
    """A count of tokens; None for what can be none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS else None


def error_text(data: Any) -> str:
    """The message in an error answer of an OpenAI-compatible server, on one line, at most 200 characters."""
    error = data.get("error", data) if isinstance(data, dict) else data
    message = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(message).split())[:200]
