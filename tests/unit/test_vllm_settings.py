"""Settings and per-request targets of the plug-in; no vLLM needed."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from slacktide.core.types import MAX_SLO_SECONDS, SLO
from slacktide.errors import InputError
from slacktide.vllm.settings import Settings, build_policy, from_additional_config, policy_spec, state_dir
from slacktide.vllm.targets import MAX_LABELS, MIN_SLO_SECONDS, OTHER, Labels, Targets, read_slos, spelt
from slacktide.workload.slos import list_slo_presets, parse_slo


def test_no_settings_are_the_defaults():
    assert (
        from_additional_config(None) == from_additional_config({}) == from_additional_config({"other": 1}) == Settings()
    )


def test_settings_are_read():
    given = {"policy": "sarathi-edf:chunk_size=512", "slo": "ttft:2000,tbt:200", "classes": {"gold": "ttft:100"}}
    settings = from_additional_config({"slacktide": given})
    targets = settings.targets()
    assert targets.default == SLO(2.0, 0.2)
    assert targets.by_class == {"gold": SLO(0.1)}
    assert policy_spec(settings).label == "sarathi-edf:chunk_size=512"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("sarathi-edf", "expected an object"),
        ({"polcy": "fcfs"}, "polcy.*did you mean policy"),
        ({"policy": 3}, "policy=3: expected text"),
        ({"mode": "shadw"}, "did you mean shadow"),
        ({"max_failures": 0}, "max_failures=0: expected a whole number of at least 1"),
        ({"max_decision_ms": "fast"}, "max_decision_ms='fast': expected a number"),
        ({"max_decision_ms": True}, "max_decision_ms=True"),
        ({"prior": {"alpha": 1}}, "alpha_"),
        ({"prior": {"alpha_d": -1}}, "prior.alpha_d=-1"),
        ({"classes": "gold"}, "classes='gold': expected an object"),
        ({"prior": 3}, "prior=3: expected an object, or the name of a profile"),
    ],
)
def test_bad_settings_are_named(given, message):
    with pytest.raises(InputError, match=message):
        from_additional_config({"slacktide": given})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings(policy="sarathi-edff"), "did you mean sarathi-edf"),
        (Settings(policy="fcfs,vllm-v1"), "expected one policy, found 2"),
        (Settings(policy="sarathi-edf:chunk_size=0"), "chunk_size=0"),
        (Settings(policy="tests.unit.test_vllm_settings:Unsteerable"), "cannot be steered to"),
        (Settings(policy="tests.unit.test_vllm_settings:Oracle"), "true output lengths"),
    ],
)
def test_policies_that_cannot_serve_are_refused(settings, message, monkeypatch):
    import sys

    monkeypatch.setitem(
        sys.modules, "tests.unit.test_vllm_settings", SimpleNamespace(Unsteerable=Unsteerable, Oracle=Oracle)
    )
    with pytest.raises(InputError, match=message):
        policy_spec(settings)


class Unsteerable:
    steerable = False

    def plan(self, view):
        raise NotImplementedError


class Oracle:
    oracle = True

    def plan(self, view):
        raise NotImplementedError


def test_engine_flags_are_defaults_of_parameters_that_mean_the_same():
    flags = SimpleNamespace(long_prefill_token_threshold=77, policy="priority", scheduler_reserve_full_isl=False)
    spec = policy_spec(Settings(policy="vllm-v1"), flags)
    assert spec.parameters["long_prefill_token_threshold"] == 77
    assert spec.parameters["scheduling_policy"] == "priority"
    assert spec.parameters["scheduler_reserve_full_isl"] is False
    own = policy_spec(Settings(policy="vllm-v1:long_prefill_token_threshold=5"), flags)
    assert own.parameters["long_prefill_token_threshold"] == 5
    assert build_policy(own).long_prefill_token_threshold == 5
    assert "scheduling_policy" not in policy_spec(Settings(policy="sarathi-edf"), flags).parameters


def test_servers_have_directories_of_their_own(tmp_path, monkeypatch):
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    assert state_dir(Settings(), "a") != state_dir(Settings(), "b")
    assert state_dir(Settings(state_dir=str(tmp_path)), "a") == tmp_path
    monkeypatch.setenv(
        "PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "prometheus")
    )  # several API servers, ids of their own
    assert state_dir(Settings(), "a") == state_dir(Settings(), "b") == tmp_path / "prometheus" / "slacktide"
    assert state_dir(Settings(state_dir=str(tmp_path)), "a") == tmp_path


# ---- targets ---------------------------------------------------------------------------------------------------------


PRIOR = {"alpha_p": 10.0, "beta_p": 0.1}


@pytest.mark.parametrize("text", ["ttft:500", "ttft:500 tpot:50", "e2el:30s,ttft:1.5", "itl:40", "ttft:5x,tbt:40",
                                  *(preset.name for preset in list_slo_presets())])  # fmt: skip
def test_targets_are_those_of_the_command_line(text):
    spec = parse_slo(text)
    targets = Settings(slo=text, prior=PRIOR).targets()
    assert targets.default == SLO(spec.ttft, spec.tbt, spec.e2e)
    assert targets.factors == ({"": spec.ttft_factor} if spec.ttft_factor else {})
    assert parse_slo(spelt(spec)) == spec


def test_slo_names_classes_too():
    settings = Settings(slo="chat;batch=e2el:600s;gold=ttft:2x", classes={"silver": "rag"}, prior=PRIOR)
    targets = settings.targets()
    assert targets.default == SLO(0.2, 0.05)
    assert targets.by_class == {"batch": SLO(e2e=600.0), "gold": SLO(), "silver": SLO(0.3, 0.1, 3.0)}
    assert targets.factors == {"gold": 2.0}
    assert [targets.classes.code(name) for name in ("batch", "gold", "silver")] == [1, 2, 3]
    assert Settings(slo="batch=e2el:9").targets().default == SLO()


@pytest.mark.parametrize("text", ["ttft", "ttft:0", "ttft:-5", "ttft:nan", "ttft:1e99", "tft:5", "tbt:5x", "chta", ";",
                                  "ttft:5,ttft:6", "tbt:5,tpot:6", "a=ttft:5;a=ttft:6"])  # fmt: skip
def test_bad_targets_are_refused(text):
    with pytest.raises(InputError, match=r"slacktide\.slo: "):
        Settings(slo=text).targets()
    with pytest.raises(InputError, match="here: "):
        read_slos(text, "here")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings(slo="ttft:5x"), "5x.*name a profile"),
        (Settings(classes={"a": "dialogue"}), "5x.*name a profile"),
        (Settings(slo="a=ttft:5", classes={"a": "ttft:6"}), "classes.a.*names this class"),
        (Settings(classes={"a": "b=ttft:6"}), "of this class alone"),
        (Settings(classes={"a": "ttft:6;b=ttft:6"}), "of this class alone"),
    ],
)
def test_targets_that_cannot_hold_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        settings.targets()


def test_a_relative_target_is_written_out_once():
    targets = Settings(slo="ttft:5x,tbt:50;gold=ttft:100;slow=ttft:20x", prior=PRIOR).targets()
    told = targets.with_ttft({"slo_class": "other", "tenant": "me"}, lambda: 0.3)
    assert told == {"slo_class": "other", "tenant": "me", "slo_ttft_ms": 1500.0}
    assert targets.of(told)[0] == SLO(1.5, 0.05)
    assert targets.with_ttft(None, lambda: 0.3) == {"slo_ttft_ms": 1500.0}
    assert targets.with_ttft({"slo_class": "slow"}, lambda: 0.3)["slo_ttft_ms"] == 6000.0
    assert targets.with_ttft(None, lambda: 1e9)["slo_ttft_ms"] == MAX_SLO_SECONDS * 1e3
    for own in ({"slo_class": "gold"}, {"slo_ttft_ms": 70}, {"slo_ttft_ms": "70"}, {"slo_ttft_ms": -4}):
        assert targets.with_ttft(own, lambda: 1 / 0) is own
    assert (targets.invalid, targets.clamped) == (0, 0)
    assert targets.with_ttft({"slo_ttft_ms": "soon"}, lambda: 0.3) == {"slo_ttft_ms": 1500.0}
    assert targets.invalid == 1


def test_a_request_brings_its_own_targets():
    targets = Targets(SLO(2.0, 0.2), {"gold": SLO(0.5, 0.05, 9.0)})
    assert targets.of(None) == (SLO(2.0, 0.2), 0, 0)
    assert targets.of({"slo_ttft_ms": 300}) == (SLO(0.3, 0.2), 0, 0)
    slo, slo_class, tenant = targets.of({"slo_class": "gold", "slo_tpot_ms": "80", "tenant": "me"})
    assert slo == SLO(0.5, 0.08, 9.0)
    assert targets.classes.names[slo_class] == "gold"
    assert targets.tenants.names[tenant] == "me"
    assert targets.of({"slo_class": "unheard-of"})[0] == SLO(2.0, 0.2)
    assert targets.of({"slo_e2el_ms": 1000, "kv_transfer_params": {}})[0] == SLO(2.0, 0.2, 1.0)
    assert (targets.invalid, targets.clamped) == (0, 0)


@pytest.mark.parametrize("value", ["soon", None, [5], True, math.nan])
def test_what_is_no_number_is_counted_and_the_default_stands_in(value):
    targets = Targets(SLO(2.0, 0.2))
    assert targets.of({"slo_ttft_ms": value})[0] == SLO(2.0, 0.2)
    assert targets.invalid == 1


@pytest.mark.parametrize(("value", "seconds"), [(0, MIN_SLO_SECONDS), (-5, MIN_SLO_SECONDS), (1e30, MAX_SLO_SECONDS),
                                                (math.inf, MAX_SLO_SECONDS), (10**400, None)])  # fmt: skip
def test_targets_out_of_range_are_clamped_and_counted(value, seconds):
    targets = Targets(SLO(2.0, 0.2))
    slo = targets.of({"slo_ttft_ms": value})[0]
    assert slo.ttft == (2.0 if seconds is None else seconds)
    assert targets.invalid + targets.clamped == 1


@pytest.mark.parametrize("value", ["", "x" * 65, "a\nb", 3.5, True])
def test_labels_must_be_short_and_printable(value):
    targets = Targets()
    assert targets.of({"tenant": value})[2] == 0
    assert targets.invalid == 1


def test_labels_do_not_grow_without_end():
    labels = Labels()
    codes = [labels.code(f"t{i}") for i in range(2 * MAX_LABELS)]
    assert len(labels.names) == MAX_LABELS
    assert len(set(codes)) == MAX_LABELS - 1
    assert labels.names[codes[-1]] == OTHER
    assert labels.code("t0") == codes[0]
