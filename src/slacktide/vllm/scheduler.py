"""Our scheduler classes: vLLM's own, with a policy of slacktide.core in front of each step.

`Scheduler` is for async scheduling (vLLM's default), `SyncScheduler` for engines without it; the one that does not
match refuses at start and names the other. Everything else is vLLM's: batches, KV blocks, outputs.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as StockScheduler
from vllm.v1.request import Request

from slacktide.vllm import compat
from slacktide.vllm.host import Host
from slacktide.vllm.settings import from_additional_config

ASYNC_NAME, SYNC_NAME = "slacktide.vllm.Scheduler", "slacktide.vllm.SyncScheduler"


class _Steered(StockScheduler):  # type: ignore[misc]
    """What both classes add to vLLM's scheduler."""

    is_async = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        compat.check_classes(StockScheduler, Request)
        super().__init__(*args, **kwargs)
        own, other = (ASYNC_NAME, SYNC_NAME) if self.is_async else (SYNC_NAME, ASYNC_NAME)
        compat.check_async(self.scheduler_config, self.is_async, own, other)
        compat.check_scheduler(self)
        self.slacktide = Host(self, from_additional_config(self.vllm_config.additional_config))

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
        self.slacktide.close()
        super().shutdown()


class SyncScheduler(_Steered):
    """For engines without async scheduling."""


class Scheduler(_Steered, AsyncScheduler):  # type: ignore[misc]
    """For engines with async scheduling, vLLM's default."""

    is_async = True
