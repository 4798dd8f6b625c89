"""Packaged GPU profiles: against published compositions of the same kernels, memory arithmetic, names."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from slacktide.core import shape as s
from slacktide.core.latency_tables import TablesModel
from slacktide.errors import InputError
from slacktide.profiling.capacity import engine_defaults, kv_capacity
from slacktide.profiling.compose import DENSE_TOKENS, all_reduce, extend
from slacktide.profiling.kernel_tables import gpus, models
from slacktide.profiling.profiles import default_belief, list_profiles, load_profile, parse_name

COMPOSED = [info.name for info in list_profiles() if info.label != "prior"]


def step_ms(name: str, *, chunk: int = 0, cached: int = 0, decodes: int = 0, context: int = 0, **options) -> float:
    """Step time without host overhead, ms, of one chunk and equal decodes."""
    model = load_profile(name, host_overhead=0.0, **options).latency
    tokens = np.array([chunk] * (chunk > 0) + [1] * decodes)
    contexts = np.array([cached] * (chunk > 0) + [context] * decodes)
    return 1e3 * model.step_time(tokens, contexts, np.arange(len(tokens)) >= (chunk > 0))


@pytest.mark.parametrize(
    ("name", "chunk", "cached", "decodes", "context", "expected"),
    # Iteration times that the kernel data's own iter_time_measured_grid gives for these batches (no host), ms.
    [
        ("rtx-pro-6000/llama-3-8b", 512, 0, 0, 0, 23.745),
        ("rtx-pro-6000/llama-3-8b", 0, 0, 64, 1024, 18.8155),
        ("rtx-pro-6000/llama-3-8b", 512, 1024, 32, 1024, 31.798),
        ("rtx-pro-6000/llama-3-8b", 128, 4096, 8, 4096, 19.0744),
        ("rtx-4090/llama-3-8b", 512, 0, 0, 0, 48.3055),
        ("rtx-4090/llama-3-8b", 0, 0, 64, 1024, 29.2961),
        ("rtx-4090/llama-3-8b", 512, 1024, 32, 1024, 71.6438),
        ("2x-rtx-pro-6000/qwen3-32b", 512, 0, 0, 0, 69.0012),
        ("2x-rtx-pro-6000/qwen3-32b", 0, 0, 64, 1024, 37.0188),
        ("2x-rtx-pro-6000/qwen3-32b", 512, 1024, 32, 1024, 91.3262),
    ],
)
def test_measured_batches(name, chunk, cached, decodes, context, expected):
    found = step_ms(name, chunk=chunk, cached=cached, decodes=decodes, context=context)
    assert found == pytest.approx(expected, rel=0.005)


@pytest.mark.parametrize(
    ("name", "prefill", "decode", "last", "tolerance"),
    # alpha, beta (ms) of alpha_beta.csv of the kernel data; least squares over powers of two of one uncached prompt
    # (256 to `last`) and of decodes at context 512 (16 to 256). The decode lines of the first three were fitted to
    # 1024 decodes, beyond the measured KV sizes, where both compositions extrapolate: 6 % at 256 decodes.
    [
        ("h100/llama-3-8b", (1.4329, 0.0212), (5.42481, 0.04291), 4096, 0.05),
        ("h200/llama-3-8b", (-0.38666, 0.02227), (3.86933, 0.03731), 4096, 0.05),
        ("a100/llama-3-8b", (1.31801, 0.0619), (7.92871, 0.10512), 4096, 0.06),
        ("4x-h200/llama-3-70b", (0.98706, 0.06424), (9.77857, 0.06431), 4096, 0.03),
        ("rtx-pro-6000/llama-3-8b", (4.4598, 0.03809), (11.31744, 0.06423), 2048, 0.002),
        ("rtx-pro-6000/qwen3-32b", (15.79343, 0.16971), (46.58611, 0.16742), 2048, 0.005),
        ("rtx-4090/llama-3-8b", (0.65928, 0.09367), (17.56832, 0.10979), 2048, 0.002),
        ("2x-rtx-3090/llama-3-8b?interconnect=nvlink", (8.37451, 0.13489), (10.89666, 0.15701), 2048, 0.06),
        ("2x-rtx-3090/llama-3-8b?interconnect=pcie", (8.19536, 0.1509), (10.50654, 0.17358), 2048, 0.06),
        ("2x-rtx-3090/llama-3-8b?interconnect=pcie-host", (8.69451, 0.1815), (11.21666, 0.20361), 2048, 0.06),
    ],
)
def test_affine_fits_of_the_kernel_data(name, prefill, decode, last, tolerance):
    tokens = 2 ** np.arange(8, int(np.log2(last)) + 1)
    slope, start = np.polyfit(tokens, [step_ms(name, chunk=int(n)) for n in tokens], 1)
    assert start + slope * last == pytest.approx(prefill[0] + prefill[1] * last, rel=min(tolerance, 0.02))
    top = 256 if last == 2048 else 1024
    counts = 2 ** np.arange(4, int(np.log2(top)) + 1)
    slope, start = np.polyfit(counts, [step_ms(name, decodes=int(n), context=512) for n in counts], 1)
    assert start + slope * 256 == pytest.approx(decode[0] + decode[1] * 256, rel=tolerance)


def test_mixed_attention_is_not_the_sum_of_its_parts():
    """Measured: 1 to 4 times; assumed for the H100: 1.6 times the decode attention, nothing else."""
    parts = step_ms("rtx-pro-6000/llama-3-8b", decodes=64, context=2048) - step_ms(
        "rtx-pro-6000/llama-3-8b", decodes=64, context=16
    )
    both = step_ms("rtx-pro-6000/llama-3-8b", chunk=512, decodes=64, context=2048) - step_ms(
        "rtx-pro-6000/llama-3-8b", chunk=512, decodes=64, context=16
    )
    assert 1.2 < both / parts < 4
    alone = load_profile("h100/llama-3-8b").latency.decode.interpolate(
        [np.array([64.0]), np.array([2048.0])], (False, False)
    )[0]
    batch = {"chunk": 512, "decodes": 64, "context": 2048}
    plain, assumed = (step_ms("h100/llama-3-8b", **batch, interference=f) for f in (1.0, 1.6))
    assert assumed - plain == pytest.approx(600 * alone)
    assert step_ms("h100/llama-3-8b", **batch) == assumed
    assert step_ms("h100/llama-3-8b?interference=1", **batch) == plain


def _wide_shapes(model):
    """Batches far beyond every table: contexts to 131,072, chunks to 16,384, 2000 decodes."""
    shapes = []
    for c in (0, 1, 5, 500, 2000, 3000, 16384):
        for u in (0, 100, 20_000, 131_072):
            for n in (0, 1, 60, 200, 2000):
                for d in (1, 900, 16_384, 131_072):
                    if c + n:
                        rows = (
                            np.array([c] * (c > 0) + [1]),
                            np.array([u] * (c > 0) + [d]),
                            np.array([0] * (c > 0) + [1]),
                        )
                        shape = model.batch_shape(rows[0], rows[1], rows[2].astype(bool))
                        shape[[s.NUM_TOKENS, s.NUM_SEQUENCES]] += n - 1
                        shape[[s.NUM_DECODES, s.DECODE_CONTEXT, s.DECODE_MAX_CONTEXT]] = n, n * d, d * (n > 0)
                        shapes.append(shape)
    return np.array(shapes)


@pytest.mark.parametrize("name", COMPOSED)
def test_every_composed_profile_is_sane_far_beyond_its_tables(name):
    profile = load_profile(name)
    model = profile.latency
    assert isinstance(model, TablesModel)
    shapes = _wide_shapes(model)
    times = model.step_times(shapes)
    assert np.isfinite(times).all()
    assert times.min() > 2e-3  # host and reading the weights: nothing is faster
    # More decode context never costs less, exactly; decodes and tokens: but for tile steps of measured GEMMs.
    longer = shapes.copy()
    longer[:, [s.DECODE_CONTEXT, s.DECODE_MAX_CONTEXT]] *= 1.3
    assert (model.step_times(longer) >= times * (1 - 1e-12)).all()
    one_chunk = shapes[(shapes[:, s.NUM_PREFILLS] == 1) & (shapes[:, s.NUM_DECODES] == 0)]
    cached = one_chunk.copy()
    cached[:, s.PREFILL_CONTEXT] += 1000
    cached[:, s.PREFILL_WORK] += 1000 * cached[:, s.PREFILL_TOKENS]
    u, c = cached[:, s.PREFILL_CONTEXT], cached[:, s.PREFILL_TOKENS]
    cached[:, s.PREFILL_POTENTIAL] = model.potential(u + c) - model.potential(u)
    assert (model.step_times(cached) >= model.step_times(one_chunk) * (1 - 1e-9)).all()
    dips = 1 - model.dense / np.maximum.accumulate(model.dense)
    assert dips.max() < (0.35 if "3090" in name else 0.12)
    assert len(model.dense) == DENSE_TOKENS + 1
    # KV is read at no more than 1.05 times the data sheet's bandwidth (small batches may sit in the L2 cache).
    n, context = 256.0, 8192.0
    moved = profile.kv_bytes_per_token / profile.tensor_parallel * n * context
    decode = model.decode.interpolate([np.array([n]), np.array([context])], (False, False))[0]
    assert moved / decode < 1.05 * gpus()[profile.gpu].bandwidth


def test_list_is_cheap_and_names_what_fits():
    found = {info.name: info for info in list_profiles()}
    assert {"rtx-pro-6000/llama-3-8b", "2x-rtx-3090/llama-3-8b", "4x-h100/llama-3-70b", "2x-h200/llama-3-70b"} <= set(
        found
    )
    assert {"rtx-pro-6000/qwen3-32b", "2x-rtx-pro-6000/qwen3-32b", "2x-h100/llama-3-70b"} <= set(found)
    assert "h200/llama-3-70b" not in found  # 141 GB of weights
    assert found["2x-rtx-3090/llama-3-8b"].label == "estimate"
    assert found["l4/llama-3-8b"].label == "prior"
    assert found["rtx-pro-6000/llama-3-8b"].label == "composed"
    assert "assumed" in found["h100/llama-3-8b"].sources
    code = (
        "import sys; from slacktide.profiling.profiles import list_profiles; assert list_profiles();"
        "print([m for m in ('pyarrow', 'numba', 'scipy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_profile_says_what_it_rests_on():
    profile = load_profile("h100/llama-3-8b")
    assert profile.sources["label"] == profile.label == "composed"
    assert "times 1.6" in profile.sources["mixed batches"]
    assert "linear beyond" in profile.sources["tokens"]
    assert profile.latency.coefficients()["host_per_step"] == 0.001
    measured = load_profile("rtx-pro-6000/llama-3-8b")
    assert "mixed batches" not in measured.sources
    assert "measured mixed kernel" in measured.sources["attention"]
    prior = load_profile("l4/llama-3-8b")
    assert prior.latency.family == "roofline"
    assert prior.sources["label"] == prior.latency.sources["label"] == "prior"


def test_kv_capacity_meets_the_known_run():
    """A real vLLM run of Llama-3.1-8B on an RTX 4090 had 41,408 KV tokens."""
    profile = load_profile("rtx-4090/llama-3-8b")
    tokens = (profile.num_blocks + 1) * profile.block_size
    assert abs(tokens / 41_408 - 1) < 0.02


def test_kv_capacity_by_hand():
    gpu, model = gpus()["H100-SXM"], models()["llama-3-70b"]
    found = kv_capacity(gpu, model, 4, max_num_batched_tokens=8192, max_num_seqs=1024, gpu_memory_utilization=0.9)
    activations = 8192 * ((3 * 28672 + 80 * 128) / 4 + 4 * 8192) * 2
    logits = 1024 * 128256 * 10
    assert logits > activations
    expected = 0.9 * 0.985 * 80 * 2**30 - 141.1e9 / 4 - 2**30 - logits
    assert found.bytes_for_kv == pytest.approx(expected)
    assert found.num_gpu_blocks(16) == int(expected // (327680 / 4 * 16))
    profile = load_profile("4x-h100/llama-3-70b")
    assert profile.num_blocks == found.num_gpu_blocks(16) - 1


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [("B200-SXM", (16384, 1024)), ("H100-SXM", (8192, 1024)), ("A100-SXM-80GB", (2048, 256)), ("L40S", (2048, 256))],
)
def test_engine_defaults_by_memory(gpu, expected):
    assert engine_defaults(gpus()[gpu]) == expected


def test_engine_settings_change_the_profile():
    plain = load_profile("l40s/llama-3-8b")
    assert (plain.max_num_batched_tokens, plain.max_num_seqs, plain.block_size) == (2048, 256, 16)
    given = load_profile("l40s/llama-3-8b", max_num_seqs=64, max_num_batched_tokens=512, block_size=32)
    assert (given.max_num_batched_tokens, given.max_num_seqs, given.block_size) == (512, 64, 32)
    assert given.num_blocks * 32 > plain.num_blocks * 16  # smaller batches leave more for KV
    assert load_profile("l40s/llama-3-8b", num_gpu_blocks_override=1000).num_blocks == 999
    assert load_profile("l40s/llama-3-8b", gpu_memory_utilization=0.8).num_blocks < plain.num_blocks


def test_host_overhead_is_a_term_of_the_model():
    rows = np.array([1, 1]), np.array([100, 100]), np.array([True, True])
    base = load_profile("h100/llama-3-8b", host_overhead=0.0).latency.step_time(*rows)
    given = load_profile("h100/llama-3-8b", host_overhead=0.002, host_per_sequence=1e-5).latency.step_time(*rows)
    assert given - base == pytest.approx(0.002 + 2e-5)


def test_interconnects_of_the_rtx_3090():
    times = {
        wire: step_ms("2x-rtx-3090/llama-3-8b", chunk=2048, interconnect=wire)
        for wire in ("nvlink", "pcie", "pcie-host")
    }
    assert times["nvlink"] < times["pcie"] < times["pcie-host"]
    assert step_ms("2x-rtx-3090/llama-3-8b", chunk=2048) == times["nvlink"]
    # 64 all-reduces of 16 MiB: 10 us + 16 MiB / 45 GB/s each
    part = all_reduce(gpus()["RTX-3090"], 2, np.array([16.0 * 2**20]), "nvlink").values[0]
    assert part == pytest.approx(10e-6 + 16 * 2**20 / 45e9)


def test_extend_takes_its_slope_from_the_upper_half():
    found = extend(np.array([0.0, 15.0, 30.0]), np.array([5.0, 10.0, 19.0, 20.0]), np.array([1.0, 2.0, 3.0, 2.5]))
    assert np.allclose(found, [1.0, 2.0 + 5 / 9, 2.5 + 10 * 0.05])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h100/llama-3-8", "did you mean h100/llama-3-8b"),
        ("h101/llama-3-8b", "unknown profile"),
        ("3x-h100/llama-3-8b", "unknown profile"),
        ("4x-rtx-3090/llama-3-8b", "unknown profile"),
        ("llama-3-8b", "unknown profile"),
        ("4x-h100/qwen2.5-7b?interconnect=nvlink", "applies to 2x-rtx-3090 only"),
        ("2x-rtx-3090/llama-3-8b?interconnect=infiniband", "unknown interconnect 'infiniband'"),
        ("2x-rtx-3090/llama-3-8b?wire=nvlink", "option 'wire=nvlink'"),
        ("h100/llama-3-8b?interference=0.5", "interference=0.5: expected a number of at least 1"),
        ("h100/llama-3-8b?skew=much", "skew=much"),
        ("rtx-pro-6000/llama-3-8b?interference=2", "interference=2 does not apply: its mixed attention rests on"),
        ("2x-rtx-3090/llama-3-8b?interference=2", "interference=2 does not apply"),
        ("l4/llama-3-8b?skew=0.1", "skew=0.1 does not apply"),
        ("h200/llama-3-70b", "use more GPUs"),
        ("2x-rtx-3090/qwen3-32b", "GiB a GPU for KV"),
    ],
)
def test_bad_names_are_one_clear_line(name, message):
    with pytest.raises(InputError, match=None) as caught:
        load_profile(name)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu_memory_utilization": 1.2}, "gpu_memory_utilization 1.2"),
        ({"gpu_memory_utilization": 0.1}, "use more GPUs"),
        ({"host_overhead": -1.0}, "host_overhead=-1.0"),
        ({"max_num_seqs": -5}, "max_num_seqs=-5"),
        ({"block_size": -16}, "block_size=-16"),
        ({"num_gpu_blocks_override": -3}, "num_gpu_blocks_override=-3"),
    ],
)
def test_bad_settings_are_one_clear_line(options, message):
    with pytest.raises(InputError) as caught:
        load_profile("h100/llama-3-8b", **options)
    assert message in str(caught.value)


def test_names_are_case_insensitive_and_may_carry_options():
    assert parse_name(" 2X-RTX-3090/Llama-3-8B?interconnect=pcie&skew=0.1") == (
        "rtx-3090",
        "llama-3-8b",
        2,
        {"interconnect": "pcie", "skew": "0.1"},
    )
    assert load_profile("H100/Llama-3-8B").name == "h100/llama-3-8b"


@pytest.mark.parametrize("name", ["h100/llama-3-8b", "rtx-pro-6000/llama-3-8b", "l4/llama-3-8b"])
def test_default_belief_is_a_seeded_fit_that_says_how_wrong_it_is(name):
    profile = load_profile(name)
    belief = default_belief(profile)
    assert belief.family == "extended-feature"
    assert default_belief(profile, features="paper").family == "seven-feature"
    assert belief.sources["label"] == "fitted"
    assert "median error" in belief.sources["latency"]
    again, other = default_belief(profile), default_belief(profile, seed=1)
    assert np.array_equal(belief.packed, again.packed)
    assert not np.array_equal(belief.packed, other.packed)
    from slacktide.profiling.belief import sample_shapes

    shapes = sample_shapes(profile, seed=99)
    assert (shapes[:, s.DECODE_CONTEXT] <= profile.num_blocks * profile.block_size * 1.1).all()
    error = np.abs(belief.step_times(shapes) / profile.latency.step_times(shapes) - 1)
    assert np.median(error) < 0.10
