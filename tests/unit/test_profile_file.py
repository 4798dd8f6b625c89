"""A user's own profile file: what it gives, and one clear line for each mistake."""

from __future__ import annotations

import json

import numpy as np
import pytest

from slacktide.errors import InputError
from slacktide.profiling.profiles import default_belief, load_profile

USER = {
    "name": "mine",
    "label": "measured",
    "source": "benchmark of 2026-01-15",
    "num_gpu_blocks": 1001,
    "max_num_seqs": 128,
    "latency": {"family": "affine", "alpha_p_ms": 4.5, "beta_p_ms": 0.038, "alpha_d_ms": 11.3, "beta_d_ms": 0.064},
}
SEVEN = {
    "family": "seven-feature",
    "floor_ms": 2,
    "decode": {"intercept": 10, "x4": 0.1},
    "prefill": {"x6": 0.05},
    "mixed": {"intercept": 1},
}


def _write(tmp_path, content) -> str:
    path = tmp_path / "mine.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return str(path)


def test_user_profile_affine(tmp_path):
    profile = load_profile(_write(tmp_path, USER))
    assert (profile.name, profile.label, profile.num_blocks, profile.block_size) == ("mine", "measured", 1000, 16)
    assert (profile.max_num_batched_tokens, profile.max_num_seqs) == (2048, 128)
    assert profile.latency.step_time(np.array([100]), np.array([0]), np.array([False])) == pytest.approx(0.0083)
    assert profile.sources["latency"] == "benchmark of 2026-01-15"
    assert load_profile(_write(tmp_path, USER), num_gpu_blocks_override=11).num_blocks == 10
    assert load_profile(_write(tmp_path, USER), block_size=32).num_blocks == 499


def test_user_profile_refuses_what_would_change_nothing(tmp_path):
    for option in ({"interference": 2.0}, {"host_overhead": 0.0}, {"gpu_memory_utilization": 0.8}):
        with pytest.raises(InputError, match="does not apply: a profile file has its own numbers"):
            load_profile(_write(tmp_path, USER), **option)


def test_user_profile_seven_feature(tmp_path):
    profile = load_profile(_write(tmp_path, USER | {"latency": SEVEN}))
    rows = np.array([1, 1]), np.array([100, 100]), np.array([True, True])
    assert profile.latency.step_time(*rows) == pytest.approx(0.0102)
    belief = default_belief(profile)
    assert belief.step_time(*rows) == pytest.approx(0.0102, rel=0.02)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected a JSON object"),
        ({"num_blocks": 5}, "did you mean num_gpu_blocks"),
        ({"num_gpu_blocks": 1}, "field num_gpu_blocks: found 1, expected a whole number of at least 2"),
        ({"num_gpu_blocks": None}, "field num_gpu_blocks: found nothing"),
        ({"max_num_seqs": 1.5}, "field max_num_seqs: found 1.5"),
        ({"label": "true"}, "field label: found 'true', expected one of measured"),
        ({"source": 3}, "field source: found 3"),
        ({"latency": None}, "field latency: found nothing"),
        ({"latency": {"family": "linear"}}, "field latency.family: found 'linear'"),
        ({"latency": USER["latency"] | {"beta_d_ms": -1}}, "field beta_d_ms: found -1, expected"),
        ({"latency": USER["latency"] | {"beta_d_ms": float("nan")}}, "field beta_d_ms: found nan"),
        ({"latency": USER["latency"] | {"beta_d_ms": True}}, "field beta_d_ms: found True"),
        ({"latency": USER["latency"] | {"alpha_p_ms": -50}}, "alpha_p + beta_p"),
        ({"latency": USER["latency"] | {"gamma_ms": 1}}, "unknown field 'gamma_ms'"),
        ({"latency": SEVEN | {"mixed": {}}}, "latency.mixed: expected at least one of intercept"),
        ({"latency": SEVEN | {"mixed": {"x8": 1}}}, "unknown field 'x8'"),
        ({"latency": SEVEN | {"mixed": {"x1": -1}}}, "latency.mixed: field x1: found -1"),
        ({"latency": {k: v for k, v in SEVEN.items() if k != "prefill"}}, "field prefill: found nothing"),
    ],
)
def test_user_profile_errors_name_file_and_field(tmp_path, change, message):
    path = _write(tmp_path, change if isinstance(change, str) else USER | change)
    with pytest.raises(InputError) as caught:
        load_profile(path)
    assert message in str(caught.value)
    assert path in str(caught.value)


def test_missing_user_profile_is_one_clear_line(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        load_profile(str(tmp_path / "none.json"))
