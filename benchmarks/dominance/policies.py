"""The rivals and their parameter grids; the challenger."""

from __future__ import annotations

import hashlib
from pathlib import Path

import slacktide

FAMILIES: dict[str, tuple[str, ...]] = {
    "vllm-v1": ("vllm-v1", *(f"vllm-v1:max_num_batched_tokens={n}" for n in (2048, 1024, 512, 256, 128, 384))),
    "sarathi-edf": tuple(f"sarathi-edf:chunk_size={n}" for n in (512, 256, 128, 1024, 2048, 384, 192)),
    "greedy-dynamic": (
        "greedy-dynamic:guard=0.35", "greedy-dynamic", *(f"greedy-dynamic:max_chunk={n}" for n in (512, 256, 128)),
        "greedy-dynamic:max_chunk=2048,margin=1.2", "greedy-dynamic:guard=0.2", "greedy-dynamic:max_chunk=1024",
    ),
    "qoserve": (
        "qoserve:guard=0.35", *(f"qoserve:max_chunk={n}" for n in (1024, 512, 256, 128)),
        "qoserve:max_chunk=2048,alpha=0.001,margin=1.2", "qoserve:guard=0.2", "qoserve:max_chunk=512,alpha=0.003",
        "qoserve:max_chunk=128,margin=1.25",
    ),
    "sliding": (
        "sliding", *(f"sliding:max_chunk={n}" for n in (1024, 512, 256, 128)), "sliding:margin=1.2",
        "sliding:guard=0.2", "sliding:guard=0.3", *(f"sliding:guard=0,max_chunk={n}" for n in (1024, 512, 256, 128)),
    ),
    "eb-plus": ("eb-plus", "eb-adaptive"),
    "sola": ("sola:guard=0.35", *(f"sola:max_chunk={n}" for n in (512, 256))),
}  # fmt: skip
"""Family -> its grid; the first is where tuning starts. Token budgets cap QoServe and Sliding too (`max_chunk`). What
won in benchmarks/slidingserve is in it. It may only grow at the end: rows of a shorter one are gone on with."""
TIDE = "tide"
BIASED = ("greedy-dynamic", "qoserve", "sliding")
"""Families that read the belief at every step: those that an error of it can hurt."""
THROUGHPUT = ("vllm-v1", "eb-plus")
"""The better of these two is what `tide` is measured by where there is no SLO: mixed and exclusive batching."""


def variants(family: str, mode: str = "deadline") -> tuple[str, ...]:
    """The texts of a family, as on the command line. `tide` is told how later tokens are judged; it has no grid."""
    if family == TIDE:
        return (TIDE if mode == "deadline" else f"{TIDE}:slo_mode={mode}",)
    return FAMILIES[family]


def version(family: str) -> str:
    """Digest of the challenger's source, or of the bound's: what was changed is measured again. "" for a rival."""
    package = Path(slacktide.__file__).parent
    core, search = package / "core", package / "search"
    if family == TIDE:
        files = sorted([*core.glob("tide*.py"), *core.glob("kernels_tide*.py"), core / "policies" / "tide.py"])
    elif family == "bound":
        files = [search / name for name in ("bounds.py", "demand.py", "step_prices.py")]
    else:
        return ""
    digest = hashlib.sha256()
    for path in files:
        if path.exists():
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:10]
