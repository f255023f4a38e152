"""How far certain items of a project are: what a run waits for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from kedge.label import tables
from kedge.label.database import Store
from kedge.label.incoming import Draft
from kedge.label.items import key_of
from kedge.label.projects import Project

_BATCH = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Of certain items: their numbers, and the labels that they want and have."""

    items: tuple[int, ...]
    wanted: int
    given: int
    """At most as many as are wanted of each."""
    done: int
    """Items that have all their labels."""
    skipped: int
    """Items that lack labels and that somebody has skipped."""

    @property
    def share(self) -> float:
        return self.given / self.wanted if self.wanted else 1.0


def progress_of(store: Store, project: Project, drafts: Sequence[Draft]) -> Progress:
    """How far the items of these drafts are; those that the project does not have are none."""
    keys = list({key_of(draft) for draft in drafts})
    return store.read(lambda connection: _progress(connection, project, keys))


def _progress(connection: Connection, project: Project, keys: Sequence[str]) -> Progress:
    item, assignment = tables.item, tables.assignment
    numbers: list[int] = []
    wanted = given = done = skipped = 0
    for batch in _batches(keys):
        known = select(item.c.id, item.c.wanted).where(item.c.project == project.id, item.c.key.in_(batch))
        rows = connection.execute(known).all()
        states = (
            select(assignment.c.item, assignment.c.state, func.count())
            .where(assignment.c.item.in_([row.id for row in rows]), assignment.c.state.in_(("done", "skipped")))
            .group_by(assignment.c.item, assignment.c.state)
        )
        counts = {(number, state): count for number, state, count in connection.execute(states)}
        for row in rows:
            have = min(row.wanted, counts.get((row.id, "done"), 0))
            numbers.append(row.id)
            wanted, given, done = wanted + row.wanted, given + have, done + (have == row.wanted)
            skipped += have < row.wanted and (row.id, "skipped") in counts
    return Progress(items=tuple(sorted(numbers)), wanted=wanted, given=given, done=done, skipped=skipped)


def _batches(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    return (keys[start : start + _BATCH] for start in range(0, len(keys), _BATCH))
