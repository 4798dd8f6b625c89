"""The knapsack is exact, on one pass for all anchors."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slacktide.core.knapsack import choose, choose_brute_force, choose_paper, paper_values


@st.composite
def cases(draw: st.DrawFn) -> dict[str, np.ndarray]:
    """Up to 12 prompts; values are eighths, so that sums do not depend on their order; slacks differ."""
    n = draw(st.integers(1, 12 if draw(st.booleans()) else 6))

    def column(low: int, high: int) -> np.ndarray:
        return np.array(draw(st.lists(st.integers(low, high), min_size=n, max_size=n)), dtype=np.int64)

    slack = np.array(draw(st.permutations(range(1, n + 1))), dtype=np.float64) / 16
    case = {"slack": slack, "remaining": column(1, 200), "values": column(1, 64) / 8.0, "capacity": column(-1, 500)}
    if draw(st.booleans()):
        case["counts"] = column(0, 1)
    return case


@given(cases(), st.sampled_from([1, 16, 32]))
@settings(max_examples=200, deadline=None)
def test_the_chosen_set_is_as_good_as_the_best_of_all_subsets(case, quantum):
    chosen = choose(**case, quantum=quantum)
    counts = case.get("counts", np.ones(case["slack"].size, dtype=np.int64))
    found = (int(counts[chosen].sum()), float(case["values"][chosen].sum()), int(case["remaining"][chosen].sum()))
    assert found == choose_brute_force(**case, quantum=quantum)
    if chosen.size:
        anchor = chosen[0]
        assert len(set(chosen.tolist())) == chosen.size
        assert (case["slack"][chosen] >= case["slack"][anchor]).all()
        assert case["remaining"][chosen].sum() <= case["capacity"][anchor]


def test_requests_count_before_value_and_value_before_tokens():
    slack, remaining = np.array([0.1, 0.2, 0.3, 0.4]), np.array([16, 64, 32, 32])
    capacity = np.array([80, -1, -1, -1])
    values = np.array([1.0, 100.0, 1.0, 1.0])
    assert sorted(choose(slack, remaining, values, capacity).tolist()) == [0, 2, 3]
    # With room for one beside the anchor the value decides, and between equal values the tokens.
    assert sorted(choose(slack, remaining, values, np.array([48, -1, -1, -1])).tolist()) in ([0, 2], [0, 3])
    assert sorted(choose(slack, np.array([16, 16, 32, 32]), values, np.array([48, -1, -1, -1])).tolist()) == [0, 1]
    assert choose(slack[:3], np.array([16, 17, 32]), np.ones(3), np.array([48, -1, -1])).tolist() == [0, 2]


def test_without_a_feasible_anchor_nothing_is_chosen():
    assert choose(np.array([0.1]), np.array([50]), np.ones(1), np.array([49])).size == 0
    assert choose(np.array([0.1]), np.array([50]), np.ones(1), np.array([-1])).size == 0
    assert choose(np.empty(0), np.empty(0, dtype=np.int64), np.empty(0), np.empty(0, dtype=np.int64)).size == 0


@given(cases())
@settings(max_examples=60, deadline=None)
def test_the_papers_constructor_maximises_value_for_each_anchor_then_compares(case):
    slack, remaining, capacity = case["slack"], case["remaining"], case["capacity"]
    best = (0, 0.0, 0)
    for a in range(slack.size):
        others = np.flatnonzero(slack >= slack[a])
        values = dict(zip(others.tolist(), paper_values(slack[others], remaining[others]), strict=True))
        free = [i for i in others.tolist() if i != a]
        if capacity[a] < remaining[a]:
            continue
        subsets = itertools.chain.from_iterable(itertools.combinations(free, k) for k in range(len(free) + 1))
        fits = [s for s in subsets if remaining[a] + sum(remaining[i] for i in s) <= capacity[a]]
        top = max(sum(values[i] for i in s) for s in fits)
        # Of sets with (nearly) the same value any may be taken.
        sets = [s for s in fits if sum(values[i] for i in s) >= top - 1e-9]
        best = max(best, *((len(s) + 1, top + values[a], int(remaining[[a, *s]].sum())) for s in sets))
    found = choose_paper(slack, remaining, capacity, quantum=1)
    if best[0] == 0:
        assert found.size == 0
        return
    assert remaining[found].sum() <= capacity[found[0]]
    assert found.size == best[0]


def test_values_of_the_paper_survive_zero_and_infinite_slack():
    values = paper_values(np.array([0.0, 0.1, np.inf, -1.0]), np.array([10, 10, 10, 10]))
    assert np.isfinite(values).all()
    assert values[0] == values[3] > values[1] > values[2] > 0
    with np.errstate(all="raise"):
        assert np.isfinite(paper_values(np.full(2, np.inf), np.array([1, 1]))).all()


@pytest.mark.parametrize("quantum", [1, 16, 64])
def test_a_set_that_fits_in_units_fits_in_tokens(quantum):
    rng = np.random.default_rng(3)
    slack, remaining = np.arange(1.0, 21.0), rng.integers(1, 300, 20)
    capacity = np.where(np.arange(20) < 5, 1000, -1)
    chosen = choose(slack, remaining, np.ones(20), capacity, quantum=quantum)
    assert chosen.size
    assert remaining[chosen].sum() <= 1000
