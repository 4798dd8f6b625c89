"""The inverse of a latency model on examples worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from slacktide.core.budget import fill_shapes, max_tokens, max_tokens_reference
from slacktide.core.latency import AffineModel
from slacktide.core.latency_families import SevenFeatureModel

# prefill 5 ms + 1 ms a token, decode 2 ms + 1 ms each, mixed 10 ms + 1 ms a token
MODEL = AffineModel(0.005, 0.001, 0.002, 0.001, alpha_mb=0.010)


def queue(*chunks: tuple[int, int], decodes: int = 0, limit: int = 100) -> dict[str, Any]:
    """Arguments for a queue of (remaining, computed) and decodes at context 10."""
    return {
        "num_decodes": decodes,
        "decode_context": 10.0 * decodes,
        "decode_max_context": 10.0 * (decodes > 0),
        "prefill_remaining": np.array([r for r, _ in chunks], dtype=np.int64),
        "prefill_computed": np.array([u for _, u in chunks], dtype=np.int64),
        "limit": limit,
    }


@pytest.mark.parametrize(
    ("time", "arguments", "expected"),
    [
        (0.0255, queue((50, 0)), 20),  # 5 ms + 20 tokens
        (0.0255, queue((50, 0), decodes=4), 15),  # 10 ms + 15 tokens, 4 of them decodes
        (0.0255, queue((50, 0), limit=12), 12),
        (0.0255, queue((15, 0)), 100),  # the whole queue fits: whatever the limit allows
        (0.0255, queue((15, 0), (0, 7), (10, 100)), 20),  # a request without remaining tokens takes none
        (0.0095, queue((50, 0), decodes=4), 4),  # the decodes fit, no prompt token beside them
        (0.0055, queue((50, 0), decodes=4), 0),  # 4 decodes take 6 ms
        (0.0055, queue((50, 0)), 0),
        (0.0255, queue((50, 0), decodes=8, limit=7), 0),  # the decodes alone exceed the limit
        (0.0255, queue(decodes=4), 100),
        (0.0, queue(), 100),  # nothing to run takes no time
        (-1.0, queue(), 0),
        (float("nan"), queue((50, 0)), 0),
        (float("inf"), queue((500, 0)), 100),
    ],
)
def test_by_hand(time, arguments, expected):
    assert max_tokens(MODEL, time, **arguments) == expected
    assert max_tokens_reference(MODEL, time, **arguments) == expected
    assert MODEL.max_tokens(time, **arguments) == expected


def test_a_dip_does_not_hide_a_smaller_budget_that_is_too_slow():
    weights = np.zeros((3, 8))
    weights[1, [6, 2]] = 0.010, -0.0009  # 10 ms a token - 0.9 ms a token squared: rises to 28 ms at 5 or 6, falls after
    model = SevenFeatureModel(weights, floor=0.001)
    arguments = queue((10, 0), limit=10)
    shapes = fill_shapes(model, np.arange(1, 11), **{k: v for k, v in arguments.items() if k != "limit"})
    times = model.step_times(shapes)
    assert times[9] < 0.020 < times[3]
    assert max_tokens(model, 0.020, **arguments) == 2
    assert max_tokens(model, 0.030, **arguments) == 10


def test_fill_shapes_takes_the_queue_in_order():
    arguments = queue((3, 5), (4, 0), decodes=2)
    del arguments["limit"]
    shapes = fill_shapes(MODEL, np.array([2, 4, 7, 50]), **arguments)
    for shape, chunks in zip(shapes, ([], [(2, 5)], [(3, 5), (2, 0)], [(3, 5), (4, 0)]), strict=True):
        tokens = np.array([c for c, _ in chunks] + [1, 1])
        contexts = np.array([u for _, u in chunks] + [10, 10])
        expected = MODEL.batch_shape(tokens, contexts, np.arange(len(tokens)) >= len(chunks))
        assert np.array_equal(shape, expected)


@pytest.mark.parametrize("field", ["num_decodes", "limit", "decode_context", "decode_max_context"])
def test_negative_numbers_are_refused(field):
    with pytest.raises(ValueError, match=">= 0"):
        max_tokens(MODEL, 1.0, **(queue((5, 0)) | {field: -1}))


def test_queues_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match=r"two int64\[q\]"):
        max_tokens(MODEL, 1.0, **(queue((5, 0)) | {"prefill_computed": np.array([0, 0])}))
