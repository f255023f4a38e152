"""Rows to files, whole or absent: JSON Lines, gzipped where the name ends in .gz, or Parquet."""

from __future__ import annotations

import gzip
from base64 import b64encode
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import orjson

from kedge.core.errors import ConfigError, DataError
from kedge.core.files import atomic_open, sweep_partial_files

WRITABLE = (".jsonl", ".jsonl.gz", ".parquet")
_BATCH_ROWS = 1024

Write = Callable[[Mapping[str, Any]], None]


def encode(value: Any) -> bytes:
    return orjson.dumps(value, default=_plain, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)


def _plain(value: Any) -> Any:
    """What Parquet can hold and JSON cannot: bytes as base64, the rest (decimals, durations) as text."""
    return b64encode(value).decode() if isinstance(value, bytes) else str(value)


@contextmanager
def row_writer(path: Path) -> Generator[Write]:
    """Write rows to `path`, which appears when the block ends well."""
    if not path.name.endswith(WRITABLE):
        raise ConfigError(f"{path}: cannot write this kind of file; the name must end in {', '.join(WRITABLE)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep_partial_files(path)
    with atomic_open(path) as file:
        if path.suffix == ".parquet":
            # The columns are known only once all rows are: they wait on disk, not in memory.
            with TemporaryFile() as waiting:
                yield lambda row: _put(waiting, row)
                _parquet(waiting, file, path)
        elif path.suffix == ".gz":
            with gzip.GzipFile(fileobj=file, mode="wb", filename="", mtime=0, compresslevel=6) as packed:
                yield lambda row: _put(packed, row)
        else:
            yield lambda row: _put(file, row)


def _put(file: IO[bytes] | gzip.GzipFile, row: Mapping[str, Any]) -> None:
    file.write(encode(row) + b"\n")


def _parquet(waiting: IO[bytes], out: IO[bytes], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # from_pylist would take the columns of the first row alone.
        columns = (({name: None for row in batch for name in row}, batch) for batch in _batches(waiting))
        tables = (pa.table({name: [row.get(name) for row in batch] for name in names}) for names, batch in columns)
        schema = pa.unify_schemas([table.schema for table in tables], promote_options="permissive")
        with pq.ParquetWriter(out, schema, compression="zstd") as writer:
            for batch in _batches(waiting):
                writer.write_table(pa.Table.from_pylist(batch, schema=schema))
    except pa.ArrowException as error:
        reason = str(error).strip().partition("\n")[0]
        raise DataError(f"{path}: the rows do not fit into columns ({reason}); write .jsonl instead") from error


def _batches(waiting: IO[bytes]) -> Iterator[list[dict[str, Any]]]:
    waiting.seek(0)
    while batch := [orjson.loads(line) for line in islice(waiting, _BATCH_ROWS)]:
        yield batch
