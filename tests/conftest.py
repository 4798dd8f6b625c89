"""Settings of every test: no deadlines on a shared machine, and a failing example that can be replayed."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("slacktide", deadline=None, print_blob=True)
settings.load_profile("slacktide")
