"""Files in, raw rows out, one at a time: a file, a folder of shards, a saved dataset, or a dataset of the hub.

A source is a path, `FOLDER:SPLIT`, or `[hub:]ORG/NAME[/CONFIG][@REVISION][:SPLIT]` (a config needs the `hub:`). What
exists on disk always wins. A row that cannot be decoded is yielded with its problem; what makes the whole source
unreadable is a DataError. What rows mean is left to `kedge.data.formats`.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from pathlib import Path

from kedge.core.errors import DataError
from kedge.core.files import hash_file, hash_folder, hash_json
from kedge.core.suggest import did_you_mean
from kedge.data.columnar import is_saved_dataset, parquet_rows, saved_rows
from kedge.data.decode import Row, is_parquet, text_rows
from kedge.data.hub import HubId, hub_files, hub_rows

SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt", ".gz")
SET_ASIDE_SUFFIX = ".broken.jsonl"
_SPLIT_WORD = re.compile(r"(?:^|[._-])(train|test|valid|validation|val|dev|eval|heldout)(?=[._-])")

__all__ = ["Row", "content_hash", "is_hub_id", "rows", "signature", "stem_of"]


def rows(source: str | Path) -> Iterator[Row]:
    """The rows of a source in order. Memory does not grow with the size of the file, JSON arrays excepted."""
    text = str(source)
    path, split = _path_and_split(text)
    if path is not None:
        yield from _local_rows(path, split)
        return
    _refuse_broken_link(Path(text))
    if (hub_id := _hub_id(text)) is not None:
        yield from hub_rows(hub_id)
    else:
        raise _missing(Path(text))


def content_hash(source: str | Path) -> str:
    """Equal for sources that give the same rows: a hash of the files behind a source, and of the split it names."""
    path, split = _path_and_split(str(source))
    if path is None:
        hub_id = _hub_id(str(source))
        if hub_id is None:
            raise _missing(Path(str(source)))
        return hash_json([[hash_file(file) for file in hub_files(hub_id)], hub_id.split])
    return hash_json([hash_folder(path) if path.is_dir() else hash_file(path), split])


def signature(source: str | Path) -> object:
    """Changes when a file behind the source is written to: sizes and times. A dataset of the hub does not change."""
    path, _ = _path_and_split(str(source))
    if path is None:
        return None
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [(str(file), stat.st_size, stat.st_mtime_ns) for file in files for stat in (file.stat(),)]


def _path_and_split(source: str) -> tuple[Path | None, str]:
    """What a source names on disk; None for what is not there."""
    if Path(source).exists():
        return Path(source), ""
    folder, _, split = source.rpartition(":")
    return (Path(folder), split) if folder and Path(folder).is_dir() else (None, "")


def _refuse_broken_link(path: Path) -> None:
    """A link that leads nowhere or in a circle looks like a file that is not there."""
    if path.is_symlink():
        try:
            path.stat()
        except OSError as error:
            why = "leads in a circle" if error.errno == errno.ELOOP else "leads to a file that is not there"
            raise DataError(f"{path}: this symbolic link (to '{path.readlink()}') {why}; mend or remove it") from error


def is_hub_id(source: str | Path) -> bool:
    """Whether a source names a dataset of the hub rather than something on disk, present or missing.

    >>> is_hub_id("org/name:train"), is_hub_id("hub:org/name/config"), is_hub_id("org/name.jsonl"), is_hub_id("./a/b")
    (True, True, False, False)
    """
    text = str(source)
    is_local = Path(text).exists() or Path(text.rpartition(":")[0] or text).exists()
    return not is_local and _hub_id(text) is not None


def _hub_id(text: str) -> HubId | None:
    hub_id = HubId.parse(text)
    if hub_id is None or text.startswith("hub:"):
        return hub_id
    # Without the prefix, what looks like a file or lies in a folder that exists is a path with a typing error.
    is_path = text.startswith(".") or text.endswith(SUFFIXES) or Path(hub_id.org).is_dir() or hub_id.config
    return None if is_path else hub_id


def stem_of(source: str | Path) -> str:
    """The name of a source without folder and data suffixes, for the names of files made from it.

    >>> stem_of("data/pairs.jsonl.gz"), stem_of("hub:org/name:train")
    ('pairs', 'name-train')
    """
    name = Path(str(source)).name.replace(":", "-")
    for suffix in (".gz", *SUFFIXES):
        name = name.removesuffix(suffix) or name
    return name


def _local_rows(path: Path, split: str) -> Iterator[Row]:
    if not path.is_dir():
        yield from _file_rows(path)
    elif is_saved_dataset(path):
        yield from saved_rows(path, split)
    else:
        for shard in _shards(path, split):
            yield from _file_rows(shard)


def _file_rows(path: Path) -> Iterator[Row]:
    try:
        if path.stat().st_size == 0:
            raise DataError(f"{path}: the file is empty")
        is_columnar = is_parquet(path) or path.suffix == ".parquet"
        yield from parquet_rows(path) if is_columnar else text_rows(path)
    except PermissionError as error:
        raise DataError(f"{path}: no permission to read it; try: chmod u+r '{path}'") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _shards(folder: Path, split: str) -> list[Path]:
    try:
        entries = [path for path in folder.iterdir() if not path.name.startswith(".")]
        for path in entries:
            if path.name.endswith(SUFFIXES):
                _refuse_broken_link(path)
        names = sorted(path.name for path in entries if path.is_file())
    except PermissionError as error:
        raise DataError(f"{folder}: no permission to list it; try: chmod u+rx '{folder}'") from error
    shards = [name for name in names if name.endswith(SUFFIXES) and not name.endswith(SET_ASIDE_SUFFIX)]
    if not shards:
        listed = ", ".join(names[:8]) or "no files"
        raise DataError(f"{folder}: the folder holds no data files ({listed}); data files end in {', '.join(SUFFIXES)}")
    split_of = {name: match[1] if (match := _SPLIT_WORD.search(name)) else "" for name in shards}
    splits = sorted(set(split_of.values()) - {""})
    if split and split not in splits:
        raise DataError(
            f"{folder}: no split '{split}'{did_you_mean(split, splits)}; found: {', '.join(splits) or 'none'}"
        )
    if not split and len(splits) > 1:
        raise DataError(
            f"{folder}: the folder mixes splits ({', '.join(splits)}); say which, as in '{folder}:{splits[-1]}'"
        )
    return [folder / name for name in shards if not split or split_of[name] == split]


def _missing(path: Path) -> DataError:
    folder = path.parent
    if not folder.is_dir():
        return DataError(f"{path}: there is no folder '{folder}'. A dataset of the hub is written hub:ORG/NAME.")
    names = sorted(entry.name for entry in folder.iterdir())
    return DataError(f"{path}: no such file{did_you_mean(path.name, names)} in '{folder.resolve()}'")
