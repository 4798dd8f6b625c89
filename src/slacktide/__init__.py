"""Slacktide schedules LLM inference: which requests get how many tokens in every engine step."""

__version__ = "0.1.0"
