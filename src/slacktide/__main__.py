"""`python -m slacktide` is the command `slacktide`."""

from __future__ import annotations

from slacktide.cli.main import entry

if __name__ == "__main__":
    entry()
