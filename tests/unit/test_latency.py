"""Every latency family against numbers worked out by hand, its numpy twin, and bad input."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from slacktide.core import kernels_latency
from slacktide.core.latency import AffineModel, LatencyModel, PackedModel
from slacktide.core.latency_extended import ExtendedFeatureModel
from slacktide.core.latency_families import RooflineModel, SevenFeatureModel, least_squares
from slacktide.core.latency_tables import Grid, TablesModel, uniform_curve

DECODE, PREFILL = True, False


def small_tables(**changes: Any) -> TablesModel:
    """dense 10 ms + 20 us a token; 0.1 ms a sequence; V(x) = x^2 ns; decode n * context ns; launch 5 us; host 1 ms."""
    n, context = np.array([0.0, 1.0, 512.0]), np.array([0.0, 256.0, 65536.0])
    fields: dict[str, Any] = {
        "dense": 0.010 + 20e-6 * np.arange(513),
        "per_sequence": 1e-4 * np.arange(65),
        "decode": Grid((n, context), 1e-9 * n[:, None] * context[None, :]),
        "potential_values": 1e-9 * np.arange(20_001, dtype=np.float64) ** 2,
        "prefill_launch": 5e-6,
        "kv_seconds": 1e-8,
        "interference": 1.6,
        "host_per_step": 0.001,
        "sources": {"label": "composed"},
    }
    return TablesModel(**(fields | changes))


def bumpy_tables() -> TablesModel:
    """Tables with steps and dips in the tokens, as measured GEMMs have them, and a measured mixed grid."""
    rng = np.random.default_rng(7)
    tokens = np.arange(300)
    nodes = (np.array([1.0, 16.0, 64.0, 256.0]), np.array([0.0, 100.0, 1000.0]))
    beside = (np.array([1.0, 8.0, 64.0]), np.array([16.0, 500.0, 4000.0]))
    increment = np.sort(rng.random((4, 3, 3, 3)), axis=3) * 1e-3
    return TablesModel(
        dense=0.005 + 20e-6 * (tokens // 16 * 16) + 2e-3 * rng.random(300),
        per_sequence=1e-4 + 1e-5 * np.arange(65),
        decode=Grid(beside, np.sort(rng.random((3, 3)), axis=1) * 1e-3),
        prefill=Grid(nodes, 1e-4 + 1e-9 * nodes[0][:, None] * (nodes[1][None, :] + nodes[0][:, None] / 2)),
        increment=Grid((*nodes, *beside), increment),
        prefill_launch=1e-4,
        kv_seconds=1e-9,
        skew=0.05,
        host_per_step=0.001,
        host_per_sequence=1e-6,
        sources={"label": "composed"},
    )


def seven_feature() -> SevenFeatureModel:
    weights = np.abs(np.random.default_rng(1).standard_normal((3, 8)))
    return SevenFeatureModel(weights * [5e-3, 1e-9, 1e-9, 1e-8, 1e-5, 1e-7, 2e-5, 1e-6], floor=1e-3)


def falling_seven_feature() -> SevenFeatureModel:
    """As a ridge fit may come out: longer chunks get cheaper in places."""
    model = seven_feature()
    weights = model.weights.copy()
    weights[:, 2] *= -20
    return SevenFeatureModel(weights, floor=2e-3)


def extended_feature() -> ExtendedFeatureModel:
    weights = np.abs(np.random.default_rng(2).standard_normal((3, 12)))
    scale = [5e-3, 2e-5, 1e-5, 4e-5, 3e-5, 1e-5, 1e-9, 1e-8, 1e-8, 1e-5, 1e-6, 1e-5]
    return ExtendedFeatureModel(weights * scale, np.array([0.0, 7.0, 300.0, 2048.0]), floor=2e-3)


FAMILIES: dict[str, Callable[[], PackedModel]] = {
    "extended-feature": extended_feature,
    "affine": lambda: AffineModel(0.004, 40e-6, 0.010, 60e-6, kappa=20e-6),
    "affine, negative kappa": lambda: AffineModel(0.004, 40e-6, 0.010, 60e-6, kappa=-30e-6),
    "seven-feature": seven_feature,
    "seven-feature, falling": falling_seven_feature,
    "roofline": lambda: RooflineModel(1e-3, 8e-3, 2e-5, 1e-4, 5e-5, 1e-6, 1e-9, 1e-8, interference=1.6),
    "tables, additive": small_tables,
    "tables, mixed": bumpy_tables,
}


def example_shapes(model: PackedModel, seed: int, samples: int = 150) -> np.ndarray:
    """Shapes of random batches of all three scenes, with contexts and counts beyond the small models' grids."""
    rng = np.random.default_rng(seed)
    shapes = []
    for i in range(samples):
        chunks = 0 if i % 3 == 0 else rng.integers(1, 4)
        decodes = 0 if i % 3 == 1 else rng.integers(1, 100)
        c, u = rng.integers(1, 400, chunks), rng.integers(0, 3000, chunks) * rng.integers(0, 2, chunks)
        tokens = np.concatenate([c, np.ones(decodes, dtype=np.int64)])
        contexts = np.concatenate([u, rng.integers(1, 9000, decodes)])
        phases = np.arange(chunks + decodes) >= chunks
        shapes.append(model.batch_shape(tokens, contexts, phases))
    return np.array(shapes)


def time_of(model: LatencyModel, *rows: tuple[int, int, bool]) -> float:
    """Step time of rows (tokens, context, is decode)."""
    tokens, contexts, phases = zip(*rows, strict=True)
    return model.step_time(np.array(tokens), np.array(contexts), np.array(phases))


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_compiled_and_readable_twins_agree(name):
    model = FAMILIES[name]()
    shapes = example_shapes(model, seed=3)
    reference = model.reference(shapes)
    assert np.allclose(model.step_times(shapes), reference, rtol=1e-12, atol=0)
    assert (reference > 0).all()
    assert len(np.unique(reference)) > 50
    for shape, expected in zip(shapes[:20], reference, strict=False):
        assert kernels_latency.step_time_packed.py_func(model.packed, shape) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_families_keep_the_protocol(name):
    model = FAMILIES[name]()
    assert isinstance(model, LatencyModel)
    assert isinstance(model, PackedModel)
    assert not model.packed.flags.writeable
    assert model.packed is model.packed
    assert model.sources
    assert all(np.isfinite(v) for v in model.coefficients().values())
    assert model.step_times(np.zeros((1, 12)))[0] == 0.0
    with pytest.raises(ValueError, match=r"expected float64\[m, 12\]"):
        model.step_times(np.zeros((2, 11)))


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_pickled_copy_is_as_good(name):
    model = FAMILIES[name]()
    packed = model.packed
    copy = pickle.loads(pickle.dumps(model))
    assert np.array_equal(copy.packed, packed)
    assert not copy.packed.flags.writeable


def test_potential_twins_agree():
    model = small_tables()
    positions = np.array([0.0, 0.5, 17.0, 19_999.0, 20_000.0, 31_000.0])
    found = [kernels_latency.potential_packed(model.packed, x) for x in positions]
    assert np.allclose(found, model.potential(positions), rtol=1e-12)
    assert found[2] == pytest.approx(289e-9)
    affine = FAMILIES["affine"]()
    assert kernels_latency.potential_packed(affine.packed, 100.0) == affine.potential(np.array([100.0]))[0] == 0.0


def test_affine_by_hand():
    model = AffineModel(0.004, 40e-6, 0.010, 60e-6, alpha_mb=0.011, kappa=20e-6)
    assert time_of(model, (1000, 0, PREFILL)) == pytest.approx(0.004 + 0.040)
    assert time_of(model, *[(1, 500, DECODE)] * 50) == pytest.approx(0.010 + 0.003)
    # 100 tokens, half of them decodes: 100 (0.5*40e-6 + 0.5*60e-6 + 20e-6*0.25) = 5.5 ms
    mixed = [(50, 0, PREFILL), *[(1, 9, DECODE)] * 50]
    assert time_of(model, *mixed) == pytest.approx(0.011 + 0.0055)


def test_affine_mixed_step_costs_no_less_than_a_weight_read():
    assert AffineModel(0.001, 1e-5, 0.009, 2e-5).coefficients()["alpha_mb"] == 0.009


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((float("nan"), 1e-5, 0.01, 1e-5), "alpha_p = nan"),
        ((0.01, -1e-5, 0.01, 1e-5), "beta_p = -1e-05"),
        ((-0.01, 1e-5, 0.01, 1e-5), r"alpha_p \+ beta_p"),
        ((0.01, 1e-5, 0.01, 1e-5, 0.01, -1.0), "kappa"),
    ],
)
def test_affine_refuses_models_without_positive_times(values, message):
    with pytest.raises(ValueError, match=message):
        AffineModel(*values)


def test_seven_feature_by_hand():
    weights = np.zeros((3, 8))
    weights[0] = [0.01, 0, 0, 0, 1e-4, 1e-6, 0, 0]  # decode: 10 ms + 0.1 ms a decode + 1 us a context token
    weights[1] = [0.005, 1e-9, 2e-9, 3e-6, 0, 0, 5e-5, 1e-5]
    weights[2] = 1e-6
    model = SevenFeatureModel(weights, floor=0.002)
    assert time_of(model, (1, 100, DECODE), (1, 300, DECODE)) == pytest.approx(0.01 + 2e-4 + 4e-4)
    # c = 100 after 50, c = 40 after 0: x1 = 100*150 + 1600 = 16600, x2 = 11600, x3 = 50, x6 = 140, x7 = 100
    expected = 0.005 + 16600e-9 + 2 * 11600e-9 + 3e-6 * 50 + 5e-5 * 140 + 1e-5 * 100
    assert time_of(model, (100, 50, PREFILL), (40, 0, PREFILL)) == pytest.approx(expected)
    # x1 = 4, x2 = 4, x3 = 7, x4 = 1, x5 = 7, x6 = 2, x7 = 2 and the intercept: 28 us, so the floor holds
    assert time_of(model, (2, 0, PREFILL), (1, 7, DECODE)) == 0.002
    assert time_of(SevenFeatureModel(weights), (2, 0, PREFILL), (1, 7, DECODE)) == pytest.approx(28e-6)


def test_seven_feature_fit_recovers_what_made_the_times():
    truth = FAMILIES["seven-feature"]()
    shapes = example_shapes(truth, seed=5, samples=600)
    for method in ("nnls", "ridge"):
        model = SevenFeatureModel.fit(shapes, truth.step_times(shapes), method=method)
        assert max(model.errors(shapes, truth.step_times(shapes)).values()) < 1e-4
        assert model.sources["label"] == "fitted"
        assert "decode 0.0 %" in model.sources["latency"]


def test_seven_feature_scene_with_few_samples_gets_the_global_expert():
    truth = AffineModel(0.01, 1e-5, 0.01, 1e-5, alpha_mb=0.01)
    shapes = example_shapes(truth, seed=6, samples=200)
    decodes = shapes[:, 3] == 0
    kept = np.concatenate([shapes[decodes], shapes[~decodes][:1]])
    model = SevenFeatureModel.fit(kept, truth.step_times(kept))
    scene = int(kept[-1, 8] > 0) + 1
    assert np.array_equal(model.weights[scene], model.weights[3 - scene])
    assert not np.array_equal(model.weights[scene], model.weights[0])


def test_non_negative_least_squares_is_the_exact_optimum():
    from scipy.optimize import nnls

    rng = np.random.default_rng(0)
    for _ in range(20):
        x, y = rng.random((40, 8)), rng.standard_normal(40)
        expected, _ = nnls(x, y)
        found = least_squares(x, y, nonnegative=True, ridge=0.0)
        assert np.allclose(found, expected, atol=1e-8)
        assert (found == 0).any()


def test_relative_fit_serves_short_steps_better():
    truth = small_tables()
    shapes = example_shapes(truth, seed=8, samples=500)
    times = truth.step_times(shapes)
    plain, relative = (SevenFeatureModel.fit(shapes, times, relative=r) for r in (False, True))
    short = times < np.median(times)
    assert np.sum((relative.reference(shapes) / times - 1)[short] ** 2) < np.sum(
        (plain.reference(shapes) / times - 1)[short] ** 2
    )


@pytest.mark.parametrize(
    ("times", "method"), [([], "nnls"), ([0.1, 0.0], "nnls"), ([0.1, float("nan")], "ridge"), ([0.1, 0.1], "lasso")]
)
def test_fit_refuses_what_cannot_be_fitted(times, method):
    with pytest.raises(ValueError, match=r"fit: "):
        SevenFeatureModel.fit(np.ones((len(times), 12)), np.array(times), method=method)


def test_roofline_by_hand():
    model = RooflineModel(0.001, 0.008, 2e-5, 1e-4, 5e-5, 1e-6, 1e-9, 1e-8, interference=2.0)
    # 4 decodes at 1000: fixed 1 + read 8 ms (arithmetic is 0.48) + 4*0.05 + 4*0.001 + KV of 4004 tokens
    assert time_of(model, *[(1, 1000, DECODE)] * 4) == pytest.approx(0.009 + 2e-4 + 4e-6 + 4004e-8)
    # prompt of 1000: arithmetic 20.1 ms > read; pairs 500,000
    assert time_of(model, (1000, 0, PREFILL)) == pytest.approx(0.001 + 5e-5 + 0.0201 + 0.001 + 5e-4)
    # a chunk of 1 after 10^6: its pairs cost less than reading its KV; the decode's KV counts twice beside it
    expected = 0.009 + 1e-4 + 2e-6 + (1e6 + 1) * 1e-8 + 2 * 101e-8
    assert time_of(model, (1, 1_000_000, PREFILL), (1, 100, DECODE)) == pytest.approx(expected)


def test_tables_by_hand():
    """dense 10 ms + 20 us a token, 0.1 ms a sequence; V(x) = x^2 ns; decode n * context ns, never below 1 us."""
    model = small_tables()
    dense, host = (lambda n: 0.010 + 20e-6 * n), 0.001
    assert time_of(model, (100, 0, PREFILL)) == pytest.approx(host + dense(100) + 1e-4 + 5e-6 + 1e-5)
    # V(300) - V(200) = 90,000 - 40,000 ns
    assert time_of(model, (100, 200, PREFILL)) == pytest.approx(host + dense(100) + 1e-4 + 5e-6 + 5e-5)
    alone = 4 * 256e-9 * 100
    expected = host + dense(4) + 4e-4 + alone
    assert time_of(model, *[(1, 25600, DECODE)] * 4) == pytest.approx(expected)
    beside = host + dense(104) + 5e-4 + 5e-6 + 1e-5 + 1.6 * alone
    assert time_of(model, (100, 0, PREFILL), *[(1, 25600, DECODE)] * 4) == pytest.approx(beside)


def test_tables_read_the_kv_of_many_short_chunks():
    model = small_tables()
    potential_alone = 1e-9 * (8001**2 - 8000**2)
    rows = [(1, 8000, PREFILL)] * 16
    kv = 1e-8 * 16 * 8001
    assert kv > 16 * potential_alone + 5e-6
    assert time_of(model, *rows) == pytest.approx(0.001 + 0.010 + 20e-6 * 16 + 16e-4 + kv)


def test_tables_with_measured_mixed_attention_by_hand():
    """prefill c*(u + c/2) ns on its nodes; increment 10 us a decode, whatever the context."""
    nodes = np.array([0.0, 100.0, 200.0])
    c, u = nodes[:, None], nodes[None, :]
    increment = np.broadcast_to(1e-5 * np.array([0.0, 1.0])[None, None, :, None], (3, 3, 2, 2)).copy()
    two = np.array([0.0, 1.0])
    model = TablesModel(
        dense=np.full(3, 0.01),
        per_sequence=np.zeros(2),
        decode=Grid((two, np.array([0.0, 1000.0])), np.array([[0, 0], [0, 1e-3]])),
        prefill=Grid((nodes, nodes), 1e-9 * c * (u + c / 2)),
        increment=Grid((nodes, nodes, two, np.array([0.0, 1000.0])), increment),
    )
    assert time_of(model, (100, 200, PREFILL)) == pytest.approx(0.01 + 1e-9 * 100 * 250)
    # two chunks of 100 after 150 each: 40,000 pairs = one chunk of 200 after 100
    assert time_of(model, (100, 150, PREFILL), (100, 150, PREFILL)) == pytest.approx(0.01 + 1e-9 * 40_000)
    # two prompts of 100: 10,000 pairs, half of one prompt of 200
    assert time_of(model, (100, 0, PREFILL), (100, 0, PREFILL)) == pytest.approx(0.01 + 1e-9 * 10_000)
    assert time_of(model, (1, 500, DECODE)) == pytest.approx(0.01 + 0.5e-3)
    expected = 0.01 + 1e-9 * 100 * 250 + 3e-5  # beyond the grid the increment runs on linearly in the decodes
    assert time_of(model, (100, 200, PREFILL), *[(1, 500, DECODE)] * 3) == pytest.approx(expected)


def test_skew_moves_the_decode_context_towards_the_longest():
    plain, skewed = small_tables(), small_tables(skew=0.5)
    rows = [(1, 10_000, DECODE), (1, 30_000, DECODE)]
    assert time_of(skewed, *rows) - time_of(plain, *rows) == pytest.approx(2 * 5_000 * 1e-9)


def test_grid_is_held_below_and_linear_beyond():
    grid = Grid((np.array([1.0, 2.0]), np.array([10.0, 20.0])), np.array([[1.0, 2.0], [3.0, 4.0]]))
    x, y = np.array([0.0, 3.0, 1.5]), np.array([10.0, 10.0, 40.0])
    assert np.allclose(grid.interpolate([x, y], (False, False)), [1.0, 5.0, 5.0])
    assert np.allclose(grid.interpolate([x, y], (True, True)), [1.0, 3.0, 3.0])
    assert np.allclose(uniform_curve(np.array([0.0, 1.0, 3.0]), 10.0, np.array([5.0, 20.0, 40.0])), [0.5, 3.0, 7.0])


@pytest.mark.parametrize(
    ("nodes", "values", "message"),
    [
        (([1.0, 1.0], [1.0, 2.0]), np.ones((2, 2)), "increase"),
        (([1.0, 2.0], [1.0, 2.0]), np.ones((2, 3)), "match"),
        (([1.0, 2.0], [1.0, 2.0]), np.full((2, 2), np.nan), "finite"),
        (([1.0, 2.0], [1.0, 2.0]), -np.ones((2, 2)), "finite and >= 0"),
    ],
)
def test_grid_refuses_what_it_cannot_interpolate(nodes, values, message):
    with pytest.raises(ValueError, match=message):
        Grid(tuple(np.array(n) for n in nodes), values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"potential_values": None}, "either measured mixed grids or a potential"),
        ({"host_per_step": float("nan")}, "host_per_step"),
        ({"dense": np.array([0.1, -0.1])}, "dense must be"),
        ({"prefill": Grid((np.arange(2.0), np.arange(2.0)), np.ones((2, 2)))}, "come together"),
    ],
)
def test_tables_refuse_incomplete_tables(change, message):
    with pytest.raises(ValueError, match=message):
        small_tables(**change)


@pytest.mark.parametrize("value", [-1.0, float("inf")])
def test_roofline_refuses_values_without_meaning(value):
    with pytest.raises(ValueError, match="weight_read"):
        RooflineModel(0.0, value, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="floor"):
        SevenFeatureModel(np.zeros((3, 8)), floor=value)
