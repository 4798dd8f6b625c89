"""The arms as tune.py left them, and the rungs of the ablation made of them."""

from __future__ import annotations

import json

from common import LLAMA, QWEN, RESULTS

H100, PRO, A100, BIG = "h100/llama-3-8b", "rtx-pro-6000/llama-3-8b", "a100/llama-3-8b", "4x-h100/llama-3-70b"
OTHERS = (H100, PRO, A100, BIG)
"""GPUs beside the paper's, each tuned on its own."""
OVERLOAD = {QWEN: 4.0, H100: 25.0, PRO: 10.0}
"""GPUs of the ablation -> requests/s of mixed-v1, beyond the goodput of every arm there."""
KINDS = {"sharegpt": "sharegpt", "arxiv-v1": "arxiv-v1", "arxiv-v2": "arxiv-v1", "mixed-v1": "mixed-v1",
         "mixed-v2": "mixed-v1"}  # fmt: skip
"""Data set -> the one whose tuning it uses: an operator knows what kind of traffic a server gets, not its lengths."""
ARMS = ("sarathi-edf", "greedy-dynamic", "qoserve", "sola", "paper", "paper, clamped", "sliding, no guard",
        "greedy-dynamic + guard", "qoserve + guard", "sliding")  # fmt: skip
SHARED = ("guard", "margin", "max_chunk", "late_factor")
"""Parameters that sliding and greedy-dynamic have in common."""
WINDOWED = ("sliding, no guard", "sliding")
"""Arms whose chunker is a window."""
Tuned = dict[str, dict[str, str]]
"""Data set, or `all`, -> arm -> policy."""


def tuned_for(profile: str) -> Tuned:
    """What tune.py chose there (Qwen's are Llama's: it took no part); empty before it ran."""
    path = RESULTS / "tuned.json"
    found: dict[str, Tuned] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found.get(LLAMA if profile == QWEN else profile, {})


def setting(arm: str, data: str, profile: str) -> str:
    """The arm's policy for that kind of data on that GPU; "" where it was not tuned."""
    return tuned_for(profile).get(KINDS[data], {}).get(arm, "")


def greedy_chunks(arm: str, profile: str) -> str:
    """That arm for long prompts, greedy in place of its window."""
    return f"{setting(arm, 'arxiv-v1', profile)},chunker=greedy"


def rungs(profile: str) -> dict[str, str]:
    """Rung -> policy, for mixed-v1.

    All rungs of a half have the settings of its complete policy: they differ in what is named alone.
    """
    names = ("sarathi-edf", "sliding, no guard", "sliding", "paper", "paper, clamped")
    edf, bare, guarded, paper, clamped = (setting(arm, "mixed-v1", profile) for arm in names)
    if not bare or not guarded:
        return {}
    found = {"sarathi-edf": edf}
    for half, whole in (("no guard", bare), ("guard", guarded)):
        settings = [s for s in whole.partition(":")[2].split(",") if s.split("=")[0] in SHARED]
        found |= {
            f"{half}: greedy-dynamic": f"greedy-dynamic:{','.join(settings)}",
            f"{half}: + window": f"{whole},order=edf,constructor=off",
            f"{half}: + MLPS": f"{whole},constructor=off",
            f"{half}: + constructor = sliding": whole,
            f"{half}: sliding without window": f"{whole},chunker=greedy",
        }
    found |= {
        "guard: sliding, dual window": f"{guarded},chunker=dual",
        "guard: sliding, relegation": f"{guarded},relegation=true",
        "paper": paper,
        "paper, clamped": clamped,
    }
    return {rung: policy for rung, policy in found.items() if policy}  # an arm may not be tuned yet
