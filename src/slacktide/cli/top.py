"""Watch a running server in the terminal: queue, attainment, slack, steps, step times against predictions, KV.

URL is any vLLM server's address (default: http://127.0.0.1:8000); with our plug-in in it there is more to see. Figures
of latency and rates are of the last 30 s; classes and faults count from the server's start. Ctrl-C ends it. Where
standard output is no terminal, or with --once, one plain screen is printed, after two readings. NO_COLOR is honoured.

example:
  slacktide top http://127.0.0.1:8000 --interval 1
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from typing import TYPE_CHECKING

from slacktide.cli import options
from slacktide.cli.output import emit
from slacktide.errors import InputError

if TYPE_CHECKING:
    from slacktide.live.figures import History, View

URL = "http://127.0.0.1:8000"
INTERVAL = 2.0
"""Seconds between readings: the engine writes its figures twice a second."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("url", nargs="?", default=URL, metavar="URL", help=f"the server (default: {URL})")
    parser.add_argument("--once", action="store_true", help="print one plain screen and end")
    parser.add_argument(
        "--interval", type=options.seconds, default=INTERVAL, metavar="S", help=f"seconds (default: {INTERVAL:g})"
    )


def run(args: argparse.Namespace) -> int:
    """Watch. Raises InputError when there is no such server at the start."""
    from slacktide.live.figures import History
    from slacktide.live.scrape import fetch, metrics_url

    url, history = metrics_url(args.url), History()
    first = history.add(fetch(url, time.monotonic()))
    shown = url.removesuffix("/metrics")
    try:
        if not (args.once or args.json or args.out or not sys.stdout.isatty()):
            return _watch(url, shown, history, args.interval)
        time.sleep(args.interval)
        try:
            view = history.add(fetch(url, time.monotonic()))
        except InputError:  # it died in between: what it said last is still worth showing
            view = first
    except KeyboardInterrupt:
        return 0
    emit(args, "top", {"url": shown, **dataclasses.asdict(view)}, lambda: print(_plain(view, shown)))
    return 0


def _plain(view: View, url: str) -> str:
    from slacktide.live.screen import draw

    lines = draw(view, url=url, clock=_clock(), width=80, height=24, blocks=_blocks())
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)


def _watch(url: str, shown: str, history: History, interval: float) -> int:
    """Draw until Ctrl-C. A server that does not answer is told, and asked again."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from slacktide.live.scrape import fetch
    from slacktide.live.screen import BAD, Line, draw

    console = Console()
    lost = ""
    view: View | None = None
    with Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            began = time.monotonic()
            try:
                view, lost = history.add(fetch(url, began)), ""
            except InputError as error:
                lost = lost or f"no answer since {_clock()}, asking again: {error}"
            width, height = console.size
            notice: list[Line] = [[(lost[:width], BAD)]] if lost else []
            body = [] if view is None else draw(
                view, url=shown, clock=_clock(), width=width, height=height - len(notice) - 1, blocks=_blocks()
            )  # fmt: skip
            page = Text("\n").join(Text.assemble(*line) for line in [*notice, *body])
            live.update(page, refresh=True)
            time.sleep(max(0.0, interval - (time.monotonic() - began)))


def _clock() -> str:
    return time.strftime("%H:%M:%S")


def _blocks() -> bool:
    """Whether the terminal can show block characters."""
    return "utf" in (getattr(sys.stdout, "encoding", None) or "").lower() and os.environ.get("TERM") != "linux"
