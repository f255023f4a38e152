"""People: invitations that work once, passwords (argon2id), sessions, and identities that are dropped on request.

Tokens and session ids are kept as hashes: who reads the database cannot use them.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from typing import Literal, get_args

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError
from sqlalchemy import Connection, Row, delete, insert, select, update

from kedge.core.errors import ConfigError, DataError
from kedge.core.suggest import did_you_mean
from kedge.label import tables
from kedge.label.audit import note
from kedge.label.database import Store
from kedge.label.projects import Project

Role = Literal["owner", "manager", "annotator", "auditor", "machine"]
ROLES: tuple[Role, ...] = get_args(Role)
INVITE_MS = 72 * 3600 * 1000
IDLE_MS = 12 * 3600 * 1000
_SEEN_MS = 60 * 1000
"""How exactly it is kept when a session was last used: not every request need write."""
LEAST_PASSWORD = 10
_EMAIL = re.compile(r"[^@\s\x00-\x1f]{1,64}@[^@\s\x00-\x1f]{1,255}")
_HASHER = PasswordHasher()  # argon2id


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    id: int
    uid: str
    """Random, and kept when the identity is forgotten."""
    email: str | None
    role: Role
    languages: tuple[str, ...] = ()
    takes_harm: bool = False


def pseudonym(project: Project, uid: str) -> str:
    """Who a person is in exports of this project: an HMAC, which says nothing of other projects, nor of the address."""
    return hmac.new(bytes.fromhex(project.secret), uid.encode(), sha256).hexdigest()[:32]


def pseudonyms(store: Store, project: Project) -> dict[str, str]:
    """By address, who people are in exports of this project."""
    table = tables.person
    query = select(table.c.email, table.c.uid).where(table.c.email.is_not(None))
    rows = store.read(lambda connection: connection.execute(query).all())
    return {row.email: pseudonym(project, row.uid) for row in rows}


def add_person(
    store: Store,
    email: str | None,
    role: Role = "annotator",
    *,
    languages: Sequence[str] = (),
    takes_harm: bool = False,
    password: str | None = None,
) -> Person:
    """Make an account; machines and the one person of a local store need no password."""
    return store.write(
        lambda connection: _add_person(
            store, connection, email, role, languages=languages, takes_harm=takes_harm, password=password
        )
    )


def _add_person(
    store: Store,
    connection: Connection,
    email: str | None,
    role: Role,
    *,
    languages: Sequence[str] = (),
    takes_harm: bool = False,
    password: str | None = None,
) -> Person:
    address = None if email is None else check_email(email)
    if address is not None and _by_email(connection, address) is not None:
        raise DataError(f"{address}: this person has an account already")
    uid = store.token()
    values = {
        "uid": uid,
        "email": address,
        "password": None if password is None else _HASHER.hash(password),
        "role": check_role(role),
        "languages": list(languages),
        "takes_harm": takes_harm,
        "at": store.now(),
    }
    number = connection.execute(insert(tables.person).values(**values).returning(tables.person.c.id)).scalar_one()
    note(store, connection, "person.new", {"person": number, "role": role})
    return Person(id=number, uid=uid, email=address, role=role, languages=tuple(languages), takes_harm=takes_harm)


def check_email(email: str) -> str:
    """The address in lower case; an error where it is none."""
    if not _EMAIL.fullmatch(email):
        raise ConfigError(f"{email!r}: not an e-mail address")
    return email.lower()


def check_role(role: str) -> Role:
    for known in ROLES:
        if known == role:
            return known
    raise ConfigError(f"--role {role}: there is no such role{did_you_mean(role, ROLES)}; one of {', '.join(ROLES)}")


def make_invite(store: Store, project: Project, email: str, role: str, *, again: bool = False) -> str:
    """The token of a link that works once, for 72 hours; only its hash is kept. An earlier one stops working.

    With `again` who has an account may be invited too: to another project, or to a new password.
    """
    address, checked = check_email(email), check_role(role)
    if checked == "machine":
        raise ConfigError("--role machine: a machine has no password; `kedge label token` gives it a token")

    def work(connection: Connection) -> str:
        known = _by_email(connection, address)
        if known is not None and not again:
            raise DataError(f"{address}: this person has an account already")
        if known is not None and known.role != checked:
            raise DataError(f"{address}: this person has an account already, as {known.role}; --role {known.role}")
        table, token, now = tables.invite, store.token(256), store.now()
        connection.execute(delete(table).where(table.c.email == address, table.c.used.is_(None)))
        values = {"project": project.id, "email": address, "role": checked, "at": now, "expires": now + INVITE_MS}
        connection.execute(insert(table).values(hash=_hashed(token), **values))
        note(store, connection, "invite.new", {"project": project.name, "role": checked})
        return token

    return store.write(work)


def accept_invite(store: Store, token: str, password: str) -> Person:
    """The account of an invitation, which is used up by it."""
    if len(password) < LEAST_PASSWORD:
        raise DataError(f"the password has {len(password)} characters; at least {LEAST_PASSWORD} are needed")

    def work(connection: Connection) -> Person:
        table, now = tables.invite, store.now()
        used = connection.execute(
            update(table)
            .where(table.c.hash == _hashed(token), table.c.used.is_(None), table.c.expires > now)
            .values(used=now)
            .returning(table.c.project, table.c.email, table.c.role)
        ).first()
        if used is None:
            raise DataError("this invitation is unknown, used or older than 72 hours; ask for a new one")
        known = _by_email(connection, used.email)
        if known is None:
            person = _add_person(store, connection, used.email, check_role(used.role), password=password)
        else:
            person = _person(known)
            _set_password(store, connection, person, password)
        put_member(store, connection, used.project, person.id)
        return person

    return store.write(work)


def _set_password(store: Store, connection: Connection, person: Person, password: str) -> None:
    """A new password, which ends all sessions."""
    table = tables.person
    connection.execute(update(table).where(table.c.id == person.id).values(password=_HASHER.hash(password)))
    connection.execute(delete(tables.session).where(tables.session.c.person == person.id))
    note(store, connection, "password.new", {"person": person.id})


def put_member(store: Store, connection: Connection, project: int, person: int) -> None:
    """Let a person work in a project; who does so already stays as they are."""
    table = tables.member
    mine = select(table.c.person).where(table.c.project == project, table.c.person == person)
    if connection.execute(mine).first() is None:
        values = {"project": project, "person": person, "quiz_tries": 0, "gold_seen": 0, "gold_right": 0}
        connection.execute(insert(table).values(**values, at=store.now()))
        note(store, connection, "member.new", {"project": project, "person": person})


def new_bearer(store: Store, machine: Person) -> str:
    """A token with which a machine works, shown once; only its hash is kept. Earlier ones stop working."""
    if machine.role != "machine":
        raise DataError(f"{machine.email}: tokens are for machines; this is an account with role '{machine.role}'")
    token = store.token(256)

    def work(connection: Connection) -> str:
        table, now = tables.bearer, store.now()
        connection.execute(
            update(table).where(table.c.person == machine.id, table.c.revoked.is_(None)).values(revoked=now)
        )
        connection.execute(insert(table).values(hash=_hashed(token), person=machine.id, at=now))
        note(store, connection, "bearer.new", {"person": machine.id})
        return token

    return store.write(work)


def find_bearer(store: Store, token: str) -> Person | None:
    """The machine whose token it is; None where it is unknown or revoked."""
    table, person = tables.bearer, tables.person
    query = (
        select(person)
        .join(table, table.c.person == person.c.id)
        .where(table.c.hash == _hashed(token), table.c.revoked.is_(None), person.c.forgotten.is_(None))
    )
    row = store.read(lambda connection: connection.execute(query).first())
    return None if row is None or row.role != "machine" else _person(row)


def check_password(store: Store, email: str, password: str) -> Person | None:
    """The person, where the password is right. An unknown address takes as long as a wrong password."""
    row = store.read(lambda connection: _by_email(connection, email.lower()))
    known = row.password if row is not None and row.password else _dummy_hash()
    try:
        is_right = _HASHER.verify(known, password)
    except (VerificationError, InvalidHashError):
        is_right = False
    return _person(row) if row is not None and row.password and is_right else None


@cache
def _dummy_hash() -> str:
    return _HASHER.hash("no password is this one")


def find_person(store: Store, email: str) -> Person:
    row = store.read(lambda connection: _by_email(connection, email.lower()))
    if row is None:
        raise DataError(f"{email}: nobody with this address has an account here")
    return _person(row)


def open_session(store: Store, person: Person) -> tuple[str, str]:
    """The id and the CSRF token of a new session; only the hash of the id is kept."""
    identity, csrf, now = store.token(256), store.token(256), store.now()
    values = {"hash": _hashed(identity), "person": person.id, "csrf": csrf, "at": now, "last_seen": now}
    store.write(lambda connection: connection.execute(insert(tables.session).values(**values)))
    return identity, csrf


def find_session(store: Store, identity: str) -> tuple[Person, str] | None:
    """Whose session it is, with its CSRF token; None where it ended, or was idle for 12 hours."""
    table, digest = tables.session, _hashed(identity)

    def look(connection: Connection) -> Row[tuple[object, ...]] | None:
        return connection.execute(select(table).where(table.c.hash == digest)).first()

    def person_of(connection: Connection, number: int) -> Person:
        return _person(connection.execute(select(tables.person).where(tables.person.c.id == number)).one())

    now, session = store.now(), store.read(look)
    if session is None or session.last_seen <= now - IDLE_MS:
        return None
    if session.last_seen < now - _SEEN_MS:
        seen = update(table).where(table.c.hash == digest).values(last_seen=now)
        store.write(lambda connection: connection.execute(seen))
    return store.read(lambda connection: person_of(connection, session.person)), session.csrf


def close_session(store: Store, identity: str) -> None:
    table = tables.session
    store.write(lambda connection: connection.execute(delete(table).where(table.c.hash == _hashed(identity))))


def forget(store: Store, email: str) -> int:
    """Drop the identity of a person: address, password, languages, sessions, invitations. Labels stay.

    Returns how many judgments stay.
    """
    person = find_person(store, email)

    def work(connection: Connection) -> int:
        gone = {"email": None, "password": None, "languages": [], "takes_harm": False, "forgotten": store.now()}
        connection.execute(update(tables.person).where(tables.person.c.id == person.id).values(**gone))
        connection.execute(delete(tables.session).where(tables.session.c.person == person.id))
        connection.execute(delete(tables.bearer).where(tables.bearer.c.person == person.id))
        connection.execute(delete(tables.invite).where(tables.invite.c.email == person.email))
        note(store, connection, "person.forget", {"person": person.id})
        judgments = select(tables.judgment.c.seq).join(tables.assignment).where(tables.assignment.c.person == person.id)
        return len(connection.execute(judgments).all())

    stay = store.write(work)
    if store.is_sqlite:
        # The journal beside the file has the old pages until they are moved.
        connection = store.engine.raw_connection()
        connection.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        connection.close()
    return stay


def _by_email(connection: Connection, email: str) -> Row[tuple[object, ...]] | None:
    return connection.execute(select(tables.person).where(tables.person.c.email == email)).first()


def _person(row: Row[tuple[object, ...]]) -> Person:
    return Person(
        id=row.id,
        uid=row.uid,
        email=row.email,
        role=row.role,
        languages=tuple(row.languages),
        takes_harm=row.takes_harm,
    )


def _hashed(token: str) -> str:
    return sha256(token.encode()).hexdigest()
