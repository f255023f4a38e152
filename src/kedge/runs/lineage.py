"""Where a run's inputs came from: its parents, their parents, and so on back to plain files.

A parent is the run whose folder holds an input. Left out: nothing is hashed again; `is_stale` compares the hash that
the child recorded with the one that the parent records now.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kedge.core.errors import DataError
from kedge.core.files import hash_file, hash_folder
from kedge.runs.manifest import MANIFEST_NAME, Artefact, read_manifest

CARD: Final = "README.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One input of one run. `parent` is the run that made it; None for a file from outside."""

    child: Path
    artefact: Artefact
    parent: Path | None
    is_stale: bool
    """The parent has written something else under this path since the child read it."""


def describe(name: str, kind: str, path: Path, *, run_folder: Path) -> Artefact:
    """A file or folder as an artefact: its path and the hash of its content.

    Inside the same pipeline folder, and inside that of all rounds, the path is relative, so that the whole folder can
    be moved. The card of a model, which says when it was made and which its owner completes, is not content.
    """
    if not path.exists():
        raise DataError(f"{kind} '{name}': there is no file or folder {path}.")
    target, home = path.resolve(), run_folder.resolve()
    stored = os.path.relpath(target, home) if target.is_relative_to(_whole(home)) else str(target)
    return Artefact(
        name=name,
        kind=kind,
        path=Path(stored).as_posix(),
        hash=hash_folder(target, without=(CARD,)) if target.is_dir() else hash_file(target),
    )


def _whole(home: Path) -> Path:
    """The folder of the pipeline that a stage belongs to, or that of all its rounds."""
    pipeline = home.parent
    return pipeline.parent if (pipeline.parent / MANIFEST_NAME).is_file() else pipeline


def locate(artefact: Artefact, run_folder: Path) -> Path:
    return (run_folder / artefact.path).resolve()


def lineage(folder: Path) -> list[Link]:
    """Every input of `folder`, of its parents, and so on; nearest first, each run once."""
    links: list[Link] = []
    queue, visited = deque([folder.resolve()]), {folder.resolve()}
    while queue:
        child = queue.popleft()
        for artefact in read_manifest(child).inputs:
            link = _link(child, artefact)
            links.append(link)
            if link.parent is not None and link.parent not in visited:
                visited.add(link.parent)
                queue.append(link.parent)
    return links


def _link(child: Path, artefact: Artefact) -> Link:
    path = locate(artefact, child)
    parent = _producer(path, child)
    is_stale = parent is not None and _has_changed(artefact, path, parent)
    return Link(child=child, artefact=artefact, parent=parent, is_stale=is_stale)


def _has_changed(artefact: Artefact, path: Path, parent: Path) -> bool:
    outputs = read_manifest(parent).outputs
    return any(locate(output, parent) == path and output.hash != artefact.hash for output in outputs)


def _producer(path: Path, child: Path) -> Path | None:
    """The nearest run around `path`; none where that is the child, or its own pipeline, which produces nothing."""
    runs = (folder for folder in (path, *path.parents) if (folder / MANIFEST_NAME).is_file())
    nearest = next(runs, None)
    return None if nearest is None or child.is_relative_to(nearest) else nearest
