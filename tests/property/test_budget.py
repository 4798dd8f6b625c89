"""The inverse of a latency model equals brute force over every budget, for every family and any parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from slacktide.core.budget import fill_shapes, max_tokens, max_tokens_reference
from slacktide.core.latency import AffineModel, PackedModel
from slacktide.core.latency_families import RooflineModel, SevenFeatureModel
from slacktide.core.latency_tables import Grid, TablesModel

LIMIT = 400


@st.composite
def models(draw: st.DrawFn) -> PackedModel:
    """A model of any family with random parameters; tables and ridge-like weights with dips in the tokens."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    family = draw(st.sampled_from(["affine", "seven", "falling", "roofline", "additive", "mixed"]))
    if family == "affine":
        a, b = rng.random(3) * 0.02 + 1e-4, rng.random(3) * 1e-4
        return AffineModel(a[0], b[0], a[1], b[1], a[2], draw(st.sampled_from([0.0, 1e-4, -1.0])) * b[:2].min())
    if family == "seven":
        scale = np.array([1e-2, 1e-9, 1e-8, 1e-8, 1e-5, 1e-7, 1e-5, 1e-6])
        return SevenFeatureModel(rng.random((3, 8)) * scale, floor=1e-3)
    if family == "falling":
        scale = np.array([1e-2, 1e-8, 1e-7, 1e-8, 1e-5, 1e-7, 1e-5, 1e-5])
        return SevenFeatureModel(rng.standard_normal((3, 8)) * scale, floor=1e-3)
    if family == "roofline":
        return RooflineModel(*(rng.random(8) * [1e-3, 1e-2, 1e-4, 1e-4, 1e-5, 1e-6, 1e-9, 1e-9]), interference=1.5)
    return _tables(rng, family)


def _tables(rng: np.random.Generator, family: str) -> TablesModel:
    beside = (np.array([1.0, 8.0, 64.0]), np.array([16.0, 500.0, 4000.0]))
    nodes = (np.array([1.0, 16.0, 64.0, 256.0]), np.array([0.0, 100.0, 1000.0]))
    fields: dict[str, Any] = {
        "dense": 0.002 + 2e-5 * (np.arange(256) // 16 * 16) + 2e-3 * rng.random(256),
        "per_sequence": rng.random(32) * 1e-4,
        "decode": Grid(beside, rng.random((3, 3)) * 1e-3),
        "prefill_launch": 1e-5,
        "kv_seconds": 1e-8,
        "skew": 0.1,
    }
    if family == "additive":
        fields |= {"potential_values": np.cumsum(rng.random(200)) * 1e-4, "potential_step": 16.0, "interference": 2.0}
    else:
        fields |= {
            "prefill": Grid(nodes, rng.random((4, 3)) * 1e-3),
            "increment": Grid((*nodes, *beside), rng.random((4, 3, 3, 3)) * 1e-3),
        }
    return TablesModel(**fields, sources={"label": "composed"})


@st.composite
def queues(draw: st.DrawFn) -> dict[str, Any]:
    chunks = draw(st.lists(st.tuples(st.integers(0, 150), st.integers(0, 2000)), max_size=5))
    decodes = draw(st.integers(0, 60))
    context = draw(st.integers(1, 5000)) * decodes
    return {
        "num_decodes": decodes,
        "decode_context": float(context),
        "decode_max_context": float(min(2 * context, 9000)),
        "prefill_remaining": np.array([r for r, _ in chunks], dtype=np.int64),
        "prefill_computed": np.array([u for _, u in chunks], dtype=np.int64),
        "limit": draw(st.integers(0, LIMIT)),
    }


def budget_times(model: PackedModel, arguments: dict[str, Any]) -> np.ndarray:
    """Predicted time of every budget from num_decodes to the limit."""
    rest = {k: v for k, v in arguments.items() if k != "limit"}
    return model.step_times(fill_shapes(model, np.arange(rest["num_decodes"], arguments["limit"] + 1), **rest))


@settings(max_examples=200)
@given(model=models(), arguments=queues(), at=st.floats(0, 1), exact=st.booleans())
def test_equals_brute_force_over_every_budget(model, arguments, at, exact):
    assume(arguments["num_decodes"] <= arguments["limit"])
    times = budget_times(model, arguments)
    time = float(times[int(at * (len(times) - 1))]) if exact else float(times.max() * at * 1.1)
    found = max_tokens(model, time, **arguments)
    # The potential of many chunks is summed in another order: a bound that equals a predicted time may fall either way.
    near = {max_tokens_reference(model, time * (1 + e), **arguments) for e in (-1e-12, 0.0, 1e-12)}
    assert found in near
    if not exact:
        assert found == max_tokens_reference(model, time, **arguments)


@settings(max_examples=100)
@given(model=models(), arguments=queues(), times=st.lists(st.floats(0, 0.1), min_size=2, max_size=5))
def test_grows_with_time_and_keeps_its_bounds(model, arguments, times):
    found = [max_tokens(model, t, **arguments) for t in sorted(times)]
    assert found == sorted(found)
    assert max_tokens(model, float("inf"), **arguments) == (
        arguments["limit"] if arguments["num_decodes"] <= arguments["limit"] else 0
    )
    for time, budget in zip(sorted(times), found, strict=True):
        assert budget == 0 or arguments["num_decodes"] <= budget <= arguments["limit"]
        if budget > 0:
            used = budget_times(model, arguments | {"limit": budget})
            assert used.max() <= time * (1 + 1e-12)


@settings(max_examples=60)
@given(model=models(), arguments=queues(), seed=st.integers(0, 2**32 - 1))
def test_twins_agree_on_any_model(model, arguments, seed):
    assume(arguments["num_decodes"] <= arguments["limit"])
    rest = {k: v for k, v in arguments.items() if k != "limit"}
    budgets = np.random.default_rng(seed).integers(arguments["num_decodes"], arguments["limit"] + 1, 20)
    shapes = fill_shapes(model, budgets, **rest)
    assert np.allclose(model.step_times(shapes), model.reference(shapes), rtol=1e-10, atol=1e-15)
