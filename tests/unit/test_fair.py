"""Tenants' counters by hand, their weights as users write them, and what `tide` tells of what it learned."""

from __future__ import annotations

import json

import numpy as np
import pytest

from slacktide.core.fair import AHEAD, COST, QUEUED, ROWS, SERVED, WEIGHT, Shares, parse_weights
from slacktide.core.kernels_fair import charge, interleave, lift
from slacktide.core.kinds import DECODE, PREFILL
from slacktide.core.live import NUM_INT_FIELDS, PRIORITY, STATUS, TENANT
from slacktide.core.policies.tide import Tide
from slacktide.core.spec import parse_policies
from slacktide.core.types import RUNNING
from slacktide.errors import InputError
from slacktide.report.learned import learned_rows


def table(*counters: float) -> np.ndarray:
    shares = np.zeros((ROWS, len(counters)))
    shares[COST], shares[WEIGHT] = counters, 1.0
    return shares


def waiting(*tenants: int) -> np.ndarray:
    ints = np.zeros((NUM_INT_FIELDS, len(tenants)), dtype=np.int64)
    ints[TENANT] = tenants
    return ints


def test_weights_are_read_by_name():
    assert parse_weights("") == {}
    assert parse_weights("search:2+team:a:0.5") == {"search": 2.0, "team:a": 0.5}
    (spec,) = parse_policies(["tide:tenant_weights=search:2+batch:0.5"])
    assert spec.build().tenant_weights == "search:2+batch:0.5"


@pytest.mark.parametrize(
    ("text", "told"),
    [("a", "expected NAME:WEIGHT"), ("a:0", "above 0"), ("a:x", "'a:x'"), (":2", "':2'"), ("a:inf", "above 0"),
     ("a:nan", "above 0"), ("a:1+", "''"), ("a:1+a:2", "named twice")],
)  # fmt: skip
def test_bad_weights_end_in_one_line(text, told):
    with pytest.raises(InputError, match="tenant_weights") as error:
        parse_policies([f"tide:tenant_weights={text}"])
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_no_table_for_one_tenant_and_later_names_are_added():
    shares = Shares({"b": 2.0})
    assert shares.of(()).shape == shares.of(("a",)).shape == (ROWS, 0)
    shares.of(("a", "b"))[COST] = 7.0
    grown = shares.of(["a", "b", "c"])
    assert grown[COST].tolist() == [7.0, 7.0, 0.0]
    assert grown[WEIGHT].tolist() == [1.0, 2.0, 1.0]


def test_who_comes_back_starts_at_the_level_of_those_who_waited():
    shares = table(500.0, 300.0, 40.0)
    kinds = np.full(3, PREFILL)
    shares[QUEUED] = (1.0, 1.0, 0.0)
    lift(waiting(0, 1, 2), 3, kinds, shares)
    assert shares[COST].tolist() == [500.0, 300.0, 300.0]
    shares[QUEUED] = (1.0, 0.0, 0.0)  # all queues ran empty: the last one's counter is the level
    lift(waiting(), 0, kinds, shares)
    shares[COST, 2] = 10.0
    lift(waiting(2), 1, kinds, shares)
    assert shares[COST, 2] == 500.0


def test_equally_urgent_prompts_alternate_by_what_they_cost():
    ints, remaining = waiting(0, 0, 0, 1, 1), np.array([100, 100, 100, 250, 50])
    rows, shares = np.arange(5), table(0.0, 0.0)
    interleave(rows, ints, remaining, True, True, shares)
    assert rows.tolist() == [0, 3, 1, 2, 4]  # tags 0, 0, 100, 200 and 250
    assert shares[AHEAD].tolist() == [300.0, 300.0]
    ints[PRIORITY, 4] = -1
    interleave(rows, ints, remaining, True, True, table(0.0, 0.0))
    assert rows[0] == 4


def test_a_heavier_tenant_is_charged_less():
    shares = table(0.0, 0.0)
    shares[WEIGHT, 1] = 2.0
    ints = waiting(0, 1, 1)
    ints[STATUS, 2] = RUNNING
    charge(ints, np.arange(3), np.array([60, 100, 1]), np.array([PREFILL, PREFILL, DECODE]), np.array([80, 100, 1]),
           shares)  # fmt: skip
    assert shares[COST].tolist() == [80.0, 52.0]  # a chunk is charged whole; an end and a decode bring a token each
    assert shares[SERVED].tolist() == [80.0, 104.0]


def test_nothing_learned_says_nothing_and_is_json():
    told = Tide().learned()
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert learned_rows(told) == learned_rows(None) == learned_rows({"margins": 3, "tenants": {"a": 1}}) == []
