"""The entry point `vllm.stat_logger_plugins`: shows our metrics in the front end's `/metrics`.

vLLM loads it in every front end where slacktide is installed. It does nothing unless the engine runs our scheduler.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from slacktide.vllm.metrics import Collector, Gauges
from slacktide.vllm.settings import from_additional_config, state_dir

COPY_EVERY = 1.0
"""Seconds between two copies into the multiprocess directory; scrapes are rarely closer."""

_log = logging.getLogger("vllm.slacktide")


def is_ours(scheduler_cls: Any) -> bool:
    """Whether a scheduler_cls (text or class) is one of ours."""
    name = scheduler_cls if isinstance(scheduler_cls, str) else getattr(scheduler_cls, "__module__", "")
    return str(name).startswith("slacktide.vllm")


class StatLogger(AggregateStatLoggerBase):  # type: ignore[misc]
    """See the top of this file. Never raises: metrics must not keep a server from starting."""

    def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
        self.engine_indexes = engine_indexes or [0]
        self._gauges: Gauges | None = None
        self._next = 0.0
        try:
            if not is_ours(vllm_config.scheduler_config.scheduler_cls):
                return
            settings = from_additional_config(vllm_config.additional_config)
            directory = state_dir(settings, vllm_config.instance_id)
            if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
                self._gauges = Gauges(directory)
            else:
                from prometheus_client import REGISTRY

                REGISTRY.register(Collector(directory))
        except Exception:
            _log.exception("slacktide: no metrics of ours in /metrics")

    def record(self, *_args: Any, **_kwargs: Any) -> None:
        """Called with every batch of outputs: now and then copies the engine's snapshot where a copy is needed."""
        if self._gauges is None or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + COPY_EVERY
        try:
            self._gauges.update()
        except Exception:
            self._gauges = None
            _log.exception("slacktide: no more metrics of ours in /metrics")

    def log_engine_initialized(self) -> None:
        """Nothing to log."""
