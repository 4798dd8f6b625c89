"""A rotated trace is the same traffic, begun elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

from slacktide.search.scenario import rotated
from slacktide.workload.requests import Workload

BURSTS = Workload(  # two bursts of four, 90 s apart
    np.array([0.0, 1.0, 2.0, 3.0, 93.0, 94.0, 95.0, 98.0]),
    np.arange(1, 9),
    np.full(8, 2),
    abort_time=np.array([0.0, 1.0, 2.0, 3.0, 93.0, 94.0, 95.0, 98.0]) + np.arange(1, 9),
    hash_ids=(np.arange(8), np.arange(9)),
    hash_block_size=16,
)


def test_the_gap_that_was_cut_is_kept() -> None:
    """Cut at 49 s: the second burst comes 44 s later; the first one 14 s (98 / 7) after its end, as before the cut."""
    turned = rotated(BURSTS, 0.5)
    assert turned.arrival_time.tolist() == [44.0, 45.0, 46.0, 49.0, 63.0, 64.0, 65.0, 66.0]
    assert turned.num_prompt_tokens.tolist() == [5, 6, 7, 8, 1, 2, 3, 4]
    assert (turned.abort_time - turned.arrival_time).tolist() == [5, 6, 7, 8, 1, 2, 3, 4]
    assert turned.hash_ids is not None
    assert turned.hash_ids[0].tolist() == [4, 5, 6, 7, 0, 1, 2, 3]


@pytest.mark.parametrize("share", [0.01, 0.2, 0.4, 0.97])
def test_every_rotation_lasts_one_period(share: float) -> None:
    """Span and one mean gap: up to the cut, from where the next round would begin."""
    turned = rotated(BURSTS, share)
    before = BURSTS.arrival_time[BURSTS.arrival_time < share * 98].max()
    assert turned.arrival_time[-1] + share * 98 - before == pytest.approx(98 + 14)
    assert sorted(turned.num_prompt_tokens.tolist()) == list(range(1, 9))


def test_no_turn_and_a_single_request_change_nothing() -> None:
    assert rotated(BURSTS, 0.0).arrival_time.tolist() == BURSTS.arrival_time.tolist()
    one = Workload(np.array([5.0]), np.array([3]), np.array([2]))
    assert rotated(one, 0.5).arrival_time.tolist() == [5.0]
