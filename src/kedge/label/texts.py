"""Texts by their hash: each is kept once, however many items have it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, select
from sqlalchemy.dialects import postgresql, sqlite

from kedge.core.errors import DataError
from kedge.core.files import check_text, hash_bytes
from kedge.data.examples import Message, Messages
from kedge.data.messages import as_messages
from kedge.label import tables
from kedge.label.tables import canonical_json

_MANY = 500
"""Values in one statement: SQLite takes a bounded number of them."""


def encode_messages(messages: Messages) -> tuple[str, str]:
    """The hash and the body of a text; what UTF-8 cannot hold is refused."""
    plain = [_plain(message) for message in messages]
    encoded = canonical_json(plain)
    check_text(json.dumps(plain, ensure_ascii=False))
    return hash_bytes(encoded.encode()), encoded


def _plain(message: Message) -> dict[str, Any]:
    weight: dict[str, Any] = {} if message.is_trained else {"weight": 0}
    return {"role": message.role, "content": message.content, **weight, **(message.detail or {})}


def put_texts(connection: Connection, bodies: Mapping[str, str]) -> None:
    """Keep texts by their hash; those that are there stay."""
    make = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
    # In one order for all: two transactions that put the same texts must not wait for each other in a circle.
    rows = [{"hash": digest, "body": encoded} for digest, encoded in sorted(bodies.items())]
    for start in range(0, len(rows), _MANY):
        connection.execute(make(tables.body).values(rows[start : start + _MANY]).on_conflict_do_nothing())


def put_messages(connection: Connection, messages: Messages) -> str:
    digest, encoded = encode_messages(messages)
    put_texts(connection, {digest: encoded})
    return digest


def read_texts(connection: Connection, hashes: Iterable[str]) -> dict[str, Messages]:
    """The texts of these hashes."""
    wanted = sorted(set(hashes))
    texts: dict[str, Messages] = {}
    for start in range(0, len(wanted), _MANY):
        rows = connection.execute(select(tables.body).where(tables.body.c.hash.in_(wanted[start : start + _MANY])))
        texts.update((digest, _messages(digest, encoded)) for digest, encoded in rows)
    return texts


def _messages(digest: str, encoded: str) -> Messages:
    if hash_bytes(encoded.encode()) != digest:
        raise DataError(f"text {digest}: it was changed after it was written; restore the store from a copy")
    plain: Sequence[Any] = json.loads(encoded)
    return as_messages(plain, text_role="user", field="text") if plain else ()
