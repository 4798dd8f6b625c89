"""Numbers that compiled helpers and their readable twins share; loads nothing."""

from __future__ import annotations

IDLE, DECODE, PREFILL = 0, 1, 2
"""Kinds of rows: nothing to do in this step (its end is in flight), one token, a prompt (or what a preemption lost)."""
