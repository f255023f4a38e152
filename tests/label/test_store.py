"""Opening a store: migrations, stores that are none or too new, texts that are kept once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Thread

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.environment import EnvironmentContext
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from made_up import pair, people, project_with, says
from sqlalchemy import func, select, text

from kedge.core.errors import ConfigError, DataError, KedgeError
from kedge.core.files import hash_bytes
from kedge.label import tables
from kedge.label.database import MIGRATIONS, Store, open_store
from kedge.label.incoming import Draft
from kedge.label.items import add_items
from kedge.label.judging import judge
from kedge.label.projects import find_project, new_project
from kedge.label.questions import Decision
from kedge.label.status import status
from kedge.label.texts import encode_messages, read_texts
from kedge.label.work import next_task


def test_migrations_make_the_tables_that_the_code_knows(store: Store) -> None:
    with store.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), tables.METADATA) == []


def test_a_store_that_is_opened_again_keeps_what_it_has(opened: Callable[[], Store]) -> None:
    project_with(opened(), [pair(0)])
    with pytest.raises(ConfigError, match="a project of this name"):
        new_project(opened(), "shop", ["pair"], "again")


def test_several_open_a_new_store_at_once(opened: Callable[[], Store], address: str) -> None:
    problems: list[KedgeError] = []

    def open_one() -> None:
        try:
            open_store(address, create=True).close()
        except KedgeError as error:
            problems.append(error)

    threads = [Thread(target=open_one) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    project_with(opened(), [pair(0)])


def test_a_store_of_a_newer_version_is_refused_with_words(opened: Callable[[], Store], address: str) -> None:
    opened().write(lambda connection: connection.execute(text("UPDATE alembic_version SET version_num = '0999'")))
    with pytest.raises(DataError, match=r"newer Kedge \(tables of version 0999; this one knows 0004\)"):
        open_store(address)


def test_a_store_of_the_first_version_keeps_its_items(opened: Callable[[], Store], address: str) -> None:
    """Its items have neither words nor repetitions, and are asked and counted like others."""
    script = ScriptDirectory(MIGRATIONS)
    engine = opened().engine  # for its settings alone: the tables of today are taken away
    with engine.begin() as connection:
        tables.METADATA.drop_all(connection)
        connection.execute(text("DROP TABLE alembic_version"))
        steps = partial(script._upgrade_revs, "0001")
        with EnvironmentContext(Config(), script, fn=lambda revision, _: steps(revision)) as environment:
            environment.configure(connection=connection, target_metadata=tables.METADATA)
            environment.run_migrations()
        for statement in OLD_ROWS:
            connection.execute(text(statement))
    store = opened()
    project = find_project(store, "old")
    (person,) = people(store, 1)
    task = next_task(store, project, person)
    assert task is not None
    judge(store, project, person, task.assignment, Decision(verdict="thumb", outcome=1))
    now = status(store, project)
    assert (now.items, now.given, now.missing) == (1, 1, 0)


OLD_ROWS = (
    "INSERT INTO project VALUES (1, 'old', '{\"thumb\": {}}', '{\"wanted\": 1}', 'aa', 0)",
    "INSERT INTO guideline VALUES (1, 1, 1, 'h', '\"Look.\"', 0)",
    "INSERT INTO text VALUES ('" + hash_bytes(b"[]") + "', '[]')",
    "INSERT INTO item VALUES (1, 1, 'k', 0, 'thumb', '"
    + hash_bytes(b"[]")
    + "', 1, 0, 0.0, NULL, FALSE, FALSE, FALSE, NULL, NULL)",
    "INSERT INTO answer VALUES (1, 0, '" + hash_bytes(b"[]") + "', NULL, NULL, NULL)",
)


def test_what_is_no_store_is_refused_with_words(tmp_path: Path) -> None:
    (tmp_path / "notes.db").write_text("shopping list " * 100)
    with pytest.raises(DataError, match="no store of labels"):
        open_store(str(tmp_path / "notes.db"))
    assert (tmp_path / "notes.db").read_text() == "shopping list " * 100
    with pytest.raises(DataError, match="there is no store of labels here"):
        open_store(str(tmp_path / "none.db"))
    assert not (tmp_path / "none.db").exists()
    with pytest.raises(ConfigError, match="in memory is lost"):
        open_store("sqlite://")
    with pytest.raises(ConfigError, match="sqlite and postgresql are known"):
        open_store("mysql://me:hunter2@host/db")


@pytest.mark.postgres
def test_a_server_that_does_not_answer_is_named_without_its_password() -> None:
    with pytest.raises(DataError, match="cannot be opened") as refused:
        open_store("postgresql://me:hunter2@127.0.0.1:1/labels")
    assert "hunter2" not in str(refused.value)


def test_a_text_is_kept_once(store: Store) -> None:
    project = project_with(store, [Draft(prompt=says("user", "the same"), round=number) for number in range(5)])
    count = select(func.count()).select_from(tables.body)
    assert store.read(lambda connection: connection.scalar(count)) == 1
    added = add_items(store, project, [Draft(prompt=says("user", "the same"), round=3)])
    assert (added.items, added.known) == (0, 1)


def test_the_same_answers_in_another_order_are_the_same_item(store: Store) -> None:
    project = project_with(store, [pair(0)])
    draft = pair(0)
    turned = Draft(prompt=draft.prompt, answers=draft.answers[::-1])
    assert add_items(store, project, [turned]).known == 1


def test_a_text_that_was_changed_is_noticed(store: Store) -> None:
    project_with(store, [pair(0)])
    digest, _ = encode_messages(says("assistant", "first of 0"))
    _, other = encode_messages(says("assistant", "buy now"))
    change = tables.body.update().where(tables.body.c.hash == digest).values(body=other)
    store.write(lambda connection: connection.execute(change))
    with pytest.raises(DataError, match="was changed"):
        store.read(lambda connection: read_texts(connection, [digest]))


def test_items_are_added_all_or_none(store: Store) -> None:
    project = new_project(store, "shop", ["pair"], "look")
    with pytest.raises(DataError, match="0 answers are asked as 'write'"):
        add_items(store, project, [pair(0), Draft(prompt=says("user", "write"))])
    count = select(func.count()).select_from(tables.item)
    assert store.read(lambda connection: connection.scalar(count)) == 0


def test_an_error_in_a_group_undoes_its_own_work_alone(store: Store) -> None:
    def spoilt(connection: object) -> None:
        connection.execute(text("INSERT INTO text VALUES ('b', 'x')"))  # pyright: ignore
        raise DataError("no")

    def write(work: Callable[..., object]) -> None:
        try:
            store.append(work)
        except DataError:
            errors.append("no")

    errors: list[str] = []
    works = [
        *(lambda c, n=n: c.execute(text(f"INSERT INTO text VALUES ('a{n}', 'x')")) for n in range(10)),
        *[spoilt] * 5,
    ]
    threads = [Thread(target=write, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == ["no"] * 5
    hashes = store.read(lambda connection: set(connection.scalars(select(tables.body.c.hash))))
    assert hashes == {f"a{number}" for number in range(10)}
