"""The vLLM plug-in: `vllm serve MODEL --scheduler-cls slacktide.vllm.Scheduler`.

The scheduler classes are imported when they are asked for, so that the modules that need no vLLM work without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slacktide.vllm.scheduler import Scheduler, SyncScheduler

__all__ = ["Scheduler", "SyncScheduler"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from slacktide.vllm import scheduler

        return getattr(scheduler, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
