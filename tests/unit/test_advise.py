"""`slacktide advise`: what it recommends, how sure it says to be, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from slacktide.cli.advise import read_steps
from slacktide.cli.main import main
from slacktide.core.exclusive import Costs
from slacktide.core.exclusive_hazard import fit_costs
from slacktide.core.shape import FIELD_NAMES
from slacktide.errors import InputError
from slacktide.search.advise import Steps, _choose
from slacktide.vllm.steplog import StepLine, step_json

COSTS = Costs(0.005, 5e-5, 0.010, 1e-4, 0.011, 1.5e-4)
FALLBACK = Costs(0.1, 0.1, 0.1, 0.1, 0.1, 0.1)


def profile(folder: Path, kappa_ms: float = 0.15) -> str:
    path = folder / "engine.json"
    latency = {
        "family": "affine", "alpha_p_ms": 5, "beta_p_ms": 0.05, "alpha_d_ms": 10, "beta_d_ms": 0.1,
        "kappa_ms": kappa_ms,
    }  # fmt: skip
    path.write_text(
        json.dumps({"num_gpu_blocks": 30000, "block_size": 16, "max_num_batched_tokens": 8192, "max_num_seqs": 1024,
                    "latency": latency})
    )  # fmt: skip
    return str(path)


def advice(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:  # type: ignore[type-arg]
    lengths = () if "--trace" in arguments else ("--mean-prompt", "256", "--mean-output", "64")
    assert main(["advise", *lengths, "--num-prompts", "600", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def measured(kinds: str = "pdm", noise: float = 0.01, costs: Costs = COSTS) -> Steps:
    rng = np.random.default_rng(0)
    prompt, decodes = [], []
    for kind in kinds:
        prompt.append(rng.integers(100, 8000, 300) if kind in "pm" else np.zeros(300))
        decodes.append(rng.integers(1, 400, 300) if kind in "dm" else np.zeros(300))
    p, d = np.concatenate(prompt).astype(float), np.concatenate(decodes).astype(float)
    alpha = np.where(d == 0, costs.alpha_p, np.where(p == 0, costs.alpha_d, costs.alpha_mb))
    t = alpha + costs.beta_p * p + costs.beta_d * d + costs.kappa * p * d / (p + d)
    return Steps(p, d, t * (1 + noise * rng.standard_normal(t.size)), "made up")


def test_interference_and_crowd_decide(tmp_path, capsys):
    crowd = advice(capsys, "--profile", profile(tmp_path), "--max-concurrency", "400")
    assert crowd["recommendation"] == "exclusive"
    assert crowd["decided_by"] == "throughput"
    assert crowd["lead"] > 0.05
    assert crowd["chance_exclusive"] > 0.9
    assert 0 < crowd["n_cross"] < 200
    low, high = crowd["n_cross_interval"]
    assert low <= crowd["n_cross"]
    assert high is None or high >= crowd["n_cross"]
    few = advice(capsys, "--profile", profile(tmp_path), "--max-concurrency", "8")
    assert few["recommendation"] == "mixed"
    calm = advice(capsys, "--profile", profile(tmp_path, 0.0), "--max-concurrency", "400")
    assert calm["recommendation"] == "mixed"
    assert calm["n_cross"] is None or calm["n_cross"] > 2000  # only where the token budget binds both
    assert calm["lead"] == pytest.approx(calm["lead_simulated"], abs=0.03)


def test_numbers_are_the_theorys(tmp_path, capsys):
    found = advice(capsys, "--profile", profile(tmp_path), "--max-concurrency", "400")
    assert found["costs"]["alpha_p"] == pytest.approx(0.005, rel=1e-6)
    assert found["costs"]["kappa"] == pytest.approx(1.5e-4, rel=1e-6)
    x = 0.005 / 0.010 / found["load"]["output"]
    theta = found["theta0"]
    assert theta / (1 - theta) + np.log1p(-theta) == pytest.approx(x, rel=1e-9)
    assert found["k"] == min(int(theta * found["slots"]), int(8192 / found["load"]["prompt"]))
    assert found["slots"] == 400
    curves = found["curves"]
    assert len(curves["concurrency"]) == len(curves["exclusive"]) == len(curves["mixed"])
    ahead = np.array(curves["exclusive"]) > np.array(curves["mixed"])
    assert ahead.tolist() == (np.array(curves["concurrency"]) >= found["n_cross"]).tolist()


@pytest.mark.parametrize(
    ("attainment", "expected"),
    [((0.9, 0.95), ("exclusive", "attainment")), ((0.95, 0.9), ("mixed", "attainment")),
     ((0.0, 0.0), ("exclusive", "throughput")), ((0.95, 0.945), ("exclusive", "throughput"))],
)  # fmt: skip
def test_equal_attainment_leaves_it_to_throughput_and_says_so(attainment, expected):
    modes = zip(("mixed", "exclusive"), attainment, (10.0, 11.0), strict=True)
    outcome = {mode: {"attainment": met, "request_throughput": rate} for mode, met, rate in modes}
    assert _choose(outcome, "attainment") == expected


def test_by_attainment_with_an_slo_and_the_stock_line(tmp_path, capsys):
    """Gaps of 25 ms: only small steps keep them, so the stock line comes with the smallest budget."""
    found = advice(
        capsys, "--profile", profile(tmp_path), "--max-concurrency", "60", "--slo", "tbt:60", "--slo-mode", "gap"
    )
    assert found["decided_by"] == "attainment"
    mixed, exclusive = (found["simulated"][mode]["attainment"] for mode in ("mixed", "exclusive"))
    better = "exclusive" if exclusive > mixed else "mixed"
    assert abs(exclusive - mixed) < 0.01 or found["recommendation"] == better
    stock = found["stock_vllm"]
    assert stock["command"].startswith("vllm serve MODEL --max-num-batched-tokens ")
    assert stock["attainment"] >= mixed
    assert str(stock["max_num_seqs"]) in stock["command"]


def test_a_step_log_replaces_the_profile(tmp_path, capsys):
    steps = measured()
    path = tmp_path / "steps.csv"
    rows = np.stack([steps.seconds * 1e3, steps.prompt, steps.decodes], axis=1)
    np.savetxt(path, rows, delimiter=",", header="duration_ms,num_prefill_tokens,num_decodes", comments="")
    found = advice(capsys, "--profile", profile(tmp_path, 0.0), "--max-concurrency", "400", "--step-log", str(path))
    assert found["recommendation"] == "exclusive"  # the profile alone says mixed
    assert found["costs"]["kappa"] == pytest.approx(1.5e-4, rel=0.1)
    assert found["costs_source"] == "900 steps of steps.csv"
    low, high = found["lead_interval"]
    assert low < found["lead"] < high
    assert high - low < 0.1
    assert found["costs_not_measured"] == []


def test_the_plug_ins_own_step_log_is_read(tmp_path):
    line = StepLine(1.0, 0.0125, None, 1e-4, "mixed", (0.0,) * 12, 3, 0, 9, 0, "", None)
    shape = dict(zip(FIELD_NAMES, line.shape, strict=True)) | {"prefill_tokens": 64, "num_decodes": 2}
    steps = [line._replace(shape=tuple(shape.values()))] * 30
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(step_json(each) + "\n" for each in [line, *steps]))  # the first has no tokens
    found = read_steps(path)
    assert found.seconds.tolist() == [0.0125] * 30
    assert (set(found.prompt), set(found.decodes)) == ({64.0}, {2.0})
    path.write_text(step_json(line).replace("prefill_tokens", "other") + "\n")
    with pytest.raises(InputError, match="line 1: no prefill_tokens"):
        read_steps(path)


def test_works_from_a_vllm_bench_result_and_writes_a_figure(tmp_path, capsys):
    n = 80
    result = {
        "duration": 40.0, "completed": n, "max_concurrency": 32, "input_lens": [300] * n, "output_lens": [20] * n,
        "ttfts": [0.2] * n, "itls": [[0.02] * 19] * n, "errors": [""] * n, "start_times": [0.1 * i for i in range(n)],
    }  # fmt: skip
    bench = tmp_path / "bench.json"
    bench.write_text(json.dumps(result))
    out = tmp_path / "out"
    main(
        ["advise", "--profile", profile(tmp_path), "--trace", str(bench), "--max-concurrency", "32", "--out", str(out)]
    )
    text = capsys.readouterr().out
    assert "advice: mixed batching" in text
    assert "300 prompt and 20 output tokens" in text
    assert (out / "advise.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "advise.json").read_text())["recommendation"] == "mixed"


def test_fit_of_steps_that_tell_all_or_only_a_part():
    costs, missing = fit_costs(*_arrays(measured(noise=0)), FALLBACK)
    for name in ("alpha_p", "beta_p", "alpha_d", "beta_d", "alpha_mb", "kappa"):
        assert getattr(costs, name) == pytest.approx(getattr(COSTS, name), rel=1e-6), name
    assert missing == set()
    costs, missing = fit_costs(*_arrays(measured("dm", noise=0)), FALLBACK)
    assert missing == {"alpha_p"}
    assert costs.alpha_p == FALLBACK.alpha_p
    assert costs.alpha_mb == pytest.approx(COSTS.alpha_mb, rel=1e-6)
    calm = Costs(0.005, 5e-5, 0.010, 1e-4, 0.011, -2e-5)
    costs, missing = fit_costs(*_arrays(measured(noise=0, costs=calm)), FALLBACK)
    assert costs.kappa == 0.0
    assert "kappa" in missing
    with pytest.raises(ValueError, match="at least one step"):
        fit_costs(np.zeros(1), np.zeros(1), np.ones(1), FALLBACK)


def _arrays(steps: Steps) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return steps.prompt, steps.decodes, steps.seconds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("duration_ms,num_decodes\n1,2\n", "no column num_prefill_tokens"),
        ("num_prefill_tokens,num_decodes\n1,2\n", "no column duration_ms or"),
        ("duration,num_prefill_tokens,num_decodes\n" + "0.1,0,3\n" * 4 + "0.1,0\n", "row 5: 2 values, expected 3"),
        ("duration,num_prefill_tokens,num_decodes\n" + "0.1,0,3\n" * 4 + "0,0,3\n" * 30, "row 5: duration=0"),
        ("duration,num_prefill_tokens,num_decodes\n" + "0.1,0,x\n" * 30, "column num_decodes: expected numbers"),
        ("duration,num_prefill_tokens,num_decodes\n" + "0.1,0,3\n" * 4, "4 steps: expected at least 20"),
    ],
)
def test_step_logs_that_are_refused(tmp_path, text, message):
    path = tmp_path / "steps.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_steps(path)
    with pytest.raises(InputError, match="cannot be read"):
        read_steps(tmp_path / "absent.csv")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "what load"),
        (["--mean-prompt", "5"], "what load"),
        (["--trace", "azure-conv", "--mean-prompt", "5"], "leave one out"),
    ],
)
def test_loads_that_are_refused(tmp_path, capsys, arguments, message):
    assert main(["advise", "--profile", profile(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_shows_what_the_policy_of_a_step_log_learned(tmp_path, capsys):
    rng = np.random.default_rng(0)
    lines = []
    for k in range(60):
        shape = dict.fromkeys(FIELD_NAMES, 0.0) | {
            "prefill_tokens": 64.0 * (k % 3), "num_decodes": float(1 + k % 7), "num_tokens": 64.0 * (k % 3) + 1 + k % 7,
        }  # fmt: skip
        learned = None
        if k % 20 == 0:
            tenants = {"search": {"weight": 2.0, "cost": 900.0, "share": 0.9}, "": {"weight": 1.0, "cost": 100.0,
                       "share": 0.1}}  # fmt: skip
            learned = {"margins": {"decode": {"steps": k + 1, "mean": 1.05, "deviation": 0.02, "factor": 1.13}},
                       "mean_output_tokens": 200.0 + k, "ttft_targets": {"requests": 50, "quantiles": [0.5, 1.0, 2.0]},
                       "tbt_targets": {"requests": 0, "quantiles": None}, "arrival_rate": 3.5, "miss_rate": 0.04,
                       "tenants": tenants}  # fmt: skip
        lines.append(step_json(StepLine(float(k), 0.01 + 1e-5 * rng.random(), None, 1e-4, "mixed",
                                        tuple(shape.values()), 3, 0, 9, 0, "", None, learned)))  # fmt: skip
    path = tmp_path / "steps.jsonl"
    path.write_text("\n".join(lines) + "\n")
    given = ("--profile", profile(tmp_path), "--max-concurrency", "32", "--step-log", str(path))
    assert advice(capsys, *given)["learned"]["mean_output_tokens"] == 240.0  # the newest
    main(["advise", "--mean-prompt", "256", "--mean-output", "64", "--num-prompts", "600", *given])
    text = capsys.readouterr().out
    for words in (
        "what it learned", "1.050 of the predicted time", "240 on average", "1,000 ms, 5 to 95 %: 500 to 2,000",
        "3.50 requests/s", "4.0%", "tenant search", "90.0% of the token cost, weight 2", "tenant (none)",
    ):  # fmt: skip
        assert words in text, words
    assert "TBT targets" not in text
    path.write_text("\n".join(json.dumps({k: v for k, v in json.loads(line).items() if k != "learned"})
                              for line in lines) + "\n")  # fmt: skip
    main(["advise", "--mean-prompt", "256", "--mean-output", "64", "--num-prompts", "600", *given])
    assert "what it learned" not in capsys.readouterr().out
