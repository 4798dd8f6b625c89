"""From measured steps to a profile: files, host's share, families, cross-validation, where it holds."""

from __future__ import annotations

import json

import numpy as np
import pytest

from slacktide.cli.main import main
from slacktide.core import shape as s
from slacktide.core.latency import AffineModel
from slacktide.core.latency_extended import ExtendedFeatureModel
from slacktide.core.latency_families import SevenFeatureModel
from slacktide.errors import InputError
from slacktide.profiling.belief import sample_shapes
from slacktide.profiling.calibrate import (
    FAMILIES,
    calibrate,
    cross_validated,
    fit_affine,
    folds,
    profile_fields,
)
from slacktide.profiling.experiments_run import run_design
from slacktide.profiling.measurements import Host, drift, fit_host, joined, logged, outliers, read_steps
from slacktide.profiling.profile_file import latency_fields, read_profile
from slacktide.profiling.profiles import load_profile
from slacktide.profiling.region import Region

from .test_experiments import SMALL, FakeEngine, Sample

SETTINGS = {"num_gpu_blocks": 1001, "block_size": 16, "max_num_batched_tokens": 512, "max_num_seqs": 16}
KNOTS = np.array([0.0, 64.0, 256.0])


def truth() -> ExtendedFeatureModel:
    scale = [8e-3, 1e-5, 2e-5, 4e-5, 2e-5, 1e-9, 1e-8, 1e-8, 1e-5, 1e-6, 1e-5]
    return ExtendedFeatureModel(np.random.default_rng(1).uniform(0.5, 1.5, (3, 11)) * scale, KNOTS, 1e-4)


class TrueEngine(FakeEngine):
    """Steps by `truth`, with noise, now and then a hiccup, and a host that takes 1 ms and 0.1 ms a sequence."""

    def __init__(self, noise=0.01):
        super().__init__()
        self.rng, self.noise = np.random.default_rng(0), noise

    def facts(self):
        return {"engine": SETTINGS | {"model": "toy"}, "versions": {"x": "1"}, "hardware": {"cpu": "none"}}

    def measure(self, point, samples):
        self.now += 1.0
        true = float(truth().step_times(point.shape[None])[0])
        found = []
        for _ in range(samples):
            time = true * float(np.exp(self.noise * self.rng.standard_normal()))
            time *= 3.0 if self.rng.random() < 0.02 else 1.0
            found.append(Sample(point.shape, time, time + 1e-3 + 1e-4 * point.shape[s.NUM_SEQUENCES]))
        return found


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    path = tmp_path_factory.mktemp("measured") / "measurements.jsonl"
    engine = TrueEngine()
    run_design(engine, path, minutes=10_000, rounds=3, clock=engine.clock)
    return path


def test_designed_steps_give_back_the_model_and_the_host(measured):
    steps = read_steps(measured)
    assert steps.host.per_step == pytest.approx(1e-3, rel=0.02)
    assert steps.host.per_sequence == pytest.approx(1e-4, rel=0.02)
    assert any("outliers" in note for note in steps.notes)
    fitted = calibrate(steps)
    assert fitted.family == "extended-feature"
    shapes = sample_shapes(load_profile("rtx-4090/llama-3-8b", max_num_batched_tokens=512, max_num_seqs=16), 5, 300)
    inside = ~fitted.region.outside_shapes(shapes)
    assert 0.3 < inside.mean() < 1
    shapes = shapes[inside]
    expected = truth().step_times(shapes) + 1e-3 + 1e-4 * shapes[:, s.NUM_SEQUENCES]
    away = np.abs(fitted.model.step_times(shapes) / expected - 1)
    assert np.median(away) < 0.01
    assert np.quantile(away, 0.95) < 0.05
    assert all(error.median < 0.02 for error in fitted.errors.values())
    assert all(0.004 < noise < 0.012 for noise in fitted.noise.values())  # median |normal| = 0.67 of 1 %


def test_cross_validation_sees_what_a_fit_to_the_same_steps_hides(measured):
    steps = read_steps(measured)
    fold = folds(steps.group)
    for group in np.unique(steps.group):
        assert len(np.unique(fold[steps.group == group])) == 1
    seen = {name: cross_validated(FAMILIES[name], steps) for name in ("extended-feature", "affine")}
    for scene in ("prefill", "mixed"):
        assert seen["affine"][scene].median > 2 * seen["extended-feature"][scene].median


@pytest.mark.parametrize("family", [*FAMILIES, "tables"])
def test_every_family_goes_into_a_profile_and_comes_back(measured, tmp_path, family):
    steps = read_steps(measured)
    fitted = calibrate(steps, family, base="rtx-4090/llama-3-8b" if family == "tables" else None)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile_fields(steps, fitted, "cpu/toy", {})))
    profile = read_profile(path)
    assert profile.latency.family == family
    assert profile.latency.step_times(steps.shapes) == pytest.approx(fitted.model.step_times(steps.shapes), rel=1e-4)
    assert (profile.label, profile.num_blocks, profile.max_num_seqs) == ("fitted", 1000, 16)
    assert profile.region is not None
    assert not profile.region.outside_shapes(steps.shapes).any()
    assert "decode" in profile.errors


def test_the_paper_and_the_affine_form_too():
    affine = AffineModel(0.01, 1e-4, 0.012, 2e-4, 0.02, 1e-5)
    shapes = sample_shapes(load_profile("rtx-4090/llama-3-8b"), 2, 200)
    times = affine.step_times(shapes)
    found = fit_affine(shapes, times, np.ones(len(times)))
    assert found.step_times(shapes) == pytest.approx(times, rel=1e-4)
    seven = SevenFeatureModel.fit(shapes, times, relative=True)
    assert latency_fields(seven)["family"] == "seven-feature"


def test_settings_that_nobody_measured_are_asked_for_never_guessed(measured):
    steps = read_steps(measured)
    del steps.facts["engine"]["num_gpu_blocks"]
    with pytest.raises(InputError, match="do not tell num_gpu_blocks: give --num-gpu-blocks"):
        profile_fields(steps, calibrate(steps, "affine"), "x", {})
    fields = profile_fields(steps, calibrate(steps, "affine"), "x", {"num_gpu_blocks": 55})
    assert fields["num_gpu_blocks"] == 55


def test_too_few_steps_and_unknown_families_are_refused(measured):
    steps = read_steps(measured)
    few = logged(steps.shapes[:10], steps.durations[:10], Host(), "few", whole=True)
    with pytest.raises(InputError, match="10 measured steps, expected at least 30"):
        calibrate(few)
    with pytest.raises(InputError, match="unknown family 'afine'"):
        calibrate(steps, "afine")
    with pytest.raises(InputError, match="tables needs --base"):
        calibrate(steps, "tables")


# ---- step logs -------------------------------------------------------------------------------------------------------


def write_log(path, *, overlap=False, idle_every=0, n=600):
    rng, now, lines = np.random.default_rng(2), 1000.0, []
    shapes = sample_shapes(load_profile("rtx-4090/llama-3-8b", max_num_batched_tokens=512, max_num_seqs=16), 7, n // 3)
    shapes = shapes[rng.permutation(len(shapes))]
    for i, (shape, time) in enumerate(zip(shapes, truth().step_times(shapes), strict=True)):
        lines.append(row_of_log(shape, time, now))
        host = -0.5 * time if overlap else 2e-3 + 5e-5 * shape[s.NUM_SEQUENCES]
        now += time + host + (10.0 if idle_every and i % idle_every == 0 else 0.0)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return shapes


def row_of_log(shape, time, start):
    return {"start": round(start, 6), "duration_s": time} | dict(zip(s.FIELD_NAMES, map(float, shape), strict=True))


def test_a_step_log_tells_the_hosts_share_from_the_gaps(tmp_path):
    write_log(tmp_path / "steps.jsonl", idle_every=7)
    steps = read_steps(tmp_path / "steps.jsonl")
    assert steps.host.per_step == pytest.approx(2e-3, rel=0.05)
    assert steps.host.per_sequence == pytest.approx(5e-5, rel=0.1)
    fitted = calibrate(steps, "extended-feature")
    assert all(error.median < 0.02 for error in fitted.errors.values())


def test_steps_that_overlap_have_no_host_in_between(tmp_path):
    write_log(tmp_path / "steps.jsonl", overlap=True)
    steps = read_steps(tmp_path / "steps.jsonl")
    assert steps.host.overlapped
    assert steps.host.per_step == 0
    fields = profile_fields(steps, calibrate(steps, "affine"), "x", SETTINGS)
    assert fields["pipeline_depth"] == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"duration_s": 0}', "line 3: field duration_s: found 0, expected seconds above 0"),
        ('{"duration_s": 1}', "line 3: field num_tokens: found nothing, expected a number"),
        ("[1]", r"line 3: found '\[1\]', expected a JSON object"),
        ("{", "line 3: not valid JSON"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, message):
    path = tmp_path / "steps.jsonl"
    write_log(path, n=6)
    lines = path.read_text().splitlines()
    lines.insert(2, line)
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(InputError, match=message):
        read_steps(path)


def test_no_file_and_an_empty_one(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_steps(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(InputError, match="no steps"):
        read_steps(tmp_path / "empty.jsonl")
    with pytest.raises(InputError, match="at least one file"):
        joined([])


def test_sources_are_fitted_together_with_the_hosts_share_of_traffic(measured, tmp_path):
    write_log(tmp_path / "steps.jsonl")
    both = joined([read_steps(measured), read_steps(tmp_path / "steps.jsonl")])
    assert both.host.per_step == pytest.approx(2e-3, rel=0.05)
    assert len(np.unique(both.group)) == len(np.unique(read_steps(measured).group)) + 600 // 50
    assert both.facts["engine"]["num_gpu_blocks"] == 1001
    head = {"kind": "traffic", "facts": {"engine": {"frontend_ms": 7.0, "num_gpu_blocks": 5}}}
    lines = (tmp_path / "steps.jsonl").read_text()
    (tmp_path / "traffic.jsonl").write_text(json.dumps(head) + "\n" + lines)
    both = joined([read_steps(measured), read_steps(tmp_path / "traffic.jsonl")])
    assert (both.facts["engine"]["frontend_ms"], both.facts["engine"]["num_gpu_blocks"]) == (7.0, 1001)


# ---- parts -----------------------------------------------------------------------------------------------------------


def test_outliers_are_judged_within_their_point():
    times = np.array([1.0, 1.01, 0.99, 1.02, 5.0, 10.0, 10.1, 9.9, 10.0])
    group = np.array([0] * 5 + [1] * 4)
    assert outliers(times, group).tolist() == [False] * 4 + [True] + [False] * 4


@pytest.mark.parametrize(("slope", "expected"), [(0.0, None), (0.1, 0.1), (-0.08, -0.08)])
def test_drift_is_seen_and_not_imagined(slope, expected):
    rng = np.random.default_rng(0)
    t = np.linspace(0, 100, 60)
    rows = [
        {
            "reference": True,
            "t": at,
            "duration_s": (1 + slope * at / 100) * float(np.exp(0.005 * rng.standard_normal())),
        }
        for at in t
    ]
    found = drift(rows)
    if expected is None:
        assert found is None or abs(found) < 0.01
    else:
        assert found == pytest.approx(expected, abs=0.02)


def test_the_hosts_share_is_a_rising_line_through_medians():
    n = np.repeat(np.arange(1.0, 33), 20)
    extra = 1e-3 + 2e-5 * n
    extra[::13] += 1.0
    host = fit_host(extra, n)
    assert (host.per_step, host.per_sequence) == (pytest.approx(1e-3, rel=1e-3), pytest.approx(2e-5, rel=1e-3))


def test_a_region_is_left_on_any_side():
    shapes = np.stack([p.shape for p in (point("p64@0"), point("p256@128"), point("d4x100"), point("d8x1000"))])
    region = Region.of(shapes)
    inside = ["p64@0", "p200@100", "d6x500", "p270@0"]
    outside = ["p400@0", "d20x100", "d8x2000", "p64@1000", "p64@0;d4x100", "p8@0"]
    assert not region.outside_shapes(np.stack([point(k).shape for k in inside])).any()
    assert region.outside_shapes(np.stack([point(k).shape for k in outside])).all()


def point(key):
    from slacktide.profiling.experiments import parse_key

    return parse_key(key)


# ---- command line ----------------------------------------------------------------------------------------------------


def test_fit_on_the_command_line(tmp_path, capsys):
    write_log(tmp_path / "steps.jsonl")
    command = ["fit", str(tmp_path / "steps.jsonl"), "--out", str(tmp_path), "--name", "my-gpu/my-model"]
    assert main(command) == 2
    assert "do not tell num_gpu_blocks, block_size, max_num_batched_tokens, max_num_seqs" in capsys.readouterr().err
    flags = ["--num-gpu-blocks-override", "1001", "--block-size", "16", "--max-num-batched-tokens", "512"]
    assert main([*command, *flags, "--max-num-seqs", "16", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["fields"]["errors"]["mixed"]["median_percent"] < 2
    assert value["fields"]["host"]["per_step_ms"] == pytest.approx(2, rel=0.05)
    profile = str(tmp_path / "profile.json")
    run = ["simulate", "--trace", "synthetic:prompt=200,output=20", "--num-prompts", "50", "--profile", profile]
    assert main([*run, "--policy", "vllm-v1", "--rate", "2", "--slo", "ttft:1000,tbt:100"]) == 0
    said = capsys.readouterr().out
    assert "profile: my-gpu/my-model [fitted]; step times off by decode" in said
    assert "not validated" in " ".join(said.split())


def test_simulated_steps_beyond_the_measured_ones_are_counted(tmp_path, capsys):
    write_log(tmp_path / "steps.jsonl")
    flags = ["--num-gpu-blocks-override", "1001", "--block-size", "16", "--max-num-batched-tokens", "2048"]
    fit = ["fit", str(tmp_path / "steps.jsonl"), "--out", str(tmp_path), *flags, "--max-num-seqs", "16", "--quiet"]
    assert main(fit) == 0
    capsys.readouterr()
    run = ["simulate", "--trace", "synthetic:prompt=2000,output=20", "--num-prompts", "50", "--policy", "vllm-v1"]
    assert main([*run, "--profile", str(tmp_path / "profile.json"), "--rate", "2", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert 0 < record["summary"]["steps_outside"] <= 1
    assert any("beyond what the profile was measured on" in note for note in record["notes"])


def test_profile_wants_one_engine(capsys):
    assert main(["profile"]) == 2
    assert "expected one of MODEL (with vLLM's flags), --url URL and --torch-stack MODEL" in capsys.readouterr().err
    assert main(["profile", "model", "--url", "http://x"]) == 2
    assert main(["profile", "--url", "http://127.0.0.1:9", "--quiet"]) == 2


def test_a_small_envelope_is_enough_for_the_fake():
    assert SMALL.max_num_batched_tokens == SETTINGS["max_num_batched_tokens"]
