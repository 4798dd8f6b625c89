"""The entry point `vllm.stat_logger_plugins`: shows our metrics in the front end's `/metrics`.

vLLM loads it in every front end where slacktide is installed. It does nothing unless the engine runs our scheduler.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from multiprocessing import util
from pathlib import Path
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
        try:
            if not is_ours(vllm_config.scheduler_config.scheduler_cls):
                return
            settings = from_additional_config(vllm_config.additional_config)
            directory = state_dir(settings, vllm_config.instance_id)
            if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
                copy = threading.Thread(target=_copy, args=(Gauges(directory),), name="slacktide-metrics", daemon=True)
                copy.start()
            else:
                from prometheus_client import REGISTRY

                REGISTRY.register(Collector(directory))
                # Engines remove their files; this is for one that was killed. Runs at the end of a main process and of
                # one of multiprocessing's alike. Several API servers leave it to the first process.
                util.Finalize(None, remove_state, args=(directory, bool(settings.state_dir)), exitpriority=0)
        except Exception:
            _log.exception("slacktide: no metrics of ours in /metrics")

    def record(self, *_args: Any, **_kwargs: Any) -> None:
        """Nothing: our metrics do not come with vLLM's."""

    def log_engine_initialized(self) -> None:
        """Nothing to log."""


def remove_state(directory: Path, named: bool) -> None:
    """Remove what engines left for the front end; a directory that the user named stays, unless it is empty."""
    if not named:
        shutil.rmtree(directory, ignore_errors=True)
        return
    for pattern in ("metrics-*.json", "estimate-*.json", ".metrics-*", ".estimate-*"):
        for path in directory.glob(pattern):
            path.unlink(missing_ok=True)
    for path in directory.glob("engine-*"):  # replays
        shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        directory.rmdir()


def _copy(gauges: Gauges) -> None:
    """Copy the engines' snapshots into the multiprocess directory, again and again."""
    while True:
        try:
            gauges.update()
        except Exception:
            _log.exception("slacktide: no more metrics of ours in /metrics")
            return
        time.sleep(COPY_EVERY)
