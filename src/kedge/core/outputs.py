"""What a command writes never replaces what it reads, and replaces nothing else unless it is asked to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from kedge.core.errors import ConfigError
from kedge.core.files import is_same_file


def refuse_overwriting(
    targets: Iterable[Path | None], *, inputs: Iterable[str | Path] = (), force: bool = False, own: Iterable[str] = ()
) -> None:
    """Raise where a target is one of the inputs under any name, is named twice, or is there and `force` is not given.

    A folder among the inputs stands for the files below it, but for those called like one of `own`: a run's page may be
    written anew into the run.
    """
    places = [target for target in targets if target is not None]
    read = {identity: file for file in _files(inputs, frozenset(own)) if (identity := _identity(file))}
    for number, target in enumerate(places):
        identity = _identity(target)
        source = read.get(identity) if identity else None
        if source is not None:
            named = "" if str(source) == str(target) else f" (the same file as {target})"
            raise ConfigError(
                f"{source}: this is what is read{named}, and it would be overwritten; write to another file"
            )
        if any(is_same_file(target, earlier) for earlier in places[:number]):
            raise ConfigError(f"{target}: two outputs would be written there; give each a file of its own")
        if target.is_dir():
            raise ConfigError(f"{target}: this is a folder; name a file in it")
        if not force and (target.exists() or target.is_symlink()):
            raise ConfigError(f"{target}: this file is there already; --force overwrites it, or write to another one")


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and number of a file: the same for all of its names. None where there is no file."""
    try:
        stat = path.stat()
    except (OSError, ValueError):
        return None
    return stat.st_dev, stat.st_ino


def _files(inputs: Iterable[str | Path], own: frozenset[str]) -> Iterator[Path]:
    for source in inputs:
        path = Path(source)
        if not path.exists() and ":" in str(source):
            path = Path(str(source).rpartition(":")[0])  # FOLDER:SPLIT
        if path.is_dir():
            yield from (file for file in path.rglob("*") if file.name not in own and file.is_file())
        else:
            yield path
