"""`slacktide cite`: sources of names and of results."""

from __future__ import annotations

import json
import re

import pytest

from slacktide.cli.cite import papers, sources_of
from slacktide.cli.main import main
from slacktide.core.policy import names
from slacktide.workload.packaged import PACKAGED

AUTHOR = r"[A-Z][\w-]+, [A-Z][\w. -]+?"


def test_papers_are_complete():
    for paper in papers():
        assert paper.title
        assert re.fullmatch(rf"{AUTHOR}(?: and {AUTHOR})*(?: and others)?", paper.authors), paper.key
        assert 1900 < paper.year < 2100
        assert paper.url.startswith("https://")
        re.compile(paper.pattern)
    assert len({paper.key for paper in papers()}) == len(papers())


@pytest.mark.parametrize("name", [*names(), *(trace.name for trace in PACKAGED)])
def test_every_policy_and_trace_has_a_source(name):
    assert sources_of([name])


def test_a_policy_rests_on_its_own_paper_not_on_others():
    keys = {source.key for source in sources_of(["sliding"])}
    assert "slidingserve" in keys
    assert "orca" not in keys


def test_profiles_tell_their_label_and_their_data():
    composed, prior = sources_of(["h100/llama-3-8b"]), sources_of(["b200/qwen3-8b"])
    assert composed[0].text.startswith("composed")
    assert "aiconfigurator" in {source.key for source in composed}
    assert prior[0].text.startswith("prior")


def test_a_result_names_what_it_used(tmp_path, capsys):
    out = tmp_path / "out"
    arguments = [
        "compare",
        "--policy",
        "vllm-v1,sliding",
        "--trace",
        "azure-conv",
        "--num-prompts",
        "20",
        "--rate",
        "5",
    ]
    assert main([*arguments, "--profile", "h100/llama-3-8b", "--slo", "chat", "--out", str(out)]) == 0
    capsys.readouterr()
    for name in (out, out / "compare.json"):
        assert main(["cite", str(name), "--json"]) == 0
        found = {source["for"] for source in json.loads(capsys.readouterr().out)["sources"]}
        assert found == {"vllm-v1", "sliding", "azure-conv", "h100/llama-3-8b"}


def test_prose_says_et_al_where_bibtex_says_and_others(capsys):
    assert main(["cite", "orca"]) == 0
    assert "Yu, Gyeong-In et al.: Orca" in capsys.readouterr().out
    assert main(["cite", "orca", "--bibtex"]) == 0
    assert "author = {Yu, Gyeong-In and others}" in capsys.readouterr().out


def test_bibtex_has_one_entry_per_paper(capsys):
    assert main(["cite", "sliding", "eb", "eb-plus", "--bibtex"]) == 0
    out = capsys.readouterr().out
    assert out.count("@misc{") == 2
    assert out.count("{") == out.count("}")
    assert main(["cite", "--bibtex"]) == 0
    assert capsys.readouterr().out.count("@misc{") == len(papers())


@pytest.mark.parametrize("content", [None, "", "[]", "{", '{"runs": 3}', '{"runs": [3]}', '{"a": 1}'])
def test_what_is_no_result_is_refused_in_one_line(tmp_path, capsys, content):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    assert main(["cite", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["cite", str(tmp_path)]) == 2
    assert main(["cite", "azure-con"]) == 2
    assert "did you mean azure-con" in capsys.readouterr().err
