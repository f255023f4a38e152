"""Parquet files and folders saved by `datasets` into rows, a batch at a time. A null is an absent field."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kedge.core.errors import DataError
from kedge.core.suggest import did_you_mean
from kedge.data.decode import MOST_ROW_BYTES, Row, too_long
from kedge.data.examples import Origin

_BATCH_ROWS = 1024


def batch_rows(batches: Iterable[Any], name: str) -> Iterator[Row]:
    """Rows of Arrow tables or record batches that belong to one source."""
    number = 0
    for batch in batches:
        is_large = batch.nbytes > MOST_ROW_BYTES
        for at in range(batch.num_rows) if is_large else (None,):
            part = batch if at is None else batch.slice(at, 1)
            if is_large and part.nbytes > MOST_ROW_BYTES:
                number += 1
                yield Row(Origin(name, number), None, too_long(part.nbytes))
                continue
            for fields in part.to_pylist():
                number += 1
                yield Row(Origin(name, number), {key: value for key, value in fields.items() if value is not None})


def parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            if file.metadata.num_rows == 0:
                raise DataError(f"{path}: the file has no rows")
            yield from batch_rows(file.iter_batches(batch_size=_BATCH_ROWS), str(path))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: a damaged Parquet file ({_first_line(error)}); fetch or write it again") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def is_saved_dataset(folder: Path) -> bool:
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def saved_rows(folder: Path, split: str) -> Iterator[Row]:
    """A folder that `save_to_disk` of `datasets` wrote: one dataset, or several splits of which one is named."""
    index = folder / "dataset_dict.json"
    if not index.is_file():
        if split:
            raise DataError(f"{folder}: a single saved dataset without splits; leave out ':{split}'")
        yield from _saved_split_rows(folder, str(folder))
        return
    chosen = choose_split(list(_json(index)["splits"]), split, str(folder))
    yield from _saved_split_rows(folder / chosen, f"{folder}:{chosen}")


def choose_split(splits: list[str], split: str, name: str) -> str:
    """The split that is asked for, or the only one there is."""
    if not split and len(splits) == 1:
        return splits[0]
    if split in splits:
        return split
    problem = f"no split '{split}'{did_you_mean(split, splits)}; it has" if split else "several splits:"
    raise DataError(f"{name}: {problem} {', '.join(splits)}. Say which, as in '{name}:{splits[0]}'.")


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}); save the dataset again") from error


def _saved_split_rows(folder: Path, name: str) -> Iterator[Row]:
    state = _json(folder / "state.json")
    if state.get("_indices_data_files"):
        raise DataError(f"{folder}: saved with a selection of rows; call flatten_indices() and save it again")
    files = [folder / entry["filename"] for entry in state["_data_files"]]
    yield from batch_rows(_arrow_batches(files), name)


def _arrow_batches(files: list[Path]) -> Iterator[Any]:
    import pyarrow as pa

    for path in files:
        try:
            with pa.memory_map(str(path)) as mapped, pa.ipc.open_stream(mapped) as reader:
                yield from reader
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path}: a damaged Arrow file ({_first_line(error)}); save the dataset again") from error
