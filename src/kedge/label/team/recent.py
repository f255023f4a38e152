"""The newest judgments of a project, by their numbers: of a store with a million of them pages look at the last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, Select, exists, select

from kedge.label import tables
from kedge.label.audit import last_seq
from kedge.label.projects import Project


def recent_judgments(
    connection: Connection, project: Project, *, most: int, before: int | None = None
) -> list[Row[Any]]:
    """Judgments that nothing supersedes among the last `most` of the store up to number `before`, newest first."""
    last = last_seq(connection, tables.judgment) if before is None else before
    judgment = tables.judgment
    query = standing(project).where(judgment.c.seq <= last, judgment.c.seq > last - most)
    return list(connection.execute(query.order_by(judgment.c.seq.desc())).all())


def judgments_of(connection: Connection, project: Project, items: Sequence[int]) -> dict[int, list[Row[Any]]]:
    """All standing judgments of these items, by item, oldest first."""
    by_item: dict[int, list[Row[Any]]] = {}
    # Sorted here: to have them in order SQLite would go through all judgments there are.
    rows = connection.execute(standing(project).where(tables.assignment.c.item.in_(items)))
    for row in sorted(rows, key=lambda row: row.seq):
        by_item.setdefault(row.item, []).append(row)
    return by_item


def standing(project: Project) -> Select[*tuple[Any, ...]]:
    """Judgments with their item and person, gold apart, that nothing supersedes."""
    judgment, assignment, item = tables.judgment, tables.assignment, tables.item
    later = judgment.alias("later")
    verdict = (judgment.c.verdict, judgment.c.outcome, judgment.c.ranking, judgment.c.axes, judgment.c.reason)
    about = (assignment.c.item, assignment.c.person, item.c.prompt, item.c.wanted)
    return (
        select(judgment.c.seq, judgment.c.at, *verdict, *about)
        .join(assignment, assignment.c.id == judgment.c.assignment)
        .join(item, item.c.id == assignment.c.item)
        .where(
            # As a sum: by the index of projects SQLite would begin with all of their assignments.
            assignment.c.project + 0 == project.id,
            ~item.c.is_gold,
            item.c.repeats.is_(None),
            judgment.c.verdict != "undone",
            ~exists().where(later.c.supersedes == judgment.c.seq),
        )
    )
