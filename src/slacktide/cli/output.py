"""What verbs print: one JSON document, or tables; progress on standard error.

rich is imported when a table is drawn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slacktide.errors import InputError

if TYPE_CHECKING:
    import argparse

PIPE_WIDTH = 400
"""Columns of a table that goes into a file or pipe: rich would cut it at 80, and a cut number is a wrong number."""


def plain(value: Any) -> Any:
    """`value` in JSON's types: arrays become lists, NaN null, infinity "inf" (as `vllm bench` writes it)."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # numpy scalars and arrays, without importing numpy
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value


def to_json(value: Any) -> str:
    """One JSON document, strict (no NaN), keys in their order, with a line end."""
    return json.dumps(plain(value), indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def save_json(path: Path, value: Any) -> None:
    """Write one JSON document, whole or not at all. Raises InputError naming the path."""
    from slacktide.report.files import write_files

    text = to_json(value)
    write_files(path.parent, {path.name: lambda partial: partial.write_text(text, encoding="utf-8")})


def print_json(value: Any) -> None:
    """Print one JSON document, with escapes where standard output cannot hold a character as it is."""
    text = to_json(value)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        text = json.dumps(plain(value), indent=2, allow_nan=False) + "\n"
    sys.stdout.write(text)


def out_dir(args: argparse.Namespace) -> Path | None:
    """The directory of `--out`, made if it is not there, or None. Raises InputError when it cannot be one."""
    path: Path | None = args.out
    if path is None:
        return None
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise InputError(f"--out {path}: expected a directory, found a file; name another one") from error
    except OSError as error:
        raise InputError(f"--out {path}: cannot make this directory ({error.strerror})") from error
    return path


def emit(args: argparse.Namespace, name: str, value: Any, show: Callable[[], None]) -> None:
    """Write `value` to DIR/name.json (with `--out`), then print it as JSON (with `--json`) or call `show`."""
    directory = out_dir(args)
    if directory is not None:
        save_json(directory / f"{name}.json", value)
    if args.json:
        print_json(value)
    else:
        show()


def table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str = "",
    right: Sequence[int] = (),
    whole: Sequence[int] = (),
) -> None:
    """Print a table on standard output; `right` are the columns of numbers, `whole` those never broken, to copy."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    lines_fit = "utf" in (getattr(sys.stdout, "encoding", None) or "utf-8").lower()
    style = box.SIMPLE_HEAD if lines_fit else box.ASCII
    drawn = Table(title=title or None, title_justify="left", box=style, pad_edge=False)
    for i, column in enumerate(columns):
        drawn.add_column(column, justify="right" if i in right else "left", overflow="fold", no_wrap=i in whole)
    for row in rows:
        drawn.add_row(*(Text(cell) for cell in row))  # Text: a bracket in a cell is no markup
    if sys.stdout.isatty():
        Console(file=sys.stdout).print(drawn)
        return
    console = Console(file=io.StringIO(), width=PIPE_WIDTH)
    with console.capture() as captured:
        console.print(drawn)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    print("\n".join(lines).strip("\n"))


@contextlib.contextmanager
def progress(args: argparse.Namespace, total: int, label: str) -> Iterator[Callable[[int], None]]:
    """A progress bar on standard error, when that is a terminal and `--quiet` is not given.

    Yields a function that takes how many more of `total` are done.
    """
    if args.quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(file=sys.stderr),
        transient=True,
    )
    with bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.advance(task, done)
