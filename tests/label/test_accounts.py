"""People: invitations, passwords, sessions, and what is left of who was forgotten."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_up import Clock, pair, people, project_with, step
from sqlalchemy import select

from kedge.core.errors import ConfigError, DataError
from kedge.label import tables
from kedge.label.accounts import (
    accept_invite,
    add_person,
    check_password,
    close_session,
    find_session,
    forget,
    make_invite,
    open_session,
)
from kedge.label.audit import tampered
from kedge.label.database import Store
from kedge.label.judging import judge
from kedge.label.status import status
from kedge.label.work import next_task

PASSWORD = "correct horse battery"


def test_an_invitation_works_once(store: Store) -> None:
    project = project_with(store, [pair(0)])
    token = make_invite(store, project, "Ann@Example.org", "manager")
    ann = accept_invite(store, token, PASSWORD)
    assert (ann.email, ann.role) == ("ann@example.org", "manager")
    with pytest.raises(DataError, match="used"):
        accept_invite(store, token, PASSWORD)


def test_an_invitation_ends_after_72_hours_and_by_a_newer_one(store: Store, clock: Clock) -> None:
    project = project_with(store, [pair(0)])
    first = make_invite(store, project, "ann@example.org", "annotator")
    second = make_invite(store, project, "ann@example.org", "annotator")
    with pytest.raises(DataError, match="unknown"):
        accept_invite(store, first, PASSWORD)
    clock.advance(72 * 60 + 1)
    with pytest.raises(DataError, match="72 hours"):
        accept_invite(store, second, PASSWORD)


def test_tokens_and_passwords_are_kept_as_hashes(store: Store) -> None:
    project = project_with(store, [pair(0)])
    token = make_invite(store, project, "ann@example.org", "annotator")
    ann = accept_invite(store, token, PASSWORD)
    identity, _ = open_session(store, ann)
    kept = store.read(
        lambda connection: [
            str(row)
            for table in (tables.invite, tables.person, tables.session, tables.audit)
            for row in connection.execute(select(table))
        ]
    )
    assert not any(secret in row for row in kept for secret in (token, identity, PASSWORD))
    assert any("$argon2id$" in row for row in kept)


def test_only_the_right_password_opens(store: Store) -> None:
    ann = add_person(store, "ann@example.org", password=PASSWORD)
    assert check_password(store, "ANN@example.org", PASSWORD) == ann
    assert check_password(store, "ann@example.org", "wrong horse") is None
    assert check_password(store, "bob@example.org", PASSWORD) is None
    add_person(store, "machine@example.org", "machine")
    assert check_password(store, "machine@example.org", "") is None


def test_sessions_end_when_idle_and_when_closed(store: Store, clock: Clock) -> None:
    ann = add_person(store, "ann@example.org")
    identity, csrf = open_session(store, ann)
    clock.advance(11 * 60)
    assert find_session(store, identity) == (ann, csrf)
    clock.advance(11 * 60)
    assert find_session(store, identity) == (ann, csrf)
    clock.advance(12 * 60 + 1)
    assert find_session(store, identity) is None
    other, _ = open_session(store, ann)
    close_session(store, other)
    assert find_session(store, other) is None


def test_forgetting_drops_the_identity_and_keeps_the_labels(store: Store, address: str) -> None:
    project = project_with(store, [pair(0)])
    (ann,) = people(store, 1)
    identity, _ = open_session(store, ann)
    task = next_task(store, project, ann)
    assert task is not None
    judge(store, project, ann, task.assignment, step(1))
    assert forget(store, "person0@example.org") == 1
    assert find_session(store, identity) is None
    assert status(store, project).given == 1
    assert "@" not in status(store, project).people[0].name
    assert tampered(store) == []
    with pytest.raises(DataError, match="nobody with this address"):
        forget(store, "person0@example.org")
    if store.is_sqlite:
        for file in Path(address).parent.glob("labels.db*"):
            assert b"person0" not in file.read_bytes(), f"{file.name} still has the address"


def test_addresses_and_roles_are_checked(store: Store) -> None:
    project = project_with(store, [pair(0)])
    for address in ("ann", "a b@example.org", "ann@", "ann@x\n.org"):
        with pytest.raises(ConfigError, match="not an e-mail address"):
            make_invite(store, project, address, "annotator")
    with pytest.raises(ConfigError, match="did you mean 'manager'"):
        make_invite(store, project, "ann@example.org", "manger")
    add_person(store, "ann@example.org")
    with pytest.raises(DataError, match="has an account already"):
        make_invite(store, project, "ANN@example.org", "annotator")
