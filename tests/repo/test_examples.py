"""Every example runs, and says something true."""

from __future__ import annotations

import http.server
import json
import re
import runpy
import threading
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SAYS = {
    "compare": r"most users in time: (\S+)", "own_policy": r"LeastSlack",
    "own_trace": r"sliding \{.*'chat': '[\d.]+ %'",
    "sweep_flags": r"best at the highest rate: --max-num-batched-tokens \d+", "capacity": r"engines for 40 requests/s",
}  # fmt: skip


def test_there_are_six_short_files_and_all_are_tested():
    files = sorted(path.stem for path in EXAMPLES.glob("*.py"))
    assert files == sorted([*SAYS, "client"])
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 60
        assert f"`{path.name}`" in (EXAMPLES / "README.md").read_text()


@pytest.mark.parametrize("name", SAYS)
def test_it_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert re.search(SAYS[name], capsys.readouterr().out)


def test_the_client_sends_its_targets(monkeypatch, capsys):
    seen = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(json.dumps({"data": [{"id": "tiny"}]}).encode())

        def do_POST(self):
            seen.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.answer(b'data: {"choices": []}\n\n' * 16 + b"data: [DONE]\n\n")

        def answer(self, body):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setattr("sys.argv", ["client.py", f"http://127.0.0.1:{server.server_port}"])
        runpy.run_path(str(EXAMPLES / "client.py"), run_name="__main__")
        server.shutdown()
        thread.join()
    assert seen[0]["model"] == "tiny"
    assert seen[0]["vllm_xargs"] == {"slo_ttft_ms": 1000, "slo_tbt_ms": 100, "slo_class": "chat"}
    assert "16 chunks" in capsys.readouterr().out
