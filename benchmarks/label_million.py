"""A store with a million judgments, as a team's work of weeks leaves it: gold and repeated items among the others,
random ids, times that run up to now."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from sqlalchemy import Connection, insert, text, update

from kedge.data.examples import Message
from kedge.label import tables
from kedge.label.database import Store
from kedge.label.migrations.versions.r0004_docket import fill as keep
from kedge.label.projects import Project
from kedge.label.texts import encode_messages

PEOPLE = 200
_FIRST_PERSON = 1000
"""Whoever is added later has a number below it, which the databases count by themselves."""
_BATCH = 50_000
_EACH_ITEM = 3
_PROMPTS = 50_000
_GOLD_ITEMS = 500
_DAY_MS = 24 * 3600 * 1000
_DAYS = 30


@dataclass(frozen=True, slots=True)
class _Event:
    """One judgment: its number, its item, who gave it, and what it repeats."""

    number: int
    item: int
    person: int
    is_gold: bool = False
    repeats: int | None = None


def fill(store: Store, project: Project, judgments: int, *, chance: float = 0.25) -> int:
    """Items and judgments in bulk, without their chain: only reading them is measured. `chance` is the share of labels
    that have nothing to do with the item. Returns how many are labels, gold and repeated items apart."""
    events = list(_events(judgments))
    _put_texts(store)
    person = {"role": "annotator", "languages": [], "takes_harm": False, "at": 0}
    people = [{"id": number, "uid": str(number), "email": f"p{number}@example.org", **person} for number in _people()]
    _bulk(store, tables.person, iter(people))
    members = {"project": project.id, "quiz_tries": 0, "gold_seen": 0, "gold_right": 0, "at": 0}
    _bulk(store, tables.member, ({"person": number, **members} for number in _people()))
    _bulk(store, tables.item, _items(project, events))
    numbers = sorted({event.item for event in events})
    _bulk(store, tables.answer, (_answer(number, place) for number in numbers for place in (0, 1)))
    golds = sorted({event.item for event in events if event.is_gold})
    _bulk(store, tables.gold, ({"item": number, "expected": -2, "tolerance": 1} for number in golds))
    _bulk(store, tables.assignment, (_assignment(project, event) for event in events))
    now = store.now()
    begin = now - _DAYS * _DAY_MS
    _bulk(
        store,
        tables.judgment,
        (_judgment(project, event, begin + (now - begin) * event.number // judgments, chance) for event in events),
    )
    head = update(tables.chain).where(tables.chain.c.name == "judgment").values(seq=judgments)
    store.write(lambda connection: connection.execute(head))
    store.write(keep)
    if not store.is_sqlite:
        # PostgreSQL does so by itself as tables grow, but not yet after so much at once.
        store.write(lambda connection: connection.execute(text("ANALYZE")))
    return sum(not event.is_gold and event.repeats is None for event in events)


def _events(judgments: int) -> Iterator[_Event]:
    """8 % of the judgments are on gold, 3 % on an item that the person is asked again; of the others every item has
    three, by three people."""
    labels = golds = copies = 0
    first_copy = 1 + _GOLD_ITEMS + judgments  # numbers that no other item has
    for number in range(1, judgments + 1):
        if number % 25 in (3, 17) and golds < _GOLD_ITEMS * PEOPLE:
            yield _Event(number, 1 + golds // PEOPLE, _FIRST_PERSON + golds % PEOPLE, is_gold=True)
            golds += 1
        elif number % 33 == 5 and labels > 3000:
            item, person = _label(labels - 3000 + labels % 3)
            yield _Event(number, first_copy + copies, person, repeats=item)
            copies += 1
        else:
            yield _Event(number, *_label(labels))
            labels += 1


def _label(number: int) -> tuple[int, int]:
    """The item of a label and its person."""
    item = number // _EACH_ITEM
    return 1 + _GOLD_ITEMS + item, _FIRST_PERSON + (number * 7 + item) % PEOPLE


def _people() -> range:
    return range(_FIRST_PERSON, _FIRST_PERSON + PEOPLE)


def _put_texts(store: Store) -> None:
    answers = [encode_messages((Message("assistant", f"answer {place}"),)) for place in (0, 1)]
    bodies = dict([*answers, *(_prompt(number) for number in range(_PROMPTS))])
    _bulk(store, tables.body, ({"hash": digest, "body": encoded} for digest, encoded in bodies.items()))


def _prompt(number: int) -> tuple[str, str]:
    return encode_messages((Message("user", f"question {number}"),))


def _items(project: Project, events: Sequence[_Event]) -> Iterator[dict[str, Any]]:
    prompts = [_prompt(number)[0] for number in range(_PROMPTS)]
    rest = {"project": project.id, "round": 0, "kind": "pair", "words": 120, "priority": 0.0}
    flags = {"is_heldout": False, "is_harmful": False}
    kinds = {event.item: event for event in events}
    for number, event in sorted(kinds.items(), key=lambda entry: (entry[1].repeats is not None, entry[0])):
        wanted = 0 if event.is_gold or event.repeats is not None else _EACH_ITEM
        yield {
            "id": number, "key": _digest("item", number), "prompt": prompts[(event.repeats or number) % _PROMPTS],
            "wanted": wanted, "have": wanted, "is_gold": event.is_gold, "repeats": event.repeats, **rest, **flags,
        }  # fmt: skip


def _answer(item: int, place: int) -> dict[str, Any]:
    digest, _ = encode_messages((Message("assistant", f"answer {place}"),))
    return {"item": item, "place": place, "text": digest, "model": None, "seed": None, "scores": None}


def _assignment(project: Project, event: _Event) -> dict[str, Any]:
    is_right = int(_digest("gold", event.number)[0] != "0") if event.is_gold else None
    return {
        "id": _digest("assignment", event.number)[:32], "project": project.id, "item": event.item,
        "person": event.person, "guideline": project.guideline, "order": [event.number % 2, 1 - event.number % 2],
        "state": "done", "leased_until": 0, "seconds": 20.0, "is_right": is_right,
    }  # fmt: skip


def _judgment(project: Project, event: _Event, at: int, chance: float) -> dict[str, Any]:
    return {
        "seq": event.number, "assignment": _digest("assignment", event.number)[:32], "verdict": "step",
        "outcome": _outcome(event, chance), "seconds": 20.0, "idle_seconds": 0.0, "guideline": project.guideline,
        "at": at, "hash": "0",
    }  # fmt: skip


def _outcome(event: _Event, chance: float) -> int:
    """A step that depends on the item, and in a share of the cases on chance."""
    own, item = _digest("label", event.number), _digest("truth", event.repeats or event.item)
    return int(own if int(own[:8], 16) < chance * 2**32 else item, 16) % 7 - 3


def _digest(what: str, number: int) -> str:
    return hashlib.sha256(f"{what} {number}".encode()).hexdigest()


def _bulk(store: Store, table: Any, rows: Iterator[dict[str, Any]]) -> None:
    def put(connection: Connection, batch: Sequence[dict[str, Any]]) -> None:
        connection.execute(insert(table), batch)

    while batch := list(islice(rows, _BATCH)):
        store.write(lambda connection, batch=batch: put(connection, batch))
