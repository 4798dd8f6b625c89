"""The policy of `slacktide profile` on vLLM's real scheduler, sync and async: only designed steps count."""

from __future__ import annotations

from pathlib import Path

import pytest

from slacktide.profiling.engine_vllm import Forced, Role
from slacktide.profiling.experiments import parse_key

from .headless import Engine, Options, build, request

KEYS = ["d3x33", "p40@0", "p40@0;d2x17", "p16@0+p16@0;d4x40", "p300@0", "p64@32;d1x17", "d1x5+d2x100"]


@pytest.mark.parametrize("is_async", [False, True])
def test_every_point_is_one_step_exactly(tmp_path: Path, is_async: bool) -> None:
    from slacktide.vllm import Scheduler, SyncScheduler

    options = Options(max_num_batched_tokens=320, is_async=is_async, prefix_caching=True)
    scheduler = build(tmp_path, options, Scheduler if is_async else SyncScheduler)
    engine, policy, number = Engine(scheduler, is_async=is_async), Forced(), 0
    scheduler.slacktide.policy = policy
    for key in KEYS * 2:  # the second time contexts come from the prefix cache
        point, ids = parse_key(key), []
        for context in point.decodes:
            policy.expect(Role(True, 0))
            ids.append((number, context, 64, [number % 1000 + 7] * context))
            number += 1
        for chunk, cached in point.chunks:
            policy.expect(Role(False, cached, chunk))
            ids.append((number, cached + chunk, 1, [*range(11, 11 + cached), *[number % 1000 + 7] * chunk]))
            number += 1
        for n, prompt, output, tokens in ids:
            engine.add(request(n, prompt, output, arrival=0.0, tokens=tokens, hashed=True))
        before = len(policy.results)
        policy.armed = True
        for _ in range(50):
            engine.step()
            if len(policy.results) > before:
                break
        assert len(policy.results) == before + 1, key
        shape = policy.results[-1][0]
        wanted = point.shape
        assert shape[:4].tolist() == wanted[:4].tolist(), key
        assert shape[4] == wanted[4], key  # cached prompt tokens
        assert shape[8] == wanted[8], key
        assert wanted[9] <= shape[9] <= wanted[9] + 2 * wanted[8], key
        for n, *_ in ids:
            engine.abort(f"r{n:05d}")
        for _ in range(6):
            engine.step()
        policy.roles.clear()
    assert not scheduler.slacktide.metrics.get("fallbacks", "error")
