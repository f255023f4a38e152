"""The project folder: nothing outside of it is read, written or run, whatever a page or a recipe names."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from kedge.core.errors import DataError, KedgeError
from kedge.core.quoting import escaped, quoted
from kedge.core.settings import unusable_path
from kedge.core.yaml.source import KeyPath, read_tree

STATE: Final = ".kedge-studio"
"""The studio's own files in the project: jobs, their logs, the address, the chat."""
DATA_SUFFIXES: Final = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".jsonl.gz", ".json.gz", ".csv.gz", ".tsv.gz")
LONGEST_NAME: Final = 120
_SEPARATORS = re.compile(r"[/\\]")
_DRIVE = re.compile(r"[A-Za-z]:[/\\]")
_URL = re.compile(r"https?://", re.IGNORECASE)
_UNSAFE_LETTERS = frozenset('<>:"|?*')
_DEVICES = frozenset(
    {"con", "prn", "aux", "nul", "conin$", "conout$", *(f"{port}{n}" for port in ("com", "lpt") for n in range(10))}
)
_PROSE_KEYS = frozenset({"pattern", "system", "stop"})
"""Settings whose texts are never opened, and may begin like a path."""
_DEEPEST = 8
"""Recipes that extend one another."""
_MOST_FILES = 500


@dataclass(frozen=True, slots=True)
class Project:
    """`folder` is resolved: no link is on the way to it."""

    folder: Path

    def inside(self, text: str) -> Path:
        """The path of a name that a page or a recipe gave; refused where it leads out of the project.

        >>> Project(Path("/p")).inside("data/pairs.jsonl")
        PosixPath('/p/data/pairs.jsonl')
        >>> Project(Path("/p")).inside("../q")
        Traceback (most recent call last):
        kedge.core.errors.DataError: '../q' leads out of the project folder; name a file inside of it
        """
        if problem := self.escape_of(text):
            raise DataError(problem)
        return self.folder / text

    def escape_of(self, text: str, *, beside: Path | None = None) -> str | None:
        """Why a name is refused; None where it stays inside. Relative names begin in `beside`, else in the project."""
        if not text:
            return "a name is needed, found nothing"
        if problem := unusable_path(text):
            return problem
        if is_absolute(text):
            return f"{quoted(text)} is not inside of the project folder; name a file of the project, from its folder on"
        if ".." in _SEPARATORS.split(text):
            return f"{quoted(text)} leads out of the project folder; name a file inside of it"
        path = (beside or self.folder) / text
        try:
            text.encode()
            real = Path(os.path.realpath(path))
            is_broken = path.is_symlink() and not path.exists()
        except (OSError, ValueError, RuntimeError):
            return f"{quoted(text)}: no file can be called so, or its links lead in a circle"
        if is_broken:
            return f"{quoted(text)} is a link that leads nowhere; copy the file into the project"
        if not real.is_relative_to(self.folder):
            return f"{quoted(text)} is a link that leads out of the project folder; copy the file into it"
        return None

    def relative(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    @property
    def state(self) -> Path:
        return self.folder / STATE

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def recipes(self) -> list[str]:
        """Recipes, by their names in the project folder."""
        files = sorted(self.folder.glob("*.yaml"))
        return [file.name for file in files if file.is_file() and self.escape_of(file.name) is None]

    def run_names(self) -> list[str]:
        """Runs, the newest first."""
        found = [file.parent for file in self.runs.glob("*/run.json") if self.escape_of(self.relative(file)) is None]
        return [folder.name for folder in sorted(found, key=lambda folder: folder.stat().st_mtime, reverse=True)]

    def data_files(self) -> list[str]:
        """Files of data outside of runs, from the project folder on."""
        return [self.relative(file) for file in self._files() if file.name.lower().endswith(DATA_SUFFIXES)][
            :_MOST_FILES
        ]

    def model_folders(self) -> list[str]:
        """Folders that hold a language model: those of runs, the newest first, then others."""
        own = [
            self.relative(config.parent.parent)
            for name in self.run_names()
            for config in sorted((self.runs / name).glob("*/model/config.json"))
            if self.escape_of(self.relative(config)) is None and _is_language_model(config)
        ]
        others = [
            self.relative(file.parent)
            for file in self._files()
            if file.name == "config.json" and file.parent != self.folder and _is_language_model(file)
        ]
        return [*own, *others][:_MOST_FILES]

    def _files(self) -> Iterator[Path]:
        """Files of the project but for runs and what is hidden; links that lead out are not followed."""
        for place, folders, names in os.walk(self.folder):
            here = Path(place)
            is_top = here == self.folder
            folders[:] = sorted(
                name
                for name in folders
                if not name.startswith((".", "__")) and not (is_top and name in ("runs", "badcases"))
            )
            if len(here.relative_to(self.folder).parts) >= 4:
                folders.clear()
            for name in sorted(names):
                if not name.startswith(".") and self.escape_of(self.relative(here / name)) is None:
                    yield here / name


def _is_language_model(config: Path) -> bool:
    """Reward models are no models to talk with, nor to start from."""
    try:
        named: Any = json.loads(config.read_bytes()).get("architectures")
    except (OSError, ValueError, AttributeError):
        return False
    return bool(named) and not any(str(name).endswith("ForSequenceClassification") for name in named)


def is_absolute(text: str) -> bool:
    """Whether a name begins at the root, at a drive, at a share or at somebody's home, on any system.

    >>> [is_absolute(text) for text in ("/etc", "C:/x", "~/x", "//host/x", "data/x.jsonl", "a:b")]
    [True, True, True, True, False, False]
    """
    return text.startswith(("/", "\\", "~")) or bool(_DRIVE.match(text)) or text.lower().startswith("file:")


def upload_name(name: str) -> str:
    """The name that an uploaded file gets; refused where a system would take it for something else."""
    stem = name.partition(".")[0].rstrip().lower()
    if not name.strip() or len(name.encode(errors="replace")) > LONGEST_NAME:
        raise DataError(f"the file's name must have 1 to {LONGEST_NAME} characters, found {quoted(name)}")
    if name != escaped(name) or any(ord(letter) < 32 or ord(letter) == 127 for letter in name):
        raise DataError(f"the file's name {quoted(name)} has characters that hide or turn text; rename it")
    if _SEPARATORS.search(name) or _UNSAFE_LETTERS & set(name) or name.startswith((".", "~", "-")):
        raise DataError(f"{quoted(name)}: a file's name, not a path: letters, digits, blanks, - _ and . are fine")
    if name != name.strip() or name.endswith(".") or stem in _DEVICES:
        raise DataError(f"{quoted(name)}: not every system can call a file so; rename it")
    if not name.lower().endswith(DATA_SUFFIXES):
        raise DataError(f"{quoted(name)}: files of data end with {', '.join(DATA_SUFFIXES)}")
    return name


def refused_settings(project: Project, values: Any, recipe: Path) -> Iterator[tuple[KeyPath, str]]:
    """Every setting of a recipe that the studio does not act on: paths out of the project, and programs.

    `recipe` is the file that holds the values; the files that it extends are looked at too.
    """
    yield from _refused(project, values, recipe, 0)


def _refused(project: Project, values: Any, recipe: Path, depth: int) -> Iterator[tuple[KeyPath, str]]:
    yield from _escapes(project, values, recipe.parent, ())
    top = cast("Mapping[str, Any]", values) if isinstance(values, Mapping) else {}
    alerts = top.get("alerts")
    if isinstance(alerts, Mapping) and cast("Mapping[str, Any]", alerts).get("commands"):
        yield ("alerts", "commands"), "the studio starts no programs; leave it out, or use `kedge run` in a terminal"
    bases = top.get("extends", [])
    for base in cast("list[Any]", bases if isinstance(bases, list) else [bases]):
        if not isinstance(base, str) or project.escape_of(base, beside=recipe.parent):
            continue
        file = recipe.parent / base
        if depth >= _DEEPEST:
            yield ("extends",), f"more than {_DEEPEST} recipes extend one another"
        elif file.is_file():
            try:
                below = read_tree(file).values
            except KedgeError:
                continue  # loading the recipe says what is wrong with it
            for _, problem in _refused(project, below, file, depth + 1):
                yield ("extends",), f"{base}: {problem}"


def _escapes(project: Project, value: Any, beside: Path, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(value, Mapping):
        for key, part in cast("Mapping[str, Any]", value).items():
            yield from _escapes(project, part, beside, (*path, key))
    elif isinstance(value, list):
        for place, part in enumerate(cast("list[Any]", value)):
            yield from _escapes(project, part, beside, (*path, place))
    elif isinstance(value, str) and value and not _is_prose(path) and (problem := _escape_in(project, value, beside)):
        yield path, problem


def _escape_in(project: Project, text: str, beside: Path) -> str | None:
    """What is wrong with a text as a path, or with the file of `file.py:function` and of `folder:split`."""
    if is_absolute(text) or ".." in _SEPARATORS.split(text):
        return project.escape_of(text, beside=beside)
    if _URL.match(text):
        return None
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        return f"{quoted(text)} has half a character (a surrogate), which no file can hold"
    for name in dict.fromkeys((text, text.rpartition(":")[0] or text)):
        if os.path.lexists(beside / name) and (problem := project.escape_of(name, beside=beside)):
            return problem
    return None


def _is_prose(path: KeyPath) -> bool:
    """A text, or one of a list of them; a stage of that name is no such setting."""
    key = path[-2] if len(path) > 1 and isinstance(path[-1], int) else path[-1] if path else ""
    return key in _PROSE_KEYS
