"""Our scheduler classes: vLLM's own, with a policy of slacktide.core in front of each step.

`Scheduler` is for async scheduling (vLLM's default), `SyncScheduler` for engines without it; the one that does not
match refuses at start and names the other. Everything else is vLLM's: batches, KV blocks, outputs.
"""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as StockScheduler
from vllm.v1.request import Request

from slacktide.vllm import compat
from slacktide.vllm.host import Host
from slacktide.vllm.replay import Replays, Window, task_of
from slacktide.vllm.settings import Settings, from_additional_config, policy_spec, state_dir

ASYNC_NAME, SYNC_NAME = "slacktide.vllm.Scheduler", "slacktide.vllm.SyncScheduler"


def _for_rank(settings: Settings, parallel: Any) -> Settings:
    """Files of its own for every engine of a data-parallel server.

    vLLM tells the engines of a dense model that they are alone (data_parallel_size 1) and leaves them their index; the
    ledger numbers the others.
    """
    rank = int(getattr(parallel, "data_parallel_index", 0) or 0)
    if not rank or int(parallel.data_parallel_size) > 1:
        return settings

    def named(text: str) -> str:
        path = Path(text)
        return str(path.with_name(f"{path.stem}-{rank}{path.suffix}")) if text else ""

    return dataclasses.replace(settings, step_log=named(settings.step_log), capture=named(settings.capture))


class _Steered(StockScheduler):  # type: ignore[misc]
    """What both classes add to vLLM's scheduler."""

    is_async = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        compat.check_classes(StockScheduler, Request)
        super().__init__(*args, **kwargs)
        own, other = (ASYNC_NAME, SYNC_NAME) if self.is_async else (SYNC_NAME, ASYNC_NAME)
        compat.check_async(self.scheduler_config, self.is_async, own, other)
        compat.check_scheduler(self)
        settings = from_additional_config(self.vllm_config.additional_config)
        settings = _for_rank(settings, self.vllm_config.parallel_config)
        self.slacktide = Host(self, settings)
        self._replays = self._shadow_replays(settings)

    def _shadow_replays(self, settings: Settings) -> Replays | None:
        """What shadow mode predicts; None when it is not asked to."""
        if not settings.shadow_replay_s or not (settings.mode == "shadow" or settings.control_file):
            return None
        host, ledger = self.slacktide, self.slacktide.ledger
        stock = policy_spec(Settings(policy="vllm-v1"), self.scheduler_config)
        window = Window(host.metrics)
        ledger.listeners.append(window)
        rank = int(getattr(self.vllm_config.parallel_config, "data_parallel_index", 0) or 0)
        directory = state_dir(settings, str(self.vllm_config.instance_id)) / f"engine-{rank}"

        def oldest_live() -> float:
            return min(
                (float(r.arrival_time) - host.mirror.epoch for r in list(self.requests.values())), default=math.inf
            )

        return Replays(
            host.metrics, window, task_of(self, (stock.label, host.spec.label)), directory,
            every=settings.shadow_replay_s, shadow=lambda: host.mode == "shadow", oldest_live=oldest_live,
            now=lambda: time.time() - host.mirror.epoch, steps=lambda: list(ledger.belief.steps),
        )  # fmt: skip

    def add_request(self, request: Any) -> None:
        """A request, or more input for one."""
        known = request.request_id in self.requests
        if not known and self.slacktide.mirror.targets.factors:
            self._write_target(request)
        super().add_request(request)
        if not known and request.request_id in self.requests:
            self.slacktide.add(request)

    def _write_target(self, request: Any) -> None:
        """Turn a relative TTFT into the request's own, once: a mirror that is built anew finds the same."""
        targets, belief = self.slacktide.mirror.targets, self.slacktide.ledger.belief
        parameters, budget = request.sampling_params, int(self.max_num_scheduled_tokens)
        try:
            parameters.extra_args = targets.with_ttft(
                parameters.extra_args, lambda: belief.alone(request.num_prompt_tokens, budget)
            )
        except Exception:
            targets.invalid += 1  # no target is better than no request

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """One step: our plan, carried out by vLLM."""
        host = self.slacktide
        if self.lora_config:
            slots = host.mirror.slot_of
            host.mirror.blocked.update(slots[i] for i in compat.hold_for_adapters(self) if i in slots)
        steering = host.before()
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            if steering is not None:
                steering.end()
        host.after(output)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """The end of a step."""
        end = self.slacktide.now()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.slacktide.done(scheduler_output, outputs, end)
        return outputs

    def shutdown(self) -> None:
        """The end of the engine."""
        if self._replays is not None:
            self._replays.close()
        self.slacktide.close()
        super().shutdown()


class SyncScheduler(_Steered):
    """For engines without async scheduling."""


class Scheduler(_Steered, AsyncScheduler):  # type: ignore[misc]
    """For engines with async scheduling, vLLM's default."""

    is_async = True
