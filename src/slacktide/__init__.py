"""Slacktide schedules LLM inference: which requests get how many tokens in every engine step.

The names below are the whole Python API (`slacktide.api` explains each). They are imported when they are used, so
that `import slacktide` costs nothing.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022 - sorted as text, as everywhere here
    "Advice", "Comparison", "Goodput", "InputError", "Plan", "Profile", "Run", "SLO", "Scenario", "StepResult",
    "StepView", "Sweep", "Trace", "__version__", "advise", "bound", "cite", "compare", "goodput", "load_profile",
    "policies", "profiles", "read_trace", "register", "results", "simulate", "slo_presets", "sweep", "traces",
]  # fmt: skip

_HOME = dict.fromkeys(__all__, "slacktide.api")
_HOME |= dict.fromkeys(("SLO", "Plan", "StepResult", "StepView"), "slacktide.core.types")
_HOME |= {"InputError": "slacktide.errors", "register": "slacktide.core.policy"}


def __getattr__(name: str) -> Any:
    """Import a name of the API on first use."""
    if name not in _HOME or name.startswith("_"):
        raise AttributeError(f"module 'slacktide' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
