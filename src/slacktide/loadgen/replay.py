"""Replay of a workload against a server: every request is sent when it is due, whatever became of those before it.

Open loop: latencies count from the intended send time, so a server (or a client) that falls behind does not hide it by
getting fewer requests (coordinated omission; https://github.com/vllm-project/vllm/issues/54101). A closed loop is
replayed as one: its users send their next request when the last one has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slacktide.errors import InputError
from slacktide.loadgen import client
from slacktide.loadgen.client import Outcome, clock
from slacktide.loadgen.prompts import VOCABULARY, Prompts, as_text
from slacktide.metrics.log import FAILED, FINISHED
from slacktide.workload.requests import Workload

if TYPE_CHECKING:
    import aiohttp

PREPARE = 0.5
"""Seconds before its time that a request's body is made: a long prompt takes some milliseconds, which must not delay
its own sending."""

START_DELAY = 0.2
"""Seconds from the start of the replay to time 0: the first requests can be prepared, too."""


@dataclass(frozen=True, slots=True)
class Target:
    """The server and how it is asked."""

    url: str
    """Without a path or with /v1."""
    model: str | None = None
    """None: the server's first."""
    chat: bool = False
    """/v1/chat/completions with texts of about the right lengths, instead of /v1/completions with exact token ids."""
    headers: dict[str, str] = field(default_factory=dict)
    extra_body: dict[str, Any] = field(default_factory=dict)
    send_slo: bool = True
    """Send each request's targets, class and tenant as vllm_xargs."""
    vocabulary: int = VOCABULARY

    def path(self, path: str) -> str:
        """The address of `/v1/...`."""
        return self.url.rstrip("/").removesuffix("/v1") + path


@dataclass(frozen=True, slots=True)
class Limits:
    """When to stop waiting. Seconds."""

    timeout: float = 600.0
    """For one whole answer."""
    max_duration: float = math.inf
    """For the run; what is open then is cut off."""
    give_up: float = 30.0
    """A server that could not be reached for so long is gone: the run ends."""
    max_concurrency: int | None = None
    """Most requests at once; the wait for a place counts."""


@dataclass(slots=True)
class Replay:
    """What happened. `outcomes` in the order of the workload; times on `clock`."""

    outcomes: list[Outcome]
    start: float = math.nan
    """Time 0 of the workload."""
    end: float = math.nan
    model: str = ""
    max_model_len: int | None = None
    num_warmups: int = 0
    gone_since: float | None = None
    """The server stopped answering then, for good."""
    interrupted: bool = False


async def describe(session: aiohttp.ClientSession, target: Target) -> tuple[str, int | None]:
    """(model, its longest context or None) as the server lists them. Raises InputError when it does not serve it."""
    listed = await client.get_json(session, target.path("/v1/models"))
    models = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(models, list) or not models or not all(isinstance(m, dict) and "id" in m for m in models):
        raise InputError(f"{target.path('/v1/models')}: no list of models; is this an OpenAI-compatible server?")
    by_id = {str(model["id"]): model for model in models}
    name = next(iter(by_id)) if target.model is None else target.model
    if name not in by_id:
        raise InputError(f"--model {name}: the server does not serve it; it serves {', '.join(by_id)}")
    longest = by_id[name].get("max_model_len")
    return name, longest if isinstance(longest, int) else None


class Replayer:
    """One run. `progress` is called with 1 for each request that ended."""

    def __init__(
        self, workload: Workload, target: Target, limits: Limits, seed: int, progress: Callable[[int], None]
    ) -> None:
        self._workload, self._target, self._limits, self._progress = workload, target, limits, progress
        self._prompts = Prompts(workload, seed, target.vocabulary)
        self._result = Replay([Outcome() for _ in range(len(workload))])
        self._url = target.path("/v1/chat/completions" if target.chat else "/v1/completions")
        self._places = asyncio.Semaphore(limits.max_concurrency) if limits.max_concurrency else None
        self._unreachable_since: float | None = None
        self._stop = asyncio.Event()

    async def run(self, num_warmups: int) -> Replay:
        """Ask for the model, warm up, replay. Raises InputError when the server cannot serve the first request."""
        _raise_file_limit()
        async with client.open_session(self._target.url, self._target.headers) as session:
            self._result.model, self._result.max_model_len = await describe(session, self._target)
            await self._warm_up(session, num_warmups)
            self._result.start = clock() + START_DELAY
            with self._interruptible():
                await self._until_stop(self._closed(session) if self._workload.closed else self._open(session))
        self._result.end = clock()
        return self._result

    async def _until_stop(self, whole: Any) -> None:
        """Run to the end, to the time limit, to an interrupt, or until the server is gone."""
        run, stop = asyncio.ensure_future(whole), asyncio.ensure_future(self._stop.wait())
        left = self._limits.max_duration + START_DELAY
        await asyncio.wait({run, stop}, timeout=None if left == math.inf else left, return_when="FIRST_COMPLETED")
        for task in (run, stop):
            task.cancel()
        await asyncio.wait({run, stop})
        if not run.cancelled() and (defect := run.exception()) is not None:
            raise defect

    @contextlib.contextmanager
    def _interruptible(self) -> Any:
        """The first Ctrl-C ends the run and reports what there is."""

        def stop() -> None:
            self._result.interrupted = True
            self._stop.set()

        loop = asyncio.get_running_loop()
        try:
            loop.add_signal_handler(signal.SIGINT, stop)
        except (NotImplementedError, RuntimeError, ValueError):  # Windows, or not the main thread
            yield
            return
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    async def _warm_up(self, session: aiohttp.ClientSession, count: int) -> None:
        """Requests like the first ones, one after another: kernels get compiled, and mistakes show before the run."""
        for number in range(count):
            outcome, body = Outcome(), self._body(number % len(self._workload), warmup=number)
            await client.send(session, self._url, body, outcome, timeout=self._limits.timeout)
            if outcome.reason != FINISHED:
                hint = "; a smaller --vocab-size?" if "vocab" in outcome.error.lower() else ""
                raise InputError(f"{self._url}: the warm-up request failed: {outcome.error}{hint}")
        self._result.num_warmups = count

    # ---- open and closed loop ----------------------------------------------------------------------------------------

    async def _open(self, session: aiohttp.ClientSession) -> None:
        async with asyncio.TaskGroup() as tasks:
            for row in range(len(self._workload)):
                due = self._result.start + float(self._workload.arrival_time[row])
                await _sleep_until(due - PREPARE)
                tasks.create_task(self._one(session, row, due))

    async def _closed(self, session: aiohttp.ClientSession) -> None:
        loop = self._workload.closed
        assert loop is not None
        rows = iter(range(len(self._workload)))

        async def user() -> None:
            due = self._result.start
            for row in rows:
                await self._one(session, row, due)
                due = clock() + loop.think_time

        async with asyncio.TaskGroup() as users:
            for _ in range(loop.concurrency):
                users.create_task(user())

    async def _one(self, session: aiohttp.ClientSession, row: int, due: float) -> None:
        outcome = self._result.outcomes[row]
        body = self._body(row)
        await _sleep_until(due)
        outcome.due, outcome.woken = due, clock()
        patience = float(self._workload.abort_time[row] - self._workload.arrival_time[row])
        async with self._places or contextlib.nullcontext():
            await client.send(
                session, self._url, body, outcome, timeout=self._limits.timeout, abort_at=due + patience,
                on_response=self._reached,
            )  # fmt: skip
        self._progress(1)
        if outcome.unreachable:
            self._not_reached(outcome.sent)

    def _reached(self) -> None:
        self._unreachable_since = None

    def _not_reached(self, now: float) -> None:
        self._unreachable_since = now if self._unreachable_since is None else self._unreachable_since
        if clock() - self._unreachable_since < self._limits.give_up:
            return
        self._result.gone_since = self._unreachable_since
        for outcome in self._result.outcomes:
            if math.isnan(outcome.due):
                outcome.reason, outcome.error = FAILED, "not sent: the server is gone"
        self._stop.set()

    # ---- bodies ------------------------------------------------------------------------------------------------------

    def _body(self, row: int, warmup: int | None = None) -> bytes:
        """The request's JSON; as the warm-up of that number it has other token ids than the request's own."""
        ids = self._prompts.token_ids(row) if warmup is None else self._prompts.warmup(warmup, row)
        work, target = self._workload, self._target
        body: dict[str, Any] = {
            "model": self._result.model,
            "max_tokens": int(work.num_output_tokens[row]),
            "ignore_eos": True,  # exactly the trace's output length
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        if target.chat:
            body["messages"] = [{"role": "user", "content": as_text(ids)}]
        else:
            body["prompt"] = ids
        if work.priority[row]:
            body["priority"] = int(work.priority[row])
        if target.send_slo and (xargs := targets_of(work, row)):
            body["vllm_xargs"] = xargs
        return json.dumps(body | target.extra_body, separators=(",", ":")).encode()


def targets_of(workload: Workload, row: int) -> dict[str, Any]:
    """A request's targets in ms, class and tenant, as the plug-in reads them from vllm_xargs."""
    columns = {"slo_ttft_ms": "slo_ttft", "slo_tbt_ms": "slo_tbt", "slo_e2el_ms": "slo_e2e"}
    seconds = {name: float(getattr(workload, column)[row]) for name, column in columns.items()}
    told: dict[str, Any] = {name: round(value * 1e3, 6) for name, value in seconds.items() if math.isfinite(value)}
    if len(workload.slo_classes) > 1:
        told["slo_class"] = workload.slo_classes[workload.slo_class[row]]
    if len(workload.tenants) > 1:
        told["tenant"] = workload.tenants[workload.tenant[row]]
    return told


async def _sleep_until(when: float) -> None:
    """Sleep until `clock` says `when`; never shorter, and a moment in any case, so that others get their turn."""
    await asyncio.sleep(0)
    while (left := when - clock()) > 0:
        await asyncio.sleep(left)


def _raise_file_limit() -> None:
    """As many open connections as the system allows: the usual soft limit of 1,024 ends below a busy server's queue."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)) if hard > 0 else 65536, hard))


def replay(
    workload: Workload,
    target: Target,
    limits: Limits | None = None,
    *,
    num_warmups: int = 1,
    seed: int = 0,
    progress: Callable[[int], None] = lambda _: None,
) -> Replay:
    """Replay `workload` against `target` and return what the clients saw.

    Raises InputError when the server is not there, does not serve the model, or refuses the warm-up. Whatever
    happens later (errors, a server that dies, Ctrl-C) stands in the result.
    """

    async def run() -> Replay:
        return await Replayer(workload, target, limits or Limits(), seed, progress).run(num_warmups)

    return asyncio.run(run())
