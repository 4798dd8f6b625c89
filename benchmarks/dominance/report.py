"""Writes README.md's tables from results/*.jsonl."""

from pathlib import Path


def render(here: Path) -> None:
    """Nothing yet."""
