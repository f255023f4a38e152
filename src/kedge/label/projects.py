"""Projects: what is asked, the versions of the guideline, and how much overlap and gold there is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import Connection, func, insert, select

from kedge.core.errors import ConfigError, DataError
from kedge.core.files import check_text, hash_bytes
from kedge.core.suggest import did_you_mean
from kedge.label import tables
from kedge.label.audit import note
from kedge.label.database import Store
from kedge.label.questions import parse_questions
from kedge.label.team.quiz import split_quiz

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How many people label an item, how often gold comes and an item again, and what people are promised."""

    wanted: int = 1
    overlap_share: float = 0.2
    overlap_wanted: int = 3
    gold_share: float = 0.08
    repeat_share: float = 0.03
    """Items that a person is asked again, with sides swapped, to see whether they say the same."""
    practice: int = 5
    """Gold items that a person is shown with their explanation before the first real one."""
    harm_an_hour: int = 20
    """Harmful items an hour, at most, for those who take them."""
    pay: float = 0.0
    """For an hour, in `currency`."""
    currency: str = ""

    def __post_init__(self) -> None:
        if self.wanted < 1 or self.overlap_wanted < 1:
            raise ConfigError(f"wanted is {self.wanted}, overlap {self.overlap_wanted}: at least 1 label an item")
        for name in ("overlap_share", "gold_share", "repeat_share"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it is a share from 0 to below 1")
        for name in ("practice", "harm_an_hour", "pay"):
            if not 0 <= getattr(self, name) < 1e6:
                raise ConfigError(f"{name} is {getattr(self, name)}; it is 0 or more, below a million")


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """A project as it stands; `guideline` is the number of the present version."""

    id: int
    name: str
    questions: Mapping[str, Any]
    settings: Settings
    secret: str
    guideline: int


def new_project(
    store: Store,
    name: str,
    questions: Sequence[str] | Mapping[str, Any],
    guideline: str,
    settings: Settings | None = None,
) -> Project:
    """Make a project with the first version of its guideline."""
    settings = settings or Settings()
    asked = parse_questions(questions)
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r}: the name of a project has letters, digits, '.', '_' and '-', at most 100")
    if not guideline.strip():
        raise ConfigError("the guideline is empty; say what people are to look at")

    def work(connection: Connection) -> Project:
        if name in _names(connection):
            raise ConfigError(f"{name}: there is a project of this name already; choose another")
        secret = store.token(256)
        row = {
            "name": name,
            "questions": asked,
            "settings": asdict(settings),
            "secret": secret,
            "at": store.now(),
        }
        number = connection.execute(insert(tables.project).values(**row).returning(tables.project.c.id)).scalar_one()
        version = _add_guideline(store, connection, number, guideline)
        note(store, connection, "project.new", {"project": name, "questions": asked, "settings": asdict(settings)})
        return Project(id=number, name=name, questions=asked, settings=settings, secret=secret, guideline=version)

    return store.write(work)


def add_guideline(store: Store, project: Project, guideline: str) -> int:
    """Add a version, which later judgments name, and give its number. The same words again are no new version."""

    def work(connection: Connection) -> int:
        number = _add_guideline(store, connection, project.id, guideline)
        return connection.scalars(select(tables.guideline.c.version).where(tables.guideline.c.id == number)).one()

    return store.write(work)


def _add_guideline(store: Store, connection: Connection, project: int, guideline: str) -> int:
    table = tables.guideline
    digest = hash_bytes(check_text(guideline, "the guideline").encode())
    split_quiz(guideline)  # a quiz that cannot be read is refused before anybody takes it
    last = connection.execute(
        select(table.c.id, table.c.version, table.c.hash)
        .where(table.c.project == project)
        .order_by(table.c.version.desc())
        .limit(1)
    ).first()
    if last is not None and last.hash == digest:
        return last.id
    version = 1 if last is None else last.version + 1
    values = {"project": project, "version": version, "hash": digest, "body": guideline, "at": store.now()}
    number = connection.execute(insert(table).values(**values).returning(table.c.id)).scalar_one()
    note(store, connection, "guideline.new", {"project": project, "version": version, "hash": digest})
    return number


def read_guideline(store: Store, number: int) -> str:
    """The words of a version."""
    query = select(tables.guideline.c.body).where(tables.guideline.c.id == number)
    return store.read(lambda connection: connection.execute(query).scalar_one())


def all_projects(store: Store) -> list[Project]:
    """Every project, by name."""
    return store.read(lambda connection: [_find(connection, name) for name in _names(connection)])


def find_project(store: Store, name: str) -> Project:
    """The project of this name, or an error with the nearest one."""
    return store.read(lambda connection: _find(connection, name))


def all_names(store: Store) -> list[str]:
    """The names of the projects."""
    return store.read(_names)


def _find(connection: Connection, name: str) -> Project:
    row = connection.execute(select(tables.project).where(tables.project.c.name == name)).mappings().first()
    if row is None:
        names = _names(connection)
        known = f"; there are {', '.join(names)}" if names else "; there is none yet: `kedge label new`"
        raise DataError(f"{name}: no project of this name{did_you_mean(name, names)}{known}")
    table = tables.guideline
    version = connection.scalar(select(func.max(table.c.id)).where(table.c.project == row["id"])) or 0
    return Project(
        id=row["id"],
        name=name,
        questions=row["questions"],
        settings=Settings(**row["settings"]),
        secret=row["secret"],
        guideline=version,
    )


def _names(connection: Connection) -> list[str]:
    return list(connection.scalars(select(tables.project.c.name).order_by(tables.project.c.name)))
