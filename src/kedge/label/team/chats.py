"""Live chats: a person talks, two hidden models answer (or one), the person judges, and goes on with the better answer.

Each judgment is an item with a label like any other, so that exports have it. One chat of a person is open at a time:
no number of it ever leaves the server. Which models answered is told when the chat has ended, and not before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from kedge.core.errors import DataError
from kedge.data.examples import Message, Messages
from kedge.label import tables
from kedge.label.accounts import Person
from kedge.label.audit import note
from kedge.label.database import Store
from kedge.label.incoming import Draft, DraftAnswer
from kedge.label.items import add_items, key_of
from kedge.label.judging import judge
from kedge.label.projects import Project
from kedge.label.questions import Decision
from kedge.label.texts import put_messages, read_texts
from kedge.label.work import lease

MOST_TURNS = 50
_MOST_CHARACTERS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """An answer that waits for a judgment."""

    turn: int
    text: str
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation as it went on, with the answers to the last message where they are still to be judged."""

    id: int
    models: tuple[str, ...]
    """Never shown before the end."""
    messages: Messages
    waiting: tuple[Answered, ...]
    """In the order in which they are shown."""
    judged: int
    ended: bool


def open_chat(store: Store, project: Project, person: Person) -> Chat | None:
    """The last chat of a person; None where there is none."""
    return store.read(lambda connection: _read(connection, project, person))


def _read(connection: Connection, project: Project, person: Person) -> Chat | None:
    table, turn = tables.chat, tables.turn
    row = connection.execute(
        select(table)
        .where(table.c.project == project.id, table.c.person == person.id)
        .order_by(table.c.id.desc())
        .limit(1)
    ).first()
    if row is None:
        return None
    turns = connection.execute(select(turn).where(turn.c.chat == row.id).order_by(turn.c.number, turn.c.id)).all()
    state: Mapping[str, Any] = row.models
    chosen: Sequence[str] = state["chosen"]
    texts = read_texts(connection, [*(entry.text for entry in turns), *chosen])
    messages: list[Message] = []
    for number, picked in enumerate(chosen):
        messages += [*_said(turns, texts, number), Message("assistant", texts[picked][0].content)]
    answers = [entry for entry in turns if entry.number == len(chosen) and entry.role == "assistant"]
    if answers:
        messages += _said(turns, texts, len(chosen))
    waiting = [Answered(turn=entry.id, text=texts[entry.text][0].content, model=entry.model) for entry in answers]
    return Chat(
        id=row.id,
        models=tuple(state["names"]),
        messages=tuple(messages),
        waiting=tuple(waiting),
        judged=len(chosen),
        ended=bool(state["ended"]),
    )


def _said(turns: Sequence[Row[Any]], texts: Mapping[str, Messages], number: int) -> list[Message]:
    return [
        Message("user", texts[entry.text][0].content)
        for entry in turns
        if entry.number == number and entry.role == "user"
    ]


def new_chat(store: Store, project: Project, person: Person, models: Sequence[str]) -> Chat:
    """Begin a chat with these models; the one before is over."""

    def work(connection: Connection) -> Chat:
        state = {"names": list(models), "chosen": [], "ended": False}
        values = {"project": project.id, "person": person.id, "models": state, "at": store.now()}
        connection.execute(insert(tables.chat).values(**values))
        note(store, connection, "chat.new", {"project": project.name}, who=person.id)
        chat = _read(connection, project, person)
        assert chat is not None
        return chat

    return store.write(work)


def check_message(chat: Chat, text: str) -> str:
    """The text, or why it cannot be said now."""
    if chat.ended or chat.judged >= MOST_TURNS:
        raise DataError("this chat is over; begin a new one")
    if chat.waiting:
        raise DataError("judge the answers first")
    if not text.strip() or len(text) > _MOST_CHARACTERS:
        raise DataError(f"a message has 1 to {_MOST_CHARACTERS:,} characters")
    return text


def add_turn(store: Store, chat: Chat, text: str, answers: Sequence[tuple[str, str]]) -> None:
    """Keep a message with the answers of models, each with its name, in an order that is drawn."""
    shuffled = list(answers)
    store.randomness.shuffle(shuffled)

    def work(connection: Connection) -> None:
        rows = [("user", text, None), *(("assistant", answer, model) for model, answer in shuffled)]
        for role, content, model in rows:
            digest = put_messages(connection, (Message("user" if role == "user" else "assistant", content),))
            values = {"chat": chat.id, "number": chat.judged, "role": role, "text": digest, "model": model}
            connection.execute(insert(tables.turn).values(**values, at=store.now()))

    store.write(work)


def judge_turn(store: Store, project: Project, person: Person, chat: Chat, decision: Decision) -> None:
    """Keep a judgment on the answers that wait as a label; the chat goes on with the better one or the edit."""
    if not chat.waiting or chat.ended:
        raise DataError("there is nothing to judge")
    draft = Draft(
        prompt=chat.messages,
        answers=tuple(
            DraftAnswer(text=(Message("assistant", answer.text),), model=answer.model) for answer in chat.waiting
        ),
        origin="chat",
    )
    if len({answer.text for answer in chat.waiting}) == len(chat.waiting):
        add_items(store, project, [draft], origin="chat")
        assignment = store.write(lambda connection: _assigned(store, connection, project, person, draft))
        if assignment is not None:
            judge(store, project, person, assignment, decision, corrects=True)
    better = 1 if len(chat.waiting) > 1 and (decision.outcome or 0) > 0 else 0
    store.write(lambda connection: _go_on(store, connection, person, chat, chat.waiting[better], decision))


def _assigned(store: Store, connection: Connection, project: Project, person: Person, draft: Draft) -> str | None:
    """The assignment of an item to who has just seen it; None where they had the same one before."""
    item, table = tables.item, tables.assignment
    row = connection.execute(
        select(item.c.id, item.c.is_gold).where(item.c.project == project.id, item.c.key == key_of(draft))
    ).one()
    mine = select(table.c.id, table.c.state).where(table.c.item == row.id, table.c.person == person.id)
    before = connection.execute(mine).first()
    if before is not None:
        return before.id if before.state == "leased" else None
    return lease(store, connection, project, person, row, shown=range(len(draft.answers)))


def _go_on(
    store: Store, connection: Connection, person: Person, chat: Chat, better: Answered, decision: Decision
) -> None:
    digest = put_messages(connection, (Message("assistant", decision.edit or better.text),))
    row = connection.execute(select(tables.chat.c.models).where(tables.chat.c.id == chat.id)).one()
    state = dict(row.models)
    if len(state["chosen"]) != chat.judged:
        return  # the same judgment came twice
    state["chosen"] = [*state["chosen"], digest]
    connection.execute(update(tables.chat).where(tables.chat.c.id == chat.id).values(models=state))
    if len(chat.waiting) == 1:
        values = {"turn": better.turn, "person": person.id, "value": decision.outcome or 0, "reason": decision.reason}
        edit = digest if decision.edit else None
        connection.execute(insert(tables.thumb).values(**values, edit=edit, at=store.now()))


def end_chat(store: Store, chat: Chat) -> None:
    """After a judgment at least; from then on the names are told."""
    if not chat.judged:
        raise DataError("judge an answer first; then the chat can end")

    def work(connection: Connection) -> None:
        row = connection.execute(select(tables.chat.c.models).where(tables.chat.c.id == chat.id)).one()
        state = {**row.models, "ended": True}
        connection.execute(update(tables.chat).where(tables.chat.c.id == chat.id).values(models=state))

    store.write(work)


def votes_by_model(store: Store, chat: Chat) -> list[tuple[str, int]]:
    """How often the answers of each model were gone on with, once a chat has ended."""
    turn = tables.turn

    def work(connection: Connection) -> list[tuple[str, int]]:
        row = connection.execute(select(tables.chat.c.models).where(tables.chat.c.id == chat.id)).one()
        rows = connection.execute(select(turn).where(turn.c.chat == chat.id, turn.c.role == "assistant")).all()
        picked = list(enumerate(row.models["chosen"]))
        return [
            (name, sum((entry.number, entry.text) in picked for entry in rows if entry.model == name))
            for name in row.models["names"]
        ]

    return store.read(work)
