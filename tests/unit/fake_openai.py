"""A fake OpenAI-compatible server: raw asyncio, so that an answer can be as broken as a test wants it.

Each request is answered by a script: a coroutine that gets an `Exchange` (the parsed request, and a way to write).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Exchange:
    """One request, and the connection it came on."""

    number: int
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    time: float
    writer: asyncio.StreamWriter
    server: FakeServer

    async def head(self, status=200, reason="OK", headers=(), kind="text/event-stream"):
        lines = [f"HTTP/1.1 {status} {reason}", f"content-type: {kind}", "connection: close", *headers]
        await self.raw(("\r\n".join(lines) + "\r\n\r\n").encode())

    async def raw(self, data: bytes):
        self.writer.write(data)
        await self.writer.drain()

    async def event(self, data):
        text = data if isinstance(data, str) else json.dumps(data)
        await self.raw(f"data: {text}\n\n".encode())

    async def chunk(self, tokens: int, total: int, finish: str | None = None, **more):
        """A chunk of `tokens` new tokens; `total` so far in its usage."""
        choice = {"index": 0, "text": "x" * tokens, "finish_reason": finish}
        await self.event({"choices": [choice], "usage": usage(self.body, total)} | more)

    async def end(self, total: int):
        await self.event({"choices": [], "usage": usage(self.body, total)})
        await self.event("[DONE]")

    async def refuse(self, status: int, body: Any, headers=()):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        await self.head(status, "Refused", [f"content-length: {len(data)}", *headers], "application/json")
        await self.raw(data)


def usage(body: dict[str, Any], total: int) -> dict[str, int]:
    prompt = len(body["prompt"]) if "prompt" in body else 9
    return {"prompt_tokens": prompt, "completion_tokens": total, "total_tokens": prompt + total}


Script = Callable[[Exchange], Awaitable[None]]


async def serve_all(exchange: Exchange) -> None:
    """Answer as asked, at once, one token per chunk."""
    await exchange.head()
    n = exchange.body["max_tokens"]
    for i in range(n):
        await exchange.chunk(1, i + 1, "length" if i == n - 1 else None)
    await exchange.end(n)


@dataclass
class FakeServer:
    """Runs in a thread of its own, so that a blocking client can be tested: `with FakeServer(script) as server`."""

    script: Script = serve_all
    models: Any = field(default_factory=lambda: {"data": [{"id": "tiny", "max_model_len": 4096}]})
    seen: list[Exchange] = field(default_factory=list)

    def __enter__(self):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self._call(self.listen(0))
        self.url = f"http://127.0.0.1:{self.port}"
        self.writers: set[asyncio.StreamWriter] = set()
        return self

    async def listen(self, port: int):
        """Listen (again) on a port; 0 = any."""
        self.listener = await asyncio.start_server(self._handle, "127.0.0.1", port)
        self.port = self.listener.sockets[0].getsockname()[1]

    def __exit__(self, *_):
        self.die()
        self._call(self._drain())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def _call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout=30)

    async def _drain(self):
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def die(self):
        """Stop listening and reset every connection, as a killed process does."""
        self.loop.call_soon_threadsafe(self.die_now)

    def die_now(self):
        self.listener.close()
        for writer in list(self.writers):
            writer.transport.abort()

    async def _handle(self, reader, writer):
        self.writers.add(writer)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            first, *lines = head.decode().strip().split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            data = await reader.readexactly(int(headers.get("content-length", 0)))
            path = first.split()[1]
            if path == "/v1/models":
                exchange = Exchange(-1, path, headers, {}, 0.0, writer, self)
                status = self.models if isinstance(self.models, int) else 200
                await exchange.refuse(status, self.models)
                return
            exchange = Exchange(len(self.seen), path, headers, json.loads(data), self.loop.time(), writer, self)
            self.seen.append(exchange)
            await self.script(exchange)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.writers.discard(writer)
            with contextlib.suppress(ConnectionError):
                writer.close()
                await writer.wait_closed()
