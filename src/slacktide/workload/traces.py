"""Trace files: detection of the format by content, reading, writing, and the packaged traces."""

from __future__ import annotations

import gzip
import zlib
from dataclasses import replace
from pathlib import Path

from slacktide.errors import InputError, unknown_name
from slacktide.workload.formats.base import ReadOptions, Trace
from slacktide.workload.formats.writers import write_trace
from slacktide.workload.packaged import PACKAGED, find_packaged, list_traces

__all__ = ["ReadOptions", "Trace", "list_traces", "read_trace", "write_trace"]


def read_trace(name: str | Path, options: ReadOptions | None = None) -> Trace:
    """The requests of a packaged trace or a file, in order of arrival where there are times.

    Raises InputError, naming near packaged names when `name` is neither.
    """
    packaged = find_packaged(str(name))
    if packaged is None:
        from slacktide.workload.formats.detect import parse_trace

        return parse_trace(str(name), read_bytes(name), options or ReadOptions())
    from slacktide.workload.formats.columns import parquet_columns
    from slacktide.workload.formats.own import read_own

    trace = read_own(parquet_columns(packaged.name, packaged.read_bytes()), ReadOptions())
    return replace(trace, source=packaged.source, shuffle=not packaged.timed)


def read_bytes(path: str | Path) -> bytes:
    """A file's bytes, unpacked when it is gzip. Raises InputError, with near names when there is no such file."""
    file = Path(path)
    if not str(path).strip():
        raise InputError("no trace named: expected a packaged name ('slacktide traces') or a file")
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        raise unknown_name("trace", str(path), [t.name for t in PACKAGED], "(and there is no such file)") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"{path}: broken gzip file ({error}); fetch it again") from None
    if not data.removeprefix(b"\xef\xbb\xbf").strip():
        raise InputError(f"{path}: the file is empty")
    return data
