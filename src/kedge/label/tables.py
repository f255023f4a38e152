"""The tables of the store, the same on SQLite and PostgreSQL.

Texts live in a table of their own, by hash, so that assignment reads narrow rows. Times are whole milliseconds since
1970 (UTC). JSON is kept as ASCII text: both databases give back the bytes that they were given.
"""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Dialect,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    text,
)


class Json(TypeDecorator[Any]):
    """A JSON value as ASCII text with sorted keys: what PostgreSQL's text cannot hold (NUL) is escaped."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else canonical_json(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        return None if value is None else json.loads(value)


def canonical_json(value: Any) -> str:
    """One text for one value.

    >>> canonical_json({"b": "ä", "a": [1, None]})
    '{"a":[1,null],"b":"\\\\u00e4"}'
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


# SQLite counts rows only in a column that is exactly INTEGER.
_Id = BigInteger().with_variant(Integer(), "sqlite")
_Hash = String(64)
_Millis = BigInteger()

METADATA = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def _id() -> Column[int]:
    return Column("id", _Id, primary_key=True, autoincrement=True)


def _to(name: str, target: str, *, optional: bool = False, kind: Any = _Id) -> Column[Any]:
    return Column(name, kind, ForeignKey(target), nullable=optional)


def _need(name: str, kind: Any) -> Column[Any]:
    return Column(name, kind, nullable=False)


project = Table(
    "project",
    METADATA,
    _id(),
    Column("name", String(100), nullable=False, unique=True),
    _need("questions", Json),
    _need("settings", Json),
    _need("secret", String(64)),
    _need("at", _Millis),
)
guideline = Table(
    "guideline",
    METADATA,
    _id(),
    _to("project", "project.id"),
    _need("version", Integer),
    _need("hash", _Hash),
    _need("body", Json),
    _need("at", _Millis),
    UniqueConstraint("project", "version"),
)
person = Table(
    "person",
    METADATA,
    _id(),
    Column("uid", String(32), nullable=False, unique=True),
    Column("email", String(320), unique=True),
    Column("password", Text),
    _need("role", String(20)),
    _need("languages", Json),
    _need("takes_harm", Boolean),
    _need("at", _Millis),
    Column("forgotten", _Millis),
)
session = Table(
    "session",
    METADATA,
    Column("hash", _Hash, primary_key=True),
    _to("person", "person.id"),
    _need("csrf", String(64)),
    _need("at", _Millis),
    _need("last_seen", _Millis),
    Index("ix_session_person", "person"),
)
invite = Table(
    "invite",
    METADATA,
    Column("hash", _Hash, primary_key=True),
    _to("project", "project.id"),
    _need("email", String(320)),
    _need("role", String(20)),
    _need("at", _Millis),
    _need("expires", _Millis),
    Column("used", _Millis),
    Index("ix_invite_email", "email"),
)
member = Table(
    "member",
    METADATA,
    Column("project", _Id, ForeignKey("project.id"), primary_key=True, autoincrement=False),
    Column("person", _Id, ForeignKey("person.id"), primary_key=True, autoincrement=False),
    _need("quiz_tries", Integer),
    Column("passed", _Millis),
    Column("paused", _Millis),
    _need("gold_seen", Integer),
    _need("gold_right", Integer),
    _need("at", _Millis),
)
"""Who works in a project. Gold up to the last pause that a manager ended counts no more: `gold_seen`, `gold_right`."""
bearer = Table(
    "bearer",
    METADATA,
    Column("hash", _Hash, primary_key=True),
    _to("person", "person.id"),
    _need("at", _Millis),
    Column("revoked", _Millis),
    Index("ix_bearer_person", "person"),
)
body = Table("text", METADATA, Column("hash", _Hash, primary_key=True), _need("body", Text))
item = Table(
    "item",
    METADATA,
    _id(),
    _to("project", "project.id"),
    _need("key", _Hash),
    _need("round", Integer),
    _need("kind", String(20)),
    _to("prompt", "text.hash", kind=_Hash),
    _need("wanted", Integer),
    _need("have", Integer),
    _need("priority", Float(53)),
    Column("propensity", Float(53)),
    _need("is_gold", Boolean),
    _need("is_heldout", Boolean),
    _need("is_harmful", Boolean),
    Column("language", String(40)),
    Column("origin", String(2000)),
    Column("words", Integer),
    Column("repeats", _Id, ForeignKey("item.id")),
    UniqueConstraint("project", "key"),
    Index("ix_item_tally", "project", "is_gold", "repeats", "wanted"),
)
"""`words` are those of prompt and answers; `repeats` is the item that somebody is asked again, for that one alone."""
Index(
    "ix_item_open",
    item.c.project,
    item.c.priority.desc(),
    item.c.id,
    sqlite_where=text("have < wanted"),
    postgresql_where=text("have < wanted"),
)
Index("ix_item_gold", item.c.project, item.c.key, sqlite_where=text("is_gold"), postgresql_where=text("is_gold"))
Index(
    "ix_item_repeats",
    item.c.repeats,
    sqlite_where=text("repeats IS NOT NULL"),
    postgresql_where=text("repeats IS NOT NULL"),
)
answer = Table(
    "answer",
    METADATA,
    Column("item", _Id, ForeignKey("item.id"), primary_key=True, autoincrement=False),
    Column("place", Integer, primary_key=True, autoincrement=False),
    _to("text", "text.hash", kind=_Hash),
    Column("model", String(1000)),
    Column("seed", BigInteger),
    Column("scores", Json),
)
assignment = Table(
    "assignment",
    METADATA,
    Column("id", String(32), primary_key=True),
    _to("project", "project.id"),
    _to("item", "item.id"),
    _to("person", "person.id"),
    _to("guideline", "guideline.id"),
    _need("order", Json),
    _need("state", String(10)),
    _need("leased_until", _Millis),
    _need("seconds", Float(53)),
    Column("is_right", Integer),
    UniqueConstraint("item", "person"),
    Index("ix_assignment_tally", "project", "person", "state", "is_right", "seconds"),
)
Index(
    "ix_assignment_leased",
    assignment.c.leased_until,
    sqlite_where=text("state = 'leased'"),
    postgresql_where=text("state = 'leased'"),
)
judgment = Table(
    "judgment",
    METADATA,
    Column("seq", _Id, primary_key=True, autoincrement=False),
    _to("assignment", "assignment.id", kind=String(32)),
    _need("verdict", String(10)),
    Column("outcome", Integer),
    Column("ranking", Json),
    Column("axes", Json),
    Column("reason", Json),
    _to("edit", "text.hash", optional=True, kind=_Hash),
    _need("seconds", Float(53)),
    _need("idle_seconds", Float(53)),
    _to("guideline", "guideline.id"),
    Column("supersedes", _Id, ForeignKey("judgment.seq"), unique=True),
    _need("at", _Millis),
    _need("hash", _Hash),
    Index("ix_judgment_assignment", "assignment"),
)
Index(
    "uq_judgment_first",
    judgment.c.assignment,
    unique=True,
    sqlite_where=text("supersedes IS NULL"),
    postgresql_where=text("supersedes IS NULL"),
)
Index(
    "ix_judgment_decided",
    judgment.c.assignment,
    sqlite_where=text("verdict = 'decided'"),
    postgresql_where=text("verdict = 'decided'"),
)
flag = Table(
    "flag",
    METADATA,
    _id(),
    _to("judgment", "judgment.seq"),
    _need("kind", String(20)),
    Column("text", Json),
    Index("ix_flag_judgment", "judgment"),
)
daily = Table(
    "daily",
    METADATA,
    Column("project", _Id, ForeignKey("project.id"), primary_key=True, autoincrement=False),
    Column("day", Integer, primary_key=True, autoincrement=False),
    _need("judgments", BigInteger),
)
"""Judgments a day (UTC, numbered from 1970): gold, skips and corrections among them, undoing and deciding not."""
docket = Table(
    "docket",
    METADATA,
    Column("item", _Id, ForeignKey("item.id"), primary_key=True, autoincrement=False),
    _to("project", "project.id"),
    _need("is_split", Boolean),
    _need("spread", Integer),
    _to("doubted", "person.id", optional=True),
    Index("ix_docket_widest", "project", "is_split", "spread", "item"),
)
"""Items that a reviewer is to look at: people are `spread` steps apart, or a label is of who was wrong on gold."""
gold = Table(
    "gold",
    METADATA,
    Column("item", _Id, ForeignKey("item.id"), primary_key=True, autoincrement=False),
    _need("expected", Json),
    _need("tolerance", Integer),
    Column("explanation", Json),
)
chat = Table(
    "chat",
    METADATA,
    _id(),
    _to("project", "project.id"),
    _to("person", "person.id"),
    _need("models", Json),
    _need("at", _Millis),
)
turn = Table(
    "turn",
    METADATA,
    _id(),
    _to("chat", "chat.id"),
    _need("number", Integer),
    _need("role", String(20)),
    _to("text", "text.hash", kind=_Hash),
    Column("model", String(1000)),
    _need("at", _Millis),
)
thumb = Table(
    "thumb",
    METADATA,
    _id(),
    _to("turn", "turn.id"),
    _to("person", "person.id"),
    _need("value", Integer),
    Column("reason", Json),
    _to("edit", "text.hash", optional=True, kind=_Hash),
    _need("at", _Millis),
)
call = Table(
    "call",
    METADATA,
    Column("hash", _Hash, primary_key=True),
    Column("reply", Json),
    _need("tokens_in", Integer),
    _need("tokens_out", Integer),
    _need("usd", Float(53)),
    _need("latency", Float(53)),
    Column("error", Json),
    _need("at", _Millis),
)
export = Table(
    "export",
    METADATA,
    _id(),
    _to("project", "project.id"),
    _need("hash", _Hash),
    _need("as_of", BigInteger),
    _need("filter", Json),
    _to("who", "person.id", optional=True),
    _need("at", _Millis),
    Index("ix_export_project_as_of", "project", "as_of"),
)
audit = Table(
    "audit",
    METADATA,
    Column("seq", _Id, primary_key=True, autoincrement=False),
    _need("at", _Millis),
    _to("who", "person.id", optional=True),
    _need("action", String(40)),
    _need("about", Json),
    _need("hash", _Hash),
)
chain = Table(
    "chain", METADATA, Column("name", String(20), primary_key=True), _need("seq", BigInteger), _need("hash", _Hash)
)
"""The last number and hash of judgments and of the audit. Whoever adds a row holds its row here until the commit, so
that numbers are given in the order of commits: what `as_of` names never changes."""
