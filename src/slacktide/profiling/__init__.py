"""GPU profiles, and measuring, fitting and validating them."""

from __future__ import annotations
