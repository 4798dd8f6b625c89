"""A headless Chromium, driven over its own protocol (DevTools) by aiohttp's websockets."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

BINARY = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)

START_TIMEOUT = 60.0
"""Seconds for the browser to start: a busy machine takes ten."""


class Browser:
    """`async with Browser(directory) as page`: one tab. `problems` holds the console's errors and uncaught ones."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.problems: list[str] = []
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._events: dict[str, asyncio.Event] = {}

    async def __aenter__(self) -> Browser:
        assert BINARY is not None
        # No network at all: whatever a page would load from elsewhere fails, and is a problem.
        flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                 "--remote-debugging-port=0", "--host-resolver-rules=MAP * ~NOTFOUND",
                 f"--user-data-dir={self.directory}")  # fmt: skip
        self._process = await asyncio.create_subprocess_exec(
            BINARY, *flags, "about:blank", stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
        )
        port = await asyncio.wait_for(self._port(), START_TIMEOUT)
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{port}/json") as answer:
            tabs = await answer.json()
        address = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
        self._socket = await self._session.ws_connect(address, max_msg_size=0)
        self._reader = asyncio.create_task(self._read())
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader
        await self._socket.close()
        await self._session.close()
        self._process.terminate()
        await self._process.wait()

    async def _port(self) -> int:
        file = self.directory / "DevToolsActivePort"
        while not (file.is_file() and file.read_text().strip()):
            await asyncio.sleep(0.1)
        return int(file.read_text().splitlines()[0])

    async def _read(self) -> None:
        async for message in self._socket:
            data = message.json()
            if "id" in data:
                self._waiting.pop(data["id"]).set_result(data)
                continue
            name, given = data["method"], data["params"]
            if name == "Runtime.exceptionThrown":
                self.problems.append(str(given["exceptionDetails"]))
            elif name == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
                self.problems.append(str(given["entry"]["text"]))
            elif name == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning", "assert"):
                self.problems.append(str(given["args"]))
            if name in self._events:
                self._events[name].set()

    async def call(self, method: str, **given: Any) -> dict[str, Any]:
        """One call of the protocol."""
        number = next(self._ids)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": given})
        answer = await asyncio.wait_for(self._waiting[number], START_TIMEOUT)
        assert "error" not in answer, answer
        return dict(answer["result"])

    async def show(self, path: Path, width: int = 1280, height: int = 900, *, dark: bool = False) -> None:
        """Open a file in a window of this size and theme."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._events["Page.loadEventFired"] = asyncio.Event()
        await self.call("Page.navigate", url=path.as_uri())
        await asyncio.wait_for(self._events["Page.loadEventFired"].wait(), START_TIMEOUT)

    async def run(self, script: str) -> Any:
        """The value of an expression of JavaScript."""
        answer = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def press(self, key: str) -> None:
        """A key, down and up."""
        codes = {"Enter": 13, "Tab": 9, " ": 32}
        text = {"Enter": "\r", " ": " "}.get(key, "")
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            code = codes.get(key, 0)
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **more)

    async def move(self, x: float, y: float) -> None:
        """The pointer."""
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    async def picture(self, path: Path, *, whole: bool = True) -> None:
        """A PNG of the page."""
        shot = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))
