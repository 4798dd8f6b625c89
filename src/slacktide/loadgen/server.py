"""A server started for a measurement: wait until it is healthy, stop it in the end, and show its log when it fails."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, NoReturn

from slacktide.errors import InputError

POLL = 0.5
"""Seconds between two looks at /health: a start takes tens of seconds."""

STOP_TIMEOUT = 30.0
"""Seconds from SIGTERM to SIGKILL: vLLM needs about 3 to end its processes."""

LOG_LINES = 15
"""Lines of the log in an error message."""


class ServerProcess:
    """`with ServerProcess(command, url, log) as server:`; the block runs while the server is up.

    The server gets a process group of its own, so that nothing of it is left behind. Entering raises InputError with
    the end of the log when the server ends before it is healthy, or is not healthy within `timeout` seconds.
    """

    def __init__(
        self,
        command: Sequence[str],
        url: str,
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        timeout: float = 600.0,
    ) -> None:
        self.command, self.url, self.log = list(command), url.rstrip("/"), log
        self._environment = os.environ | dict(environment or {})
        self._timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._file: IO[bytes] | None = None
        self._restore = False
        self.returncode: int | None = None
        """Exit status once it has stopped; negative: killed by that signal."""

    @property
    def pid(self) -> int:
        """Process id of the server."""
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> ServerProcess:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.log.open("wb")
        self._end_on_sigterm()
        try:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=self._file,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
            self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def healthy(self) -> bool:
        """Whether it answers /health with 200 now."""
        try:
            with _OPENER.open(f"{self.url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _wait_until_healthy(self) -> None:
        assert self._process is not None
        end = time.monotonic() + self._timeout
        while not self.healthy():
            if self._process.poll() is not None:
                raise InputError(f"the server ended with status {self._process.returncode}: {self.tail()}")
            if time.monotonic() > end:
                raise InputError(f"the server was not healthy within {self._timeout:g} s: {self.tail()}")
            time.sleep(POLL)

    def tail(self) -> str:
        """Where the log is and what it says: its first error (those after it are consequences), else its last lines."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = (match for line in lines if (match := re.search(r"[\w.]*(?:Error|Exception): .+", line)))
        if (first := next(errors, None)) is not None:
            return f"{first[0].strip()} (log: {self.log})"
        return f"{self.log} ends with: {' | '.join(line.strip() for line in lines[-LOG_LINES:] if line.strip())}"

    def _end_on_sigterm(self) -> None:
        """Let SIGTERM end this process by an exception, so that the server is stopped, too."""
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _leave)
            self._restore = True

    def stop(self, number: int = signal.SIGTERM) -> int | None:
        """Ask it to end by a signal, wait, and kill what is left of its process group. Returns its exit status."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self.returncode = self._process.wait()
            self._process = None
        if self._restore:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._restore = False
        if self._file is not None:
            self._file.close()
            self._file = None
        return self.returncode


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Without the environment's proxies: the server is on this machine."""


def _leave(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def cpu_environment(cores: int | None = None) -> dict[str, str]:
    """vLLM's environment on a machine without a GPU: a small KV pool, no model hub, a core left for the front end.

    vLLM's threads spin, so one thread more than there are cores makes steps many times slower.
    """
    count = cores or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(max(count - 1, 1)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
