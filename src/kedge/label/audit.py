"""Rows that are numbered and chained: each hash covers its row and the hash before it, so that a change shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Table, bindparam, insert, select, update

from kedge.core.files import hash_json
from kedge.label import tables
from kedge.label.database import Store

FIRST = "0" * 32
_BATCH = 10_000


def append_row(connection: Connection, table: Table, values: Mapping[str, Any]) -> int:
    """Add a row with the next number; whoever comes next waits until this transaction ends."""
    seq, previous = connection.execute(_TAKE, {"chain": table.name}).one()
    digest = _digest(table, {**values, "seq": seq}, previous)
    connection.execute(insert(table), {**values, "seq": seq, "hash": digest})
    connection.execute(_SEAL, {"chain": table.name, "digest": digest})
    return seq


_HEAD = tables.chain
_OF = _HEAD.c.name == bindparam("chain")
_TAKE = update(_HEAD).where(_OF).values(seq=_HEAD.c.seq + 1).returning(_HEAD.c.seq, _HEAD.c.hash)
_SEAL = update(_HEAD).where(_OF).values(hash=bindparam("digest"))


def _digest(table: Table, row: Mapping[Any, Any], previous: str) -> str:
    content = {column.name: row.get(column.name) for column in table.columns if column.name != "hash"}
    return hash_json({**content, "previous": previous})


def note(
    store: Store, connection: Connection, action: str, about: Mapping[str, Any], *, who: int | None = None
) -> None:
    """What was done, into the audit. People are named by their number: `forget` leaves the chain whole."""
    append_row(connection, tables.audit, {"at": store.now(), "who": who, "action": action, "about": dict(about)})


def last_seq(connection: Connection, table: Table) -> int:
    """The number of the last row; 0 where there is none."""
    return connection.scalar(select(tables.chain.c.seq).where(tables.chain.c.name == table.name)) or 0


def tampered(store: Store) -> list[str]:
    """What was changed, taken out or put in beside the chain: one line for each table that is not whole."""
    return store.read(lambda connection: _broken(connection, tables.audit) + _broken(connection, tables.judgment))


def _broken(connection: Connection, table: Table) -> list[str]:
    previous, number = FIRST, 0
    query = select(table).order_by(table.c.seq).execution_options(yield_per=_BATCH)
    with connection.execute(query) as rows:
        for row in rows.mappings():
            number += 1
            if problem := _problem(table, row, number, previous):
                return [problem]
            previous = row["hash"]
    last = connection.execute(select(_HEAD.c.seq, _HEAD.c.hash).where(_HEAD.c.name == table.name)).one()
    if tuple(last) != (number, previous):
        return [f"{table.name}: {number} rows are there, and {last[0]} were written; rows at the end are gone"]
    return []


def _problem(table: Table, row: Mapping[Any, Any], number: int, previous: str) -> str:
    if row["seq"] != number:
        return f"{table.name}: row {number} is gone"
    if row["hash"] != _digest(table, row, previous):
        return f"{table.name}: row {number} was changed after it was written, or the row before it"
    return ""
