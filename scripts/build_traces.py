"""Write the packaged traces of slacktide/data/traces from the source tables: `build_traces.py --source DIR`.

DIR holds the Parquet files named in `slacktide.workload.packaged` (columns arrival_s, prompt_tokens, output_tokens,
hash_ids, client). `client` becomes `tenant`; licence and source go into each file's metadata and into README.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from slacktide.workload.formats.own import block_size_metadata
from slacktide.workload.packaged import PACKAGED, PackagedTrace

MOONCAKE_BLOCK = 512
"""Tokens behind one hash id in the Mooncake release."""

README_HEAD = """# Packaged traces

Every file is a changed form of its source: columns renamed, rows cut or drawn as described; no prompt text and no
token ids are included. Columns: `arrival_s` (s), `prompt_tokens`, `output_tokens`, `tenant` (ServeGen's client),
`hash_ids` (ids of 512-token prefix blocks; equal leading ids = shared prefix). Written by `scripts/build_traces.py`.
Licence texts: Apache-2.0 and MIT in `../licenses`, CC-BY-4.0 at https://creativecommons.org/licenses/by/4.0/.

| name | rows | times | licence | source | attribution | what |
|---|---|---|---|---|---|---|
"""


def build(entry: PackagedTrace, source: Path, target: Path) -> int:
    """Write one packaged file; returns its size in bytes. Raises ValueError when the source has other rows."""
    table = pq.read_table(source / entry.source_file)
    if table.num_rows != entry.rows:
        raise ValueError(f"{entry.source_file}: {table.num_rows} rows, expected {entry.rows}")
    names = ["tenant" if name == "client" else name for name in table.column_names]
    metadata = {b"licence": entry.licence.encode(), b"source": entry.source.encode()}
    metadata |= {b"attribution": entry.attribution.encode()}
    if "hash_ids" in names:
        metadata |= block_size_metadata(MOONCAKE_BLOCK)
    table = table.rename_columns(names).replace_schema_metadata(metadata)
    path = target / entry.file
    pq.write_table(table, path, compression="zstd", compression_level=19)
    return path.stat().st_size


def main() -> None:
    """Build every file and the README beside them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="folder with the source Parquet files")
    default = Path(__file__).resolve().parents[1] / "src" / "slacktide" / "data" / "traces"
    parser.add_argument("--target", type=Path, default=default)
    arguments = parser.parse_args()
    arguments.target.mkdir(parents=True, exist_ok=True)
    total = sum(build(entry, arguments.source, arguments.target) for entry in PACKAGED)
    cells = [
        (t.name, f"{t.rows}", "yes" if t.timed else "no", t.licence, t.source, t.attribution, t.description)
        for t in PACKAGED
    ]
    rows = [f"| {' | '.join(row)} |" for row in cells]
    (arguments.target / "README.md").write_text(README_HEAD + "\n".join(rows) + "\n", encoding="utf-8")
    print(f"{len(PACKAGED)} traces, {total / 1e6:.2f} MB (plus README.md)", pa.__version__)


if __name__ == "__main__":
    main()
