"""Which exams there are, and where their files are: shipped with Kedge, brought with `kedge exam get`, or one's own.

An exam that was brought is used before one of the same name that ships.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal

from kedge.core.errors import ConfigError, DataError
from kedge.core.files import cache_root
from kedge.core.suggest import did_you_mean
from kedge.exams.exam import Exam
from kedge.exams.items import ABOUT, ITEMS, SHOTS, copy_part
from kedge.exams.own import EXAM_FILE, own_exam

BUILT_IN: Final[Mapping[str, str]] = {
    "mmlu": "kedge.exams.choice:mmlu",
    "piqa": "kedge.exams.choice:piqa",
    "truthfulqa": "kedge.exams.choice:truthfulqa",
    "bbq": "kedge.exams.bbq:exam",
    "gsm8k": "kedge.exams.gsm8k:exam",
    "ifeval": "kedge.exams.ifeval:exam",
    "code": "kedge.exams.code:exam",
    "xstest": "kedge.exams.refusing:xstest",
    "harmbench": "kedge.exams.refusing:harmbench",
    "advbench": "kedge.exams.refusing:advbench",
    "sycophancy": "kedge.exams.sycophancy:exam",
    "diversity": "kedge.exams.diversity:exam",
    "reward_pairs": "kedge.exams.reward_pairs:exam",
    "knowledge": "kedge.exams.own:shipped",
    "common_sense": "kedge.exams.own:shipped",
    "arithmetic": "kedge.exams.gsm8k:arithmetic",
    "instructions": "kedge.exams.ifeval:instructions",
    "safety": "kedge.exams.refusing:safety",
}
"""A name to the function that makes the exam of the folder with its files."""
SETS: Final[Mapping[str, tuple[str, ...]]] = {
    "quick": ("knowledge", "common_sense", "arithmetic", "instructions", "sycophancy", "safety"),
}
"""Names that stand for several exams; these ship, so that they can be taken at once."""
ENGINES: Final = ("lm_eval", "inspect")
"""Harnesses of others: `lm_eval:TASK` is run by them, not here."""
_SHIPPED = Path(__file__).parent / "shipped"

Origin = Literal["shipped", "fetched", "missing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """An exam as `kedge exam list` shows it."""

    name: str
    origin: Origin
    title: str
    licence: str
    items: int
    metrics: tuple[str, ...]


def exams_home() -> Path:
    """Where `kedge exam get` puts the files of exams."""
    return cache_root() / "exams"


def folder_of(name: str) -> Path | None:
    """The folder with the files of a built-in exam; None where they are not here."""
    candidates = (exams_home() / name, _SHIPPED / name)
    return next((folder for folder in candidates if (folder / ITEMS).is_file()), None)


def open_exam(name: str, *, limit: int | None = None) -> Exam:
    """The exam of this name, or of this YAML file; with `limit`, on so many of its items, taken evenly."""
    if name.endswith((".yaml", ".yml")):
        return own_exam(Path(name), limit=limit)
    if name not in BUILT_IN:
        raise ConfigError(f"there is no exam '{name}'{_nearest(name)}; {_what_there_is()}")
    folder = folder_of(name)
    if folder is None:
        raise ConfigError(
            f"the files of the exam {name} are not here: Kedge ships none of others. Get them from their source "
            f"(docs/exams.md), then run: kedge exam get {name} --from FOLDER"
        )
    if limit is None:
        return make_exam(name, folder)
    with TemporaryDirectory(prefix="kedge-exam-") as part:
        copy_part(folder, Path(part), limit)
        return make_exam(name, Path(part))


def expanded(names: Iterable[str]) -> list[str]:
    """Exams by name, with sets taken apart; each once, in order. A name that means nothing is an error."""
    exams: dict[str, None] = {}
    for name in names:
        is_known = name in BUILT_IN or name.endswith((".yaml", ".yml")) or is_engine(name)
        if not is_known and name not in SETS:
            raise ConfigError(f"there is no exam '{name}'{_nearest(name)}; {_what_there_is()}")
        exams.update(dict.fromkeys(SETS.get(name, (name,))))
    if not exams:
        raise ConfigError(f"no exam is named; {_what_there_is()}")
    return list(exams)


def is_engine(name: str) -> bool:
    """Whether it is a task of somebody else's harness."""
    engine, _, task = name.partition(":")
    return engine in ENGINES and bool(task)


def listed() -> Iterator[Listed]:
    """All built-in exams, and whether they can be taken now."""
    for name in BUILT_IN:
        folder = folder_of(name)
        if folder is None:
            yield Listed(name=name, origin="missing", title="", licence="", items=0, metrics=())
            continue
        exam = make_exam(name, folder)
        yield Listed(
            name=name,
            origin="fetched" if folder.parent == exams_home() else "shipped",
            title=exam.title,
            licence=about(folder).get("licence") or exam.licence,
            items=sum(bool(line.strip()) for line in (folder / ITEMS).read_bytes().splitlines()),
            metrics=tuple(exam.metrics),
        )


def about(folder: Path) -> dict[str, Any]:
    """What is known of where the files of an exam come from."""
    file = folder / ABOUT
    try:
        return json.loads(file.read_text()) if file.is_file() else {}
    except ValueError as error:
        raise DataError(f"{file}: not JSON ({error}); get the exam again with kedge exam get") from error


def make_exam(name: str, folder: Path) -> Exam:
    """The built-in exam of this name from the files in a folder."""
    try:
        return resolve_name(BUILT_IN[name])(folder)
    except ModuleNotFoundError as error:
        raise ConfigError(f"the exam {name} needs a package that is not installed: {error.name}") from error


def _nearest(name: str) -> str:
    return did_you_mean(name, [*BUILT_IN, *SETS])


def _what_there_is() -> str:
    return (
        f"there are {', '.join((*BUILT_IN, *SETS))}, lm_eval:TASK, inspect:TASK, or a YAML file of your own "
        "(docs/exams.md)"
    )


__all__ = [
    "BUILT_IN", "EXAM_FILE", "SETS", "SHOTS", "Listed", "about", "exams_home", "expanded", "folder_of", "is_engine",
    "listed", "make_exam", "open_exam",
]  # fmt: skip
