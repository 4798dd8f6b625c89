"""SLO syntax: units, aliases, classes, presets, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

from slacktide.errors import InputError
from slacktide.workload import SLOSpec, list_slo_presets, load_workload, parse_slo, parse_slos
from slacktide.workload.slos import slo_columns


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("ttft:500,tbt:50,e2el:5000", SLOSpec(0.5, 0.05, 5.0)),
        ("ttft:500 tbt:50", SLOSpec(0.5, 0.05)),
        (" ttft : 500 ,  tpot : 50 ", SLOSpec(0.5, 0.05)),
        ("itl:50", SLOSpec(tbt=0.05)),
        ("TTFT:500ms,e2el:2s", SLOSpec(0.5, e2e=2.0)),
        ("time_to_first_token:100 inter_token_latency:3.4", SLOSpec(0.1, 0.0034)),
        ("ttft:5x,tbt:40", SLOSpec(tbt=0.04, ttft_factor=5.0)),
        ("ttft:2.5x", SLOSpec(ttft_factor=2.5)),
        ("ttft:1e3", SLOSpec(1.0)),
        ("chat", SLOSpec(0.2, 0.05)),
        ("rag,e2el:4000", SLOSpec(0.3, 0.1, 4.0)),
        ("dialogue,ttft:500", SLOSpec(0.5, 0.04)),
    ],
)
def test_targets_in_seconds(text, spec):
    parsed = parse_slo(text)
    for name in ("ttft", "tbt", "e2e", "ttft_factor"):
        assert getattr(parsed, name) == pytest.approx(getattr(spec, name)), name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        (" , ", "empty"),
        ("ttft:0", "more than 0"),
        ("ttft:-5", "more than 0"),
        ("tbt:nan", "expected milliseconds"),
        ("ttft:inf", "expected milliseconds"),
        ("ttft:1e300", "at most"),
        ("ttft:1e999", "too large"),
        ("e2el:1e10", "at most 1e"),
        ("ttft:", "found ''"),
        ("ttft:5y", "expected milliseconds"),
        ("ttft:1_000", "expected a number"),
        ("tbt:5x", "only ttft"),
        ("ttft:0x", "factor above 0"),
        ("ttft:1e9x", "factor above 0"),
        ("tttf:500", "did you mean ttft"),
        ("tbt:50,itl:40", "given twice"),
        ("chatt", "did you mean chat"),
        ("500", "unknown SLO preset"),
        ("ttft:500,chat", "must stand first"),
    ],
)
def test_refused(text, message):
    with pytest.raises(InputError, match=message):
        parse_slo(text)


def test_classes_and_default():
    slos = parse_slos("interactive=ttft:500,tbt:50; batch = e2el:600000; chat")
    assert slos.by_class == {"interactive": SLOSpec(0.5, 0.05), "batch": SLOSpec(e2e=600.0)}
    assert slos.default == SLOSpec(0.2, 0.05)
    assert not slos.needs_prefill_time
    assert parse_slos("a=dialogue").needs_prefill_time
    assert parse_slos("ttft:500").default == SLOSpec(0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        (";", "empty"),
        ("a=ttft:5;a=ttft:6", "class a is given twice"),
        ("ttft:5;tbt:6", "two parts without a class"),
        ("a=", "empty"),
        ("=ttft:5", "expected CLASS"),
        ("ttft=500", "unknown SLO preset"),
        ("ttft:5=6", "expected CLASS"),
    ],
)
def test_refused_class_lists(text, message):
    with pytest.raises(InputError, match=message):
        parse_slos(text)


def test_columns_by_class():
    classes = np.array([0, 1, 1, 0])
    ttft, tbt, e2e = slo_columns(
        parse_slos("a=ttft:500;b=ttft:2x,e2el:9000"), np.array([10, 20, 30, 40]), classes, ("a", "b"), lambda n: n / 100
    )
    assert ttft.tolist() == pytest.approx([0.5, 0.4, 0.6, 0.5])
    assert np.isinf(tbt).all()
    assert e2e.tolist() == [math.inf, 9.0, 9.0, math.inf]


def test_columns_refuse_unknown_classes_and_missing_prefill_times():
    prompts, classes = np.array([10]), np.array([0])
    with pytest.raises(InputError, match=r"unknown SLO class 'interactve'.*interactive"):
        slo_columns(parse_slos("interactve=ttft:5"), prompts, classes, ("interactive",))
    with pytest.raises(InputError, match="isolated prefill time"):
        slo_columns(parse_slos("ttft:5x"), prompts, classes, ("default",))
    for time in (0.0, math.nan, math.inf, -1.0):
        with pytest.raises(InputError, match="would be due after"):
            slo_columns(parse_slos("ttft:5x"), prompts, classes, ("default",), lambda _, t=time: t)


def test_presets_parse_and_name_their_source():
    presets = {preset.name: preset for preset in list_slo_presets()}
    assert {"dialogue", "summarisation", "qoserve", "chat", "rag", "code", "agent"} <= set(presets)
    assert all(parse_slo(name) == parse_slo(preset.slo) for name, preset in presets.items())
    assert all(preset.source for preset in presets.values())
    assert parse_slo("qoserve") == SLOSpec(6.0, 0.05)
    assert parse_slo("agent") == SLOSpec(e2e=5.0)
    assert parse_slo("code") == SLOSpec(0.5, 0.15)


def test_slo_columns_of_the_trace_go_first(tmp_path):
    file = tmp_path / "t.csv"
    file.write_text("arrival_s,prompt_tokens,output_tokens,slo_ttft_ms,slo_class\n0,5,5,,a\n1,5,5,700,a\n2,5,5,,\n")
    workload = load_workload(str(file), slo="a=ttft:200,tbt:50;ttft:300")
    assert workload.slo_ttft.tolist() == pytest.approx([0.2, 0.7, 0.3])
    assert workload.slo_tbt.tolist() == [0.05, 0.05, math.inf]
    assert workload.slo_classes == ("a", "default")
    assert any("go before the SLO given" in note for note in workload.notes)
