"""Content hashes: the identity of data files, model folders and settings in a run's lineage."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

_BLOCK_BYTES = 1 << 20


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
    digest = blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def hash_folder(folder: Path, *, suffixes: tuple[str, ...] = ()) -> str:
    """Hash of names and contents of the files below `folder`; hidden files do not count.

    `suffixes` keeps only files that end so: the weights of a model folder, say.
    """
    names = sorted(
        path.relative_to(folder)
        for path in folder.rglob("*")
        if path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and (not suffixes or path.name.endswith(suffixes))
    )
    return hash_json([[name.as_posix(), hash_file(folder / name)] for name in names])
