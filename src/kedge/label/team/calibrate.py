"""A session of the worst disagreements: everybody is asked these items next, and a page lists what was said of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from sqlalchemy import Connection, func, select, update

from kedge.core.errors import DataError
from kedge.data.examples import Messages
from kedge.label import tables
from kedge.label.accounts import pseudonym
from kedge.label.audit import last_seq, note
from kedge.label.beliefs import effective
from kedge.label.database import Store
from kedge.label.export import Labelled, read_labelled
from kedge.label.projects import Project
from kedge.label.settle import ranked_pairs

ITEMS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    items: int
    """Items on which people disagree, the worst ones, one a prompt."""
    labels: int
    """Labels that are asked for besides."""
    page: str
    """Markdown, to talk about: who said what, by pseudonym."""


def calibrate(store: Store, project: Project, *, items: int = ITEMS) -> Session:
    """Put the items of worst disagreement in front of everybody who has worked in the project."""

    def work(connection: Connection) -> Session:
        as_of = last_seq(connection, tables.judgment)
        worst = _worst(connection, project, as_of, items)
        if not worst:
            raise DataError(
                f"{project.name}: there is no item on which two people disagree; agreement needs overlap "
                "(`kedge label new --overlap`)"
            )
        assignment, item = tables.assignment, tables.item
        people = connection.scalar(
            select(func.count(assignment.c.person.distinct())).where(assignment.c.project == project.id)
        )
        highest = connection.scalar(select(func.max(item.c.priority)).where(item.c.project == project.id))
        chosen = connection.execute(select(item.c.id, item.c.wanted, item.c.have).where(item.c.id.in_(worst))).all()
        labels = sum(max(0, int(people or 0) - row.have) for row in chosen)
        for row in chosen:
            values = {"wanted": max(row.wanted, people or 0), "priority": (highest or 0.0) + 1.0}
            connection.execute(update(item).where(item.c.id == row.id).values(**values))
        note(store, connection, "calibrate", {"project": project.name, "items": sorted(worst), "as_of": as_of})
        labelled = list(read_labelled(connection, project, as_of, items=worst))
        return Session(items=len(worst), labels=labels, page="\n".join(_page(project, labelled)))

    return store.write(work)


def _worst(connection: Connection, project: Project, as_of: int, count: int) -> list[int]:
    rows = connection.execute(effective(project, as_of).execution_options(yield_per=10_000))
    spread = {
        item: worth
        for item, group in groupby(rows, key=lambda row: row.item)
        if (worth := disagreement([(row.outcome, row.ranking) for row in group])) > 0
    }
    ordered = sorted(spread, key=lambda item: (-spread[item], item))
    item = tables.item
    prompts = dict(
        connection.execute(select(item.c.id, item.c.prompt).where(item.c.id.in_(ordered[: 20 * count]))).all()
    )
    one_each: dict[str, int] = {}
    for number in ordered[: 20 * count]:
        one_each.setdefault(prompts[number], number)
    return list(one_each.values())[:count]


def disagreement(verdicts: Sequence[tuple[int | None, Sequence[int] | None]]) -> float:
    """How far people are apart on an item: of steps the distance of the farthest two, of rankings the share of pairs in
    opposite order; 0 where nobody contradicts another.

    >>> disagreement([(-3, None), (2, None), (1, None)]), disagreement([(1, None), (3, None)])
    (5.0, 0.0)
    >>> disagreement([(None, [1, 2, 3]), (None, [2, 1, 3])])
    2.0
    """
    outcomes = [outcome for outcome, _ in verdicts if outcome is not None]
    rankings = [ranking for _, ranking in verdicts if ranking is not None]
    if len(rankings) > 1:
        pairs = ranked_pairs(rankings)
        return 6 * sum(min(steps) < 0 < max(steps) for _, _, steps in pairs) / len(pairs)
    if not outcomes or not min(outcomes) < 0 < max(outcomes):
        return 0.0
    return float(max(outcomes) - min(outcomes))


def _page(project: Project, labelled: Sequence[Labelled]) -> Iterator[str]:
    yield f"# {project.name}: the worst disagreements"
    yield ""
    yield "Read the guideline first. For each item: which sentence of it decides? Where none does, write one."
    for number, item in enumerate(labelled, start=1):
        yield ""
        yield f"## {number}"
        yield from _quoted("prompt", item.prompt)
        for place, answer in enumerate(item.answers):
            yield from _quoted(f"answer {_letter(place)}", answer)
        for row in item.judgments:
            reason = f": {row.reason}" if row.reason else ""
            yield f"- {pseudonym(project, row.uid)[:8]} says {_verdict(row)}{reason}"


def _quoted(title: str, messages: Messages) -> Iterator[str]:
    yield ""
    yield f"**{title}**"
    yield ""
    for message in messages:
        yield from (f"> {line}" for line in f"{message.role}: {message.content}".splitlines())


def _letter(place: int) -> str:
    return chr(ord("A") + place % 26)


def _verdict(row: Any) -> str:
    if row.verdict == "both_bad":
        return "both are bad"
    if row.ranking is not None:
        return " ".join(f"{_letter(place)}={rank}" for place, rank in enumerate(row.ranking))
    if row.verdict == "thumb":
        return "good" if row.outcome > 0 else "bad"
    if not row.outcome:
        return "a tie"
    better = _letter(0) if row.outcome < 0 else _letter(1)
    return f"{better} is better by {abs(row.outcome)} of 3"
