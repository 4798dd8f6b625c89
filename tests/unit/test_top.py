"""`slacktide top`: recorded pages, a fake server, a server that dies, and what is no server at all."""

from __future__ import annotations

import http.server
import json
import math
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slacktide.cli import top
from slacktide.cli.main import main
from slacktide.errors import InputError
from slacktide.live.figures import WINDOW, History, quantile, view
from slacktide.live.scrape import Scrape, fetch, metrics_url, parse
from slacktide.live.screen import draw
from slacktide.vllm.metrics import FAMILIES, PREFIX, Metrics, samples

PAGES = Path(__file__).parents[1] / "cases/metrics_pages"
IDLE, SERVED = ((PAGES / f"{name}.txt").read_text() for name in ("idle", "served"))
PLAIN = "".join(line for line in SERVED.splitlines(keepends=True) if "slacktide:" not in line)


def text_of(lines) -> list[str]:
    return ["".join(piece for piece, _ in line) for line in lines]


def screen(figures, width=80, height=24, **more) -> list[str]:
    return text_of(draw(figures, url="http://x", clock="12:00:00", width=width, height=height, **more))


class Fake:
    """A server that answers with the next of its pages (text, or status), the last one again and again."""

    def __init__(self, *pages):
        self.pages, self.asked = list(pages), 0
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                page = fake.pages[min(fake.asked, len(fake.pages) - 1)]
                fake.asked += 1
                body = (page if isinstance(page, str) else "no").encode()
                self.send_response(page if isinstance(page, int) else 200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args):
                pass

        self.server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()
        return self

    def die(self):
        if self.thread.is_alive():
            self.server.shutdown()
            self.thread.join()
            self.server.server_close()

    def __exit__(self, *_):
        self.die()


# ---- reading ---------------------------------------------------------------------------------------------------------


def test_a_recorded_page():
    page = parse(SERVED, 0.0)
    assert page.sum("slacktide:requests_total", slo_class="default", end="finished") == 25
    assert page.sum("vllm:prompt_tokens_total") == 1500
    assert page.sum("slacktide:mode", mode="active") == 1
    assert math.isinf(max(float(labels["le"]) for labels, _ in page.items("slacktide:step_seconds_bucket")))


def test_labels_with_escapes_commas_and_braces():
    page = parse('a{x="1,2",y="q\\"}\\\\",z="l\\n"} 3 1700000000000\nb 4\nc{} 5\n', 0.0)
    assert list(page.items("a")) == [({"x": "1,2", "y": 'q"}\\', "z": "l\n"}, 3.0)]
    assert page.sum("b") == 4
    assert page.sum("c") == 5


def test_broken_lines_are_left_out_and_the_rest_is_read():
    page = parse('a 1\na{x=1} 2\na{x="1} 3\n}{ 4\nb one\nc NaN\nd\n\x00\n', 0.0)
    assert page.sum("a") == 1
    assert page.sum("c") == 0
    assert not page.has("b")
    assert not page.has("d")


@given(st.text())
def test_any_text_is_read_without_an_error(text):
    assert isinstance(parse(text, 0.0), Scrape)
    figures = view(None, parse(text + "\nslacktide:mode 1\n", 0.0))
    assert len(screen(figures)) <= 24


def test_addresses():
    assert metrics_url("host:8000") == metrics_url("http://host:8000/metrics") == "http://host:8000/metrics"
    with pytest.raises(InputError, match="expected an address"):
        metrics_url("ftp://host")


# ---- figures ---------------------------------------------------------------------------------------------------------


def test_figures_of_a_recorded_page_since_the_start():
    figures = view(None, parse(SERVED, 0.0))
    assert figures.ours
    assert (figures.mode, figures.model, figures.engines) == ("active", "smollm2-135m", 1)
    (only,) = figures.classes
    assert (only.name, only.ended, only.attained) == ("default", 25, 1.0)
    assert figures.batches["decode"] == pytest.approx(70 / 83)
    assert figures.measured_step == pytest.approx(4.329286 / 83)
    assert figures.step_error == pytest.approx(3.361536 / 4.329286, rel=1e-5)
    assert figures.finished_rate is None
    assert figures.steps_rate is None


def test_rates_are_what_grew_over_the_time_between():
    history = History()
    history.add(parse(IDLE, 100.0))
    figures = history.add(parse(SERVED, 105.0))
    assert figures.span == 5
    assert figures.steps_rate == pytest.approx((83 - parse(IDLE, 0).sum("slacktide:steps_total")) / 5)
    assert figures.prompt_rate == pytest.approx((1500 - parse(IDLE, 0).sum("vllm:prompt_tokens_total")) / 5)
    later = history.add(parse(SERVED, 107.0))
    assert later.steps_rate < figures.steps_rate
    for second in range(108, 150):
        still = history.add(parse(SERVED, float(second)))
    assert still.span <= WINDOW + 1
    assert still.steps_rate == 0
    assert still.ttft == (None, None)


def test_a_server_started_anew_begins_a_new_history():
    history = History()
    history.add(parse(SERVED, 100.0))
    figures = history.add(parse(IDLE, 102.0))
    assert figures.span == 0
    assert figures.steps_rate is None


def test_a_server_without_our_plug_in():
    figures = view(parse(IDLE, 0.0), parse(PLAIN, 10.0))
    assert not figures.ours
    shown = "\n".join(screen(figures))
    assert "no slacktide here" in shown
    assert "KV cache" in shown
    assert "step time" not in shown


@given(st.lists(st.floats(0.001, 9.0), min_size=1, max_size=60), st.floats(0.01, 0.99))
def test_quantiles_lie_in_the_bin_of_the_exact_one(values, share):
    bounds = [*Metrics.buckets("step_seconds"), math.inf]
    bins = [(high, sum(low < v <= high for v in values)) for low, high in zip([0.0, *bounds], bounds, strict=False)]
    found = quantile(bins, share)
    exact = sorted(values)[math.ceil(share * len(values)) - 1]
    index = next(i for i, bound in enumerate(bounds) if exact <= bound)
    assert ([0.0, *bounds][index]) <= found <= (bounds[index] if index < len(bounds) - 1 else bounds[-2])


def test_several_engines_are_added_up():
    two = SERVED + "".join(
        line.replace('engine="0"', 'engine="1"') for line in SERVED.splitlines(keepends=True) if 'engine="0"' in line
    )
    one, both = view(None, parse(SERVED, 0.0)), view(None, parse(two, 0.0))
    assert both.engines == 2
    assert both.classes[0].ended == 50
    assert both.measured_step == pytest.approx(one.measured_step)
    assert both.tbt == pytest.approx(one.tbt)


def test_every_name_of_ours_that_is_read_is_one_that_is_written():
    import re

    metrics = Metrics()
    written = {f"{PREFIX}admission_rejected_total"}
    for name, (kind, labels, _) in FAMILIES.items():
        if kind == "histogram":
            metrics.observe(name, 1.0)
        else:
            metrics.add(name, *labels)
        written |= {sample for sample, _, _ in samples(name, metrics.snapshot())}
    source = (Path(top.__file__).parents[1] / "live/figures.py").read_text()
    read = set(re.findall(r'"(slacktide:\w+)"', source))
    assert read
    assert {n for n in read if n not in written and f"{n}_bucket" not in written} == set()


# ---- screen ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 10), (200, 60), (1, 1), (80, 15)])
@pytest.mark.parametrize("page", [IDLE, SERVED, PLAIN, "slacktide:mode 1"])
def test_the_screen_fits(width, height, page):
    lines = screen(view(None, parse(page, 0.0)), width, height)
    assert len(lines) <= max(height, 10)
    assert max(map(len, lines)) <= max(width, 40)


def test_many_classes_and_long_names_fit():
    more = "".join(f'slacktide:requests_total{{slo_class="{"c" * i}",end="finished"}} {i}\n' for i in range(1, 40))
    lines = screen(view(None, parse(SERVED + more, 0.0)))
    assert len(lines) <= 24
    assert any("more classes" in line for line in lines)


def test_trouble_is_shown():
    page = SERVED + (
        'slacktide:fallbacks_total{reason="exception",engine="0"} 7\nslacktide:policy_off_total{engine="0"} 1\n'
        'slacktide:requests_total{slo_class="chat",end="rejected"} 10\nslacktide:rejected_total 4\n'
        'slacktide:slo_violations_total{slo_class="chat",kind="ttft"} 10\n'
    )
    figures = view(None, parse(page, 0.0))
    shown = "\n".join(screen(figures))
    assert "fallbacks 7 (exception 7)" in shown
    assert "switched off 1" in shown
    assert "rejected 4" in shown
    pieces = [piece for line in draw(figures, url="", clock="") for piece in line]
    assert any(style == "bold red" and "0.0 %" in text for text, style in pieces)


def test_shadow_attainment_is_shown_and_still_fits():
    page = SERVED + "".join(
        f'slacktide:shadow_attainment{{schedule="{name}"}} {value}\n'
        for name, value in (("measured", 0.9), ("stock", 0.912), ("ours", 0.987), ("broken", "NaN"))
    )
    lines = screen(view(None, parse(page, 0.0)))
    assert "shadow     attainment: measured 90.0 %   stock 91.2 %   ours 98.7 %" in lines
    assert len(lines) <= 24


SLACK = 'slacktide:slack_seconds_bucket{engine="0",le="%s"} %d\n'


def with_slack(*counts: tuple[str, int]) -> str:
    return SERVED + "".join(SLACK % pair for pair in counts)


def test_slack_is_shown_with_its_late_share_and_still_fits():
    page = with_slack(("-0.5", 2), ("-0.02", 6), ("0.0", 10), ("0.1", 40), ("2.0", 90), ("10.0", 95), ("+Inf", 100))
    figures = view(None, parse(page, 0.0))
    assert figures.slack_late == pytest.approx(0.1)
    assert figures.slack[0] == -0.5  # beyond the outermost bound, that bound
    assert figures.slack[1] == pytest.approx(0.1 + 1.9 * 10 / 50)
    lines = screen(figures)
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert any("   slack late 10 %  p1 < -500 ms  p50 480 ms" in line for line in lines)
    at = next(i for i, line in enumerate(lines) if "due in" in line)
    panel = [line[50:] for line in lines[at + 1 :]]
    assert panel[0].startswith("late ")
    assert panel[0].endswith("10 % ")
    assert sum(int(line.split()[-2]) for line in panel if line.strip()) == 100
    pieces = [piece for line in draw(figures, url="", clock="") for piece in line]
    assert ("late 10 %", "bold red") in pieces
    plain = "".join(screen(figures, blocks=False))
    assert plain.isascii()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (76, 24), (75, 24), (40, 10), (200, 60), (80, 18)])
@pytest.mark.parametrize("late", [0, 3, 100])
def test_slack_fits_every_screen(width, height, late):
    bounds = [*map(str, Metrics.buckets("slack_seconds")), "+Inf"]
    page = with_slack(*((le, late if float(le) <= 0 else late + 7 * i) for i, le in enumerate(bounds)))
    lines = screen(view(None, parse(page, 0.0)), width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_without_targets_nothing_is_said_of_slack():
    figures = view(None, parse(with_slack(("0.0", 0), ("+Inf", 0)), 0.0))
    assert figures.slack_late is None
    assert not any("slack late" in line or "due in" in line for line in screen(figures))


@given(st.lists(st.floats(-20, 20), min_size=1, max_size=60), st.floats(0.01, 0.99))
def test_quantiles_of_what_may_be_below_zero(values, share):
    bounds = [*Metrics.buckets("slack_seconds"), math.inf]
    bins = [
        (high, sum(low < v <= high for v in values)) for low, high in zip([-math.inf, *bounds], bounds, strict=False)
    ]
    found = quantile(bins, share)
    exact = sorted(values)[math.ceil(share * len(values)) - 1]
    index = next(i for i, bound in enumerate(bounds) if exact <= bound)
    assert found == pytest.approx(bounds[0]) if index == 0 else bounds[index - 1] <= found
    assert found <= (bounds[index] if index < len(bounds) - 1 else bounds[-2])


def test_a_name_cannot_send_control_codes():
    shown = screen(view(None, parse(SERVED.replace("smollm2-135m", "a\x1b[31m"), 0.0)))
    assert "\x1b" not in "".join(shown)


def test_nearly_all_is_not_all():
    page = 'slacktide:mode{mode="active"} 1\nslacktide:requests_total{slo_class="a",end="finished"} 100000\n'
    lines = screen(view(None, parse(page + 'slacktide:slo_attained_total{slo_class="a"} 99999\n', 0.0)))
    assert any("99.9 %" in line for line in lines)


# ---- command ---------------------------------------------------------------------------------------------------------


def test_once_prints_one_plain_screen(capsys):
    with Fake(IDLE, SERVED) as fake:
        assert main(["top", fake.url, "--once", "--interval", "0.01"]) == 0
    out = capsys.readouterr().out
    assert "default" in out
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_json_holds_the_figures(capsys):
    with Fake(SERVED) as fake:
        assert main(["top", fake.url, "--json", "--interval", "0.01"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["classes"][0]["ended"] == 25


def test_a_server_that_dies_in_between_is_shown_as_it_was(capsys):
    with Fake(SERVED, 500) as fake:
        assert main(["top", fake.url, "--once", "--interval", "0.01"]) == 0
    assert "since start" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("page", "part"),
    [
        ("<html><body>hello</body></html>", "no metrics of vLLM there, found '<html>"),
        ("process_cpu_seconds_total 3", "no metrics of vLLM there"),
        ("", "no metrics of vLLM there"),
        (404, "status 404"),
        (503, "status 503"),
    ],
)
def test_what_is_no_vllm_server_is_told_in_one_line(capsys, page, part):
    with Fake(page) as fake:
        assert main(["top", fake.url, "--once"]) == 2
    err = capsys.readouterr().err
    assert part in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("url", ["127.0.0.1:1", "http://", "http://127.0.0.1:99999", "gopher://x", "http://a b"])
def test_no_server_is_told_in_one_line(capsys, url):
    assert main(["top", url, "--once"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_server_that_talks_no_http(capsys):
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def answer():
            connection, _ = listener.accept()
            connection.recv(1000)
            connection.sendall(b"\x00\x01garbage\r\n\r\n")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        assert main(["top", f"127.0.0.1:{listener.getsockname()[1]}"]) == 2
        thread.join()
    assert capsys.readouterr().err.count("\n") == 1


def test_the_running_view_says_when_the_server_is_gone_and_goes_on(monkeypatch):
    """Drawn into a fake terminal: three readings, the server dies, two more looks."""
    import io

    import rich.console

    out, looks = io.StringIO(), 0
    terminal = rich.console.Console(file=out, force_terminal=True, width=80, height=24, color_system=None)
    monkeypatch.setattr(rich.console, "Console", lambda: terminal)
    with Fake(IDLE, SERVED) as fake:

        def sleep(_):
            nonlocal looks
            looks += 1
            if looks == 3:
                fake.die()
            if looks == 5:
                raise KeyboardInterrupt

        monkeypatch.setattr(top.time, "sleep", sleep)
        with pytest.raises(KeyboardInterrupt):
            top._watch(metrics_url(fake.url), fake.url, History(), 0.01)
    shown = out.getvalue()
    assert "no answer since" in shown
    assert shown.rindex("met SLO") > shown.index("no answer since")  # the last figures stay


def test_a_reading_has_the_given_time():
    with Fake(SERVED) as fake:
        assert fetch(metrics_url(fake.url), 7.0).time == 7.0
