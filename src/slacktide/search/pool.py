"""Tasks on all cores, and a file of what was done, so that a search that was stopped goes on where it was.

Tasks run in processes that are started afresh ("spawn"): nothing depends on the state of the caller, so a result is
the same whatever the number of jobs. A script of your own that uses more than one job needs the usual
`if __name__ == "__main__":`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import inspect
import json
import math
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from slacktide import __version__
from slacktide.core.spec import PolicySpec
from slacktide.errors import InputError
from slacktide.search.scenario import Scenario, files_named

K = TypeVar("K")
T = TypeVar("T")
R = TypeVar("R")


def default_jobs() -> int:
    """Cores that this process may use (fewer than the machine's in a container)."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed is not None else os.cpu_count() or 1


def run_tasks(
    work: Callable[[T], R],
    tasks: Iterable[tuple[K, T]],
    then: Callable[[K, R], Iterable[tuple[K, T]]],
    jobs: int,
) -> None:
    """Call `work` for every task; `then(key, result)` is called here as each one ends, and may return more tasks.

    With one job everything runs in this process, else in `jobs` others; then `work`, tasks and results must pickle.
    What `work` raises is raised here, and ends the rest, as Ctrl-C does. Raises InputError when a process is killed.
    """
    waiting = deque(tasks)
    if jobs == 1:
        while waiting:
            key, task = waiting.popleft()
            waiting.extendleft(reversed(list(then(key, work(task)))))  # one search after the other
        return
    with _workers(jobs) as executor:
        running: dict[Future[R], K] = {}
        while waiting or running:
            # A few more than there are workers: none idles, and Ctrl-C finds few results that nobody has collected.
            while waiting and len(running) < 2 * jobs:
                key, task = waiting.popleft()
                running[_submit(executor, work, task)] = key
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                waiting.extend(then(running.pop(future), future.result()))


def _submit(executor: ProcessPoolExecutor, work: Callable[[T], R], task: T) -> Future[R]:
    """Submit with Ctrl-C held back: a process started here inherits that, so only the parent hears it, and says so."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return executor.submit(work, task)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _workers(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """An executor whose processes are ended at once when the block raises, Ctrl-C included."""
    before = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(jobs, mp_context=context, initializer=_end_with_parent)
    try:
        yield executor
    except BaseException as error:
        executor.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        # A broken pipe here leads to a process that ended as it was started; nothing else is written to in the block.
        if isinstance(error, (BrokenProcessPool, BrokenPipeError)):
            raise InputError(
                "a worker process was killed (out of memory?): use fewer processes (--jobs) or fewer requests"
            ) from error
        raise
    executor.shutdown()


def _end_with_parent() -> None:
    """In a worker: end when the parent is gone, however it went; a worker waiting for tasks would never notice."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class Store:
    """Finished results by key, in a file of JSON lines that only grows; in memory alone without a path.

    A last line without its line end is what a crash left: it is taken away, and `notes` says so. Raises InputError
    naming file and line for any other line that is none of ours, and when another process writes to the file.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.notes: list[str] = []
        self._path, self._file = path, None
        self._known: dict[str, dict[str, Any]] = {}
        if path is None:
            return
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}; name another --out directory") from error
        try:
            self._lock()
            self._read()
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        assert self._file is not None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"{self._path}: another run writes to it; wait for it, or name another --out") from error
        except OSError:  # a file system without locks
            return

    def _read(self) -> None:
        assert self._file is not None
        self._file.seek(0)
        whole, number = 0, 0
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                self._file.truncate(whole)
                self.notes.append(f"{self._path}: line {number} was cut off by a crash and is done again")
                break
            whole += len(line)
            try:
                value = json.loads(line)
                self._known[value.pop("key")] = value
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise InputError(
                    f"{self._path}, line {number}: expected a JSON object with a key, found {line[:40]!r}; delete this "
                    "line (it is then computed again), or name another --out"
                ) from error

    def get(self, key: str) -> dict[str, Any] | None:
        """What was stored under `key`."""
        return self._known.get(key)

    def put(self, key: str, value: dict[str, Any]) -> None:
        """Store `value`, of JSON's types, at once. Raises InputError when the file cannot be written."""
        self._known[key] = value
        if self._file is None:
            return
        line = json.dumps({"key": key} | _strict(value), allow_nan=False) + "\n"
        try:
            self._file.write(line.encode())
            self._file.flush()
        except OSError as error:
            raise InputError(f"cannot write {self._path}: {error.strerror}") from error

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def _strict(value: Any) -> Any:
    """JSON has no infinity: "inf", as `vllm bench` writes it."""
    if isinstance(value, dict):
        return {name: _strict(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def key_of(scenario: Scenario, spec: PolicySpec, **more: Any) -> str:
    """A digest of all that decides the outcome of a run: scenario, policy, and the code and files behind them.

    Equal keys mean equal results, also after a restart and in another directory. Code and files count by their
    content: a result of yesterday's code must not pass for one of today's.
    """
    named = {name: getattr(scenario, name) for name in (field.name for field in fields(scenario))}
    decides = {
        "version": __version__,
        "code": _code(),
        "policy": [spec.name, spec.parameters, spec.engine, _source(spec.cls)],  # its defaults stand in the code
        "scenario": named,
        "files": [_content(part) for text in (scenario.trace, scenario.profile) for part in files_named(text)],
        "more": more,
    }
    return hashlib.sha256(json.dumps(decides, sort_keys=True, default=str).encode()).hexdigest()[:32]


@lru_cache(maxsize=64)
def _content(path: str) -> str:
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@lru_cache(maxsize=1)
def _code() -> str:
    """Digest of this package's code and data: 3 MB, some 10 ms."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(str(path.relative_to(root)).encode() + b"\0")
            digest.update(_content(str(path)).encode())
    return digest.hexdigest()


@lru_cache(maxsize=64)
def _source(policy: type) -> str:
    """Digest of the file that a policy of someone else's is defined in; "" where there is none to read."""
    try:
        return _content(inspect.getfile(policy))
    except (TypeError, OSError):
        return ""
