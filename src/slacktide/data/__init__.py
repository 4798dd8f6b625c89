"""Packaged data: measured kernel tables, GPU and model dimensions, traces. Provenance is in README.md beside them."""

from __future__ import annotations
