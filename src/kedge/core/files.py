"""Files that are whole or absent, the hashes of their content, and errors of the disk as messages that help.

A file is written beside its place, flushed to disk, then renamed.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from glob import escape
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import IO, Any, Final

from kedge.core.errors import ConfigError, DataError, KedgeError, RunError


def cache_root() -> Path:
    """Where Kedge keeps what it made or was given once: `$KEDGE_CACHE`, else `kedge` below `$XDG_CACHE_HOME`, else
    `~/.cache/kedge`."""
    if own := os.environ.get("KEDGE_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "kedge"
    return Path.home() / ".cache" / "kedge"


def fsync_folder(folder: Path) -> None:
    """Make a rename inside `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def atomic_open(path: Path) -> Generator[IO[bytes]]:
    """Write `path` as a whole: a reader sees the old file or the new one, and an error leaves the old one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    with atomic_open(path) as file:
        file.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, sort_keys=False) + "\n")


def append_line(path: Path, line: str) -> None:
    """Add a line to a file of lines, on the disk when this returns; one that a kill has cut stays a line of its own."""
    written = line.encode() + b"\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                written = b"\n" + written
        file.write(written)
        file.flush()
        os.fsync(file.fileno())


def is_same_file(left: Path, right: Path) -> bool:
    """Whether two names lead to one file, through links of either kind too; also of a file that is not there yet."""
    try:
        if left.samefile(right):
            return True
    except (OSError, ValueError):
        pass
    return os.path.realpath(left) == os.path.realpath(right)


_READ_ONLY = {errno.EACCES, errno.EPERM, errno.EROFS}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_PARTIAL = re.compile(r"\..+\.\d+\.(partial|old)")
"""The name that a file or a model's folder has while it is written, or while it is replaced."""


@contextmanager
def run_errors(doing: str, path: Path) -> Generator[None]:
    """Turn an OSError into a RunError about `path`; our own errors pass."""
    try:
        yield
    except KedgeError:
        raise
    except Exception as error:
        refusal = as_os_error(error)
        if refusal is None:
            raise
        raise RunError(f"Cannot {doing} {path}: {explain(refusal, path)}") from error


_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def as_os_error(error: BaseException) -> OSError | None:
    """The refusal of the system behind an error; None where there is none.

    Libraries that write in native code (safetensors) raise errors of their own, with the number in their text.
    """
    if isinstance(error, OSError):
        return error
    if (match := _OS_ERROR.search(str(error))) is not None:
        return OSError(int(match[1]), os.strerror(int(match[1])))
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if is_disk_full(error) else None


def explain(error: OSError, path: Path) -> str:
    if is_disk_full(error):
        return f"the disk is full ({readable_bytes(free_bytes(path))} free). Free some space, then resume the run."
    if error.errno == errno.EFBIG:
        return "no file may grow so large here (ulimit -f). Raise that limit, then resume the run."
    if error.errno == errno.ELOOP or (error.errno == errno.EEXIST and path.is_symlink()):
        return "a symbolic link on the way leads nowhere, or back to itself. Remove it, or name another folder."
    if error.errno == errno.ENAMETOOLONG:
        return "the name or the path is too long for this disk. Choose a shorter one."
    if error.errno in _READ_ONLY:
        return f"it is read-only for this user ({error.strerror}). Choose a folder that you may write to."
    return f"{error.strerror or error}."


def is_disk_full(error: BaseException) -> bool:
    """By error number or by text: libraries that write in native code (safetensors) raise errors of their own."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    return "No space left on device" in str(error)


def clear_partial_files(folder: Path) -> list[str]:
    """Remove the files and folders that a killed writer had not yet put in place or away; returns their names."""
    partial = sorted(path for path in folder.glob(".*") if _PARTIAL.fullmatch(path.name))
    with run_errors("clear up", folder):
        for path in partial:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    return [path.name for path in partial]


def sweep_partial_files(path: Path) -> None:
    """Remove what killed writers of `path` left beside it; one that is still at work keeps its file."""
    for partial in path.parent.glob(f".{escape(path.name)}.*.partial"):
        number = partial.name.removesuffix(".partial").rpartition(".")[2]
        if _PARTIAL.fullmatch(partial.name) and not is_alive(int(number)):
            partial.unlink(missing_ok=True)


def is_alive(process: int) -> bool:
    """Whether there is a process of this number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def free_bytes(path: Path) -> int:
    """Free space on the disk that holds `path`, or would hold it."""
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    return shutil.disk_usage(existing).free


def readable_bytes(size: int) -> str:
    """
    >>> readable_bytes(999), readable_bytes(3 * 1024**3 + 2**29)
    ('999 bytes', '3.5 GiB')
    """
    if size < 1024:
        return f"{size} bytes"
    amount = float(size)
    for unit in ("KiB", "MiB", "GiB"):
        amount /= 1024
        if amount < 1024:
            return f"{amount:.1f} {unit}"
    return f"{amount / 1024:.1f} TiB"


def check_text(value: str, what: str = "the text") -> str:
    """A DataError where text has half a surrogate pair, which no file can hold."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{what} has half a character at position {error.start} ({value[error.start]!a}), which no file can hold"
        ) from error
    return value


_BLOCK_BYTES = 1 << 20
_PART_BYTES = 64 << 20
HASHED_AT_ONCE: Final = min(16, os.cpu_count() or 1)
"""One core hashes the weights of a model slower than a disk takes them."""


def hash_bytes(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def hash_json(value: Any) -> str:
    """Hash of a JSON value; the order of keys does not matter.

    >>> hash_json({"a": 1, "b": 2}) == hash_json({"b": 2, "a": 1})
    True
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hash_bytes(text.encode())


def hash_file(path: Path) -> str:
    return hash_files([path])[0]


def hash_files(paths: Sequence[Path]) -> list[str]:
    """The hash of each file: of a small one that of its bytes, of a larger one that of the hashes of its parts.

    Parts are hashed at the same time.
    """
    starts = [range(0, max(path.stat().st_size, 1), _PART_BYTES) for path in paths]
    with ThreadPoolExecutor(HASHED_AT_ONCE) as pool:
        parts = [
            [pool.submit(_hash_part, path, start, is_last=start == own[-1]) for start in own]
            for path, own in zip(paths, starts, strict=True)
        ]
        hashes = [[part.result() for part in own] for own in parts]
    return [own[0] if len(own) == 1 else hash_json(own) for own in hashes]


def _hash_part(path: Path, start: int, *, is_last: bool) -> str:
    digest = blake2b(digest_size=16)
    num_blocks = None if is_last else _PART_BYTES // _BLOCK_BYTES
    with path.open("rb") as file:
        if start:  # a pipe has no places
            file.seek(start)
        for block in islice(iter(lambda: file.read(_BLOCK_BYTES), b""), num_blocks):
            digest.update(block)
    return digest.hexdigest()


def hash_folder(folder: Path, *, suffixes: tuple[str, ...] = (), without: tuple[str, ...] = ()) -> str:
    """Hash of names and contents of the files below `folder`; hidden files do not count, nor those named `without`.

    `suffixes` keeps only files that end so: the weights of a model folder, say.
    """
    names = sorted(
        path.relative_to(folder)
        for path in folder.rglob("*")
        if path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and (not suffixes or path.name.endswith(suffixes))
        and path.relative_to(folder).as_posix() not in without
    )
    hashes = hash_files([folder / name for name in names])
    return hash_json([[name.as_posix(), hashed] for name, hashed in zip(names, hashes, strict=True)])


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


def write_sealed_json(path: Path, body: Mapping[str, Any]) -> None:
    """Write `body`, which names its `format`, with a `seal`: a hash of everything in it."""
    write_json(path, {**body, "seal": hash_json(body)})


def read_sealed_json(path: Path, *, format: int, again: str) -> tuple[dict[str, Any], str]:
    """The body and its seal; a DataError where it has another format, or was changed since. `again` makes a new one."""
    body: dict[str, Any] = json.loads(path.read_bytes())
    seal = body.pop("seal")
    if body["format"] != format:
        raise DataError(f"{path}: format {body['format']!r}; this version of Kedge reads format {format}")
    if hash_json(body) != seal:
        raise DataError(f"{path}: changed after it was sealed; {again}")
    return body, seal
