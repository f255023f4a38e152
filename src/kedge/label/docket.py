"""What is kept beside the judgments as they come, so that no page reads all of them: judgments a day, and the items
that a reviewer is to look at.

Both follow from the judgments. They are brought up to date in the transaction that adds one, after its number is taken:
from there on one transaction at a time is under way, so that each sees the votes of those before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, Select, bindparam, delete, exists, insert, select, update

from kedge.label import tables
from kedge.label.audit import append_row

DAY_MS = 24 * 3600 * 1000
QUESTION = "guideline"
"""The kind of flag that asks for a clearer guideline."""
NO_WORK = ("undone", "decided")
"""Verdicts that are no work of an annotator."""


def append_judgment(connection: Connection, project: int, item: int, values: Mapping[str, Any]) -> int:
    """Number and chain a judgment on an item, count it, and look whether people disagree about the item now."""
    seq = append_row(connection, tables.judgment, values)
    if values["verdict"] not in NO_WORK:
        _count(connection, project, values["at"] // DAY_MS)
    look_at(connection, item)
    return seq


_DAILY = tables.daily
_ONE_MORE = (
    update(_DAILY)
    .where(_DAILY.c.project == bindparam("of"), _DAILY.c.day == bindparam("on"))
    .values(judgments=_DAILY.c.judgments + 1)
)


def _count(connection: Connection, project: int, day: int) -> None:
    if not connection.execute(_ONE_MORE, {"of": project, "on": day}).rowcount:
        connection.execute(insert(_DAILY), {"project": project, "day": day, "judgments": 1})


def look_at(connection: Connection, item: int) -> None:
    """Put an item on the docket, or take it off, by the votes that stand now."""
    votes = connection.execute(_VOTES, {"item": item}).all()
    listed = connection.execute(_LISTED, {"item": item}).first()
    if listed is not None or len(votes) > 1:
        _keep(connection, item, votes, listed, None if listed is None else listed.doubted)


def doubt(connection: Connection, person: int, items: Iterable[int]) -> int:
    """Put on the docket what a person said of these items, whoever agrees; returns how many there are to decide."""
    # As whoever adds a judgment does: the docket changes in one transaction at a time.
    connection.execute(select(tables.chain).where(tables.chain.c.name == tables.judgment.name).with_for_update())
    count = 0
    for item in items:
        votes = connection.execute(_VOTES, {"item": item}).all()
        listed = connection.execute(_LISTED, {"item": item}).first()
        count += _keep(connection, item, votes, listed, person)
    return count


def _keep(
    connection: Connection, item: int, votes: Sequence[Row[Any]], listed: Row[Any] | None, doubted: int | None
) -> bool:
    """Write down whether a reviewer is to look at an item; returns whether that is so."""
    docket = tables.docket
    is_split = is_disagreement(votes)
    is_doubted = any(row.person == doubted and row.verdict != "skip" for row in votes)
    is_open = (is_split or is_doubted) and not _is_settled(connection, votes)
    values = {
        "is_split": is_split,
        "spread": spread(votes) if is_split else 0,
        "doubted": doubted if is_doubted else None,
    }
    if listed is None and is_open:
        connection.execute(insert(docket).values(item=item, project=votes[0].project, **values))
    elif is_open:
        connection.execute(update(docket).where(docket.c.item == item).values(**values))
    elif listed is not None:
        connection.execute(delete(docket).where(docket.c.item == item))
    return is_open


_LISTED = select(tables.docket).where(tables.docket.c.item == bindparam("item"))


def _votes() -> Select[*tuple[Any, ...]]:
    """Judgments of an item with who gave them, that nothing supersedes; none of gold and of repeated items, about which
    nobody decides."""
    judgment, assignment, item = tables.judgment, tables.assignment, tables.item
    later = tables.judgment.alias("later")
    own = (judgment.c.seq, judgment.c.verdict, judgment.c.outcome, judgment.c.ranking)
    return (
        select(*own, assignment.c.person, assignment.c.project)
        .select_from(item)
        .join(assignment, assignment.c.item == item.c.id)
        .join(judgment, judgment.c.assignment == assignment.c.id)
        .where(
            item.c.id == bindparam("item"),
            ~item.c.is_gold,
            item.c.repeats.is_(None),
            judgment.c.verdict != "undone",
            ~exists().where(later.c.supersedes == judgment.c.seq),
        )
    )


_VOTES = _votes()


def _is_settled(connection: Connection, votes: Sequence[Row[Any]]) -> bool:
    """Whether a reviewer has decided, or asked for a clearer guideline."""
    if any(row.verdict == "decided" for row in votes):
        return True
    skips, flag = [row.seq for row in votes if row.verdict == "skip"], tables.flag
    asked = select(flag.c.id).where(flag.c.judgment.in_(skips), flag.c.kind == QUESTION)
    return bool(skips) and connection.execute(asked).first() is not None


def is_disagreement(votes: Sequence[Any]) -> bool:
    """Votes for both sides, one for a side and one that both are bad, or rankings that differ."""
    sides = {(row.outcome > 0) - (row.outcome < 0) for row in votes if row.outcome is not None} - {0}
    is_bad = any(row.verdict == "both_bad" for row in votes)
    rankings = {tuple(row.ranking) for row in votes if row.ranking is not None}
    return len(sides) + is_bad > 1 or len(rankings) > 1


def spread(votes: Sequence[Any]) -> int:
    """How far votes are apart, in steps."""
    outcomes = [row.outcome or 0 for row in votes if row.verdict != "skip"]
    return max(outcomes) - min(outcomes)
