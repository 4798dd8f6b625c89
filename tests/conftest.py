"""Settings of every test: no deadlines, a failing example that can be replayed, Ctrl-C that works."""

from __future__ import annotations

import signal

from hypothesis import settings

settings.register_profile("slacktide", deadline=None, print_blob=True)
settings.load_profile("slacktide")

# Tests run in the background of a shell have SIGINT ignored, and the programs that they interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
