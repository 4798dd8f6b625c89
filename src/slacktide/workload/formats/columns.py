"""Columns of a CSV or Parquet file, converted with row-exact error messages. pyarrow is imported on first use."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from slacktide.core.types import FloatArray, IntArray
from slacktide.errors import InputError
from slacktide.workload.formats.base import Labels, shown
from slacktide.workload.specs import suggest

NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"
"""A plain decimal number. Neither 'nan' nor 'inf' nor '1,000'."""


class Columns:
    """The columns of one file by name. `table` is a pyarrow table: text from CSV, typed from Parquet."""

    def __init__(self, path: str, table: Any, text: str | None, first_line: int, delimiter: str = ",") -> None:
        self.path = path
        self.table = table
        self.metadata: dict[bytes, bytes] = dict(table.schema.metadata or {})
        self.used: set[str] = set()
        self._text = text
        self._first_line = first_line
        self._delimiter = delimiter

    @property
    def names(self) -> list[str]:
        """Column names in the file's order."""
        return list(self.table.column_names)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def rename(self, names: list[str]) -> None:
        """Give the columns other names, in the file's order. Raises InputError when two become the same."""
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            same = " and ".join(shown(old) for old, new in zip(self.names, names, strict=True) if new == repeated)
            raise InputError(f"{self.path}: columns {same} mean the same; keep one")
        self.table = self.table.rename_columns(names)

    def locate(self, row: int) -> str:
        """`file: line 7` for row number 5 of a CSV with a header; `file: row 6` in Parquet."""
        if self._text is not None:
            reader = csv.reader(io.StringIO(self._text, newline=""), delimiter=self._delimiter)
            try:
                filled = (reader.line_num for cells in reader if cells)
                for number, line in enumerate(filled):
                    if number == row:
                        return f"{self.path}: line {line + self._first_line - 1}"
            except csv.Error:
                pass
        return f"{self.path}: row {row + 1}"

    def require(self, names: Sequence[str]) -> None:
        """Raise InputError for the first missing column, with the nearest name that is no other needed column."""
        for name in names:
            if name not in self.names:
                near = suggest(name, [other for other in self.names if other not in names])
                where = self.path if self._text is None else f"{self.path}: line {self._first_line - 1}"
                raise InputError(
                    f'{where}: column "{name}" not found{near};'
                    f" the file has {', '.join(self.names)[:200]}; {'rename' if near else 'add'} the column"
                )

    def unused_note(self) -> tuple[str, ...]:
        """One note that names the columns which no one asked for."""
        extra = [name or "(without a name)" for name in self.names if name not in self.used]
        return (f"{self.path}: not used: column {', '.join(extra)}",) if extra else ()

    def numbers(self, name: str, empty_ok: bool = False) -> FloatArray:
        """f8 values; empty cells become NaN where `empty_ok`, and are an error elsewhere."""
        import pyarrow as pa
        import pyarrow.compute as pc

        self.used.add(name)
        column = self.table.column(name)
        kind = column.type
        if pa.types.is_dictionary(kind):
            column, kind = column.cast(kind.value_type), kind.value_type
        if pa.types.is_null(kind):
            column = pa.nulls(len(column), pa.float64())
        elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
            column = self._parse_text(name, column, empty_ok)
        elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)):
            raise InputError(f"{self.path}: column {name} holds {kind}, expected numbers")
        if column.null_count and not empty_ok:
            row = int(np.argmin(column.is_valid().to_numpy()))
            raise InputError(f"{self.locate(row)}: {name} is empty, expected a number")
        values = column.cast(pa.float64(), safe=False).to_numpy()
        isnan = np.isnan(values)
        if isnan.any() and (not empty_ok or bool(pc.any(pc.is_nan(column.cast(pa.float64(), safe=False))).as_py())):
            raise InputError(f"{self.locate(int(np.argmax(isnan)))}: {name} is NaN, expected a number")
        return np.array(values, dtype=np.float64)

    def _parse_text(self, name: str, column: Any, empty_ok: bool) -> Any:
        """Text -> float64 with nulls for empty cells; InputError names the first cell that is no number."""
        import pyarrow as pa
        import pyarrow.compute as pc

        trimmed = pc.utf8_trim_whitespace(column)
        empty = pc.equal(trimmed, "")
        good = pc.match_substring_regex(trimmed, NUMBER)
        if empty_ok:
            good = pc.or_(good, empty)
        if not pc.all(good, min_count=0).as_py():
            row = int(np.argmin(pc.fill_null(good, False).to_numpy()))
            found = trimmed[row].as_py()
            what = shown(found) if found else "empty"
            raise InputError(f"{self.locate(row)}: {name} is {what}, expected a number")
        filled = pc.if_else(empty, pa.scalar(None, pa.string()), trimmed)
        try:
            return filled.cast(pa.float64())
        except pa.ArrowInvalid:  # too large for pyarrow, or a leading '+': Python reads both
            return pa.chunked_array(
                [pa.array([None if v is None else float(v) for v in filled.to_pylist()], pa.float64())]
            )

    def labels(self, name: str) -> Labels:
        """Codes and texts of a text (or whole-number) column; empty cells get code -1."""
        import pyarrow as pa
        import pyarrow.compute as pc

        self.used.add(name)
        column = self.table.column(name)
        try:
            column = column.cast(pa.string())
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            raise InputError(f"{self.path}: column {name} holds {column.type}, expected text") from None
        encoded = pc.utf8_trim_whitespace(pc.fill_null(column, "")).combine_chunks()
        if isinstance(encoded, pa.ChunkedArray):
            encoded = encoded.chunk(0) if encoded.num_chunks else pa.array([], pa.string())
        encoded = encoded.dictionary_encode()
        texts = encoded.dictionary.to_pylist()
        kept = [text for text in texts if text]
        code_of = np.arange(len(texts), dtype=np.int64)
        if "" in texts:  # the empty text has no code; those after it move up
            empty = texts.index("")
            code_of[empty:] -= 1
            code_of[empty] = -1
        codes = encoded.indices.to_numpy()
        return (code_of[codes] if len(codes) else np.empty(0, dtype=np.int64)), tuple(kept)

    def id_lists(self, name: str) -> tuple[IntArray, IntArray]:
        """(values, offsets) of a column of whole-number lists; in CSV written `1 2 3` or `[1, 2, 3]`."""
        import pyarrow as pa
        import pyarrow.compute as pc

        self.used.add(name)
        column = self.table.column(name)
        if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            counts = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
            flat = pc.list_flatten(column)
            if pa.types.is_integer(flat.type) and not flat.null_count:
                offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
                return flat.cast(pa.int64(), safe=False).to_numpy().astype(np.int64), offsets
        if not pa.types.is_string(column.type):
            raise InputError(f"{self.path}: column {name} holds {column.type}, expected lists of whole numbers")
        return self._parse_id_lists(name, column.to_pylist())

    def _parse_id_lists(self, name: str, cells: list[str]) -> tuple[IntArray, IntArray]:
        values: list[int] = []
        offsets = [0]
        for row, cell in enumerate(cells):
            try:
                ids = [int(part) for part in re.findall(r"[^\s,;]+", cell.strip().removeprefix("[").removesuffix("]"))]
                values.extend(np.array(ids, dtype=np.int64).tolist())  # raises OverflowError beyond 64 bits
            except (ValueError, OverflowError):
                raise InputError(
                    f"{self.locate(row)}: {name} is {shown(cell)}, expected whole numbers such as 1 2 3"
                ) from None
            offsets.append(len(values))
        return np.array(values, dtype=np.int64), np.array(offsets, dtype=np.int64)


def csv_columns(path: str, text: str) -> Columns:
    """The columns of a CSV with a header line (perhaps no rows). Raises InputError for broken rows, naming the line."""
    import pyarrow as pa
    import pyarrow.csv as pacsv

    header, body, first_line = split_header(text)
    delimiter = max(",;\t", key=header.count)
    names = [name.strip() for name in next(csv.reader([header], delimiter=delimiter), [])]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        called = f'are called "{repeated[:80]}"' if repeated else "have no name"
        raise InputError(f"{path}: line {first_line - 1}: two columns {called}; keep one, or rename it")
    if not body.strip():
        empty = pa.table({name: pa.array([], pa.string()) for name in names})
        return Columns(path, empty, body, first_line, delimiter)
    convert = pacsv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False)
    try:
        table = pacsv.read_csv(
            io.BytesIO(body.encode()),
            read_options=pacsv.ReadOptions(column_names=names, use_threads=False),
            parse_options=pacsv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=convert,
        )
    except pa.ArrowException as error:
        raise _broken_row(path, body, first_line, delimiter, names, str(error)) from None
    return Columns(path, table, body, first_line, delimiter)


def split_header(text: str) -> tuple[str, str, int]:
    """(header line, what follows it, line number of the first line that follows); blank lines above are skipped."""
    match = re.compile(r"(?:[ \t]*(?:\r\n|\n|\r))*").match(text)
    start = match.end() if match else 0
    end = re.compile(r"\r\n|\n|\r").search(text, start)
    stop, body = (end.start(), end.end()) if end else (len(text), len(text))
    line = len(text[:start].splitlines()) + 2
    return text[start:stop], text[body:], line


def _broken_row(path: str, body: str, first_line: int, delimiter: str, names: list[str], reason: str) -> InputError:
    """The error for a table that does not parse: the first line with another number of cells, if that is why."""
    if len(names) == 1:
        return InputError(f"{path}: line {first_line - 1} is {shown(names[0])}, expected a header with column names")
    reader = csv.reader(io.StringIO(body, newline=""), delimiter=delimiter)
    try:
        for cells in reader:
            if cells and len(cells) != len(names):
                line = reader.line_num + first_line - 1
                hint = (
                    "the line may be cut off" if len(cells) < len(names) else f"a {delimiter!r} too many, or unquoted"
                )
                return InputError(
                    f"{path}: line {line}: {len(cells)} cells, expected {len(names)} ({', '.join(names)[:200]}); {hint}"
                )
    except csv.Error as error:
        reason = str(error)
    return InputError(f"{path}: not a readable CSV table: {reason[:200]}")


def parquet_columns(path: str, data: bytes) -> Columns:
    """The columns of a Parquet file. Raises InputError for one that is broken or has no rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(pa.BufferReader(data))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InputError(f"{path}: not a readable Parquet file: {str(error)[:200]}") from None
    if table.num_rows == 0:
        raise InputError(f"{path}: no rows")
    return Columns(path, table, None, 1)
