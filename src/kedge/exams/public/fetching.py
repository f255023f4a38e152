"""`kedge exam get`: files that the user has become the files of an exam, with their licence, source and hash."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from kedge.core.errors import ConfigError, DataError
from kedge.core.files import hash_file, write_json
from kedge.core.suggest import did_you_mean
from kedge.exams.catalogue import BUILT_IN, exams_home, make_exam
from kedge.exams.items import ABOUT, ITEMS, SHOTS, write_items
from kedge.exams.public.layouts import PUBLIC, Layout, Public

_MOST_NAMES = 12
_MOST_FILES = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """An exam whose files are in place now."""

    name: str
    folder: Path
    layout: str
    licence: str
    source: str
    items: int
    shots: int
    wanted: int | None
    """Items that the public exam has, where that is known."""
    items_hash: str

    def lines(self) -> Iterator[str]:
        shots = f" and {self.shots:,} examples" if self.shots else ""
        yield f"{self.name}: {self.items:,} items{shots}, read as {self.layout}"
        if self.wanted is not None and self.items != self.wanted:
            yield f"note: the public exam has {self.wanted:,} items, so numbers of others are not comparable"
        yield f"licence: {self.licence}"
        yield f"source: {self.source}"
        yield f"hash: {self.items_hash}"
        yield f"now in {self.folder}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Match:
    layout: Layout
    items: tuple[Path, ...]
    shots: tuple[Path, ...]


def fetch_exam(name: str, source: Path, *, force: bool = False) -> Fetched:
    """Find the files of an exam, bring them into the normal form, try it, and put it where exams are looked for."""
    public = _public(name)
    target = exams_home() / name
    if target.exists() and not force:
        raise ConfigError(f"the exam {name} is there already, in {target}; --force replaces it")
    match = _match(name, public, source)
    target.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{name}-", dir=target.parent) as place:
        folder = Path(place) / name
        folder.mkdir()
        items = write_items(folder / ITEMS, match.layout.convert(match.items))
        shots = write_items(folder / SHOTS, match.layout.convert(match.shots)) if match.shots else 0
        exam = make_exam(name, folder)
        about = {
            "title": exam.title,
            "licence": public.licence,
            "source": public.source,
            "hash": exam.items_hash,
            "items": items,
            "layout": match.layout.name,
            "files": {file.name: hash_file(file) for file in (*match.items, *match.shots)},
        }
        write_json(folder / ABOUT, about)
        if target.exists():
            shutil.rmtree(target)
        folder.rename(target)
    return Fetched(
        name=name,
        folder=target,
        layout=match.layout.name,
        licence=public.licence,
        source=public.source,
        items=items,
        shots=shots,
        wanted=public.count,
        items_hash=exam.items_hash,
    )


def _public(name: str) -> Public:
    if name in PUBLIC:
        return PUBLIC[name]
    if name in BUILT_IN:
        raise ConfigError(f"the exam {name} ships with Kedge; there is nothing to get")
    known = ", ".join(PUBLIC)
    raise ConfigError(f"there is no exam '{name}'{did_you_mean(name, PUBLIC)}; files can be brought for {known}")


def _match(name: str, public: Public, source: Path) -> _Match:
    """The one layout that the files have. None, or several that are possible, is an error with what was found."""
    files = _files(source)
    matches = [match for layout in public.layouts if (match := _fit(layout, files, source)) is not None]
    if len(matches) == 1:
        return matches[0]
    if matches:
        layouts = " and ".join(match.layout.name for match in matches)
        raise DataError(f"{source}: files of {name} in several layouts, {layouts}; name the folder or file of one")
    known = "".join(f"\n  {layout.name}" for layout in public.layouts)
    raise DataError(f"{source}: no files of {name} here. {_what_is_there(files, source)} Known layouts are:{known}")


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise ConfigError(f"{source}: there is no such folder or file")
    files: list[Path] = []
    for file in source.rglob("*"):
        if file.is_file() and not file.name.startswith("."):
            files.append(file)
        if len(files) > _MOST_FILES:
            raise ConfigError(f"{source}: more than {_MOST_FILES:,} files below it; name the folder of the exam")
    return sorted(files)


def _fit(layout: Layout, files: list[Path], source: Path) -> _Match | None:
    """The files of a layout; None where one of them is not there."""
    items = _named(files, layout.items)
    if not items:
        return None
    parts = [items]
    for pattern in (layout.beside, layout.shots):
        # A single file was named: what belongs to it lies beside it.
        found = [] if pattern is None else _named(files, pattern) or _named(_beside(source), pattern)
        if pattern is not None and not found:
            return None
        parts.append(found)
    for part in parts:
        if len(part) > 1 and not layout.several:
            places = ", ".join(map(str, part[:_MOST_NAMES]))
            raise DataError(f"{source}: {len(part)} files could be the one wanted: {places}; name the folder of one")
    items, beside, shots = parts
    return _Match(layout=layout, items=(*items, *beside), shots=tuple(shots))


def _beside(source: Path) -> list[Path]:
    return sorted(source.parent.iterdir()) if source.is_file() else []


def _named(files: list[Path], pattern: str) -> list[Path]:
    """Files by their name; compressed ones and others of a pattern that ends in * must be JSON Lines."""
    named = [file for file in files if file.match(pattern)]
    return [file for file in named if not pattern.endswith("*") or file.name.endswith((".jsonl", ".jsonl.gz"))]


def _what_is_there(files: list[Path], source: Path) -> str:
    if not files:
        return "The folder is empty."
    names = [str(file.relative_to(source)) if source.is_dir() else file.name for file in files[:_MOST_NAMES]]
    more = f" and {len(files) - _MOST_NAMES:,} more" if len(files) > _MOST_NAMES else ""
    return f"There are: {', '.join(names)}{more}."
