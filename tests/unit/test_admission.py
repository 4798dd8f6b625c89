"""The front end's half of admission: estimate file, checks of targets, headers, rejection, and the ASGI middleware."""

from __future__ import annotations

import asyncio
import json
import math
import time

import pytest

from slacktide.core.latency import AffineModel
from slacktide.core.live import LiveTable
from slacktide.core.policies.tide import Tide
from slacktide.core.types import SLO, Limits, Request, StepView
from slacktide.vllm import estimate as estimates
from slacktide.vllm.admission import BadField, Settings, retry_after, with_targets
from slacktide.vllm.estimate import Estimate, Publisher, Reader
from slacktide.vllm.middleware import ENVIRONMENT, AdmissionMiddleware

# ---- estimate --------------------------------------------------------------------------------------------------------


def test_an_estimate_is_read_as_it_was_published(tmp_path):
    publisher = Publisher(tmp_path / "new")
    assert publisher.publish(0.8, 12, 3, "sarathi-edf")
    found = Reader(tmp_path / "new").read()
    assert (found.predicted_ttft_s, found.num_running, found.num_waiting, found.policy) == (0.8, 12, 3, "sarathi-edf")
    assert abs(found.time - time.time()) < 60
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["estimate-0.json"]  # nothing half-written stays


def test_writes_are_rare_unless_forced(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(estimates.time, "monotonic", lambda: clock[0])
    publisher = Publisher(tmp_path)
    assert publisher.publish(1.0, 1, 0, "a")
    assert not publisher.publish(2.0, 1, 0, "a")
    assert publisher.publish(3.0, 1, 0, "a", force=True)
    clock[0] += estimates.MIN_INTERVAL
    assert publisher.publish(4.0, 1, 0, "a")


def test_the_least_loaded_engine_speaks(tmp_path):
    for engine, ttft in enumerate((3.0, 0.5, 2.0)):
        assert Publisher(tmp_path, engine).publish(ttft, 1, 1, "p")
    assert Reader(tmp_path).read().predicted_ttft_s == 0.5


def test_an_old_estimate_says_nothing(tmp_path):
    Publisher(tmp_path).publish(9.0, 1, 1, "p")
    data = json.loads((tmp_path / "estimate-0.json").read_text())
    (tmp_path / "estimate-0.json").write_text(json.dumps(data | {"time": data["time"] - estimates.MAX_AGE - 1}))
    assert Reader(tmp_path).read() is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"time": 1}', '{"time": "x"}', "[" * 4000, "\x00\xff"])
def test_a_damaged_file_says_nothing(tmp_path, text):
    (tmp_path / "estimate-0.json").write_text(text)
    assert Reader(tmp_path).read() is None
    assert Reader(tmp_path / "absent").read() is None


def test_publishing_never_raises(tmp_path):
    (tmp_path / "file").write_text("")
    publisher = Publisher(tmp_path / "file")  # a directory it cannot make
    assert not publisher.publish(1.0, 1, 1, "p")
    assert not publisher.publish(math.nan, 1, 1, "p", force=True)
    assert publisher.failures == 2
    assert Publisher(tmp_path).publish(math.inf, 1, 1, "p")
    assert Reader(tmp_path).read().predicted_ttft_s > 1e5
    publisher.remove()


# ---- fields ----------------------------------------------------------------------------------------------------------


def told(xargs=None, headers=None, extra=None):
    return with_targets({"prompt": "x", "vllm_xargs": xargs}, headers or {}, extra or {})["vllm_xargs"]


def test_fields_come_out_in_one_form():
    given = {"slo_ttft_ms": "500", "slo_tpot_ms": 50, "slo_class": "chat", "tenant": 7, "other": [1]}
    assert told(given) == {"other": [1], "slo_ttft_ms": 500.0, "slo_tbt_ms": 50.0, "slo_class": "chat", "tenant": "7"}


def test_headers_are_copied_and_the_body_goes_first():
    headers = {"x-llm-d-slo-ttft-ms": "500", "x-slo-ttft-ms": "900", "x-slo-tpot-ms": " 40 ", "x-tenant": "acme"}
    assert told(None, headers, {"x-tenant": "tenant"}) == {"slo_ttft_ms": 500.0, "slo_tbt_ms": 40.0, "tenant": "acme"}
    assert told({"slo_ttft_ms": 100}, headers)["slo_ttft_ms"] == 100.0


def test_a_body_without_our_fields_stays_the_same_object():
    for body in ({"prompt": "x"}, {"vllm_xargs": {"a": 1}}, {"vllm_xargs": {"slo_ttft_ms": 5}}, {"vllm_xargs": None}):
        assert with_targets(body, {"host": "x"}, {}) is body


@pytest.mark.parametrize(
    "value", [0, -1, math.nan, math.inf, -math.inf, 1e300, 10**400, "", "abc", "nan", "inf", True, None, [5], {}]
)
@pytest.mark.parametrize("name", ["slo_ttft_ms", "slo_tbt_ms", "slo_tpot_ms", "slo_e2el_ms"])
def test_a_bad_target_is_named(name, value):
    with pytest.raises(BadField, match="expected milliseconds above 0") as caught:
        told({name: value})
    assert caught.value.field == f"vllm_xargs.{name}"


@pytest.mark.parametrize("value", ["", "x" * 65, "a\nb", 1.5, True, None, ["a"]])
@pytest.mark.parametrize("name", ["slo_class", "tenant"])
def test_a_bad_label_is_named(name, value):
    with pytest.raises(BadField, match="printable characters") as caught:
        told({name: value})
    assert caught.value.field == f"vllm_xargs.{name}"


def test_other_mistakes_in_the_fields():
    with pytest.raises(BadField, match="did you mean slo_ttft_ms"):
        told({"slo_tfft_ms": 5})
    with pytest.raises(BadField, match="give one"):
        told({"slo_tbt_ms": 5, "slo_tpot_ms": 6})
    assert told({"slo_tbt_ms": 5, "slo_tpot_ms": 5}) == {"slo_tbt_ms": 5.0}
    with pytest.raises(BadField, match="expected an object"):
        told([1])
    with pytest.raises(BadField) as caught:
        told(None, {"x-llm-d-slo-ttft-ms": "-5"})
    assert caught.value.field == "x-llm-d-slo-ttft-ms"


# ---- rejection -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("xargs", "predicted", "wait"),
    [
        ({"slo_ttft_ms": 500.0}, 0.5, None),  # just in time
        ({"slo_ttft_ms": 500.0}, 0.51, 1),
        ({"slo_ttft_ms": 500.0}, 4.2, 4),
        ({"slo_ttft_ms": 500.0}, 1e6, 60),
        (None, 1.9, None),  # the default target: 2 s
        (None, 2.1, 1),
        ({"slo_class": "chat"}, 1.1, 1),  # the class's: 1 s
        ({"slo_class": "other"}, 1.1, None),
        ({"slo_class": "chat", "slo_ttft_ms": 9000.0}, 1.1, None),  # the request's own goes first
    ],
)
def test_rejected_when_the_predicted_ttft_exceeds_the_target(xargs, predicted, wait):
    settings = Settings(reject=503, estimate_dir="d", slo_ttft_ms=2000, class_slo_ttft_ms={"chat": 1000})
    estimate = Estimate(0.0, predicted, 1, 1, "p")
    assert retry_after({"vllm_xargs": xargs}, estimate, settings) == wait
    assert retry_after({"vllm_xargs": xargs}, None, settings) is None
    assert retry_after({"vllm_xargs": xargs}, estimate, Settings()) is None


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"reject": 500}', "429, 503 or 0"),
        ('{"reject": 503}', "estimate_dir"),
        ('{"slo_ttft_ms": -1}', "slo_ttft_ms"),
        ('{"class_slo_ttft_ms": {"chat": "x"}}', "chat"),
        ('{"headers": {"x-a": "nothing"}}', "expected one of"),
        ('{"nothing": 1}', "unexpected keyword argument 'nothing'"),
        ('{"headers": "x"}', "headers: expected an object, found 'x'"),
        ('{"class_slo_ttft_ms": 5}', "class_slo_ttft_ms: expected an object, found 5"),
        ("[]", "object"),
        ("[" * 100_000, "nested too deeply"),
        ("{", "Expecting"),
    ],
)
def test_settings_that_are_wrong_stop_the_start(monkeypatch, text, part):
    monkeypatch.setenv(ENVIRONMENT, text)
    with pytest.raises(ValueError, match=part):
        AdmissionMiddleware(None)


# ---- middleware ------------------------------------------------------------------------------------------------------


class Server:
    """The middleware around an application that notes what reaches it and answers 200."""

    def __init__(self):
        self.seen = []
        self.middleware = AdmissionMiddleware(self.application)

    async def application(self, scope, receive, send):
        message = await receive()
        self.seen.append((message["body"], dict(scope["headers"])))
        self.after = await receive()  # what follows the body
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    def post(self, body, headers=(), path="/v1/completions", method="POST", pieces=3, **scope):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        size = -(-len(data) // pieces) or 1
        parts = [data[i : i + size] for i in range(0, len(data), size)] or [b""]
        waiting = [{"type": "http.request", "body": p, "more_body": i < len(parts) - 1} for i, p in enumerate(parts)]
        waiting.append({"type": "http.disconnect"})
        sent = []

        async def receive():
            return waiting.pop(0)

        async def send(message):
            sent.append(message)

        head = [(b"content-length", b"%d" % len(data)), *((k.encode(), v.encode()) for k, v in headers)]
        scope = {"type": "http", "method": method, "path": path, "headers": head} | scope
        asyncio.run(self.middleware(scope, receive, send))
        answer = b"".join(m.get("body", b"") for m in sent)
        return sent[0]["status"], dict(sent[0]["headers"]), json.loads(answer) if answer != b"ok" else None


@pytest.fixture
def server(monkeypatch, tmp_path):
    def make(**settings):
        monkeypatch.setenv(ENVIRONMENT, json.dumps(settings))
        return Server()

    return make


def test_a_request_without_targets_passes_byte_for_byte(server):
    server = server()
    for body in (b'{"prompt":  "x"}', b"{broken", b"", b"[1]", b'{"vllm_xargs": {"slo_ttft_ms": 5}}'):
        assert server.post(body)[0] == 200
        assert server.seen[-1][0] == body
        assert server.after == {"type": "http.disconnect"}


def test_a_header_arrives_in_the_body(server):
    server = server(headers={"X-Tenant": "tenant"})
    headers = [("X-LLM-D-SLO-TTFT-MS", "250"), ("x-tenant", "acme")]
    for path in ("/v1/completions", "/v1/chat/completions", "/prefix/v1/completions/"):
        assert server.post({"prompt": "x"}, headers, path=path, root_path="/prefix")[0] == 200
        body, head = server.seen[-1]
        assert json.loads(body) == {"prompt": "x", "vllm_xargs": {"slo_ttft_ms": 250.0, "tenant": "acme"}}
        assert int(head[b"content-length"]) == len(body)


def test_a_bad_field_is_400_in_vllms_shape(server):
    server = server()
    status, headers, answer = server.post({"prompt": "x", "vllm_xargs": {"slo_ttft_ms": -5}})
    assert status == 400
    assert headers[b"content-type"] == b"application/json"
    assert answer["error"]["param"] == "vllm_xargs.slo_ttft_ms"
    assert answer["error"]["code"] == 400
    assert "found -5" in answer["error"]["message"]
    assert server.seen == []
    assert server.post({"prompt": "x"}, [("x-slo-tpot-ms", "soon")])[0] == 400


def test_other_paths_and_methods_are_left_alone(server):
    server = server()
    for changes in ({"path": "/v1/embeddings"}, {"method": "PUT"}, {"path": "/health"}):
        assert server.post({"vllm_xargs": {"slo_ttft_ms": -5}}, pieces=1, **changes)[0] == 200


@pytest.mark.parametrize("status", [429, 503])
def test_an_overloaded_server_says_when_to_come_back(server, tmp_path, status):
    server = server(reject=status, estimate_dir=str(tmp_path), slo_ttft_ms=1000)
    assert server.post({"prompt": "x"})[0] == 200  # no estimate yet
    Publisher(tmp_path).publish(3.5, 8, 20, "p")
    server.middleware._reader._next = 0.0
    got, headers, answer = server.post({"prompt": "x"})
    assert (got, headers[b"retry-after"]) == (status, b"3")
    assert answer["error"]["code"] == status
    assert server.post({"prompt": "x", "vllm_xargs": {"slo_ttft_ms": 5000}})[0] == 200
    assert server.post(b"{broken")[0] == 200


def test_what_tide_forecasts_is_what_the_client_hears(server, tmp_path):
    """A step of tide's on a long queue -> its forecast -> the file -> 503 with the wait until the queue has drained."""
    table = LiveTable()
    for i in range(40):
        table.append(Request(i, 0.001 * i, 400, 64, SLO(2.0, 0.2)))
    step = AffineModel(alpha_p=0.02, beta_p=0.0005, alpha_d=0.01, beta_d=0.0001)
    plan = Tide(reject="shed").plan(StepView(0.05, table.live, Limits(2048, 64, 16, 4000, 4000), step))
    assert plan.why is not None
    predicted = plan.why["predicted_ttft"]
    assert predicted > 4
    assert Publisher(tmp_path).publish(predicted, 0, 40, "tide")
    server = server(reject=503, estimate_dir=str(tmp_path), slo_ttft_ms=2000)
    status, headers, answer = server.post({"prompt": "x"})
    assert status == 503
    assert int(headers[b"retry-after"]) == math.ceil(predicted - 2.0) == math.ceil(plan.why["retry_after"])
    assert "try again" in answer["error"]["message"]
    assert server.post({"prompt": "x", "vllm_xargs": {"slo_ttft_ms": 60_000}})[0] == 200


def test_our_own_failure_lets_the_request_through(server, monkeypatch):
    server = server()
    monkeypatch.setattr("slacktide.vllm.middleware.with_targets", lambda *_: 1 / 0)
    assert server.post({"vllm_xargs": {"slo_ttft_ms": -5}})[0] == 200
    assert server.middleware._failures == 1


def test_a_client_that_leaves_before_its_body_is_forgotten(server):
    server = server()

    async def receive():
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(server.middleware(scope, receive, None))
    assert server.seen == []


def test_a_lifespan_passes():
    seen = []

    async def application(scope, receive, send):
        seen.append(scope["type"])

    asyncio.run(AdmissionMiddleware(application)({"type": "lifespan"}, None, None))
    assert seen == ["lifespan"]
