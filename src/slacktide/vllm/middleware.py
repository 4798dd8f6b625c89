"""ASGI middleware for vLLM's server: `--middleware slacktide.vllm.middleware.AdmissionMiddleware`.

It checks the targets in a request's `vllm_xargs` (HTTP 400 naming the field), copies gateway headers into them, and,
when asked to, answers 429 or 503 with Retry-After instead of letting in a request that is predicted to miss its TTFT.
vLLM constructs it without arguments, so its settings come from the environment (`SLACKTIDE_ADMISSION`, see
admission.py); `slacktide serve` sets it. Whatever fails in here, other than a bad field, lets the request through.
vLLM adds it outside its own key check: an answer of ours may reach a client without a key, and tells only of load.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from slacktide.vllm.admission import HEADERS, BadField, Settings, retry_after, with_targets
from slacktide.vllm.estimate import Reader

ENVIRONMENT = "SLACKTIDE_ADMISSION"
"""Environment variable with the settings as JSON."""

PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
"""Requests that generate, and whose body may carry vllm_xargs."""

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_log = logging.getLogger("vllm.slacktide")  # below vLLM's logger, whose handlers print it


class AdmissionMiddleware:
    """See the top of this file. Raises ValueError at start for settings that are wrong."""

    def __init__(self, app: Application) -> None:
        self._app = app
        try:
            self._settings = Settings.parse(os.environ.get(ENVIRONMENT, ""))
        except ValueError as error:
            raise ValueError(f"environment variable {ENVIRONMENT}: {error}") from error
        self._reader = Reader(self._settings.estimate_dir) if self._settings.reject else None
        self._extra = {name.lower(): field for name, field in self._settings.headers.items()}
        self._failures = 0
        self._rejected, self._invalid = _counter("admission_rejected"), _counter("admission_invalid")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        path = scope.get("path", "").removeprefix(scope.get("root_path", "").rstrip("/"))
        if scope["type"] != "http" or scope.get("method") != "POST" or path.rstrip("/") not in PATHS:
            return await self._app(scope, receive, send)
        chunks: list[bytes] = []
        while True:
            message = await receive()
            if message["type"] != "http.request":  # the client left before it had sent its body
                return None
            chunks.append(message.get("body", b""))
            if not message.get("more_body", False):
                break
        body = b"".join(chunks)
        try:
            changed = self._admit(scope, body)
        except _Refused as refused:
            return await refused.answer(send)
        except Exception:
            self._failures += 1
            if self._failures == 1:
                _log.exception("slacktide: the admission middleware failed; requests pass unchecked (logged once)")
            changed = body
        if changed is not body:
            scope = dict(scope)
            kept = [(name, value) for name, value in scope["headers"] if name.lower() != b"content-length"]
            scope["headers"] = [*kept, (b"content-length", b"%d" % len(changed))]
        await self._app(scope, _replay(changed, receive), send)
        return None

    def _admit(self, scope: Scope, body: bytes) -> bytes:
        """The body to hand on. Raises _Refused."""
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        extra = self._extra
        has_target = b'"vllm_xargs"' in body or any(name in HEADERS or name in extra for name in headers)
        if not has_target and self._reader is None:
            return body  # most requests: nothing to parse
        try:
            request = json.loads(body)
        except ValueError:
            return body  # vLLM's own answer to broken JSON is clear
        if not isinstance(request, dict):
            return body
        try:
            told = with_targets(request, headers, extra)
        except BadField as error:
            self._invalid()
            raise _Refused(400, "BadRequestError", str(error), param=error.field) from error
        if self._reader is not None:
            wait = retry_after(told, self._reader.read(), self._settings)
            if wait is not None:
                self._rejected()
                text = f"predicted to miss its TTFT target; the server is overloaded, try again in {wait} s"
                kind = "RateLimitError" if self._settings.reject == 429 else "ServiceUnavailableError"
                raise _Refused(self._settings.reject, kind, text, retry_after=wait)
        return body if told is request else json.dumps(told).encode()


class _Refused(Exception):
    """An answer other than the application's, in the shape of vLLM's errors."""

    def __init__(self, status: int, kind: str, text: str, *, param: str | None = None, retry_after: int | None = None):
        super().__init__(text)
        self._status = status
        self._headers = [(b"content-type", b"application/json")]
        if retry_after is not None:
            self._headers.append((b"retry-after", b"%d" % retry_after))
        error = {"message": text, "type": kind, "param": param, "code": status}
        self._body = json.dumps({"error": error}).encode()

    async def answer(self, send: Send) -> None:
        """Send it."""
        headers = [*self._headers, (b"content-length", b"%d" % len(self._body))]
        await send({"type": "http.response.start", "status": self._status, "headers": headers})
        await send({"type": "http.response.body", "body": self._body})


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that hands out the body once more, and then goes on (it will tell when the client leaves)."""
    sent = False

    async def again() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _counter(name: str) -> Callable[[], None]:
    """Counts on vLLM's /metrics page as `slacktide:NAME_total`; elsewhere nobody scrapes."""
    try:
        from prometheus_client import REGISTRY, Counter
    except ImportError:
        return lambda: None
    counter: Any
    try:
        counter = Counter(f"slacktide:{name}", f"Requests that the front end answered itself ({name}).")
    except ValueError:  # constructed twice in one process: the application is rebuilt
        counter = REGISTRY._names_to_collectors[f"slacktide:{name}"]
    increase: Callable[[], None] = counter.inc
    return increase
