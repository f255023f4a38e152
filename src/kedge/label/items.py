"""Items: a prompt with the answers that people are asked about. The same one again is not added twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from sqlalchemy import Connection, insert, select

from kedge.core.errors import DataError
from kedge.core.files import hash_json
from kedge.data.examples import Messages
from kedge.label import tables
from kedge.label.audit import note
from kedge.label.database import Store
from kedge.label.incoming import Draft, Gold
from kedge.label.projects import Project
from kedge.label.questions import ItemKind
from kedge.label.texts import encode_messages, put_texts

_BATCH = 500
_KINDS: Mapping[int, ItemKind] = {0: "write", 1: "thumb", 2: "pair"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """How many items were added, and how many were there already."""

    items: int
    known: int


def kind_of(draft: Draft) -> ItemKind:
    """What a number of answers is asked: none to write one, one for a thumb, two to compare, more to rank."""
    return _KINDS.get(len(draft.answers), "rank")


def key_of(draft: Draft) -> str:
    """The hash of an item. Which side an answer stands on is drawn for each person: the same answers in another order
    are the same item."""
    prompt, *answers = (encode_messages(text)[0] for text in _texts(draft))
    return hash_json([prompt, sorted(answers), draft.round, draft.is_heldout, draft.gold is not None])


def add_items(store: Store, project: Project, drafts: Iterable[Draft], *, origin: str = "") -> Added:
    """Add items, all or none; each draft must fit the questions of the project."""

    def work(connection: Connection) -> Added:
        added = known = 0
        for batch in _batches(drafts):
            new = _add_batch(connection, project, batch)
            added, known = added + new, known + len(batch) - new
        note(store, connection, "items.add", {"project": project.name, "items": added, "known": known, "from": origin})
        return Added(items=added, known=known)

    return store.write(work)


def _batches(drafts: Iterable[Draft]) -> Iterator[list[Draft]]:
    rest = iter(drafts)
    while batch := list(islice(rest, _BATCH)):
        yield batch


def _add_batch(connection: Connection, project: Project, drafts: Sequence[Draft]) -> int:
    bodies: dict[str, str] = {}
    rows: dict[str, tuple[dict[str, Any], list[dict[str, Any]], Gold | None]] = {}
    for draft in drafts:
        kind = kind_of(draft)
        if kind not in project.questions:
            asked = ", ".join(name for name in project.questions)
            raise DataError(
                f"{draft.origin or 'item'}: {len(draft.answers)} answers are asked as '{kind}', and project "
                f"'{project.name}' asks {asked}; make a project with --questions {kind}"
            )
        item, answers = _row(project, draft, kind, bodies)
        rows.setdefault(item["key"], (item, answers, draft.gold))
    table = tables.item
    there = connection.scalars(
        select(table.c.key).where(table.c.project == project.id, table.c.key.in_(list(rows)))
    ).all()
    for key in there:
        del rows[key]
    if rows:
        put_texts(connection, bodies)
        _insert(connection, list(rows.values()))
    return len(rows)


def _row(
    project: Project, draft: Draft, kind: ItemKind, bodies: dict[str, str]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    def put(messages: Messages) -> str:
        digest, encoded = encode_messages(messages)
        bodies[digest] = encoded
        return digest

    prompt = put(draft.prompt)
    answers = [
        {
            "place": place,
            "text": put(answer.text),
            "model": answer.model,
            "seed": answer.seed,
            "scores": dict(answer.scores) if answer.scores else None,
        }
        for place, answer in enumerate(draft.answers)
    ]
    key = key_of(draft)
    item = {
        "project": project.id,
        "key": key,
        "round": draft.round,
        "kind": kind,
        "prompt": prompt,
        "wanted": 0 if draft.gold is not None else _wanted(project, key),
        "have": 0,
        "priority": float(draft.priority),
        "propensity": draft.propensity,
        "is_gold": draft.gold is not None,
        "is_heldout": draft.is_heldout,
        "is_harmful": draft.is_harmful,
        "language": draft.language,
        "origin": draft.origin,
        "words": sum(len(message.content.split()) for text in _texts(draft) for message in text),
    }
    return item, answers


def _texts(draft: Draft) -> list[Messages]:
    return [draft.prompt, *(answer.text for answer in draft.answers)]


def _wanted(project: Project, key: str) -> int:
    """How many people are asked: the share of overlap is chosen by the item's hash, the same in every store."""
    settings = project.settings
    is_shared = int(key[:8], 16) / 2**32 < settings.overlap_share
    return max(settings.wanted, settings.overlap_wanted) if is_shared else settings.wanted


def _insert(connection: Connection, rows: Sequence[tuple[dict[str, Any], list[dict[str, Any]], Gold | None]]) -> None:
    statement = insert(tables.item).returning(tables.item.c.id, sort_by_parameter_order=True)
    numbers = connection.execute(statement, [item for item, _, _ in rows]).scalars().all()
    answers = [
        {"item": number, **answer} for number, (_, group, _) in zip(numbers, rows, strict=True) for answer in group
    ]
    if answers:
        connection.execute(insert(tables.answer), answers)
    golds = [
        {
            "item": number,
            "expected": gold.expected if isinstance(gold.expected, int) else list(gold.expected),
            "tolerance": gold.tolerance,
            "explanation": gold.explanation,
        }
        for number, (_, _, gold) in zip(numbers, rows, strict=True)
        if gold is not None
    ]
    if golds:
        connection.execute(insert(tables.gold), golds)
