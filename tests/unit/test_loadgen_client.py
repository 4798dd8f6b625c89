"""One request against a scripted server: token times to the bit, by a clock that the script sets."""

from __future__ import annotations

import asyncio
import itertools
import math

import pytest

from slacktide.errors import InputError
from slacktide.loadgen import client
from slacktide.loadgen.client import Outcome, get_json, open_session, send
from slacktide.metrics.log import ABORTED, CUT_OFF, FAILED, FINISHED, REJECTED

from .fake_openai import FakeServer, serve_all, usage

BODY = b'{"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4}'


class Clock:
    """A clock that stands still until a script sets it, and knows how many events the client has taken in."""

    def __init__(self):
        self.now, self.taken = 0.0, 0

    def __call__(self):
        return self.now

    async def at(self, now, wrote):
        """Set the time, write (an event), and wait until the client has seen it."""
        self.now, before = now, self.taken
        await wrote
        while self.taken == before:
            await asyncio.sleep(0.001)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()

    class Answer(client.Answer):
        def event(self, text, now):
            super().event(text, now)
            clock.taken += 1

    monkeypatch.setattr(client, "clock", clock)
    monkeypatch.setattr(client, "Answer", Answer)
    return clock


def ask(script, *, timeout=30.0, abort_at=math.inf, body=BODY):
    """The outcome of one request against a server with that script, and whether the server answered at all."""
    outcome, answered = Outcome(), []

    async def run(url):
        async with open_session(url, {}) as session:
            address, more = f"{url}/v1/completions", {"timeout": timeout, "abort_at": abort_at}
            await send(session, address, body, outcome, on_response=lambda: answered.append(1), **more)

    with FakeServer(script) as server:
        asyncio.run(run(server.url))
    return outcome, bool(answered)


def test_token_times_are_those_of_the_chunks_and_their_counts(clock):
    async def script(x):
        clock.now = 2.0  # slow headers: they are no token
        await x.head()
        await clock.at(2.5, x.chunk(1, 1))
        await clock.at(2.75, x.chunk(2, 3))  # two tokens in one chunk
        await clock.at(3.0, x.event({"choices": [{"text": ""}], "usage": usage(x.body, 3)}))  # none
        await clock.at(4.0, x.chunk(1, 4, "length"))
        clock.now = 9.0  # what follows the last token is not latency
        await x.end(4)

    clock.now = 1.0
    outcome, answered = ask(script)
    assert answered
    assert (outcome.reason, outcome.error) == (FINISHED, "")
    assert outcome.sent == 1.0
    assert outcome.token_times == [2.5, 2.75, 2.75, 4.0]
    assert (outcome.delivered, outcome.prompt_tokens, outcome.end) == (4, 3, 4.0)


def test_an_event_cut_into_pieces_has_the_time_of_its_end(clock):
    async def script(x):
        await x.head()
        await x.raw(b'data: {"choices": [{"text": "a"}], "usage": {"compl')
        clock.now = 5.0
        await clock.at(5.0, x.raw(b'etion_tokens": 1}}\n\n'))
        await clock.at(6.0, x.event("[DONE]"))

    assert ask(script)[0].token_times == [5.0]


def test_headers_without_an_answer_time_out(clock):
    async def script(x):
        await x.head()
        await clock.at(1.0, x.chunk(1, 1))
        await asyncio.sleep(600)

    outcome, answered = ask(script, timeout=0.3)
    assert answered
    assert (outcome.reason, outcome.error) == (FAILED, "no complete answer after 0.3 s")
    assert outcome.token_times == [1.0]  # what came, came


def test_no_headers_at_all_time_out_too(clock):
    async def script(x):
        await asyncio.sleep(600)

    outcome, answered = ask(script, timeout=0.2)
    assert not answered
    assert outcome.reason == FAILED
    assert not outcome.unreachable  # the server took the connection


def test_a_client_that_leaves_is_an_abort(clock):
    async def script(x):
        await x.head()
        await clock.at(0.0, x.chunk(1, 1))
        await asyncio.sleep(600)

    outcome, _ = ask(script, abort_at=0.3)
    assert (outcome.reason, outcome.error, outcome.delivered) == (ABORTED, "the client left", 1)
    assert ask(script, abort_at=-1.0)[0].reason == ABORTED  # its time is over before it is sent


@pytest.mark.parametrize(
    ("status", "headers", "body", "reason", "error"),
    [
        (503, ["retry-after: 7"], {"error": {"message": "full"}}, REJECTED, "HTTP 503, retry after 7 s: full"),
        (429, [], {"error": "slow down"}, REJECTED, "HTTP 429: slow down"),
        (400, [], {"error": {"message": "no such\nfield"}}, FAILED, "HTTP 400: no such field"),
        (500, [], b"<html>oops</html>", FAILED, "HTTP 500: <html>oops</html>"),
        (204, [], b"", FAILED, "HTTP 204: "),
    ],
)
def test_other_answers_than_200(clock, status, headers, body, reason, error):
    outcome, answered = ask(lambda x: x.refuse(status, body, headers))
    assert answered
    assert (outcome.reason, outcome.error) == (reason, error)
    assert math.isfinite(outcome.end)


async def cut_short(x):
    await x.head()
    await x.chunk(2, 2)


async def resets(x):
    await x.head(headers=["content-length: 100000"])
    await x.chunk(3, 3)
    x.server.die_now()


async def resets_at_once(x):
    x.server.die_now()


async def reports_an_error(x):
    await x.head()
    await x.chunk(1, 1)
    await x.event({"error": {"message": "engine died", "code": 500}})
    await x.event("[DONE]")


async def says_nothing(x):
    await x.head()
    await x.event("[DONE]")


async def is_no_stream(x):
    await x.head()
    await x.raw(b"<html>\n<body>proxy</body>\n")


async def is_no_json(x):
    await x.head()
    await x.event('{"choices": [')


@pytest.mark.parametrize(
    ("script", "part", "tokens"),
    [
        (cut_short, "the stream breaks off after 2 tokens", 2),
        (resets, "connection lost after", None),  # how many of the tokens got through is the network's affair
        (resets_at_once, "connection lost after 0 tokens", 0),
        (reports_an_error, "the server reports: engine died", 1),
        (says_nothing, "the answer holds no token", 0),
        (is_no_stream, "not an event stream: b'<html>'", 0),
        (is_no_json, "an event that is no JSON", 0),
    ],
)
def test_answers_that_break(script, part, tokens):
    outcome, _ = ask(script)
    assert outcome.reason == FAILED
    assert part in outcome.error
    assert "\n" not in outcome.error
    assert tokens is None or len(outcome.token_times) == outcome.delivered == tokens
    assert outcome.end >= max(outcome.token_times, default=outcome.sent)


def test_a_server_that_is_not_there():
    outcome = Outcome()

    async def run(url):
        async with open_session(url, {}) as session:
            await send(session, url, BODY, outcome, timeout=5)

    with FakeServer() as server:
        url = server.url
    asyncio.run(run(url))
    assert (outcome.reason, outcome.unreachable) == (FAILED, True)
    assert outcome.error.startswith("cannot connect: ")


def test_a_cancelled_request_is_cut_off_and_keeps_its_tokens(clock):
    outcome, came = Outcome(), asyncio.Event()

    async def script(x):
        await x.head()
        await clock.at(1.0, x.chunk(2, 2))
        loop.call_soon_threadsafe(came.set)
        await asyncio.sleep(600)

    async def run(url):
        nonlocal loop
        loop = asyncio.get_running_loop()
        async with open_session(url, {}) as session:
            task = asyncio.create_task(send(session, url + "/v1/completions", BODY, outcome, timeout=60))
            await came.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    loop = None
    with FakeServer(script) as server:
        asyncio.run(run(server.url))
    assert (outcome.reason, outcome.delivered) == (CUT_OFF, 2)
    assert math.isnan(outcome.end)


def test_final_count_without_counts_on_the_way():
    async def script(x):
        await x.head()
        for i in range(3):
            await x.event({"choices": [{"text": "ab", "finish_reason": "length" if i == 2 else None}]})
        await x.end(4)

    outcome, _ = ask(script)
    assert (outcome.reason, outcome.by_chunk) == (FINISHED, True)
    assert (len(outcome.token_times), outcome.delivered) == (3, 4)


@pytest.mark.parametrize(("models", "part"), [(500, "HTTP 500"), (b"<html>", "no OpenAI-compatible server")])
def test_the_list_of_models_is_no_list(models, part):
    async def run(url):
        async with open_session(url, {}) as session:
            await get_json(session, url + "/v1/models")

    with FakeServer(models=models) as server, pytest.raises(InputError, match=part):
        asyncio.run(run(server.url))


def test_many_at_once_share_nothing():
    outcomes = [Outcome() for _ in range(50)]

    async def run(url):
        async with open_session(url, {}) as session:
            await asyncio.gather(*(send(session, url + "/v1/completions", BODY, o, timeout=30) for o in outcomes))

    with FakeServer(serve_all) as server:
        asyncio.run(run(server.url))
    assert {(o.reason, o.delivered) for o in outcomes} == {(FINISHED, 4)}
    for o in outcomes:
        assert all(a <= b for a, b in itertools.pairwise([o.sent, *o.token_times, o.end]))
