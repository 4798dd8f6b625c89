from __future__ import annotations

import math

import numpy as np
import pytest

from slacktide.cli import options
from slacktide.cli.main import OneLineParser
from slacktide.cli.output import plain, progress, table, to_json
from slacktide.core import policy as registry
from slacktide.errors import InputError


@pytest.fixture
def parser():
    made = OneLineParser("slacktide try", "")
    options.add_load(made)
    options.add_policy(made)
    options.add_targets(made)
    options.add_engine(made)
    options.add_save(made)
    options.add_common(made)
    return made


NEEDED = ["--trace", "t", "--profile", "p", "--policy", "x"]


@pytest.mark.parametrize(
    ("text", "value"), [("1", 1), ("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("2_048", 2048), ("1M", 2**20)]
)
def test_counts_are_read_as_vllm_reads_them(text, value):
    assert options.count(text) == value


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "x", "", "1e3", "nan", "1.0005k", "9" * 30])
def test_counts_that_are_none_are_refused(text):
    with pytest.raises(options.Invalid):
        options.count(text)


@pytest.mark.parametrize(
    ("read", "good", "bad"),
    [
        (options.count_or_zero, "0", "-1"),
        (options.number, "-1.5", "nan"),
        (options.positive, "0.5", "0"),
        (options.rate, "inf", "-inf"),
        (options.rate, "0.25", "0"),
        (options.share, "1", "1.01"),
        (options.share_above_zero, "0.9", "0"),
        (options.share_below_one, "0", "1"),
        (options.switch, "on", "2"),
        (options.depth, "2", "3"),
    ],
)
def test_readers_know_their_range(read, good, bad):
    read(good)
    with pytest.raises(options.Invalid):
        read(bad)


def test_rate_has_two_names(parser):
    assert parser.parse([*NEEDED, "--rate", "8"]).rate == 8.0
    assert parser.parse([*NEEDED, "--request-rate", "inf"]).rate == math.inf
    assert parser.parse(NEEDED).rate is None


def test_only_given_engine_settings_are_settings(parser):
    assert options.engine_settings(parser.parse(NEEDED)) == {}
    given = ["--max-num-batched-tokens", "2k", "--no-enable-prefix-caching", "--pipeline-depth", "2"]
    assert options.engine_settings(parser.parse([*NEEDED, *given])) == {
        "max_num_batched_tokens": 2000,
        "enable_prefix_caching": False,
        "pipeline_depth": 2,
    }
    zero = ["--long-prefill-token-threshold", "0", "--watermark", "0"]
    assert options.engine_settings(parser.parse([*NEEDED, *zero])) == {
        "long_prefill_token_threshold": 0,
        "watermark": 0.0,
    }


def test_burstiness_alone_means_gamma(parser):
    assert options.arrival(parser.parse(NEEDED)) == "trace"
    assert options.arrival(parser.parse([*NEEDED, "--burstiness", "0.5"])) == "gamma:burstiness=0.5"
    assert options.arrival(parser.parse([*NEEDED, "--arrival", "gamma", "--burstiness", "2"])) == "gamma:burstiness=2"
    with pytest.raises(InputError, match="does not go with --arrival closed"):
        options.arrival(parser.parse([*NEEDED, "--arrival", "closed:concurrency=2", "--burstiness", "2"]))


def test_targets_have_the_defaults_of_the_definitions(parser):
    args = parser.parse(NEEDED)
    assert (args.slo, args.slo_mode, args.late_tolerance) == (None, "deadline", 0.0)


def test_policies_take_engine_settings(parser, monkeypatch):
    class Served:
        def score(self, view):
            return view.live.arrival_time

    monkeypatch.setattr(registry, "_REGISTRY", {"served": Served})
    monkeypatch.setattr(registry, "_load_in_tree", lambda: None)
    args = parser.parse([*NEEDED[:-1], "served:max_num_batched_tokens=8K", "--policy", "served"])
    first, second = options.policies(args)
    assert first.engine == {"max_num_batched_tokens": 8192}
    assert second.engine == {}
    with pytest.raises(InputError, match=r"watermark='2': expected a share from 0 to 1"):
        options.policies(parser.parse([*NEEDED[:-1], "served:watermark=2"]))


def test_json_is_strict_and_knows_arrays():
    value = {"a": np.array([1.5, math.nan]), "b": np.int64(3), "c": math.inf, 4: (-math.inf, None, True, "ü")}
    assert plain(value) == {"a": [1.5, None], "b": 3, "c": "inf", "4": ["-inf", None, True, "ü"]}
    assert to_json({"x": math.nan}) == '{\n  "x": null\n}\n'


def test_a_table_in_a_pipe_is_not_cut(capsys):
    table(["name", "value"], [["a" * 200, "[red]1[/red]"]], right=[1])
    out = capsys.readouterr().out
    assert "a" * 200 in out
    assert "[red]1[/red]" in out


def test_no_progress_bar_where_there_is_no_terminal(parser, capsys):
    with progress(parser.parse(NEEDED), 3, "runs") as advance:
        advance(1)
    assert capsys.readouterr() == ("", "")
