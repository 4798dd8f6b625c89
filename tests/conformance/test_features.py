"""What vLLM offers keeps working under our policies, on its real scheduler without a model, sync and async.

LoRA's limit on adapters, grammars that compile while a request waits, pausing, the bound on active requests, the
engines of a data-parallel server, targets relative to a prompt's own time. Every request must end with exactly its
tokens, and no KV block may leak.
"""

from __future__ import annotations

import functools
import json
import time
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

h = pytest.importorskip("headless", reason="vLLM is not installed here: make test-vllm runs these tests")

from scripted import Scripted, needs, plan  # noqa: E402
from vllm.config import LoRAConfig  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.sampling_params import StructuredOutputsParams  # noqa: E402
from vllm.v1.core.sched.interface import PauseState  # noqa: E402
from vllm.v1.request import RequestStatus  # noqa: E402
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar  # noqa: E402
from vllm.v1.structured_output.request import StructuredOutputRequest  # noqa: E402

from slacktide.core.policy import names  # noqa: E402
from slacktide.errors import InputError  # noqa: E402
from slacktide.vllm import Scheduler, SyncScheduler, compat  # noqa: E402

BOTH = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
POLICIES = [name for name in ("vllm-v1", "sarathi-edf", "sliding", "eb-plus", "tide") if name in names()]
ON_TIME = {"slo": "ttft:60000,tbt:60000", "max_decision_ms": 10_000}


def engine(directory: Any, *, is_async: bool, own: bool = True, **options: Any) -> Any:
    """A scheduler, ours or vLLM's, in its loop. `slacktide` among the options: our settings."""
    o = h.Options(is_async=is_async, **{"slacktide": {"policy": "vllm-v1"} | ON_TIME} | options)
    scheduler = h.build(directory, o, (Scheduler if is_async else SyncScheduler) if own else None)
    made = h.Engine(scheduler, is_async=is_async)
    made.options = o
    return made


def settle(made: Any, *, but: Any = ()) -> None:
    """Run to the end: exact tokens, no leak, no failure of ours."""
    made.run()
    made.check_outputs(but=but)
    made.check_blocks(made.options)
    own = getattr(made.scheduler, "slacktide", None)
    for reason in ("error", "mirror", "slow", "observe") if own else ():
        assert own.metrics.get("fallbacks", reason) == 0, reason


# ---- LoRA ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def max_loras(monkeypatch) -> int:
    """Engines that hold two adapters at a time."""
    config = LoRAConfig(max_loras=2, max_lora_rank=8)
    monkeypatch.setattr(h, "VllmConfig", functools.partial(h.VllmConfig, lora_config=config))
    return 2


def with_adapters(made: Any, seed: int, count: int = 24) -> None:
    """Requests of five adapters, and of none, drop in; in every step at most two adapters may be served."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        one = h.request(i, int(rng.integers(1, 120)), int(rng.integers(2, 30)), arrival=1000.0 + i)
        adapter = int(rng.integers(0, 6))
        if adapter:
            one.lora_request = LoRARequest(f"a{adapter}", adapter, "/nowhere")
        made.add(one)
        if rng.random() < 0.6:
            made.step()


def adapters_of_steps(made: Any, asked: dict[str, int]) -> list[set[int]]:
    return [{asked[i] for i in fact.tokens} - {0} for fact in made.facts]


def asked_adapters(seed: int, count: int = 24) -> dict[str, int]:
    """The adapters of `with_adapters`."""
    found: dict[str, int] = {}

    class Sink:
        def add(self, one):
            found[one.request_id] = one.lora_request.lora_int_id if one.lora_request else 0

        def step(self):
            pass

    with_adapters(Sink(), seed, count)
    return found


@BOTH
@pytest.mark.parametrize("seed", range(12))
def test_lora_under_vllm_v1_is_stock_step_by_step(directory, is_async, seed, max_loras):
    crowd = {"num_blocks": 60, "max_num_batched_tokens": 96} if seed % 2 else {}
    stock, ours = (engine(directory, is_async=is_async, own=own, **crowd) for own in (False, True))
    for made in (stock, ours):
        with_adapters(made, seed)
        settle(made)
    assert stock.facts == ours.facts
    widths = [len(step) for step in adapters_of_steps(ours, asked_adapters(seed))]
    assert max(widths) == max_loras


@BOTH
@pytest.mark.parametrize("policy", POLICIES)
def test_lora_under_other_policies_keeps_to_the_limit(directory, is_async, policy, max_loras):
    made = engine(directory, is_async=is_async, num_blocks=80, slacktide={"policy": policy} | ON_TIME)
    with_adapters(made, 100)
    settle(made)
    assert max(map(len, adapters_of_steps(made, asked_adapters(100)))) <= max_loras


@BOTH
def test_rows_left_out_do_not_let_more_adapters_in(directory, is_async, max_loras):
    """A policy that serves every other row: counting the served rows alone, vLLM would admit a third adapter."""

    def script(view, step):
        want = needs(view)
        return plan(view, {i: n for k, (i, n) in enumerate(want.items()) if (k + step) % 2 == 0} or want)

    made = engine(directory, is_async=is_async, max_num_batched_tokens=2048)
    made.scheduler.slacktide.policy = Scripted(script)
    for i in range(6):
        one = h.request(i, 20, 20, arrival=1000.0 + i)
        one.lora_request = LoRARequest(f"a{i}", 1 + i % 4, "/nowhere")
        made.add(one)
    for _ in range(300):
        made.step()
        running = {r.lora_request.lora_int_id for r in made.scheduler.running}
        assert len(running) <= max_loras
    settle(made)


# ---- structured output -----------------------------------------------------------------------------------------------


class Grammar(StructuredOutputGrammar):
    """Accepts everything."""

    num_processed_tokens = 0

    def accept_tokens(self, request_id, tokens):
        return True

    def validate_tokens(self, tokens):
        return tokens

    def rollback(self, num_tokens):
        pass

    def fill_bitmask(self, bitmask, batch_index):
        pass

    def is_terminated(self):
        return False

    def reset(self):
        pass


def grammatical(number: int, grammar: Any, **sizes: int) -> Any:
    """A request that waits for its grammar."""
    one = h.request(number, sizes.get("prompt", 30), sizes.get("output", 8), arrival=1000.0 + number)
    one.structured_output_request = StructuredOutputRequest(StructuredOutputsParams(regex="[0-9]+"), grammar)
    one.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    return one


@BOTH
@pytest.mark.parametrize("policy", POLICIES)
def test_a_request_whose_grammar_compiles_is_not_planned_and_delays_nobody(directory, is_async, policy):
    made = engine(directory, is_async=is_async, slacktide={"policy": policy} | ON_TIME)
    pending: Future[Any] = Future()
    made.add(grammatical(0, pending))
    for i in range(1, 4):
        made.add(h.request(i, 30, 8, arrival=1000.0 + i))
    for _ in range(40):
        made.step()
    assert made.out["r00000"] == []
    assert [len(made.out[f"r{i:05d}"]) for i in range(1, 4)] == [8, 8, 8]
    pending.set_result(Grammar())
    settle(made)


@BOTH
def test_a_grammar_that_fails_ends_its_request_alone(directory, is_async):
    made = engine(directory, is_async=is_async)
    pending: Future[Any] = Future()
    made.add(grammatical(0, pending))
    for i in range(1, 4):
        made.add(h.request(i, 30, 8, arrival=1000.0 + i))
    for _ in range(3):
        made.step()
    pending.set_exception(ValueError("no such grammar"))
    settle(made, but=["r00000"])
    assert str(made.ends["r00000"]) == "error"
    assert made.scheduler.slacktide.metrics.get("requests", "default", "failed") == 1


# ---- pausing ---------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("policy", POLICIES)
def test_pausing_everything_and_resuming(directory, is_async, policy):
    """vLLM's `keep` mode, and sleep level 0: nothing runs, nothing is lost, arrivals queue."""
    made = engine(directory, is_async=is_async, slacktide={"policy": policy} | ON_TIME)
    for i in range(4):
        made.add(h.request(i, 40, 30, arrival=1000.0 + i))
    for _ in range(6):
        made.step()
    made.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    while made.in_flight:
        made.step()
    before = {i: len(tokens) for i, tokens in made.out.items()}
    made.add(h.request(4, 40, 5, arrival=1004.0))
    for _ in range(5):
        assert made.scheduler.schedule().total_num_scheduled_tokens == 0
    assert {i: len(tokens) for i, tokens in made.out.items()} == before | {"r00004": 0}
    made.scheduler.set_pause_state(PauseState.UNPAUSED)
    settle(made)
    assert made.scheduler.slacktide.metrics.get("fallbacks", "paused") == 5


@BOTH
def test_pausing_new_requests_lets_the_running_ones_end(directory, is_async):
    """vLLM's `wait` mode."""
    made = engine(directory, is_async=is_async, max_num_batched_tokens=2048)
    for i in range(3):
        made.add(h.request(i, 40, 10, arrival=1000.0 + i))
    made.step()
    made.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    made.add(h.request(3, 40, 10, arrival=1003.0))
    made.run()
    assert [len(made.out[f"r{i:05d}"]) for i in range(4)] == [10, 10, 10, 0]
    made.scheduler.set_pause_state(PauseState.UNPAUSED)
    settle(made)


@BOTH
def test_pausing_with_abort_ends_everything(directory, is_async):
    made = engine(directory, is_async=is_async)
    for i in range(3):
        made.add(h.request(i, 40, 10, arrival=1000.0 + i))
    for _ in range(3):
        made.step()
    made.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    made.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    made.scheduler.set_pause_state(PauseState.UNPAUSED)
    made.add(h.request(3, 40, 10, arrival=1003.0))
    settle(made, but=[f"r{i:05d}" for i in range(3)])
    assert made.scheduler.slacktide.metrics.get("requests", "default", "aborted") == 3


@BOTH
def test_resetting_the_prefix_cache_preempts_and_all_goes_on(directory, is_async):
    """What sleep and weight updates do to running requests."""
    made = engine(directory, is_async=is_async, prefix_caching=True)
    for i in range(4):
        made.add(h.request(i, 60, 20, arrival=1000.0 + i, hashed=True))
    for _ in range(8):
        made.step()
    while made.in_flight:  # the engine core drains its pipeline before it resets
        made._take(*made.in_flight.popleft())
    assert made.scheduler.reset_prefix_cache(reset_running_requests=True)
    settle(made)


def test_the_short_look_into_the_prefix_cache_finds_what_the_long_one_does(directory):
    made = engine(directory, is_async=False, prefix_caching=True, num_blocks=24)
    assert compat.chained_prefixes(made.scheduler)
    shared, hits = [*range(3, 51)], set()
    for i in range(30):
        tokens = (shared[: 16 * (i % 4)] + [(97 * i + j) % 40_000 for j in range(40)])[: 15 + i]
        made.add(h.request(i, len(tokens), 6, arrival=1000.0 + i, tokens=tokens, hashed=True))
    while made.scheduler.has_requests() or made.in_flight:
        made.step()
        every = list(made.scheduler.requests.values())
        short, long = (compat.cache_hits(made.scheduler, every, chained=chained) for chained in (True, False))
        assert short == long
        hits.update(short[0])
    assert 0 in hits
    assert max(hits) >= 32  # some were found


# ---- bounds, engines, targets ----------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("policy", POLICIES)
def test_max_num_active_seqs_bounds_what_runs(directory, is_async, policy):
    if not hasattr(h.SchedulerConfig, "max_num_active_seqs"):
        pytest.skip("this release of vLLM has no max_num_active_seqs")
    made = engine(directory, is_async=is_async, max_num_active_seqs=3, slacktide={"policy": policy} | ON_TIME)
    for i in range(12):
        made.add(h.request(i, 30, 12, arrival=1000.0 + i))
    most = 0
    while made.scheduler.has_requests() or made.in_flight:
        made.step()
        most = max(most, len(made.scheduler.running))
    assert most == 3
    settle(made)


@pytest.mark.parametrize("size", [1, 2], ids=["dense", "moe"])
def test_the_engines_of_a_server_have_files_of_their_own(directory, tmp_path, monkeypatch, size):
    own = {
        "policy": "vllm-v1", "state_dir": str(tmp_path / "state"), "step_log": str(tmp_path / "steps.jsonl"),
        "capture": str(tmp_path / "trace.csv"),
    }  # fmt: skip
    engines, real = [], h.VllmConfig
    for rank in (0, 1):

        def config(*args, rank=rank, **kwargs):
            made = real(*args, **kwargs)
            made.parallel_config.data_parallel_size, made.parallel_config.data_parallel_index = size, rank
            return made

        monkeypatch.setattr(h, "VllmConfig", config)
        engines.append(engine(directory, is_async=False, slacktide=own))
    for rank, made in enumerate(engines):
        for i in range(3 + rank):
            made.add(h.request(i, 30, 5, arrival=1000.0 + i))
        settle(made)
    published = json.loads((tmp_path / "state" / "estimate-1.json").read_text())
    assert published["num_running"] == 0
    for made in engines:
        made.scheduler.slacktide.close()
    assert not (tmp_path / "state").exists()
    names = ("", "-1") if size == 1 else ("-0", "-1")
    for rank, name in enumerate(names):
        assert len((tmp_path / f"trace{name}.csv").read_text().splitlines()) == 4 + rank
        steps = [json.loads(line) for line in (tmp_path / f"steps{name}.jsonl").read_text().splitlines()]
        assert sum(step["num_tokens"] for step in steps) == (3 + rank) * (30 + 4)


@BOTH
def test_a_relative_target_is_that_of_the_prompt_s_length(directory, is_async):
    own = {"policy": "sarathi-edf", "slo": "ttft:5x,tbt:60000;gold=ttft:100", "prior": {"alpha_p": 10, "beta_p": 1}}
    made = engine(directory, is_async=is_async, slacktide=own | {"max_decision_ms": 10_000})
    host = made.scheduler.slacktide
    for i, (prompt, extra) in enumerate(
        [(20, None), (200, {"tenant": "me"}), (200, {"slo_class": "gold"}), (200, {"slo_ttft_ms": 70})]
    ):
        made.add(h.request(i, prompt, 4, arrival=1000.0 + i, extra=extra))
    found = host.mirror.table.live.slo_ttft.tolist()
    belief = host.ledger.belief
    assert found[:2] == pytest.approx([5 * belief.alone(20, 256), 5 * belief.alone(200, 256)])
    assert found[1] > 2 * found[0] > 0
    assert found[2:] == [0.1, 0.07]
    host._rebuild()
    assert host.mirror.table.live.slo_ttft.tolist() == found
    settle(made)


def test_a_relative_target_without_a_belief_is_refused_at_start(directory):
    with pytest.raises(InputError, match="name a profile"):
        engine(directory, is_async=False, slacktide={"policy": "vllm-v1", "slo": "dialogue"})


def test_shadow_mode_forecasts_attainment_from_the_engine_s_own_traffic(directory, tmp_path):
    """Through the simulator's command line, with the engine's own limits, flags and step times."""
    capture = tmp_path / "trace.csv"
    own = {"policy": "sarathi-edf", "slo": "ttft:60000,tbt:60000", "mode": "shadow", "shadow_replay_s": 3600,
           "state_dir": str(tmp_path / "state"), "capture": str(capture)}  # fmt: skip
    made = engine(
        directory, is_async=True, prefix_caching=True, threshold=40, watermark=0.05,
        slacktide=own | {"max_decision_ms": 10_000},
    )  # fmt: skip
    rng = np.random.default_rng(4)
    for i in range(60):
        impossible = {"slo_e2el_ms": 1} if i % 3 == 0 else None  # 40 steps
        prompt = int(rng.integers(1, 90))
        made.add(h.request(i, prompt, 40, arrival=time.time(), extra=impossible, hashed=True))
        made.step()
    settle(made)
    scheduler = made.scheduler
    assert scheduler._replays.once() == "done"
    shown = scheduler.slacktide.metrics
    assert shown.get("shadow_attainment", "measured") == pytest.approx(40 / 60)
    assert shown.get("shadow_attainment", "stock") == pytest.approx(40 / 60)
    assert shown.get("shadow_attainment", "ours") == pytest.approx(40 / 60)
    scheduler._replays.close()
    scheduler.slacktide.close()
    assert not (tmp_path / "state").exists()
    assert len(capture.read_text().splitlines()) == 61  # the capture gets every request, too


@BOTH
def test_priorities_and_aborts_under_every_policy(directory, is_async):
    for policy in POLICIES:
        made = engine(directory, is_async=is_async, policy="priority", slacktide={"policy": policy} | ON_TIME)
        rng = np.random.default_rng(3)
        gone = []
        for i in range(20):
            made.add(h.request(i, int(rng.integers(1, 90)), 15, arrival=1000.0 + i, priority=int(rng.integers(0, 3))))
            made.step()
            if i % 4 == 3:
                gone.append(f"r{i - 2:05d}")
                made.abort(gone[-1])
        settle(made, but=gone)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: setattr(s.scheduler_config, "enable_chunked_prefill", False), "in one piece .--no-enable-chunked"),
        (lambda s: setattr(s.scheduler_config, "disable_chunked_mm_input", True), "multimodal input in one piece"),
        (lambda s: setattr(s, "need_mamba_block_aligned_split", True), "aligned chunks"),
        (lambda s: setattr(s.vllm_config.model_config, "runner_type", "pooling"), "pooling"),
        (lambda s: setattr(s.vllm_config, "kv_transfer_config", object()), "a KV connector"),
    ],
)
def test_what_our_plans_would_break_is_refused_at_start(directory, change, message):
    scheduler = h.build(directory, h.Options(max_model_len=2048))
    runner = scheduler.vllm_config.model_config.runner_type
    compat.check_scheduler(scheduler)
    change(scheduler)
    try:
        with pytest.raises(InputError, match=f"slacktide does not schedule .*{message}.*without --scheduler-cls"):
            compat.check_scheduler(scheduler)
    finally:
        scheduler.vllm_config.model_config.runner_type = runner  # shared by all tests
