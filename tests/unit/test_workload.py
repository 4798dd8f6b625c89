"""Workload: validation, selection, scaling, merging; and `load_workload` from specification to columns."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from slacktide.errors import InputError
from slacktide.workload import ClosedLoop, ReadOptions, Workload, concat, load_workload, merge


def make(times=(0.0, 1.0, 2.0), prompts=(10, 20, 30), outputs=(1, 2, 3), **more) -> Workload:
    return Workload(np.array(times), np.array(prompts), np.array(outputs), **more)


def test_defaults_fill_every_column():
    workload = make()
    assert workload.max_tokens.tolist() == [3, 3, 3]
    assert np.isinf(workload.slo_ttft).all()
    assert np.isinf(workload.abort_time).all()
    assert workload.session.tolist() == [-1, -1, -1]
    assert workload.tenants == ("default",)
    assert not workload.failed.any()


def test_unsorted_rows_are_sorted_stably_with_all_their_columns():
    workload = make((2.0, 1.0, 1.0), priority=np.array([7, 8, 9]), hash_ids=([1, 2, 3], [0, 1, 2, 3]))
    assert workload.arrival_time.tolist() == [1.0, 1.0, 2.0]
    assert workload.num_prompt_tokens.tolist() == [20, 30, 10]
    assert workload.priority.tolist() == [8, 9, 7]
    assert workload.hash_ids[0].tolist() == [2, 3, 1]


def test_columns_are_read_only_copies():
    times = np.array([0.0, 1.0, 2.0])
    workload = make(times)
    times[0] = 9
    assert workload.arrival_time[0] == 0
    with pytest.raises(ValueError, match="read-only"):
        workload.arrival_time[0] = 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"times": (0, math.nan, 1)}, "request 1: arrival_time is nan"),
        ({"times": (-1.0, 0, 1)}, "request 0: arrival_time is -1.0"),
        ({"times": (0, 1, math.inf)}, "arrival_time is inf"),
        ({"prompts": (10, 0, 30)}, "request 1: num_prompt_tokens is 0"),
        ({"prompts": (10, 20, 10_000_001)}, "num_prompt_tokens is 10000001"),
        ({"outputs": (1, 2, -3)}, "num_output_tokens is -3"),
        ({"prompts": (1.5, 2.5, 3.5)}, "expected integers"),
        ({"prompts": (1, 2)}, r"has \(2,\) values"),
        ({"max_tokens": np.array([3, 1, 3])}, "request 1: num_output_tokens is 2, expected at most max_tokens"),
        ({"slo_ttft": np.array([1.0, 0.0, 1.0])}, "request 1: slo_ttft is 0.0"),
        ({"slo_tbt": np.array([1.0, math.nan, 1.0])}, "slo_tbt is nan"),
        ({"slo_e2e": np.array([1.0, 1e300, 1.0])}, "slo_e2e is 1e"),
        ({"abort_time": np.array([5.0, 0.5, 5.0])}, "request 1: abort_time is 0.5"),
        ({"tenant": np.array([0, 1, 0])}, "request 1: tenant is 1"),
        ({"hash_ids": ([1, 2], [0, 1, 2, 1])}, "hash_ids do not fit"),
        ({"hash_ids": ([1, 2, 3, 4], [0, 2, 3, 4])}, "request 0: num_prompt_tokens is 10"),
    ],
)
def test_bad_columns_name_request_and_value(change, message):
    with pytest.raises(InputError, match=message):
        make(**change)


def test_no_requests_is_an_error():
    with pytest.raises(InputError, match="no requests"):
        make((), (), ())


def test_rate_counts_gaps_and_scaling_reaches_the_rate_wanted():
    workload = make((0.0, 1.0, 4.0))
    assert workload.rate == 0.5
    faster = workload.scaled_to(5.0)
    assert faster.rate == pytest.approx(5.0)
    assert faster.arrival_time.tolist() == pytest.approx([0.0, 0.1, 0.4])
    assert workload.scaled_to(math.inf).arrival_time.tolist() == [0, 0, 0]


def test_scaling_keeps_each_clients_patience():
    workload = make(abort_time=np.array([3.0, 4.0, math.inf])).scaled_to(10.0)
    assert (workload.abort_time - workload.arrival_time).tolist() == pytest.approx([3.0, 3.0, math.inf])


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, 1e300])
def test_impossible_rates(rate):
    with pytest.raises(InputError, match="rate"):
        make().scaled_to(rate)


def test_one_instant_cannot_be_scaled():
    with pytest.raises(InputError, match="--arrival poisson"):
        make((1.0, 1.0, 1.0)).scaled_to(3.0)


def test_a_single_request_has_no_rate_and_stays():
    workload = make((2.0,), (5,), (6,))
    assert math.isnan(workload.rate)
    assert workload.scaled_to(3.0).arrival_time.tolist() == [2.0]


def test_first_and_take_carry_ragged_hash_ids():
    workload = make(prompts=(512, 1024, 30), hash_ids=([1, 2, 3], [0, 1, 3, 3]))
    part = workload.take([1, 2])
    assert part.hash_ids[0].tolist() == [2, 3]
    assert part.hash_ids[1].tolist() == [0, 2, 2]
    assert len(workload.first(2)) == 2
    assert workload.take(workload.num_prompt_tokens > 100).num_prompt_tokens.tolist() == [512, 1024]
    with pytest.raises(InputError, match="expected 1 to 3"):
        workload.first(4)


def test_request_shows_no_true_output_length():
    request = make(slo_ttft=np.array([0.5, 0.5, 0.5])).request(1)
    assert (request.num_prompt_tokens, request.max_tokens, request.slo.ttft) == (20, 3, 0.5)
    assert not hasattr(request, "num_output_tokens")


def test_merge_unites_labels_and_keeps_hash_ids_apart():
    a = make(tenant=np.array([0, 1, 0]), tenants=("x", "y"), hash_ids=([5, 6, 7], [0, 1, 2, 3]))
    b = make((0.5, 1.5, 2.5), tenant=np.array([0, 0, 1]), tenants=("y", "z"), hash_ids=([5, 6, 7], [0, 1, 2, 3]))
    both = merge([a, b])
    assert both.arrival_time.tolist() == [0, 0.5, 1, 1.5, 2, 2.5]
    assert [both.tenants[code] for code in both.tenant] == ["x", "y", "y", "y", "x", "z"]
    assert len(set(both.hash_ids[0].tolist())) == 6
    assert both.session.tolist() == [-1] * 6


def test_merge_refuses_closed_loops_and_unequal_blocks():
    with pytest.raises(InputError, match="closed loop"):
        merge([make(), make(closed=ClosedLoop(2))])
    hashed = {"hash_ids": ([1], [0, 1, 1, 1])}
    with pytest.raises(InputError, match="block sizes"):
        merge([make(**hashed), make(**hashed, hash_block_size=16)])


def test_concat_puts_one_after_the_other():
    joined = concat([make(), make((5.0, 6.0, 7.0))], gap=10.0)
    assert joined.arrival_time.tolist() == [0, 1, 2, 12, 13, 14]


def test_closed_loop_bounds():
    with pytest.raises(InputError, match="concurrency=0"):
        ClosedLoop(0)
    with pytest.raises(InputError, match="think"):
        ClosedLoop(1, math.nan)


# ---- load_workload --------------------------------------------------------------------------------------------------


def test_packaged_trace_with_its_own_times_and_at_a_rate():
    own = load_workload("azure-conv")
    assert len(own) == 16495
    assert own.rate == pytest.approx(5.889, abs=1e-3)
    scaled = load_workload("azure-conv", rate=8)
    assert scaled.rate == pytest.approx(8.0)
    assert np.allclose(scaled.arrival_time * 8.0, own.arrival_time * own.rate)


def test_no_times_and_no_rate_asks_for_one():
    with pytest.raises(InputError, match=r"no arrival times.*--rate"):
        load_workload("sharegpt")
    with pytest.raises(InputError, match=r"poisson needs a mean rate.*--rate"):
        load_workload("sharegpt", arrival="poisson")


def test_lengths_are_those_of_the_table_and_do_not_depend_on_rate_or_arrival():
    slow, fast = (load_workload("sharegpt", rate=rate, num_prompts=500, seed=3) for rate in (1, 7))
    bursty = load_workload("sharegpt", rate=1, arrival="gamma:burstiness=0.2", num_prompts=500, seed=3)
    for other in (fast, bursty):
        assert np.array_equal(slow.num_prompt_tokens, other.num_prompt_tokens)
    assert np.allclose(slow.arrival_time, fast.arrival_time * 7)
    longer = load_workload("sharegpt", rate=1, num_prompts=800, seed=3)
    assert np.array_equal(longer.num_prompt_tokens[:500], slow.num_prompt_tokens)
    assert not np.array_equal(
        load_workload("sharegpt", rate=1, num_prompts=500, seed=4).num_prompt_tokens, slow.num_prompt_tokens
    )


def test_whole_length_table_is_each_row_once():
    workload = load_workload("bwb", rate=10)
    assert len(workload) == 33768
    assert int(workload.num_prompt_tokens.sum()) == int(load_workload("bwb", rate=1, seed=9).num_prompt_tokens.sum())


def test_more_requests_than_rows():
    with pytest.raises(InputError, match="only 300 requests"):
        load_workload("lss-sharegpt-qwen3-300", num_prompts=301)
    repeated = load_workload("lss-sharegpt-qwen3-300", num_prompts=301, arrival="poisson")
    assert repeated.num_prompt_tokens[300] == repeated.num_prompt_tokens[0]
    assert any("rows repeat" in note for note in repeated.notes)


def test_another_arrival_without_rate_takes_the_traces_own_mean():
    workload = load_workload("azure-conv", arrival="poisson", num_prompts=4000)
    assert workload.rate == pytest.approx(5.889, rel=0.05)
    assert any("mean rate of 5.889" in note for note in workload.notes)


def test_max_tokens_policies():
    assert set(load_workload("azure-conv").max_tokens) == {1000}
    exact = load_workload("azure-conv", max_tokens="exact")
    assert np.array_equal(exact.max_tokens, exact.num_output_tokens)
    capped = load_workload("azure-conv", max_tokens=100)
    assert capped.num_output_tokens.max() == 100
    assert any("longer than max_tokens and end there" in note for note in capped.notes)
    assert set(load_workload("azure-conv", max_tokens="2000").max_tokens) == {2000}
    for wrong in (0, "many", "-3", 10**9):
        with pytest.raises(InputError, match="max_tokens"):
            load_workload("azure-conv", max_tokens=wrong)


def test_slos_by_class_of_a_mixture():
    workload = load_workload(
        "mix:sharegpt*3+arxiv*1,n=4000",
        rate=4,
        slo="sharegpt=ttft:5x,tbt:40;arxiv=summarisation",
        isolated_prefill=lambda tokens: tokens * 1e-4,
    )
    share = workload.slo_class == workload.slo_classes.index("sharegpt")
    assert share.mean() == pytest.approx(0.75, abs=0.03)
    factor = np.where(share, 5, 10)
    assert np.allclose(workload.slo_ttft, factor * workload.num_prompt_tokens * 1e-4)
    assert np.allclose(workload.slo_tbt, np.where(share, 0.04, 0.08))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("synthetic:prompt=512", "output= is missing"),
        ("synthetic", "prompt= is missing"),
        ("synthetic:prompt=512,output=8,promt=3", "did you mean prompt"),
        ("synthetic:prompt=512,output=8,prompt=3", "given twice"),
        ("synthetic:prompt=512,output", "not of the form key=value"),
        ("synthetic:prompt=0,output=8", "expected a whole number from 1"),
        ("synthetic:prompt=1e99,output=8", "expected a whole number from 1"),
        ("synthetic:prompt=nan,output=8", "unknown prompt distribution"),
        ("synthetic:prompt=lognorml:100:1,output=8", "did you mean lognormal"),
        ("synthetic:prompt=lognormal:100,output=8", "expected lognormal:MEAN:CV"),
        ("synthetic:prompt=uniform:9:3,output=8", "LOW is above HIGH"),
        ("synthetic:prompt=gamma:100:0,output=8", "CV must lie above 0"),
        ("synthetic:prompt=exponential:0.1,output=8", "MEAN must lie"),
        ("synthetic:prompt=512,output=8,n=0", "expected a whole number from 1"),
        ("synthetic:lengths=sharegptt", "did you mean sharegpt"),
        ("synthetic:lengths=sharegpt,prompt=5", "leave prompt="),
        ("mix:sharegpt*0+arxiv", "weights above 0"),
        ("mix:sharegpt+sharegpt", "given twice"),
        ("mix:sharegpt+arxive", "did you mean arxiv"),
        ("mix:", "expected NAME"),
        ("no-such-trace.csv", "unknown trace 'no-such-trace.csv'"),
        ("azure-cov", "did you mean azure-conv"),
        ("/", "cannot be read"),
        ("a\0b", "cannot be read"),
    ],
)
def test_bad_trace_texts(text, message):
    with pytest.raises(InputError, match=message):
        load_workload(text, rate=1)


@pytest.mark.parametrize(
    ("text", "mean", "cv"),
    [
        ("512", 512, 0),
        ("constant:512", 512, 0),
        ("uniform:100:900", 500, 0.4622),  # variance (801**2 - 1) / 12
        ("lognormal:1000:1.2", 1000, 1.2),
        ("gamma:1000:0.5", 1000, 0.5),
        ("exponential:1000", 1000, 1.0),
    ],
)
def test_length_distributions_have_their_mean_and_spread(text, mean, cv):
    workload = load_workload(f"synthetic:prompt={text},output=7,n=40000", rate=100, seed=5)
    lengths = workload.num_prompt_tokens
    assert lengths.mean() == pytest.approx(mean, rel=0.03)
    assert lengths.std() / lengths.mean() == pytest.approx(cv, rel=0.06, abs=1e-9)
    assert set(workload.num_output_tokens) == {7}


def test_synthetic_limits_and_count():
    workload = load_workload("synthetic:prompt=exponential:1000,output=5,max_prompt=1500", rate=1, num_prompts=300)
    assert len(workload) == 300
    assert workload.num_prompt_tokens.max() == 1500
    assert workload.num_prompt_tokens.min() >= 1


def test_synthetic_from_a_length_table_takes_pairs():
    pairs = load_workload("synthetic:lengths=arxiv,n=50", rate=1)
    table = load_workload("arxiv", rate=1)
    known = set(zip(table.num_prompt_tokens, table.num_output_tokens, strict=True))
    assert set(zip(pairs.num_prompt_tokens, pairs.num_output_tokens, strict=True)) <= known


def test_closed_loop_has_no_times():
    workload = load_workload("azure-conv", arrival="closed:concurrency=32,think=1.5", num_prompts=100)
    assert workload.closed == ClosedLoop(32, 1.5)
    assert not workload.arrival_time.any()
    with pytest.raises(InputError, match="closed loop"):
        workload.scaled_to(2.0)


def test_options_reach_the_reader(tmp_path: Path):
    file = tmp_path / "t.csv"
    file.write_text("prompt_tokens,output_tokens\n5,0\n6,7\n")
    assert len(load_workload(str(file), rate=1, options=ReadOptions(drop_empty=True))) == 1


def test_prompt_and_output_lengths_are_independent():
    workload = load_workload("synthetic:prompt=uniform:1:1000,output=uniform:1:1000,n=5000", rate=1)
    assert abs(np.corrcoef(workload.num_prompt_tokens, workload.num_output_tokens)[0, 1]) < 0.05
    gaps = np.diff(workload.arrival_time, prepend=0)
    assert abs(np.corrcoef(workload.num_prompt_tokens, gaps)[0, 1]) < 0.05


def test_same_seed_same_bytes():
    one, two = (load_workload("mix:sharegpt*5+arxiv", rate=3, seed=11) for _ in range(2))
    assert one.arrival_time.tobytes() == two.arrival_time.tobytes()
    assert one.num_prompt_tokens.tobytes() == two.num_prompt_tokens.tobytes()


@pytest.mark.parametrize("seed", [-1, 1.5, "x", True])
def test_bad_seeds(seed):
    with pytest.raises(InputError, match="seed"):
        load_workload("sharegpt", rate=1, num_prompts=3, seed=seed)


def test_import_stays_light():
    code = (
        "import sys, slacktide.workload; "
        "print([m for m in ('pyarrow', 'msgspec', 'scipy', 'numba', 'matplotlib', 'rich') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_describe_counts_tokens():
    figures = make().describe()
    assert figures["requests"] == 3
    assert figures["rate"] == 1.0
    assert figures["prompt_tokens"]["max"] == 30
