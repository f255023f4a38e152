"""Items that a person is asked a second time, sides swapped: whoever reads says the same again.

Such an item is a copy for that person alone. It looks like any other, wants no label of others, and is in no export.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, and_, case, exists, func, insert, or_, select

from kedge.core.files import hash_json
from kedge.feedback.people import Share, share_of
from kedge.label import tables
from kedge.label.accounts import Person
from kedge.label.database import Store
from kedge.label.projects import Project

AFTER_MS = 10 * 60 * 1000
"""An item is not asked again as long as it is remembered, and as its judgment can be undone."""
_MOST = 5_000
"""Repeated items that are compared, those that were added last."""


def lease_again(
    store: Store, connection: Connection, project: Project, person: Person, *, until: int, kind: str | None = None
) -> str | None:
    """Now and then, by the project's share: an item that the person has judged, leased once more; else None."""
    if store.randomness.random() >= project.settings.repeat_share:
        return None
    query = _judged(project, person, before=store.now() - AFTER_MS)
    if kind is not None:
        query = query.where(tables.item.c.kind == kind)
    # Ids are random, so that the first one after a random place is a random one.
    after = query.where(tables.assignment.c.id > store.token())
    earlier = connection.execute(after).first() or connection.execute(query).first()
    if earlier is None:
        return None
    item = _copy(connection, project, person, earlier.item)
    number = store.token()
    connection.execute(
        insert(tables.assignment),
        {
            "id": number,
            "project": project.id,
            "item": item,
            "person": person.id,
            "guideline": project.guideline,
            "order": earlier.order[::-1],
            "state": "leased",
            "leased_until": until,
            "seconds": 0.0,
            "is_right": None,
        },
    )
    return number


def _judged(project: Project, person: Person, *, before: int) -> Select[Any, Any]:
    """An item that the person judged before a time and that was not asked again; not gold, nor one to write."""
    assignment, item, judgment = tables.assignment, tables.item, tables.judgment
    copy, own = tables.item.alias("copy"), tables.assignment.alias("own")
    return (
        select(assignment.c.item, assignment.c.order)
        .join(item, item.c.id == assignment.c.item)
        .join(judgment, judgment.c.assignment == assignment.c.id)
        .where(
            assignment.c.project == project.id,
            assignment.c.person == person.id,
            assignment.c.state == "done",
            assignment.c.is_right.is_(None),
            ~item.c.is_gold,
            item.c.repeats.is_(None),
            item.c.kind != "write",
            judgment.c.at <= before,
            ~exists()
            .where(copy.c.repeats == item.c.id, own.c.item == copy.c.id, own.c.person == person.id)
            .correlate(item),
        )
        .order_by(assignment.c.id)
        .limit(1)
    )


def _copy(connection: Connection, project: Project, person: Person, number: int) -> int:
    item, answer = tables.item, tables.answer
    original = connection.execute(select(item).where(item.c.id == number)).mappings().one()
    values = {name: value for name, value in original.items() if name != "id"} | {
        "key": hash_json(["again", original["key"], person.uid]),
        "wanted": 0,
        "have": 1,
        "repeats": number,
    }
    copy = connection.execute(insert(item).values(**values).returning(item.c.id)).scalar_one()
    answers = connection.execute(select(answer).where(answer.c.item == number)).mappings().all()
    if answers:
        connection.execute(insert(answer), [dict(row) | {"item": copy} for row in answers])
    return copy


def self_agreements(connection: Connection, project: Project) -> dict[int, Share]:
    """By person, how often an item got the same verdict again: the same side, the same thumb, the same order."""
    first, again, item = tables.assignment.alias("first"), tables.assignment.alias("again"), tables.item
    judged, rejudged = _last("judged"), _last("rejudged")
    compared = (
        select(again.c.person, case((_is_same(judged, rejudged), 1), else_=0).label("same"))
        .select_from(item)
        .join(again, (again.c.item == item.c.id) & (again.c.state == "done"))
        .join(first, (first.c.item == item.c.repeats) & (first.c.person == again.c.person) & (first.c.state == "done"))
        .join(judged, (judged.c.assignment == first.c.id) & ~_is_superseded(judged))
        .join(rejudged, (rejudged.c.assignment == again.c.id) & ~_is_superseded(rejudged))
        # Numbers are above 0, and the project is a sum: so SQLite begins with the few repetitions, else with all items.
        .where(item.c.repeats > 0, item.c.project + 0 == project.id)
        .order_by(item.c.repeats.desc())
        .limit(_MOST)
    ).subquery()
    counts = select(compared.c.person, func.sum(compared.c.same), func.count()).group_by(compared.c.person)
    return {person: share_of(int(same), count) for person, same, count in connection.execute(counts)}


def _is_same(judged: Any, rejudged: Any) -> ColumnElement[bool]:
    """Whether two judgments say the same, by places, whatever the sides; of steps the better answer alone."""
    return or_(
        judged.c.ranking == rejudged.c.ranking,
        and_(
            judged.c.ranking.is_(None),
            rejudged.c.ranking.is_(None),
            judged.c.verdict == rejudged.c.verdict,
            _side(judged.c.outcome) == _side(rejudged.c.outcome),
        ),
    )


def _side(outcome: ColumnElement[Any]) -> ColumnElement[int]:
    return case((outcome > 0, 1), (outcome < 0, -1), else_=0)


def _last(name: str) -> Any:
    return tables.judgment.alias(name)


def _is_superseded(judgment: Any) -> Any:
    later = tables.judgment.alias(f"after_{judgment.name}")
    return exists().where(later.c.supersedes == judgment.c.seq).correlate(judgment)
