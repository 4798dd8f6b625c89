from __future__ import annotations

import json
import os
import subprocess
import sys
import types

import pytest

from slacktide.cli import main as frame
from slacktide.cli.main import main
from slacktide.errors import InputError


@pytest.fixture
def verb(monkeypatch):
    """A verb called `try` whose behaviour a test sets: `verb.run = lambda args: ...`."""
    module = types.ModuleType("slacktide_test_verb", "Try something.\n\nexample:\n  slacktide try")
    module.add_arguments = lambda parser: parser.add_argument("--max-num-seqs", type=int)
    module.run = lambda args: 0
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(frame.VERBS, "try", (module.__name__, "try something"))
    return module


def refused(capsys, arguments):
    """The one line that a refused command prints."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_help_names_every_verb(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for name, (_, line) in frame.VERBS.items():
        assert f"  {name} " in out
        assert line in out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"slacktide {frame.__version__}\n"


def test_no_verb_prints_the_help_on_standard_error_and_is_no_success(capsys):
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "verbs:" in err


def test_help_of_a_verb_holds_its_description_and_the_arguments_of_all(verb, capsys):
    assert main(["try", "--help"]) == 0
    first = capsys.readouterr().out
    assert main(["help", "try"]) == 0
    assert capsys.readouterr().out == first
    for part in ("Try something.", "slacktide try", "--max-num-seqs", "--json", "--out DIR", "--seed", "--quiet"):
        assert part in first


def test_an_unknown_verb_gets_near_ones(capsys):
    assert "did you mean doctor" in refused(capsys, ["docter"])


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--max-num-seq", "3"], "did you mean --max-num-seqs"),  # no abbreviations
        (["--max-num-seqs", "x"], "invalid int value: 'x'"),
        (["--seed", "-1"], "expected a whole number of at least 0, found '-1'"),
        (["stray"], "unknown argument 'stray'"),
        (["--json=yes"], "--json"),
    ],
)
def test_a_mistaken_argument_is_one_line(verb, capsys, arguments, part):
    line = refused(capsys, ["try", *arguments])
    assert line.startswith("slacktide try: error: ")
    assert line.endswith("(see 'slacktide try --help')\n")
    assert part in line


def test_underscores_in_a_flag_are_dashes_and_values_stay(verb):
    seen = []
    verb.run = lambda args: seen.append((args.max_num_seqs, str(args.out))) or 0
    assert main(["try", "--max_num_seqs=3", "--out", "a_b"]) == 0
    assert main(["try", "--max_num_seqs", "3", "--out=a_b"]) == 0
    assert seen == [(3, "a_b")] * 2


def test_status_of_the_verb_is_the_status_of_the_command(verb):
    verb.run = lambda args: 1
    assert main(["try"]) == 1


def test_input_error_is_one_line_and_2(verb, capsys):
    def run(args):
        raise InputError("trace.csv: line 3:\n  expected a number")

    verb.run = run
    assert refused(capsys, ["try"]) == "slacktide: error: trace.csv: line 3: expected a number\n"


def test_a_path_that_cannot_be_opened_is_one_line_and_2(verb, capsys, tmp_path):
    verb.run = lambda args: (tmp_path / "absent.csv").read_text() and 0
    line = refused(capsys, ["try"])
    assert "absent.csv: No such file or directory" in line


@pytest.mark.parametrize("error", [OSError("inner"), ValueError("inner"), KeyError("inner")])
def test_a_defect_of_ours_keeps_its_traceback(verb, error):
    def run(args):
        raise error

    verb.run = run
    with pytest.raises(type(error)):
        main(["try"])


def test_interrupt_is_130(verb):
    def run(args):
        raise KeyboardInterrupt

    verb.run = run
    assert main(["try"]) == 130


def test_a_reader_that_went_away_is_quiet():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "slacktide", "--help"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert done.stderr == ""
    assert done.returncode == 141


def test_python_m_is_the_command():
    command = [sys.executable, "-m", "slacktide", "doctr"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("slacktide: error: unknown verb")


def test_policies_as_json_has_every_policy(capsys):
    from slacktide.core.policy import names

    assert main(["policies", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["policies"]
    assert [policy["name"] for policy in found] == names()


def test_policies_describes_one(capsys, monkeypatch, tmp_path):
    (tmp_path / "my_policy_file.py").write_text(
        '"""Serve the newest first.\n\nNobody asked for it."""\n'
        "from dataclasses import dataclass\n"
        "@dataclass\nclass Mine:\n    window: int = 4\n    'Steps to look [ahead].'\n    oracle = True\n"
        "    def score(self, view):\n        return -view.live.arrival_time\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["policies", "my_policy_file:Mine"]) == 0
    out = capsys.readouterr().out
    for part in ("Nobody asked for it.", "window", "4", "Steps to look [ahead].", "sees true output lengths"):
        assert part in out
    assert main(["policies", "my_policy_file:Mine", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["policies"]
    assert found["summary"] == "Serve the newest first."
    assert found["parameters"] == [
        {
            "name": "window",
            "type": "int",
            "optional": False,
            "choices": [],
            "required": False,
            "default": 4,
            "description": "Steps to look [ahead].",
        }
    ]


def test_policies_refuses_an_unknown_name(capsys):
    assert "unknown policy 'no-such-policy'" in refused(capsys, ["policies", "no-such-policy"])


def test_traces_have_their_sources(capsys):
    assert main(["traces", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["traces"]
    assert "azure-conv" in [trace["name"] for trace in found]
    for trace in found:
        assert trace["rows"] > 0
        assert trace["licence"]
        assert trace["source"].startswith("https://")
    assert main(["traces"]) == 0
    assert "16,495" in capsys.readouterr().out


def test_profiles_can_be_found_by_gpu_and_by_model(capsys):
    def listed(*name):
        assert main(["profiles", *name, "--json"]) == 0
        return [profile["name"] for profile in json.loads(capsys.readouterr().out)["profiles"]]

    every = listed()
    assert {"h100/llama-3-8b", "4x-h100/llama-3-70b"} <= set(every)
    assert listed("h100") == [name for name in every if name.startswith(("h100/", "2x-h100/", "4x-h100/"))]
    assert listed("4x-h100") == [name for name in every if name.startswith("4x-h100/")]
    assert listed("Llama-3-70B") == [name for name in every if name.endswith("/llama-3-70b")]


def test_a_profile_in_detail_has_sources_and_step_times(capsys):
    assert main(["profiles", "h100/llama-3-8b", "--json"]) == 0
    (profile,) = json.loads(capsys.readouterr().out)["profiles"]
    times = [sample["ms"] for sample in profile["step_times"]]
    assert 0 < times[0] < times[1]  # a longer prefill
    assert 0 < times[2] < times[3] < times[4]  # more decodes
    assert profile["num_blocks"] > 0
    assert profile["sources"]
    assert main(["profiles", "h100/llama-3-8b"]) == 0
    assert f"prefill of 512 tokens: {times[0]:.2f} ms" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["h10", "h100/llama-3-8", "absent.json"])
def test_profiles_refuses_an_unknown_name(capsys, name):
    assert name in refused(capsys, ["profiles", name])


def test_out_writes_the_same_document_as_json(capsys, tmp_path):
    assert main(["policies", "--json", "--out", str(tmp_path / "a" / "b")]) == 0
    assert (tmp_path / "a" / "b" / "policies.json").read_text() == capsys.readouterr().out


def test_out_that_is_a_file_is_refused(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert "expected a directory, found a file" in refused(capsys, ["policies", "--out", str(tmp_path / "file")])


@pytest.mark.parametrize("name", frame.VERBS)
def test_every_verb_has_the_arguments_of_all_and_an_example(name, capsys):
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    for part in ("example:", f"slacktide {name}", "--json", "--out DIR", "--seed", "--quiet"):
        assert part in out


def test_a_note_names_the_runs_that_it_is_about(capsys):
    from slacktide.cli.scenario import print_notes

    runs = [{"label": "a", "notes": ["all", "some", "c: own"]}, {"label": "b", "notes": ["all", "some"]},
            {"label": "c", "notes": ["all", "c, seed 1: own"]}]  # fmt: skip
    print_notes(runs)
    assert capsys.readouterr().out.splitlines() == [
        "note: all", "note: a, b: some", "note: a: c: own", "note: c, seed 1: own"
    ]  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 200])
def test_descriptions_fit_the_terminal_and_stay_commands(monkeypatch, width):
    import shlex

    monkeypatch.setenv("COLUMNS", str(width))
    for name in frame.VERBS:
        verb = frame.load_verb(name)
        shown = frame._filled(verb.__doc__ or "")
        if width == 80:
            assert max(map(len, shown.splitlines())) <= width, name
        written, printed = (
            text.partition("example:\n")[2].replace("\\\n", " ") for text in (verb.__doc__ or "", shown)
        )
        assert shlex.split(printed) == shlex.split(written), name


def test_a_policy_in_the_working_directory_is_found_by_the_installed_command_too(tmp_path):
    (tmp_path / "mine.py").write_text(
        "class Mine:\n    def score(self, view):\n        return view.live.arrival_time\n"
    )
    arguments = ["simulate", "--trace", "synthetic:prompt=16,output=4", "--num-prompts", "5", "--rate", "5",
                 "--profile", "h100/llama-3-8b", "--policy", "mine:Mine"]  # fmt: skip
    # -P: the working directory is not on the path, as for the script that pip makes.
    done = subprocess.run([sys.executable, "-P", "-m", "slacktide", *arguments], cwd=tmp_path, capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
