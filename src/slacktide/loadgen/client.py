"""One request over HTTP and what became of it. aiohttp is imported when a session is opened."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slacktide.errors import InputError
from slacktide.loadgen.stream import Answer, Events, StreamError, error_text
from slacktide.metrics.log import ABORTED, CUT_OFF, FAILED, FINISHED, REJECTED

if TYPE_CHECKING:
    import aiohttp

REJECTING = (429, 503)
"""HTTP statuses by which a server turns a request away: too many requests, service unavailable."""

CONNECT_TIMEOUT = 10.0
"""Seconds to wait for a connection: a server that is alive accepts at once, its queue is elsewhere."""

ERROR_BODY = 4096
"""Bytes of an error answer that are read."""

clock: Callable[[], float] = time.perf_counter
"""The clock of all times in here, seconds."""


@dataclass(slots=True)
class Outcome:
    """What a client saw of one request. Times in seconds on `clock`; NaN = never."""

    due: float = math.nan
    """When it should be sent."""
    woken: float = math.nan
    """When the client got to it: later than due only where the client itself is too slow."""
    sent: float = math.nan
    """When it was sent: later than `woken` by its wait for a free place (--max-concurrency)."""
    token_times: list[float] = field(default_factory=list)
    delivered: int = 0
    prompt_tokens: int | None = None
    by_chunk: bool = False
    end: float = math.nan
    reason: int = CUT_OFF
    """Position in metrics.log.END_REASONS."""
    error: str = ""
    """Why it did not finish, without the reason's name."""
    retry_after: str = ""
    unreachable: bool = False
    """No connection to the server could be made."""


def open_session(url: str, headers: dict[str, str]) -> aiohttp.ClientSession:
    """An HTTP session without limits of its own. Raises InputError without aiohttp."""
    try:
        import aiohttp
    except ImportError:
        raise InputError("slacktide bench needs aiohttp: pip install aiohttp") from None
    local = any(host in url for host in ("//127.", "//localhost", "//[::1]"))
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT),
        headers=headers,
        trust_env=not local,  # proxies of the environment: never for this machine itself
    )


async def send(
    session: aiohttp.ClientSession,
    url: str,
    body: bytes,
    outcome: Outcome,
    *,
    timeout: float,
    abort_at: float = math.inf,
    on_response: Callable[[], None] = lambda: None,
) -> None:
    """Send `body`, follow the streamed answer, and fill `outcome`. Raises nothing but cancellation.

    `timeout` seconds for the whole answer; `abort_at` on `clock`: when the client leaves by itself. `on_response` is
    called when the server answers at all. A cancelled request stays as `outcome` has it: cut off.
    """
    import aiohttp

    answer = Answer()
    outcome.sent = clock()
    left = min(timeout, abort_at - outcome.sent)
    try:
        async with asyncio.timeout(max(left, 0.0)):
            async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as response:
                on_response()
                if response.status != 200:
                    await _refused(response, outcome)
                    return
                outcome.token_times = answer.times  # filled as they come, also for a request that is cut off
                await _follow(response, answer)
        _judge(answer, outcome)
    except aiohttp.ServerTimeoutError:  # a TimeoutError, too: must come first
        outcome.reason, outcome.unreachable = FAILED, True
        outcome.error = f"cannot connect within {CONNECT_TIMEOUT:g} s"
    except TimeoutError:
        aborted = abort_at - outcome.sent <= timeout
        outcome.reason = ABORTED if aborted else FAILED
        outcome.error = "the client left" if aborted else f"no complete answer after {timeout:g} s"
    except StreamError as error:
        outcome.reason, outcome.error = FAILED, str(error)
    except aiohttp.ClientConnectorError as error:
        outcome.reason, outcome.unreachable = FAILED, True
        outcome.error = f"cannot connect: {error.os_error.strerror or error.os_error}"
    except (aiohttp.ClientError, OSError) as error:
        outcome.reason = FAILED
        outcome.error = f"connection lost after {len(answer.times)} tokens ({type(error).__name__})"
    finally:
        outcome.delivered, outcome.by_chunk, outcome.prompt_tokens = (
            answer.delivered if answer.times else 0,
            answer.by_chunk,
            answer.prompt_tokens,
        )
        if outcome.reason != CUT_OFF:
            outcome.end = clock() if outcome.reason != FINISHED else answer.times[-1]


async def _follow(response: aiohttp.ClientResponse, answer: Answer) -> None:
    """Read the stream to its end; every token of one read has the time of that read."""
    events = Events()
    async for piece in response.content.iter_any():
        now = clock()
        for text in events.feed(piece):
            answer.event(text, now)
    now = clock()
    for text in events.end():
        answer.event(text, now)


def _judge(answer: Answer, outcome: Outcome) -> None:
    """A stream that ended: finished, or broken off."""
    if not answer.times:
        outcome.reason, outcome.error = FAILED, "the answer holds no token"
    elif not answer.done:
        outcome.reason, outcome.error = FAILED, f"the stream breaks off after {len(answer.times)} tokens"
    else:
        outcome.reason = FINISHED


async def _refused(response: aiohttp.ClientResponse, outcome: Outcome) -> None:
    outcome.reason = REJECTED if response.status in REJECTING else FAILED
    outcome.retry_after = response.headers.get("Retry-After", "")
    text = (await response.content.read(ERROR_BODY)).decode("utf-8", "replace")
    with contextlib.suppress(ValueError):
        text = error_text(json.loads(text))
    told = f", retry after {outcome.retry_after} s" if outcome.retry_after else ""
    outcome.error = f"HTTP {response.status}{told}: {' '.join(text.split())[:200]}"


async def get_json(session: aiohttp.ClientSession, url: str) -> Any:
    """The JSON at `url`. Raises InputError with what is wrong in one line."""
    import aiohttp

    try:
        async with asyncio.timeout(CONNECT_TIMEOUT), session.get(url) as response:
            text = await response.text()
            if response.status != 200:
                raise InputError(f"{url}: HTTP {response.status}: {text[:200]}")
            return json.loads(text)
    except aiohttp.ClientConnectorError as error:
        why = error.os_error.strerror or error.os_error
        raise InputError(
            f"{url}: no server answers ({why}); start one (slacktide serve MODEL), or check --url"
        ) from None
    except TimeoutError:
        raise InputError(f"{url}: no answer within {CONNECT_TIMEOUT:g} s; is the server overloaded?") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise InputError(f"{url}: no OpenAI-compatible server ({type(error).__name__}: {error})") from None
