"""The Python API: what it returns, how it shows itself, what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

import slacktide
from slacktide import InputError
from slacktide.api import Load, html
from slacktide.cli.main import main
from slacktide.cli.options import ENGINE_FLAGS
from slacktide.cli.vary import LOAD

CASE = {"trace": "azure-conv", "profile": "h100/llama-3-8b", "slo": "ttft:1000,tbt:50"}
SMALL = CASE | {"num_prompts": 60, "rate": 20}


class FirstCome:
    def score(self, view):
        return view.live.arrival_time


@pytest.fixture(scope="module")
def comparison():
    return slacktide.compare(["vllm-v1", "sarathi:chunk_size=512"], **SMALL)


class Page(HTMLParser):
    """Cells of all tables; fails on tags that are not closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.cells = [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        if tag not in ("img", "rect", "path"):
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


def test_every_name_is_there_documented_and_the_stub_has_the_same():
    from pathlib import Path

    stub = Path(slacktide.__file__).with_suffix(".pyi").read_text()
    assert set(re.findall(r" as (\w+)$", stub, re.MULTILINE)) == set(slacktide.__all__) - {"__version__"}
    for name in slacktide.__all__:
        found = getattr(slacktide, name)
        assert name == "__version__" or (found.__doc__ or "").strip(), name
    assert set(slacktide.__all__) <= set(dir(slacktide))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        slacktide.nothing  # noqa: B018


def test_importing_the_package_loads_nothing():
    code = "import sys, slacktide; print([m for m in sys.modules if m.partition('.')[0] in ('numpy', 'numba', 'rich')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_settings_are_those_of_the_command_line():
    assert set(Load.__annotations__) == (set(ENGINE_FLAGS) | set(LOAD) | {"read"}) - {"slo", "trace", "profile"}


def test_a_comparison_is_what_the_command_line_gives(comparison, capsys):
    arguments = ["compare", "--policy", "vllm-v1,sarathi:chunk_size=512", "--trace", "azure-conv", "--json"]
    arguments += ["--profile", "h100/llama-3-8b", "--slo", CASE["slo"], "--num-prompts", "60", "--rate", "20"]
    assert main(arguments) == 0
    others = json.loads(capsys.readouterr().out)["runs"]
    for run, other in zip(comparison, others, strict=True):
        assert run.label == other["label"]
        for key in ("attainment", "p99_ttft_ms", "num_steps"):
            assert run.summary[key] == other["summary"][key]


def test_runs_are_found_by_label(comparison):
    assert [run.label for run in comparison] == ["vllm-v1", "sarathi:chunk_size=512"]
    assert len(comparison) == 2
    assert comparison["vllm-v1"].log.n == 60
    with pytest.raises(InputError, match="did you mean vllm-v1"):
        comparison["vllm-v2"]


def test_it_shows_itself_as_text_and_in_a_notebook(comparison):
    assert "vllm-v1" in repr(comparison)
    text = comparison._repr_html_()
    page = Page(text)
    shown = f"{comparison['vllm-v1'].summary['p50_itl_ms']:.2f}"[:4]
    assert any(cell.startswith(shown) for cell in page.cells)
    assert "data:image/png;base64," in text
    assert "vllm-v1" in repr(comparison["vllm-v1"])
    assert "<table" in comparison["vllm-v1"]._repr_html_()


def test_without_matplotlib_the_table_is_shown_and_says_what_is_missing(comparison, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    text = comparison._repr_html_()
    Page(text)
    assert "pip install matplotlib" in text
    assert "<img" not in text


def test_saved_and_read_again(comparison, tmp_path):
    again = slacktide.results(comparison.save(tmp_path / "out"))
    assert {run.label: run.summary["attainment"] for run in again} == {
        run.label: run.summary["attainment"] for run in comparison
    }
    assert comparison.figure(tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_policies_of_ones_own():
    run = slacktide.simulate(FirstCome, **SMALL)
    assert run.label == "FirstCome"
    both = slacktide.compare([FirstCome, FirstCome, "vllm-v1"], **SMALL)
    assert [r.label for r in both] == ["FirstCome", "FirstCome#2", "vllm-v1"]
    assert both["FirstCome"].summary["p99_ttft_ms"] == run.summary["p99_ttft_ms"]


def test_goodput():
    found = slacktide.goodput(
        "vllm-v1,sarathi", seeds=1, resolution=0.3, num_prompts=150, **(CASE | {"slo": "ttft:300,tbt:15"})
    )
    assert set(found.rates) == {"vllm-v1", "sarathi"}
    assert "95 % interval" in repr(found)
    page = Page(found._repr_html_())
    assert f"{found.rates['sarathi']:.2f}" in page.cells


def test_a_rate_without_limit_is_shown_as_such():
    record = {"label": "a", "rate": None, "rate_low": None, "rate_high": None, "notes": [], "profile": "p",
              "profile_label": "prior", "target": 0.99, "slo": "x"}  # fmt: skip
    found = slacktide.Goodput([record])
    assert "unlimited" in repr(found)
    Page(found._repr_html_())


def test_no_goodput_passes_the_bound():
    case = CASE | {"slo": "ttft:300,tbt:15", "num_prompts": 150}
    limit = slacktide.bound(**case)
    found = slacktide.goodput("vllm-v1", seeds=1, resolution=0.3, **case)
    assert limit["bound"] is None or found.rates["vllm-v1"] <= limit["bound"]


def test_sweep():
    found = slacktide.sweep("vllm-v1,sarathi", {"rate": [10, 20], "sarathi.chunk_size": [256, 512]},
                            num_prompts=40, **CASE)  # fmt: skip
    assert len(found.records) == 6
    assert found.columns()["rate"] == [10.0, 10.0, 10.0, 20.0, 20.0, 20.0]
    assert repr(found).count("\n") == 7
    Page(found._repr_html_())


def test_advice():
    found = slacktide.advise(trace="synthetic:prompt=512,output=64", profile="rtx-pro-6000/qwen3-8b",
                             max_concurrency=16, num_prompts=60, rate=float("inf"))  # fmt: skip
    assert found.recommendation in repr(found)
    assert "exclusive" in Page(found._repr_html_()).cells


def test_lists():
    assert {policy["name"] for policy in slacktide.policies()} >= {"vllm-v1", "sliding"}
    assert any(info.name == "h100/llama-3-8b" for info in slacktide.profiles())
    assert any(trace.name == "azure-conv" for trace in slacktide.traces())
    assert any(preset.name == "chat" for preset in slacktide.slo_presets())
    assert slacktide.load_profile("h100/llama-3-8b").num_blocks > 1000
    assert len(slacktide.read_trace("azure-conv").num_prompt_tokens) == 16495
    assert slacktide.cite("sliding")[0]["of"] == "sliding"


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"num_promts": 3}, "unknown setting 'num_promts': did you mean num_prompts"),
        ({"num_prompts": -3}, "num_prompts=-3: expected a whole number"),
        ({"rate": "fast"}, "rate='fast'"),
        ({"slo_mode": "strict"}, "slo_mode='strict'"),
        ({"slo": "ttft:-1"}, "ttft"),
        ({"trace": "azure-con"}, "did you mean"),
        ({"profile": "h100"}, "did you mean"),
        ({"enable_prefix_caching": "perhaps"}, "true or false"),
    ],
)
def test_bad_input_is_one_line(change, part):
    with pytest.raises(InputError, match=re.escape(part)) as caught:
        slacktide.compare("vllm-v1", **(SMALL | change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("policy", [[], 3, int, [None], "nothing", "vllm-v1,sarathi"])
def test_what_is_no_one_policy_is_refused(policy):
    with pytest.raises(InputError):
        slacktide.simulate(policy, **SMALL)


def test_pieces_of_html_are_escaped_and_fit():
    assert "<b>" not in html.table(["<b>"], [["<b>"]]) + html.lines(["<b>"])
    drawn = html.bars([("<a>" * 30, 5.0, 4.0, 6.0), ("b", 2.5, None, None)], "req/s")
    Page(drawn)
    widths = [float(width) for width in re.findall(r"<rect[^>]* width='([\d.]+)'", drawn)]
    assert widths[0] == pytest.approx(2 * widths[1])
    assert html.NAME + widths[0] * 6 / 5 < html.WIDTH
    assert html.bars([], "x") == html.bars([("a", 0.0, None, None)], "x") == ""


def test_a_short_name_does_not_fold_the_head_of_the_table():
    assert "\n policy " in repr(slacktide.simulate("eb", **SMALL))
