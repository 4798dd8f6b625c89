"""Starting and stopping a server for a measurement."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from slacktide.errors import InputError
from slacktide.loadgen import server as module
from slacktide.loadgen.server import ServerProcess, cpu_environment, free_port

SERVER = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    calls = 0
    def do_GET(self):
        Handler.calls += 1
        self.send_response(503 if Handler.calls < 3 else 200)
        self.end_headers()
        self.wfile.write(os.environ.get("MARK", "").encode())
if len(sys.argv) > 2:
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(sys.argv[2], "w").write(str(child.pid))
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(module, "POLL", 0.02)


def started(tmp_path, *arguments, code=SERVER, **more):
    port = free_port()
    command = [sys.executable, "-c", code, str(port), *arguments]
    return ServerProcess(command, f"http://127.0.0.1:{port}/", tmp_path / "a" / "log", **more)


def test_a_server_runs_while_the_block_does(tmp_path):
    with started(tmp_path, environment={"MARK": "here"}) as server:
        assert server.healthy()
        with urllib.request.urlopen(server.url + "/health") as response:
            assert response.read() == b"here"
    assert not server.healthy()
    assert server.returncode == -signal.SIGTERM


def test_nothing_of_it_is_left(tmp_path):
    with started(tmp_path, str(tmp_path / "child")) as server:
        child = int((tmp_path / "child").read_text())
        os.kill(child, 0)
    while True:  # its parent is gone: init reaps it soon
        try:
            if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                break
        except FileNotFoundError:
            break
    assert server.stop() == -signal.SIGTERM  # once more does no harm


def test_a_terminated_program_leaves_no_server(tmp_path):
    code = f"""
import sys, time
from pathlib import Path
from slacktide.loadgen.server import ServerProcess, free_port
port = free_port()
with ServerProcess([sys.executable, "-c", {SERVER!r}, str(port)], f"http://127.0.0.1:{{port}}", Path(sys.argv[1])):
    print(port, flush=True)
    time.sleep(600)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        port = int(program.stdout.readline())
        program.terminate()
        assert program.wait(60) == 128 + signal.SIGTERM
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health")


def test_one_that_fails_shows_its_log(tmp_path):
    broken = started(tmp_path, code="print('no such model'); raise SystemExit(3)")
    with pytest.raises(InputError, match=r"ended with status 3: .*no such model"):
        broken.__enter__()


def test_of_several_errors_the_first_is_told(tmp_path):
    code = "import sys; print('app.BadError: first cause', file=sys.stderr); raise ValueError('a consequence')"
    with pytest.raises(InputError, match=r"status 1: app\.BadError: first cause \(log: "):
        started(tmp_path, code=code).__enter__()


def test_one_that_is_never_healthy_is_stopped(tmp_path):
    slow = started(tmp_path, code="import time; time.sleep(600)", timeout=0.2)
    with pytest.raises(InputError, match=r"not healthy within 0\.2 s"):
        slow.__enter__()
    assert slow.returncode == -signal.SIGTERM


def test_a_core_is_left_for_the_front_end():
    assert [cpu_environment(n)["OMP_NUM_THREADS"] for n in (1, 2, 8)] == ["1", "1", "7"]
